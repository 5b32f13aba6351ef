"""Tests the file systems in memory."""

from __future__ import annotations

import subprocess
from contextlib import closing

import pytest

from tests.crash.images import FLUSHED, Image, Unavailable

ELSEWHERE = ("unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; read line")


def test_a_disk_works_after_its_power_cut_while_another_namespace_has_it_mounted() -> None:
    try:
        disk = Image()
    except Unavailable as error:
        pytest.skip(str(error))
    with closing(disk):
        holder = subprocess.Popen(ELSEWHERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        (disk.where / "synced").write_text("kept")
        disk.stop(FLUSHED)
        disk.again()
        (disk.where / "new").write_text("written")
        assert {path.name for path in disk.where.iterdir()} == {"lost+found", "synced", "new"}
        holder.communicate(b"\n", timeout=60)
        assert holder.returncode == 0
