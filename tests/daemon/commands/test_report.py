"""Tests what the command line prints of manifests with any content."""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.commands import report
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.report import _in_steps, stage_lines
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.non_finite import NonFinite
from tests.crash.hostile import forge as forge_case
from tests.crash.nonsense import simple_case
from tests.shared.formats.test_manifest import JSON, resealed
from tests.shared.samples import steady
from tests.support.cases import each_case
from tests.support.forged import forge

EVIL = "w\x1b[2J\x07\n\x9b31m\u202ehtap"


@steady
@given(JSON, JSON, JSON, st.text(), st.dictionaries(st.text(), st.text(), max_size=2))
def test_a_manifest_of_any_shape_is_shown_or_refused(
    metadata: Any, entry: Any, content: Any, text: str, writer: dict[str, str]
) -> None:
    tensors = {text: entry, "w": {"dtype": text, "size": [1]}}
    entries: list[Any] = [metadata, tensors, {text: {}}]
    shapes: list[Any] = [metadata, *({"state_dict_metadata": found} for found in entries)]
    for shape in shapes:
        changes = {"metadata": shape, "user_content": content, "writer": writer, "created": text}
        data = resealed(methodcaller("update", changes))
        try:
            manifest = Manifest.decode(data)
        except IntegrityError:
            continue
        shown = report.manifest_text(
            manifest, text, manifest.metadata.get("state_dict_metadata", {})
        )
        assert all(line.isprintable() for line in shown.split("\n"))
        assert report.manifest_json(manifest)["user_content"] == manifest.user_content


def test_control_characters_for_terminals_are_escaped(tmp_path: Path) -> None:
    described = {"state_dict_metadata": {EVIL: {"dtype": EVIL, "size": [8]}}, "planner_data": None}
    changes: dict[str, Any] = {
        "metadata": described,
        "user_content": {"a": EVIL},
        "writer": {EVIL: EVIL},
        "metrics": {EVIL: 1.0},
        "created": EVIL,
    }
    place = forge(tmp_path, (8,), [[((0,), (8,))]], name=EVIL, **changes)
    for arguments in (
        ["show", str(place)],
        ["show", "--keys", str(place)],
        ["ls", str(place.parent)],
    ):
        said = CliRunner().invoke(main, arguments)
        assert said.exit_code == 0, said.output
        assert all(line.isprintable() for line in said.output.split("\n")), said.output
    assert (
        "w\\x1b[2J\\x07\\n\\x9b31m\\u202ehtap"
        in CliRunner().invoke(main, ["show", "--keys", str(place)]).output
    )


def test_a_damaged_tensor_is_named_without_its_escapes(tmp_path: Path) -> None:
    place = forge(tmp_path, (8,), [[((0,), (4,))], [((2,), (4,))]], name=EVIL)
    said = CliRunner().invoke(main, ["verify", str(place)])
    assert said.exit_code == 13
    name = "w\\x1b[2J\\x07\\n\\x9b31m\\u202ehtap"
    assert (
        f"DAMAGED: gpt/step-00000001.a0001: {name}: the shards [4] at [0] and [4] at [2] overlap"
        in said.output
    )
    assert all(line.isprintable() for line in said.output.split("\n"))


@pytest.mark.parametrize("verb", ["show", "verify", "ls"])
def test_a_manifest_that_claims_2_to_the_62_ranks_is_refused_at_no_cost(
    tmp_path: Path, verb: str
) -> None:
    place = forge(tmp_path, (8,), [[((0,), (8,))]], world_size=(1 << 62) - 1)
    said = CliRunner().invoke(main, [verb, str(place)])
    assert said.exit_code == (0 if verb == "ls" else 13)
    assert "manifest of 4611686018427387903 ranks lists parts of ranks [0]" in said.output


def test_verify_says_what_only_torch_can_check(tmp_path: Path) -> None:
    case = simple_case(("w", "float32", [4, 2]))
    case.parts[0].values["state"] |= {
        "odd": msgspec.msgpack.Ext(18, b"garbage"),
        "new": [msgspec.msgpack.Ext(31, b"?")] * 2,
    }
    assert forge_case(case, tmp_path, 1)
    (found,) = report.verification(tmp_path / "gpt")
    unchecked = ["1 value that only torch can decode", "2 values of a newer version of ckptd"]
    assert (found["ok"], found["unchecked"]) == (True, unchecked)
    said = CliRunner().invoke(main, ["verify", str(tmp_path / "gpt")])
    assert (said.exit_code, f"; not checked: {', '.join(unchecked)}\n" in said.output) == (0, True)


WRONG_VALUES = [
    (msgspec.msgpack.Ext(1, b"nobody"), "the values name the tensor 'nobody', which no part has"),
    (msgspec.msgpack.Ext(1, b"~x"), "the values name the tensor '~x', which no part has"),
    (
        msgspec.msgpack.Ext(3, b"\x91\x90"),
        "values document: 'state.odd.0' has a list as an item of a set",
    ),
]


@pytest.mark.parametrize(("value", "words"), WRONG_VALUES)
def test_verify_finds_values_that_cannot_be_loaded(tmp_path: Path, value: Any, words: str) -> None:
    case = simple_case(("w", "float32", [4, 2]))
    case.parts[0].values["state"]["odd"] = value
    assert forge_case(case, tmp_path, 1)
    (found,) = report.verification(tmp_path / "gpt")
    assert (found["ok"], words in found["error"], found["unchecked"]) == (False, True, [])


IDLE: dict[str, Any] = {
    "directory": "/nvme/stage", "root_known": True, "waiting": 0, "waiting_bytes": 0,
    "oldest_age_seconds": None, "uploading": None, "problem": "", "refused": {},
}  # fmt: skip
WAITS = {"waiting": 2, "waiting_bytes": 4 * 10**9, "oldest_age_seconds": 180.0}


@each_case(
    ("changes", "lines"),
    [
        ({}, ["stage          /nvme/stage (9 GB free): everything is uploaded"]),
        ({"root_known": False}, ["stage          /nvme/stage (9 GB free): the root has not "
            "answered "
            "yet"]),
        (WAITS, ["stage          /nvme/stage (9 GB free): 2 checkpoints (4.0 GB) not uploaded yet, "
            "the "
            "oldest for 3 min"]),
        (
            {"uploading": {"job": "gpt", "tag": "best.a0001", "done_bytes": 1, "total_bytes": 2}},
            ["stage          /nvme/stage (9 GB free): everything is "
                "uploaded", "UPLOADING      gpt/best.a0001: 50 %"],
        ),
        (
            {"problem": "no answer", "refused": {"gpt/best.a0001": "it is damaged"}},
            [
                "stage          /nvme/stage (9 GB free): everything is "
                "uploaded", "NO UPLOAD      no answer",
                "NOT UPLOADED   gpt/best.a0001: it is damaged",
            ],
        ),
    ],
)  # fmt: skip
def test_what_waits_and_what_cannot_be_uploaded_is_told(
    changes: dict[str, Any], lines: list[str]
) -> None:
    assert stage_lines(IDLE | changes, " (9 GB free)") == [f"  {line}" for line in lines]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"replicated": None, "replicas_off": None, "peer_replicas": []}, []),
        (
            {"replicated": 7, "peer_replicas": [{"ranks": [2, 3]}, {"ranks": [5, 2]}]},
            [
                "REPLICAS       gpt: step 7 is in the memory of other nodes; copies of "
                "ranks 2, 3, 5 are here"
            ],
        ),
        (
            {"replicas_off": "rank 1: the peer is gone", "peer_replicas": [{"ranks": [2]}]},
            [
                "REPLICAS       gpt: no step is in the memory of other nodes; copies of rank 2 "
                "are here",
                "REPLICAS OFF   gpt: rank 1: the peer is gone",
            ],
        ),
    ],
)
def test_copies_in_other_nodes_are_told(changes: dict[str, Any], lines: list[str]) -> None:
    told = report._replica_lines({"job": "gpt", **changes})
    assert list(told) == [f"  {line}" for line in lines]


def counted(tensors: int) -> NonFinite:
    """Return the count of a part in which so many tensors have one value each."""
    return NonFinite.of([dict.fromkeys(range(tensors), 1)])


@each_case(
    ("counts", "known", "named", "all_read", "said"),
    [
        ([], 0, 0, False, None),
        ([counted(16)], 16, 16, True, None),
        ([counted(40)], 16, 16, True, "and 24 more"),
        ([counted(40)], 16, 16, False, "and at least 24 more"),
        ([counted(10), counted(9)], 19, 16, True, "and 3 more"),
        ([counted(40), counted(9)], 20, 16, True, "and at least 24 more"),
        ([counted(17), counted(17)], 32, 16, True, "and at least 16 more"),
    ],
)
def test_tensors_that_are_not_named_are_counted(
    counts: list[NonFinite], known: int, named: int, all_read: bool, said: str | None
) -> None:
    lines = report._more(counts, known, named, all_read=all_read)
    assert [line.strip() for line in lines] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("seconds", "usual", "words"),
    [
        (0.058, 0.1, ", 58% of a training step"),
        (0.23, 0.1, ", or 2.3 training steps"),
        (0.1, 0.0, ""),
    ],
)
def test_a_cost_is_told_in_steps(seconds: float, usual: float, words: str) -> None:
    assert _in_steps(seconds, usual) == words
