"""Tests the checkpoint manager for torchtitan on the CPU: with the parts of a training that
torchtitan makes, and under its own Trainer. Trainings are killed and resumed.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.agent import link_of
from ckptd.integrations import framework
from ckptd.integrations import torchtitan as integration
from ckptd.shared.errors import InvalidRequest, NotFound, StructureMismatch
from ckptd.shared.retention import LatestN, PreserveAll
from tests.frameworks.kills import EXAMPLES, ROOT, Example, lines
from tests.support.daemons import Daemon
from tests.support.launcher import LAUNCHER

pytest.importorskip("torchtitan")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of torchtitan and torchdata
    pytest.mark.timeout(900),
]
ALL = ("dataloader", "lr_scheduler", "model", "optimizer", "train_state")


class Numbers(IterableDataset[int]):
    """The numbers from 0, without end."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Progress:
    """The step of a training, as torchtitan's Trainer keeps it."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def parts(folder: Path, agent: Agent | None, *, own: bool = False, **settings: Any) -> Any:
    """Return a small training: a model, torchtitan's containers around it, and a manager.

    own: use torchtitan's own manager.
    """
    from torchtitan.components import checkpointer
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    settings_of_optimizers = default_adamw(lr=0.1)
    settings_of_optimizers.implementation = "for-loop"
    optimizers = settings_of_optimizers.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
        optimizers=optimizers, training_steps=50
    )
    loader = ParallelAwareDataloader(Numbers(), 0, 1, batch_size=2)
    manager = checkpointer.CheckpointManager if own else integration.CheckpointManager
    given = {} if own else {"agent": agent}
    settings = {"enable": True, "last_save_model_only": False, "folder": str(folder), **settings}
    progress = Progress()
    made = manager.Config(**settings).build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": progress}, sd_adapter=None, **given,
    )  # fmt: skip
    return SimpleNamespace(
        model=model, optimizers=optimizers, schedulers=schedulers, loader=loader, manager=made,
        progress=progress, batches=None,
    )  # fmt: skip


def train(run: Any, last: int, *, ends: bool = False) -> list[float]:
    """Train up to a step, and return the losses. ends: this is the last step of all."""
    losses = []
    run.batches = run.batches or iter(run.loader)
    while run.progress.step < last:
        run.progress.step += 1
        run.optimizers.zero_grad()
        loss = (run.model(next(run.batches).float()[:, None]) - 1).square().mean()
        loss.backward()
        run.manager.maybe_wait_for_staging()
        run.optimizers.step()
        run.schedulers.step()
        losses.append(float(loss))
        run.manager.save(run.progress.step, last_step=ends and run.progress.step == last)
    return losses


@pytest.fixture
def agent(daemon: Daemon) -> Iterator[Callable[[], Agent]]:
    """Return the next agent of one job: it ends the life of the one before."""
    made: list[Agent] = []

    def begin() -> Agent:
        if made:
            made.pop().close()
        made.append(Agent("job", socket=daemon.home.socket))
        return made[0]

    yield begin
    if made:
        made[0].close()


def saved(daemon: Daemon) -> list[int]:
    """Return the steps on storage, in their order."""
    return sorted({int(path.name[5:13]) for path in (daemon.home.root / "job").glob("step-*")})


Begin = Callable[[], Agent]


# -- a life and the next


def test_the_next_life_goes_on_bit_for_bit(agent: Begin, tmp_path: Path) -> None:
    """Dropout too: the loader draws a seed when it begins, and the run has drawn it."""
    whole = train(parts(tmp_path, None, enable=False), 9)
    first = parts(tmp_path, agent(), interval=4)
    assert first.manager.load() is False
    before = train(first, 6)
    second = parts(tmp_path, agent(), interval=4)
    assert second.manager.load() is True
    assert second.progress.step == 4
    after = train(second, 9)
    assert before + after[2:] == whole
    assert after[:2] == whole[4:6]
    assert type(second.loader).__name__ == "ParallelAwareDataloader"


def test_a_first_start_changes_no_optimizer(agent: Begin, tmp_path: Path) -> None:
    """torchtitan makes the state of its optimizers by a step, which Adam would count."""
    run = parts(tmp_path, agent())
    assert run.manager.load() is False
    assert [dict(one.state) for one in run.optimizers] == [{}]
    assert run.model[0].weight.grad is None


def test_what_is_saved_has_torchtitans_names(agent: Begin, daemon: Daemon, tmp_path: Path) -> None:
    run = parts(tmp_path, agent(), interval=1, async_mode="disabled")
    train(run, 2)
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        state = checkpoint.load()
    assert sorted(state) == sorted(ALL)
    assert sorted(state["model"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.equal(state["model"]["0.weight"], run.model[0].weight)
    moment = run.optimizers.optimizers[0].state[run.model[2].bias]["exp_avg"]
    assert torch.equal(state["optimizer"]["state.2.bias.exp_avg"], moment)
    assert state["train_state"] == {"step": 2}
    assert state["lr_scheduler"] == {"last_epoch": 2}
    assert sorted(state["dataloader"]) == ["dp_rank_0", "world_size"]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"interval": 3}, [3, 6, 8]),
        ({"interval": 4}, [4, 8]),
        ({"interval": 5, "enable_first_step_checkpoint": True}, [1, 5, 8]),
        ({"interval": 1, "load_only": True}, []),
        ({"interval": 1, "enable": False}, []),
    ],
    ids=str,
)
def test_the_configuration_decides_what_is_saved(
    agent: Begin, daemon: Daemon, tmp_path: Path, settings: dict[str, Any], steps: list[int]
) -> None:
    given = agent()
    run = parts(tmp_path, given, async_mode="disabled", **settings)
    train(run, 8, ends=True)
    run.manager.close()
    assert saved(daemon) == steps
    assert given.closed is False


@pytest.mark.parametrize(
    ("keep", "policy"), [(0, PreserveAll()), (2, LatestN(2))], ids=["all", "two"]
)
def test_as_many_are_kept_as_the_configuration_says(
    agent: Begin, tmp_path: Path, keep: int, policy: Any
) -> None:
    given = agent()
    parts(tmp_path, given, keep_latest_k=keep).manager.load()
    assert given.retention == (policy,)


def test_the_retention_of_an_agent_stays(agent: Begin, tmp_path: Path) -> None:
    given = agent()
    given.retention = (LatestN(7),)
    parts(tmp_path, given, keep_latest_k=2).manager.load()
    assert given.retention == (LatestN(7),)


def test_an_asynchronous_save_can_be_waited_for(
    agent: Begin, daemon: Daemon, tmp_path: Path
) -> None:
    manager = parts(tmp_path, agent(), interval=1).manager
    assert manager.async_mode == "async"
    assert manager.save(1) is True
    future = manager.save_future
    manager.maybe_wait_for_saving()
    assert (future.result().state, manager.save_future) == ("durable", None)
    assert saved(daemon) == [1]


# -- what is loaded


def test_an_earlier_step_is_loaded(agent: Begin, tmp_path: Path) -> None:
    first = parts(tmp_path, agent(), interval=2)
    losses = train(first, 6)
    second = parts(tmp_path, agent(), interval=2)
    assert second.manager.load(step=2) is True
    assert train(second, 6) == losses[2:]


def test_a_step_that_nobody_has_is_refused(agent: Begin, daemon: Daemon, tmp_path: Path) -> None:
    train(parts(tmp_path / "none", agent(), interval=2), 2)
    run = parts(tmp_path / "none", agent())
    expected = rf"load_step=5 .*, and job 'job' in {daemon.home.root} has no step 5 either$"
    with pytest.raises(FileNotFoundError, match=expected):
        run.manager.load(step=5)


@pytest.mark.parametrize("name", ["dataloader", "train_state", "lr_scheduler", "optimizer"])
def test_a_part_that_is_excluded_stays_as_it_is(agent: Begin, tmp_path: Path, name: str) -> None:
    first = parts(tmp_path, agent(), interval=2)
    train(first, 2)
    excluded = ["optimizer", "lr_scheduler"] if name == "optimizer" else [name]
    run = parts(tmp_path, agent(), exclude_from_loading=excluded)
    assert run.manager.load() is True
    found = {
        "dataloader": next(iter(run.loader)).tolist() == [4, 5],
        "train_state": run.progress.step == 2,
        "lr_scheduler": run.schedulers.schedulers[0].last_epoch == 2,
        "optimizer": bool(run.optimizers.optimizers[0].state),
    }
    assert {key for key, loaded in found.items() if not loaded} == set(excluded)
    assert torch.equal(run.model[0].weight, first.model[0].weight)


def test_an_unknown_part_cannot_be_excluded(agent: Begin, tmp_path: Path) -> None:
    run = parts(tmp_path, agent(), exclude_from_loading=["data"])
    expected = f"^exclude_from_loading names 'data', and the states are {', '.join(ALL)}: name "
    with pytest.raises(InvalidRequest, match=expected):
        run.manager.load()


def test_another_model_is_refused(agent: Begin, tmp_path: Path) -> None:
    train(parts(tmp_path, agent(), interval=1), 1)
    run = parts(tmp_path, agent())
    run.manager.states["model"].cached_state_dict["more"] = torch.zeros(1)
    with pytest.raises(StructureMismatch, match=r"model\.more"):
        run.manager.load()


# -- torchtitan's own checkpoints


def test_a_run_of_torchtitans_own_manager_is_continued(
    agent: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ckptd saves the next steps, and says so if torchtitan has written a later one."""
    own = parts(tmp_path, None, own=True, interval=3, keep_latest_k=0)
    train(own, 6)
    first = parts(tmp_path, agent(), interval=1)
    assert first.manager.load() is True
    assert first.progress.step == 6
    assert torch.equal(first.model[0].weight, own.model[0].weight)
    assert next(iter(first.loader)).tolist() == [12, 13]
    assert first.manager.load(step=3) is True
    first.batches = None
    train(first, 4)
    second = parts(tmp_path, agent())
    with caplog.at_level(logging.INFO, "ckptd.agent"):
        assert second.manager.load() is True
    assert second.progress.step == 4
    said = [each.message for each in caplog.records if each.name == "ckptd.agent"]
    assert [text for text in said if text.startswith("training")] == [
        f"training goes on after step 4, the newest that ckptd has; {tmp_path} has step 6, which "
        f"torchtitan has written: set load_step to begin there"
    ]


def test_the_model_of_the_last_step_is_written_by_torchtitan(
    agent: Begin, daemon: Daemon, tmp_path: Path
) -> None:
    """Another run begins with it, and the run itself can be made longer."""
    run = parts(tmp_path / "a", agent(), interval=9, last_save_model_only=True)
    losses = train(run, 3, ends=True)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["step-3"]
    assert (saved(daemon), len(losses)) == ([3], 3)
    longer = parts(tmp_path / "a", agent())
    assert longer.manager.load() is True
    assert longer.progress.step == 3
    other = Agent("tuned", socket=daemon.home.socket)
    tuned = parts(tmp_path / "b", other, initial_load_path=str(tmp_path / "a" / "step-3"))
    assert tuned.manager.load() is True
    other.close()
    assert torch.equal(tuned.model[0].weight, run.model[0].weight)
    assert tuned.progress.step == 0
    new = Agent("new", socket=daemon.home.socket)
    with pytest.raises(InvalidRequest, match="^job 'new' in .* has nothing to recover, and torcht"):
        parts(tmp_path / "a", new).manager.load()
    new.close()


def test_a_step_that_is_saved_twice_is_told(
    agent: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = parts(tmp_path, agent(), interval=2)
    train(run, 2)
    assert run.manager.save(2) is False
    told = [one.getMessage()[:38] for one in caplog.records if one.name == "ckptd.agent"]
    assert told == ["step 2 is saved already: save() was ca"]


def test_another_run_begins_with_the_model_of_a_checkpoint(
    agent: Begin, daemon: Daemon, tmp_path: Path
) -> None:
    first = parts(tmp_path / "a", agent(), interval=2, async_mode="disabled")
    train(first, 2)
    (path,) = (daemon.home.root / "job").glob("step-*")
    other = Agent("tuned", socket=daemon.home.socket)
    tuned = parts(tmp_path / "b", other, initial_load_path=str(path))
    tuned.model[0].weight.data.zero_()
    assert tuned.manager.load() is True
    assert torch.equal(tuned.model[0].weight, first.model[0].weight)
    assert (tuned.progress.step, [dict(one.state) for one in tuned.optimizers]) == (0, [{}])
    stages: list[torch.nn.Module] = [
        torch.nn.ModuleDict({name: torch.nn.Linear(1, 4)}) for name in ("0", "7")
    ]
    with pytest.raises(InvalidRequest, match=r"step-\S+ lacks 7\.weight, 7\.bias: give initial_"):
        integration._load_model(stages, str(path), True)
    integration._load_model(stages[:1] * 2, str(path), True)
    assert torch.equal(stages[0].get_parameter("0.weight"), first.model[0].weight)
    whole: dict[str, Any] = {"initial_load_path": str(path), "initial_load_model_only": False}
    with pytest.raises(InvalidRequest, match=r"^initial_load_path is .*, of which another run can"):
        parts(tmp_path / "b", other, **whole).manager.load()
    other.close()


def test_a_seed_checkpoint_is_torchtitans(agent: Begin, daemon: Daemon, tmp_path: Path) -> None:
    seed = parts(tmp_path, agent())
    torch.nn.init.constant_(seed.model[0].weight, 7)
    assert seed.manager.save(0, last_step=True) is True
    assert ((tmp_path / "step-0" / ".metadata").exists(), saved(daemon)) == (True, [])
    run = parts(tmp_path, agent())
    assert run.manager.load() is True
    assert run.model[0].weight.flatten().tolist() == [7] * 4


# -- mistakes


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework, "version", lambda package: "0.4.0")
    integration._manager.cache_clear()
    with pytest.raises(InvalidRequest, match=r"^torchtitan 0\.4\.0 is installed, with which "):
        _ = integration.CheckpointManager.Config
    with pytest.raises(AttributeError, match=r"has no attribute 'Manager'$"):
        _ = integration.Manager


def test_a_job_that_has_another_name_now_does_not_begin_at_zero(
    agent: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`recover` raises this if the checkpoints of an unnamed job belong to "default"."""

    def recover(state: Any, **options: Any) -> None:
        raise NotFound("job 'train' has no checkpoint, and job 'default' has some")

    given = agent()
    monkeypatch.setattr(given, "recover", recover)
    with pytest.raises(NotFound, match=r"^job 'train' has no checkpoint"):
        parts(tmp_path, given).manager.load()


def test_a_configuration_can_be_pickled() -> None:
    config = integration.CheckpointManager.Config(enable=True, interval=7)
    copied = pickle.loads(pickle.dumps(config))
    assert (type(copied), copied.interval) == (type(config), 7)
    assert copied.to_dict()["async_mode"] == "async"


def test_the_agent_of_the_process_serves_one_model(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", str(daemon.home.socket))
    monkeypatch.setenv("CKPTD_JOB", "job")
    first = parts(tmp_path, None, interval=1)
    train(first, 1)
    with pytest.raises(InvalidRequest, match=r"^the CheckpointManager of another model is open"):
        parts(tmp_path, None).manager.load()
    first.manager.close()
    assert saved(daemon) == [1]
    second = parts(tmp_path, None)
    assert second.manager.load() is True
    second.manager.close()
    assert integration._open == []


def test_a_job_without_a_name_belongs_to_one_folder(
    agent: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`python -m torchtitan.train` is the same script for every model. A job with a name
    goes on, and says so.
    """
    train(parts(tmp_path / "a", agent(), interval=1), 1)
    given = agent()
    link_of(given).unnamed = True
    said = (
        rf"was saved by the run whose checkpoint folder is {tmp_path}/a, and the folder of this "
        rf"run is {tmp_path}/b: "
    )
    ways_out = r"set CKPTD_JOB to a name of its own for a new run, or to job to go on with that "
    with pytest.raises(InvalidRequest, match=said + ways_out):
        parts(tmp_path / "b", given).manager.load()
    assert parts(tmp_path / "b", agent()).manager.load() is True
    assert [each for each in caplog.messages if said in each][-1].endswith(
        "it goes on after step 1 of that run"
    )
    given = agent()
    link_of(given).unnamed = True
    assert parts(tmp_path / "a", given).manager.load() is True


# -- processes


def begin(daemon: Daemon, place: Path, job: str, ranks: int, *program: str) -> str:
    """Run a program in a job, to its end, and return what it has said."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.launcher", str(ranks), *program],
        env=os.environ | {"CKPTD_SOCKET": str(daemon.home.socket), "CKPTD_JOB": job},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    return f"ended with {done.returncode}" if done.returncode == 0 else done.stdout


def example(losses: Path, steps: int, *options: str) -> list[str]:
    path = str(EXAMPLES / "train_torchtitan.py")
    return [path, "--steps", str(steps), "--losses", str(losses), *options]


def test_the_example_is_exact_after_a_kill() -> None:
    script = EXAMPLES / "train_torchtitan.py"
    found = Example(script, 12, random.Random(5)).run(1)
    assert (found.problems, found.steps, found.kills) == ([], 12, 1)


def test_two_ranks_are_exact_after_a_kill() -> None:
    arguments = ("2", str(EXAMPLES / "train_torchtitan.py"))
    found = Example(LAUNCHER, 12, random.Random(4), arguments).run(1)
    assert (found.problems, found.steps, found.kills) == ([], 12, 1)


def test_the_losses_are_those_without_checkpoints(daemon: Daemon, tmp_path: Path) -> None:
    for name, option in (("with", "--checkpoint"), ("without", "--no-checkpoint")):
        begin(daemon, tmp_path, name, 1, *example(tmp_path / name, 5, option))
    found = lines(tmp_path / "with")
    assert (len(found), lines(tmp_path / "without")) == (6, found)


def test_other_data_parallel_ranks_begin_the_data_again_or_stop(
    daemon: Daemon, tmp_path: Path
) -> None:
    """The model is sharded again, and the hash of what one rank recovers is that of two."""
    run = example(tmp_path / "losses", 6)
    assert begin(daemon, tmp_path, "job", 2, *run) == "ended with 0"
    said = begin(daemon, tmp_path, "job", 1, *run)
    assert (
        "the position of the data loader was saved on another number of data-parallel ranks, and "
        "torchtitan cannot divide it: use as many as before, or begin the data again with "
        'exclude_from_loading=["dataloader"]'
    ) in said
    assert begin(daemon, tmp_path, "job", 1, *run, "--exclude=dataloader") == "ended with 0"
    found = lines(tmp_path / "losses")
    assert [line.split()[0] for line in found] == [*"123456", "hash", "hash"]
    assert found[-1] == found[-2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchtitans_trainer_is_exact(daemon: Daemon, tmp_path: Path, ranks: int) -> None:
    """Two layers of its debug model, beside a run with torchtitan's own manager."""
    pytest.importorskip("triton")

    def run(name: str, steps: int, *options: str) -> str:
        program = ["-m", "tests.support.torchtitan_trainer", str(steps)]
        files = [str(tmp_path / name), str(tmp_path / f"{name}-outputs")]
        return begin(daemon, tmp_path, name, ranks, *program, *files, *options)

    assert run("own", 5, "--own") == "ended with 0"
    assert run("parted", 3) == "ended with 0"
    assert run("parted", 5, "--hf") == "ended with 0"
    own, parted = lines(tmp_path / "own"), lines(tmp_path / "parted")
    assert [line.split()[0] for line in parted] == [*"123", "hash", *"45", "hash"]
    assert parted[:3] + parted[4:] == own
    exported = tmp_path / "parted-outputs" / "checkpoint" / "step-5"
    assert sorted(path.name for path in exported.glob("*.safetensors")) == [
        "model-00001-of-00001.safetensors"
    ]
