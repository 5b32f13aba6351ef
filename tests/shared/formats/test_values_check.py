"""Tests which values documents are refused, and that everything that is accepted can be
decoded, with torch and without.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import io
import random
import types
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckptd.agent.state.packer import Packer
from ckptd.agent.state.tree import RECORDS, per_rank, tensor_names
from ckptd.agent.state.values import PATHS, decode
from ckptd.shared.errors import CkptdError, IntegrityError, NewerFormat
from ckptd.shared.formats import values_check
from ckptd.shared.formats.bounds import MAX_DEPTH, MAX_DEPTH_READ, MAX_OBJECTS
from ckptd.shared.formats.plain_values import decode_plain
from ckptd.shared.formats.values_check import Checked, check_values
from tests.golden import make
from tests.support.cases import each_case

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


def document(value: Any, **more: Any) -> bytes:
    return pack({"state": {"model": {"odd": value}}, "rng": None, **more})


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name", ["values", "values-with-classes", "values-with-names", "values-with-records"]
)
def test_the_golden_documents_are_sound(name: str) -> None:
    data = (make.PLACE / f"{name}.msgpack").read_bytes()
    names = tensor_names(decode(data)["state"])
    assert names or name != "values"
    assert check_values(data).tensors == set(names)


def test_everything_that_the_packer_writes_is_sound() -> None:
    packer = Packer()
    state = {
        "w": torch.ones(2), "model": torch.nn.Linear(2, 2).state_dict(), "list": [1, 2.5, None, "x",
        b"y", [torch.ones(1)], -(1 << 40)], "tuple": (1, (2, "x")), "sets": [{1, 2},
        frozenset({("a", frozenset({3}))})], "keys": {1: "a", ("b", 2): [3], None: 4, 1.5: 5},
        "big": 1 << 200, "complex": 1 + 2j, "arrays": [np.arange(5), np.float32(3), np.zeros((2,
        0)), np.array("text"),
                                                       np.zeros(2, [("a", "f4"), ("b", "i8")]),
                                                       np.array("2026-01-02", "datetime64[ns]")],
        "counter": collections.Counter("aab"), "deque": collections.deque([1, 2], 7),
        "ordered": collections.OrderedDict(a=1), "default": collections.defaultdict(list, a=[1]),
        "own": per_rank({"position": 3}), "date": dt.date(2026, 1, 2), "now": dt.datetime(2026, 1,
        2, tzinfo=dt.UTC), "decimal": decimal.Decimal("1.50"), "mode": Mode.READ | Mode.WRITE,
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "size": torch.Size([2, 3]),
        "layout": torch.strided, "bytes": bytearray(b"x"), "namespace": types.SimpleNamespace(a=1),
        "range": range(3), "slice": slice(1, None), "class": torch.optim.AdamW,
        "stream": [io.BytesIO(b"abc"), io.StringIO("abc")], "sparse": torch.eye(3).to_sparse(),
        "floats": [0.5] * 300_000, "ints": list(range(-300, 70_000)),
        "texts": ["a" * n for n in range(300)], "long": "x" * 70_000 + "é" * 70_000,
    }  # fmt: skip
    found = check_values(packer.encode_map({"state": packer.pack(state, ""), "rng": None}))
    assert found.tensors == packer.tensors.keys()
    assert (found.unjudged, found.newer) == (3, 0)  # the namespace, the slice and the sparse tensor


WRONG: list[tuple[bytes, str]] = [
    (b"", "is cut short"),
    (b"\xc1", "is not a map"),
    (pack([1]), "is not a map"),
    (pack({"rng": None}), "has no member 'state'"),
    (pack({"state": {}}) + b"\x01", "has 1 bytes behind its end"),
    (document(1, rng=3), "'rng' is neither a map nor null"),
    (document(1, parameters=3), "'parameters' is not a map"),
    (document(1, versions={"model": {"x": 7}}), "'versions.model.x' is not a map"),
    (document(1, versions={"model": 7}), "'versions.model' is not a map"),
    (pack({"state": {"a": [1, {1: 2}]}}), "'state.a.1' has a key that is not a text"),
    (document(Ext(1, b"\xff")), "'state.model.odd'"),
    (document(Ext(2, pack(3))), "is not a list"),
    (document(Ext(2, pack([1]) + b"\x01")), "is a value of type 2 with 1 bytes behind its end"),
    (document(Ext(3, pack([[1]]))), "'state.model.odd.0' has a list as an item of a set"),
    (document(Ext(3, pack([Ext(3, pack([1]))]))), "has a value of type 3 as an item of a set"),
    (document(Ext(4, pack([Ext(2, pack([[1]]))]))), "has a list as an item of a set"),
    (document(Ext(5, pack([[{}, 1]]))), "has a dict as the key of a dict"),
    (document(Ext(5, pack([[1, 2, 3]]))), "with 3 parts; expected 2"),
    (
        document(Ext(5, pack([[Ext(20, pack(["module", {}])), 1]]))),
        "has a value of type 20 as the key of a dict",
    ),
    (document(Ext(6, b"12x")), "is an integer that is not written in digits"),
    (document(Ext(6, b"1" * 5000)), "is an integer that is not written in digits"),
    (document(Ext(7, pack([1.0]))), "is a value of type 7 with 1 parts; expected 2"),
    (document(Ext(7, pack([1.0, "x"]))), "has a part of the type str"),
    (document(Ext(8, b"x")), "is a NumPy array that is no .npy file"),
    (document(Ext(8, npy(np.zeros(9))[:-1])), "is a NumPy array of shape [9] that is cut short"),
    (document(Ext(8, npy(np.zeros(9)).replace(b"<f8", b"|O8"))), "cannot be read without pickles"),
    (document(Ext(8, npy(np.zeros(9)).replace(b"<f8", b"<q8"))), "cannot be read without pickles"),
    (document(Ext(8, npy(np.zeros(9)).replace(b"(9,)", b"(-1)"))), "whose header cannot be read"),
    (document(Ext(9, npy(np.zeros(9)))), "is a NumPy scalar that has dimensions"),
    (document(Ext(10, pack(["m", "Color"]))), "is a value of type 10 with 2 parts; expected 3"),
    (document(Ext(10, pack(["m", "Color", 3]))), "where a text is expected"),
    (document(Ext(11, pack(["Posix", "x"]))), "is a path of the unknown class 'Posix'"),
    (document(Ext(12, b"\xff")), "has a text that is not UTF-8"),
    (document(Ext(14, pack([1.5]))), "has a part of the type float"),
    (document(Ext(14, pack([-1]))), "is a torch.Size with the length -1"),
    (document(Ext(17, pack([[1], -1]))), "is a deque of at most -1 items"),
    (document(Ext(17, pack([[1]]))), "is a value of type 17 with 1 parts; expected 2"),
    (document(Ext(20, pack([3, {}]))), "where a text is expected"),
    (document(Ext(22, pack(["optimizer", {}]))), "is a value of type 22 with 2 parts; expected 3"),
    (
        document(Ext(23, pack(["date", 2026, 13, 1]))),
        "is a value of the standard library that cannot be made: ['date', 2026, 13, 1]",
    ),
    (
        document(Ext(23, pack(["Decimal", "x"]))),
        "is a value of the standard library that cannot be made",
    ),
    (
        document(Ext(24, pack(["slice", "", {"start": 1}]))),
        "is a record of kind 'slice' without 'stop', 'step'",
    ),
    (
        document(Ext(24, pack(["slice", "", 3]))),
        "is a record of kind 'slice' whose fields are not a map",
    ),
    (document(Ext(25, pack([3, []]))), "where a text is expected"),
    (document(Ext(27, pack(["m", "Q", ["A"], "x"]))), "has a part of the type str"),
    (document(Ext(30, pack(["BytesIO", b"x", -1]))), "is a BytesIO at the position -1"),
    (document(Ext(30, pack(["BytesIO", "x", 0]))), "is a stream of bytes without bytes"),
    (document(Ext(30, pack(["StringIO", "x", 0, "x"]))), "is a stream whose lines end with 'x'"),
    (document(Ext(0, b"x")), "has the extension type 0, which no version of ckptd writes"),
    (document(Ext(-1, b"abcd")), "has the extension type -1"),
    (document([1, 2])[:-8], "is cut short"),
    (document(msgspec.Raw(b"\xdd\xff\xff\xff\xff")), "is cut short"),
    (document(msgspec.Raw(b"\xa3a\xffb")), "is not UTF-8"),
    (document("x" * 3_000_000)[:-30] + b"\xff" * 30, "is not UTF-8"),
]


@each_case(("data", "words"), WRONG)
def test_what_no_reader_could_make_is_refused_by_its_key(data: bytes, words: str) -> None:
    with pytest.raises(IntegrityError, match="^values document") as refusal:
        check_values(data)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def nested(levels: int, how: str) -> bytes:
    inner = b"\x01"
    for _ in range(levels):
        if how == "list":
            inner = b"\x91" + inner
        elif how == "map":
            inner = b"\x81\xa1a" + inner
        else:
            inner = pack(
                Ext(
                    {"tuple": 2, "own": 21, "dict": 5}[how],
                    {"tuple": b"\x91", "own": b"", "dict": b"\x91\x92\x01"}[how] + inner,
                )
            )
    return b"\x81\xa5state" + inner


@each_case("how", ["list", "map", "tuple", "own", "dict"])
def test_a_reader_and_the_check_accept_the_same_depth(how: str) -> None:
    # Python 3.11 decodes hardly more levels of the others
    most = MAX_DEPTH_READ if how in ("list", "map") else 2 * MAX_DEPTH + 2
    sound = nested(most - 1, how)
    assert check_values(sound, most) == Checked()
    decode(sound)
    with pytest.raises(IntegrityError, match=f"nested more than {most} levels"):
        check_values(nested(most, how), most)
    with pytest.raises(IntegrityError):
        decode(nested(MAX_DEPTH_READ, how))


def test_nested_sets_take_time_in_proportion_to_their_number() -> None:
    inner = pack(Ext(4, pack([1])))
    for _ in range(60):
        inner = pack(Ext(4, b"\x92\x01" + inner))
    assert check_values(document(msgspec.Raw(inner))) == Checked()


def test_more_texts_than_a_reader_accepts_are_refused() -> None:
    texts = (
        b"\x81\xa5state\xdd" + (MAX_OBJECTS + 1).to_bytes(4, "big") + (MAX_OBJECTS + 1) * b"\xa0"
    )
    with pytest.raises(IntegrityError, match="more than any reader accepts"):
        check_values(texts)
    with pytest.raises(IntegrityError, match="the most that ckptd writes or reads"):
        decode(texts)


def test_what_only_torch_or_a_newer_version_can_judge_is_counted() -> None:
    found = check_values(
        document(
            [Ext(18, b"garbage"), Ext(31, b"?"), Ext(24, pack(["new kind", "", {}])), Ext(1, b"w")]
        )
    )
    assert found == Checked({"w"}, unjudged=1, newer=2)


def test_the_kinds_of_records_and_of_paths_are_those_of_the_agent() -> None:
    assert {
        kind: record.required for kind, record in RECORDS.items()
    } == values_check.REQUIRED_FIELDS
    assert PATHS.keys() == values_check.PATHS


def test_what_is_accepted_can_be_decoded() -> None:
    """Mutates golden documents at random.

    Everything but what only torch can judge is then decoded by both readers.
    """
    chance, accepted = random.Random(7), 0
    golden = [
        (make.PLACE / f"values{name}.msgpack").read_bytes()
        for name in ("", "-with-classes", "-with-names", "-with-records")
    ]
    for _ in range(3000):
        data = bytearray(chance.choice(golden))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.choice(
                [chance.randrange(256), 0xC0, 0x90, 0x80, 0xA0, 0xD4, 1]
            )
        try:
            found = check_values(bytes(data))
        except IntegrityError:
            continue
        accepted += 1
        for read in (decode, decode_plain):
            try:
                read(bytes(data), str)
            except NewerFormat:
                assert found.newer
            except CkptdError:
                assert found.unjudged, (bytes(data), read)
    assert accepted > 250
