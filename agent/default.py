"""The functions `snapshot`, `recover` and `close`, and the agent of this process that
they use.

The agent is made when it is first needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex

from ckptd.agent.agent import Agent
from ckptd.agent.handover.rank_link import CLOSE_SECONDS
from ckptd.agent.link.arguments import as_step
from ckptd.agent.outcomes import MISTAKES, Outcomes
from ckptd.agent.pending import Pending
from ckptd.agent.recover.options import OnReshape
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared.errors import CkptdError, SnapshotFailed

_default: Agent | None = None
_without_agent = Outcomes()  # of the snapshots for which no agent could be made
_calls = CallLock()


def default_agent(name: str = "Agent") -> Agent:
    """Return the agent of this process. Make one if there is none, or if it is closed.

    `name` is the public call that needs the agent. Raises the errors of `Agent`, and
    Busy if this thread is already making the agent, since the public call then comes
    from a signal handler.
    """
    global _default, _without_agent
    with _calls(name):
        if _default is None or _default.closed:
            _default = Agent()
            _without_agent = Outcomes()
        return _default


def snapshot(
    state: Any,
    *,
    step: SupportsIndex,
    tag: str | None = None,
    persist: bool = True,
    on_busy: str = "wait",
    metrics: Mapping[str, float] | None = None,
    user_content: Any = None,
    rng: bool = True,
    on_error: str | None = None,
    on_failure: Callable[[Pending], object] | None = None,
    unsavable: str = "refuse",
) -> Pending:
    """Copy `state` as it is now into a slot, and return.

    The daemon saves the copy in the background.

    Calls `Agent.snapshot` of this process's agent, which is made if there is none.
    Returns a `Pending`, which reports the progress of the snapshot and any error; a
    failed save never raises, and neither does a missing daemon.

    state: any nesting of dicts, lists and tuples with tensors, modules, optimizers,
        objects with a state_dict, and plain values.
    step: an integer from 0 to 10**18 - 1, higher than the last step of this attempt.
    tag: a name for the checkpoint, which retention then never deletes. Default: the
        checkpoint is named by its step.
    persist: False keeps the snapshot in memory only, unless the process dies or closes,
        or the daemon stops, while it is the newest.
    on_busy: if no slot is free, "wait" up to the daemon's stall budget (10 s by
        default), or "skip" the step at once.
    metrics: numbers by name, stored in the manifest.
    user_content: a value that JSON can express, stored in the manifest.
    rng: also capture the random generators of Python, NumPy (if it is imported), torch
        and the accelerators.
    on_error: "raise" raises an error that the caller must mend, such as a value that
        cannot be saved, or an invalid step, tag or setting. "log" returns it in the
        Pending. Default: "raise" until a snapshot of the attempt is sealed, then "log".
    on_failure: called with the Pending if the snapshot fails or is skipped, now or
        later, on another thread, one call at a time.
    unsavable: "refuse" fails a snapshot with a value that cannot be saved. "skip"
        leaves the value out, and logs its key.

    Raises the same errors as `Agent.snapshot`, and InvalidRequest or InvalidName for an
    invalid setting, as `on_error` says.
    """
    try:
        agent = default_agent("snapshot")
    except CkptdError as error:
        if isinstance(error, MISTAKES) and on_error != "log":
            raise
        failed = Pending(as_step(step), note=partial(_without_agent.note, on_failure=on_failure))
        failed.fail(error)
        return failed
    return agent.snapshot(
        state, step=step, tag=tag, persist=persist, on_busy=on_busy, metrics=metrics,
        user_content=user_content, rng=rng, on_error=on_error, on_failure=on_failure,
        unsavable=unsavable,
    )  # fmt: skip


def recover(
    state: Any,
    *,
    step: int | None = None,
    strict: bool = True,
    keep: Sequence[str] = (),
    on_reshape: OnReshape | None = None,
    same_partition: bool = False,
) -> Recovered | None:
    """Load the newest snapshot that every rank can get into `state`, from memory or
    storage.

    Calls `Agent.recover` of this process's agent, which is made if there is none.
    Returns a `Recovered`, or None if the job has no checkpoint.

    step: recover this step only. Default: the newest.
    strict: False allows keys to be missing in the state or in the checkpoint, and an
        optimizer or scheduler of another class.
    keep: patterns of keys, as for `fnmatch`, whose values stay as they are in `state`,
        like "optim.param_groups.*.lr".
    on_reshape: called as `on_reshape(key, values)` for each `per_rank` value that was
        saved on another number of ranks. It returns this rank's value. Without it,
        recovery raises StructureMismatch.
    same_partition: True says that as many ranks as saved the state recover it, each
        with the same shards, which is faster.

    Raises the errors of `Agent` and of `Agent.recover`.
    """
    agent = default_agent("recover")
    return agent.recover(
        state,
        step=step,
        strict=strict,
        keep=keep,
        on_reshape=on_reshape,
        same_partition=same_partition,
    )


def close(timeout: float = CLOSE_SECONDS) -> None:
    """Make the newest snapshot durable, then free the slots.

    Does nothing if this process has no agent.

    timeout: seconds to wait for the save, 600 by default. Raises the errors of
    `Agent.close`. Raises SnapshotFailed if no agent could be made for any snapshot.
    """
    global _default, _without_agent
    with _calls("close"):
        agent = _default
    if agent is not None:
        try:
            agent.close(timeout)
        finally:
            # Only if it is closed: after Ctrl-C the next `close` must find the agent,
            # and finish.
            if agent.closed and _default is agent:
                _default = None
    elif complaint := _without_agent.complaint():
        _without_agent = Outcomes()
        raise SnapshotFailed(complaint)


def _after_fork() -> None:
    """Replace the lock in a forked child.

    Another thread of the parent may hold it, and no thread here will release it.
    """
    global _calls
    _calls = CallLock()


os.register_at_fork(after_in_child=_after_fork)
