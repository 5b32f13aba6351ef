"""Makes one fault of the operator's hour; see `operators_hour.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.crash.lookouts import _shape
from tests.crash.operators_hour import Report, rows_text


def test_a_damaged_manifest_is_seen_at_all_places_and_an_older_checkpoint_comes_back() -> None:
    apart = ["unshare", "--mount", "--pid", "--fork", "true"]
    if subprocess.run(apart, check=False, capture_output=True).returncode:
        pytest.skip("this process may not make a mount namespace")
    rig = [sys.executable, "-m", "tests.crash.operators_hour"]
    done = subprocess.run(
        [*rig, "--only", "manifest cut", "--seconds", "8"],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if "not made:" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    event = next(row for row in rows if row[2].startswith("checkpoint.damaged: checkpoint gpt/"))
    assert set(event[1].split(", ")) == {"log", "logs", "on_event", "history"}
    places = {row[1] for row in rows if "manifest is cut short" in row[2]}
    assert {"status", "status --check", "verify"} < places
    assert [row[1] for row in rows if "CkptdDamagedCheckpoints" in row[2]] == ["/metrics"]
    assert rows[-1][1:2] == ["recover"]
    assert rows[-1][2].endswith("bit for bit")


def test_a_sentence_at_several_places_is_one_row_of_the_table() -> None:
    report = Report("disk filled")
    report.add("log", "cannot save /tmp/ckptd-test-x1/root/gpt", 0.9)
    report.add("on_event", "cannot save /tmp/ckptd-test-x1/root/gpt", 2.2)
    report.add("trainer", "a | b", 3.0)
    report.add("log, afterwards", "a | b", 0.0)
    report.add("logs, afterwards", "a | b", 1.0)
    assert rows_text(report).splitlines() == [
        "| disk filled | log, on_event | cannot save /ckpts/gpt | 1 to 2 |",
        "| disk filled | trainer | a \\| b | 3 |",
        "| disk filled | log, logs, afterwards | a \\| b | 0 to 1 |",
    ]


def test_numbers_and_times_make_no_new_sentence() -> None:
    assert _shape("step 23, 2 s ago, 1.5 MB") == _shape("step 24, 1 min ago, 900 kB")
    assert _shape("step 23 failed") != _shape("step 23 skipped")
