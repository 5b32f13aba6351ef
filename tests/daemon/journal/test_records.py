"""Tests records, and the state that they add up to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptd.daemon.journal import records as r
from tests.shared.samples import steady

NAMES = st.sampled_from(["a", "a", "a", "b"])
SMALL = st.integers(1, 2)
FILES = st.sampled_from(["f", "g", "h"])
TAGS = st.sampled_from(["t.a0001", "u.a0001"])

RECORDS: dict[type[r.Record], st.SearchStrategy[r.Record]] = {
    r.Begun: st.builds(r.Begun, job=NAMES, attempt=SMALL, world_size=SMALL),
    r.RankSealed: st.builds(
        r.RankSealed, job=NAMES, attempt=SMALL, step=SMALL, rank=SMALL, world_size=SMALL, tag=TAGS,
        segment=FILES, generation=SMALL, persist=st.booleans(),
    ),
    r.Staging: st.builds(r.Staging, job=NAMES, attempt=SMALL, step=SMALL, rank=SMALL, tag=TAGS,
    file=FILES), r.PartDurable: st.builds(
        r.PartDurable, job=NAMES, attempt=SMALL, step=SMALL, rank=SMALL, tag=TAGS, file=FILES,
        bytes=SMALL, index_sha256=FILES
    ),
    r.Committed: st.builds(r.Committed, job=NAMES, attempt=SMALL, step=st.none() | SMALL, tag=TAGS,
    seq=SMALL), r.Dropped: st.builds(r.Dropped, job=NAMES, attempt=SMALL, step=SMALL, tag=TAGS,
    reason=st.text(), files=st.lists(FILES, max_size=2)), r.Retiring: st.builds(r.Retiring,
    job=NAMES, tag=TAGS, files=st.lists(FILES, max_size=2)),
    r.Retired: st.builds(r.Retired, job=NAMES, tag=TAGS),
}  # fmt: skip
ANY = st.one_of(*RECORDS.values())


def state_of(*records: r.Record) -> r.JournalState:
    state = r.JournalState()
    for record in records:
        state.apply(record)
    return state


def staging(file: str, tag: str = "t.a0001") -> r.Staging:
    return r.Staging(job="gpt", attempt=1, step=5, rank=0, tag=tag, file=file)


def durable(file: str, tag: str = "t.a0001", nbytes: int = 10) -> r.PartDurable:
    return r.PartDurable(
        job="gpt",
        attempt=1,
        step=5,
        rank=0,
        tag=tag,
        file=file,
        bytes=nbytes,
        index_sha256="0" * 64,
    )


def sealed(attempt: int, step: int, world_size: int = 1) -> r.RankSealed:
    return r.RankSealed(
        job="gpt",
        attempt=attempt,
        step=step,
        rank=0,
        world_size=world_size,
        tag="t",
        segment="s",
        generation=1,
        persist=True,
    )


def begun(attempt: int, world_size: int = 1) -> r.Begun:
    return r.Begun(job="gpt", attempt=attempt, world_size=world_size)


# -- as bytes


def test_types_are_those_of_the_format() -> None:
    assert r.STATE == 1
    assert {number: cls.__name__ for number, cls in r.TYPES.items()} == {
        2: "Begun", 3: "RankSealed", 4: "Staging", 5: "PartDurable", 6: "Committed", 7: "Dropped",
        8: "Retiring", 9: "Retired",
    }  # fmt: skip
    assert set(RECORDS) == set(r.TYPES.values())


@steady
@given(ANY)
def test_records_round_trip(record: r.Record) -> None:
    number, payload = r.encode(record)
    assert r.TYPES[number] is type(record)
    assert r.decode(number, payload) == record
    optional = {"node"} if getattr(record, "node", None) is None else set()
    if isinstance(record, r.Dropped) and not record.files:
        optional.add("files")
    assert set(msgspec.msgpack.decode(payload)) == set(record.__struct_fields__) - optional


@steady
@given(st.lists(ANY, max_size=20))
def test_states_round_trip(records: list[r.Record]) -> None:
    state = state_of(*records)
    assert r.decode_state(r.encode_state(state)) == state


def test_a_record_that_is_not_of_its_type_is_refused() -> None:
    _, payload = r.encode(begun(1))
    for number in (3, 4, 5, 6, 7, 8):
        with pytest.raises(msgspec.DecodeError):
            r.decode(number, payload)
    with pytest.raises(KeyError):
        r.decode(99, payload)


def test_unknown_keys_are_ignored() -> None:
    assert r.decode(
        9, msgspec.msgpack.encode({"job": "gpt", "tag": "t", "novelty": [1]})
    ) == r.Retired(job="gpt", tag="t")


def test_states_share_nothing() -> None:
    first, second = r.JournalState(), r.JournalState()
    first.apply(begun(1))
    first.apply(staging("f"))
    assert second == r.JournalState(jobs={}, staged={}, retiring={})


def test_jobs_with_nothing_under_way_are_forgotten_unless_they_live() -> None:
    state = r.JournalState(
        jobs={name: r.JobState(attempt=1) for name in "abcd"},
        staged={"b/t": {"f": None}},
        retiring={"c/t": ["f"]},
    )
    state.forget_all_but({"a", "x"})
    assert sorted(state.jobs) == ["a", "b", "c"]
    assert (state.staged, state.retiring) == ({"b/t": {"f": None}}, {"c/t": ["f"]})


# -- the state that they add up to


def test_attempts_and_seals_only_increase() -> None:
    state = state_of(begun(1, 4), sealed(1, 7, 4), sealed(1, 5, 4))
    assert state.jobs == {"gpt": r.JobState(attempt=1, world_size=4, sealed_step=7, seq=0)}
    state.apply(begun(2, 8))
    assert state.jobs == {"gpt": r.JobState(attempt=2, world_size=8, sealed_step=-1, seq=0)}
    for late in (begun(1, 4), sealed(1, 9, 4), begun(2, 8)):
        state.apply(late)
    assert state.jobs == {"gpt": r.JobState(attempt=2, world_size=8, sealed_step=-1, seq=0)}


def test_seq_only_increases() -> None:
    committed = [r.Committed(job="gpt", attempt=1, step=5, tag="t", seq=seq) for seq in (3, 9, 4)]
    assert state_of(*committed).jobs["gpt"].seq == 9


def test_files_are_staged_until_the_save_is_committed_or_dropped() -> None:
    state = state_of(
        staging("f"), staging("g"), durable("f"), staging("f"), staging("h", "u.a0001")
    )
    assert state.staged == {
        "gpt/t.a0001": {"f": durable("f"), "g": None},
        "gpt/u.a0001": {"h": None},
    }
    state.apply(r.Committed(job="gpt", attempt=1, step=5, tag="t.a0001", seq=1))
    assert state.staged == {"gpt/u.a0001": {"h": None}}
    state.apply(r.Dropped(job="gpt", attempt=1, step=5, tag="u.a0001", reason="x"))
    assert state.staged == {}


def test_files_of_another_save_of_the_same_checkpoint_stay_staged() -> None:
    state = state_of(staging("f"), staging("g"))
    dropped = r.Dropped(job="gpt", attempt=1, step=5, tag="t.a0001", reason="x", files=["f"])
    for _ in range(2):
        state.apply(dropped)
        assert state.staged == {"gpt/t.a0001": {"g": None}}
    state.apply(r.Dropped(job="gpt", attempt=1, step=5, tag="t.a0001", reason="x", files=["g"]))
    assert state.staged == {}


def test_a_part_is_known_without_its_staging() -> None:
    assert state_of(durable("f")).staged == {"gpt/t.a0001": {"f": durable("f")}}


def test_a_checkpoint_is_retiring_until_it_is_retired() -> None:
    state = state_of(
        r.Retiring(job="gpt", tag="t", files=["f", "g"]), r.Retiring(job="gpt", tag="u", files=[])
    )
    assert state.retiring == {"gpt/t": ["f", "g"], "gpt/u": []}
    state.apply(r.Retired(job="gpt", tag="t"))
    state.apply(r.Retired(job="gpt", tag="never heard of"))
    assert state.retiring == {"gpt/u": []}
    state.apply(r.Retiring(job="gpt", tag="t.a0001", files=["f"]))
    # The name is taken again, so it must have been free.
    state.apply(r.Committed(job="gpt", attempt=1, step=5, tag="t.a0001", seq=1))
    assert state.retiring == {"gpt/u": []}


@steady
# Where the journal was lost, a seal may be recorded before its attempt.
@example([sealed(1, 5), begun(1)])
@given(st.lists(ANY, max_size=30))
def test_replay_is_idempotent(records: list[r.Record]) -> None:
    assert state_of(*records, *records) == state_of(*records)


def test_a_record_of_an_unknown_type_changes_nothing() -> None:
    state = r.JournalState()
    state.apply(r.Record())
    assert state == r.JournalState()


@steady
@given(ANY, st.lists(ANY, max_size=20))
def test_a_record_counts_once(record: r.Record, before: list[r.Record]) -> None:
    assert state_of(*before, record, record) == state_of(*before, record)


@steady
@given(st.lists(ANY, max_size=30))
def test_attempts_steps_and_numbers_never_move_back(records: list[r.Record]) -> None:
    state = r.JournalState()
    before: dict[str, tuple[Any, ...]] = {}
    for record in records:
        state.apply(record)
        after = {name: (job.attempt, job.sealed_step, job.seq) for name, job in state.jobs.items()}
        assert before.keys() <= after.keys()
        assert all(
            after[name][:2] >= (attempt, step) and after[name][2] >= seq
            for name, (attempt, step, seq) in before.items()
        )
        before = after


# -- a state that spans records


def again(encoded: list[tuple[int, bytes]]) -> r.JournalState:
    """Replay records as a reader of any version does."""
    state = r.JournalState()
    for kind, payload in encoded:
        if kind == r.STATE:
            state = r.decode_state(payload)
        else:
            state.apply(r.decode(kind, payload))
    return state


@steady
@given(st.lists(ANY, max_size=20), st.integers(64, 400))
def test_a_state_that_spans_records_is_the_same_state(records: list[r.Record], most: int) -> None:
    state = state_of(*records)
    encoded, left_out = r.encode_whole(state, most, 1 << 20)
    assert left_out == 0
    assert [kind for kind, _ in encoded].count(r.STATE) == 1
    assert encoded[0][0] == r.STATE
    assert len(encoded[0][1]) <= most
    assert again(encoded) == state


def test_a_state_that_fits_is_one_record() -> None:
    state = state_of(begun(1), staging("f"), durable("g"))
    whole = r.encode_state(state)
    assert r.encode_whole(state, len(whole), 0) == ([(r.STATE, whole)], 0)
    assert len(r.encode_whole(state, len(whole) - 1, 1 << 20)[0]) > 1


def test_files_that_were_never_durable_are_left_out_first() -> None:
    state = state_of(
        begun(2), durable("d", "u.a0001"), *(staging(f"f{n}", f"t.a{n:04d}") for n in range(100))
    )
    state.retiring = {"gpt/r": ["f"]}
    encoded, left_out = r.encode_whole(state, 64, 2000)
    assert 0 < left_out < 100
    assert sum(len(payload) + 40 for _, payload in encoded) <= 2000
    kept = again(encoded)
    assert (kept.jobs, kept.retiring, kept.staged["gpt/u.a0001"]) == (
        state.jobs,
        state.retiring,
        {"d": durable("d", "u.a0001")},
    )
    assert len(kept.staged) == 101 - left_out


def test_the_size_of_saves_and_deletions_under_way_leaves_out_the_jobs() -> None:
    state = state_of(begun(1))
    empty = r.under_way(state)
    assert empty == r.under_way(r.JournalState())
    state.apply(staging("f" * 1000))
    assert 1000 < r.under_way(state) - empty < 1100
    state.apply(r.Dropped(job="gpt", attempt=1, step=5, tag="t.a0001", reason=""))
    assert r.under_way(state) == empty
