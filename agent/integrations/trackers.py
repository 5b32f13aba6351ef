"""Logs what each snapshot has cost to an experiment tracker: wandb, MLflow, TensorBoard,
or a function of yours.

Tried with wandb 0.31, mlflow 3.17 and torch.utils.tensorboard of torch 2.13.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from ckptd.agent.agent import Agent, follow
from ckptd.agent.default import default_agent
from ckptd.agent.pending import Pending
from ckptd.shared.errors import InvalidRequest

log = logging.getLogger("ckptd.agent")

LogCall = Callable[[Mapping[str, float], int], object]
"""A function that gets the values of one snapshot, by name, and its step."""


def attach(tracker: Any, *, agent: Agent | None = None, prefix: str = "ckptd/") -> None:
    """Log each snapshot that this process takes from now on to a tracker.

    tracker: a run of wandb, the module `mlflow` with an active run, a SummaryWriter, or
        a function that is called as `tracker(values, step)`.
    agent: the agent whose snapshots are logged. Default: that of this process.
    prefix: stands before each name.

    The values: `step`; `held_seconds`, for which the training stood still; `bytes` of
    this rank's state; `durable_seconds` from the call until the checkpoint was durable;
    `failed`, the number of snapshots that have failed or were skipped so far. They are
    logged once the snapshot is durable, on another thread. Only rank 0 logs, and
    attaching on other ranks does nothing. An error of the tracker is logged, and the
    training goes on.

    Raises InvalidRequest if the tracker is of no known kind, or has no active run.
    """
    report = _report_of(tracker, prefix)
    agent = default_agent("attach") if agent is None else agent
    if agent.rank == 0:
        follow(agent, Follower(report, prefix).begun)


class Follower:
    """The snapshots that are logged to one tracker."""

    def __init__(self, report: LogCall, prefix: str) -> None:
        self._report, self._prefix = report, prefix
        self._failed = 0

    def begun(self, pending: Pending) -> None:
        """Log this snapshot once it is durable or has failed. One that is kept in memory
        only is logged once it is sealed.
        """
        called = time.perf_counter() - pending.stall
        future = pending.future("durable" if pending.persist else "sealed")
        future.add_done_callback(partial(self._over, pending, called))

    def _over(self, pending: Pending, called: float, future: Future[Pending]) -> None:
        values = {
            "step": float(pending.step),
            "held_seconds": pending.stall,
            "bytes": float(pending.nbytes),
        }
        if future.cancelled() or future.exception() is not None:
            self._failed += 1
        elif pending.persist:
            values["durable_seconds"] = time.perf_counter() - called
        values["failed"] = float(self._failed)
        try:
            self._report(
                {f"{self._prefix}{name}": value for name, value in values.items()}, pending.step
            )
        except Exception:
            log.exception("the tracker was not told of the snapshot of step %d", pending.step)


def _report_of(tracker: Any, prefix: str) -> LogCall:
    """Return the function that logs to a tracker. Raises InvalidRequest."""
    if hasattr(tracker, "define_metric") and hasattr(tracker, "log"):
        tracker.define_metric(f"{prefix}step")
        tracker.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
        # Into the row that the training logs next: a row of its own would count as one
        # of the training's steps.
        return lambda values, step: tracker.log(dict(values), commit=False)
    if hasattr(tracker, "log_metrics") and hasattr(tracker, "active_run"):
        run = tracker.active_run()
        if run is None:
            raise InvalidRequest(
                "mlflow has no active run: call mlflow.start_run() before attach()"
            )
        # By its id, because a run of mlflow is active on the thread that began it only.
        return lambda values, step: tracker.log_metrics(
            dict(values), step=step, run_id=run.info.run_id
        )
    if hasattr(tracker, "add_scalar"):
        return partial(_add_scalars, tracker)
    if callable(tracker):
        return tracker  # type: ignore[no-any-return]
    raise InvalidRequest(
        f"a {type(tracker).__name__} is no tracker: pass a run of wandb, the module mlflow, a "
        f"SummaryWriter, or a function that is called as tracker(values, step)"
    )


def _add_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)
