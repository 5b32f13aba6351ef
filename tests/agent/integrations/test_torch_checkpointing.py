"""Tests a CheckpointManager of torch_checkpointing that ckptd is attached to: what is
saved, what comes back, also after SIGKILL and on other ranks, and what is refused.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptd.agent import Agent, Checkpoint
from ckptd.integrations.torch_checkpointing import CkptdStorage, attach
from ckptd.shared.errors import (
    CkptdError,
    InvalidName,
    InvalidRequest,
    RecoveryFailed,
    UnsavableValue,
)
from tests.frameworks.kills import EXAMPLES, Example
from tests.support.daemons import Daemon, Home, running
from tests.support.ranks import HERE, Ranks

pytest.importorskip("torch_checkpointing")
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

pytestmark = pytest.mark.timeout(600)

EXAMPLE = EXAMPLES / "train_torch_checkpointing.py"
WEIGHT = torch.arange(12, dtype=torch.float32, device="cpu").reshape(4, 3) / 7


def synchronous() -> Any:
    """Return a manager that starts no process, and writes files without O_DIRECT."""
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(config)


def asynchronous() -> Any:
    """Return a manager with the default saver, which writes files without O_DIRECT."""
    config = CheckpointManager.Config.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(config)


def made(daemon: Daemon, job: str = "job", **options: Any) -> tuple[Any, CkptdStorage]:
    manager = synchronous()
    agent = Agent(job, socket=daemon.home.socket)
    return manager, attach(manager, agent=agent, **options)


@pytest.fixture
def attached(daemon: Daemon) -> Iterator[tuple[Any, CkptdStorage]]:
    manager, storage = made(daemon)
    yield manager, storage
    manager.close()
    with suppress(CkptdError):  # a test has closed it, or has saved nothing that is sound
        storage.agent.close()


def payload(number: int) -> dict[str, Any]:
    return {"model": {"w": WEIGHT * number}, "step": number, "note": ["a", {"b": number}]}


def loaded(manager: Any, checkpoint_id: str) -> int:
    """Return the number of the payload that a load brings back. All of it must agree."""
    into: dict[str, Any] = {"model": {"w": torch.zeros(4, 3)}, "step": 0, "note": None}
    found = manager.load(checkpoint_id, into=into)
    number = int(found["step"])
    assert torch.equal(into["model"]["w"], WEIGHT * number)
    assert found["note"] == ["a", {"b": number}]
    return number


def test_a_checkpoint_is_an_ordinary_one_and_its_future_ends_when_it_is_durable(
    daemon: Daemon,
) -> None:
    manager = asynchronous()
    agent = Agent("job", socket=daemon.home.socket)
    attach(manager, agent=agent)
    written = manager.save("/runs/one/step_10", payload(3))
    assert written.result(timeout=60).state == "durable"
    with Checkpoint.open(daemon.home.root / "job", 10) as checkpoint:
        assert checkpoint.keys() == ["model.w"]
        assert torch.equal(checkpoint.tensor("model.w"), WEIGHT * 3)
        assert checkpoint.load()["note"] == ["a", {"b": 3}]
        assert checkpoint.user_content == {"id": "/runs/one/step_10"}
        assert checkpoint.verify() > WEIGHT.nbytes
    state = {"model": {"w": torch.zeros(4, 3)}, "step": 0, "note": None}
    recovered = agent.recover(state)
    assert recovered is not None
    assert recovered.step == 10
    assert state["step"] == 3
    manager.close()
    agent.close()


def test_a_synchronous_save_is_durable_when_it_returns(
    attached: tuple[Any, CkptdStorage], daemon: Daemon
) -> None:
    manager, _ = attached
    assert manager.save("step_1", payload(1)) is None
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.step == 1


def test_a_load_fills_tensors_in_place_and_loads_none_whole(
    attached: tuple[Any, CkptdStorage],
) -> None:
    manager, _ = attached
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    weight, moment = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
    manager.save("step_5", saved)
    fresh = torch.nn.Linear(3, 2)
    again = torch.optim.AdamW(fresh.parameters())
    into: dict[str, Any] = {"model": fresh.state_dict(), "optimizer": None, "step": 0}
    found = manager.load("step_5", into=into, strict=True)
    again.load_state_dict(found["optimizer"])
    assert torch.equal(fresh.weight, weight)
    assert torch.equal(again.state[fresh.weight]["exp_avg"], moment)
    assert found["step"] == 5


def test_a_load_fills_only_what_is_asked_for(attached: tuple[Any, CkptdStorage]) -> None:
    manager, _ = attached
    manager.save("step_1", {"model": {"w": WEIGHT, "b": torch.ones(2)}, "step": 1})
    into: dict[str, Any] = {"model": {"b": torch.zeros(2)}}
    assert manager.load("step_1", into=into) == into
    assert list(into) == ["model"]
    assert list(into["model"]) == ["b"]
    assert into["model"]["b"].tolist() == [1.0, 1.0]


def test_random_numbers_go_on_after_a_load(attached: tuple[Any, CkptdStorage]) -> None:
    manager, _ = attached
    torch.manual_seed(3)
    manager.save("step_1", payload(1))
    expected = torch.rand(4)
    torch.manual_seed(4)
    assert loaded(manager, "step_1") == 1
    assert torch.equal(torch.rand(4), expected)


def test_random_numbers_are_left_alone_if_they_were_not_saved(daemon: Daemon) -> None:
    manager, storage = made(daemon, rng=False)
    torch.manual_seed(3)
    manager.save("step_1", payload(1))
    torch.manual_seed(4)
    expected = torch.rand(4)
    torch.manual_seed(4)
    assert loaded(manager, "step_1") == 1
    assert torch.equal(torch.rand(4), expected)
    storage.agent.close()


def test_the_newest_checkpoint_of_an_id_counts(attached: tuple[Any, CkptdStorage]) -> None:
    """Ids are saved twice, and out of order; a tag takes the step of a later number."""
    manager, storage = attached
    assert storage.newest() is None
    for number, checkpoint_id in enumerate(
        ["step_3", "best", "run/step_4", "best", "step_3", "other/last", "step-9", "7"], 1
    ):
        manager.save(checkpoint_id, payload(number))
    ids = ["step_3", "best", "step_4", "last", "step_9", "x.7"]
    assert [loaded(manager, one) for one in ids] == [5, 4, 3, 6, 7, 8]
    assert storage.newest() == "step-7"
    assert loaded(manager, "step-7") == 8


def test_a_tag_is_the_newest_only_if_no_id_has_a_number(
    attached: tuple[Any, CkptdStorage],
) -> None:
    manager, storage = attached
    manager.save("first", payload(7))
    manager.save("first", payload(1))
    assert storage.newest() == "first"
    assert loaded(manager, "first") == 1
    manager.save("step_8", payload(2))
    manager.save("best", payload(3))
    assert storage.newest() == "step-8"


def test_a_run_goes_on_from_an_older_checkpoint(attached: tuple[Any, CkptdStorage]) -> None:
    manager, storage = attached
    for number in (1, 2, 3):
        manager.save(f"step_{number}", payload(number))
    assert loaded(manager, "step_1") == 1
    manager.save("step_2", payload(20))
    assert storage.agent.attempt == 2
    assert [loaded(manager, f"step_{number}") for number in (1, 2, 3)] == [1, 20, 3]
    assert storage.newest() == "step-2"


def test_what_is_not_there_is_the_error_of_the_manager(
    attached: tuple[Any, CkptdStorage],
) -> None:
    manager, _ = attached
    manager.save("step_1", payload(1))
    with pytest.raises(FileNotFoundError, match="^Checkpoint path run/step_2 does not exist"):
        loaded(manager, "run/step_2")
    with pytest.raises(RuntimeError, match="^checkpoint step_1 has no item more$"):
        manager.load("step_1", into={"step": 0, "more": torch.ones(1)})
    into: dict[str, Any] = {"model": {"w": torch.zeros(4, 3), "new": torch.zeros(2)}}
    with pytest.raises(RuntimeError, match=r"^checkpoint step_1 is missing keys: model\.new$"):
        manager.load("step_1", into=into, strict=True)
    assert manager.load("step_1", into=into)["model"]["new"].tolist() == [0.0, 0.0]


def test_files_that_were_saved_before_are_loaded(
    attached: tuple[Any, CkptdStorage], tmp_path: Path
) -> None:
    plain = synchronous()
    plain.save(str(tmp_path / "step_6"), payload(6))
    plain.close()
    manager, _ = attached
    assert loaded(manager, str(tmp_path / "step_6")) == 6
    manager.save(str(tmp_path / "step_6"), payload(7))
    assert loaded(manager, str(tmp_path / "step_6")) == 7


def test_a_run_that_loads_nothing_or_older_files_may_not_save(
    daemon: Daemon, tmp_path: Path
) -> None:
    plain = synchronous()
    plain.save(str(tmp_path / "step_2"), payload(2))
    plain.close()
    first, storage = made(daemon)
    first.save("step_4", payload(4))
    storage.agent.close()
    again, storage = made(daemon)
    with pytest.raises(InvalidRequest, match=r"^checkpoint step-4 of job 'job' was not loaded"):
        again.save("step_0", payload(1))
    assert loaded(again, str(tmp_path / "step_2")) == 2
    with pytest.raises(InvalidRequest, match=r"^checkpoint step-4 of job 'job' was not loaded"):
        again.save("step_3", payload(3))
    assert storage.newest() == "step-4"
    assert loaded(again, "step_4") == 4
    again.save("step_5", payload(5))
    assert storage.newest() == "step-5"
    storage.agent.close()


def test_a_job_whose_checkpoints_are_all_damaged_does_not_begin_at_zero(place: Home) -> None:
    with running(place) as daemon:
        manager, storage = made(daemon)
        manager.save("step_4", payload(4))
        storage.agent.close()
    (manifest,) = place.root.glob("job/*/manifest.json")
    manifest.write_bytes(b"rot")
    with (
        running(place) as daemon,
        pytest.raises(
            RecoveryFailed,
            match=r"^no sound checkpoint of job 'job' is left: step-00000004\.a0001: ",
        ),
    ):
        made(daemon)


KILLED = """
import os, signal, sys
import torch
from torch_checkpointing import CheckpointManager
from ckptd.integrations.torch_checkpointing import attach

def main():
    manager = CheckpointManager(CheckpointManager.Config.with_async_save())
    attach(manager)
    for step in range(4):
        manager.save(f"step_{step}", {"w": torch.full((1000,), float(step)), "step": step})
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main()
"""


def test_the_last_save_before_sigkill_is_the_newest(daemon: Daemon, tmp_path: Path) -> None:
    """The trainer waits for no save. The last one comes back from memory or storage."""
    script = tmp_path / "trainer.py"
    script.write_text(KILLED)
    environ = {"CKPTD_SOCKET": str(daemon.home.socket), "CKPTD_JOB": "job", "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, script], env=environ, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == -9
    manager, storage = made(daemon)
    assert storage.newest() == "step-3"
    into: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    assert manager.load("step-3", into=into)["step"] == 3
    assert into["w"].tolist() == [3.0] * 1000
    storage.agent.close()


def test_the_example_is_exact_after_kills() -> None:
    found = Example(EXAMPLE, 40, random.Random(6)).run(2)
    assert (found.problems, found.steps, found.kills) == ([], 40, 2)


LAUNCHER = """
import os, socket, subprocess, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
ranks = [
    subprocess.Popen(
        [sys.executable, EXAMPLE, *sys.argv[1:]],
        env=os.environ | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    )
    for rank in "01"
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
"""Begins the example on two ranks in one process group, which SIGKILL ends as a whole."""


def test_two_ranks_are_exact_after_a_kill(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(f"EXAMPLE = {str(EXAMPLE)!r}\n{LAUNCHER}")
    found = Example(script, 30, random.Random(7)).run(1)
    assert (found.problems, found.steps, found.kills) == ([], 30, 1)


def begin(socket: str) -> None:
    """Save a sharded tensor and a value of each rank, on a rank, twice as the same id."""
    manager = synchronous()
    agent = HERE["agent"] = Agent("job", socket=socket)
    storage = attach(manager, agent=agent, per_rank=["position"])
    HERE["storage"], HERE["manager"] = storage, manager
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(WEIGHT, mesh, [Shard(0)])
    for factor in (2, 1):
        position = dist.get_rank() * 10 * factor
        manager.save("step_2", {"w": sharded * factor, "position": position, "same": 5 * factor})


def bring_back() -> tuple[str | None, list[Any], int, int]:
    """Load it with the columns sharded, and return this rank's part and values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    into: dict[str, Any] = {
        "w": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]),
        "position": 0,
        "same": 0,
    }
    newest = HERE["storage"].newest()
    found = HERE["manager"].load(newest, into=into, strict=True)
    assert isinstance(into["w"], DTensor)
    local = into["w"].to_local().tolist()
    HERE["agent"].close()
    return newest, local, found["position"], found["same"]


def test_two_ranks_save_and_another_mesh_loads(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, str(daemon.home.socket))
        found = ranks.call(bring_back)
    assert found == [
        ("step-2", WEIGHT[:, :2].tolist(), 0, 5),
        ("step-2", WEIGHT[:, 2:].tolist(), 10, 5),
    ]
    manager, storage = made(daemon)
    into: dict[str, Any] = {"w": torch.zeros(4, 3)}
    manager.load("step_2", into=into)
    assert torch.equal(into["w"], WEIGHT)
    storage.agent.close()


def save_optimizers(socket: str) -> tuple[str, list[Any], list[Any]]:
    """Save an optimizer in three forms on a rank. Return the refusal of one of them, and
    a moment before and after the load of the others.
    """
    manager = synchronous()
    agent = Agent("job", socket=socket)
    attach(manager, agent=agent)
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    named = get_optimizer_state_dict(model, optimizer)
    manager.save("step_1", {"model": model, "optimizer": optimizer, "named": named})
    refusal = ""
    try:
        manager.save("step_2", {"optimizer": optimizer.state_dict()})
    except UnsavableValue as error:
        refusal = str(error)
    moment = optimizer.state[model.weight]["exp_avg"]
    before = moment.tolist()
    moment.zero_()
    found = manager.load("step_1", into={"model": model, "optimizer": optimizer, "named": None})
    again = optimizer.state[model.weight]["exp_avg"].tolist()
    agent.close()
    return refusal, before, [again, found["named"]["state"]["weight"]["exp_avg"].tolist()]


def test_ranks_save_an_optimizer_itself_or_by_names(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        found = ranks.call(save_optimizers, str(daemon.home.socket))
    moment = [[pytest.approx(0.1)] * 3]
    assert [(before, after) for _, before, after in found] == [(moment, [moment, moment])] * 2
    assert all("optimizer: each rank numbers the parameters" in refusal for refusal, _, _ in found)


def test_saves_in_quick_succession_wait_and_none_is_skipped(place: Home) -> None:
    """A save takes longer than the time after which a snapshot without a slot is skipped."""
    environ = {"CKPTD_STALL_BUDGET": "0.3", "CKPTD_CODEC": "zstd:19"}
    with running(place, environment=environ):
        manager = asynchronous()
        agent = Agent("job", socket=place.socket)
        attach(manager, agent=agent)
        for number in (1, 2):  # makes both slots
            manager.save(f"step_{number}", {"w": torch.randn(500_000)}).result(timeout=120)
        saved = [
            manager.save(f"step_{number}", {"w": torch.randn(500_000)}) for number in range(3, 6)
        ]
        assert [one.result(timeout=120).step for one in saved] == [3, 4, 5]
        manager.close()
        agent.close()


def test_prewarming_makes_slots(attached: tuple[Any, CkptdStorage], daemon: Daemon) -> None:
    manager, _ = attached
    assert daemon.home.segment_files() == []
    manager.prewarm_staging(payload(1))
    manager.save("step_1", payload(1))
    assert len(daemon.home.segment_files()) == 2
    assert loaded(manager, "step_1") == 1


def test_a_save_that_has_failed_is_raised_by_its_future_and_by_close(daemon: Daemon) -> None:
    manager = asynchronous()
    agent = Agent("job", socket=daemon.home.socket)
    attach(manager, agent=agent)
    manager.save("step_1", payload(1)).result(timeout=60)
    written = manager.save("step_2", {"w": torch.ones(2), "object": sys})
    with pytest.raises(UnsavableValue, match="object"):
        written.result(timeout=60)
    with pytest.raises(UnsavableValue, match="object"):
        manager.close()
    agent.close()


def test_the_managers_close_ends_the_agent_of_the_process(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", str(daemon.home.socket))
    monkeypatch.setenv("CKPTD_JOB", "job")
    manager = asynchronous()
    storage = attach(manager)
    manager.save("step_1", payload(1))
    manager.close()
    assert storage.agent.closed
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.step == 1


def test_a_manager_that_cannot_be_attached_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    wrong: Any = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidRequest, match=r"^attach\(\) got a Linear; expected a Checkpoint"):
        attach(wrong)
    closed = synchronous()
    closed.close()
    with pytest.raises(InvalidRequest, match="^this CheckpointManager is closed: call attach"):
        attach(closed, agent=agent)
    used = asynchronous()
    used.save(str(tmp_path / "files"), {"step": 1}).result(timeout=60)
    with pytest.raises(InvalidRequest, match="^this CheckpointManager has saved already: call"):
        attach(used, agent=agent)
    used.close()
    config = CheckpointManager.Config.with_sync_save()
    config.finalize_callback = print
    with pytest.raises(InvalidRequest, match="^this CheckpointManager has a callback for the"):
        attach(CheckpointManager(config), agent=agent)
    twice = synchronous()
    attach(twice, agent=agent)
    with pytest.raises(
        InvalidRequest, match="^ckptd is attached to this CheckpointManager already: call attach"
    ):
        attach(twice, agent=agent)
    agent.close()


def test_an_id_and_a_place_that_cannot_be_used_are_refused(
    attached: tuple[Any, CkptdStorage],
) -> None:
    manager, storage = attached
    for name in ("with space", "step-last", ""):
        with pytest.raises(InvalidName, match=r"^tag '.*' cannot be "):
            manager.save(name, payload(1))
    assert storage.newest() is None
    manager.save("step_1", payload(1))
    with pytest.raises(InvalidRequest, match="^map_location is a dict; ckptd loads an item that"):
        manager.load("step_1", into={"note": None}, map_location={"cuda:0": "cpu"})
    found = manager.load("step_1", into={"model": None}, map_location="meta")
    assert found["model"]["w"].device.type == "meta"
