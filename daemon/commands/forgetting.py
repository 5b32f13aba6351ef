"""Implements `ckptd forget` and `ckptd pin`: selects the checkpoints to delete, has
them deleted, and sets or removes pins.

The daemon that serves the root deletes the checkpoints. If there is none, this process
recovers the root as a daemon does, and deletes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.daemon import config as settings
from ckptd.daemon.commands import neighbours, report
from ckptd.daemon.composition import opened
from ckptd.daemon.config import Config
from ckptd.daemon.job.retention import obstacle, to_retire
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.process.service import Service
from ckptd.shared.errors import (
    Busy,
    IntegrityError,
    InvalidConfig,
    InvalidRequest,
    NewerFormat,
    from_wire,
    storage_errors,
)
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location, is_same, located
from ckptd.shared.retention import Policy
from ckptd.shared.storage.locate import find_job_or_checkpoint, manifests
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel, NoDaemon

log = logging.getLogger("ckptd.forgetting")

_AT_ONCE = 100
_SECONDS = 600.0


@dataclass(frozen=True)
class Deletion:
    """The checkpoints of one job that `ckptd forget` is to delete.

    `intact`: the tags of all checkpoints of the job whose manifests are not damaged.
    `rows` has one row for each checkpoint that is to be deleted. `error` in a row is
    the reason why the checkpoint stays, or None.
    """

    root: Location
    job: str
    intact: frozenset[str]
    rows: list[dict[str, Any]]

    @property
    def doomed(self) -> list[dict[str, Any]]:
        """The rows of the checkpoints that can be deleted: they are neither pinned nor
        being read.
        """
        return [row for row in self.rows if row["error"] is None]

    @property
    def is_large(self) -> bool:
        """True if more than half of the intact checkpoints of the job would be deleted,
        which a person must confirm.
        """
        return 2 * self._loss > len(self.intact)

    @property
    def extent(self) -> str:
        """The number of intact checkpoints that would be deleted, and of all of them,
        in words.
        """
        share = (
            "the only checkpoint"
            if len(self.intact) == 1
            else f"{self._loss} of the {len(self.intact)} checkpoints"
        )
        return f"{share} of job {self.job}"

    @property
    def _loss(self) -> int:
        return sum(row["tag"] in self.intact for row in self.doomed)

    def run(self, socket: Path | None) -> None:
        """Delete the checkpoints, and record in each row whether its checkpoint is
        gone.

        Raises StorageError; Busy if a daemon serves the root and its socket cannot be
        found; DaemonUnreachable, Forbidden or InvalidRequest if `socket` is named and
        cannot be used.
        """
        refused = (
            _delete(self.root, self.job, [row["tag"] for row in self.doomed], socket)
            if self.doomed
            else {}
        )
        for row in self.rows:
            row["error"] = refused.get(row["tag"], row["error"])
            row["deleted"] = row["error"] is None


def planned(path: Location, policies: Sequence[Policy]) -> Deletion:
    """Return the deletion of the checkpoint DIR/JOB/TAG, or of those checkpoints of
    DIR/JOB that `policies` do not keep.

    Nothing is deleted yet. Raises InvalidRequest, NotFound, StorageError; InvalidConfig
    if a policy cannot choose, because no checkpoint has its metric; IntegrityError if a
    checkpoint that the policies keep lacks a file, so that the others are needed.
    """
    repository, job, tag = place_in_root(path)
    if (tag is None) == (not policies):
        raise InvalidRequest(
            f"{path} is a job: say which of its checkpoints to keep, like --keep 'LatestN(5)', or "
            f"name one, like {path}/TAG"
            if tag is None
            else f"{path} is one checkpoint, and --keep needs a job: leave --keep out, or name "
            f"{path.parent}"
        )
    pinned, rows = repository.pins(job), []
    found = dict(manifests(repository, job))
    for name, nbytes in _chosen(job, found, tag, policies, pinned):
        row: dict[str, Any] = {
            "job": job,
            "tag": name,
            "bytes": nbytes,
            "deleted": False,
            "error": None,
        }
        row["error"] = (
            f"checkpoint {job}/{name} is pinned"
            if name in pinned
            else _reader(repository, job, name)
        )
        rows.append(row)
    intact = frozenset(
        name for name, manifest in found.items() if isinstance(manifest, (Manifest, NewerFormat))
    )
    if tag is None and rows:
        deleted = {row["tag"] for row in rows}
        _check_kept(repository, job, [one for name, one in found.items() if name not in deleted])
    return Deletion(located(repository.where()), job, intact, rows)


def _check_kept(
    repository: Repository, job: str, kept: Sequence[Manifest | IntegrityError]
) -> None:
    """Raise IntegrityError if a file of one of these checkpoints is missing."""
    for manifest in kept:
        if not isinstance(manifest, Manifest):
            continue
        with storage_errors(f"list {job}/{manifest.tag}"):
            lacking = sorted(set(manifest.files) - set(repository.files(job, manifest.tag)))
            deleted = lacking and not repository.has_manifest(job, manifest.tag)
        if lacking and not deleted:
            raise IntegrityError(
                f"nothing was deleted, because {job}/{manifest.tag}, which would be kept, lacks "
                f"its file {lacking[0]}: look at the disk, delete this checkpoint with `ckptd "
                f"forget {repository.where(job)}/{manifest.tag}`, and try again"
            )


def place_in_root(path: Location) -> tuple[Repository, str, str | None]:
    """Return the repository, the job and the tag that a path names; the tag is None if
    it names a job.

    Raises InvalidRequest if the path is a checkpoint outside every root; NotFound.
    """
    repository, job, tag = find_job_or_checkpoint(path)
    if isinstance(repository, StandaloneCheckpoint):
        raise InvalidRequest(
            f"{path} is a checkpoint outside every root, which ckptd does not delete: delete the "
            f"directory yourself"
        )
    return repository, job, tag


def _chosen(
    job: str,
    found: dict[str, Manifest | IntegrityError],
    tag: str | None,
    policies: Sequence[Policy],
    pinned: Collection[str],
) -> Iterator[tuple[str, int]]:
    """Yield the tag and the bytes of each checkpoint to delete, and of each one that
    would be deleted if it were not pinned.

    The bytes are 0 if its manifest cannot be read.
    """
    if tag is not None:
        manifest = found.get(tag)
        yield tag, manifest.nbytes if isinstance(manifest, Manifest) else 0
        return
    checkpoints = [
        StoredCheckpoint.of(manifest)
        for manifest in found.values()
        if isinstance(manifest, Manifest)
    ]
    if why := obstacle(checkpoints, policies, insisted=True):
        raise InvalidConfig(f"no checkpoint of job {job!r} was deleted, because {why}")
    # A limit takes others away in place of the pinned checkpoints, which stay.
    doomed = {one.tag for one in to_retire(checkpoints, policies, pinned, insisted=True)}
    for checkpoint in to_retire(checkpoints, policies, insisted=True):
        if checkpoint.tag in pinned:
            doomed.add(checkpoint.tag)
    for checkpoint in sorted(checkpoints, key=lambda one: one.order):
        if checkpoint.tag in doomed:
            yield checkpoint.tag, checkpoint.nbytes


def _reader(repository: Repository, job: str, tag: str) -> str | None:
    """Return the reason why the checkpoint cannot be deleted now, with the processes
    that read it, or None if it can.
    """
    try:
        with storage_errors(f"delete {job}/{tag}"):
            found = repository.readers(job, tag)
    except Busy as error:
        return str(error)
    return f"checkpoint {job}/{tag} is being read, or deleted, by {found}" if found else None


def _delete(root: Location, job: str, tags: list[str], socket: Path | None) -> dict[str, str]:
    channel = _daemon_of(root, socket)
    if channel is None:
        try:
            return asyncio.run(_delete_without_a_daemon(_settings(root), job, tags))
        except Busy as error:
            raise Busy(
                f"{error}; name its socket with --socket PATH, so that it deletes the checkpoint"
            ) from None
    refused: dict[str, str] = {}
    with closing(channel):
        for first in range(0, len(tags), _AT_ONCE):
            channel.send(
                m.Forget(id=channel.new_id(), job=job, tags=tags[first : first + _AT_ONCE])
            )
            reply = channel.receive()[0]
            if isinstance(reply, m.Error):
                raise from_wire(reply.code, reply.message)
            assert isinstance(reply, m.Forgotten)
            refused |= reply.refused
    return refused


async def _delete_without_a_daemon(config: Config, job: str, tags: Sequence[str]) -> dict[str, str]:
    """Recover the root as a daemon does, delete these checkpoints, and save the
    snapshots that dead trainers have left in memory.

    Return the reason for each tag that stays. Raises Busy if a daemon serves the root.
    """
    failures: list[BaseException] = []
    async with opened(config, PosixFileSystem(), failed=failures.append) as parts:
        try:
            refused = await Service(parts).forget(job, tags)
        finally:
            await parts.orphans.drain()
    if failures:
        raise failures[0]
    return refused


def _settings(root: Location) -> Config:
    """Return the settings for a deletion by this process: those of the environment and
    its config file, with two differences.

    Retention keeps everything, because the flags that the daemon of this root was
    started with are unknown. The socket has a name of its own, because no client may
    connect.
    """
    file = os.environ.get("CKPTD_CONFIG")
    flags = {
        "root": str(root),
        "socket": f"{machine.private_socket(root)}.{os.getpid()}",
        "keep_last": 0,
        "keep": (),
    }
    return settings.load(flags, os.environ, Path(file) if file else None)


def _daemon_of(root: Location, socket: Path | None) -> Channel | None:
    """Return a connection to the daemon that serves `root`, or None if there is none.

    If `socket` is named, no other is tried. Raises DaemonUnreachable or Forbidden if a
    daemon cannot be used, and InvalidRequest if the one at `socket` serves another root.
    """
    if socket is None:
        try:
            return neighbours.connection(root, None, "ckptd forget ROOT", _SECONDS)
        except NoDaemon:
            return None
    channel = Channel(socket, neighbours.TIMEOUT, later=_SECONDS)
    if is_same(located(channel.welcome.root), root):
        return channel
    channel.close()
    raise InvalidRequest(f"the daemon at {socket} serves {channel.welcome.root}, not {root}")


def pin(path: Location, *, remove: bool) -> tuple[str, str, bool]:
    """Pin the checkpoint DIR/JOB/TAG, or the newest of DIR/JOB, so that nothing deletes
    it. With `remove`, remove the pin instead.

    Return job, tag, and whether there is a pin now or, with `remove`, was one before.
    Raises InvalidRequest if the checkpoint is outside every root; NotFound, Busy,
    IntegrityError, StorageError.
    """
    repository, job, named = place_in_root(path)
    tag = named or report.manifest_at(path).tag
    with storage_errors(f"{'unpin' if remove else 'pin'} {job}/{tag}"):
        if remove:
            return job, tag, repository.unpin(job, tag)
        with closing(repository.lease(job, tag)):
            repository.pin(job, tag)
    return job, tag, True
