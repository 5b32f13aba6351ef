"""Tests `save_state` and `load_state` of accelerate with ckptd attached: everything that
accelerate saves comes back, and a killed training ends as an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.integrations.accelerate import attach
from ckptd.integrations.accelerate_states import loader_state, set_loader_state
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound
from tests.support.accelerate_training import STEPS, Training
from tests.support.daemons import Daemon

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of accelerate
    # Each process of a test imports accelerate, which takes long on a busy machine.
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[3]


def life(home: Path, *, ranks: int, kill_at: int = -1) -> int:
    """Run the program with a loop of its own in a directory. Return its exit code."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [
            sys.executable, *(torchrun if ranks > 1 else []), "-m",
            "tests.support.accelerate_training", str(home), str(kill_at),
        ],
        env=clean
        | {
            "CKPTD_ROOT": str(home / "root"),
            "CKPTD_IDLE_TIMEOUT": "1",
            "CKPTD_STALL_BUDGET": "60",
            "XDG_RUNTIME_DIR": str(home),
            "OMP_NUM_THREADS": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 or kill_at > 0, done.stderr[-3000:]
    return done.returncode


@pytest.mark.frameworks
@pytest.mark.parametrize(("kill_at", "ranks"), [(8, 1), (8, 2)])
def test_a_killed_loop_goes_on_from_its_newest_directory(
    kill_at: int, ranks: int, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for home in (whole, killed):
        home.mkdir()
    life(whole, ranks=ranks)
    assert life(killed, ranks=ranks, kill_at=kill_at) == (-signal.SIGKILL if ranks == 1 else 1)
    life(killed, ranks=ranks)
    for rank in range(ranks):
        lines = (whole / f"log-{rank}").read_text().splitlines()
        again = (killed / f"log-{rank}").read_text().splitlines()
        assert [line.split()[0] for line in lines] == [str(step) for step in range(1, STEPS + 1)]
        assert [line.split()[0] for line in again[kill_at:]] == [
            str(step) for step in range(7, STEPS + 1)
        ]
        assert set(again) == set(lines)
    left = sorted(one.name for one in (killed / "checkpoints").iterdir())
    assert left == ["checkpoint_3", "checkpoint_4"]  # total_limit=2


# -- in this process, with a daemon


@pytest.fixture
def agents(daemon: Daemon) -> Iterator[Callable[..., Agent]]:
    """A function that makes the agent of another life of a job."""
    made: list[Agent] = []

    def make(job: str = "job") -> Agent:
        for agent in made:
            agent.close()
        made.append(Agent(job, socket=daemon.home.socket))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def steps(training: Training, number: int) -> None:
    """Train on the first batches, in a loop without ckptd."""
    for _, (x,) in zip(range(number), training.loader, strict=False):
        training.trained(x)


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def test_all_that_accelerate_saves_comes_back(agents: Any, tmp_path: Path) -> None:
    first = Training().prepare()
    first.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attach(first.accelerator, save_state=True, agent=agents())
    steps(first, 3)
    first.accelerator.step = 5
    assert first.accelerator.save_state(tmp_path / "a" / "third") == tmp_path / "a" / "third"
    at = [first.hashed(), first.scheduler.get_last_lr(), drawn()]

    second = Training().prepare()
    second.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run = attach(second.accelerator, save_state=True, agent=agents())
    assert run.recovered is None  # nothing is loaded by itself
    steps(second, 5)
    second.accelerator.load_state(str(tmp_path / "a" / "third"))
    assert [second.hashed(), second.scheduler.get_last_lr(), drawn()] == at
    assert second.accelerator.scaler.get_scale() == 8.0
    assert (second.counter.batches, second.accelerator.step) == (3, 5)
    assert second.accelerator.save_iteration == 1


def test_a_directory_is_loaded_and_not_the_newest(agents: Any, tmp_path: Path) -> None:
    training = Training().prepare()
    agent = agents()
    attach(training.accelerator, save_state=True, agent=agent)
    hashes = []
    for number in range(3):
        steps(training, 1)
        hashes.append(training.hashed())
        training.accelerator.save_state(tmp_path / f"{number}")
    references = [json.loads((tmp_path / f"{n}" / "ckptd.json").read_text()) for n in range(3)]
    assert references == [{"job": "job", "attempt": 1, "step": step} for step in range(3)]
    training.accelerator.load_state(tmp_path / "1")
    assert training.hashed() == hashes[1]
    training.accelerator.load_state(tmp_path / "2")
    assert training.hashed() == hashes[2]
    steps(training, 1)
    training.accelerator.load_state()
    assert training.hashed() == hashes[2]
    steps(training, 1)
    training.accelerator.save_state(tmp_path / "1")  # a directory may be used again
    last = training.hashed()
    steps(training, 1)
    training.accelerator.load_state(tmp_path / "1")
    assert training.hashed() == last


def test_options_of_a_snapshot_are_passed_on(agents: Any, daemon: Daemon) -> None:
    training = Training().prepare()
    agent = agents()
    attach(training.accelerator, save_state=True, agent=agent)
    assert training.accelerator.save_state(tag="best", metrics={"loss": 0.5}) is None
    agent.close()
    assert Checkpoint.open(daemon.home.root / "job", "best").metrics == {"loss": 0.5}


def life_with_automatic_names(agents: Any, directory: Path, limit: int) -> Training:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(
        str(directory), automatic_checkpoint_naming=True, total_limit=limit
    )
    training = Training(project_config=project).prepare()
    attach(training.accelerator, save_state=True, agent=agents())
    return training


def test_automatic_names_count_on(agents: Any, tmp_path: Path) -> None:
    life = partial(life_with_automatic_names, agents, tmp_path, limit=2)
    first = life()
    with pytest.raises(NotFound, match="has no directory of save_state"):
        first.accelerator.load_state()
    for _ in range(11):
        first.accelerator.save_state()
    places = tmp_path / "checkpoints"
    assert sorted(one.name for one in places.iterdir()) == ["checkpoint_10", "checkpoint_9"]
    second = life()
    second.accelerator.load_state()
    assert second.accelerator.save_iteration == 11
    (places / "checkpoint_11").mkdir()
    (places / "checkpoint_11" / "notes").touch()
    with pytest.raises(InvalidRequest, match="checkpoint_11 exists already, and ckptd has not"):
        second.accelerator.save_state()
    assert second.accelerator.save_iteration == 11
    (places / "checkpoint_11" / "notes").unlink()
    second.accelerator.save_state()
    assert sorted(one.name for one in places.iterdir()) == ["checkpoint_10", "checkpoint_11"]


def test_a_directory_whose_save_was_killed_is_passed_over_and_used_again(
    agents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = partial(life_with_automatic_names, agents, tmp_path, limit=1)
    places = tmp_path / "checkpoints"
    life().accelerator.save_state()
    for owner, name in ((Path, "mkdir"), (Path, "touch"), (os, "fsync")):
        training = life()
        training.accelerator.load_state()

        original = getattr(owner, name)

        def end(at: Any, *arguments: Any, call: Any = original, **options: Any) -> None:
            call(at, *arguments, **options)
            if type(at) is int or places in at.parents:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, end)
            with pytest.raises(KeyboardInterrupt):
                training.accelerator.save_state()
        assert (places / "checkpoint_0" / "ckptd.json").exists(), "the limit keeps the last one"
        with pytest.raises(NotFound, match="checkpoint_1 refers to no snapshot, because"):
            training.accelerator.load_state(places / "checkpoint_1")
    training = life()
    training.accelerator.load_state()
    assert training.accelerator.save_state() == places / "checkpoint_1"
    assert [one.name for one in places.iterdir()] == ["checkpoint_1"]


@pytest.mark.parametrize("text", ["", "{", "7", "{}", '{"job": "job", "attempt": 1, "step": null}'])
def test_a_damaged_reference_is_named(agents: Any, tmp_path: Path, text: str) -> None:
    training = Training().prepare()
    attach(training.accelerator, save_state=True, agent=agents())
    (tmp_path / "ckptd.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"ckptd\.json is damaged: delete its directory"):
        training.accelerator.load_state(tmp_path)


def test_a_directory_of_accelerate_itself_is_loaded(agents: Any, tmp_path: Path) -> None:
    first = Training().prepare()
    attach(first.accelerator, every_steps=2, agent=agents())  # leaves the methods as they are
    steps(first, 2)
    first.accelerator.save_state(str(tmp_path / "theirs"))
    assert not (tmp_path / "theirs" / "ckptd.json").exists()
    second = Training().prepare()
    attach(second.accelerator, save_state=True, agent=agents())
    second.accelerator.load_state(tmp_path / "theirs")
    assert second.hashed() == first.hashed()


def test_a_loop_goes_on_where_save_state_was_called(agents: Any, tmp_path: Path) -> None:
    first = Training().prepare()
    run = attach(first.accelerator, every_steps=2, save_state=True, agent=agents())
    outside = r"^save_state\(\) was called outside of the loop of batches\(\)"
    with pytest.raises(InvalidRequest, match=outside):
        first.accelerator.save_state(tmp_path / "begin")
    batches = run.batches(first.loader, epochs=1)
    for _epoch, _step, (x,) in islice(batches, 3):
        first.trained(x)
    first.accelerator.save_state(tmp_path / "third")
    first.accelerator.save_state(tmp_path / "again")  # nothing is saved twice
    with pytest.raises(InvalidRequest, match="^step 3 is saved already: give tag to"):
        first.accelerator.save_state(tmp_path / "again", tag="best")
    with pytest.raises(InvalidRequest, match=r"^load_state\(\) was called inside the loop"):
        first.accelerator.load_state(tmp_path / "third")
    for _epoch, _step, (x,) in batches:
        first.trained(x)
    text = (tmp_path / "third" / "ckptd.json").read_text()
    assert json.loads(text) == {"job": "job", "attempt": 1, "step": 3}
    assert (tmp_path / "again" / "ckptd.json").read_text() == text
    first.accelerator.save_state(tmp_path / "end")  # after the loop
    end = first.hashed()

    second = Training().prepare()
    run = attach(second.accelerator, every_steps=2, save_state=True, agent=agents())
    assert (run.step, second.hashed()) == (6, end)
    second.accelerator.load_state(tmp_path / "third")
    assert (run.step, second.counter.batches) == (3, 3)
    assert second.train(run, epochs=1) == [(0, 4), (0, 5), (0, 6)]
    assert second.hashed() == end

    second.accelerator.load_state(tmp_path / "third")
    with pytest.raises(InvalidRequest, match=outside):
        second.accelerator.save_state()


def test_a_loop_without_a_schedule_saves_only_by_save_state(agents: Any, tmp_path: Path) -> None:
    whole = Training().prepare()
    whole.train(attach(whole.accelerator, every_steps=4, agent=agents("whole")), epochs=2)
    first = Training().prepare()
    run = attach(first.accelerator, save_state=True, agent=(agent := agents()))
    for _epoch, _step, (x,) in islice(run.batches(first.loader, epochs=2), 8):
        first.trained(x)
    assert agent.last_step == -1
    first = Training().prepare()
    run = attach(first.accelerator, save_state=True, agent=(agent := agents()))
    batches = run.batches(first.loader, epochs=2)
    for _epoch, _step, (x,) in islice(batches, 8):
        first.trained(x)
    first.accelerator.save_state()
    assert agent.last_step == 8
    second = Training().prepare()
    run = attach(second.accelerator, save_state=True, agent=agents())
    second.accelerator.load_state()
    assert second.train(run, epochs=2) == [(1, step) for step in range(9, 13)]
    assert second.hashed() == whole.hashed()


def test_gradients_that_are_accumulated_are_not_lost(agents: Any) -> None:
    training = Training(accumulated=2).prepare()
    attach(training.accelerator, save_state=True, agent=agents())
    steps(training, 1)
    with pytest.raises(
        InvalidRequest, match=r"^save_state\(\) was called between accumulated batches"
    ):
        training.accelerator.save_state()
    assert training.accelerator.save_iteration == 0


def test_a_position_outside_of_batches_is_not_guessed(agents: Any) -> None:
    training = Training().prepare()
    attach(training.accelerator, save_state=True, agent=agents())
    steps(training, 2)
    training.accelerator.save_state()
    second = Training().prepare()
    run = attach(second.accelerator, every_steps=2, agent=agents())
    with pytest.raises(
        InvalidRequest, match=r"^step 0 was saved by save_state\(\) outside of a loop of batches"
    ):
        run.batches(second.loader, epochs=1)


def test_hooks_save_and_load_models_themselves(agents: Any, tmp_path: Path) -> None:
    training = Training().prepare()
    accelerator = training.accelerator
    attach(accelerator, save_state=True, agent=agents())

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        torch.save(weights.pop(), Path(directory) / "mine")
        assert models == [training.model]

    def load(models: list[Any], directory: str) -> None:
        state = torch.load(Path(directory) / "mine")
        models.pop().load_state_dict({key: value + 1 for key, value in state.items()})

    saving = accelerator.register_save_state_pre_hook(save)
    loading = accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(tmp_path / "a")
    weight = training.model.weight.detach().clone()
    steps(training, 2)
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(training.model.weight, weight + 1)
    assert training.counter.batches == 0
    with pytest.raises(InvalidRequest, match=r"^a hook of register_load_state_pre_hook\(\) needs"):
        accelerator.load_state()
    loading.remove()
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(training.model.weight, weight)
    with pytest.raises(InvalidRequest, match=r"^a hook of register_save_state_pre_hook\(\) needs"):
        accelerator.save_state()
    saving.remove()

    def change(models: list[Any], weights: list[Any], directory: str) -> None:
        weights[0]["weight"] = weights[0]["weight"].half()

    accelerator.register_save_state_pre_hook(change)
    with pytest.raises(InvalidRequest, match="has changed the weights, but a snapshot has those"):
        accelerator.save_state(tmp_path / "b")


def test_other_snapshots_are_refused(agents: Any, tmp_path: Path) -> None:
    first = Training().prepare()
    attach(first.accelerator, save_state=True, agent=agents())
    with pytest.raises(NotFound, match=r"^job 'job' has no snapshot: call save_state\(\) first"):
        first.accelerator.load_state()
    first.accelerator.save_state(tmp_path / "a")
    with pytest.raises(NotFound, match=re.escape(f"{tmp_path / 'b'} is no directory")):
        first.accelerator.load_state(tmp_path / "b")
    with pytest.raises(InvalidRequest, match="was called with strict, which a snapshot cannot"):
        first.accelerator.load_state(tmp_path / "a", strict=False)
    first.accelerator.load_state(tmp_path / "a", map_location="cpu")
    second = Training().prepare()
    attach(second.accelerator, save_state=True, agent=agents())
    second.accelerator.save_state()
    with pytest.raises(
        InvalidRequest, match="refers to step 0 of attempt 1, and attempt 2 has saved this step"
    ):
        second.accelerator.load_state(tmp_path / "a")
    third = Training().prepare()
    attach(third.accelerator, save_state=True, agent=agents("other"))
    with pytest.raises(
        InvalidRequest, match="refers to a snapshot of job 'job', and this is job 'other'"
    ):
        third.accelerator.load_state(tmp_path / "a")


def test_the_state_of_a_loader_comes_back() -> None:
    pytest.importorskip("torchdata")
    from accelerate.utils import DataLoaderConfiguration

    def loader() -> Any:
        config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
        return Training(dataloader_config=config).prepare().loader

    first = loader()
    first.set_epoch(2)
    given = iter(first)
    next(given)
    saved = loader_state(first)
    rest = [batch[0].tolist() for batch in given]
    second = loader()
    assert loader_state(second) != saved
    set_loader_state(second, saved)
    second.set_epoch(2)
    assert [batch[0].tolist() for batch in second] == rest
    assert saved["seed"][1] == 2
    assert loader_state(Training().prepare().loader) == {}
