from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptd.agent.copy.numa import home_node
from ckptd.shared.system.numa import UNKNOWN
from tests.shared.system.test_numa import write

CUDA = torch.device("cuda", 3)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})


def device(monkeypatch: pytest.MonkeyPatch, **properties: int) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(**properties) if device.index == 3 else None,
    )


@pytest.mark.usefixtures("here")
def test_without_an_accelerator_the_node_is_that_of_the_cpus(tmp_path: Path) -> None:
    two = write(tmp_path / "two", node0="0-3", node1="4-7")
    assert home_node(None, two, tmp_path) == 1
    assert home_node(torch.device("xpu", 0), two, tmp_path) == 1
    assert home_node(None, write(tmp_path / "one", node0="0-7"), tmp_path) == UNKNOWN
    assert home_node(None, tmp_path / "none", tmp_path) == UNKNOWN


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("text", "expected"), [("0\n", 0), ("-1\n", 1), ("", 1), (None, 1)])
def test_the_node_is_that_of_the_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int
) -> None:
    device(monkeypatch, pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)
    place = tmp_path / "0000:dc:01.0"
    place.mkdir()
    if text is not None:
        (place / "numa_node").write_text(text)
    assert home_node(CUDA, write(tmp_path / "two", node0="0-3", node1="4-7"), tmp_path) == expected


@pytest.mark.usefixtures("here")
def test_without_a_known_address_of_the_accelerator_the_node_is_that_of_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(monkeypatch, name=1)
    assert home_node(CUDA, write(tmp_path, node0="0-3", node1="4-7"), tmp_path) == 1
