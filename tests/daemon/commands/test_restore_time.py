"""Tests what the commands say of the time of a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.commands import restore_time
from ckptd.daemon.commands.restore_time import add_restore_times, restore_text
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import History
from ckptd.daemon.telemetry.restore_rate import RestoreRate
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from tests.shared.samples import write_checkpoint


def test_a_time_is_said_only_with_the_rate_behind_it() -> None:
    assert restore_text(3_000_000, None) == (
        "reads 3.0 MB; no rate is known, because this node has seen no recovery from storage"
    )
    assert restore_text(3_000_000, RestoreRate(2e6, 1)) == (
        "reads 3.0 MB, about 1.5 s at the 2.0 MB/s of the last recovery"
    )
    assert restore_text(10**9, RestoreRate(5e6, 4)) == (
        "reads 1.0 GB, about 3 min at the 5.0 MB/s of the last 4 recoveries"
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_listing_gets_the_times_of_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    root = tmp_path / "root"
    place = root / "gpt" / write_checkpoint(root).tag
    open_root(root).storage.serve("host").close()
    monkeypatch.setenv("CKPTD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(restore_time, "history_file", lambda root, socket: tmp_path / "none")
    rows: list[dict[str, Any]] = [
        {"job": "gpt", "restored_bytes": 50}, {"job": "gpt", "damaged": "cut short"},
        {"job": "bert", "restored_bytes": 50},
    ]  # fmt: skip
    named = [root, root / "gpt", place][depth]
    add_restore_times(named, rows)
    assert [one["restore_seconds"] for one in rows] == [None, None, None]
    file = machine.history_file(tmp_path / "state", root)
    file.parent.mkdir(parents=True)
    history = History(file)
    facts: dict[str, str | int | float | None] = {
        "job": "gpt", "restored_bytes": 30, "seconds": 3.0,
    }  # fmt: skip
    history.take([LoggedEvent(1.0, "job.recovered", 20, "recovered", facts)])
    history.close()
    add_restore_times(named, rows)
    assert [one["restore_seconds"] for one in rows] == [5.0, None, None]


def test_a_checkpoint_outside_every_root_has_no_time(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"job": "standalone", "restored_bytes": 50}]
    add_restore_times(tmp_path, rows)
    assert rows[0]["restore_seconds"] is None
