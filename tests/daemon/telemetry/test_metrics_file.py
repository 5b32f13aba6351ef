"""Tests the file for the node exporter: it is whole at any time, readable by others,
and a disk that fails is said once.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.daemon.telemetry import metrics_file
from ckptd.daemon.telemetry.metrics_file import MetricsFile
from ckptd.shared.errors import InvalidConfig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "ckptd.prom"


def test_the_file_is_replaced_whole_and_others_may_read_it(path: Path) -> None:
    path.parent.mkdir()
    texts = [b"a 1\n", b"b 2\n"]
    found, old = MetricsFile(path, lambda: texts.pop(0)), os.umask(0o077)
    try:
        found.write()
        with path.open("rb") as reader:
            found.write()
            assert reader.read() == b"a 1\n"
    finally:
        os.umask(old)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"b 2\n", 0o644)
    assert os.listdir(path.parent) == ["ckptd.prom"]


def test_a_directory_that_is_missing_is_an_error_of_the_start(path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        MetricsFile(path, lambda: b"").start()
    assert str(caught.value) == (
        f"cannot write the metrics_file {path}: No such file or directory; name a file in a "
        f"directory that exists and that this user may write"
    )


def test_a_file_that_is_not_required_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_file, "PERIOD_SECONDS", 0.01)
    found = MetricsFile(path, lambda: b"a 1\n")
    found.start(required=False)
    path.parent.mkdir()
    while not path.exists():
        pass
    found.close()
    assert not path.exists()
    assert [r.message[:29] for r in caplog.records] == ["cannot write the metrics_file"]


def test_an_error_is_logged_when_it_comes_and_when_it_has_gone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = MetricsFile(path, lambda: b"")
    found.refresh()
    found.refresh()
    path.parent.mkdir()
    found.refresh()
    found.refresh()
    assert caplog.messages == [
        f"cannot write the metrics_file {path}: No such file or directory; it is tried again "
        f"every 15 s, and saving goes on",
        f"the metrics_file {path} is written again",
    ]


def test_a_failure_to_render_leaves_the_last_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(b"old 1\n")

    def render() -> bytes:
        raise ValueError("no")

    MetricsFile(path, render).refresh()
    assert path.read_bytes() == b"old 1\n"
    assert caplog.messages[0].startswith("cannot render the metrics: ValueError('no')")
