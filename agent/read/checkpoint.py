"""Reads a checkpoint without a daemon, on any machine: the whole state, or one tensor
by name.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from ckptd.agent.link.arguments import job_name
from ckptd.agent.link.launch import find_place
from ckptd.agent.link.loans import borrow
from ckptd.agent.read.loader import load, materialize
from ckptd.agent.read.loans import open_loan
from ckptd.agent.read.module_loader import LoadedInto, load_into, not_gone
from ckptd.agent.read.slices import Index, read_slice
from ckptd.agent.read.sources import Opened, newer, open_checkpoint
from ckptd.agent.read.staged_source import ChunkMemory, digest
from ckptd.agent.state.tree import filled, names_in_records
from ckptd.agent.threads.interruptible import interruptible
from ckptd.shared import names
from ckptd.shared.errors import (
    IntegrityError,
    NewerFormat,
    NotFound,
    StorageError,
    VersionGone,
    storage_errors,
)
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.plan import Alias
from ckptd.shared.location import Location, Url, located
from ckptd.shared.storage.locate import find_checkpoint, open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.collector import paused_collector
from ckptd.shared.units import some_text

log = logging.getLogger("ckptd.agent")
_OLDER = "Checkpoint.open(path, step or tag)"


class Checkpoint:
    """An open, committed checkpoint, made by `Checkpoint.open`, or a snapshot in memory,
    made by `Checkpoint.newest_in_memory`.

    Everything that it reads is verified. Any number of threads may read at once. ckptd
    does not delete a checkpoint that is open: close it, or use it in a `with`
    statement. A snapshot in memory is replaced by newer ones while it is open: then
    every read raises VersionGone.

    job: the name of the training run. step: of the checkpoint, or None if it was saved
    without one. attempt: the run of the job that saved it. tag: the name of its
    directory. metrics, user_content: as they were saved.
    """

    def __init__(self, job: str, opened: Opened) -> None:
        """Callers use `open` and `newest_in_memory` instead."""
        self.job, self._opened = job, opened

    @classmethod
    def of(cls, repository: Repository, job: str, manifest: Manifest) -> Self:
        """Open the checkpoint of a manifest that was read, for other modules of ckptd."""
        with storage_errors(f"read {repository.where(job, manifest.tag)}"):
            return cls(
                job, open_checkpoint(repository, job, manifest.tag, manifest, kept=ChunkMemory())
            )

    @classmethod
    @paused_collector()
    @interruptible
    def open(cls, path: str | os.PathLike[str] | Url, which: str | int = "newest") -> Checkpoint:
        """Open a checkpoint for reading.

        path: the directory of a job, or a URL like `s3://BUCKET/PREFIX/JOB`. With
        "newest" also a directory anywhere that holds one checkpoint, or
        `<root>/<job>/<tag>`. which: "newest" for the newest sound checkpoint of the
        job, a step, a tag, or the name of a tag's directory. If several attempts have
        the step or the tag, the highest attempt counts.

        Raises NotFound; StorageError; InvalidConfig for a URL that cannot be used;
        IntegrityError if the requested checkpoint is damaged; NewerFormat if a newer
        ckptd wrote it. "newest" passes over damaged checkpoints, but never over one
        that a newer ckptd wrote.
        """
        where = located(path)
        repository, job = open_root(where.parent), where.name
        with storage_errors(f"list {where}"):
            tags = repository.tags(job)
            if not tags and which == "newest":
                repository, job, tag = find_checkpoint(where)
                return cls.of(repository, job, repository.read_manifest(job, tag))
        passed = PassedOver(job)
        with storage_errors(f"read {where}"):
            for manifest in newest_first(repository, job, tags, which, passed):
                try:
                    return cls.of(repository, job, manifest)
                except NewerFormat as error:
                    raise newer(error, f"{job}/{manifest.tag}", _OLDER) from None
                except (IntegrityError, NotFound) as error:
                    if which != "newest":
                        raise
                    passed.add(manifest.tag, error)
        raise passed.first or NotFound(
            f"no checkpoint{'' if which == 'newest' else f' {which!r}'} in {where}"
        )

    @classmethod
    def newest_in_memory(
        cls,
        job: str | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        socket: str | os.PathLike[str] | None = None,
    ) -> Checkpoint:
        """Open the newest snapshot of a job that all ranks have sealed, in the memory of
        this node. It need not be saved.

        No attempt begins, and a run of the job is not held up: once the run needs the
        memory for a newer snapshot, every read of this one raises VersionGone. Of a job
        of several nodes, this is the newest checkpoint, and the parts of the ranks of
        this node are read from memory while they are there.

        job: name of the training run. root, socket: the daemon, as for `Agent`.

        Raises NotFound if nothing of the job is in memory; DaemonUnreachable,
        Forbidden, VersionMismatch for a daemon of an earlier version; InvalidName,
        InvalidRequest; StorageError.
        """
        place = find_place(socket, root)
        with closing(place.connect()) as channel:
            name = job_name(job, private=channel.welcome.private)
            while True:
                loan = borrow(channel, name)
                if loan is None or not loan.slots:
                    raise _nothing_in_memory(located(channel.welcome.root), name)
                with suppress(VersionGone):
                    return cls(name, open_loan(name, loan, ChunkMemory()))

    @property
    def manifest(self) -> Manifest:
        """The whole manifest.

        Raises NotFound for a snapshot in memory.
        """
        if self._opened.manifest is None:
            raise NotFound(f"{self.tag} has no manifest: it is a snapshot in memory")
        return self._opened.manifest

    @property
    def in_memory(self) -> bool:
        """True if this is a snapshot in the memory of this node."""
        return self._opened.manifest is None

    @property
    def step(self) -> int | None:
        return self._opened.step

    @property
    def attempt(self) -> int:
        return self._opened.attempt

    @property
    def tag(self) -> str:
        return self._opened.tag

    @property
    def digest(self) -> str:
        """The sha256 of the plans and the checksums of all chunks, as hexadecimal
        digits. It is the same for a snapshot in memory and for its checkpoint.

        Raises IntegrityError, StorageError.
        """
        with self._reading(self.tag):
            return digest(self._opened.sources)

    @property
    def metrics(self) -> dict[str, float]:
        return self._opened.metrics

    @property
    def user_content(self) -> Any:
        return self._opened.user_content

    def keys(self) -> list[str]:
        """Return the names of all tensors. Raises IntegrityError, StorageError."""
        with self._reading("the names of the tensors"):
            return self._opened.saved.names()

    def metadata(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape of a tensor.

        Raises NotFound, IntegrityError, StorageError.
        """
        saved = self._opened.saved
        with self._reading(name):
            return saved.dtype(name), torch.Size(saved.shape(name)[1])

    def tensor(
        self,
        name: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        slices: Sequence[Index] | None = None,
    ) -> torch.Tensor:
        """Return one tensor, or its slice `tensor[slices]`.

        Only the chunks that hold it are read.

        device, dtype: of the returned tensor. Without a dtype it has the saved one.
        slices: numbers and slices for the first dimensions, as in indexing. Dimensions
        without one are read whole. If the slices cut a stored shard into more than
        16,384 pieces, the chunks between these pieces are read too.

        Raises NotFound; InvalidRequest for slices that the tensor does not have;
        IntegrityError; StorageError. A chunk holds many small tensors and is decoded at
        every call, so `load` is faster for most of a checkpoint.
        """
        with self._reading(name):
            described = self._opened.saved.describe(name)
            if slices is not None:
                return read_slice(
                    self._opened.saved, name, tuple(slices), device=device, dtype=dtype
                )
            if isinstance(described, Alias) or (
                dtype is None and torch.device(device).type == "cpu"
            ):
                made = materialize(self._opened.saved, [name])[name]
                return (
                    made.to(device=device, dtype=dtype)
                    if dtype or torch.device(device).type != "cpu"
                    else made
                )
            made = torch.empty(
                described.size, dtype=dtype or self._opened.saved.dtype(name), device=device
            )
            load(self._opened.saved, {name: made})
            return made

    @interruptible
    def load(self) -> Any:
        """Return the whole state as a new tree on the CPU.

        Objects come as their state dicts, and shared storage is shared again.

        A checkpoint of several ranks gives whole tensors, and the keys of all ranks. A
        `per_rank` value is the list of the values of all ranks that had one, or the
        value itself if only one rank had it.

        In place of a value that this process cannot make, such as a member of an enum
        whose module is not imported, the tree has an object whose repr says what the
        value is and what is missing.

        Raises IntegrityError, StorageError; UnsavableValue for a value that only
        pickled code could bring back.
        """
        with self._reading(self.tag):
            tree = self._opened.tree()
            made = materialize(self._opened.saved, self._opened.saved.names())
            return filled(tree, lambda name: made[name] if name in made else self._lacks(name))

    @interruptible
    def verify(self, unchecked: list[str] | None = None) -> int:
        """Check all that `load` needs: every byte, every tensor, and every value.

        Return the number of raw bytes.

        unchecked: gets a sentence for each tensor and value that this process cannot
        judge, because its torch lacks a dtype, or because only pickled code could bring
        a value back. Without the list, they are logged as a warning. If there is none,
        `load` succeeds.

        The tensors are read chunk by chunk, so that this takes little memory. Raises
        IntegrityError, StorageError.
        """
        said: list[str] = []
        with self._reading(self.tag):
            total = self._opened.verify()
            tree, saved = self._opened.tree(said), self._opened.saved
            for name in saved.names():
                try:
                    saved.dtype(name)
                except NotFound as error:
                    said.append(str(error))
            needed = [name for name in names_in_records(tree) if name in saved]
            made = materialize(saved, list(dict.fromkeys(needed)))
            blank = torch.empty(0, dtype=torch.uint8, device="cpu")
            filled(
                tree,
                lambda name: (
                    made[name] if name in made else blank if name in saved else self._lacks(name)
                ),
            )
        if said and unchecked is None:
            log.warning(
                "%s is sound as far as this process can tell. Not checked: %s",
                self.tag,
                some_text(said, 3),
            )
        elif unchecked is not None:
            unchecked += said
        return total

    def _lacks(self, name: str) -> NoReturn:
        raise IntegrityError(f"{self.tag}: its values name the tensor {name!r}, which no part has")

    @interruptible
    def load_into(
        self,
        module: torch.nn.Module,
        *,
        prefix: str = "model",
        strict: bool = True,
        staged: bool = True,
    ) -> LoadedInto:
        """Fill the parameters and the persistent buffers of a module, in place and by
        name, and return what was done.

        prefix: the key of the state that the module was saved under, or "" if it was
        the whole state. strict: True raises StructureMismatch if a key is missing on
        either side. Tensors keep the dtype, the device and, as DTensors, the placements
        that they have in the module. Values are converted, but not complex ones to real
        ones, or floating-point ones to integers. Extra states of modules are left
        alone.

        Nothing is written before every name and shape has been compared. Tensors whose
        chunks had the same checksums in the last three versions that were loaded into
        this module are not read again, unless they were changed in place since.

        staged: True reads and verifies everything before the first byte is written, so
        that an error leaves the module as it was; the memory for that is as large as
        what is read. False reads straight into the module, in little more than half of
        the time. After VersionGone with `overwritten`, or IntegrityError or StorageError,
        the module is a mix of two versions until the next call succeeds, with any
        version.

        Raises StructureMismatch; NotFound if no tensor has the prefix; VersionGone;
        InvalidRequest for a module that FSDP1 has flattened; IntegrityError,
        StorageError. No other thread may use the module meanwhile.
        """
        with _errors(self.tag):
            return load_into(self._opened, module, prefix=prefix, strict=strict, staged=staged)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Context manager for reads into new memory.

        Raises VersionGone at the end, or in place of an error, if this snapshot has been
        replaced in memory; and the errors of `_errors`.
        """
        with _errors(what), not_gone(self._opened):
            yield

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.job}/{self.tag} step {self.step}, "
            f"{len(self._opened.saved.names())} tensors>"
        )


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Context manager.

    An OSError or a RecursionError that is raised inside becomes a CkptdError that says
    what could not be read.
    """
    try:
        yield
    except OSError as error:
        raise StorageError.of(f"read {what}", error) from None
    except RecursionError:
        raise IntegrityError(
            f"{what}: its values are nested more deeply than this Python can follow"
        ) from None


def opened_of(checkpoint: Checkpoint) -> Opened:
    """Return the open parts of a checkpoint, for other modules of ckptd."""
    return checkpoint._opened


def no_such_job(root: Location, job: str, found: Sequence[str]) -> NotFound:
    """Return the error for a job that has nothing in memory or on storage. found: the
    jobs on storage.
    """
    if job in found:
        return NotFound(f"job {job!r} has no snapshot yet in {root}")
    there = f"it has {some_text(sorted(found), 5)}" if found else "it has no job yet"
    return NotFound(f"there is no snapshot of a job {job!r} in {root}: {there}")


def _nothing_in_memory(root: Location, job: str) -> NotFound:
    with storage_errors(f"list {root}"):
        jobs = open_root(root).jobs()
    if job not in jobs:
        return no_such_job(root, job, jobs)
    return NotFound(
        f"nothing of job {job!r} is in the memory of this node: Checkpoint.open("
        f"{str(root / job)!r}) reads its newest checkpoint"
    )


class PassedOver:
    """The checkpoints of a job that cannot be opened, while the newest is looked for.

    first: the error of the first of them, or None.
    """

    def __init__(self, job: str) -> None:
        self._job, self._tags = job, set[str]()
        self.first: IntegrityError | NotFound | None = None

    def add(self, tag: str, error: IntegrityError | NotFound) -> None:
        """Log that a checkpoint is passed over, once."""
        if tag not in self._tags:
            log.warning("checkpoint %s/%s is passed over: %s", self._job, tag, error)
        self._tags.add(tag)
        self.first = self.first or error


def newest_first(
    repository: Repository,
    job: str,
    tags: list[str],
    which: str | int,
    passed: PassedOver,
) -> Iterator[Manifest]:
    """Yield the sound manifests that `which` selects, the newest first.

    See `Checkpoint.open`.

    For "newest", add the others to `passed`.

    The name of a directory tells attempt and step, unless the user has chosen the tag.
    So only the manifests of such tags are all read. Raises IntegrityError if the
    checkpoint that `which` names is damaged, and NewerFormat if a newer ckptd wrote the
    next one.
    """
    found: list[tuple[tuple[float, ...], str, Manifest | NewerFormat | None]] = []
    for tag in tags:
        parsed = names.parse_tag_directory(tag)
        assert parsed is not None
        if (
            which != "newest"
            and which not in (tag, parsed.tag, parsed.step)
            and not (parsed.by_user and isinstance(which, int))
        ):
            continue
        if not parsed.by_user:
            found.append((parsed.order, tag, None))
            continue
        try:
            manifest = repository.read_manifest(job, tag)
            if not isinstance(which, int) or manifest.step == which:
                found.append((manifest.order, tag, manifest))
        except NotFound:
            continue
        except IntegrityError as error:
            if which in (tag, parsed.tag):
                raise
            # It may be the newest of its attempt.
            if isinstance(error, NewerFormat) and which == "newest":
                found.append(((parsed.attempt, math.inf), tag, error))
            elif which == "newest":
                passed.add(tag, error)
    for _, tag, known in sorted(found, key=lambda entry: entry[0], reverse=True):
        try:
            if isinstance(known, NewerFormat):
                raise known
            yield known or repository.read_manifest(job, tag)
        except NotFound:
            continue
        except NewerFormat as error:
            raise newer(error, f"{job}/{tag}", _OLDER) from None
        except IntegrityError as error:
            if which != "newest":
                raise
            passed.add(tag, error)
