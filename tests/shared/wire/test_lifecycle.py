"""Tests the life cycle of a snapshot: every transition in the table, and every one that
is not.
"""

from __future__ import annotations

import pytest

from ckptd.shared.wire.lifecycle import TRANSITIONS, Event, IllegalStep, SnapshotState, step
from tests.support.cases import each_case

LEGAL = {
    "new": {"GRANT": "filling", "REFUSE": "skipped", "FAIL": "failed"},
    "filling": {"STAGE": "staged", "SEAL": "sealed", "FAIL": "failed"},
    "staged": {"SEAL": "sealed", "FAIL": "failed"},
    "sealed": {"WRITE": "writing", "COMMIT": "durable", "FAIL": "failed", "RELEASE": "released"},
    "writing": {"WROTE": "written", "FAIL": "failed"},
    "written": {"COMMIT": "durable", "FAIL": "failed"},
    "durable": {"RELEASE": "released"},
    "failed": {"WRITE": "writing", "COMMIT": "durable", "RELEASE": "released"},
}


@each_case("state", SnapshotState)
@each_case("event", Event)
def test_every_event_in_every_state_is_legal_or_refused(state: SnapshotState, event: Event) -> None:
    after = LEGAL.get(state.value, {}).get(event.name)
    if after is None:
        with pytest.raises(
            IllegalStep, match=f"not allowed for a snapshot that is {state.value}: {event.value}"
        ):
            step(state, event)
    else:
        assert step(state, event) is SnapshotState(after)


def test_the_table_has_no_other_transition() -> None:
    assert {(s.value, e.name): a.value for (s, e), a in TRANSITIONS.items()} == {
        (s, e): a for s, row in LEGAL.items() for e, a in row.items()
    }


def test_a_commit_is_never_undone() -> None:
    """After durable, only the release of the slots is possible, and after that nothing."""
    assert [
        after for (state, _), after in TRANSITIONS.items() if state is SnapshotState.DURABLE
    ] == [SnapshotState.RELEASED]
    assert not [
        state
        for state, _ in TRANSITIONS
        if state in (SnapshotState.RELEASED, SnapshotState.SKIPPED)
    ]


def test_only_a_sealed_snapshot_can_become_durable() -> None:
    reached, open_ = {SnapshotState.NEW}, [SnapshotState.NEW]
    while open_:
        here = open_.pop()
        for (state, event), after in TRANSITIONS.items():
            if (
                state is here
                and event is not Event.SEAL
                and event is not Event.FAIL
                and after not in reached
            ):
                reached.add(after)
                open_.append(after)
    assert reached == {
        SnapshotState.NEW,
        SnapshotState.FILLING,
        SnapshotState.STAGED,
        SnapshotState.SKIPPED,
    }
