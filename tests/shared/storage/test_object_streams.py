"""Tests sources and sinks of an object store: order, memory, failures and discarded
uploads.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import MemoryStore

from ckptd.shared.errors import RemoteError
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_streams import FIRST, ObjectSink, ObjectSource

HEAD = b"head".ljust(4096, b"\0")


class Counting(Bucket):
    """A bucket that counts its requests for ranges."""

    requests = 0

    def read(self, name: str, offset: int, length: int) -> memoryview:
        self.requests += 1
        return super().read(name, offset, length)


class Stuck(Bucket):
    """A store that takes no more than the first piece until it is told to go on, and
    then fails if it has an error.
    """

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__(MemoryStore(), "memory://x")
        self.go_on, self.error = threading.Event(), error

    def upload(self, name: str, pieces: Iterable[bytes], part_size: int, at_once: int) -> None:
        iterator = iter(pieces)
        first = next(iterator)
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        super().upload(name, [first, *iterator], part_size, at_once)


class LosingAnswers(Bucket):
    """A store whose last answer to an upload is lost."""

    def upload(self, name: str, pieces: Iterable[bytes], part_size: int, at_once: int) -> None:
        super().upload(name, pieces, part_size, at_once)
        raise RemoteError(errno.EHOSTUNREACH, "the store does not answer", name)


def bucket() -> Bucket:
    return Bucket(MemoryStore(), "memory://x")


def sink_in(where: Bucket, ended: list[int] | None = None) -> ObjectSink:
    return ObjectSink(
        where, "object", HEAD, 4096, 2, lambda: (ended if ended is not None else []).append(1)
    )


def test_a_small_object_takes_one_request_and_a_large_one_more() -> None:
    where = Counting(MemoryStore(), "memory://x")
    for size, requests in ((0, 0), (1, 0), (FIRST, 0), (FIRST + 1, 1)):
        data = os.urandom(size)
        where.put("object", data, create=False)
        source = ObjectSource(where, "object")
        before, buffer = where.requests, bytearray(size + 5)
        assert (source.size, source.read(memoryview(buffer), 0), bytes(buffer[:size])) == (
            size,
            size,
            data,
        )
        assert where.requests - before == requests


def test_pieces_from_many_threads_make_one_object() -> None:
    where, ended = bucket(), list[int]()
    sink = sink_in(where, ended)
    with ThreadPoolExecutor(8) as pool:
        offsets = list(pool.map(lambda number: sink.append(bytes([number]) * 4096), range(200)))
    assert ended == []
    sink.finish()
    data = where.get("object", 1 << 30)
    assert (len(data), data[:4096], ended) == (201 * 4096, HEAD, [1])
    assert [
        data[offset : offset + 4096] == bytes([number]) * 4096
        for number, offset in enumerate(offsets)
    ] == [True] * 200


def test_the_caller_may_use_its_buffer_again_at_once() -> None:
    where, buffer = bucket(), bytearray(b"1" * 4096)
    sink = sink_in(where)
    sink.append(buffer)
    buffer[:] = b"2" * 4096
    sink.append(buffer)
    sink.finish()
    assert where.get("object", 1 << 20)[4096:] == b"1" * 4096 + b"2" * 4096


def test_append_waits_for_a_store_that_is_slow() -> None:
    where = Stuck()
    sink, done = sink_in(where), list[int]()

    def append() -> None:
        for _ in range(5):
            sink.append(bytes(4096))
            done.append(1)

    thread = threading.Thread(target=append)
    thread.start()
    time.sleep(0.2)
    assert len(done) <= 2  # one piece waits for the uploader, and one is with it
    where.go_on.set()
    thread.join(10)
    sink.finish()
    assert (len(done), where.head("object").size) == (5, 6 * 4096)


def test_the_error_of_an_upload_reaches_every_caller() -> None:
    where, ended = Stuck(RemoteError(errno.EACCES, "the store answered 403", "object")), list[int]()
    sink = sink_in(where, ended)
    where.go_on.set()

    def append_many() -> None:
        for _ in range(100):
            sink.append(bytes(4096))

    with pytest.raises(RemoteError, match="answered 403"):
        append_many()
    with pytest.raises(RemoteError, match="answered 403"):
        sink.finish()
    sink.discard()
    assert ended == [1]


def test_a_lost_answer_to_the_last_request_is_found_out() -> None:
    where = LosingAnswers(MemoryStore(), "memory://x")
    sink = sink_in(where)
    sink.append(bytes(4096))
    sink.finish()
    assert where.head("object").size == 2 * 4096


def test_an_upload_of_another_length_is_not_taken_for_this_one() -> None:
    where = Stuck(RemoteError(errno.EIO, "the store answered 500", "object"))
    where.put("object", b"another", create=True)
    sink = sink_in(where)
    where.go_on.set()
    with pytest.raises(RemoteError, match="answered 500"):
        sink.finish()


def test_a_discarded_upload_is_aborted_and_leaves_nothing() -> None:
    where, ended = bucket(), list[int]()
    sink = sink_in(where, ended)
    sink.append(bytes(9 << 20))
    sink.discard()
    assert (where.children(""), ended, sink._thread.is_alive()) == (([], []), [1], False)


def test_a_small_object_is_written_with_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    where = bucket()
    monkeypatch.setattr(Bucket, "upload", lambda *arguments: pytest.fail("a multipart upload"))
    sink = ObjectSink(where, "object", HEAD, 4 * 4096, 2, lambda: None)
    sink.append(b"1" * 8192)
    sink.finish()
    assert where.get("object", 1 << 20) == HEAD + b"1" * 8192
    discarded = ObjectSink(where, "other", HEAD, 4 * 4096, 2, lambda: None)
    discarded.discard()
    assert [found.name for found in where.children("")[1]] == ["object"]


class Panicking(Bucket):
    """A client that ends with an exception that is no Exception, as a panic in Rust is."""

    def upload(self, name: str, pieces: Iterable[bytes], part_size: int, at_once: int) -> None:
        raise SystemExit(1)


def test_an_upload_that_ends_in_any_way_but_well_is_not_taken_for_done() -> None:
    sink = sink_in(Panicking(MemoryStore(), "memory://x"))
    with pytest.raises(RemoteError, match="the upload has ended with SystemExit"):
        sink.finish()
