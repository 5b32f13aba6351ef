"""Kills a process that saves through DCP outside every root at each point around the
marker of the checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.agent import Checkpoint
from ckptd.shared.storage.marker import MARKER
from ckptd.shared.system import failpoints

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from ckptd.agent import StorageWriter
where, value, overwrite = sys.argv[1:]
dcp.save({"a": torch.full((3,), int(value))}, storage_writer=StorageWriter(where, overwrite=overwrite == "True"))
"""  # noqa: E501


def save(
    where: Path, value: int, *, overwrite: bool = False, armed: str = ""
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "CKPTD_FAILPOINTS": armed, "XDG_RUNTIME_DIR": str(where.parent)}
    command = [sys.executable, "-c", SCRIPT, str(where), str(value), str(overwrite)]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("point", failpoints.MARKER)
def test_a_death_at_the_marker_costs_nothing_and_is_repaired(tmp_path: Path, point: str) -> None:
    where = tmp_path / "step-5"
    assert save(where, 1, armed=f"{point}=kill").returncode == -signal.SIGKILL
    assert Checkpoint.open(where).load()["a"].tolist() == [1] * 3
    refused = save(where, 2)
    assert refused.returncode == 1
    assert "Checkpoint already exists in" in refused.stderr
    assert (where / ".metadata").read_bytes() == MARKER
    assert save(where, 3, overwrite=True, armed=f"{point}=kill").returncode == -signal.SIGKILL
    assert (where / ".metadata").read_bytes() == MARKER  # there is a manifest all the time
    assert save(where, 4, overwrite=True).returncode == 0
    assert Checkpoint.open(where).load()["a"].tolist() == [4] * 3
    assert sorted(path.name.partition(".ckpt")[1] or path.name for path in where.iterdir()) == [
        ".ckpt",
        ".metadata",
        "manifest.json",
    ]
