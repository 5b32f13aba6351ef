"""Tests how the guarantees of an object store are measured, with stores that break
them.
"""

from __future__ import annotations

import errno
import itertools
import threading

import pytest
from obstore.store import MemoryStore

from ckptd.shared.errors import RemoteError
from ckptd.shared.storage.bucket import Bucket, ObjectMeta
from ckptd.shared.storage.object_probe import check, copies, creates_once


class Ignoring(Bucket):
    """A store that ignores the condition of a creation."""

    def put(self, name: str, data: bytes, *, create: bool) -> None:
        super().put(name, data, create=False)


class Racy(Bucket):
    """A store that looks and then writes, so that several callers win who come at the
    same time. Later ones are refused.
    """

    def __init__(self, store: MemoryStore, url: str) -> None:
        super().__init__(store, url)
        self._first_two, self._come = threading.Barrier(2), itertools.count(1)

    def put(self, name: str, data: bytes, *, create: bool) -> None:
        try:
            self.head(name)
        except FileNotFoundError:
            if next(self._come) <= 2:
                self._first_two.wait(60)
            super().put(name, data, create=False)
            return
        raise FileExistsError(errno.EEXIST, "exists", name)


class Unsupporting(Bucket):
    def put(self, name: str, data: bytes, *, create: bool) -> None:
        if create:
            raise RemoteError(errno.EOPNOTSUPP, "the store answered 501 Not Implemented", name)
        super().put(name, data, create=create)


class Failing(Bucket):
    def put(self, name: str, data: bytes, *, create: bool) -> None:
        raise RemoteError(errno.EIO, "the store answered 500", name)


class Stale(Bucket):
    """A store whose listings are those of a moment ago."""

    def __init__(self, store: MemoryStore, url: str, *, lag: int = 1) -> None:
        super().__init__(store, url)
        self._before: list[tuple[list[str], list[ObjectMeta]]] = [([], [])] * lag

    def children(self, prefix: str) -> tuple[list[str], list[ObjectMeta]]:
        self._before.append(super().children(prefix))
        return self._before.pop(0)


class Forgetful(Bucket):
    """A store whose listings still have what was deleted."""

    def __init__(self, store: MemoryStore, url: str) -> None:
        super().__init__(store, url)
        self._seen: dict[str, ObjectMeta] = {}

    def children(self, prefix: str) -> tuple[list[str], list[ObjectMeta]]:
        self._seen |= {found.name: found for found in super().children(prefix)[1]}
        return [], list(self._seen.values())


class Mangling(Bucket):
    def read(self, name: str, offset: int, length: int) -> memoryview:
        return memoryview(bytes(length))


class NotCopying(Bucket):
    def copy(self, name: str, new: str) -> None:
        raise RemoteError(errno.EOPNOTSUPP, "the store answered 501 Not Implemented", name)


class Losing(Bucket):
    """A store that acknowledges a copy, and makes none."""

    def copy(self, name: str, new: str) -> None:
        pass


class MakingOthers(Bucket):
    def copy(self, name: str, new: str) -> None:
        self.put(new, b"other bytes", create=False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Bucket, True), (NotCopying, False), (Losing, False), (MakingOthers, False)],
)
def test_copies_are_measured(kind: type[Bucket], expected: bool) -> None:
    bucket = kind(MemoryStore(), "memory:///root")
    assert copies(bucket) is expected
    assert bucket.children(".ckptd/probe") == ([], [])


@pytest.mark.parametrize(
    ("kind", "expected"), [(Bucket, True), (Ignoring, False), (Racy, False), (Unsupporting, False)]
)
def test_exclusive_creation_is_measured(kind: type[Bucket], expected: bool) -> None:
    bucket = kind(MemoryStore(), "memory://x")
    assert creates_once(bucket) is expected
    assert bucket.children(".ckptd/probe") == ([], [])


def test_a_store_that_fails_is_not_judged() -> None:
    with pytest.raises(RemoteError, match="answered 500"):
        creates_once(Failing(MemoryStore(), "memory://x"))


def test_a_sound_store_passes_and_keeps_nothing() -> None:
    bucket = Bucket(MemoryStore(), "memory://x")
    check(bucket)
    assert bucket.children(".ckptd/probe") == ([], [])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Stale, "a listing lacks an acknowledged object"),
        (Forgetful, "a listing has a deleted object"),
        (Mangling, "the store returns other bytes"),
        (Failing, "answered 500"),
    ],
)
def test_a_store_that_ckptd_cannot_use_is_refused(kind: type[Bucket], why: str) -> None:
    with pytest.raises(RemoteError, match=why):
        check(kind(MemoryStore(), "memory://x"))
