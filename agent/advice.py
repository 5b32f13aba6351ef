"""Warns of calls that succeed and are probably not what the caller wants, such as a
loop that starts at step 0 after a recovery.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

log = logging.getLogger("ckptd.agent")

_DEPTH = 2
"""The number of nested dicts in which the state_dict of an optimizer is looked for."""
_RUNS = 3
"""The number of runs from one snapshot, without a newer one, after which `Advice`
warns.
"""


class Restart(NamedTuple):
    """The snapshot at which a run begins.

    place: the snapshot in words, like "step 79 of attempt 1". last_attempt: the newest
    attempt that has left a snapshot, even a damaged one. older_call: the call of
    `recover` that goes back to an older step, or "" if there is none.
    """

    place: str
    last_attempt: int
    older_call: str


class Advice:
    """The advice that one agent gives. Each warning is logged once.

    silent: True gives none: the state is that of a framework, whose user calls neither
    `snapshot` nor `recover`.
    """

    def __init__(self) -> None:
        self.silent = False
        self._recover_called = False
        self._recovered: int | None = None
        self._last_attempt = 0
        self._told: set[str] = set()

    def recovered(self, step: int | None) -> None:
        """Note a call of `recover`: the step that it has brought back, or None if there
        was no checkpoint.
        """
        self._recover_called, self._recovered = True, step

    def warn_of_repeated_recovery(self, recovered: Restart, attempt: int) -> None:
        """Warn if earlier runs may have begun at the recovered snapshot, and left no
        newer one.

        Warns if there are at least two such runs. attempt: the attempt with which this
        process began. Call this before `recovered`. A recovery within a process that
        has recovered before is no new run, and the attempts that such recoveries begin
        are not counted.
        """
        if self._recover_called or attempt - recovered.last_attempt < _RUNS:
            return
        older = recovered.older_call
        remedy = (
            f"go back to an older one: {older}" if older else "no older step is left to go back to"
        )
        first, last = recovered.last_attempt + 1, attempt - 1
        self._tell(
            f"{recovered.place} is recovered again: attempts {first} "
            f"{'and' if last == first + 1 else 'to'} {last} have left no newer "
            f"snapshot. If they had nothing left to do, all is well; if this snapshot makes each "
            f"run fail, {remedy}"
        )

    def run_again(self, step: int, last: int, job: str, attempt: int) -> None:
        """Say that a loop is run again as the next attempt, and give no other advice
        about its first snapshot.
        """
        self._last_attempt = attempt
        self._tell(
            f"step {step} does not follow step {last}: the loop is run again, and attempt "
            f"{attempt} of job {job!r} begins. Its snapshots count as newer than the earlier ones; "
            f"to continue from the newest of those instead, call recover() before the loop"
        )

    def before_snapshot(self, state: Any, step: int, attempt: int) -> None:
        """Warn at an attempt's first snapshot if it does not continue the job's earlier
        ones, or has state_dicts of optimizers.
        """
        if attempt == self._last_attempt:
            return
        self._last_attempt = attempt
        if not self._recover_called and attempt > 1:
            self._tell(
                f"this is attempt {attempt} of the job, and recover() was not called: the run "
                f"does not continue the earlier ones, and its "
                "snapshots count as newer than theirs"
            )
        if self._recovered is not None and step <= self._recovered:
            self._tell(
                f"step {step} does not come after step {self._recovered}, which was recovered: "
                f"begin the loop at recovered.step + 1"
            )
        for key in _optimizer_state_dicts(state):
            self._tell(
                f"{key} is the state_dict() of an optimizer: pass the optimizer itself, since "
                f"recover() fills what it is given, and the "
                "optimizer would not change"
            )

    def _tell(self, sentence: str) -> None:
        if not self.silent and sentence not in self._told:
            self._told.add(sentence)
            log.warning("%s", sentence)


def _optimizer_state_dicts(state: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yield the keys of state_dicts of optimizers in a state.

    Those of DCP, whose parameters have names, are left out.
    """
    if not isinstance(state, Mapping):
        return
    if state.keys() == {"state", "param_groups"}:
        groups = state["param_groups"]
        if isinstance(groups, list) and all(
            isinstance(group, dict) and _numbers(group.get("params")) for group in groups
        ):
            yield ".".join(map(str, path)) or "the state"
    elif len(path) < _DEPTH:
        for key, value in state.items():
            yield from _optimizer_state_dicts(value, (*path, key))


def _numbers(params: Any) -> bool:
    return isinstance(params, list) and all(type(name) is int for name in params)
