"""Tests that a full log file is replaced, and that standard error follows."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.daemon.process.rotating_log import RotatingLog
from ckptd.shared.errors import InvalidConfig

SPEAK = """
import logging, os, sys
from pathlib import Path
from ckptd.daemon.process.rotating_log import RotatingLog
logging.basicConfig(handlers=[RotatingLog(Path(sys.argv[1]), most=100)], format="%(message)s")
for number in range(5):
    logging.error("line %d %s", number, "x" * 60)
os.write(2, b"a traceback")
"""


@pytest.mark.usefixtures("processes")
def test_standard_error_follows_to_the_new_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("a") as stream:
        subprocess.run(
            [sys.executable, "-c", SPEAK, log], stdout=stream, stderr=stream, check=True, timeout=60
        )
    assert log.read_text() == f"line 4 {'x' * 60}\na traceback"
    assert (tmp_path / "log.1").read_text() == f"line 3 {'x' * 60}\n"
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"]


@pytest.mark.usefixtures("processes")
def test_standard_error_that_is_another_file_stays(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", SPEAK, tmp_path / "log"], capture_output=True, check=True, timeout=60
    )
    assert said.stderr == b"a traceback"
    assert (tmp_path / "log").read_text() == f"line 4 {'x' * 60}\n"


def test_an_old_log_is_continued(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    handler = RotatingLog(tmp_path / "log")
    handler.emit(logging.LogRecord("ckptd", logging.INFO, "", 0, "after \udcff", None, None))
    handler.close()
    assert (tmp_path / "log").read_text() == "before\nafter \\udcff\n"


def test_a_log_that_was_moved_or_deleted_begins_again(tmp_path: Path) -> None:
    place = tmp_path / "logs"
    place.mkdir()
    handler = RotatingLog(place / "log")
    logger = logging.getLogger("ckptd")
    logger.addHandler(handler)
    logger.warning("one")
    (place / "log").rename(place / "log.old")
    logger.warning("two")
    begun = "the log file was moved or deleted, and a new one begins\n"
    assert (place / "log.old").read_text() == "one\n"
    assert (place / "log").read_text() == f"{begun}two\n"
    place.rename(tmp_path / "away")
    logger.warning("three")  # there is no directory for a new file
    assert (tmp_path / "away" / "log").read_text() == f"{begun}two\nthree\n"
    place.mkdir()
    logger.warning("four")
    logger.removeHandler(handler)
    handler.close()
    assert (place / "log").read_text() == f"{begun}four\n"


@pytest.mark.parametrize("kind", ["link", "directory", "missing directory"])
def test_a_file_that_cannot_be_the_log_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    else:
        path = tmp_path / "none" / "log"
    with pytest.raises(InvalidConfig, match=r"cannot write the log_file .*log: "):
        RotatingLog(path)
    assert not (tmp_path / "elsewhere").exists()
