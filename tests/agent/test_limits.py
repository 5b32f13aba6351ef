"""Tests that a snapshot refuses what a reader would refuse: each limit of a state in
FORMAT.md, section 9, from both sides.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ckptd.agent.link.arguments import make_request
from ckptd.agent.plan.layout import plan_locally
from ckptd.agent.state import packer
from ckptd.agent.state.capture import Habits, capture, values_document
from ckptd.agent.state.packer import Packer
from ckptd.agent.state.values import NESTED, decode
from ckptd.shared.errors import IntegrityError, InvalidRequest, UnsavableValue
from ckptd.shared.formats import bounds
from ckptd.shared.formats.bounds import MAX_DEPTH, MAX_DIMENSIONS, MAX_OBJECTS
from ckptd.shared.formats.plain_values import decode_plain
from ckptd.shared.formats.plan import MAX_TEXT, Item, Plan, Region
from ckptd.shared.formats.snapshot_request import MAX_REQUEST, SnapshotRequest
from tests.shared.samples import WRITER
from tests.support import kinds
from tests.support.cases import each_case

SMALL, MORE = 20_000, 20_001


def deep(levels: int, inside: Any = 0) -> Any:
    for _ in range(levels):
        inside = [inside]
    return inside


def read(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that both readers refuse a document of this state, which the writer would
    refuse.
    """
    with monkeypatch.context() as unchecked:
        unchecked.setattr(packer, "check_size", lambda *_, **__: None)
        document = Packer().encode_map({"state": Packer().pack(state, "")})
    for reader in (lambda: decode(document), lambda: decode_plain(document, str)):
        with pytest.raises(
            IntegrityError,
            match="^values document has more than .* lists, or .* maps and texts, the most that",
        ):
            reader()


@each_case(
    "state",
    [
        ["ab"] * MORE, {"texts": ("ab",) * SMALL}, {str(n): 0 for n in range(SMALL)},
        dict.fromkeys(range(SMALL), "a"), [{}] * MORE, [(1,)] * MORE, [2**70] * MORE,
        [torch.float32] * MORE, [kinds.Colour.RED] * SMALL, [kinds.Access(5)] * SMALL,
        [[]] * (5 * SMALL), set(map(str, range(SMALL))), [{"a": 1.0}] * (SMALL // 2 + 1),
    ],
    ids=lambda state: f"{type(state).__name__} of {type(next(iter(state))).__name__}",
)  # fmt: skip
def test_too_many_objects_are_refused_by_the_writer_and_by_the_readers(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_OBJECTS", SMALL)
    monkeypatch.setattr(packer, "_ROOM", 0)
    with pytest.raises(
        UnsavableValue,
        match="^the state has more than .* lists, or 20,000 maps and texts, the most that ckptd "
        "writes or reads",
    ):
        capture(state, habits=Habits())
    read(state, monkeypatch)


@each_case("number", range(20))
def test_the_writer_counts_at_least_what_a_reader_counts(number: int) -> None:
    rng = random.Random(number)
    made = Packer()
    document = made.encode([kinds.value(rng) for _ in range(200)])
    assert made.objects >= sum(bounds._count(document, NESTED, MAX_OBJECTS))


def test_a_million_texts_after_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that is shorter than one that was checked may hold more objects."""
    monkeypatch.setattr(bounds, "MAX_OBJECTS", 1 << 20)
    habits = Habits()
    capture({"bytes": b"\x00" * (9 << 20)}, habits=habits)
    with pytest.raises(
        UnsavableValue,
        match="^the state has more than .* save them as tensors or NumPy arrays instead$",
    ):
        capture({"texts": ["a"] * ((1 << 20) + 1)}, habits=habits)


def test_a_values_document_that_is_too_long_is_refused_before_the_ranks_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packer, "MAX_DOCUMENT", 3 << 20)
    values_document(capture({"bytes": b"\x00" * ((2 << 20) - 100)}), rng=True)
    with pytest.raises(
        UnsavableValue,
        match=r"^the state: its values, without the tensors, take 2,097,164 bytes; expected at "
        r"most "
        r"2,097,152: ",
    ):
        capture({"bytes": b"\x00" * (2 << 20)})


def test_levels() -> None:
    assert decode(Packer().encode(deep(MAX_DEPTH - 1, [1]))) == deep(MAX_DEPTH - 1, [1])
    with pytest.raises(UnsavableValue, match="it lies in more than 100 containers"):
        Packer().encode(deep(MAX_DEPTH, [1]))


def test_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 10**4299 * 9
    assert decode(capture({"n": [most, -most]}).state) == {"n": [most, -most]}
    before = sys.get_int_max_str_digits()
    for limit in (before, 0):  # with 0, this process writes more digits than another reads
        sys.set_int_max_str_digits(limit)
        try:
            with pytest.raises(
                UnsavableValue,
                match=r"^n\.0: an integer of about 4,301 digits; expected at most 4,300",
            ):
                capture({"n": [-(10**4300)]})
        finally:
            sys.set_int_max_str_digits(before)
    with pytest.raises(IntegrityError, match="values document cannot be read"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(6, b"1" * 4301)))


def test_tensors_and_their_names() -> None:
    for tensors, problem in (
        (
            {"w": torch.empty((1,) * (MAX_DIMENSIONS + 1))},
            "w: a tensor of 65 dimensions cannot be saved",
        ),
        (
            {"w" * MAX_TEXT: torch.empty(1)},
            "this key has 16,384 characters; expected fewer than 16,384",
        ),
    ):
        with pytest.raises(UnsavableValue, match=problem):
            plan_locally(tensors)
    for item in (
        Item("w", "float32", (1,) * 65, (0,) * 65, (1,) * 65, None, 0), Item("w" * (MAX_TEXT + 1),
        "float32", (1,), (0,), (1,), None, 0),
    ):  # fmt: skip
        with pytest.raises(IntegrityError):
            Plan.decode(Plan([Region(0, 4, 4)], [item], [], None, WRITER).encode())


def test_a_request() -> None:
    with pytest.raises(
        InvalidRequest, match="^metrics and user_content together exceed 524288 bytes"
    ):
        make_request(1, None, True, "wait", {}, "ü" * (MAX_REQUEST // 12 + 1))
    longest = make_request(
        1, None, True, "wait", {"ü" * 1000: 1.0}, "ü" * (MAX_REQUEST // 12 - 1000)
    )
    assert SnapshotRequest.decode(longest.encode()) == longest
    with pytest.raises(IntegrityError, match="expected at most 1,048,576"):
        SnapshotRequest.decode(bytes(MAX_REQUEST + 1))


def test_the_table_of_limits_has_these_rows() -> None:
    """A new row of the table needs a test of both sides here, or a place among those of
    other documents.
    """
    text = (Path(bounds.__file__).parents[1] / "FORMAT.md").read_text()
    table = (
        text[text.index("## 9. Limits") :]
        .partition("| what | at most |\n|---|---|\n")[2]
        .partition("\n\n")[0]
    )
    rows = [row.split("|")[1].strip() for row in table.splitlines()]
    here = [
        "maps, texts and extensions in one plan, values document or manifest, those in nested "
        "extensions included", "lists in one of these",
        "bytes of a plan, index or values "
        "document", "bytes of a request document", "dimensions of a tensor",
        "levels of lists and maps in a state or in "
        "`user_content`", "digits of an integer", "characters of a name of an item or alias",
    ]  # fmt: skip
    elsewhere = {
        "bytes of a manifest": "tests/shared/formats/test_bounds.py, daemon/saver",
        "bytes of a metadata object": "tests/shared/formats/test_metadata_object.py",
        "bytes of its index, and of one block, before "
        "compression": "tests/shared/formats/test_metadata_object.py",
        "dimensions of a mesh": "tests/shared/formats/test_sharding.py",
        "elements of a tensor: the product of its dimensions, those of size 0 left "
        "out": "tests/shared/formats/test_bounds.py; torch has none",
        "items, and aliases, of one "
        "part": "tests/agent/plan/test_layout.py, tests/shared/formats/test_bounds.py",
        "regions of a "
        "plan": "tests/shared/formats/test_plan.py; a writer has one for each element size",
        "chunks, bases, and data files, of one part": "tests/shared/formats/test_bounds.py",
        "deltas in a chain": "tests/shared/formats/test_deltas.py; a writer has at most 16",
        "bytes of `global_plan`": "tests/shared/test_vectors.py; the writer's is a digest",
        "groups in `replicas`, and bytes of `digests` and `keys` of "
        "each": "tests/shared/formats/test_snapshot_request.py",
        "ranks of a `node`": "tests/shared/formats/test_snapshot_request.py",
        "policies in `retention`, and characters of "
        "each": "tests/shared/test_retention.py, tests/shared/test_vectors.py",
        "`created` of a request": "tests/shared/formats/test_bounds.py; the writer's clock",
        "characters of a device type": "tests/shared/formats/test_plan.py; torch's own",
        "entries of `writer`, and characters of each "
        "value": "tests/shared/formats/test_bounds.py; three entries of ckptd's own",
        "characters of `job`, `tag` and `created` in a manifest, and of `tag` in an "
        "index": "tests/shared/test_names.py",
        "characters of `job` in an index, and of `tag` in a "
        "request": "tests/shared/test_vectors.py, tests/shared/formats/test_snapshot_request.py",
    }
    assert sorted(rows) == sorted([*here, *elsewhere])
