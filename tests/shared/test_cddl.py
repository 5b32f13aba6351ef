"""Tests docs/reference/format.cddl and protocol.cddl: they parse, and say of each
structure what the code decodes.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any, get_args

import msgspec
import pycddl
import pytest

from ckptd.daemon.journal import records as r
from ckptd.shared.formats import manifest, metadata_object, non_finite, part, plan, receipt
from ckptd.shared.formats.heartbeat import Heartbeat
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.replicas import Brief, OfNode, ReplicaDigests
from ckptd.shared.formats.sharding import Mesh, Rule
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer, Holding
from tests.shared.test_documents import FORMAT, code_names, rows, section
from tests.support.cases import each_case

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
FORMAT_CDDL, PROTOCOL_CDDL = (
    (REFERENCE / name).read_text() for name in ("format.cddl", "protocol.cddl")
)

OF_FORMAT: dict[type[Any], str] = {
    plan.Plan: "plan",
    plan.Region: "region",
    plan.Item: "item",
    plan.Alias: "alias",
    plan.Described: "described",
    Rule: "rule",
    Mesh: "mesh",
    SnapshotRequest: "request",
    Membership: "node",
    ReplicaDigests: "replica-digests",
    part.PartIndex: "part-index",
    part.Chunk: "chunk",
    part.Linked: "linked",
    part.Base: "base",
    non_finite.NonFinite: "non-finite",
    manifest.Manifest: "manifest-1",
    manifest.PartEntry: "part-entry",
    manifest.Metadata: "metadata",
    manifest._Small: "manifest-2",
    manifest._Columns: "columns",
    metadata_object.MetadataObjectEntry: "metadata-object",
    metadata_object._Index: "metadata-index",
    metadata_object._Block: "block",
    receipt.Receipt: "receipt",
    receipt.Abandonment: "abandonment",
    OfNode: "replicas-of-node",
    Heartbeat: "heartbeat",
    r.JournalState: "journal-state",
    r.JobState: "job-state",
    **{cls: f"record-{number}" for number, cls in r.TYPES.items()},
}
"""The structures of files, with the names of their rules."""

OF_PROTOCOL: dict[type[Any], str] = {
    **{cls: f"{cls.__struct_config__.tag}-message" for cls in get_args(m.Message)},
    m.HeldSegment: "segment",
    m.RecoveryCandidate: "candidate",
    m.Due: "due",
    m.CopySettings: "copies",
    m.TrainingCost: "cost",
    Membership: "node",
    Holding: "holding",
    Answer: "answer",
    Brief: "brief",
}
"""The structures of messages, with the names of their rules."""

RANGES = {
    (0, (1 << 62) - 1): "u62",
    (0, (1 << 32) - 1): "u32",
    (0, (1 << 24) - 1): "rank",
    (0, 10**9 - 1): "attempt",
    (0, 10**18 - 1): "step",
}
PATTERNS = {
    r"^[0-9a-f]{64}\Z": "hex-sha256",
    r"^[0-9a-f]{32}\Z": "hex-128",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z": "name",
    r"^metadata\.[0-9a-f]{32}\.ckpt\Z": "metadata-file",
}
INSTEAD = {
    ("manifest-1", "format"): 'format: "ckptd-manifest"',
    ("manifest-1", "version"): "version: 1",
    ("manifest-2", "format"): 'format: "ckptd-manifest"',
    ("manifest-2", "version"): "version: 2",
    ("manifest-2", "metadata"): "",
    ("manifest-1", "metadata_object"): "",
}
"""The entries that say more than the fields: the two versions of a manifest are told
apart by them before the fields are decoded.
"""
AFTER = {
    ("manifest-1", "retention"): "sha256: hex-sha256",
    ("manifest-2", "retention"): "sha256: hex-sha256",
}


def type_of(kind: Any, names: dict[type[Any], str]) -> str:
    """Return the CDDL of a type."""
    info = msgspec.inspect
    match kind:
        case info.UnionType():
            return " / ".join(
                type_of(each, names) for each in kind.types if not isinstance(each, info.CustomType)
            )
        case info.NoneType():
            return "null"
        case info.BoolType():
            return "bool"
        case info.AnyType():
            return "any"
        case info.LiteralType():
            return " / ".join(f'"{value}"' for value in kind.values)
        case info.StrType():
            return PATTERNS[kind.pattern] if kind.pattern is not None else "tstr"
        case info.BytesType():
            return f"bstr .size {kind.min_length}" if kind.min_length else "bstr"
        case info.FloatType():
            return "number"
        case info.IntType():
            most = kind.le if kind.lt is None else kind.lt - 1
            if kind.ge is None:
                return "int"
            if most is None:
                return f"int .ge {kind.ge}"
            return RANGES.get((kind.ge, most)) or f"{kind.ge}..{most}"
        case info.ListType() | info.VarTupleType():
            if kind.min_length and kind.min_length == kind.max_length:
                return f"[{kind.min_length}*{kind.max_length} {grouped(kind.item_type, names)}]"
            return f"[{'+' if kind.min_length else '*'} {grouped(kind.item_type, names)}]"
        case info.TupleType():
            return f"[{', '.join(type_of(each, names) for each in kind.item_types)}]"
        case info.DictType():
            return f"{{ * {type_of(kind.key_type, names)} => {grouped(kind.value_type, names)} }}"
        case info.StructType() | info.TypedDictType():
            return names[kind.cls]
        case _:
            raise AssertionError(kind)


def grouped(kind: Any, names: dict[type[Any], str]) -> str:
    found = type_of(kind, names)
    # `* 1..2` would be an occurrence
    return f"({found})" if " / " in found or ".." in found else found


def entries(cls: type[Any], names: dict[type[Any], str]) -> list[str]:
    """Return the entries of the rule of a structure, in their order.

    A field that a reader may lack has `?`.
    """
    rule, info = names[cls], typing.cast("Any", msgspec.inspect.type_info(cls))
    found = [f'type: "{info.tag}"'] if getattr(info, "tag", None) else []
    for field in info.fields:
        kind = "dtype" if field.encode_name == "dtype" else type_of(field.type, names)
        entry = f"{'' if field.required else '? '}{field.encode_name}: {kind}"
        found += [
            INSTEAD.get((rule, field.encode_name), entry),
            AFTER.get((rule, field.encode_name), ""),
        ]
    open_end = "* any" if getattr(info, "array_like", False) else "* tstr => any"
    return [*filter(None, found), open_end]


def rule_of(text: str, name: str) -> list[str]:
    """Return the entries of a rule, one for each line between its brackets, without
    comments and commas.
    """
    found = re.search(
        rf"^{re.escape(name)} = [{{\[]\n(.*?)^[}}\]]$", text, re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"there is no rule {name}"
    lines = [line.partition(" ;")[0].strip().rstrip(",") for line in found[1].splitlines()]
    return [line for line in lines if line and not line.startswith(";")]


PRELUDE = {"any", "bool", "bstr", "float", "int", "null", "number", "tstr", "uint"}
"""The names that CDDL has itself, of those that are used here."""
ROOTS = {"document", "message"}


def defined_and_used(text: str) -> tuple[set[str], set[str]]:
    """Return the names that have a rule, and the names that rules use."""
    bare = re.sub(r'"[^"]*"|;[^\n]*', "", text)
    defined = set(re.findall(r"^([a-z][a-z0-9-]*) = ", bare, re.MULTILINE))
    return defined, set(re.findall(r"(?<![\w.-])[a-z][a-z0-9_-]*(?![\w-]*(?::| = ))", bare))


@pytest.mark.parametrize("text", [FORMAT_CDDL, PROTOCOL_CDDL], ids=["format", "protocol"])
def test_the_grammar_parses_and_every_name_in_it_is_defined_and_used(text: str) -> None:
    pycddl.Schema(text)
    defined, used = defined_and_used(text)
    assert used - defined - PRELUDE == set()
    assert defined - used - ROOTS == set()


def test_errors_in_a_grammar_are_found() -> None:
    with pytest.raises(ValueError, match="closing delimiter"):
        pycddl.Schema(FORMAT_CDDL + "\nextra = [ * tstr\n")
    defined, used = defined_and_used(FORMAT_CDDL + "\nextra = [ * nowhere ]\n")
    assert (used - defined - PRELUDE, defined - used - ROOTS) == ({"nowhere"}, {"extra"})


@each_case("cls", OF_FORMAT, ids=lambda cls: cls.__name__)
def test_every_structure_of_a_file_is_what_the_code_decodes(cls: type[Any]) -> None:
    assert rule_of(FORMAT_CDDL, OF_FORMAT[cls]) == entries(cls, OF_FORMAT)


@each_case("cls", OF_PROTOCOL, ids=lambda cls: cls.__name__)
def test_every_message_is_what_the_code_decodes(cls: type[Any]) -> None:
    assert rule_of(PROTOCOL_CDDL, OF_PROTOCOL[cls]) == entries(cls, OF_PROTOCOL)


def test_requests_and_what_the_daemon_sends_have_all_messages() -> None:
    for name, kind in (
        ("client-message", m.Request),
        ("daemon-message", (m.Reply, m.Notification)),
    ):
        found = re.search(rf"^{name} = (.*?)\n\n", PROTOCOL_CDDL, re.MULTILINE | re.DOTALL)
        assert found is not None
        assert re.findall(r"[a-z-]+", found[1]) == [
            OF_PROTOCOL[cls] for cls in get_args(m.Message) if issubclass(cls, kind)
        ]


def test_every_extension_type_of_a_values_document_has_a_tag() -> None:
    listed = [
        int(code)
        for row in rows(section(FORMAT, 3), "| code | what |")
        for code in row[0].split(",")
    ]
    assert sorted(int(tag) - 4300 for tag in re.findall(r"#6\.(\d+)\(", FORMAT_CDDL)) == listed


def test_every_dtype_is_in_the_grammar() -> None:
    found = re.search(r"^dtype = (.*?)\n\n", FORMAT_CDDL, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert sorted(re.findall(r'"(\w+)"', found[1])) == sorted(plan.ITEM_SIZES)


def test_every_file_with_a_document_names_its_rule() -> None:
    """The table in FORMAT.md that says which rule describes which document."""
    named = {
        name
        for row in rows(section(FORMAT, 15), "| document | rule |")
        for name in code_names(row[1])
    }
    assert named <= set(re.findall(r"^([a-z0-9-]+) = ", FORMAT_CDDL, re.MULTILINE))
    assert {
        "plan",
        "request",
        "values",
        "part-index",
        "manifest",
        "receipt",
        "abandonment",
        "heartbeat",
        "journal-record",
    } <= named
