"""Tests a root in an object store: claims, publications and deletions when the store
fails at any request, and what is probed.
"""

from __future__ import annotations

import errno
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest import mock

import pytest
from obstore.store import MemoryStore

from ckptd.shared import names
from ckptd.shared.errors import RemoteError, StorageError
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.repository import Repository
from tests.shared.storage.test_object_probe import Ignoring, Stale
from tests.support.cases import each_case
from tests.support.in_turn import InTurn, interleavings

DIGEST = "0123456789abcdef"


def in_memory(kind: type[Bucket] = Bucket) -> ObjectStorage:
    return ObjectStorage(kind(MemoryStore(), "memory://x"), names.new_nonce().hex()[:16])


# -- claims and publications


class Losing(Bucket):
    """A store that carries out a creation, and loses the answer to the first one; a
    repeated request then finds the name taken.
    """

    def __init__(self, store: MemoryStore, url: str) -> None:
        super().__init__(store, url)
        self.lose = 0
        self.fail = 0

    def put(self, name: str, data: bytes, *, create: bool) -> None:
        if self.fail and create:
            self.fail -= 1
            raise RemoteError(errno.EHOSTUNREACH, "the store does not answer", name)
        super().put(name, data, create=create)
        if self.lose and create:
            self.lose -= 1
            super().put(name, data, create=create)  # what the client's own retry does


class Conflicting(Bucket):
    """A store that answers some creations with a conflict, without carrying them out."""

    conflicts = 0

    def put(self, name: str, data: bytes, *, create: bool) -> None:
        if create and self.conflicts:
            type(self).conflicts -= 1
            raise FileExistsError(errno.EEXIST, "conflict", name)
        super().put(name, data, create=create)


def losing() -> tuple[ObjectStorage, Losing]:
    bucket = Losing(MemoryStore(), "memory://x")
    storage = ObjectStorage(bucket, DIGEST)
    assert storage.creates_once
    return storage, bucket


def test_a_publication_whose_answer_was_lost_has_succeeded() -> None:
    storage, bucket = losing()
    bucket.lose = 1
    storage.publish("gpt/x", b"mine", replace=False)
    with pytest.raises(FileExistsError):
        storage.publish("gpt/x", b"other", replace=False)
    with pytest.raises(FileExistsError):
        storage.publish("gpt/x", b"a longer one", replace=False)
    storage.publish("gpt/x", b"mine", replace=False)  # as by a daemon that has restarted


def test_a_claim_whose_answer_was_lost_is_won_and_only_once() -> None:
    storage, bucket = losing()
    bucket.lose = 1
    assert storage.claim("claims/a0001") is True
    assert storage.claim("claims/a0001") is False
    assert ObjectStorage(bucket, DIGEST).claim("claims/a0001") is False


def test_a_claim_that_has_failed_may_be_repeated() -> None:
    storage, bucket = losing()
    bucket.fail = 1
    with pytest.raises(RemoteError):
        storage.claim("claims/a0001")
    assert storage.claim("claims/a0001") is True
    bucket.fail = 1
    with pytest.raises(RemoteError):
        storage.claim("claims/a0002")
    assert ObjectStorage(bucket, DIGEST).claim("claims/a0002") is True
    assert storage.claim("claims/a0002") is False


def test_a_creation_that_meets_a_conflict_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.shared.storage.object_store._CONFLICT_SECONDS", 0.0)
    storage = ObjectStorage(Conflicting(MemoryStore(), "memory://x"), DIGEST)
    assert storage.creates_once
    monkeypatch.setattr(Conflicting, "conflicts", 3)
    storage.publish("gpt/x", b"mine", replace=False)
    monkeypatch.setattr(Conflicting, "conflicts", 100)
    with pytest.raises(RemoteError, match="because of a conflict each time"):
        storage.publish("gpt/y", b"mine", replace=False)


def test_a_store_without_exclusive_creation_gives_a_claim_to_nobody_or_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let two daemons put their claims before either looks.

    Neither wins. Then one of them wins the next number.
    """
    bucket = Ignoring(MemoryStore(), "memory://x")
    one, two = ObjectStorage(bucket, DIGEST), ObjectStorage(bucket, DIGEST)
    assert not one.creates_once
    put, met = Bucket.put, list[str]()

    def put_and_meet(self: Bucket, name: str, data: bytes, *, create: bool) -> None:
        put(self, name, data, create=False)
        if not met:
            met.append(f"claims/a0001.{'ab' * 16}")
            put(self, met[0], b"", create=False)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", put_and_meet)
        assert one.claim("claims/a0001") is False
    assert two.claim("claims/a0001") is False
    assert (one.claim("claims/a0002"), two.claim("claims/a0002"), two.claim("claims/a0003")) == (
        True,
        False,
        True,
    )


def test_attempts_are_unique_without_exclusive_creation() -> None:
    bucket = Ignoring(MemoryStore(), "memory://x")
    daemons = [Repository(ObjectStorage(bucket, DIGEST)) for _ in range(3)]
    won = [number for number in range(1, 13) for daemon in daemons if daemon.claim("gpt", number)]
    assert won == list(range(1, 13))
    assert daemons[0].newest_attempt("gpt") == 12
    assert not daemons[1].claim("gpt", 5)  # its claim was deleted long ago


def test_a_claim_is_kept_while_the_listing_after_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    repository, children = Repository(in_memory()), ObjectStorage.children
    with monkeypatch.context() as patch:
        patch.setattr(
            ObjectStorage,
            "children",
            mock.Mock(side_effect=RemoteError(errno.EIO, "the store answered 500")),
        )
        with pytest.raises(RemoteError):
            repository.claim("gpt", 1)
    assert ObjectStorage.children is children
    assert repository.claim("gpt", 1) is True
    assert repository.claim("gpt", 1) is False


def test_an_older_attempt_of_the_same_daemon_may_be_claimed_later() -> None:
    repository = Repository(in_memory())
    assert [repository.claim("gpt", number) for number in (6, 5)] == [True, True]
    assert repository.claim("gpt", 8) is True
    assert repository.claim("gpt", 4) is False  # 8 may have deleted the claim of another daemon


def test_what_was_measured_is_remembered_in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Ignoring(MemoryStore(), "memory://x")
    assert not ObjectStorage(bucket, DIGEST).creates_once
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorage, "measure", lambda self: pytest.fail("measured again"))
        assert not ObjectStorage(bucket, DIGEST).creates_once
    bucket.put(".ckptd/capabilities.json", b"not json", create=False)
    assert not ObjectStorage(bucket, DIGEST).creates_once
    assert bucket.get(".ckptd/capabilities.json", 100) == b'{"creates_once":false}'


# -- the root


def test_a_root_that_cannot_be_used_is_refused_and_unlocked() -> None:
    storage = in_memory(Stale)
    for _ in range(2):
        with pytest.raises(
            StorageError,
            match="^cannot use memory://x as the root for checkpoints: a listing lacks an ackn",
        ):
            storage.serve("host")


def test_large_objects_are_not_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = in_memory()
    storage.publish("old", b"12345", replace=False)
    monkeypatch.setattr("ckptd.shared.storage.object_store._MOST_TO_COPY", 4)
    assert not storage.link("old", "new", 5)
    monkeypatch.setattr("ckptd.shared.storage.object_store._MOST_TO_COPY", 5)
    assert storage.link("old", "new", 5)


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.ENOSPC, True), (errno.EIO, True), (errno.ETIMEDOUT, True), (errno.EOPNOTSUPP, False)],
)
def test_only_a_copy_that_will_never_come_is_written_instead(
    monkeypatch: pytest.MonkeyPatch, number: int, raised: bool
) -> None:
    """A copy that was asked for and not answered may still come, and would replace what
    was written under its name.
    """
    storage = in_memory()
    storage.publish("old", b"12345", replace=False)

    def refuse(self: Bucket, name: str, new: str) -> None:
        raise RemoteError(number, "no", name)

    monkeypatch.setattr(Bucket, "copy", refuse)
    with pytest.raises(RemoteError) if raised else ExitStack():
        assert not storage.link("old", "new", 5)


@each_case(
    ("sizes", "expected"),
    [
        ([1 << 20], [(8 << 20, 16)]),
        ([1 << 30] * 4, [(8 << 20, 16), (8 << 20, 8), (8 << 20, 5), (8 << 20, 4)]),
        ([200 << 30], [(-(-(200 << 30) // 9000), 5)]),
        ([2 << 40], [(-(-(2 << 40) // 9000), 2)]),
        ([1 << 30] * 20, [*((8 << 20, max(2, 16 // count)) for count in range(1, 21))]),
    ],
)
def test_uploads_share_their_memory_and_have_few_enough_parts(
    sizes: list[int], expected: list[tuple[int, int]]
) -> None:
    storage = in_memory()
    sinks = [storage.create(f"part-{number}", size, b"head") for number, size in enumerate(sizes)]
    assert [(sink._part_size, sink._at_once) for sink in sinks] == expected
    for sink in sinks:
        sink.discard()
    again = storage.create("again", 1, b"head")
    assert again._at_once == 16
    again.discard()


# -- every interleaving of claims without exclusive creation


def test_in_every_interleaving_at_most_one_of_three_claims_wins() -> None:
    """A claim takes three requests: look, put, look again.

    All 1,680 orders of three claimants are tried.
    """
    schedules, winners = interleavings(3, 3, 3), Counter[int]()
    assert len(schedules) == 1680
    with ThreadPoolExecutor(3) as pool:
        for schedule in schedules:
            bucket = InTurn(schedule)

            def claim(number: int, bucket: InTurn = bucket) -> bool:
                bucket.caller.number = number
                storage = ObjectStorage(bucket, DIGEST)
                storage.creates_once = False
                try:
                    return storage.claim("claims/a0001")
                finally:
                    bucket.leave()

            winners[sum(pool.map(claim, range(3)))] += 1
    assert winners.keys() == {0, 1}
    assert winners[1] > winners[0] / 10
