"""The parts of the measurement that `test_command.py` does not show."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from ckptd.agent.bench import measure
from ckptd.agent.bench.ways import DirectWrite
from tests.support.scripts import python


def test_the_size_of_a_directory_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    (tmp_path / "b").write_bytes(bytes(5))
    assert (measure._nbytes(tmp_path), measure._nbytes(tmp_path / "a")) == (15, 10)


def test_a_file_system_without_direct_writes_has_no_such_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: DirectWrite, path: Path) -> None:
        path.touch()
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(DirectWrite, "_write", refuse)
    assert measure._has_direct(tmp_path) is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_an_error_leaves_no_daemon_and_no_memory(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from ckptd.agent.bench import measure as m

def fail(*_):
    raise OSError(28, "No space left on device")

def status(agent, found=m._status):
    said = found(agent)
    print(said["pid"], said["shared_memory"]["directory"], flush=True)
    return said

m.by_dcp_save, m._status = fail, status
m.measure(Path(sys.argv[1]), 13_000_000, 1)
"""
    done = python("-c", code, tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("OSError: [Errno 28] No space left on device")
    pid, memory = done.stdout.split()
    assert not psutil.pid_exists(int(pid))
    assert not Path(memory).exists()
    assert list(tmp_path.iterdir()) == []


def test_the_memory_of_a_process_is_read() -> None:
    assert measure._peak(os.getpid()) > 10e6
