"""Tests what a script is told that makes a call on one rank only: one warning soon, and
an error that says the same.

The first functions run on ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptd.agent import Agent, CkptdError
from ckptd.agent.link import attempt, rounds
from ckptd.agent.recover import recovery
from tests.support.daemons import Daemon, Home, running, warn_soon
from tests.support.ranks import HERE, Ranks


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.warned = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if "not called" in record.getMessage():
            self.warned.set()


def told(call: Callable[[], object]) -> tuple[str, list[str]]:
    """Make the call. Return its error, and the warnings that came before it."""
    (
        vars(rounds)["WARN_SECONDS"],
        vars(attempt)["BEGIN_SECONDS"],
        vars(recovery)["RANKS_SECONDS"],
    ) = 0.3, 2.0, 2.0
    kept = Kept()
    logging.getLogger("ckptd.agent").addHandler(kept)
    try:
        call()
    except CkptdError as error:
        return str(error), kept.texts
    finally:
        logging.getLogger("ckptd.agent").removeHandler(kept)
    return "", kept.texts


def make(socket: Path) -> tuple[str, list[str]]:
    def call() -> None:
        HERE["agent"] = Agent("one", socket=socket)

    return told(call)


def take(step: int) -> tuple[str, list[str]]:
    def call() -> None:
        pending = HERE["agent"].snapshot({"w": torch.ones(3)}, step=step)
        pending.wait("durable", timeout=60)

    return told(call)


def restore() -> tuple[str, list[str]]:
    return told(lambda: HERE["agent"].recover({"w": torch.ones(3)}))


def begin_step(step: int) -> str:
    """Call `snapshot`, and do not wait for the save. Return the state of the snapshot."""
    if "kept" not in HERE:
        HERE["kept"] = Kept()
        logging.getLogger("ckptd.agent").addHandler(HERE["kept"])
    HERE["pending"] = HERE["agent"].snapshot({"w": torch.ones(3)}, step=step)
    return str(HERE["pending"].state)


def wait_for_warning() -> tuple[str, list[str]]:
    """Wait for the warning. Return the state of the snapshot, and all warnings."""
    assert HERE["kept"].warned.wait(60)
    return HERE["pending"].state, HERE["kept"].texts


def end_step() -> list[str]:
    """Wait until the snapshot is durable. Return all warnings, which end here."""
    HERE["pending"].wait("durable", timeout=60)
    kept = HERE.pop("kept")
    logging.getLogger("ckptd.agent").removeHandler(kept)
    return list(kept.texts)


def closed() -> str:
    """Close the agent.

    Return what it says, which begins differently on a rank that has tried a snapshot.
    """
    try:
        HERE["agent"].close()
    except CkptdError as error:
        return str(error)
    return f"rank {dist.get_rank()}"


@pytest.fixture(scope="module")
def ranks() -> Any:
    with Ranks(2) as made:
        yield made


@pytest.fixture
def hasty(processes: None, place: Home) -> Iterator[Daemon]:
    """A daemon that tells its ranks soon which ranks have not come to a step."""
    with running(place, forked=warn_soon) as started:
        yield started


def said(found: list[tuple[str, list[str]]]) -> tuple[str, str]:
    """Return the error and the one warning of the rank that has called."""
    ((error, texts),) = found
    (warning,) = [text for text in texts if "not called" in text]
    return error, warning


@pytest.mark.parametrize("alone", [0, 1])
def test_an_agent_on_one_rank_only(ranks: Ranks, daemon: Daemon, alone: int) -> None:
    error, warning = said(ranks.call(make, daemon.home.socket, only=[alone]))
    call = "Agent(), snapshot() or recover()"
    assert warning.startswith(
        f"rank {1 - alone} has not called {call} yet, and rank {alone} has waited for 0.3 s: "
        f"every rank must call it"
    )
    assert ("Is it called on rank 0 only?" in warning) == (alone == 0)
    assert f"every rank must call {call}, not only some of them" in error


def test_a_snapshot_and_a_recovery_on_rank_0_only(ranks: Ranks, hasty: Daemon) -> None:
    """The ranks plan, so that rank 0 notices by itself.

    What its daemon says adds no second warning.
    """
    # On a busy machine, the second rank may be late enough for a warning.
    assert [error for error, _ in ranks.call(make, hasty.home.socket)] == ["", ""]
    error, warning = said(ranks.call(restore, only=[0]))
    assert warning.startswith(
        "rank 1 has not called recover() yet, and rank 0 has waited for 0.3 s: every rank must "
        "call it"
    )
    assert "rank 1 sent nothing within " in error
    assert "recover()" in error
    error, warning = said(ranks.call(take, 5, only=[0]))
    assert warning.startswith(
        "rank 1 has not called snapshot(step=5) yet, and rank 0 has waited for 0.3 s: every rank "
        "must call it"
    )
    assert "snapshot(step=5)" in error
    of_rank_0, of_rank_1 = ranks.call(closed)
    assert of_rank_0.startswith("nothing of this run was saved: its only snapshot failed")
    assert of_rank_1 == "rank 1"


@pytest.mark.parametrize("alone", [0, 1])
def test_a_snapshot_on_one_rank_only_while_the_ranks_keep_their_plan(
    ranks: Ranks, hasty: Daemon, alone: int
) -> None:
    """The ranks exchange nothing, and only their daemon knows that one of them has not
    called.
    """
    ranks.call(make, hasty.home.socket)
    assert [error for error, _ in ranks.call(take, 1)] == ["", ""]
    assert ranks.call(begin_step, 2, only=[alone]) == ["sealed"]
    ((state, texts),) = ranks.call(wait_for_warning, only=[alone])
    start, _, rest = texts[0].partition(" s: ")
    assert start.startswith(
        f"rank {1 - alone} has not called snapshot(step=2) yet, and rank {alone} has waited for "
    )
    assert rest == (
        "every rank must call it, because each saves its part and waits for the others."
        + (" Is it called on rank 0 only?" if alone == 0 else "")
    )
    assert (state, len(texts)) == ("sealed", 1)
    ranks.call(begin_step, 2, only=[1 - alone])  # it was only slow
    found = ranks.call(end_step)
    assert (found[alone], found[1 - alone]) == (texts, [])
    ranks.call(closed)
