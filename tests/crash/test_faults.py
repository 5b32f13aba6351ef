"""Faults at the worst moment. Each was a bug once: in the journal, at a
restart, in a race. Nothing sealed is lost, and nothing hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.link.arguments import OnBusy
from ckptd.shared import errors
from ckptd.shared.system import failpoints
from tests.support import trainers
from tests.support.daemons import Daemon, Home, running, until

SIZE = 20_000


@pytest.fixture(autouse=True)
def disarm() -> Any:
    yield
    failpoints.arm("")


def seal_and_die(place: Home) -> None:
    """Seal step 1 without saving it, and kill trainer and daemon."""
    with running(place, failpoints="persist.created=hang") as daemon:
        diary = trainers.Diary(place.path / "diary")
        trainer = trainers.start(place.socket, diary, 1, 1)
        until(lambda: diary.newest("finished") == (1, 1), "seal")
        trainer.kill()
        trainer.join()
        daemon.kill()


def test_a_journal_that_breaks_at_the_start_costs_no_sealed_snapshot(place: Home) -> None:
    seal_and_die(place)
    for nth in (1, 2, 3):
        daemon = Daemon(place, failpoints=f"journal.syncing=error(EIO)@{nth}")
        daemon.reached_ready()
        assert daemon.died() == 1
        daemon.close()
        assert place.segment_files()
    with running(place):
        agent = Agent(trainers.JOB, socket=place.socket)
        state = trainers.blank()
        recovered = agent.recover(state)
        assert recovered is not None
        trainers.assert_equal(state, 1)
        agent.close()


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_broken_journal_ends_the_daemon_and_the_next_one_continues(place: Home, nth: int) -> None:
    first = Daemon(place, failpoints=f"journal.syncing=error(EIO)@{nth}").wait_ready()
    trainer = trainers.start(place.socket, trainers.Diary(place.path / "diary"), 1, 3)
    assert first.died() == 1
    assert "cannot write the journal" in place.log_text()
    first.close()
    with running(place):  # with which a trainer whose first request has failed begins
        until(
            lambda: (
                (place.root / trainers.JOB).exists()
                and "step-00000003" in str(list((place.root / trainers.JOB).iterdir()))
            ),
            "step 3",
        )
        trainer.kill()
        trainer.join()


def test_no_room_for_the_journal_costs_the_records_and_not_the_snapshots(place: Home) -> None:
    small = {"CKPTD_FAILPOINTS": ""}
    with running(place, failpoints="journal.rotating=error(ENOSPC)@2", environment=small) as daemon:
        agent = Agent("job", socket=place.socket)
        # This record is not in the journal; the names below fill the journal.
        content = "x" * 500_000
        done = 0
        for step in range(1, 30):
            done += (
                agent.snapshot({"x": torch.ones(3)}, step=step, user_content=content)
                .wait("durable", timeout=60)
                .state
                == "durable"
            )
        assert done == 29
        agent.close()
        assert daemon.status()["shared_memory"]["segments"] == 0


def test_a_copy_that_fails_while_the_daemon_is_away_gives_its_slot_back(place: Home) -> None:
    first = Daemon(place).wait_ready()
    agent = Agent("job", socket=place.socket)
    agent.snapshot(trainers.expected(1, SIZE), step=1).wait("durable", timeout=60)
    failpoints.arm("agent.filling=sleep(1),agent.copied=error(EIO)")
    import threading

    results: list[Any] = []
    copy = threading.Thread(
        target=lambda: results.append(agent.snapshot(trainers.expected(2, SIZE), step=2))
    )
    copy.start()
    until(lambda: any(header_state(path) == 2 for path in place.segment_files()), "filling slot")
    first.kill()
    with running(place, environment={"CKPTD_STALL_BUDGET": "30"}) as daemon:
        copy.join()
        assert results[0].state == "failed"
        failpoints.arm("")
        for step in (3, 4, 5, 6):
            agent.snapshot(trainers.expected(step, SIZE), step=step).wait("durable", timeout=60)
        agent.close()
        assert daemon.status()["counters"]["skipped"] == 0


def header_state(path: Any) -> int:
    from ckptd.shared.formats.segment import read_header

    with path.open("rb") as file:
        return int(read_header(file.fileno()).state)


def test_going_back_keeps_sealed_snapshots_and_ends_every_wait(place: Home) -> None:
    with running(place, failpoints="persist.created=sleep(0.5)"):
        agent = Agent("job", socket=place.socket)
        agent.snapshot(trainers.expected(1, SIZE), step=1).wait("durable", timeout=60)
        later = [agent.snapshot(trainers.expected(step, SIZE), step=step) for step in (10, 11)]
        state = trainers.blank(SIZE)
        agent.recover(state, step=1)
        assert agent.attempt == 2
        trainers.assert_equal(state, 1, SIZE)
        for pending in later:
            assert pending.wait("durable", timeout=60).state == "durable"
        agent.snapshot(trainers.expected(2, SIZE), step=2).wait("durable", timeout=60)
        agent.close()
    for step in (10, 11, 2):
        with Checkpoint.open(place.root / "job", step) as checkpoint:
            trainers.assert_equal(checkpoint.load(), step, SIZE)


def test_a_trainer_killed_while_its_slots_are_made_leaves_none(place: Home) -> None:
    with running(
        place, failpoints="slot.creating=sleep(1)", environment={"CKPTD_MEMORY_TTL": "0"}
    ) as daemon:
        trainer = trainers.start(place.socket, trainers.Diary(place.path / "diary"), 1, 1)
        until(
            lambda: daemon.status()["jobs"] and daemon.status()["jobs"][0]["ranks_connected"],
            "trainer",
        )
        time.sleep(0.3)
        trainer.kill()
        trainer.join()
        until(lambda: not daemon.status()["jobs"][0]["ranks_connected"], "death")
        time.sleep(2.5)
        assert place.segment_files() == []


def test_sigterm_ends_the_daemon_while_a_trainer_keeps_saving(place: Home) -> None:
    with running(place, failpoints="persist.created=sleep(0.3)") as daemon:
        trainer = trainers.start(
            place.socket, trainers.Diary(place.path / "diary"), 1, 100_000, wait_every=10**9
        )
        until(lambda: (place.root / trainers.JOB).exists(), "save")
        assert daemon.stop() == 0
        trainer.kill()
        trainer.join()


def test_many_memory_only_snapshots_do_not_hinder_a_reconnection(place: Home) -> None:
    first = Daemon(place).wait_ready()
    agent = Agent("job", socket=place.socket)
    old = agent.snapshot({"x": torch.ones(3)}, step=0, persist=False)
    for step in range(1, 200):
        agent.snapshot({"x": torch.ones(3) * step}, step=step, persist=False).wait("sealed")
    with pytest.raises(
        errors.SnapshotFailed,
        match="step 0 was kept in memory only, and a newer snapshot has replaced it there",
    ):
        old.wait("durable")
    assert old.state == "sealed"
    first.kill()
    with running(place):
        until(lambda: agent._link.client.connected, "connection")
        agent.snapshot({"x": torch.ones(3)}, step=1000).wait("durable", timeout=60)
        agent.close()


def test_memory_only_slots_are_not_refilled_under_their_check(place: Home) -> None:
    with running(place, "--threads", "1", "--codec", "zstd:15") as daemon:
        agent = Agent("job", socket=place.socket)
        size = 3_000_000
        agent.snapshot(trainers.expected(1, size), step=1)  # keeps the only worker thread busy
        for step in range(2, 8):
            agent.snapshot(trainers.expected(step, size), step=step, persist=step % 3 == 0)
        agent.close()
        assert daemon.status()["counters"]["verify_failures"] == 0
        assert daemon.status()["counters"]["failed"] == 0


def test_after_a_growth_beyond_the_quota_the_old_size_still_fits(place: Home) -> None:
    with running(place, "--shm-quota", "8M"):
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"x": torch.ones(100_000)}, step=1).wait("durable", timeout=60)
        with pytest.raises(errors.QuotaExceeded):
            agent.snapshot({"x": torch.ones(5_000_000)}, step=2).wait()
        agent.snapshot({"x": torch.ones(100_000)}, step=3).wait("durable", timeout=60)
        agent.close()


def test_close_times_out_if_the_daemon_is_stopped(place: Home) -> None:
    with running(place, environment={"CKPTD_STALL_BUDGET": "0.1"}) as daemon:
        agent = Agent("job", socket=place.socket)
        until(
            lambda: agent.snapshot({"x": torch.ones(3)}, step=next(numbers)).state == "sealed",
            "snapshot",
        )
        daemon.process.send_signal(signal.SIGSTOP)
        with pytest.raises(
            errors.DaemonUnreachable, match=r"the daemon has not answered within 0\.5 s"
        ):
            agent.close(timeout=0.5)
        assert agent.closed
        daemon.process.send_signal(signal.SIGCONT)


def test_slots_that_take_long_to_make_hold_up_training_only_once(place: Home) -> None:
    with running(
        place, failpoints="slot.creating=sleep(2)", environment={"CKPTD_STALL_BUDGET": "0.5"}
    ):
        agent = Agent("job", socket=place.socket)
        ways: list[OnBusy] = ["skip", "wait", "wait", "skip"]
        skipped = [
            agent.snapshot({"x": torch.ones(3)}, step=step, on_busy=how)
            for step, how in enumerate(ways)
        ]
        assert [pending.state for pending in skipped] == ["skipped"] * 4
        with pytest.raises(
            errors.SnapshotFailed, match="the slots in shared memory are still being made"
        ):
            skipped[1].wait()
        assert skipped[2].stall < skipped[1].stall
        until(
            lambda: (
                agent.snapshot({"x": torch.ones(3)}, step=100 + next(numbers)).state == "sealed"
            ),
            "slots",
        )
        agent.close()


def test_a_stuck_disk_holds_up_only_the_snapshots_being_saved_to_it(place: Home) -> None:
    """Every worker thread hangs in a sync, as on an NFS mount whose server is gone."""
    hung = {"CKPTD_STALL_BUDGET": "0.2"}
    with running(
        place, "--threads", "2", failpoints="persist.syncing=hang", environment=hung
    ) as daemon:
        agent = Agent("job", socket=place.socket)
        pendings = [
            agent.snapshot(trainers.expected(step, SIZE), step=step) for step in range(1, 11)
        ]
        assert [pending.state for pending in pendings] == ["sealed"] * 2 + ["skipped"] * 8
        status = daemon.status()
        assert status["shared_memory"]["segments"] == 2
        assert status["counters"]["skipped"] == 8
        other = Agent("other", socket=place.socket)
        assert other.snapshot(trainers.expected(7, SIZE), step=7, persist=False).state == "sealed"
        state = trainers.blank(SIZE)
        recovered = other.recover(state)
        assert recovered is not None
        assert recovered.source == "memory"
        trainers.assert_equal(state, 7, SIZE)
        daemon.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            # The daemon waits for the running saves; systemd would kill it after a
            # timeout.
            daemon.died(2)
        daemon.kill()
    with running(place):
        for pending in pendings[:2]:
            pending.wait("durable", timeout=60)
        agent.close()
    with Checkpoint.open(place.root / "job", 2) as checkpoint:
        trainers.assert_equal(checkpoint.load(), 2, SIZE)


def test_a_slow_disk_costs_snapshots_and_no_memory(place: Home) -> None:
    with running(place, failpoints="persist.syncing=sleep(0.5)") as daemon:
        agent = Agent("job", socket=place.socket)
        pendings = []
        for step in range(1, 40):
            pendings.append(
                agent.snapshot(trainers.expected(step, SIZE), step=step, on_busy="skip")
            )
            assert len(place.segment_files()) <= 2
            time.sleep(0.05)
        agent.close()
        saved = [pending for pending in pendings if pending.state == "durable"]
        assert len(saved) + sum(pending.state == "skipped" for pending in pendings) == 39
        assert 2 <= len(saved) < 39
        assert daemon.status()["counters"]["persisted"] == len(saved)
    with Checkpoint.open(place.root / "job") as checkpoint:
        trainers.assert_equal(checkpoint.load(), max(pending.step for pending in saved), SIZE)


def test_a_slot_cut_short_while_it_is_made_costs_one_snapshot(place: Home) -> None:
    with running(place, failpoints="slot.passing=sleep(1)@1") as daemon:
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot({"x": torch.ones(3)}, step=1, on_busy="skip")
        until(lambda: len(place.segment_files()) == 2, "segments")
        os.truncate(place.segment_files()[1], 8192)
        with pytest.raises(errors.CkptdError):
            pending.wait("durable", timeout=60)
        until(
            lambda: (
                agent.snapshot({"x": torch.ones(3)}, step=next(numbers)).state
                in ("sealed", "durable")
            ),
            "snapshot",
        )
        assert len(place.segment_files()) == 2

        def opened() -> list[str]:
            return [
                link
                for link in map(link_of, os.listdir("/proc/self/fd"))
                if link.startswith(str(place.segments))
            ]

        until(
            lambda: len(opened()) == 4,
            "a file and a lock of each slot; what was cut is let go by the thread that made it",
        )
        agent.close()
        assert daemon.status()["shared_memory"]["segments"] == 0


def link_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


numbers = iter(range(100, 100_000))


def test_a_skipped_step_may_be_requested_again(place: Home) -> None:
    with running(
        place, failpoints="persist.created=sleep(0.7)", environment={"CKPTD_STALL_BUDGET": "60"}
    ):
        agent = Agent("job", socket=place.socket)
        for step in (1, 2):
            agent.snapshot({"x": torch.ones(3)}, step=step)
        assert agent.snapshot({"x": torch.ones(3)}, step=3, on_busy="skip").state == "skipped"
        agent.snapshot({"x": torch.ones(3)}, step=3, on_busy="wait").wait("durable", timeout=60)
        agent.close()
