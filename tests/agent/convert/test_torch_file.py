"""Tests which values a file of torch.save may have. `test_export.py` reads whole files."""

from __future__ import annotations

import argparse
import datetime
import decimal
from collections import Counter, OrderedDict
from fractions import Fraction
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch

from ckptd.agent import Checkpoint
from ckptd.agent.convert import torch_file
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.importing import import_checkpoint
from ckptd.agent.convert.torch_file import check_values, write_file
from ckptd.agent.read.checkpoint import opened_of
from ckptd.shared.errors import IntegrityError, UnsavableValue
from tests.agent.convert.saved import save
from tests.support.cases import each_case


@each_case(
    "value",
    [
        None,
        True,
        3,
        1.5,
        "x",
        b"x",
        [1],
        (1, "a"),
        {"a": 1},
        OrderedDict(a=1),
        Counter("aab"),
        {1, 2},
        1 << 90,
        2j,
    ],
)
def test_plain_values_are_accepted(value: Any) -> None:
    check_values({"x": [value]})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (decimal.Decimal(1), "decimal.Decimal"),
        (slice(1), "builtins.slice"),
        (Path, "builtins.type"),
    ],
)
def test_other_values_are_refused_by_their_names(value: Any, kind: str) -> None:
    with pytest.raises(
        UnsavableValue,
        match=rf"^run\.1\.x: a {kind} cannot be loaded with torch.load\(weights_only=True\)",
    ):
        check_values({"model": {}, "run": [3, {"x": value}]})


def test_a_storage_that_torch_has_not_written_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch_file._places
    monkeypatch.setattr(torch_file, "_places", lambda tree, path: list(right(tree, path))[1:])
    with Checkpoint.open(
        save({"x": torch.ones(2), "y": torch.ones(3)}, tmp_path / "checkpoint")
    ) as checkpoint:
        contents = contents_of(opened_of(checkpoint))
        with pytest.raises(IntegrityError, match="^torch wrote 1 of 2 storages into out$"):
            write_file(tmp_path / "out", contents.tree, contents, lambda length: None)


PLAIN = {
    "namespace": argparse.Namespace(lr=0.1, betas=[0.9, 0.95]),
    "simple": SimpleNamespace(a=1),
    "when": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(1, 2),
    "span": datetime.timedelta(hours=3),
    "decimal": decimal.Decimal("1.50"),
    "fraction": Fraction(1, 3),
    "uuid": UUID(int=7),
    "path": PosixPath("/data/a"),
    "set": frozenset([1, 2]),
    "range": range(2, 9, 3),
    "slice": slice(1, None, 2),
}


@each_case("new_format", [True, False])
def test_plain_data_of_the_standard_library_is_read(new_format: bool, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(3)}, "args": PLAIN}
    source = tmp_path / f"{new_format}.pt"
    torch.save(state, source, _use_new_zipfile_serialization=new_format)
    import_checkpoint(source, tmp_path / f"out-{new_format}")
    found = Checkpoint.open(tmp_path / f"out-{new_format}").load()
    assert found["args"] == PLAIN
    assert found["model"]["w"].tolist() == [0, 1, 2]
    import_checkpoint(source, tmp_path / f"part-{new_format}", only="model")


class Config:
    pass


def test_the_refusal_of_a_class_names_the_way_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "config": Config()}, tmp_path / "a.pt")
    with pytest.raises(UnsavableValue, match="Config; if you trust the file, load it with") as e:
        import_checkpoint(tmp_path / "a.pt", tmp_path / "out", only="w")
    assert "weights_only=False" in str(e.value)
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)  # what the message says
    torch.save({"w": loaded["w"]}, tmp_path / "b.pt")
    import_checkpoint(tmp_path / "b.pt", tmp_path / "out", only="w")
