"""Tests page-locking and its fallback, with a CUDA runtime that returns given errors."""

from __future__ import annotations

import logging

import pytest
import torch

from ckptd.agent.copy import lanes


class Runtime:
    """Stands for `torch.cuda.cudart()`."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.asked: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self.asked.append((address, length, flags))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append((address,))
        return self.answer


def runtime(monkeypatch: pytest.MonkeyPatch, answer: int, kind: str = "cuda") -> Runtime:
    made = Runtime(answer)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_pages_are_locked_and_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = runtime(monkeypatch, 0)
    assert lanes.lock_pages(4096, 8192)
    lanes.unlock_pages(4096)
    assert cuda.asked == [(4096, 8192, 1), (4096,)]


def test_an_empty_slot_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = runtime(monkeypatch, 0)
    assert not lanes.lock_pages(4096, 0)
    assert cuda.asked == []


# This is about machines without an accelerator. Where there is one,
# tests/agent/test_accelerator.py runs instead.
@pytest.mark.skipif(
    torch.accelerator.is_available(),
    reason="only without an accelerator; test_accelerator.py is for those that have one",
)
def test_without_an_accelerator_nothing_is_locked_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not lanes.lock_pages(4096, 8192)
    assert caplog.records == []


def test_a_refusal_of_the_driver_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(monkeypatch, 2)
    with caplog.at_level(logging.WARNING):
        assert not lanes.lock_pages(4096, 3_000_000_000)
    assert "slots could not be page-locked (CUDA error 2, 3.0 GB)" in caplog.text


def test_other_accelerators_are_logged_as_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = runtime(monkeypatch, 0, "xpu")
    with caplog.at_level(logging.WARNING):
        assert not lanes.lock_pages(4096, 8192)
    assert "not for xpu" in caplog.text
    assert cuda.asked == []


def test_unlocking_pages_that_are_not_locked_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(monkeypatch, 713)
    lanes.unlock_pages(4096)
    assert caplog.records == []
    runtime(monkeypatch, 1)
    lanes.unlock_pages(4096)
    assert "could not be unlocked: CUDA error 1" in caplog.text
