"""Tests whether a run counts as alive, given looks at its heartbeats at any times.

There is no clock and no storage.
"""

from __future__ import annotations

import pytest

from ckptd.daemon.job.sightings import (
    DEAD_SECONDS,
    Admit,
    Newcomer,
    Refuse,
    Sightings,
    Verdict,
    WatchOn,
)
from ckptd.shared.formats.heartbeat import Heartbeat
from tests.support.cases import each_case

BOOT = "0" * 32
HERE = Newcomer("", "here", BOOT)
START = 1000.0


def beat(
    number: int, attempt: int = 1, *, host: str = "there", boot: str = BOOT, run: str = ""
) -> bytes:
    return Heartbeat(
        job="gpt", attempt=attempt, host=host, boot=boot, run=run, pid=7, beat=f"{number:032x}"
    ).encode()


def looks(
    *found: dict[int, bytes] | None,
    newcomer: Newcomer = HERE,
    wait: float = 0.0,
    apart: float = 1.0,
) -> list[Verdict]:
    """Return the verdict of each look, given what each of them finds.

    None finds the same as the look before.
    """
    sightings, verdicts, last = (
        Sightings("gpt", newcomer, START + wait),
        list[Verdict](),
        dict[int, bytes](),
    )
    for number, each in enumerate(found):
        last = last if each is None else each
        verdicts.append(sightings.decide(last, START + number * apart))
    return verdicts


def test_without_a_heartbeat_the_run_begins_at_once() -> None:
    assert looks({}) == [Admit([])]


def test_a_heartbeat_that_changes_is_alive() -> None:
    *before, last = looks({1: beat(1)}, None, None, {1: beat(2)})
    assert before == [WatchOn()] * 3
    assert isinstance(last, Refuse)
    assert last.heartbeat is not None
    assert (last.attempt, last.heartbeat.who) == (1, "process 7 on there")


def test_a_heartbeat_that_does_not_change_is_dead_after_a_time_of_the_watcher() -> None:
    assert looks({1: beat(1)}, *[None] * 9) == [WatchOn()] * 9 + [Admit([1])]
    assert looks({1: beat(1)}, None, apart=DEAD_SECONDS) == [WatchOn(), Admit([1])]
    assert looks({1: beat(1)}, None, apart=DEAD_SECONDS - 0.01) == [WatchOn(), WatchOn()]


def test_a_heartbeat_that_was_alive_is_waited_for_until_the_deadline() -> None:
    verdicts = looks({1: beat(1)}, {1: beat(2)}, None, None, {1: beat(3)}, None, wait=5.0)
    assert verdicts[:5] == [WatchOn()] * 5
    assert isinstance(verdicts[5], Refuse)


@pytest.mark.parametrize("end", [{}, {1: beat(2)}])
def test_a_run_that_ends_or_dies_before_the_deadline_is_not_in_the_way(
    end: dict[int, bytes],
) -> None:
    verdicts = looks({1: beat(1)}, {1: beat(2)}, *[end] * 10, wait=10.0)
    assert verdicts[2 if not end else 10] == Admit([] if not end else [1])
    assert verdicts[1:2] == [WatchOn()]


def test_a_heartbeat_that_comes_back_after_it_was_dead_is_alive() -> None:
    assert isinstance(
        looks({1: beat(1), 2: beat(1, 2)}, {1: beat(1), 2: beat(2, 2)}, wait=0.0)[-1], Refuse
    )
    found = [{1: beat(1), 2: beat(9 * number, 2)} for number in range(11)]
    verdicts = looks(*found, {1: beat(2), 2: beat(90, 2)}, wait=11.0)
    assert isinstance(verdicts[-1], Refuse)
    assert verdicts[-1].attempt == 2, "the newest run that is alive is named"


def test_bytes_that_cannot_be_decoded_count_by_their_changes() -> None:
    assert looks({1: b"?"}, {1: b"!"})[-1] == Refuse(1, None)
    assert looks({1: b"?"}, *[None] * 9)[-1] == Admit([1])
    assert looks({1: beat(1, attempt=2)}, {1: beat(2, attempt=2)})[-1] == Refuse(1, None), (
        "it is that of another attempt"
    )


# -- which heartbeats count


def admitted(newcomer: Newcomer, *heartbeats: tuple[int, bytes]) -> bool:
    """Return True if the newcomer begins at the first look."""
    (verdict,) = looks(dict(heartbeats), newcomer=newcomer)
    assert isinstance(verdict, (Admit, WatchOn))
    return isinstance(verdict, Admit)


@each_case(
    ("newcomer", "made", "at_once"),
    [
        (HERE, beat(1), False),
        (HERE, beat(1, host="here"), True),
        (HERE, beat(1, host="here", boot="1" * 32), False),
        (Newcomer("gpt-7", "here", BOOT), beat(1, run="gpt-7"), True),
        (Newcomer("gpt-7", "here", BOOT), beat(1, run="gpt-8"), False),
        (Newcomer("gpt-7", "here", BOOT), beat(1), False),
        (Newcomer("", "here", BOOT, known=1, led=True), beat(1), True),
        (Newcomer("", "here", BOOT, known=1, led=False), beat(1), False),
        (Newcomer("", "here", BOOT, known=2, led=False), beat(1), True),
    ],
)
def test_only_the_heartbeat_of_another_run_on_another_node_is_watched(
    newcomer: Newcomer, made: bytes, at_once: bool
) -> None:
    assert admitted(newcomer, (1, made)) is at_once


def test_a_heartbeat_older_than_the_newcomers_own_does_not_count() -> None:
    """The own run took the job over: it comes back after a crash, while the run that it
    has replaced is still alive.
    """
    assert admitted(HERE, (1, beat(1, 1)), (2, beat(1, 2, host="here")))
    assert not admitted(HERE, (1, beat(1, 1, host="here")), (2, beat(1, 2)))


def test_all_heartbeats_that_were_read_are_replaced() -> None:
    assert looks({1: beat(1, 1), 2: beat(1, 2, host="here")}) == [Admit([1, 2])]
