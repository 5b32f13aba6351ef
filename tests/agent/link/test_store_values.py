"""Tests values in the job's store: of any size, whole or not there, and never waited
for long once another rank has removed them.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from torch.distributed import DistStoreError, HashStore, Store, TCPStore  # type: ignore[attr-defined]

from ckptd.agent.link import store_values
from ckptd.agent.link.store_values import StoreValues, pieces
from ckptd.shared.errors import SnapshotFailed
from tests.support.cases import each_case


@pytest.fixture(params=["tcp", "hash"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "hash":
        return HashStore()
    return TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def forever() -> None:
    return None


@each_case("length", [0, 1, 9 << 20])
def test_a_value_of_any_size_is_taken_whole_and_leaves_nothing(store: Store, length: int) -> None:
    values, value = (
        StoreValues(store, 2),
        bytes(range(256)) * (length // 256) + b"x" * (length % 256),
    )
    assert values.take("key", time.monotonic(), forever) is None
    values.put("key", value)
    assert values.read("key") == value
    assert values.take("key", time.monotonic() + 60, forever) == value
    assert not values.there("key")


def test_several_values_are_taken_together(store: Store) -> None:
    values = StoreValues(store, 2)
    for number in range(3):
        values.put(str(number), b"%d" % number)
    assert values.there("0", "1", "2")
    assert not values.there("0", "3")
    assert values.take_all(["2", "0"]) == [b"2", b"0"]
    assert values.there("1")


def test_a_name_gives_the_value_that_it_names_and_leaves_it(store: Store) -> None:
    values = StoreValues(store, 2)
    values.put("all", b"for all")
    for rank in range(2):
        values.put_name(str(rank), "all")
        assert values.take(str(rank), time.monotonic() + 60, forever) == b"for all"
        assert not values.there(str(rank))
    assert values.read("all") == b"for all"
    values.remove("all", pieces(b"for all"))
    assert not values.there("all")


def test_the_first_piece_which_announces_the_others_is_written_last() -> None:
    values, written = StoreValues(HashStore(), 2), list[tuple[str, int]]()
    with mock.patch.object(values, "_set", lambda name, piece: written.append((name, len(piece)))):
        values.put("key", bytes(2 * store_values._PIECE + 1))
    assert written == [
        ("key/2", 1),
        ("key/1", store_values._PIECE),
        ("key/0", store_values._PIECE + 4),
    ]


def test_a_value_that_another_rank_has_removed_is_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_values, "GONE_SECONDS", 0.1)
    values = StoreValues(store, 2)
    values.put("there", b"1")
    with pytest.raises(RuntimeError):
        values.take_all(["there", "gone"])
    assert values.there("there")


@pytest.mark.parametrize("count", [1, 2])
def test_a_store_that_is_slow_to_answer_is_asked_again(
    store: Store, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that serves the store may get no CPU for seconds, and its client then
    reports a timeout, as for a key that is gone.
    """

    class Slow:
        timeouts = 2

        def __getattr__(self, name: str) -> Any:
            if name in ("get", "multi_get") and self.timeouts:
                self.timeouts -= 1
                raise DistStoreError("wait timeout after 2000ms, keys: /key")
            return getattr(client, name)

    values, keys = StoreValues(store, 2), [str(number) for number in range(count)]
    for key in keys:
        values.put(key, b"value of " + key.encode())
    client, slow = values._store, Slow()
    monkeypatch.setattr(values, "_store", slow)
    assert values.take_all(keys) == [b"value of " + key.encode() for key in keys]
    assert (slow.timeouts, values.there(*keys)) == (0, False)


def test_an_unwanted_value_is_not_waited_for(store: Store) -> None:
    with pytest.raises(SnapshotFailed, match="^over$"):
        StoreValues(store, 2).take("key", time.monotonic() + 60, lambda: SnapshotFailed("over"))
