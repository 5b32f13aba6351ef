"""Tests which acts the demo plays, and how it judges a recovery, without training."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples import demo
from examples.runs import DemoFailed, Kill, Run, leaves


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the acts that the demo has played, none of which does anything."""
    found: list[int] = []

    def play(number: int) -> Callable[[demo.Demo], None]:
        return lambda _: found.append(number)

    for number in demo.ACTS:
        monkeypatch.setitem(demo.ACTS, number, ("", play(number)))
    monkeypatch.setattr(demo, "refusal", lambda: "")
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    return found


@pytest.mark.parametrize(
    ("acts", "shown"),
    [(None, [1, 2, 3, 4]), ("1", [1]), ("3 1", [1, 3]), ("2,2, 4", [2, 4])],
)
def test_the_demo_shows_the_acts_that_are_named(
    acts: str | None,
    shown: list[int],
    played: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("ACTS", raising=False)
    if acts is not None:
        monkeypatch.setenv("ACTS", acts)
    demo.main()
    assert played == shown
    printed = capsys.readouterr().out
    assert re.findall(r"^Act (\d)", printed, re.MULTILINE) == [str(act) for act in shown]
    assert printed.endswith("Everything came back as it was.\n")


@pytest.mark.parametrize(
    ("acts", "problem"),
    [("", "is empty"), (" ", "is empty"), ("5", "names '5'"), ("1 all", "names 'all'")],
)
def test_the_demo_says_what_is_wrong_with_acts(
    acts: str, problem: str, played: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTS", acts)
    with pytest.raises(SystemExit) as exit_:
        demo.main()
    assert exit_.value.code == (
        f"ACTS {problem}, but the acts are 1, 2, 3, 4: name some of them, as in ACTS=1 or "
        f'ACTS="1 3", or leave ACTS out to run all.'
    )
    assert played == []


def test_the_demo_without_nodes_leaves_out_the_acts_that_need_them(
    played: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "refusal", lambda: "there is no unshare")
    monkeypatch.setenv("ACTS", "2 3")
    demo.main()
    assert played == [2]
    assert "Acts 3 and 4 are left out: there is no unshare." in capsys.readouterr().out
    monkeypatch.setenv("ACTS", "3 4")
    with pytest.raises(SystemExit, match="no act is left"):
        demo.main()
    assert played == [2]


def recovery(place: Path, *printed: str) -> Kill:
    """Return the recovery that the demo finds in what two ranks have printed. It should be
    that of step 8, from memory.
    """
    run = Run(place, "run", 12, "", ranks=2)
    run.log.write_text("".join(f"recovered step {each} in 0.10 s on rank 0\n" for each in printed))
    return run.recovery("rank 0 of 2", 10, "memory", 8)


def test_the_demo_shows_a_recovery(tmp_path: Path) -> None:
    found = recovery(tmp_path, "8 of attempt 1 from memory", "8 of attempt 1 from memory")
    assert found.row() == ("rank 0 of 2", "10", "8", "memory", "0.10 s", "1")


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        (("8 of attempt 1 from memory", "4 of attempt 1 from memory"), "different things"),
        (("4 of attempt 1 from memory", "4 of attempt 1 from memory"), "step 8 or a newer one"),
        (("8 of attempt 1 from storage", "8 of attempt 1 from storage"), "have come from memory"),
    ],
)
def test_the_demo_fails_if_a_recovery_is_not_as_promised(
    printed: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(DemoFailed, match=problem):
        recovery(tmp_path, *printed)


def test_the_demo_compares_every_tensor_and_value_by_its_bits() -> None:
    state = {"a": [torch.tensor([1.0, -0.0]), {"lr": 0.1}], 7: None}
    assert leaves(state) == {
        ".a.0": bytes.fromhex("0000803f00000080"), ".a.1.lr": b"0.1", ".7": b"None",
    }  # fmt: skip
