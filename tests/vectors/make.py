"""Writes the archive of test vectors: `python -m tests.vectors.make` in the root of the
repository.

The archive is for other readers of the formats (FORMAT.md, section 17). All its content
is fixed here, so that it is the same wherever it is made. A vector that was published
is never changed: new ones get new names.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.vectors import deltas, frames, jobs, memory, refused, sound
from tests.vectors.build import JOB, Files

ARCHIVE = Path(__file__).parent / "vectors.tar.xz"
README = """Test vectors for readers of ckptd's files. Section 17 of shared/FORMAT.md in ckptd's repository explains them.
"""  # noqa: E501


def vectors() -> tuple[Files, dict[str, Any]]:
    """Return the files of all vectors by their paths in the archive, and the content of
    `vectors.json`.
    """
    files, entries = Files(), dict[str, Any]()

    def add_checkpoint(name: str, content: Files, entry: dict[str, Any], tag: str) -> None:
        path = f"checkpoints/{name}/{JOB}/{tag}"
        entries[f"checkpoints/{name}"] = {"kind": "checkpoint", "path": path} | entry
        files.update({f"{path}/{file}": data for file, data in content.items()})

    for name, make in (sound.SOUND | deltas.SOUND).items():
        vector = make()
        add_checkpoint(name, vector.checkpoint.built(), vector.entry(), vector.checkpoint.tag)
    about = "an abandonment under the name of the manifest: there is no checkpoint"
    add_checkpoint(
        "abandoned", sound.abandoned(), {"about": about, "expect": "nothing"}, "step-00001000.a0002"
    )
    for name, case in (refused.REFUSED | deltas.REFUSED).items():
        add_checkpoint(name, case.files, case.entry(), "step-00001000.a0002")
    for kind, found, suffix in (
        ("segment", memory.segments(), "seg"),
        ("journal", memory.journals(), "log"),
        ("frame", frames.frames(), "frame"),
    ):
        for name, each in found.items():
            path = f"{kind}s/{name}.{suffix}"
            entries[f"{kind}s/{name}"] = {"kind": kind, "path": path} | each.entry
            files[path] = each.data
    for name, job in jobs.jobs().items():
        path = f"jobs/{name}/{JOB}"
        entries[f"jobs/{name}"] = {"kind": "job", "path": path} | job.entry
        files.update({f"{path}/{file}": data for file, data in job.files.items()})
    return files, {"format": "ckptd-vectors", "version": 1, "vectors": entries}


def contents() -> Files:
    """Return every file of the archive."""
    files, index = vectors()
    text = json.dumps(index, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return {"README": README.encode(), "vectors.json": text.encode()} | dict(sorted(files.items()))


def archive(files: Files) -> bytes:
    """Return the archive. Its members are in order, and have no owner and no time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", format=tarfile.PAX_FORMAT, preset=9) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"ckptd-vectors/{name}")
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def unpacked(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each file of an archive."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None, member.name
            yield member.name.removeprefix("ckptd-vectors/"), file.read()


def main() -> None:
    files = contents()
    if ARCHIVE.exists():
        there = dict(unpacked(ARCHIVE.read_bytes()))
        changed = sorted(
            name for name in there.keys() - {"vectors.json"} if files.get(name) != there[name]
        )
        if changed and sys.argv[1:] != ["--replace"]:
            sys.exit(
                f"{changed[0]} and {len(changed) - 1} others would change: a vector that was "
                f"published is never changed"
            )
    ARCHIVE.write_bytes(archive(files))
    print(f"{ARCHIVE}: {len(files)} files, {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
