"""Keeps the agents of the directories that this process saves to with SageMaker's calls, and lists what the directories hold."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.agent.agent import Agent
from ckptd.agent.pending import Pending
from ckptd.shared.errors import CkptdError, IntegrityError, NotFound, StorageError
from ckptd.shared.manifest import Manifest
from ckptd.shared.storage.locate import open_root

log = logging.getLogger("ckptd.agent")


@dataclass(slots=True)
class Run:
    """A job in a directory that this process saves to: its agent, the highest step in it, and what this process has saved, by tag."""

    agent: Agent
    highest: int
    saved: dict[str, Pending] = field(default_factory=dict)


_runs: dict[tuple[str, str], Run] = {}
"""The runs of this process, by directory and job."""


def is_known(where: Path, job: str) -> bool:
    """Return True if this process has saved to the job in this directory, or read from it."""
    return (str(where), job) in _runs


def run_in(where: Path, job: str) -> Run:
    """Return the run of a job in a directory, which becomes the root of a daemon. Raises the errors of `Agent`, StorageError."""
    run = _runs.get((str(where), job))
    if run is None or run.agent.closed:
        agent = Agent(job, root=where)  # makes the root
        steps = [manifest.step for manifest in manifests(where, job) if manifest.step is not None]
        run = _runs[str(where), job] = Run(agent, max(steps, default=-1))
    return run


def close() -> None:
    """Wait until everything that was captured is durable, and end the agents. Without this call, the daemon saves it all the same.

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


def manifests(where: Path, job: str) -> list[Manifest]:
    """Return the manifests of a job in a directory, the newest last. Damaged ones are left out. Raises StorageError."""
    repository, found = open_root(where), list[Manifest]()
    try:
        for name in repository.tags(job):
            try:
                found.append(repository.read_manifest(job, name))
            except (NotFound, IntegrityError):
                continue
    except OSError as error:
        raise StorageError.of(f"list {where}", error) from None
    return sorted(found, key=lambda manifest: manifest.order)


def tag_of(manifest: Manifest) -> str:
    """Return the tag in SageMaker's sense. ckptd's own tags would keep the checkpoint for ever."""
    content = manifest.user_content
    return str(content.get("tag", "")) if isinstance(content, dict) else ""


def of_rank(values: list[Any], rank: int) -> Any:
    """Return the value of a rank out of those of the ranks that saved: if there were fewer, that of `rank` modulo their number."""
    if rank >= len(values):
        log.warning("user_content was saved on %d ranks: rank %d gets that of rank %d", len(values), rank, rank % len(values))
    return values[rank % len(values)]
