"""The life cycle of a snapshot as one table of transitions, which daemon and agent both
follow.

A transition that is not in the table raises IllegalStep and changes nothing. The
daemon's snapshot begins as FILLING, when a slot is granted, and goes on to RELEASED.
The agent's `Pending` begins as NEW and goes no further than DURABLE.
`docs/reference/life-cycles.md` is drawn from this table.
"""

from __future__ import annotations

import enum


class SnapshotState(enum.Enum):
    NEW = "new"
    FILLING = "filling"
    STAGED = "staged"
    SEALED = "sealed"
    WRITING = "writing"
    WRITTEN = "written"
    DURABLE = "durable"
    FAILED = "failed"
    SKIPPED = "skipped"
    RELEASED = "released"


class Event(enum.Enum):
    GRANT = "a slot is granted"
    REFUSE = "no slot within the budget"
    STAGE = "all sources are copied"
    SEAL = "the header says sealed"
    WRITE = "the save begins"
    WROTE = "every part is durable"
    COMMIT = "the manifest is durable"
    FAIL = "an error, or the rank died"
    RELEASE = "the slots are free again"


_S, _E = SnapshotState, Event
TRANSITIONS: dict[tuple[SnapshotState, Event], SnapshotState] = {
    (_S.NEW, _E.GRANT): _S.FILLING,
    (_S.NEW, _E.REFUSE): _S.SKIPPED,
    (_S.NEW, _E.FAIL): _S.FAILED,
    (_S.FILLING, _E.STAGE): _S.STAGED,
    (_S.FILLING, _E.SEAL): _S.SEALED,  # in the daemon, which does not see the staging
    (_S.FILLING, _E.FAIL): _S.FAILED,
    (_S.STAGED, _E.SEAL): _S.SEALED,
    (_S.STAGED, _E.FAIL): _S.FAILED,
    (_S.SEALED, _E.WRITE): _S.WRITING,
    # By the agent, which does not see the save; by the daemon, after a restart.
    (_S.SEALED, _E.COMMIT): _S.DURABLE,
    (_S.SEALED, _E.FAIL): _S.FAILED,
    # A snapshot kept in memory only, once a newer one is sealed.
    (_S.SEALED, _E.RELEASE): _S.RELEASED,
    (_S.WRITING, _E.WROTE): _S.WRITTEN,
    (_S.WRITING, _E.FAIL): _S.FAILED,
    (_S.WRITTEN, _E.COMMIT): _S.DURABLE,
    (_S.WRITTEN, _E.FAIL): _S.FAILED,
    (_S.DURABLE, _E.RELEASE): _S.RELEASED,
    # The copy in memory is kept, and is saved again if no newer one follows.
    (_S.FAILED, _E.WRITE): _S.WRITING,
    (_S.FAILED, _E.COMMIT): _S.DURABLE,
    (_S.FAILED, _E.RELEASE): _S.RELEASED,
}


class IllegalStep(Exception):
    """A transition that is not in the table. It is a bug in ckptd."""


def step(state: SnapshotState, event: Event) -> SnapshotState:
    """Return the state of a snapshot after `event`.

    Raises IllegalStep if the table has no transition for `state` and `event`.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalStep(
            f"not allowed for a snapshot that is {state.value}: {event.value}"
        ) from None
