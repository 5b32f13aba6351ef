"""Ray Train: one call in `train_loop_per_worker` recovers, saves and reports.

from ckptd.integrations.ray import attach

def train_loop_per_worker(config):
    ...
    with attach({"model": model, "optim": optimizer}, every_steps=50) as run:
        for step in run.steps(1000):
            loss = train_step()
            run.report({"loss": loss})

Tried with ray 2.51.1 and 2.60.0. Only public functions of Ray are called.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from types import TracebackType
from typing import Any

import torch.distributed

from ckptd.agent import default
from ckptd.agent.agent import Agent
from ckptd.agent.schedule import Schedule
from ckptd.agent.training_run import Training
from ckptd.integrations.framework import check_version, schedule_of
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.names import tag_directory

log = logging.getLogger("ckptd.agent")

_LOWEST, _BELOW = "2.51", "3"
_KEY = "ckptd"
"""The key of a reference in the metadata of a checkpoint of Ray."""
_attached: list[RayTraining] = []
"""The last run of this worker, if there was one."""


def attach(
    state: Any,
    *,
    every_steps: int | None = None,
    schedule: Schedule | None = None,
    agent: Agent | None = None,
) -> RayTraining:
    """Return the run of a training loop, for a `with` statement in
    `train_loop_per_worker`.

    It is used like the run of `ckptd.training`. Call this on all workers, once the
    model is prepared. Workers that Ray starts again recover the newest snapshot: on the
    same node from memory, otherwise from storage. Without CKPTD_JOB, the job has the
    name of Ray's run, as in `RunConfig(name=...)`.

    state: as for `snapshot`.
    every_steps: a snapshot is due at each step that is a multiple of this number.
    schedule: a `Schedule`, in place of `every_steps`.
    agent: the `Agent` to use. Default: the agent of this process.

    Raises InvalidRequest outside a worker of Ray Train, for a second call in a worker,
    for several workers without a process group, for a version of Ray that was not
    tried, and for an invalid schedule.
    """
    check_version("ray", _LOWEST, _BELOW)
    import ray.train

    chosen = schedule_of(schedule, every_steps, agent)
    try:
        context = ray.train.get_context()
        world_size, name = context.get_world_size(), context.get_experiment_name()
    except (RuntimeError, AttributeError):
        raise InvalidRequest(
            "attach() is called outside a worker of Ray Train: call it in the function that "
            "TorchTrainer gets as train_loop_per_worker"
        ) from None
    if any(not run.ended for run in _attached):
        raise InvalidRequest("ckptd is attached to this worker already: call attach() once")
    if world_size > 1 and not torch.distributed.is_initialized():
        raise InvalidRequest(
            f"this run has {world_size} workers and no process group: use TorchTrainer, which "
            f"begins one, or call torch.distributed.init_process_group() before attach()"
        )
    if chosen.agent is None and not os.environ.get("CKPTD_JOB"):
        os.environ["CKPTD_JOB"] = _job(name)  # the main script of all workers is Ray's
    run = RayTraining(state, chosen)
    _attached[:] = [run]
    return run


def _job(name: str) -> str:
    """Return the name of the job of a run of Ray, with "-" for what the name of a job
    may not contain.
    """
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:128] or "ray"


class RayTraining(Training):
    """The run of a training loop in a worker of Ray Train, made by `attach`.

    ended: True after the `with` statement.
    """

    def __init__(self, state: Any, schedule: Schedule) -> None:
        super().__init__(state, schedule)
        self.ended = False
        self._agent = schedule.agent
        self._reports: list[dict[str, Any]] = []

    def __enter__(self) -> RayTraining:
        """Recover, and compare with the newest snapshot that Ray refers to.

        Raises the errors of `Agent` and `recover`, and InvalidRequest if Ray refers to
        a snapshot while there is nothing to recover.
        """
        super().__enter__()
        try:
            self._compare_with_ray()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Report what is left, make the newest snapshot durable, and close the agent.

        After an error of the loop, the agent stays open: Ray ends this process, the
        daemon saves the newest snapshot, and the workers that Ray starts again find it
        in memory. Raises the errors of `close`.
        """
        self.ended = True
        if kind is not None:
            self._entered = False
            self._watch.end()
            self._put_handlers_back()
            if self._terminated and self.pending is not None:
                log.warning("SIGTERM: the newest snapshot of this process is %s", self.pending)
            return
        try:
            self._send(None)
        finally:
            super().__exit__(kind, error, traceback)

    def report(self, metrics: dict[str, Any]) -> None:
        """Report metrics to Ray at the end of this step, in place of `ray.train.report`.

        Call it on all workers equally often, at the steps of your choice. If a snapshot
        is taken after this step, the report has a checkpoint that refers to it. Numbers
        are saved as the metrics of that snapshot.
        """
        self._reports.append(metrics)
        self.metrics |= {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def _snapshot(self, step: int, *, last: bool) -> None:
        before = self.pending
        super()._snapshot(step, last=last)
        taken = self.pending
        sealed = taken is not None and taken is not before
        if taken is None or not sealed or taken.state in ("failed", "skipped"):
            self._send(None)
            return
        agent = self._agent or default.default_agent("report")
        self._send(
            {
                "root": agent.root,
                "job": agent.job,
                "tag": tag_directory(step, None, taken.attempt),
                "step": step,
                "attempt": taken.attempt,
            }
        )

    def _send(self, reference: dict[str, Any] | None) -> None:
        """Send the reports of this step; the last of them with the reference.

        A reference stays on rank 0: Ray keeps a checkpoint that one worker reports.
        """
        import ray.train

        reports, self._reports = self._reports, []
        while len(reports) > 1 or (reports and reference is None):
            ray.train.report(reports.pop(0))
        if reference is None or not reports:
            return
        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report(reports[0])
            return
        with tempfile.TemporaryDirectory() as place:
            checkpoint = ray.train.Checkpoint.from_directory(place)
            path = "/".join((reference["root"].rstrip("/"), reference["job"], reference["tag"]))
            checkpoint.set_metadata({_KEY: reference | {"path": path}})
            name = f"{reference['job']}-{reference['tag']}"
            ray.train.report(reports[0], checkpoint=checkpoint, checkpoint_dir_name=name)

    def _compare_with_ray(self) -> None:
        """Compare the recovered snapshot with the newest that Ray refers to.

        Raises InvalidRequest if there is a reference, and nothing was recovered.
        """
        import ray.train

        found = ray.train.get_checkpoint()
        if found is None:
            return
        reference = found.get_metadata().get(_KEY)
        if reference is None:
            log.warning(
                "Ray has a checkpoint for this run that is not a reference of ckptd: %s is not "
                "loaded by ckptd, which %s",
                found.path,
                "begins at step 0"
                if self.recovered is None
                else f"has recovered step {self.recovered.step}",
            )
        elif self.recovered is None:
            raise InvalidRequest(
                f"Ray refers to the snapshot {reference['path']}, and ckptd finds nothing to "
                f"recover: set CKPTD_ROOT to {reference['root']} and CKPTD_JOB to "
                f"{reference['job']}, or give the run another RunConfig(name=...) to begin at step "
                f"0"
            )
        elif _order(self.recovered) < (reference["attempt"], reference["step"]):
            log.warning(
                "Ray refers to the snapshot %s, which cannot be recovered: step %d of attempt %d "
                "is the newest",
                reference["path"],
                self.recovered.step,
                self.recovered.attempt,
            )


def _order(recovered: Any) -> tuple[int, int]:
    return recovered.attempt, recovered.step
