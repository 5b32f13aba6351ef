"""Tests the agent against a real daemon: lost daemons, dead trainers, busy slots, bad
input. Training always continues.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.agent import link_of, recover_after_part, recover_tag, silence_advice
from ckptd.agent.link import client
from ckptd.agent.link.script import script
from ckptd.agent.recover.recovery import Recovery
from ckptd.daemon.commands import health
from ckptd.daemon.telemetry import refusals
from ckptd.shared import errors
from ckptd.shared.system import failpoints, machine
from tests.support import trainers
from tests.support.daemons import Daemon, Home, running, until
from tests.support.scripts import Python, python

SIZE = 20_000


@pytest.fixture
def agent(daemon: Daemon) -> Any:
    made = Agent("job", socket=daemon.home.socket)
    yield made
    if not made.closed:
        made.close()


def test_first_start_recovers_nothing_and_changes_nothing(agent: Agent) -> None:
    state = trainers.expected(3, SIZE)
    assert agent.recover(state) is None
    trainers.assert_equal(state, 3, SIZE)


def test_steps_increase_within_an_attempt_and_each_agent_begins_one(daemon: Daemon) -> None:
    first = Agent("job", socket=daemon.home.socket)
    assert first.attempt == 1
    first.snapshot({"x": torch.ones(1)}, step=5).wait("durable", timeout=60)
    again = first.snapshot({"x": torch.ones(1)}, step=5)
    with pytest.raises(
        errors.InvalidRequest, match="step 5 does not follow step 5, the last of attempt 1"
    ):
        again.wait()
    assert first.snapshot({"x": torch.ones(1)}, step=6).wait("durable", timeout=60).attempt == 1
    first.recover({"x": torch.zeros(1)}, step=5)
    assert first.attempt == 2
    assert first.snapshot({"x": torch.ones(1)}, step=6).wait("durable", timeout=60).attempt == 2
    first.close()
    second = Agent("job", socket=daemon.home.socket)
    assert second.attempt == 3
    second.close()
    until(
        lambda: (daemon.home.root / "job" / "newest").read_text() == "step-00000006.a0002\n",
        "newest, which follows the answer",
    )
    assert sorted(path.name for path in (daemon.home.root / "job").iterdir()) == [
        "newest", "step-00000005.a0001", "step-00000006.a0001", "step-00000006.a0002",
    ]  # fmt: skip


def test_a_recovery_says_who_has_saved_and_can_set_the_random_generators_again(
    agent: Agent, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(5)
    agent.snapshot({"x": torch.ones(1)}, step=1).wait("durable", timeout=60)
    drawn = torch.rand(3).tolist()
    with caplog.at_level("INFO", "ckptd.agent"):
        recovered = agent.recover({"x": torch.zeros(1)})
    assert recovered is not None
    who = f"{script() or 'an interactive session'} on {machine.host()} as {machine.user()}, 20"
    assert recovered.origin.startswith(who)
    assert f"; saved by {who}" in caplog.text
    assert torch.rand(3).tolist() == drawn
    assert recovered.restore_rng()
    assert torch.rand(3).tolist() == drawn
    agent.snapshot({"x": torch.ones(1)}, step=2, rng=False)
    other = agent.recover({"x": torch.zeros(1)})
    assert other is not None
    assert not other.restore_rng()
    assert "no random generators were saved for this rank" in caplog.text
    with Checkpoint.open(daemon.home.root / "job", "step-00000001.a0001") as checkpoint:
        assert checkpoint.manifest.origin in who


def test_a_tag_is_recovered_although_a_later_attempt_has_its_step(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    for value, tag in ((1.0, "best"), (2.0, "best"), (3.0, None)):
        pending = agent.snapshot({"w": torch.full((2,), value)}, step=7, tag=tag)
        pending.wait("durable", timeout=60)
        link_of(agent).begin_next()
    found = {}
    for tag in ("best", "step-00000007", "step-7", "step-00000008"):
        state = {"w": torch.zeros(2)}
        recovered = recover_tag(agent, state, tag)
        found[tag] = (recovered and recovered.tag, state["w"].tolist())
    assert found == {
        "best": ("best.a0002", [2.0, 2.0]),
        "step-00000007": ("step-00000007.a0003", [3.0, 3.0]),
        "step-7": (None, [0.0, 0.0]),
        "step-00000008": (None, [0.0, 0.0]),
    }
    agent.close()


def test_a_state_is_made_from_a_part_of_the_snapshot(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[int] = []
    monkeypatch.setattr(Recovery, "report", lambda self, one: reported.append(one.step))

    def state(layers: int) -> dict[str, Any]:
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(layers)]
        groups = [{"params": [one], "lr": 0.1} for one in weights]
        model = torch.nn.ParameterList(weights)
        return {"layers": layers, "model": model, "optimizer": torch.optim.SGD(groups)}

    agent = Agent("job", socket=daemon.home.socket)
    agent.recover(state(1))
    for step in (1, 2):
        saved = state(1 + step)
        saved["optimizer"].param_groups[-1]["lr"] = 0.3  # no setting of the script
        torch.nn.init.constant_(saved["model"][-1], step)
        agent.snapshot(saved, step=step).wait("sealed")
    agent.close()
    for wanted, layers in ((None, 3), (1, 2)):
        agent = Agent("job", socket=daemon.home.socket)
        own, part = state(1), {"layers": 0}
        made: list[dict[str, Any]] = []

        def whole(found: Any = part, made: list[dict[str, Any]] = made) -> dict[str, Any]:
            made.append(state(found["layers"]))
            return made[0]

        recovered = recover_after_part(agent, own, part, whole, step=wanted, on_reshape=None)
        assert recovered is not None
        assert recovered.step == layers - 1
        assert made[0]["model"][layers - 1].tolist() == [layers - 1.0] * 2
        assert made[0]["optimizer"].param_groups[-1]["lr"] == 0.3
        agent.close()
    assert "settings of the script" not in caplog.text
    assert reported == [2, 1]  # each recovery once


def test_an_agent_whose_advice_is_silenced_gives_none(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    Agent("job", socket=daemon.home.socket).close()
    agent = Agent("job", socket=daemon.home.socket)
    silence_advice(agent)
    agent.snapshot({"w": torch.ones(2)}, step=1).wait("sealed")
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == []
    agent.close()


def test_a_newer_attempt_fences_the_older(daemon: Daemon) -> None:
    zombie = Agent("job", socket=daemon.home.socket)
    zombie.snapshot({"x": torch.ones(1)}, step=1).wait("durable", timeout=60)
    heir = Agent("job", socket=daemon.home.socket)
    pending = zombie.snapshot({"x": torch.zeros(1)}, step=2)
    with pytest.raises(
        errors.Fenced, match="attempt 1 of job 'job' has ended, because attempt 2 has begun"
    ):
        pending.wait("sealed")
    state = {"x": torch.zeros(1)}
    recovered = heir.recover(state)
    assert recovered is not None
    assert (recovered.step, recovered.attempt) == (1, 1)
    heir.snapshot({"x": torch.ones(1)}, step=2).wait("durable", timeout=60)
    heir.close()
    with pytest.raises(errors.Fenced):
        zombie.close()
    assert not (daemon.home.root / "job" / "step-00000002.a0001").exists()


@pytest.mark.usefixtures("processes")
def test_the_last_seal_of_a_dead_trainer_is_recorded_after_its_death(
    place: Home, tmp_path: Path
) -> None:
    """The seal makes another slot superfluous, which is released while the slots of the
    dead trainer are examined.
    """
    with running(place, failpoints="seal.received=sleep(0.5)@3", forked=True) as daemon:
        test_a_dead_trainers_newest_snapshot_is_saved_unasked_and_comes_back_from_memory(
            daemon, tmp_path
        )


def test_a_dead_trainers_newest_snapshot_is_saved_unasked_and_comes_back_from_memory(
    daemon: Daemon, tmp_path: Path
) -> None:
    diary = trainers.Diary(daemon.home.path / "diary")
    script = (
        "import sys, time; from ckptd.agent import Agent; from tests.support import trainers\n"
        f"agent = Agent('job', socket={str(daemon.home.socket)!r})\n"
        f"agent.snapshot(trainers.expected(1, {SIZE}), step=1).wait('durable')\n"
        f"agent.snapshot(trainers.expected(2, {SIZE}), step=2, persist=False).wait('sealed')\n"
        f"agent.snapshot(trainers.expected(3, {SIZE}), step=3, persist=False).wait('sealed')\n"
        "print('sealed', flush=True); time.sleep(600)\n"
    )
    trainer = Python("-c", script, place=tmp_path)
    until(lambda: trainer.out.exists() and trainer.out.read_text() == "sealed\n", "seals")
    assert not (daemon.home.root / "job" / "step-00000003.a0001").exists()
    trainer.process.kill()
    until(
        lambda: (daemon.home.root / "job" / "step-00000003.a0001" / "manifest.json").exists(),
        "unasked save",
    )
    assert not (daemon.home.root / "job" / "step-00000002.a0001").exists()
    agent = Agent("job", socket=daemon.home.socket)
    state = trainers.blank(SIZE)
    recovered = agent.recover(state)
    assert recovered is not None
    assert (recovered.step, recovered.source) == (3, "memory")
    trainers.assert_equal(state, 3, SIZE)
    assert daemon.status()["counters"]["saved_unasked"] == 1
    agent.close()
    assert diary.newest("sealed") == (0, -1)


@pytest.mark.usefixtures("processes")
def test_sigterm_saves_what_is_only_in_memory(place: Home) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot(trainers.expected(4, SIZE), step=4, persist=False)
        pending.wait("sealed")
        assert not (place.root / "job").exists()
        assert daemon.stop() == 0
        with Checkpoint.open(place.root / "job", 4) as checkpoint:
            trainers.assert_equal(checkpoint.load(), 4, SIZE)
    with running(place, forked=True):
        until(lambda: pending.state == "durable", "word of the save after the restart")
        agent.close()
    assert place.segment_files() == []


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "point",
    ["persist.writing", "commit.synced", "commit.renamed", "journal.synced", "seal.received"],
)
def test_the_trainer_outlives_its_daemon_and_loses_nothing_sealed(place: Home, point: str) -> None:
    nth = {"journal.synced": "@6"}.get(point, "@2")
    first = Daemon(place, failpoints=f"{point}=kill{nth}", forked=True).wait_ready()
    agent = Agent("job", socket=place.socket)
    pendings = [agent.snapshot(trainers.expected(1, SIZE), step=1)]
    until(lambda: pendings[0].state == "durable" or first.process.poll() is not None, "first save")
    if first.process.poll() is None:
        pendings.append(agent.snapshot(trainers.expected(2, SIZE), step=2))
    assert first.died() == -signal.SIGKILL
    first.close()
    assert pendings[-1].state == "sealed"
    with running(place, forked=True):
        for pending in pendings:
            pending.wait("durable", timeout=60)
        agent.snapshot(trainers.expected(3, SIZE), step=3).wait("durable", timeout=60)
        agent.close()
    for step in (1, len(pendings), 3):
        with Checkpoint.open(place.root / "job", step) as checkpoint:
            checkpoint.verify()
            trainers.assert_equal(checkpoint.load(), step, SIZE)


def snapshot_until_sealed(agent: Agent, step: int) -> None:
    state = trainers.expected(step, SIZE)
    until(lambda: agent.snapshot(state, step=step).state in ("sealed", "durable"), "snapshot")


def after_step_1(daemon: Daemon) -> Agent:
    """Return an agent that has saved a step, although its daemon, whose budget is small,
    may answer too late on a busy machine.
    """
    agent = Agent("job", socket=daemon.home.socket)
    snapshot_until_sealed(agent, 1)
    until(lambda: daemon.status()["counters"]["persisted"] == 1, "save")
    return agent


@pytest.mark.usefixtures("processes")
def test_training_continues_without_a_daemon_and_snapshots_resume(place: Home) -> None:
    with running(place, environment={"CKPTD_STALL_BUDGET": "0.2"}, forked=True) as daemon:
        agent = after_step_1(daemon)
    pending = agent.snapshot(trainers.expected(2, SIZE), step=2)
    with pytest.raises(errors.DaemonUnreachable, match="^the daemon is gone"):
        pending.wait()
    with running(place, forked=True):
        snapshot_until_sealed(agent, 9)
        agent.close()
    with Checkpoint.open(place.root / "job") as checkpoint:
        assert checkpoint.step == 9


@pytest.mark.usefixtures("processes")
def test_a_hung_daemon_costs_its_budget_once(place: Home) -> None:
    with running(place, environment={"CKPTD_STALL_BUDGET": "0.1"}, forked=True) as daemon:
        agent = after_step_1(daemon)
        daemon.process.send_signal(signal.SIGSTOP)
        first, second = (
            agent.snapshot(trainers.expected(2, SIZE), step=2),
            agent.snapshot(trainers.expected(3, SIZE), step=3),
        )
        assert (first.state, second.state) == ("failed", "failed")
        assert second.stall < first.stall
        daemon.process.send_signal(signal.SIGCONT)
        until(
            lambda: (
                agent.snapshot(trainers.expected(4, SIZE), step=4 + next(steps)).state == "sealed"
            ),
            "snapshot after the daemon goes on",
        )
        agent.close()
        assert daemon.status()["shared_memory"]["segments"] == 0


steps = iter(range(10_000))


@pytest.mark.usefixtures("processes")
def test_busy_slots_are_skipped_or_waited_for(place: Home) -> None:
    with running(
        place,
        failpoints="persist.created=sleep(1.5)",
        environment={"CKPTD_STALL_BUDGET": "60"},
        forked=True,
    ) as daemon:
        agent = Agent("job", socket=place.socket)
        one, two = (agent.snapshot(trainers.expected(step, SIZE), step=step) for step in (1, 2))
        skipped = agent.snapshot(trainers.expected(3, SIZE), step=3, on_busy="skip")
        assert skipped.state == "skipped"
        with pytest.raises(
            errors.SnapshotFailed, match="step 3 was skipped: every slot is still being saved"
        ):
            skipped.wait("sealed")
        waited = agent.snapshot(trainers.expected(4, SIZE), step=4)
        assert waited.state == "sealed"
        assert one.state == "durable"
        for pending in (two, waited):
            pending.wait("durable", timeout=60)
        assert daemon.status()["counters"]["skipped"] == 1
        agent.close()
    assert sorted(path.name[:13] for path in (place.root / "job").iterdir() if path.is_dir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000004",
    ]


def test_a_state_that_grows_gets_larger_slots(agent: Agent, daemon: Daemon) -> None:
    for step, size in enumerate([10, 100_000, 10, 3_000_000], 1):
        agent.snapshot(trainers.expected(step, size), step=step).wait("sealed")
    agent.close()
    assert daemon.home.segment_files() == []
    for step, size in [(2, 100_000), (4, 3_000_000)]:
        with Checkpoint.open(daemon.home.root / "job", step) as checkpoint:
            trainers.assert_equal(checkpoint.load(), step, size)


def test_plain_values_may_grow_beyond_the_slot(agent: Agent, daemon: Daemon) -> None:
    history: list[int] = []
    for step in range(1, 5):
        history += range(step * 30_000)
        agent.snapshot({"w": torch.ones(3), "history": history}, step=step).wait(
            "durable", timeout=60
        )
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.load()["history"] == history


@pytest.mark.parametrize("point", ["agent.recover.opened", "agent.recover.loading"])
def test_a_lack_of_descriptors_does_not_bring_an_older_state_back(agent: Agent, point: str) -> None:
    for step in (1, 2):
        agent.snapshot(trainers.expected(step), step=step).wait("durable", timeout=60)
    state = trainers.blank()
    failpoints.arm(f"{point}=error(EMFILE)")
    try:
        with pytest.raises(errors.StorageError, match="Too many open files"):
            agent.recover(state)
    finally:
        failpoints.arm("")
    recovered = agent.recover(state)
    assert recovered is not None
    trainers.assert_equal(state, 2)


# -- bad input: an error in one sentence, and training continues


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tag": "../x"}, errors.InvalidName, "tag '../x' cannot be a name"),
        ({"tag": "a\0b"}, errors.InvalidName, "cannot be a name"),
        ({"tag": "x" * 300}, errors.InvalidName, "cannot be a name"),
        ({"tag": "newest"}, errors.InvalidName, "it means the newest checkpoint of a job"),
        (
            {"tag": "step-00000001"},
            errors.InvalidName,
            "names beginning with 'step-' are made by ckptd",
        ),
        (
            {"step": -1},
            errors.InvalidRequest,
            "step is -1; expected an integer from 0 to 10**18 - 1",
        ),
        ({"step": True}, errors.InvalidRequest, "step is True"),
        (
            {"on_busy": "maybe"},
            errors.InvalidRequest,
            "on_busy is 'maybe'; expected 'wait' or 'skip'",
        ),
        (
            {"metrics": {"loss": "low"}},
            errors.InvalidRequest,
            "metric 'loss' is 'low'; expected a number",
        ),
        (
            {"user_content": object()},
            errors.InvalidRequest,
            "user_content cannot be written as JSON",
        ),
        ({"user_content": "x" * 600_000}, errors.InvalidRequest, "exceed 524288 bytes"),
    ],
)
def test_each_bad_argument_is_named(
    agent: Agent, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    pending = agent.snapshot({"x": torch.ones(1)}, **{"step": 1, **options}, on_error="log")
    assert pending.state == "failed"
    with pytest.raises(error, match=re.escape(words)):
        pending.wait()
    assert (
        agent.snapshot({"x": torch.ones(1)}, step=2).wait("durable", timeout=60).state == "durable"
    )


def test_a_tag_that_is_taken_fails_the_snapshot(agent: Agent, daemon: Daemon) -> None:
    agent.snapshot({"x": torch.ones(1)}, step=1, tag="best").wait("durable", timeout=60)
    pending = agent.snapshot({"x": torch.zeros(1)}, step=2, tag="best")
    with pytest.raises(
        errors.AlreadyExists,
        match="tag 'best' is taken in attempt 1 of job 'job'; choose another tag",
    ):
        pending.wait()
    agent.snapshot({"x": torch.zeros(1)}, step=3, tag="better").wait("durable", timeout=60)
    with Checkpoint.open(daemon.home.root / "job", "best") as checkpoint:
        assert checkpoint.tensor("x").item() == 1.0


@pytest.mark.usefixtures("processes")
def test_a_state_larger_than_the_quota_fails_with_both_sizes(place: Home) -> None:
    with running(place, "--shm-quota", "8M", forked=True):
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot({"x": torch.ones(5_000_000)}, step=1)
        with pytest.raises(
            errors.QuotaExceeded,
            match=r"a slot of 20\.\d MB does not fit: 0 B of the quota of 8\.0 MB are taken; raise "
            r"shm_quota",
        ):
            pending.wait()
        assert place.segment_files() == []
        assert (
            agent.snapshot({"x": torch.ones(10)}, step=2).wait("durable", timeout=60).state
            == "durable"
        )
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_slot_requested_before_the_state_grew_is_replaced_by_a_larger_one(place: Home) -> None:
    with running(place, "--shm-quota", "11M", forked=True):
        agent = Agent("job", socket=place.socket)
        for step, size in ((1, 500_000), (2, 1_000_000)):  # two slots of 2 MB, then of 4 MB
            assert (
                agent.snapshot({"x": torch.ones(size)}, step=step).wait("durable", timeout=60).state
                == "durable"
            )
        agent.close()


@pytest.fixture
def small_tmpfs(processes: None, tmp_path: Path) -> Any:
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(where)],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        # Only root may mount. test_a_save_that_fails_is_reported_and_leaves_nothing
        # tries the same paths with failpoints.
        pytest.skip("mounting a small tmpfs needs root")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_full_shared_memory_fails_the_snapshot_and_leaves_nothing(
    place: Home, small_tmpfs: Path
) -> None:
    with running(
        place, "--shm-dir", str(small_tmpfs), "--shm-quota", "1G", "--no-overflow", forked=True
    ):
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot({"x": torch.ones(4_000_000)}, step=1)
        with pytest.raises(
            errors.SharedMemoryFull,
            match=r"no room for a slot of 16\.\d MB in .*small: .* are free; make it larger",
        ):
            pending.wait()
        assert (
            agent.snapshot({"x": torch.ones(10)}, step=2).wait("durable", timeout=60).state
            == "durable"
        )
        agent.close()


@pytest.mark.parametrize("quota", ["0", "1G"])
def test_slots_that_do_not_fit_into_shared_memory_go_to_the_disk_and_outlive_the_daemon(
    place: Home, small_tmpfs: Path, caplog: pytest.LogCaptureFixture, quota: str
) -> None:
    options = ["--shm-dir", str(small_tmpfs), "--shm-quota", quota]
    with running(place, *options, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"x": torch.ones(100)}, step=1).wait("sealed", timeout=60)
        assert caplog.text == ""
        agent.snapshot({"x": torch.ones(4_000_000)}, step=2, persist=False).wait(
            "sealed", timeout=60
        )
        assert (
            caplog.text.count(
                f"the slots do not fit into {small_tmpfs}, and are files in {place.state}"
            )
            == 1
        )
        assert daemon.status()["shared_memory"]["on_disk_bytes"] > 16_000_000
        daemon.kill()
    with running(place, *options, forked=True) as daemon:
        state = {"x": torch.zeros(4_000_000)}
        recovered = agent.recover(state)
        assert recovered is not None
        assert (recovered.step, recovered.source, state["x"].sum().item()) == (
            2,
            "memory",
            4_000_000,
        )
        agent.close()
        until(lambda: daemon.status()["shared_memory"]["segments"] == 0, "end of the slots")
    assert not list(place.state.rglob("*.seg"))


def test_saves_resume_once_a_full_disk_has_been_freed(place: Home, small_tmpfs: Path) -> None:
    place.root.symlink_to(small_tmpfs)
    with running(place, "--codec", "raw", forked=True) as daemon:
        (small_tmpfs / "ballast").write_bytes(
            bytes(12 << 20)[: small_free(small_tmpfs) - (100 << 10)]
        )
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot(trainers.expected(1), step=1)
        with pytest.raises(
            errors.StorageError,
            match=r"cannot save job/step-00000001\.a0001: No space left on device \(free some "
            r"space",
        ):
            pending.wait(timeout=60)
        assert not list((small_tmpfs / "job").glob("*/*")), "nothing half written is left"
        state = trainers.blank()
        recovered = agent.recover(state)
        assert recovered is not None
        assert recovered.source == "memory"
        trainers.assert_equal(state, 1)
        (small_tmpfs / "ballast").unlink()
        agent.snapshot(trainers.expected(2), step=2).wait("durable", timeout=60)
        agent.close()
        assert daemon.status()["counters"]["failed"] == 1


@pytest.mark.parametrize("make_room", [True, False])
def test_a_full_disk_deletes_old_checkpoints_early_only_if_it_may(
    place: Home, small_tmpfs: Path, make_room: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place.root.symlink_to(small_tmpfs)
    fit = small_free(small_tmpfs) // 3_000_000
    options = ["--codec", "raw", "--log-format", "json", *(["--make-room"] if make_room else [])]
    with running(place, *options, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"x": torch.ones(700_000)}, step=1, tag="best").wait("durable", timeout=60)
        then = (
            "the oldest ones are then deleted early"
            if make_room
            else "delete some (`ckptd forget`), keep fewer"
        )
        # Others follow, because the daemon warns each time that fewer fit.
        warning = next(text for text in caplog.messages if "the root has room for" in text)
        assert warning.startswith(f"job job: the root has room for {fit} more of its checkpoints")
        assert then in warning
        pendings = []
        for step in range(2, fit + 4):
            pendings.append(agent.snapshot({"x": torch.full((700_000,), float(step))}, step=step))
            until(lambda pending=pendings[-1]: pending.done, "end of the save")  # type: ignore[misc]
        assert "job job: the root has room for 0 more of its checkpoints" in place.log_text()
        until(lambda: "job job: the root has room for 0 more" in caplog.text, "the trainer's log")
        until(lambda: daemon.status()["jobs"][0]["room_for"] < 2, "measurement of the disk")
        (shown,) = daemon.status()["jobs"]
        if make_room:
            assert [pending.state for pending in pendings] == ["durable"] * len(pendings)
            assert (
                "job job: step-00000002.a0001 was deleted early, to make room on the full disk"
                in place.log_text()
            )
            made = [event["tag"] for event in place.events("room.made")]
            assert made[0] == "step-00000002.a0001"
        else:
            assert [pending.state for pending in pendings[-2:]] == ["failed", "failed"]
            assert shown["last_error"]["reason"].startswith("cannot save job/step-")
        kept = sorted(path.parent.name for path in (place.root / "job").glob("*/manifest.json"))
        assert "best.a0001" in kept
        newest = [pending.step for pending in pendings if pending.state == "durable"][-1]
        state = {"x": torch.zeros(700_000)}
        recovered = agent.recover(state, step=newest)
        assert recovered is not None
        assert state["x"][0] == newest
        agent.close() if make_room else trainers.vanish(agent)


def small_free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


FULL, BROKEN = (
    "No space left on device (free some space; the next save tries again)",
    "Input/output error (the disk or the mount has failed: the kernel's log says why)",
)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("failpoint", "reason"),
    [
        ("persist.created=error(ENOSPC)", FULL),
        ("persist.writing=error(ENOSPC)", FULL),
        ("persist.syncing=error(ENOSPC)", FULL),
        ("commit.synced=error(ENOSPC)", FULL),
        ("commit.written=error(ENOSPC)", FULL),
        ("commit.synced=error(EIO)", BROKEN),
        ("commit.written=error(EIO)", BROKEN),
        ("commit.written=short_write", BROKEN),
    ],
)
def test_a_save_that_fails_is_reported_and_leaves_nothing(
    place: Home, failpoint: str, reason: str
) -> None:
    with running(place, failpoints=f"{failpoint}@1", forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot(trainers.expected(1, SIZE), step=1)
        until(lambda: pending.done, "end")
        assert (pending.state, type(pending.error)) == ("failed", errors.StorageError)
        assert str(pending.error) == f"cannot save job/step-00000001.a0001: {reason}"
        assert list((place.root / "job").glob("*")) == []
        agent.snapshot(trainers.expected(2, SIZE), step=2).wait("durable", timeout=60)
        agent.close()
        counters = daemon.status()["counters"]
        assert (counters["failed"], counters["rewrites"]) == (1, 0)
    with Checkpoint.open(place.root / "job") as checkpoint:
        trainers.assert_equal(checkpoint.load(), 2, SIZE)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "failpoint",
    [
        "persist.created=error(EIO)",
        "persist.writing=error(EIO)",
        "persist.writing=short_write",
        "persist.syncing=error(EIO)",
    ],
)
def test_a_part_that_the_disk_refuses_once_is_written_again_to_a_new_file(
    place: Home, failpoint: str
) -> None:
    with running(place, failpoints=f"{failpoint}@1", forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot(trainers.expected(1, SIZE), step=1).wait("durable", timeout=60)
        agent.snapshot(trainers.expected(2, SIZE), step=2).wait("durable", timeout=60)
        agent.close()
        counters = daemon.status()["counters"]
        assert (counters["failed"], counters["rewrites"]) == (0, 1)
    with Checkpoint.open(place.root / "job") as checkpoint:
        trainers.assert_equal(checkpoint.load(), 2, SIZE)


@pytest.mark.usefixtures("processes")
def test_a_failed_snapshot_is_still_saved_when_it_is_the_last(place: Home) -> None:
    with running(place, failpoints="persist.created=error(ENOSPC)@1", forked=True):
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot(trainers.expected(1, SIZE), step=1)
        until(lambda: pending.state == "failed", "failure")
        agent.close()
    with Checkpoint.open(place.root / "job") as checkpoint:
        trainers.assert_equal(checkpoint.load(), 1, SIZE)


def test_a_job_must_be_named_with_a_daemon_for_all(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTD_JOB", raising=False)
    with pytest.raises(
        errors.InvalidRequest, match="name this job with CKPTD_JOB or Agent\\(job=...\\)"
    ):
        Agent(socket=daemon.home.socket)
    monkeypatch.setenv("CKPTD_JOB", "../up")
    with pytest.raises(errors.InvalidName):
        Agent(socket=daemon.home.socket)


def test_a_named_socket_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        errors.DaemonUnreachable,
        match="no daemon listens at .*/nobody on .*: start one with `ckptd run",
    ):
        Agent("job", socket=tmp_path / "nobody")


def test_a_daemon_of_another_root_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="uses root .*, not "):
        Agent("job", socket=daemon.home.socket, root=tmp_path)


def test_several_ranks_need_a_process_group(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        errors.InvalidRequest,
        match=r"this job has 4 ranks: call torch.distributed.init_process_group\(\) before ckptd",
    ):
        Agent("job", socket=daemon.home.socket)


def test_a_forked_child_cannot_use_or_hold_the_parents_agent(agent: Agent, daemon: Daemon) -> None:
    agent.snapshot({"x": torch.ones(1)}, step=1).wait("durable", timeout=60)
    child = os.fork()
    if child == 0:
        state = agent.snapshot({"x": torch.ones(1)}, step=2).state
        os._exit(0 if state == "failed" and agent.closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (
        agent.snapshot({"x": torch.ones(1)}, step=2).wait("durable", timeout=60).state == "durable"
    )


def test_close_frees_everything(agent: Agent, daemon: Daemon) -> None:
    agent.snapshot({"x": torch.ones(100)}, step=1, persist=False).wait("sealed")
    assert daemon.home.segment_files()
    agent.close()
    assert daemon.home.segment_files() == []
    assert (daemon.home.root / "job" / "step-00000001.a0001" / "manifest.json").exists()
    assert agent.snapshot({"x": torch.ones(1)}, step=2).state == "failed"
    agent.close()


def test_threads_of_the_agent_do_not_keep_a_process_alive(daemon: Daemon) -> None:
    script = f"from ckptd.agent import Agent; Agent('job', socket={str(daemon.home.socket)!r})"
    assert python("-c", script, finalized=True, timeout=60).returncode == 0
    assert threading.active_count() >= 1


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("steps", [1, 0], ids=["slots", "no slot yet"])
def test_a_run_goes_on_saving_with_a_daemon_that_comes_back_without_its_slots(
    place: Home, steps: int
) -> None:
    """As in a pod that is replaced: the memory goes with it, and the state directory stays."""
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        for step in range(steps):
            agent.snapshot({"x": torch.ones(3)}, step=step).wait("durable", timeout=60)
        assert daemon.stop() == 0
    for file in place.segment_files():
        file.unlink()
    with running(place, forked=True):
        until(lambda: agent._link.client.connected, "connection")
        for step in (2, 3):
            agent.snapshot({"x": torch.full((3,), float(step))}, step=step).wait(
                "durable", timeout=60
            )
        assert agent.attempt == 1
        agent.close()
    with Checkpoint.open(place.root / "job", "newest") as checkpoint:
        assert (checkpoint.step, checkpoint.load()["x"].tolist()) == (3, [3.0] * 3)


def _report_refusals_at_once() -> None:
    refusals.LASTING_SECONDS = 0.0


@pytest.mark.usefixtures("processes")
def test_a_run_that_the_next_daemon_refuses_is_told_why_and_not_that_the_daemon_is_gone(
    place: Home, caplog: pytest.LogCaptureFixture
) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"x": torch.ones(3)}, step=0).wait("durable", timeout=60)
        assert daemon.stop() == 0
    shutil.rmtree(place.root)
    for file in place.segment_files():
        file.unlink()
    with running(place, forked=_report_refusals_at_once) as daemon:
        until(lambda: agent._link.client.refusal is not None, "answer of the next daemon")
        for step in (1, 2):
            pending = agent.snapshot({"x": torch.ones(3)}, step=step)
            assert isinstance(pending.error, errors.ForeignMemory)
            assert "attempt 1 of job 'job' was begun for root" in str(pending.error)
        (refused,) = daemon.status()["refused"]
        assert (refused["job"], refused["pids"]) == ("job", [os.getpid()])
        assert [problem.what for problem in health.problems(daemon.status())] == ["refused"]
        with pytest.raises(errors.ForeignMemory, match="has another root now"):
            agent.close()
    assert "the daemon refuses this rank: attempt 1 of job 'job' was begun" in caplog.text
    assert "the daemon is gone" not in caplog.text


@pytest.mark.usefixtures("processes")
def test_a_run_goes_on_saving_once_its_root_is_back(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a disk that was unmounted while a supervisor restarted the daemon."""
    monkeypatch.setattr(client, "_FOREIGN_DELAY", 0.05)
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
        place.root.rename(place.path / "gone")
        assert daemon.died() == 1
    with running(place, forked=True) as daemon:
        until(lambda: agent._link.client.refusal is not None, "refusal")
        pending = agent.snapshot({"x": torch.ones(3)}, step=2)
        assert isinstance(pending.error, errors.ForeignMemory)
        assert daemon.stop() == 0
    shutil.rmtree(place.root)
    (place.path / "gone").rename(place.root)
    with running(place, forked=True):
        until(lambda: agent._link.client.connected, "connection")
        agent.snapshot({"x": torch.full((3,), 3.0)}, step=3).wait("durable", timeout=60)
        agent.close()
    with Checkpoint.open(place.root / "job", "newest") as checkpoint:
        assert (checkpoint.step, checkpoint.load()["x"].tolist()) == (3, [3.0] * 3)


@pytest.mark.usefixtures("processes")
def test_a_daemon_whose_root_was_deleted_ends_and_the_next_one_does_not_fill_a_new_root(
    place: Home,
) -> None:
    with running(place, "--log-format", "json", forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        for step in (1, 2):
            agent.snapshot({"x": torch.full((3,), float(step))}, step=step).wait(
                "durable", timeout=60
            )
        # A deletion file by file could meet a file that the daemon is making.
        place.root.rename(place.path / "gone")
        assert daemon.died() == 1
        assert (
            f"the root {place.root} has been deleted, moved or replaced; the snapshots in memory "
            f"stay there" in place.log_text()
        )
        assert place.events("attempt.begun") == [{"job": "job", "attempt": 1, "ranks": 1}]
        (failed,) = place.events("daemon.failed")
        assert "has been deleted, moved or replaced" in failed["reason"]
    with running(place, forked=True):
        state = {"x": torch.zeros(3)}
        with pytest.raises(errors.ForeignMemory, match="holds step 2 of attempt 1 of job 'job'"):
            agent.recover(state)
        assert state["x"].tolist() == [0.0] * 3
        with pytest.raises(errors.ForeignMemory):
            agent.close()
        assert not (place.root / "job").exists()
