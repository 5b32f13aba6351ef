"""Read a checkpoint without a daemon, on any machine: whole, or one tensor by name."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ckptd.agent.plan.layout import dtype_of
from ckptd.agent.read.loader import load, materialize
from ckptd.agent.read.slices import Index, read_slice
from ckptd.agent.read.sources import Opened, locate, newer, open_storage
from ckptd.agent.state import values
from ckptd.agent.state.merge import bare, merge
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound, StorageError
from ckptd.shared.manifest import Manifest
from ckptd.shared.plan import Alias
from ckptd.shared.storage import PosixStorage

_OLDER = "Checkpoint.open(path, step or tag)"


class Checkpoint:
    """An open, committed checkpoint; made by `open`. Verifies everything that it reads, from any number of threads at once.

    While it is open, nobody deletes it. Close it, or use it in a `with`.
    """

    def __init__(self, storage: PosixStorage, job: str, manifest: Manifest) -> None:
        try:
            self._opened: Opened = open_storage(storage, job, manifest.tag, manifest)
        except OSError as error:
            raise StorageError.of(f"read {storage.root / job / manifest.tag}", error) from None
        self.manifest = self._opened.manifest or manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str], which: str | int = "newest") -> Checkpoint:
        """A checkpoint of the job directory `path`: the "newest" that is sound, a step (of its highest attempt), or a tag. Or the one in
        the directory `path` itself, wherever it lies.

        Raises NotFound; IntegrityError if the checkpoint asked for is damaged (the "newest" passes over damaged ones); StorageError; and
        NewerFormat rather than pass over a checkpoint that a newer ckptd wrote.
        """
        where = Path(os.path.abspath(path))
        storage, job = PosixStorage(where.parent), where.name
        try:
            tags = storage.tags(job)
            if not tags and which == "newest":
                storage, job, tag = locate(where)
                return cls(storage, job, storage.read_manifest(job, tag))
        except OSError as error:
            raise StorageError.of(f"list {where}", error) from None
        manifests = []
        unreadable: list[tuple[tuple[int, float], NewerFormat]] = []
        for tag in tags:
            parsed = names.parse_tag_directory(tag)
            assert parsed is not None
            if isinstance(which, str) and which not in ("newest", parsed[0], tag):
                continue
            try:
                manifest = storage.read_manifest(job, tag)
                if not isinstance(which, int) or manifest.step == which:
                    manifests.append(manifest)
            except NotFound:
                continue
            except IntegrityError as error:
                if which in (tag, *parsed[:2]):
                    raise
                if isinstance(error, NewerFormat):  # with a tag of its own, its step is unknown: it may be the newest
                    unreadable.append(((parsed[2], math.inf if parsed[1] is None else parsed[1]), newer(error, f"{job}/{tag}", _OLDER)))
        if which == "newest" and unreadable:
            order, problem = max(unreadable, key=lambda found: found[0])
            if order > max((manifest.order[:2] for manifest in manifests), default=(-1, -1)):
                raise problem
        if not manifests:
            wanted = "" if which == "newest" else f" {which!r}"
            raise NotFound(f"no checkpoint{wanted} in {where}")
        failure: IntegrityError | NotFound | None = None
        for manifest in sorted(manifests, key=lambda m: m.order, reverse=True):
            try:
                return cls(storage, job, manifest)
            except NewerFormat as error:
                raise newer(error, f"{job}/{manifest.tag}", _OLDER) from None
            except (IntegrityError, NotFound) as error:
                failure = failure or error
                if which != "newest":
                    raise
        assert failure is not None
        raise failure

    @property
    def step(self) -> int | None:
        return self.manifest.step

    @property
    def attempt(self) -> int:
        return self.manifest.attempt

    @property
    def tag(self) -> str:
        return self.manifest.tag

    @property
    def metrics(self) -> dict[str, float]:
        return self._opened.metrics

    @property
    def user_content(self) -> Any:
        return self._opened.user_content

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return self._opened.saved.names()

    def metadata(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """dtype and shape of a tensor. Raises NotFound."""
        described = self._opened.saved.describe(name)
        return dtype_of(described.dtype), torch.Size(described.size)

    def tensor(
        self,
        name: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        slices: Sequence[Index] | None = None,
    ) -> torch.Tensor:
        """One tensor, or `tensor[slices]` of it, reading only the chunks that hold it.

        slices: numbers and slices, as in indexing, for the first dimensions; what is missing means all. If they cut a stored shard into
        more than 16,384 pieces, chunks between those are read too.

        Raises NotFound, InvalidRequest for slices that the tensor does not have, IntegrityError, StorageError. A chunk holds many small
        tensors and is decoded at every call: for most of a checkpoint, `load` is faster.
        """
        described = self._opened.saved.describe(name)
        try:
            if slices is not None:
                return read_slice(self._opened.saved, name, tuple(slices), device=device, dtype=dtype)
            if isinstance(described, Alias) or (dtype is None and torch.device(device).type == "cpu"):
                made = materialize(self._opened.saved, [name])[name]
                return made.to(device=device, dtype=dtype) if dtype or torch.device(device).type != "cpu" else made
            made = torch.empty(described.size, dtype=dtype or dtype_of(described.dtype), device=device)
            load(self._opened.saved, {name: made})
        except OSError as error:
            raise StorageError.of(f"read {name}", error) from None
        return made

    def load(self) -> Any:
        """The whole state as a fresh tree on the CPU: objects as their state dicts, shared storage shared again.

        Of several ranks, tensors come whole, keys are those of all, and a `per_rank` value is the list of what each had. Raises
        IntegrityError, StorageError.
        """
        try:
            documents = [self._opened.document(rank) for rank in range(self.manifest.world_size)]
            made = materialize(self._opened.saved, self.keys())
        except OSError as error:
            raise StorageError.of(f"read {self.tag}", error) from None
        return values.filled(bare(merge([document["state"] for document in documents])), made.__getitem__)

    def verify(self) -> int:
        """Read every byte against its checksum; returns how many raw bytes there are. Raises IntegrityError, StorageError."""
        try:
            return self._opened.verify()
        except OSError as error:
            raise StorageError.of(f"read {self.tag}", error) from None

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.manifest.job}/{self.tag} step {self.step}, {len(self.keys())} tensors>"
