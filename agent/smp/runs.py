"""Keeps the agents of the directories that this process saves to with SageMaker's
calls, and lists what the directories hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptd.agent.agent import Agent
from ckptd.agent.pending import Pending
from ckptd.agent.state.naming import find
from ckptd.shared import names
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    IntegrityError,
    InvalidName,
    InvalidRequest,
    NotFound,
    StorageError,
    storage_errors,
)
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.retention import PreserveAll
from ckptd.shared.storage.locate import is_root, open_root

log = logging.getLogger("ckptd.agent")


@dataclass(frozen=True, slots=True)
class JobPlace:
    """The root and the job in which the checkpoints of a directory of the caller lie."""

    root: Path
    job: str

    @property
    def path(self) -> Path:
        return self.root / self.job


def job_place(where: Path, kind: str, *, ask: bool = False) -> JobPlace:
    """Return where the checkpoints of one kind of a directory lie.

    `kind`: "partial" or "objects".

    A directory is a root of its own, with a job for each kind. If it lies below a root,
    it is none, and the jobs are in the root above: those of `/ckpts/run` are
    `run..partial` and `run..objects` in `/ckpts`. ask: nothing may have been saved there
    yet.
    """
    own = JobPlace(where, kind)
    if is_root(where):
        return own
    root = next((above for above in where.parents if is_root(above)), None)
    if root is None:
        return own
    # Two dots, because a part of the path may have one.
    job = "..".join((*where.relative_to(root).parts, kind))
    try:
        names.check_name("job", job)
    except InvalidName:
        return own
    above = JobPlace(root, job)
    return above if above.path.is_dir() or ask else own


@dataclass(slots=True)
class Run:
    """A job in a directory that this process saves to: its agent, the highest step in
    it, and what this process has saved, by tag.
    """

    place: JobPlace
    agent: Agent
    highest: int
    saved: dict[str, Pending] = field(default_factory=dict)


_runs: dict[tuple[str, str], Run] = {}
"""The runs of this process, by directory and job."""


def known_run(where: Path, job: str) -> Run | None:
    """Return the run of a job in a directory if this process has one.

    A forked child has none.
    """
    run = _runs.get((str(where), job))
    return None if run is None or run.agent.closed else run


def run_in(where: Path, job: str) -> Run:
    """Return the run of a job in a directory, which becomes the root of a daemon, or
    lies below one. All ranks call this.

    Nothing that it saves is deleted, until the caller sets the `retention` of its
    agent. Raises the errors of `Agent`, StorageError.
    """
    run = known_run(where, job)
    if run is None:
        place = job_place(where, job, ask=True)
        agent = Agent(place.job, root=place.root, retention=PreserveAll())  # makes the root
        steps = [manifest.step for manifest in manifests(place) if manifest.step is not None]
        highest = [max(steps, default=-1)]
        # The list may grow meanwhile: the daemon still saves what an earlier run has
        # captured.
        if agent.world_size > 1:
            dist.broadcast_object_list(highest, src=0)
        run = _runs[str(where), job] = Run(place, agent, highest[0])
    return run


def close() -> None:
    """Wait until everything that was captured is durable, and end the agents.

    Without this call, the daemon saves it all the same.

    Raises the first error of `Agent.close`, once all agents have ended.
    """
    failure: CkptdError | None = None
    while _runs:
        try:
            _runs.popitem()[1].agent.close()
        except CkptdError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def manifests(place: JobPlace) -> list[Manifest]:
    """Return the manifests of a job, the newest last.

    Damaged ones are left out. Raises StorageError.
    """
    repository, found = open_root(place.root), list[Manifest]()
    with storage_errors(f"list {place.root}"):
        for name in repository.tags(place.job):
            try:
                found.append(repository.read_manifest(place.job, name))
            except (NotFound, IntegrityError):
                continue
    return sorted(found, key=lambda manifest: manifest.order)


def tag_of(content: Any) -> str:
    """Return the tag in SageMaker's sense, which is in the `user_content`. ckptd's own
    tags would keep the checkpoint for ever.
    """
    return str(content.get("tag", "")) if isinstance(content, dict) else ""


def check_plain(name: str, value: Any) -> None:
    """Raise InvalidRequest if a value has a module or an optimizer in it.

    `name` is that of the value.
    """
    if any(list(find(value, "", kind)) for kind in (torch.nn.Module, torch.optim.Optimizer)):
        raise InvalidRequest(f"{name} has a module or an optimizer: save its state_dict() instead")


def check_absent(file: Path) -> None:
    """Raise AlreadyExists if there is such a file."""
    if file.exists():
        raise AlreadyExists(f"{file} exists already: choose another name, or remove it first")


def source_rank(name: str, saved_on: int, rank: int) -> int:
    """Return the rank whose own value this rank gets: its number modulo the number of
    ranks that saved. `name` is that of the value.
    """
    if rank >= saved_on:
        log.warning(
            "%s was saved on %d ranks: rank %d gets that of rank %d",
            name,
            saved_on,
            rank,
            rank % saved_on,
        )
    return rank % saved_on


def on_rank_0(agent: Agent, file: Path, write: Callable[[], object]) -> None:
    """Have rank 0 write a file, while the other ranks wait.

    If that fails, they raise StorageError with the text of the error.
    """
    failure: Exception | None = None
    if agent.rank == 0:
        try:
            # Below the root of a daemon it is no root, which the daemon would have
            # made.
            file.parent.mkdir(parents=True, exist_ok=True)
            write()
        except Exception as error:
            failure = error
    if agent.world_size > 1:
        said = [None if failure is None else str(failure)]
        dist.broadcast_object_list(said, src=0)
        if agent.rank and said[0] is not None:
            raise StorageError(f"rank 0 could not write {file}: {said[0]}")
    if failure is not None:
        raise failure
