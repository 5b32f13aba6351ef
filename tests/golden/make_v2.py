"""Writes the golden manifest of version 2 and its metadata object: `python -m
tests.golden.make_v2` in the root of the repository.

It never overwrites a file, because files of that version are in use. All their content
is fixed here. The bytes of the metadata object depend on the version of zstd, so that
they are read by the tests, and not written again.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from ckptd.shared.formats import manifest as manifests
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.sharding import Mesh, Rule
from ckptd.shared.names import part_file
from tests.golden import make

PLACE = make.PLACE.parent / "v2"
MESHES = [Mesh((2, 2), 0, (2, 1)), Mesh((2, 2), ranks=(0, 1, 3, 2))]
METADATA: dict[str, Any] = {
    "model.divided": {"dtype": "float32", "size": [10, 4], "rule": Rule(0, ((1, 0), (0, 0)), 0)},
    "model.replicated": {"dtype": "bfloat16", "size": [8], "rule": Rule(1, ((1, 0),), 1)},
    "model.explicit": {
        "dtype": "int64",
        "size": [4],
        "chunks": [[[0], [3]], [[3], [1]]],
        "ranks": [2, 3],
    },
    "model.whole": {"dtype": "bool", "size": [], "chunks": [[[], []]]},
    "step": {"dtype": "bytes", "ranks": [1]},
}
PARTS = [
    PartEntry(
        rank=rank, file=part_file(rank, bytes(range(rank, rank + 16))), bytes=12288 + 4096 * rank,
        raw_bytes=500 + rank, items=4, index_sha256=f"{rank:064x}", files=1 + rank % 2,
        linked_bytes=4096 * (rank // 3),
    )
    for rank in range(4)
]  # fmt: skip
MANIFEST = Manifest(
    features=["files", "linked-files"], job=make.JOB, attempt=make.ATTEMPT, step=make.STEP,
    tag=make.TAG, seq=7, world_size=4, created="2026-01-02T03:04:05+00:00", parts=PARTS,
    metadata={"state_dict_metadata": METADATA, "planner_data": None, "meshes": MESHES},
    metrics={"loss": 0.25}, user_content={"epoch": 3}, writer=make.WRITER,
    retention=["LatestN(n=5)"],
)  # fmt: skip


def files() -> dict[str, bytes]:
    """Return the contents of the manifest and of the metadata object."""
    with mock.patch.object(manifests, "MOST_INLINE", 0):
        data, objects = MANIFEST.split()
    return {"manifest.json": data, **objects}


def main() -> None:
    make.write(PLACE, files())


if __name__ == "__main__":
    try:
        main()
    except FileExistsError as error:
        sys.exit(str(error))
