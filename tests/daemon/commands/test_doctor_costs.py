"""Tests what `ckptd doctor` tells of costs, from given rates, from a history, and from
real checkpoints.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.commands import doctor_costs as costs
from ckptd.daemon.commands.doctor_check import OK, WARNING, Check
from ckptd.daemon.config import Config, load
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import History
from ckptd.shared.interval import Costs
from ckptd.shared.storage.locate import existing_root
from ckptd.shared.storage.posix_rates import Rates
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from tests.support.daemons import Daemon, until

RATES = Rates(64_000_000, 500e6, 1200e6, direct=True)
SAVES = [
    {"held_seconds": held, "durable_seconds": 2.0, "bytes": 4e9, "save_seconds": 2.0}
    for held in (0.01, 0.02, 9.0)
]


def config(root: Path, **settings: str) -> Config:
    given = {"root": str(root), "socket": str(root / "s"), "state_dir": str(root / "state")}
    return load({**given, **settings}, {}, None)


def by_name(checks: Any) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_the_costs_of_a_jobs_saves_are_told_with_the_interval_that_follows() -> None:
    check = costs.check_job("gpt", SAVES)
    assert check.message == (
        "a snapshot of 4.0 GB holds the training for 0.020 s and is durable after 2.0 s "
        "(2.0 GB/s): with one failure a day, a snapshot every 59 s loses the least time"
    )
    assert check.values["best_interval_seconds"] == pytest.approx(
        (2 * 0.02 * 86400) ** 0.5, rel=1e-3
    )
    lost = costs.check_job("gpt", [save | {"lost_seconds": 3.02} for save in SAVES])
    assert lost.message == (
        "a snapshot of 4.0 GB holds the training for 0.020 s and is durable after 2.0 s "
        "(2.0 GB/s): with one failure a day, a snapshot to memory every 60 s and one to storage "
        "every 11 min lose the least time"
    )
    assert lost.values["best_storage_interval_seconds"] == pytest.approx(
        (2 * 3.0 * 86400) ** 0.5, rel=0.05
    )
    slow = costs.check_job("gpt", [{"durable_seconds": 600.0}])
    assert slow.values["best_interval_seconds"] == 600.0


def test_a_job_without_a_history_is_judged_by_the_rates() -> None:
    cost = costs.estimated(10e9, 10e9, 5e9, RATES)
    assert (cost.held, cost.durable) == (2.0, 22.0)
    assert costs.chosen(cost).interval == pytest.approx((2 * 2.0 * 86400) ** 0.5, rel=1e-2)
    fast = costs.estimated(10e9, 10e9, 1e12, RATES)
    assert costs.chosen(fast).interval == pytest.approx(41.6, rel=1e-2)
    assert costs.chosen(Costs(0.001, 600.0)).interval == 600.0


def test_ranks_copy_at_the_same_time_and_one_node_is_said_to_write_for_all() -> None:
    sizes = costs.CheckpointSizes(created="", nbytes=10, raw_bytes=10**10, largest=10**9, ranks=16)
    check = costs.check_job("gpt", [], sizes, None, 5e9, RATES)
    assert (check.values["held_seconds"], check.values["durable_seconds"]) == (0.2, 20.2)
    assert check.message == (
        "a snapshot of 10.0 GB holds the training for 0.200 s and is durable after 20.2 s, by "
        "these rates and if all 16 ranks are on this node: with one failure a day, a snapshot "
        "every 3 min loses the least time"
    )
    alone = costs.CheckpointSizes(created="", nbytes=10, raw_bytes=10**9, largest=10**9, ranks=1)
    assert ", by these rates: " in costs.check_job("gpt", [], alone, None, 5e9, RATES).message


@pytest.mark.parametrize(
    ("rate", "level", "words"),
    [(8.1e9, OK, "copies 8.1 GB/s"), (0.5e9, WARNING, "measure again while it is idle")],
)
def test_a_slow_copy_says_what_to_do(rate: float, level: str, words: str) -> None:
    check = costs.check_copy(rate)
    assert (check.level, check.values) == (level, {"bytes_per_second": round(rate)})
    assert words in check.message


def test_a_slow_root_says_what_to_do() -> None:
    fast = costs.check_rates("root", RATES)
    assert (fast.name, fast.level) == ("rates of the root", OK)
    assert fast.message == (
        "64.0 MB were written and synced with 500.0 MB/s and read with 1.2 GB/s, by one thread"
    )
    slow = Rates(4_000_000, 2e6, 9e9, direct=False)
    assert costs.check_rates("root", slow).level == WARNING
    message = costs.check_rates("root", slow).message
    assert "through the page cache: put a local disk in front with --stage DIR" in message
    assert "use another one" in costs.check_rates("stage", slow).message


def test_memory_is_copied_at_some_rate() -> None:
    assert costs.copy_rate() > 0


def test_without_jobs_the_interval_of_a_gigabyte_is_told(tmp_path: Path) -> None:
    found = by_name(costs.check_costs(config(tmp_path)))
    assert list(found) == ["memory copy", "rates of the root", "interval"]
    assert found["interval"].message.startswith(
        "for a state of 1.0 GB in one rank, about: a snapshot holds the training for "
    )
    assert found["interval"].values["best_interval_seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_root_that_cannot_be_measured_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = by_name(costs.check_costs(config(tmp_path / "file")))
    assert found["rates of the root"].level == WARNING
    assert "see the line `root`" in found["rates of the root"].message


def test_an_object_store_and_the_root_behind_a_stage_are_not_measured(tmp_path: Path) -> None:
    settings = {"socket": str(tmp_path / "s"), "state_dir": str(tmp_path / "state")}
    store = load({"root": "s3://bucket/none", **settings}, {}, None)
    assert list(by_name(costs.check_costs(store))) == ["memory copy"]
    staged = config(tmp_path / "root", stage=str(tmp_path / "stage"))
    assert "rates of the stage" in by_name(costs.check_costs(staged))


def test_a_history_that_is_damaged_is_a_warning(tmp_path: Path) -> None:
    made = config(tmp_path)
    file = machine.history_file(made.state_dir, made.root)
    file.parent.mkdir(parents=True)
    file.write_text("no database at all, but long enough to be looked at\n" * 100)
    found = by_name(costs.check_jobs(made, 5e9, RATES))
    assert (list(found), found["history"].level) == (["history"], WARNING)


def test_jobs_of_the_history_and_of_the_root_are_told(daemon: Daemon) -> None:
    place = daemon.home
    for name in ("gpt", "llama"):
        agent = Agent(name, socket=place.socket)
        agent.snapshot({"w": torch.ones(1000)}, step=1).wait("durable", timeout=60)
        agent.close()
    assert isinstance(place.root, Path)
    made = load(
        {"root": str(place.root), "socket": str(place.socket), "state_dir": str(place.path)},
        {}, None,
    )  # fmt: skip
    pointers = [place.root / name / "newest" for name in ("gpt", "llama")]
    until(lambda: all(pointer.exists() for pointer in pointers), "the pointers to the newest")
    found = by_name(costs.check_jobs(made, 5e9, RATES))
    assert list(found) == ["job gpt", "job llama"]
    assert "by these rates: with one failure a day" in found["job gpt"].message
    assert found["job gpt"].message.endswith(" fit")
    assert found["job gpt"].values["room_for"] > 100
    (manifest,) = (place.root / "gpt").glob("*/manifest.json")
    document = manifest.read_bytes()
    manifest.write_bytes(b"{")  # a damaged job hides no other one
    assert list(by_name(costs.check_jobs(made, 5e9, RATES))) == ["job llama"]
    manifest.write_bytes(document)
    file = machine.history_file(made.state_dir, made.root)
    file.parent.mkdir(parents=True, exist_ok=True)
    history = History(file)
    events = [LoggedEvent(1.0, "save.done", logging.INFO, "", {"job": "gpt", **SAVES[0]})]
    history.take(events)
    history.close()
    found = by_name(costs.check_jobs(made, 5e9, RATES))
    assert list(found) == ["job gpt", "job llama"]
    assert "(2.0 GB/s): with one failure a day" in found["job gpt"].message
    assert found["job gpt"].values["saves"] == 1
    newest = newest_of(place.root)
    little = costs.check_job("gpt", SAVES, newest, 2 * newest.nbytes)
    assert (little.level, little.values["room_for"]) == (WARNING, 2)
    assert "2 more checkpoints of" in little.message
    assert little.message.endswith(": make room, or keep fewer checkpoints (keep_last, MaxBytes)")


def newest_of(root: Path) -> costs.CheckpointSizes:
    repository = existing_root(root)
    tag = repository.read_newest("gpt")
    assert tag is not None
    return costs.CheckpointSizes.of(repository.read_manifest("gpt", tag))


def test_few_jobs_of_a_large_root_are_read_and_first_those_of_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    def read_newest(self: Repository, job: str) -> None:
        read.append(job)

    monkeypatch.setattr(Repository, "read_newest", read_newest)
    made = config(tmp_path)
    for number in range(costs.MOST_READ + 5):
        (tmp_path / f"job{number:04d}").mkdir()
    last = f"job{costs.MOST_READ + 4:04d}"
    file = machine.history_file(made.state_dir, made.root)
    file.parent.mkdir(parents=True)
    history = History(file)
    history.take([LoggedEvent(1.0, "save.done", logging.INFO, "", {"job": last, **SAVES[0]})])
    history.close()
    found = by_name(costs.check_jobs(made, 5e9, RATES))
    assert (len(read), read[:2]) == (costs.MOST_READ, [last, "job0000"])
    assert list(found) == [f"job {last}", "jobs"]


def test_many_jobs_are_cut(tmp_path: Path) -> None:
    made = config(tmp_path)
    file = machine.history_file(made.state_dir, made.root)
    file.parent.mkdir(parents=True)
    history = History(file)
    history.take([
        LoggedEvent(1.0, "save.done", logging.INFO, "", {"job": f"job{number:03d}", **SAVES[0]})
        for number in range(25)
    ])  # fmt: skip
    history.close()
    found = by_name(costs.check_jobs(made, 5e9, RATES))
    assert len(found) == 21
    assert found["jobs"].message == "5 more jobs not shown"
