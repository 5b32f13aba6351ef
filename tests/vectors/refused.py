"""The test vectors that a reader must refuse: each breaks one rule, and all checksums
behind it are right (FORMAT.md, section 17).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptd.shared.formats.binary import ALIGN, preamble
from tests.vectors.build import (
    Checkpoint,
    Files,
    Part,
    Tensor,
    ext,
    frame,
    plain_ext,
    planes,
    resealed,
    sealed,
    trailer,
    whole,
)
from tests.vectors.sound import (
    compressible,
    floats,
    format_2,
    linked_files,
    metadata_object,
    second_version,
    state_of,
)


@dataclass(frozen=True)
class Refused:
    """A checkpoint that a reader must refuse.

    check: the name of the check in section 13 of FORMAT.md. at: "open" if a reader
    finds it before it returns anything, or "read" if it finds it at the latest when it
    reads the tensor or the value. newer: True if the reader must say that a newer ckptd
    wrote the file.
    """

    about: str
    check: str
    at: str
    files: Files
    newer: bool = False

    def entry(self) -> dict[str, Any]:
        """Return its entry in `vectors.json`."""
        why = "newer" if self.newer else "damaged"
        return {
            "about": self.about,
            "expect": "refused",
            "why": why,
            "at": self.at,
            "check": self.check,
        }


TENSORS = [
    Tensor("steps", "int64", (2,), struct.pack("<2q", 7, -8)),
    Tensor("weight", "float32", (4, 3), floats(*range(12))),
    Tensor("mask", "bool", (3,), b"\1\0\1"),
]
NAMES = [each.fqn for each in TENSORS]
Edit = Callable[[Any], Any]


def part(**options: Any) -> Part:
    return Part(
        **{"tensors": TENSORS, "values": state_of(NAMES), "metadata": whole(TENSORS), **options}
    )


def checkpoint(parts: list[Part] | None = None, **options: Any) -> Files:
    return Checkpoint(parts or [part()], **options).built()


def _first(files: Files) -> str:
    return next(name for name in files if name.startswith("rank-00000") and name.count(".") == 2)


def in_part(edit: Edit) -> Files:
    """Return a checkpoint whose part file was changed after it was written.

    The manifest names the digest of its index.
    """
    return checkpoint(
        [part(edit_files=lambda files: {**files, _first(files): edit(files[_first(files)])})]
    )


def in_plan(edit: Callable[[dict[str, Any]], None], **options: Any) -> Files:
    def edited(plan: dict[str, Any]) -> dict[str, Any]:
        plan["items"] = [list(item) for item in plan["items"]]
        plan["regions"] = [list(region) for region in plan["regions"]]
        edit(plan)
        return plan

    return checkpoint([part(edit_plan=edited, **options)])


def in_index(edit: Callable[[dict[str, Any]], None], **options: Any) -> Files:
    def edited(index: dict[str, Any]) -> dict[str, Any]:
        edit(index)
        return index

    return checkpoint(
        [part(edit_index=edited, **options)],
        **({"features": ["files"]} if options.get("files", 1) > 1 else {}),
    )


def in_members(edit: Callable[[dict[str, Any]], None]) -> Files:
    def edited(members: dict[str, Any]) -> dict[str, Any]:
        edit(members)
        return members

    return checkpoint(edit_members=edited)


def put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def reheaded(data: bytes, **changes: Any) -> bytes:
    """Return a part file whose header has another version or other features, with a
    crc32c that is right.
    """
    body = (
        preamble(b"CKPTDPRT", changes.get("features", 0), changes.get("version", 1)) + data[16:184]
    )
    return sealed(body) + data[ALIGN:]


def retrailed(data: bytes, offset: int = 0, length: int = 0, **changes: Any) -> bytes:
    """Return a part file whose trailer says something else, with a crc32c that is
    right. `offset` and `length` are added.
    """
    _, at, size, total, crc, _ = struct.unpack_from("<16sQQQI16s", data, len(data) - 64)
    more = {name: changes[name] for name in ("version", "zero", "features") if name in changes}
    return data[:-64] + trailer(
        at + offset, size + length, changes.get("whole", total), changes.get("crc", crc), **more
    )


def setter(*path: Any, to: Any) -> Callable[[Any], None]:
    """Return an edit that sets one member of a document."""

    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return edit


def remover(*path: Any) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        del document[path[-1]]

    return edit


# -- the cases


def manifests() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str, about: str, check: str, files: Files, *, newer: bool = False
    ) -> tuple[str, Refused]:
        return f"manifest-{name}", Refused(about, check, "open", files, newer)

    def bytes_of(edit: Edit) -> Files:
        return checkpoint(edit_manifest=edit)

    yield case(
        "cut-short",
        "the last line feed is missing",
        "manifest-tail",
        bytes_of(lambda data: data[:-1]),
    )
    yield case(
        "half",
        "the second half is missing",
        "manifest-tail",
        bytes_of(lambda data: data[: len(data) // 2]),
    )
    yield case(
        "longer", "a line feed follows", "manifest-tail", bytes_of(lambda data: data + b"\n")
    )
    yield case(
        "spaced-tail",
        "the last member has no space behind its colon",
        "manifest-tail",
        bytes_of(lambda data: data[:-79] + data[-79:].replace(b'": "', b'":"')),
    )
    yield case(
        "upper-case",
        "the digest is in capital letters",
        "manifest-tail",
        bytes_of(lambda data: data[:-68] + data[-68:-3].upper() + data[-3:]),
    )
    yield case(
        "altered",
        "one digit of `seq` is another",
        "manifest-digest",
        bytes_of(lambda data: data.replace(b'"seq": 7', b'"seq": 8')),
    )
    yield case(
        "not-json",
        "there is a comma too many",
        "manifest-json",
        bytes_of(lambda data: resealed(data.replace(b'"seq": 7', b'"seq": 7,'))),
    )
    yield case(
        "bom",
        "it begins with a byte order mark",
        "manifest-json",
        bytes_of(lambda data: resealed(b"\xef\xbb\xbf" + data)),
    )
    yield case(
        "nan",
        "a metric is NaN without quotes",
        "manifest-json",
        bytes_of(lambda data: resealed(data.replace(b'"metrics": {}', b'"metrics": {"loss":NaN}'))),
    )
    yield case(
        "latin-1",
        "a text is not UTF-8",
        "manifest-json",
        bytes_of(lambda data: resealed(data.replace(b'"job": "gpt"', b'"job": "\xe9"'))),
    )
    yield case(
        "format",
        "`format` is another word",
        "manifest-version",
        in_members(setter("format", to="ckptd-index")),
    )
    yield case(
        "version", "version 3", "manifest-version", in_members(setter("version", to=3)), newer=True
    )
    yield case(
        "feature",
        "an unknown feature",
        "manifest-version",
        in_members(setter("features", to=["time-travel"])),
        newer=True,
    )
    for name in (
        "job",
        "attempt",
        "step",
        "tag",
        "seq",
        "world_size",
        "created",
        "parts",
        "metrics",
        "user_content",
        "writer",
    ):
        yield case(
            f"without-{name.replace('_', '-')}",
            f"`{name}` is missing",
            "manifest-members",
            in_members(remover(name)),
        )
    yield case(
        "negative", "`seq` is negative", "manifest-members", in_members(setter("seq", to=-1))
    )
    yield case(
        "real", "`attempt` is no integer", "manifest-members", in_members(setter("attempt", to=1.5))
    )
    yield case(
        "too-few-parts",
        "`world_size` is 2, and there is one part",
        "manifest-parts",
        in_members(setter("world_size", to=2)),
    )
    yield case(
        "rank",
        "the only part is that of rank 1",
        "manifest-parts",
        in_members(setter("parts", 0, "rank", to=1)),
    )
    yield case(
        "outside",
        "a part is in another directory",
        "manifest-parts",
        in_members(
            setter("parts", 0, "file", to="../rank-00000.00000000000000000000000000000000.ckpt")
        ),
    )
    yield case(
        "data-file",
        "the name of a part is that of a data file",
        "manifest-parts",
        in_members(
            setter("parts", 0, "file", to="rank-00000.00000000000000000000000000000000.0001.ckpt")
        ),
    )
    yield case(
        "index-digest",
        "the digest of the index is that of another index",
        "index-digest",
        in_members(setter("parts", 0, "index_sha256", to="5a" * 32)),
    )
    yield case(
        "deep",
        "`user_content` is nested 300 levels deep",
        "limits",
        checkpoint(
            edit_manifest=lambda data: resealed(
                data.replace(b'"user_content": null', b'"user_content": ' + b"[" * 300 + b"]" * 300)
            )
        ),
    )

    for name, about, text in (
        ("surrogate", "an escape of half a character of two", b'"\\ud800"'),
        ("surrogate-raw", "a text has half a character of two in three bytes", b'"\xed\xa0\x80"'),
        ("beyond-double", "a number is beyond the range of a double", b"1e400"),
    ):
        yield case(name, about, "manifest-json", _with_content(text))
    yield case("digits", "an integer has 4,301 digits", "limits", _with_content(b"1" * 4301))
    yield case(
        "metadata",
        "the size of a tensor in `metadata` is a text",
        "manifest-members",
        in_members(
            setter("metadata", to={"state_dict_metadata": {"mask": {"dtype": "bool", "size": "3"}}})
        ),
    )
    yield case(
        "later-nan",
        "a member that no version knows is NaN without quotes",
        "manifest-json",
        bytes_of(lambda data: resealed(data.replace(b'"seq": 7', b'"later": NaN,\n"seq": 7'))),
    )
    yield case(
        "metric",
        "a metric is another text",
        "manifest-members",
        in_members(setter("metrics", to={"loss": "infinity"})),
    )
    yield case(
        "beyond-range", "`seq` is 2^62", "manifest-members", in_members(setter("seq", to=1 << 62))
    )
    yield case(
        "policies",
        "there are 65 policies",
        "limits",
        in_members(setter("retention", to=["LatestN(n=1)"] * 65)),
    )
    yield case(
        "long-policy",
        "a policy has 4,097 characters",
        "limits",
        in_members(setter("retention", to=["a" * 4097])),
    )
    for name in ("job", "tag", "created"):
        yield case(
            f"long-{name}",
            f"`{name}` has 257 characters",
            "limits",
            in_members(setter(name, to="a" * 257)),
        )
    yield case(
        "writers",
        "`writer` has 65 entries",
        "limits",
        in_members(setter("writer", to={str(n): "" for n in range(65)})),
    )
    yield case(
        "long-writer",
        "a text in `writer` has 1,025 characters",
        "limits",
        in_members(setter("writer", to={"torch": "2" * 1025})),
    )


def _with_content(text: bytes) -> Files:
    """Return a checkpoint with this JSON as its `user_content`."""
    return checkpoint(
        edit_manifest=lambda data: resealed(
            data.replace(b'"user_content": null', b'"user_content": ' + text)
        )
    )


def part_files() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str, about: str, check: str, files: Files, *, at: str = "open", newer: bool = False
    ) -> tuple[str, Refused]:
        return f"part-{name}", Refused(about, check, at, files, newer)

    def without_part(files: Files) -> Files:
        return {name: data for name, data in files.items() if name == "manifest.json"}

    yield case(
        "missing", "the part file is missing", "part-length", checkpoint(edit_files=without_part)
    )
    yield case("empty", "the part file has no byte", "part-length", in_part(lambda data: b""))
    yield case(
        "cut-short",
        "the last 4096 bytes are missing",
        "part-trailer",
        in_part(lambda data: data[:-ALIGN]),
    )
    yield case(
        "longer", "4096 zeros follow", "part-trailer", in_part(lambda data: data + bytes(ALIGN))
    )
    yield case(
        "repeated-trailer",
        "the file is longer, and ends with a copy of its trailer",
        "part-trailer",
        in_part(lambda data: data + bytes(ALIGN - 64) + data[-64:]),
    )
    yield case(
        "magic",
        "the magic is that of a segment",
        "part-header",
        in_part(lambda data: sealed(b"CKPTDSEG" + data[8:184]) + data[ALIGN:]),
    )
    yield case(
        "header-checksum",
        "one bit of the attempt is another",
        "part-header",
        in_part(lambda data: put(data, 32, b"\3")),
    )
    yield case(
        "version-damaged",
        "the version is 2, and the crc32c is that of version 1: damage, and no newer version",
        "part-header",
        in_part(lambda data: put(data, 8, b"\2")),
    )
    yield case(
        "version",
        "version 2",
        "part-header",
        in_part(lambda data: reheaded(data, version=2)),
        newer=True,
    )
    yield case(
        "version-0",
        "version 0",
        "part-header",
        in_part(lambda data: reheaded(data, version=0)),
        newer=True,
    )
    yield case(
        "feature",
        "an unknown feature bit",
        "part-header",
        in_part(lambda data: reheaded(data, features=1 << 31)),
        newer=True,
    )
    yield case(
        "header-padding",
        "a byte behind the header is not zero",
        "part-header",
        in_part(lambda data: put(data, 4000, b"\1")),
    )
    yield case(
        "other-rank",
        "the header is that of rank 1",
        "part-identity",
        in_part(lambda data: sealed(data[:36] + b"\1\0\0\0" + data[40:184]) + data[ALIGN:]),
    )
    yield case(
        "trailer-magic",
        "the trailer has the magic of a header",
        "part-trailer",
        in_part(lambda data: put(data, len(data) - 64, b"CKPTDPRT")),
    )
    yield case(
        "trailer-version",
        "the trailer has version 2",
        "part-trailer",
        in_part(lambda data: retrailed(data, version=2)),
        newer=True,
    )
    yield case(
        "trailer-feature",
        "the trailer has a feature bit",
        "part-trailer",
        in_part(lambda data: retrailed(data, features=1)),
        newer=True,
    )
    yield case(
        "trailer-zero",
        "the zeros of the trailer are not zero",
        "part-trailer",
        in_part(lambda data: retrailed(data, zero=bytes(15) + b"\1")),
    )
    yield case(
        "trailer-length",
        "the trailer names another length of the file",
        "part-trailer",
        in_part(lambda data: retrailed(data, whole=1 << 20)),
    )
    yield case(
        "index-place",
        "the index begins at no multiple of 4096",
        "part-trailer",
        in_part(lambda data: retrailed(data, offset=64)),
    )
    yield case(
        "index-beyond",
        "the index begins behind the file",
        "part-trailer",
        in_part(lambda data: retrailed(data, offset=1 << 40)),
    )
    yield case(
        "index-checksum",
        "the crc32c of the index is another",
        "index-digest",
        in_part(lambda data: retrailed(data, crc=1)),
    )
    yield case(
        "index-padding",
        "a byte behind the index is not zero",
        "index-digest",
        in_part(lambda data: put(data, len(data) - 65, b"\1")),
    )
    for name in (
        "job",
        "attempt",
        "step",
        "rank",
        "world_size",
        "tag",
        "signature",
        "plan",
        "request",
        "values",
        "chunk_size",
        "chunks",
    ):
        if name in ("job", "attempt", "step", "rank", "world_size"):  # the header has them, too

            def without(index: dict[str, Any], name: str = name) -> dict[str, Any]:
                return _Hidden(index, name)

            files = checkpoint([part(edit_index=without)])
        else:
            files = in_index(remover(name))
        yield case(
            f"without-{name.replace('_', '-')}",
            f"the index has no `{name}`",
            "index-members",
            files,
        )
    yield case(
        "signature",
        "the signature is that of another plan",
        "part-identity",
        in_index(setter("signature", to=bytes(32))),
    )
    yield case(
        "chunk-size",
        "the chunk size is 1,000",
        "index-members",
        in_index(setter("chunk_size", to=1000)),
    )

    def shifted(index: dict[str, Any]) -> None:
        index["chunks"][1][2] += ALIGN

    def swapped(index: dict[str, Any]) -> None:
        index["chunks"].reverse()

    def halved(index: dict[str, Any]) -> None:
        index["chunks"][1][1] //= 2

    yield case(
        "chunk-place",
        "a chunk begins 4096 bytes later than it may",
        "chunk-places",
        in_index(shifted),
    )
    yield case(
        "chunk-unaligned",
        "a chunk begins at no multiple of 4096",
        "chunk-places",
        in_index(setter("chunks", 1, 2, to=8200)),
    )
    yield case(
        "chunk-order",
        "the chunks are not in the order of their offsets",
        "chunk-cover",
        in_index(swapped),
    )
    yield case("chunk-short", "a chunk covers half of its region", "chunk-cover", in_index(halved))
    yield case(
        "chunk-width",
        "a chunk has another element size than its region",
        "chunk-cover",
        in_index(setter("chunks", 1, 5, to=8)),
    )
    yield case(
        "chunk-missing",
        "a region has no chunk",
        "chunk-cover",
        in_index(lambda index: index["chunks"].pop(1)),
    )
    yield case(
        "values-place",
        "the values document begins inside the tensors",
        "values-place",
        in_index(setter("values", 0, to=0)),
    )
    yield case(
        "placed-one-file",
        "`placed` names a data file, and there is none",
        "chunk-places",
        in_index(setter("placed", to=[1, 0, 0, 0])),
    )
    yield case("codec", "codec 7", "codec", in_index(setter("chunks", 1, 4, to=7)), newer=True)
    yield case(
        "two-parts-of-one-rank",
        "both parts say that they are of rank 0",
        "part-manifest",
        _two_of_one_rank(),
    )
    yield case(
        "another-step",
        "the part is that of step 999",
        "part-manifest",
        checkpoint([part(step=999)]),
    )
    yield case(
        "another-count",
        "the manifest counts 4 items, and the plan has 3",
        "part-manifest",
        in_members(setter("parts", 0, "items", to=4)),
    )

    def spread(edit: Callable[[Files], Files]) -> Files:
        return checkpoint([part(files=2, edit_files=edit)], features=["files"])

    def data_file(files: Files) -> str:
        return next(name for name in files if name.endswith(".0001.ckpt"))

    yield case(
        "data-file-missing",
        "a data file is missing",
        "data-files",
        spread(lambda files: {n: d for n, d in files.items() if n != data_file(files)}),
    )
    yield case(
        "data-file-longer",
        "4096 zeros follow in a data file",
        "data-files",
        spread(lambda files: {**files, data_file(files): files[data_file(files)] + bytes(ALIGN)}),
    )
    yield case(
        "data-file-number",
        "a data file has the header of file 0",
        "data-files",
        spread(
            lambda files: {
                **files,
                data_file(files): files[_first(files)][:ALIGN] + files[data_file(files)][ALIGN:],
            }
        ),
    )

    yield case(
        "data-file-feature",
        "the header of a data file that is not linked has bit 1 of the features",
        "data-files",
        spread(
            lambda files: {**files, data_file(files): reheaded(files[data_file(files)], features=3)}
        ),
    )
    yield case(
        "data-file-version",
        "the header of a data file that is not linked has version 2: damage, because the part "
        "file has version 1",
        "data-files",
        spread(
            lambda files: {
                **files,
                data_file(files): reheaded(files[data_file(files)], features=1, version=2),
            }
        ),
    )

    def with_features(features: int) -> Files:
        return in_part(lambda data: reheaded(data, features=features))

    yield case(
        "feature-files",
        "the header says that there are data files, and there is none",
        "part-identity",
        with_features(1),
    )
    yield case(
        "feature-linked",
        "the header says that there are linked files, and there is none",
        "part-identity",
        with_features(2),
    )
    yield case(
        "feature-missing",
        "the header does not say that there are data files",
        "part-identity",
        spread(lambda files: {**files, _first(files): reheaded(files[_first(files)])}),
    )
    yield case(
        "chunk-empty",
        "a chunk has the stored length 0",
        "chunk-places",
        in_index(setter("chunks", 1, 3, to=0)),
    )
    yield case(
        "chunk-large",
        "the last chunk has a stored length of 16 MiB and a byte",
        "chunk-places",
        in_index(setter("chunks", 3, 3, to=(16 << 20) + 1)),
    )
    yield case(
        "values-long",
        "the values document has 256 MiB and a byte",
        "limits",
        in_index(setter("values", 1, to=(256 << 20) + 1)),
    )
    yield case(
        "long-job",
        "the job in the index has 129 characters",
        "limits",
        in_index(setter("job", to="a" * 129)),
    )
    yield case(
        "long-tag",
        "the tag in the index has 257 characters",
        "limits",
        in_index(setter("tag", to="a" * 257)),
    )
    yield case(
        "placed-nowhere",
        "`placed` names a data file 2, and there is one data file",
        "chunk-places",
        in_index(setter("placed", to=[0, 1, 2, 1]), files=2),
    )
    yield case(
        "placed-short",
        "`placed` has a chunk too few",
        "chunk-places",
        in_index(setter("placed", to=[0, 1, 0]), files=2),
    )
    yield case(
        "data-file-unused",
        "there is a data file without a chunk",
        "chunk-places",
        in_index(lambda index: index.update(placed=[0] * 4), files=2),
    )


class _Hidden(dict[str, Any]):
    """A map that can be asked for a key that it does not have when it is encoded."""

    def __init__(self, members: dict[str, Any], name: str) -> None:
        self.hidden = members.pop(name)
        super().__init__(members)

    def __missing__(self, name: str) -> Any:
        return self.hidden


def _two_of_one_rank() -> Files:
    first, second = part(world_size=2), part(world_size=2, rank=0, step=1000)
    files, entry = first.built()

    def members(found: dict[str, Any]) -> dict[str, Any]:
        other = entry | {"rank": 1, "file": entry["file"].replace("rank-00000", "rank-00001")}
        return found | {"parts": [entry, other], "world_size": 2}

    return Checkpoint(
        [second],
        edit_members=members,
        edit_files=lambda found: (
            found | {name.replace("rank-00000", "rank-00001"): data for name, data in files.items()}
        ),
    ).built()


def links() -> Iterator[tuple[str, Refused]]:
    def case(name: str, about: str, edit: Callable[[dict[str, Any]], None]) -> tuple[str, Refused]:
        vector = linked_files().checkpoint
        only = vector.parts[0]

        def edited(index: dict[str, Any]) -> dict[str, Any]:
            edit(index)
            return index

        only.edit_index = edited
        return f"linked-{name}", Refused(about, "linked-files", "open", vector.built())

    yield case(
        "order",
        "the linked files are not in the order of their numbers",
        lambda index: index["linked"].reverse(),
    )
    yield case(
        "nonce", "the nonce is not that of the linked file", setter("linked", 0, 1, to=bytes(16))
    )
    yield case("step", "the step is not that of the linked file", setter("linked", 0, 3, to=901))
    yield case(
        "number", "the number there is not that of the linked file", setter("linked", 1, 2, to=2)
    )
    yield case("none", "there is no data file of that number", setter("linked", 1, 0, to=3))
    yield case(
        "beyond",
        "a chunk lies behind the end of the linked file",
        setter("chunks", 0, 2, to=1 << 20),
    )


def linked_data_files() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str, about: str, edit: Callable[[bytes], bytes], *, newer: bool = False
    ) -> tuple[str, Refused]:
        files = linked_files().checkpoint.built()
        file = next(name for name in files if name.endswith(".0002.ckpt"))
        if data := edit(files.pop(file)):
            files[file] = data
        return f"linked-{name}", Refused(
            about, "linked-files" if newer else "data-files", "open", files, newer
        )

    yield case("missing", "a linked file is missing", lambda data: b"")
    yield case("longer", "4096 zeros follow in a linked file", lambda data: data + bytes(ALIGN))
    yield case(
        "version",
        "a linked file has version 2",
        lambda data: reheaded(data, version=2, features=1),
        newer=True,
    )


def plans() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str,
        about: str,
        edit: Callable[[dict[str, Any]], None],
        check: str = "plan-items",
        **options: Any,
    ) -> tuple[str, Refused]:
        newer = options.pop("newer", False)
        return f"plan-{name}", Refused(about, check, "open", in_plan(edit, **options), newer)

    def duplicate(plan: dict[str, Any]) -> None:
        plan["items"][2][0] = plan["items"][1][0]

    def alias(*fields: Any) -> Callable[[dict[str, Any]], None]:
        return setter("aliases", to=[list(fields)])

    # The items are 0 `steps` at 0, 1 `weight` at 64 and 2 `mask` at 128, each in a
    # region of its own.
    yield case(
        "version", "the plan has version 2", setter("version", to=2), "plan-members", newer=True
    )
    yield case("without-regions", "the plan has no `regions`", remover("regions"), "plan-members")
    yield case("without-items", "the plan has no `items`", remover("items"), "plan-members")
    yield case(
        "region-order",
        "the regions are not in the order of their element sizes",
        lambda plan: plan["regions"].reverse(),
        "plan-regions",
    )
    yield case(
        "region-place",
        "a region begins at no multiple of 64",
        setter("regions", 1, 0, to=72),
        "plan-regions",
    )
    yield case(
        "region-overlap", "two regions overlap", setter("regions", 0, 1, to=72), "plan-regions"
    )
    yield case(
        "region-length",
        "a region ends inside an element",
        setter("regions", 1, 1, to=47),
        "plan-regions",
    )
    yield case(
        "region-width",
        "a region has an element size of 3",
        setter("regions", 1, 2, to=3),
        "plan-regions",
    )
    yield case(
        "region-twice",
        "two regions have one element size",
        lambda plan: plan["regions"].append([192, 0, 1]),
        "plan-regions",
    )
    yield case(
        "regions-six",
        "there are six regions",
        lambda plan: plan["regions"].extend([192 + 64 * number, 0, 1] for number in range(3)),
        "limits",
    )
    yield case(
        "global-plan", "`global_plan` has 65 bytes", setter("global_plan", to=bytes(65)), "limits"
    )
    yield case("item-beyond", "an item reaches beyond its region", setter("items", 1, 6, to=68))
    yield case("item-before", "an item lies in no region", setter("items", 1, 6, to=48))
    yield case(
        "item-unaligned",
        "an item begins at no multiple of its element size",
        setter("items", 1, 6, to=66),
    )
    yield case(
        "item-width",
        "an item lies in a region of another element size",
        setter("items", 1, 1, to="int16"),
    )
    yield case(
        "item-dimensions",
        "`offsets` has a dimension more than `size`",
        setter("items", 1, 3, to=[0, 0, 0]),
    )
    yield case("item-outside", "a shard lies outside its tensor", setter("items", 1, 3, to=[1, 0]))
    yield case("item-twice", "two items have one name and no offset", duplicate)
    yield case(
        "dtype",
        "a dtype of an unknown size",
        setter("items", 1, 1, to="float99"),
        "dtype",
        newer=True,
    )
    yield case(
        "dtype-size",
        "a known dtype with another size",
        setter("items", 1, 1, to="float32/8"),
        "dtype",
        newer=True,
    )
    yield case("stride-hole", "the strides leave gaps", setter("items", 1, 5, to=[6, 2]))
    yield case(
        "stride-overlap",
        "the strides let two elements share bytes",
        setter("items", 1, 5, to=[1, 1]),
    )
    yield case(
        "stride-zero",
        "a stride of a dimension of more than one element is 0",
        setter("items", 1, 5, to=[0, 1]),
    )
    yield case("stride-dimensions", "there is a stride too few", setter("items", 1, 5, to=[1]))
    yield case(
        "dimensions",
        "a tensor has 65 dimensions",
        lambda plan: plan["items"][2].__setitem__(
            slice(2, 5), [[3] + [1] * 64, [0] * 65, [3] + [1] * 64]
        ),
        "limits",
    )
    yield case(
        "elements",
        "a tensor has 2^62 elements",
        setter("items", 1, 2, to=[1 << 31, 1 << 31]),
        "limits",
    )
    yield case(
        "alias-base",
        "there is no item of the base's name",
        alias("tied", "nowhere", 0, "float32", [1], [1]),
        "plan-aliases",
    )
    yield case(
        "alias-twice",
        "an alias has the name of an item",
        alias("mask", "weight", 0, "float32", [1], [1]),
        "plan-aliases",
    )
    yield case(
        "alias-beyond",
        "an alias reaches beyond its base",
        alias("tied", "weight", 0, "float32", [2, 3], [9, 2]),
        "plan-aliases",
    )
    yield case(
        "alias-unaligned",
        "an alias begins at no multiple of its element size",
        alias("tied", "weight", 2, "float32", [1], [1]),
        "plan-aliases",
    )
    yield case(
        "alias-stride",
        "an alias has a stride too few",
        alias("tied", "weight", 0, "float32", [1, 1], [1]),
        "plan-aliases",
    )
    yield case(
        "alias-dtype",
        "an alias has a dtype of an unknown size",
        alias("tied", "weight", 0, "float99", [1], [1]),
        "dtype",
        newer=True,
    )
    yield case(
        "aliases-twice",
        "two aliases have one name",
        setter("aliases", to=[["tied", "weight", at, "float32", [1], [1]] for at in (0, 4)]),
        "plan-aliases",
    )
    yield case(
        "alias-of-alias",
        "the base of an alias is another alias",
        setter(
            "aliases",
            to=[
                ["tied", "weight", 0, "float32", [1], [1]],
                ["too", "tied", 0, "float32", [1], [1]],
            ],
        ),
        "plan-aliases",
    )
    yield case(
        "metadata",
        "the size of a tensor in `metadata` is a text",
        setter("metadata", to={"mask": {"dtype": "bool", "size": "3"}}),
        "plan-members",
    )
    yield case(
        "negative", "an offset is negative", setter("items", 1, 3, to=[-1, 0]), "plan-members"
    )
    yield case(
        "without-name", "an item has an empty name", setter("items", 1, 0, to=""), "plan-members"
    )
    yield case(
        "long-name",
        "an item has a name of 16,385 characters",
        setter("items", 1, 0, to="n" * 16385),
        "limits",
    )
    yield case(
        "long-device",
        "an item has a device of 65 characters",
        setter("items", 1, 7, to="d" * 65),
        "limits",
    )
    yield case(
        "writers",
        "`writer` has 65 entries",
        setter("writer", to={str(n): "" for n in range(65)}),
        "limits",
    )
    blob = Tensor("blob", "bytes", (4,), b"blob")
    yield case(
        "alias-of-blob",
        "the base of an alias is a blob",
        alias("tied", "blob", 0, "uint8", [1], [1]),
        "plan-aliases",
        tensors=[*TENSORS, blob],
    )
    rows = [Tensor("rows", "uint8", (1,), b"a", (2,), (number,)) for number in range(2)]
    yield case(
        "alias-of-shards",
        "the base of an alias is divided into two items",
        alias("tied", "rows", 0, "uint8", [1], [1]),
        "plan-aliases",
        tensors=[*TENSORS, *rows],
    )


def coverage() -> Iterator[tuple[str, Refused]]:
    def case(name: str, about: str, *shards: tuple[int, int, int]) -> tuple[str, Refused]:
        """Each shard is its number of rows in the whole tensor, its first row, and its
        number of rows.
        """
        parts = []
        for rank, (size, first, count) in enumerate(shards):
            rows = Tensor(
                "rows", "float32", (count, 2), floats(*range(2 * count)), (size, 2), (first, 0)
            )
            metadata = {
                "rows": {
                    "dtype": "float32",
                    "size": [size, 2],
                    "chunks": [[[f, 0], [c, 2]] for _, f, c in shards],
                }
            }
            parts.append(
                Part(
                    [rows],
                    state_of(["rows"]),
                    rank,
                    len(shards),
                    metadata=metadata if rank == 0 else None,
                )
            )
        return f"cover-{name}", Refused(about, "coverage", "read", checkpoint(parts))

    yield case("hole", "row 2 of 4 is in no shard", (4, 0, 2), (4, 3, 1))
    yield case(
        "overlap",
        "row 1 of 4 is in two shards, and the shards have 4 rows together as the tensor, and row "
        "3 is in none",
        (4, 0, 2),
        (4, 1, 2),
    )
    yield case("too-many", "row 1 of 4 is in two shards", (4, 0, 2), (4, 1, 3))
    yield case("sizes", "the tensor has 4 rows in one part, and 5 in another", (4, 0, 2), (5, 2, 2))
    halves = [
        Tensor("rows", dtype, (1,), floats(rank), (2,), (rank,))
        for rank, dtype in enumerate(("float32", "int32"))
    ]
    parts = [Part([half], state_of(["rows"]), rank, 2) for rank, half in enumerate(halves)]
    about = "the tensor has a dtype in one part, and another one of the same size in another part"
    yield "cover-dtypes", Refused(about, "coverage", "read", checkpoint(parts))

    hidden = [
        Part([Tensor("~1", "uint8", (8 + rank,), bytes(8 + rank))], state_of([]), rank, 2)
        for rank in range(2)
    ]
    about = "a hidden item has 8 bytes in one part, and 9 in another"
    yield "cover-hidden", Refused(about, "coverage", "read", checkpoint(hidden))


def codecs() -> Iterator[tuple[str, Refused]]:
    tensors = compressible()[2:4]
    names = [each.fqn for each in tensors]

    def case(
        name: str,
        about: str,
        codec: int,
        stored: Callable[[bytes, int], bytes],
        check: str = "codec",
    ) -> tuple[str, Refused]:
        def encode(number: int, data: bytes, width: int) -> tuple[int, bytes]:
            return (codec, stored(data, width)) if number == 0 else (0, data)

        only = Part(tensors, state_of(names), metadata=whole(tensors), encode=encode)
        return f"codec-{name}", Refused(about, check, "read", checkpoint([only]))

    def changed(
        edit: Callable[[list[Any]], Any], name: str, about: str, check: str
    ) -> tuple[str, Refused]:
        def edited(stored: list[list[Any]]) -> list[list[Any]]:
            edit(stored[0])
            return stored

        return f"codec-{name}", Refused(
            about, check, "read", checkpoint([part(edit_stored=edited)])
        )

    def swapped(data: bytes, width: int) -> bytes:
        found = planes(data, width)
        (first,) = struct.unpack_from("<I", found, 4)
        return put(found, 4, struct.pack("<I", first - 1))

    def method(
        kind: int, change: Callable[[bytes], bytes] = lambda plane: plane
    ) -> Callable[[bytes, int], bytes]:
        return lambda data, width: planes(data, width, lambda number, plane: (kind, change(plane)))

    yield changed(
        lambda chunk: chunk.__setitem__(2, chunk[2] ^ 1),
        "raw-crc",
        "the crc32c of the raw bytes is another",
        "chunk-raw-crc",
    )
    yield (
        "codec-stored-crc",
        Refused(
            "the crc32c of the stored bytes is another",
            "chunk-stored-crc",
            "read",
            in_index(setter("chunks", 1, 7, to=1)),
        ),
    )
    yield (
        "codec-flipped",
        Refused(
            "one bit of a chunk is another",
            "chunk-stored-crc",
            "read",
            in_part(lambda data: put(data, 8192, b"\xff")),
        ),
    )
    yield (
        "codec-padding",
        Refused(
            "a byte behind a chunk is not zero",
            "chunk-padding",
            "read",
            in_part(lambda data: put(data, 12287, b"\1")),
        ),
    )
    yield changed(
        lambda chunk: chunk.__setitem__(1, chunk[1] + b"\0"),
        "raw-length",
        "a raw chunk is stored in a byte more",
        "codec",
    )
    yield case(
        "zstd-no-size",
        "a zstd frame names no content size",
        1,
        lambda data, width: frame(data, window=20, sized=False),
    )
    yield case(
        "zstd-size",
        "a zstd frame names another content size",
        1,
        lambda data, width: frame(data, size=len(data) + 1),
    )
    yield case(
        "zstd-short",
        "a zstd frame has a byte less than its chunk",
        1,
        lambda data, width: frame(data[:-1]),
    )
    yield case(
        "zstd-window",
        "a zstd frame has a window of 16 MiB",
        1,
        lambda data, width: frame(data, window=24),
    )
    yield case("zstd-two", "two zstd frames", 1, lambda data, width: frame(data) + frame(b""))
    yield case(
        "zstd-trailing", "a byte follows a zstd frame", 1, lambda data, width: frame(data) + b"\0"
    )
    yield case(
        "zstd-skippable",
        "a skippable frame before the zstd frame",
        1,
        lambda data, width: struct.pack("<II", 0x184D2A50, 0) + frame(data),
    )
    yield case("zstd-garbage", "no zstd frame", 1, lambda data, width: data)
    yield case(
        "zstd-dictionary",
        "a zstd frame names dictionary 7",
        1,
        lambda data, width: frame(data, dictionary=7),
    )
    yield case(
        "zstd-other",
        "a zstd frame with other bytes of the right length",
        1,
        lambda data, width: frame(bytes(len(data))),
        "chunk-raw-crc",
    )
    yield case("planes-method", "a plane with method 2", 2, method(2))
    yield case("planes-length", "a plane that names a byte less than it has", 2, swapped)
    yield case(
        "planes-short", "a plane without its last word", 2, method(0, lambda plane: plane[:-1])
    )
    yield case(
        "planes-trailing",
        "a byte follows the planes",
        2,
        lambda data, width: planes(data, width) + b"\0",
    )
    yield case(
        "planes-window",
        "a plane in a frame with a window of 256 KiB",
        2,
        method(1, lambda plane: frame(plane, window=18)),
    )
    yield case(
        "planes-no-size",
        "a plane in a frame that names no content size",
        2,
        method(1, lambda plane: frame(plane, window=17, sized=False)),
    )
    yield case(
        "planes-cut",
        "the lengths of the planes are cut short",
        2,
        lambda data, width: planes(data, width)[:20],
    )


def values() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str, about: str, document: Any, check: str = "values", *, newer: bool = False
    ) -> tuple[str, Refused]:
        return f"values-{name}", Refused(
            about, check, "read", checkpoint([part(values=document)]), newer
        )

    deep: Any = []
    for _ in range(300):
        deep = [deep]
    sound = msgspec.msgpack.encode(state_of(NAMES))
    yield case("cut-short", "the document is cut short", sound[:-1])
    yield case("trailing", "a byte follows the document", sound + b"\0")
    yield case("garbage", "the document is no msgpack", b"\xc1" * 40)
    yield case("list", "the document is a list", [1, 2])
    yield case("without-state", "the document has no `state`", {"rng": None})
    yield case(
        "unknown-tensor", "a value names a tensor that no part has", state_of([*NAMES, "nowhere"])
    )
    yield case(
        "code", "an extension type 99", state_of(NAMES, later=plain_ext(99, b"")), newer=True
    )
    yield case(
        "standard",
        "a type of the standard library that is not in the table",
        state_of(NAMES, later=ext(23, ["Century", 21])),
        newer=True,
    )
    yield case(
        "inner",
        "the payload of a tuple is cut short",
        state_of(NAMES, broken=plain_ext(2, b"\x93\x01")),
    )
    yield case("deep", "lists are nested 300 levels deep", state_of(NAMES, deep=deep), "limits")
    yield case("tuple", "the payload of a tuple is a number", state_of(NAMES, broken=ext(2, 1)))
    yield case(
        "number",
        "the digits of an integer are a word",
        state_of(NAMES, broken=plain_ext(6, "twelve")),
    )
    yield case(
        "digits",
        "an integer beyond 64 bits has 4,301 digits",
        state_of(NAMES, broken=plain_ext(6, "1" * 4301)),
        "limits",
    )
    yield case(
        "complex",
        "the parts of a complex number are a text",
        state_of(NAMES, broken=ext(7, ["x", 1])),
    )
    yield case(
        "array", "an array is no `.npy` file", state_of(NAMES, broken=plain_ext(8, b"array"))
    )
    yield case(
        "stream",
        "an unknown kind of stream",
        state_of(NAMES, later=ext(30, ["RawIO", b"", 0])),
        newer=True,
    )


def second_versions() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str, about: str, check: str = "metadata-object", *, at: str = "read", **options: Any
    ) -> tuple[str, Refused]:
        return f"version-2-{name}", Refused(about, check, at, format_2(**options)[0].built())

    def unsorted(block: list[Any]) -> list[Any]:
        return block[::-1]

    def with_entry(name: str, entry: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
        return lambda block: [[fqn, entry if fqn == name else found] for fqn, found in block]

    def mesh(*fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda index: index | {"meshes": [list(fields), *index["meshes"][1:]]}

    def blocks(
        edit: Callable[[list[list[Any]]], Any],
    ) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def edited(index: dict[str, Any]) -> dict[str, Any]:
            edit(index["blocks"])
            return index

        return edited

    def columns(name: str, to: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda members: members | {"parts": members["parts"] | {name: to}}

    def in_object(edit: Callable[[bytes], bytes]) -> Files:
        files = format_2()[0].built()
        return {
            name: edit(data) if name.startswith("metadata.") else data
            for name, data in files.items()
        }

    yield case("order", "a block begins with its last entry", edit_block=unsorted)
    yield case(
        "order-inside",
        "a block has its second entry behind its third",
        split=3,
        edit_block=lambda block: [block[0], *block[:0:-1]],
    )
    yield case(
        "twice",
        "a block has an entry twice",
        edit_block=lambda block: [block[0], block[0], *block[1:]],
    )
    yield case(
        "block-crc",
        "the crc32c of a block is another",
        edit_index=blocks(lambda found: found[0].__setitem__(4, 1)),
    )
    yield case(
        "block-place",
        "a block ends behind the offset of the index",
        edit_index=blocks(lambda found: found[0].__setitem__(1, 1 << 20)),
    )
    yield case(
        "block-length",
        "a block has another length than it says",
        edit_index=blocks(lambda found: found[0].__setitem__(3, 9)),
    )
    yield case(
        "block-first",
        "a block does not begin with the entry that the index names",
        edit_index=blocks(lambda found: found[1].__setitem__(0, "d")),
    )
    yield case(
        "mesh-twice",
        "a mesh has a rank at two coordinates",
        "rules",
        at="open",
        edit_index=mesh([2, 2], 0, [1, 1], []),
    )
    yield case(
        "mesh-beyond",
        "a mesh has a rank that the job does not have",
        "rules",
        at="open",
        edit_index=mesh([2, 2], 1, [2, 1], []),
    )
    yield case(
        "mesh-strides",
        "a mesh has a stride too few",
        "rules",
        at="open",
        edit_index=mesh([2, 2], 0, [2], []),
    )
    yield case(
        "rule-mesh",
        "a rule names a mesh that there is not",
        "rules",
        edit_block=with_entry(
            "divided", {"dtype": "float32", "size": [10, 2], "rule": [7, [[1, 0], [0, 0]], 0]}
        ),
    )
    yield case(
        "rule-twice",
        "a rule divides along one dimension of its mesh twice",
        "rules",
        edit_block=with_entry(
            "divided", {"dtype": "float32", "size": [10, 2], "rule": [0, [[1, 0], [1, 0]], 0]}
        ),
    )
    yield case(
        "rule-dimension",
        "a rule divides a dimension that the tensor does not have",
        "rules",
        edit_block=with_entry(
            "divided", {"dtype": "float32", "size": [10, 2], "rule": [0, [[1, 2], [0, 0]], 0]}
        ),
    )
    yield case(
        "rule-replica",
        "a rule names a replica that there is not",
        "rules",
        edit_block=with_entry("scalar", {"dtype": "float32", "size": [], "rule": [0, [], 4]}),
    )
    yield case(
        "rule-empty",
        "a rule for a tensor without an element",
        "rules",
        edit_block=with_entry("empty", {"dtype": "float32", "size": [0, 4], "rule": [0, [], 0]}),
    )
    yield case(
        "not-there",
        "the metadata say that rank 0 has a shard that it does not have",
        "metadata-parts",
        edit_block=with_entry(
            "listed",
            {"dtype": "int64", "size": [4], "chunks": [[[0], [3]], [[3], [1]]], "ranks": [0, 3]},
        ),
    )
    yield case(
        "other-dtype",
        "the metadata have another dtype than the part",
        "metadata-parts",
        edit_block=with_entry("whole", {"dtype": "uint8", "size": [3], "chunks": [[[0], [3]]]}),
    )
    for name, about, entry in (
        ("no-shards", "an entry has no shard", {"chunks": []}),
        (
            "shard-dimensions",
            "a shard has a dimension more than its tensor",
            {"chunks": [[[0, 0], [3, 1]]]},
        ),
        (
            "rank-beyond",
            "an entry names a rank that the job does not have",
            {"chunks": [[[0], [3]]], "ranks": [4]},
        ),
        (
            "rank-missing",
            "an entry has a rank too few",
            {"chunks": [[[0], [2]], [[2], [1]]], "ranks": [0]},
        ),
        (
            "rule-and-chunks",
            "an entry has a rule and shards",
            {"chunks": [[[0], [3]]], "rule": [0, [], 0]},
        ),
    ):
        yield case(
            name, about, edit_block=with_entry("whole", {"dtype": "bool", "size": [3]} | entry)
        )
    yield case(
        "empty-block",
        "a block has no entry",
        edit_block=lambda block: block if len(block) > 1 else [],
    )
    for name, about, file in (
        (
            "outside",
            "the metadata object is in another directory",
            "../metadata.00000000000000000000000000000000.ckpt",
        ),
        ("file", "the name of the metadata object is that of the manifest", "manifest.json"),
    ):
        yield case(
            name,
            about,
            "manifest-members",
            at="open",
            edit_members=lambda members, file=file: (
                members | {"metadata_object": {**members["metadata_object"], "file": file}}
            ),
        )
    yield "version-2-mesh-formula", _interleaved_mesh()
    yield case(
        "nonces",
        "the column of nonces has one too few",
        "manifest-parts",
        at="open",
        edit_members=columns("nonces", "AAAA"),
    )
    yield case(
        "column",
        "a column has a member too few",
        "manifest-parts",
        at="open",
        edit_members=columns("items", [1, 1, 1]),
    )
    yield case(
        "base64",
        "a column is no base64",
        "manifest-parts",
        at="open",
        edit_members=columns("digests", "!" * 172),
    )
    yield (
        "version-2-missing",
        Refused(
            "the metadata object is missing",
            "metadata-object",
            "open",
            {
                name: data
                for name, data in format_2()[0].built().items()
                if not name.startswith("metadata.")
            },
        ),
    )
    yield (
        "version-2-cut-short",
        Refused(
            "the metadata object is cut short",
            "metadata-object",
            "open",
            in_object(lambda data: data[:-1]),
        ),
    )
    yield (
        "version-2-index",
        Refused(
            "a bit of the index of the metadata object is another",
            "metadata-object",
            "open",
            in_object(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ),
    )


def _interleaved_mesh() -> Refused:
    """Return a checkpoint with a mesh that gives no rank to two coordinates, and whose
    strides are forbidden nevertheless.
    """
    tensors = [Tensor(f"t{rank}", "uint8", (1,), bytes([rank])) for rank in range(8)]
    entries = [
        [each.fqn, {"dtype": "uint8", "size": [1], "chunks": [[[0], [1]]], "ranks": [rank]}]
        for rank, each in enumerate(tensors)
    ]
    name, data, entry = metadata_object(entries, [[[3, 2], 0, [2, 3], []]])
    parts = [
        Part([each], state_of([each.fqn]), rank, 8, metadata={} if rank == 0 else None)
        for rank, each in enumerate(tensors)
    ]
    files = Checkpoint(
        parts,
        edit_members=lambda members: second_version(members, entry),
        edit_files=lambda found: found | {name: data},
    ).built()
    about = (
        "a mesh whose strides 2 and 3 interleave its ranks 0, 3, 2, 5, 4 and 7: such a mesh must "
        "list its ranks"
    )
    return Refused(about, "rules", "open", files)


_CASES = (
    manifests,
    part_files,
    links,
    linked_data_files,
    plans,
    coverage,
    codecs,
    values,
    second_versions,
)
REFUSED = {name: refused for cases in _CASES for name, refused in cases()}
"""All of them, by name."""
