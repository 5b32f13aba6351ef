"""Judges from a status report whether a daemon is well, for `ckptd status --check`.

The judgement depends on the report and on two limits alone. It asks nothing and measures
nothing, so that cron, systemd and a probe get the same answer for the same report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckptd.daemon.job.stored_checkpoint import LITTLE_ROOM
from ckptd.shared.location import url_scheme
from ckptd.shared.units import count_text, printable, span_text

SLOW_LOOP_SECONDS = 1.0
"""An event loop that is later than this is slow."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a daemon is not well.

    what: its kind, one of `not-ready`, `loop`, `root`, `clients`, `memory`, `refused`,
    `stage`, `overdue`, `old`, `room`, `non-finite`, `replicas`, `failed` and `damaged`. job:
    the name of the job, or "". message: one sentence.
    """

    what: str
    job: str
    message: str


def problems(
    status: Mapping[str, Any], *, max_age: float | None = None, min_room: int = LITTLE_ROOM
) -> list[Problem]:
    """Return what is wrong with a daemon, given the object that `ckptd status --json`
    prints.

    max_age: the most seconds since the newest durable checkpoint of a job that runs, or
    None for no limit. min_room: how many more checkpoints of a job that runs must fit.
    """
    found = [*_of_daemon(status), *_of_stage(status.get("stage") or {})]
    for job in status["jobs"]:
        found += _of_job(job, status, max_age, min_room)
    return found


def _of_daemon(status: Mapping[str, Any]) -> Iterator[Problem]:
    if not status["ready"]:
        yield Problem("not-ready", "", "the daemon is not ready: it is stopping")
    if (lag := status["event_loop_lag_seconds"]) > SLOW_LOOP_SECONDS:
        yield Problem(
            "loop",
            "",
            f"the daemon's event loop is {lag:.1f} s late, and may be at most "
            f"{SLOW_LOOP_SECONDS:g} s late: the machine is overloaded, or a call hangs",
        )
    # An object store never tells how much room it has.
    if status["disk_free_bytes"] is None and not url_scheme(status["root"]):
        place = (status.get("stage") or {}).get("directory", status["root"])
        # A daemon that has just started has not measured yet.
        if status["uptime_seconds"] > 2 * SLOW_LOOP_SECONDS:
            yield Problem("root", "", f"{place} is gone, or does not answer")
    if why := status["descriptors"]["accepting_paused"]:
        yield Problem("clients", "", f"no client is accepted: {why}")
    for held in status.get("foreign_memory", ()):
        yield Problem(
            "memory",
            held["job"],
            f"job {held['job']}: step {held['step']} of attempt {held['attempt']} is in memory for "
            f"another root, {held['identity'][:8]}, than the one at {status['root']} now, and runs "
            f"of this job are refused: mount the right root there and restart the daemon, or "
            f"decide with CKPTD_FOREIGN_MEMORY",
        )
    for one in status.get("refused", ()):
        name = f"job {one['job']}: " if one["job"] else ""
        yield Problem("refused", one["job"], name + one["message"])
    for held in status.get("memory_elsewhere", ()):
        yield Problem(
            "memory",
            held["job"],
            f"job {held['job']}: step {held['step']} of attempt {held['attempt']} was saved for "
            f"this root when it was at {held['root']}, whose daemon keeps it in memory now, and "
            f"runs of this job are refused: run `ckptd stop {held['root']}` and `ckptd stop "
            f"{status['root']}`, and start again",
        )


def _of_stage(stage: Mapping[str, Any]) -> Iterator[Problem]:
    if why := stage.get("problem"):
        yield Problem("stage", "", f"nothing is uploaded from the stage: {why}")
    for name, why in stage.get("refused", {}).items():
        yield Problem("stage", name.partition("/")[0], f"{name} cannot be uploaded: {why}")


def _of_job(
    job: Mapping[str, Any], status: Mapping[str, Any], max_age: float | None, min_room: int
) -> Iterator[Problem]:
    name, durable = job["job"], job["last_durable"]
    if job["ranks_connected"]:
        if late := job.get("overdue"):
            yield Problem("overdue", name, f"job {name}: {late['message']}")
        if max_age is not None and (old := _too_old(job, status, max_age)):
            yield Problem("old", name, f"job {name}: {old}")
        if (room := job["room_for"]) is not None and room < min_room:
            yield Problem(
                "room",
                name,
                f"job {name}: {count_text(room, 'more checkpoint')} of its size "
                f"fit{'s' if room == 1 else ''} on the disk, and {min_room} must fit: "
                f"make room, or keep fewer checkpoints",
            )
        if values := job.get("non_finite"):
            yield Problem(
                "non-finite",
                name,
                f"job {name}: {count_text(values, 'value')} of parameters and optimizer state in "
                f"{durable['tag']} {'is' if values == 1 else 'are'} NaN or infinite: `ckptd show` "
                f"names the tensors, and recover(state, step=...) goes back",
            )
        if why := job.get("replicas_off"):
            yield Problem(
                "replicas",
                name,
                f"job {name}: its nodes make no more copies in the memory of other nodes until its "
                f"next attempt: {why}",
            )
    if (error := job["last_error"]) and _is_later(error, durable):
        step = "" if error["step"] is None else f" of step {error['step']}"
        yield Problem(
            "failed",
            name,
            f"job {name}: the last save{step} failed {span_text(error['age_seconds'])} ago: "
            f"{error['reason']}",
        )
    for why in job.get("denied", {}).values():
        yield Problem(
            "denied",
            name,
            f"job {name}: {why}. recover() goes back to no older checkpoint meanwhile",
        )
    for tag, why in job["damaged"].items():
        yield Problem(
            "damaged",
            name,
            f"{name}/{tag} is damaged: {why}. recover() passes it over: look at the disk, then "
            f"delete it with `ckptd forget`",
        )


def _too_old(job: Mapping[str, Any], status: Mapping[str, Any], max_age: float) -> str:
    """Return why the newest durable checkpoint of a job that runs is too old, or "".

    A job that has just begun or continued is not blamed for the time before: the limit
    counts from its start.
    """
    durable, running = job["last_durable"], job.get("running_seconds")
    running = status["uptime_seconds"] if running is None else running
    age = durable and durable["age_seconds"]
    if running <= max_age or (durable and (age is None or age <= max_age)):
        return ""
    limit = f"and the limit is {span_text(max_age)}"
    if not durable:
        return f"it has run for {span_text(running)} without a durable checkpoint, {limit}"
    return f"its newest durable checkpoint is {span_text(age)} old, {limit}"


def _is_later(error: Mapping[str, Any], durable: Mapping[str, Any] | None) -> bool:
    """Return True if a save has failed since the newest durable checkpoint was made."""
    age = durable and durable["age_seconds"]
    return age is None or error["age_seconds"] < age


def health_json(found: list[Problem]) -> dict[str, Any]:
    """Return the object that `ckptd status --check --json` prints."""
    return {"ok": not found, "problems": [asdict(problem) for problem in found]}


def health_text(found: list[Problem], status: Mapping[str, Any]) -> str:
    """Return one line for each problem, or one that begins with "ok"."""
    if found:
        return "\n".join(printable(problem.message) for problem in found)
    running = [job for job in status["jobs"] if job["ranks_connected"]]
    ages = [
        age
        for job in running
        if (durable := job["last_durable"]) and (age := durable["age_seconds"]) is not None
    ]
    newest = ""
    if running and len(ages) == len(running):
        newest = f", {'each ' if len(ages) > 1 else ''}with a checkpoint of the last " + span_text(
            max(ages)
        )
    return printable(
        f"ok: the daemon of {status['root']} is ready, {count_text(len(running), 'job')} "
        f"{'runs' if len(running) == 1 else 'run'}{newest}"
    )
