"""Implements `ckptd copy`: copies checkpoints from one root to another, of any kind,
and verifies every byte of the copies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from ckptd.daemon.stage.copier import CheckpointCopier, OnBytes, one_at_a_time
from ckptd.daemon.stage.whole_copier import WholeCopier
from ckptd.shared.command import (
    CHECKPOINT,
    PLACE,
    chosen,
    json_option,
    progress_bar,
    speaks,
    step_option,
)
from ckptd.shared.errors import Busy, IntegrityError, InvalidRequest, NotFound, StorageError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location
from ckptd.shared.storage.choice import Named
from ckptd.shared.storage.locate import (
    check_new_root,
    existing_root,
    find_job_or_checkpoint,
    is_root,
    manifests,
    open_root,
)
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from ckptd.shared.system import machine
from ckptd.shared.units import size_text


class Copier:
    """Copies checkpoints to another root, under the names that they have.

    source: a root, a job in it, or one of its checkpoints. destination: a root, which
    is made if it does not exist. whole: make copies that have no deltas and no linked
    files.

    Raises InvalidRequest, NotFound, StorageError, OSError; AlreadyExists if the
    destination has another checkpoint under one of the names.
    """

    def __init__(self, source: Location, destination: Location, *, whole: bool = False) -> None:
        if destination.resolve() in (source.resolve(), *source.resolve().parents):
            raise InvalidRequest(
                f"{source} lies in {destination} already: name another root to copy to"
            )
        repository, wanted = _named(source)
        if inside := check_new_root(destination):
            click.echo(f"ckptd: {inside}", err=True)
        self._to, self._destination = open_root(destination), destination
        self._transfer = (WholeCopier if whole else CheckpointCopier)(repository, self._to)
        self.todo = [self._transfer.planned(job, tag) for job, tag in wanted]

    @property
    def nbytes(self) -> int:
        """The bytes that are still to be copied."""
        return sum(
            self._transfer.size(one.manifest)
            for one in self.todo
            if one.manifest is not None and not one.there
        )

    def run(self, progress: OnBytes = lambda length: None) -> Iterator[dict[str, Any]]:
        """Copy one checkpoint after another, oldest first, and yield a row for each.

        `progress` gets the bytes that were copied.

        A row has an `error` if the checkpoint at the source is damaged, or was deleted
        meanwhile. The destination has no part of it then.
        """
        if not is_root(self._destination):
            with suppress(Busy):  # a daemon has just made it
                self._to.storage.serve(machine.host()).close()
        self._to.identity()
        with one_at_a_time(self._destination):
            for one in self.todo:
                error = one.error
                nbytes = 0 if one.manifest is None else one.manifest.nbytes
                if one.manifest is not None and not one.there:
                    try:
                        nbytes = self._transfer.copy(one, one.manifest, progress)
                    except (IntegrityError, NotFound) as caught:
                        error = str(caught)
                        self._transfer.undo(one, one.manifest)
                    except OSError as caught:
                        raise StorageError.of(f"copy {one.job}/{one.tag}", caught) from None
                elif one.pinned and one.there:
                    self._to.pin(one.job, one.tag)
                yield {
                    "job": one.job,
                    "tag": one.tag,
                    "bytes": nbytes,
                    "copied": error is None and not one.there,
                    "error": error,
                }


def _named(source: Location) -> tuple[Repository, list[tuple[str, str]]]:
    """Return the repository of the source, and the job and tag of each checkpoint in
    it, oldest first.
    """
    repository, only, tag = (
        (existing_root(source), None, None) if is_root(source) else find_job_or_checkpoint(source)
    )
    if isinstance(repository, StandaloneCheckpoint):
        raise InvalidRequest(
            f"{source} is a checkpoint outside every root, which belongs to no job: `ckptd adopt` "
            f"saves it as that of a job"
        )
    if only is not None and tag is not None:
        return repository, [(only, tag)]
    found = [
        (job, manifest.order if isinstance(manifest, Manifest) else (-1, -1, -1), name)
        for job in (repository.jobs() if only is None else [only])
        for name, manifest in manifests(repository, job)
    ]
    if not found:
        raise NotFound(f"{source} holds no checkpoint")
    return repository, [(job, name) for job, _, name in sorted(found)]


@click.command(short_help="Copy checkpoints to another root.")
@click.argument("source", metavar="SRC", type=CHECKPOINT)
@click.argument("destination", metavar="ROOT", type=PLACE)
@step_option
@click.option(
    "--whole",
    is_flag=True,
    help="Make copies without deltas and linked files, each of which stands alone.",
)
@json_option
@speaks
def copy(
    source: Named, destination: Location, step: int | None, whole: bool, as_json: bool
) -> None:
    """Copy checkpoints to another root, and verify every byte of the copies.

    SRC is a root, a job in it (DIR/JOB), or one checkpoint (DIR/JOB/TAG). The
    checkpoints keep their names in ROOT. SRC and ROOT can each be a directory or a URL.
    If a copy is interrupted, run the same command again: it continues where it stopped.
    Copies keep deltas and linked files, unless --whole says otherwise.
    The exit code is 13 if a checkpoint could not be copied, because it is damaged or
    was deleted meanwhile.
    """
    copier = Copier(chosen(source, step), destination, whole=whole)
    rows = []
    with progress_bar(destination, as_json or not copier.nbytes) as (begin, progress):
        begin(copier.nbytes)
        for row in copier.run(progress):
            rows.append(row)
            if not as_json:
                did = row["error"] or (
                    f"copied ({size_text(row['bytes'])})" if row["copied"] else "is there already"
                )
                click.echo(f"{row['job']}/{row['tag']}: {did}")
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    if any(row["error"] for row in rows):
        sys.exit(IntegrityError.exit_code)
