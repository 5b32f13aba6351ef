"""Tests FORMAT.md and PROTOCOL.md against the code and the golden files: dumps match,
and every type, field and code is mentioned.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

import ckptd.shared
from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.shared import errors, names
from ckptd.shared.codecs import codec
from ckptd.shared.codecs.delta import DELTA
from ckptd.shared.formats import (
    binary,
    manifest,
    metadata_object,
    part,
    plan,
    receipt,
    segment,
    standard,
)
from ckptd.shared.formats.heartbeat import Heartbeat
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.replicas import Brief
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.wire import frames, session
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer, Holding
from tests.golden import make
from tests.shared.wire.samples import MESSAGES
from tests.support.cases import each_case

SHARED = Path(inspect.getfile(ckptd.shared)).parent
FORMAT, PROTOCOL = ((SHARED / name).read_text() for name in ("FORMAT.md", "PROTOCOL.md"))
RECORD_NAMES = {
    1: "STATE", 2: "BEGUN", 3: "SEALED", 4: "STAGING", 5: "PART", 6: "COMMITTED", 7: "DROPPED",
    8: "RETIRING", 9: "RETIRED",
}  # fmt: skip
NESTED = (2, 3, 4, 5, 7, 10, 11, 14, 15, 16, 17, 20, 21, 22, 23, 24, 25, 27, 28, 29, 30)
"""The extension types whose payload is msgpack again."""


def section(document: str, number: int) -> str:
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", document, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no section {number}"
    return found[0]


def rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose header row begins with these words."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith(header))
    found = []
    for line in lines[start + 2 :]:
        if not line.strip().startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def code_names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# -- values as JSON


def as_json(value: Any) -> Any:
    """Return msgpack as JSON: bytes are `hex:...`, an extension is {"ext", "payload"},
    and a float that JSON does not have is text.
    """
    match value:
        case bytes():
            return f"hex:{value.hex()}"
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: as_json(item) for key, item in value.items()}
        case list() | tuple():
            return [as_json(item) for item in value]
        case msgspec.msgpack.Ext():
            return {"ext": value.code, "payload": payload_as_json(value.code, bytes(value.data))}
    return value


def payload_as_json(code: int, data: bytes) -> Any:
    if code in NESTED:
        return as_json(msgspec.msgpack.decode(data))
    return data.decode() if code in (1, 6, 12, 13, 26) else as_json(data)


def matches(written: Any, actual: Any) -> bool:
    """Return True if the two are equal, in the same order.

    `hex:00ff…` stands for bytes that begin with these.
    """
    if (
        isinstance(written, str)
        and isinstance(actual, str)
        and written.startswith("hex:")
        and written.endswith("…")
    ):
        return len(written) > 12 and actual.startswith(written[:-1])
    if isinstance(written, dict) and isinstance(actual, dict):
        actual = {str(key): value for key, value in actual.items()}  # JSON has no other keys
        return list(written) == list(actual) and all(
            matches(written[key], actual[key]) for key in written
        )
    if isinstance(written, list) and isinstance(actual, list):
        return len(written) == len(actual) and all(map(matches, written, actual))
    return type(written) is type(actual) and bool(written == actual)


def test_abbreviations_match_what_begins_so() -> None:
    assert matches({"a": ["hex:00112233…"]}, {"a": ["hex:0011223344"]})
    assert not matches({"a": ["hex:00112244…"]}, {"a": ["hex:0011223344"]})
    assert not matches({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not matches("hex:00", "hex:0000")
    assert not matches(1, True)


# -- worked examples


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, golden file that was named last, contents) of every fenced block."""
    file = ""
    for piece in re.finditer(
        r"^```(\w+)\n(.*?)^```$|`tests/golden/v1/([^`]+)`", text, re.MULTILINE | re.DOTALL
    ):
        if piece[3]:
            file = piece[3]
        else:
            yield piece[1], file, piece[2]


EXAMPLES = [
    (name, *block)
    for name, text in (("FORMAT", section(FORMAT, 8)), ("PROTOCOL", section(PROTOCOL, 5)))
    for block in blocks(text)
]


def _lines(contents: str) -> list[tuple[str, str]]:
    """Return (first word, the rest) of every line without `#`.

    Each must have a line with a sentence before it.
    """
    lines = contents.splitlines()
    found = []
    for before, line in zip(["", *lines], lines, strict=False):
        if not line.startswith("#"):
            assert re.fullmatch(r"# [A-Z].*\.", before), (
                f"a sentence is missing before {line[:40]!r}"
            )
            word, _, rest = line.partition(" ")
            found.append((word, rest))
    return found


@each_case(
    ("document", "kind", "file", "contents"),
    EXAMPLES,
    ids=lambda v: v[:24] if isinstance(v, str) else v,
)
def test_every_example_is_in_its_golden_file(
    document: str, kind: str, file: str, contents: str
) -> None:
    assert file, "no golden file is named before this block"
    if kind == "hex":
        data, checked = (make.PLACE / file).read_bytes(), 0
        for line in contents.splitlines():
            found = re.fullmatch(
                r"([0-9a-f]{8})  ((?:[0-9a-f]{2} ){0,15}[0-9a-f]{2})(?: {2,}\S.*)?", line
            )
            assert found is not None, line
            expected, offset = bytes.fromhex(found[2]), int(found[1], 16)
            assert data[offset : offset + len(expected)] == expected, line
            checked += len(expected)
        assert checked > 0
    elif kind == "json":
        assert matches(json.loads(contents), _golden_json(file))
    elif kind == "text":
        assert contents == (make.PLACE / file).read_text()
    elif kind == "records":
        scan = jf.scan((make.PLACE / file).read_bytes(), 1)
        numbered = [(word, *rest.partition(" ")[::2]) for word, rest in _lines(contents)]
        assert [(word, name) for word, name, _ in numbered] == [
            (str(record.type), RECORD_NAMES[record.type]) for record in scan.records
        ]
        for (_, _, text), record in zip(numbered, scan.records, strict=True):
            assert matches(json.loads(text), as_json(msgspec.msgpack.decode(record.payload))), text
    elif kind == "messages":
        named = _lines(contents)
        assert [word for word, _ in named] == [make.tag_of(message) for message in MESSAGES]
        for word, text in named:
            assert matches(json.loads(text), _golden_json(f"frames/{word}.frame")), text
    else:
        assert kind == "extensions"
        payloads = _extensions((make.PLACE / file).read_bytes())
        coded = _lines(contents)
        assert [int(word) for word, _ in coded] == sorted(payloads)
        for word, text in coded:
            assert any(
                matches(json.loads(text), payload_as_json(int(word), data))
                for data in payloads[int(word)]
            ), text


def _golden_json(file: str) -> Any:
    data = (make.PLACE / file).read_bytes()
    if file.endswith(".frame"):
        (data,) = frames.Decoder().feed(data)
    if file.endswith(".ckpt"):
        data = make.RAW_INDEX.encode()
    return as_json(msgspec.msgpack.decode(data))


def _extensions(document: bytes) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}

    def hook(code: int, data: memoryview) -> None:
        found.setdefault(code, []).append(bytes(data))
        if code in NESTED:
            msgspec.msgpack.decode(bytes(data), ext_hook=hook)

    msgspec.msgpack.decode(document, ext_hook=hook)
    return found


def test_every_golden_file_has_an_example() -> None:
    shown = {file for _, _, file, _ in EXAMPLES}
    golden = {
        str(path.relative_to(make.PLACE)) for path in make.PLACE.rglob("*") if path.is_file()
    } - {"node.tar.xz", "names.tar.xz"}
    assert shown >= {name for name in golden if not name.startswith(("frames/", "two-ranks/"))}
    assert all(
        f"tests/golden/v1/{name}" in FORMAT for name in golden if name.startswith("two-ranks/")
    )
    assert {(document, kind) for document, kind, _, _ in EXAMPLES} >= {
        ("FORMAT", "hex"), ("FORMAT", "json"), ("FORMAT", "text"), ("FORMAT", "records"), ("FORMAT",
        "extensions"), ("PROTOCOL", "hex"), ("PROTOCOL", "messages"),
    }  # fmt: skip


def test_names_in_the_examples() -> None:
    assert (
        f"`gpt/{names.tag_directory(1000, None, 2)}/{names.part_file(0, make.NONCE)}`"
        in section(FORMAT, 1)
    )
    assert f"`{names.tag_directory(1000, None, 2)}\\n`" in section(FORMAT, 5)
    assert f"`{names.CONTROL}/{names.ATTEMPTS}/gpt/{names.attempt_file(2)}`" in section(FORMAT, 6)
    assert f"`{names.runs('gpt')}/{names.attempt_file(2)}`" in section(FORMAT, 6)


# -- FORMAT.md mentions everything


@each_case(
    "magic", [segment.SEGMENT_MAGIC, segment.CHECK_MAGIC, part.PART_MAGIC, part.END_MAGIC, jf.MAGIC]
)
def test_every_magic_is_in_the_document(magic: bytes) -> None:
    assert f"magic `{magic.decode()}`" in FORMAT


@each_case("number", [1, 2, 3, 4, 5, 6, 7])
def test_headings_name_their_modules(number: int) -> None:
    heading = section(FORMAT, number).splitlines()[0]
    modules = [name for name in code_names(heading) if name.endswith(".py")]
    assert modules
    for module in modules:
        assert (SHARED / module).is_file() or (SHARED.parent / module).is_file(), module


def test_every_journal_record_type_is_in_the_document() -> None:
    table = {
        int(row[0]): (row[1], row[2].split(", "))
        for row in rows(section(FORMAT, 7), "| type | name |")
    }
    assert {number: name for number, (name, _) in table.items()} == RECORD_NAMES
    assert table[r.STATE][1] == list(r.JournalState.__struct_fields__)
    assert {number: table[number][1] for number in r.TYPES} == {
        number: list(cls.__struct_fields__) for number, cls in r.TYPES.items()
    }


def test_every_extension_code_is_in_the_document() -> None:
    codes: list[int] = []
    for row in rows(section(FORMAT, 3), "| code | what |"):
        codes += [int(code) for code in row[0].split(",")]
    source = ast.parse((SHARED.parent / "agent" / "state" / "values.py").read_text())
    ranges = [
        [ast.literal_eval(argument) for argument in node.value.args]
        for node in ast.walk(source)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "range"
    ]
    assert (
        sorted(codes)
        == [code for bounds in ranges for code in range(*bounds)]
        == list(range(1, 31))
    )


def test_every_key_of_the_documents_is_in_the_document() -> None:
    three = section(FORMAT, 3)
    keys = [code_names(row[0]) for row in rows(three, "| key | value |")]
    assert {key for row in keys for key in row} == set(plan.Plan.__struct_fields__)
    fields = {
        name: next(row[1] for row in rows(three, "| key | value |") if row[0] == f"`{name}`")
        for name in ("items", "aliases", "regions")
    }
    assert fields["items"].startswith(f"list of [{', '.join(plan.Item.__struct_fields__)}]")
    assert fields["aliases"].startswith(
        "list of [fqn, base, byte offset, dtype, size, stride, requires_grad, device]"
    )
    assert len(plan.Alias.__struct_fields__) == 8
    assert fields["regions"].startswith("list of [offset, length, element size]")
    index = [key for row in rows(three, "| index key | value |") for key in code_names(row[0])]
    assert sorted(index) == sorted(part.PartIndex.__struct_fields__)
    chunk = next(row[1] for row in rows(three, "| index key | value |") if row[0] == "`chunks`")
    assert len(re.findall(r"\[(.*?)\]", chunk)[0].split(", ")) == len(part.Chunk.__struct_fields__)
    base = next(row[1] for row in rows(three, "| index key | value |") if row[0] == "`bases`")
    assert len(re.findall(r"\[(.*?)\]", base)[0].split(", ")) == len(part.Base.__struct_fields__)
    request = next(line for line in three.split("\n\n") if line.startswith("**Request document**"))
    assert code_names(request) == list(SnapshotRequest.__struct_fields__)
    members = [
        key for row in rows(section(FORMAT, 4), "| member | value |") for key in code_names(row[0])
    ]
    of_version_2 = [
        key for row in rows(section(FORMAT, 10), "| member | value |") for key in code_names(row[0])
    ]
    assert sorted({*members, *of_version_2}) == sorted([*Manifest.__struct_fields__, "sha256"])
    assert members[-1] == "sha256"
    parts = next(
        row[1] for row in rows(section(FORMAT, 10), "| member | value |") if row[0] == "`parts`"
    )
    assert code_names(parts)[:10] == list(manifest._Columns.__struct_fields__)
    entry = next(
        row[1]
        for row in rows(section(FORMAT, 10), "| member | value |")
        if row[0] == "`metadata_object`"
    )
    assert code_names(entry)[:5] == list(metadata_object.MetadataObjectEntry.__struct_fields__)
    index_of_object = [
        key
        for row in rows(section(FORMAT, 10), "| index key | value |")
        for key in code_names(row[0])
    ]
    assert index_of_object == list(metadata_object._Index.__struct_fields__)
    parts = next(
        row[1] for row in rows(section(FORMAT, 4), "| member | value |") if row[0] == "`parts`"
    )
    assert parts.startswith("list of {" + ", ".join(PartEntry.__struct_fields__) + "}")


def test_dtypes() -> None:
    listed: dict[str, int] = {plan.BLOB: 1}
    for size, names_of_size in rows(section(FORMAT, 3), "| bytes | dtypes |"):
        for first, _, last in re.findall(r"`(\w+)`( to `(\w+)`)?", names_of_size):
            listed[first] = int(size)
            if last:
                listed.update(
                    {
                        f"{first[:-1]}{bits}": int(size)
                        for bits in range(int(first[-1]), int(last[-1]) + 1)
                    }
                )
    assert listed == plan.ITEM_SIZES


def test_every_codec_is_in_the_document() -> None:
    assert f"{codec.RAW} `raw`; {codec.ZSTD} `zstd`" in section(FORMAT, 3)
    assert codec.MAX_WINDOW == 8 << 20


def test_every_limit_is_in_the_document() -> None:
    assert (
        f"{plan.MIN_CHUNK:,} to {plan.MAX_CHUNK:,}; {plan.DEFAULT_CHUNK:,} unless configured"
        in section(FORMAT, 3)
    )
    assert f"multiple of {plan.REGION_ALIGN} bytes" in section(FORMAT, 3)
    assert f"next multiple of {binary.ALIGN}" in section(FORMAT, 0)
    assert f"at most {jf.MAX_PAYLOAD:,}; of a STATE record {jf.MAX_STATE:,}" in section(FORMAT, 7)
    assert jf.FILE_SIZE == 4 << 20
    assert "preallocated to 4 MiB" in section(FORMAT, 7)
    assert f"1 to {frames.MAX_FRAME:,}" in section(PROTOCOL, 1)
    assert f"at most {session.MAX_UNDER_WAY} requests under way" in section(PROTOCOL, 2)
    assert f"Version {session.MAX_VERSION}." in PROTOCOL


# -- the registries of FORMAT.md


def test_the_registry_of_magics() -> None:
    listed = [code_names(row[0])[0] for row in rows(section(FORMAT, 14), "| magic | file |")]
    known = [
        segment.SEGMENT_MAGIC,
        segment.CHECK_MAGIC,
        segment.ROOT_MAGIC,
        part.PART_MAGIC,
        part.END_MAGIC,
        metadata_object.MAGIC,
        jf.MAGIC,
    ]
    assert listed == [magic.decode() for magic in known]
    written = {
        node.value.decode()
        for path in (*SHARED.rglob("*.py"), *(SHARED.parent / "daemon").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, bytes)
        and re.fullmatch(rb"CKPTD[A-Z]{3}", node.value)
    }
    assert written == set(listed)


def test_the_registry_of_features() -> None:
    fourteen = section(FORMAT, 14)
    assert {
        code_names(row[0])[0] for row in rows(fourteen, "| feature of a manifest |")
    } == manifest.FEATURES
    assert "No feature of deleters is defined." in fourteen
    assert frozenset() == manifest.DELETER_FEATURES
    bits = [
        (code_names(row[0])[0], 1 << int(row[1]))
        for row in rows(fourteen, "| magic with feature bits |")
    ]
    assert bits == [
        ("CKPTDPRT", part.SEVERAL_FILES),
        ("CKPTDPRT", part.LINKED_FILES),
        ("CKPTDPRT", part.DELTAS),
    ]


def version_of(cls: type[Any]) -> int:
    info: Any = msgspec.inspect.type_info(cls)
    return int(next(field.default for field in info.fields if field.name == "version"))


def test_the_registry_of_versions() -> None:
    listed = {row[0]: row[1] for row in rows(section(FORMAT, 14), "| versioned document |")}
    assert listed == {
        "plan document": str(plan.PLAN_VERSION),
        "manifest": f"1 and {manifest.VERSION}",
        "receipt": str(receipt.VERSION),
        "abandonment": str(receipt.VERSION),
        "heartbeat": str(version_of(Heartbeat)),
        "payload of a journal record": str(jf.PAYLOAD_VERSION),
    }


def test_the_registry_of_codecs() -> None:
    listed = {
        int(row[0]): code_names(row[1])[0] for row in rows(section(FORMAT, 14), "| codec | name |")
    }
    decoders = {number: found.name for number, found in codec._DECODERS.items()}
    assert listed == decoders | {DELTA: "delta"}, "a delta is decoded into the bytes of its base"


def test_the_registries_of_values() -> None:
    three = section(FORMAT, 3)
    types = [name for row in rows(three, "| type | parts |") for name in code_names(row[0])]
    assert sorted(types) == sorted(standard._MAKERS)
    listed: list[str] = []
    for row in rows(three, "| kind | fields |"):
        listed += code_names(re.sub(r"\(`[^`]*`\)", "", row[0]))
    from ckptd.agent.state.components import TENSOR_KINDS
    from ckptd.agent.state.records import KINDS

    assert sorted(listed) == sorted(KINDS | TENSOR_KINDS)


def test_the_registry_of_slot_states() -> None:
    row = next(
        row for row in rows(section(FORMAT, 2), "| offset | type | field |") if row[2] == "state"
    )
    assert row[3] == ", ".join(f"{state.value} {state.name.lower()}" for state in segment.SlotState)


def test_names_are_those_of_the_expression() -> None:
    assert f"`^{names._NAME.pattern}$`" in section(FORMAT, 0)


# -- PROTOCOL.md mentions everything


def test_the_table_of_the_session() -> None:
    table = {row[0]: (row[1], row[2]) for row in rows(section(PROTOCOL, 3), "| request | reply |")}
    assert set(table) == {cls.__name__ for cls in session.REPLIES}
    for cls, expected in session.REPLIES.items():
        reply, states = table[cls.__name__]
        replies = expected if isinstance(expected, tuple) else (expected,)
        assert [word for word in re.findall(r"[A-Z]\w+", reply) if word != "Progress"] == [
            c.__name__ for c in replies
        ]
        assert states.split(", ") == [
            state.value for state, kind in session.REQUESTS if kind is cls
        ]
    assert {name for name, (reply, _) in table.items() if "descriptors" in reply} == {
        "Allocate",
        "Fetch",
        "Host",
        "Lend",
    }


def test_every_message_is_mentioned() -> None:
    mentioned = set(re.findall(r"\w+", section(PROTOCOL, 3) + section(PROTOCOL, 4)))
    messages = {cls.__name__ for cls in get_args(m.Message)}
    assert len(messages) > 20
    assert messages <= mentioned


def _raised_by_the_daemon() -> set[type[errors.CkptdError]]:
    """Return every error class that a module of the daemon raises.

    The command line and errors of the configuration do not count: no client gets them.
    """
    found: set[type[errors.CkptdError]] = set()
    daemon = SHARED.parent / "daemon"
    for path in daemon.glob("**/*.py"):
        if path.parent == daemon / "commands":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                cls = getattr(errors, node.func.id, None)
                if isinstance(cls, type) and issubclass(cls, errors.CkptdError):
                    found.add(cls)
    return found - {errors.InvalidConfig}


def test_every_error_code_on_the_wire_is_in_the_document_and_comes_back() -> None:
    documented = [
        code for row in rows(section(PROTOCOL, 4), "| code |") for code in code_names(row[0])
    ]
    raised = _raised_by_the_daemon() | {
        errors.InvalidName,
        errors.IntegrityError,
        errors.NewerFormat,
    }  # the last one is raised by names, plan and segment
    assert {errors.Busy, errors.Fenced, errors.QuotaExceeded, errors.SnapshotFailed} <= raised
    assert {cls.code for cls in raised} | {"internal"} <= set(documented)
    assert len(documented) == len(set(documented))
    for code in documented:
        assert errors.from_wire(code, "").code == code
        assert type(errors.from_wire(code, "")) is not errors.ServiceError, code


def test_the_registry_of_error_codes() -> None:
    documented = [
        code for row in rows(section(PROTOCOL, 4), "| code |") for code in code_names(row[0])
    ]
    assert sorted(documented) == sorted(errors._ON_THE_WIRE)


def test_the_registry_of_features_of_the_protocol() -> None:
    listed = {
        code_names(row[0])[0]: row[1]
        for row in rows(section(PROTOCOL, 8), "| feature | named by |")
    }
    sources = {
        side: (SHARED.parent / file).read_text()
        for side, file in (
            ("daemon", "daemon/process/service.py"),
            ("client", "shared/wire/channel.py"),
        )
    }
    assert set(listed) == {
        session.NODES, session.STAGE, session.REPLICAS, session.WAITING, session.REMARKS,
        session.RECOVERIES, session.LENDING, session.DRAIN, session.PEERS,
    }  # fmt: skip
    for name, side in listed.items():
        named = {
            each for each, source in sources.items() if re.search(rf"\b{name.upper()}\b", source)
        }
        assert named == ({"daemon", "client"} if side == "both" else {side}), name


# -- fields of messages

INNER: dict[type[Any], str] = {
    m.HeldSegment: "segment", m.RecoveryCandidate: "candidate", m.Due: "due",
    m.TrainingCost: "cost", m.CopySettings: "copies",
    Membership: "node", Holding: "holding", Answer: "answer", Brief: "brief",
}  # fmt: skip


def spoken(kind: Any) -> str:
    """Return a type and its bounds as the table of fields has them."""
    info = msgspec.inspect
    match kind:
        case info.UnionType():
            return " or ".join(map(spoken, kind.types))
        case info.NoneType():
            return "null"
        case info.BoolType():
            return "bool"
        case info.StrType() if kind.pattern is not None:
            return "32 hexadecimal digits"
        case info.StrType():
            return "text" + (
                f" of at most {kind.max_length:,d} characters"
                if kind.max_length is not None
                else ""
            )
        case info.BytesType():
            return f"{'' if kind.min_length else 'at most '}{kind.max_length} bytes"
        case info.IntType() | info.FloatType():
            most = kind.le if kind.lt is None else kind.lt - 1
            bounds = (
                ""
                if kind.ge is None
                else f" from {kind.ge:,} up"
                if most is None
                else f" from {kind.ge:,} to {most:,}"
            )
            return ("integer" if isinstance(kind, info.IntType) else "number") + bounds
        case info.ListType():
            items = (
                f"{spoken(kind.item_type)}s"
                if isinstance(kind.item_type, info.StructType)
                else spoken(kind.item_type)
            )
            least = f", at least {kind.min_length:,d}" if kind.min_length else ""
            return f"list of {items}{least}" + (
                f", at most {kind.max_length:,d}" if kind.max_length is not None else ""
            )
        case info.DictType():
            size = f", at most {kind.max_length:,d}" if kind.max_length is not None else ""
            return f"map of {spoken(kind.key_type)} to {spoken(kind.value_type)}{size}"
        case info.TupleType():
            return f"[{', '.join(map(spoken, kind.item_types))}]"
        case info.StructType():
            return INNER[kind.cls]
        case _:
            raise AssertionError(kind)


def test_the_table_of_fields_has_every_field_with_its_type_bounds_and_default() -> None:
    expected = []
    for cls in (*get_args(m.Message), *INNER):
        info: Any = msgspec.inspect.type_info(cls)
        for field in info.fields:
            if field.name in ("id", "re"):
                continue
            default = (
                field.default
                if field.default is not msgspec.NODEFAULT
                else None
                if field.required
                else field.default_factory()
            )
            shown = "required" if field.required else f"`{json.dumps(default)}`"
            expected.append(
                [f"`{info.tag or INNER[cls]}`", f"`{field.encode_name}`", spoken(field.type), shown]
            )
    assert rows(section(PROTOCOL, 6), "| type |") == expected
