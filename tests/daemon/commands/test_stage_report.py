"""Tests what `ckptd status` says about a stage; `test_uploader.py` has the status of
real daemons.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.daemon.commands.stage_report import stage_lines

IDLE: dict[str, Any] = {
    "directory": "/nvme/stage", "root_known": True, "waiting": 0, "waiting_bytes": 0,
    "oldest_age_seconds": None, "uploading": None, "problem": "", "refused": {},
}  # fmt: skip
WAITS = {"waiting": 2, "waiting_bytes": 4 * 10**9, "oldest_age_seconds": 180.0}


@pytest.mark.parametrize(
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
