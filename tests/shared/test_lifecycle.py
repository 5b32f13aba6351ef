"""The life of a snapshot: every step in the table, every step that is not."""

from __future__ import annotations

import pytest

from ckptd.shared.lifecycle import TRANSITIONS, Event, IllegalStep, SnapshotState, step

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


@pytest.mark.parametrize("state", SnapshotState)
@pytest.mark.parametrize("event", Event)
def test_every_event_in_every_state(state: SnapshotState, event: Event) -> None:
    after = LEGAL.get(state.value, {}).get(event.name)
    if after is None:
        with pytest.raises(IllegalStep, match=f"not allowed for a snapshot that is {state.value}: {event.value}"):
            step(state, event)
    else:
        assert step(state, event) is SnapshotState(after)


def test_the_table_has_no_more() -> None:
    assert {(s.value, e.name): a.value for (s, e), a in TRANSITIONS.items()} == {
        (s, e): a for s, row in LEGAL.items() for e, a in row.items()
    }


def test_a_commit_is_never_undone() -> None:
    """From durable there is no way but the release of its slots, and from there none at all."""
    assert [after for (state, _), after in TRANSITIONS.items() if state is SnapshotState.DURABLE] == [SnapshotState.RELEASED]
    assert not [state for state, _ in TRANSITIONS if state in (SnapshotState.RELEASED, SnapshotState.SKIPPED)]


def test_nothing_is_durable_that_was_not_sealed() -> None:
    reached, open_ = {SnapshotState.NEW}, [SnapshotState.NEW]
    while open_:
        here = open_.pop()
        for (state, event), after in TRANSITIONS.items():
            if state is here and event is not Event.SEAL and event is not Event.FAIL and after not in reached:
                reached.add(after)
                open_.append(after)
    assert reached == {SnapshotState.NEW, SnapshotState.FILLING, SnapshotState.STAGED, SnapshotState.SKIPPED}
