"""Tests a loop of accelerate with ckptd attached. A training that is killed with SIGKILL
and started again must end as one that was not interrupted, bit for bit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from ckptd.agent import Agent, Schedule
from ckptd.integrations.accelerate import attach
from ckptd.shared.errors import InvalidRequest
from tests.support.accelerate_training import Training
from tests.support.daemons import Daemon

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of accelerate
    # Each process of a test imports accelerate, which takes long on a busy machine.
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "frameworks" / "accelerate_loop.py"
STEPS = 17
"""The steps of a run of the example. An epoch has 6, and the last one has 1 sample."""


def life(home: Path, losses: Path, *, kill_at: int = -1, workers: int = 0, ranks: int = 1) -> int:
    """Run the example, and kill it after a step, before the snapshot of this step."""
    arguments = ["--steps", str(STEPS), "--workers", str(workers), "--losses", str(losses)]
    script = home / "life.py"
    script.write_text(
        "import os, runpy, signal, sys\n"
        f"sys.argv = {[str(EXAMPLE), *arguments]!r}\n"
        "from ckptd.integrations.accelerate import TrainingRun\n"
        "take = TrainingRun._take\n"
        "def end(self):\n"
        f"    if self.step == {kill_at}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return take(self)\n"
        "TrainingRun._take = end\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), str(script)],
        env=clean
        | {
            "CKPTD_ROOT": str(home / f"root-{losses.name}"),
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
    )
    assert done.returncode == 0 or kill_at > 0, done.stderr[-3000:]
    return done.returncode


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("kill_at", "workers", "ranks"),
    [
        (8, 0, 1),
        (14, 2, 1),
        (7, 0, 2),
    ],
)
def test_a_killed_training_ends_as_an_uninterrupted_one(
    kill_at: int, workers: int, ranks: int, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    life(tmp_path, whole, workers=workers, ranks=ranks)
    code = life(tmp_path, killed, kill_at=kill_at, workers=workers, ranks=ranks)
    assert code == (-signal.SIGKILL if ranks == 1 else 1)
    life(tmp_path, killed, workers=workers, ranks=ranks)
    lines, again = whole.read_text().splitlines(), killed.read_text().splitlines()
    assert [line.split()[0] for line in lines] == [*map(str, range(1, STEPS + 1)), "hash"]
    assert len(again) == len(lines) + kill_at - (kill_at - 1) // 3 * 3
    assert set(again) == set(lines)


# -- in this process, with a daemon


@pytest.fixture
def agents(daemon: Daemon) -> Iterator[Callable[[], Agent]]:
    """A function that makes the agent of another life of one job."""
    made: list[Agent] = []

    def make() -> Agent:
        for agent in made:
            agent.close()
        made.append(Agent("job", socket=daemon.home.socket))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def test_steps_count_optimizer_steps_and_resume(agents: Any) -> None:
    first = Training(accumulated=2).prepare()
    run = attach(first.accelerator, every_steps=2, agent=agents())
    assert (run.recovered, run.step) == (None, 0)
    seen = first.train(run, epochs=3, steps=4)
    assert seen == [*[(0, step) for step in (1, 1, 2, 2, 3, 3)], (1, 4), (1, 4)]
    second = Training(accumulated=2).prepare()
    run = attach(second.accelerator, schedule=Schedule(every_steps=2, agent=agents()))
    assert (run.step, second.counter.batches) == (4, 8)
    assert torch.equal(second.model.weight, first.model.weight)
    assert second.train(run, epochs=2) == [(1, 5), (1, 5), (1, 6), (1, 6)]
    assert second.counter.batches == 12


def test_a_finished_training_has_nothing_left_to_do(
    agents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = Training().prepare()
    assert (
        len(first.train(attach(first.accelerator, every_steps=6, agent=agents()), epochs=2)) == 12
    )
    second = Training().prepare()
    run = attach(second.accelerator, every_steps=6, agent=agents())
    assert second.train(run, epochs=2) == []
    assert "nothing is left to do: step 12 is saved" in caplog.messages
    third = Training().prepare()
    run = attach(third.accelerator, every_steps=6, agent=agents())
    assert third.train(run, epochs=3) == [(2, step) for step in range(13, 19)]
    (record,) = [one for one in caplog.records if "resumes" in one.getMessage()]
    assert (record.levelname, record.getMessage().partition(":")[0]) == (
        "WARNING", "training resumes after step 12, in epoch 2",
    )  # fmt: skip


def test_another_batch_size_resumes_at_the_same_sample(
    agents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = Training().prepare()
    first.train(attach(first.accelerator, every_steps=2, agent=agents()), epochs=2, steps=4)
    second = Training(batch_size=3).prepare()
    run = attach(second.accelerator, every_steps=2, agent=agents())
    # 8 samples are trained, and 2 batches of 3 hold 6 of them
    assert second.train(run, epochs=1) == [(0, 5), (0, 6)]
    assert (
        "a step now takes 3 samples, in batches of 3, and took 2, in batches of 2, when step 4 was "
        "saved: the epoch resumes at sample 6, after 8 samples were trained; a learning rate "
        "schedule goes on with the number of steps"
    ) in caplog.messages


def test_data_of_another_length_are_refused(agents: Any) -> None:
    first = Training().prepare()
    first.train(attach(first.accelerator, every_steps=2, agent=agents()), epochs=2, steps=4)
    second = Training(samples=14).prepare()
    run = attach(second.accelerator, every_steps=2, agent=agents())
    with pytest.raises(
        InvalidRequest, match="^the training data have 14 samples, and had 12 when step 4 was saved"
    ):
        second.train(run, epochs=2)


def test_attach_before_prepare_is_refused() -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"^no model is prepared: call attach\(\) after accelerator.prepare\(\)$",
    ):
        attach(Training().accelerator, every_steps=2)


def test_a_second_attach_is_refused(agents: Any) -> None:
    training = Training().prepare()
    attach(training.accelerator, every_steps=2, agent=agents())
    with pytest.raises(InvalidRequest, match="^ckptd is attached to this Accelerator already"):
        attach(training.accelerator, every_steps=2)


def test_what_is_prepared_after_attach_is_refused(agents: Any) -> None:
    training = Training().prepare()
    run = attach(training.accelerator, every_steps=2, agent=agents())
    training.accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(
        InvalidRequest, match=r"^something was prepared or registered after attach\(\)"
    ):
        run.batches(training.loader, epochs=1)


def test_a_loader_that_is_not_prepared_is_refused(agents: Any) -> None:
    training = Training().prepare()
    run = attach(training.accelerator, every_steps=2, agent=agents())
    with pytest.raises(InvalidRequest, match="^this loader is not prepared"):
        run.batches(training.plain, epochs=1)


def test_a_second_loop_is_refused(agents: Any) -> None:
    training = Training().prepare()
    run = attach(training.accelerator, every_steps=2, agent=agents())
    training.train(run, epochs=1)
    with pytest.raises(InvalidRequest, match=r"^batches\(\) was called already"):
        run.batches(training.loader, epochs=1)


def step_outside(training: Training) -> None:
    """Train one batch in a loop over the loader itself."""
    (x,) = next(iter(training.loader))
    training.accelerator.backward(training.model(x).sum())
    training.optimizer.step()


def test_a_loop_that_is_not_that_of_batches_is_told(
    agents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = Training().prepare()
    run = attach(first.accelerator, every_steps=2, agent=agents())
    first.train(run, epochs=1)
    assert caplog.messages == []
    second = Training().prepare()
    attach(second.accelerator, every_steps=2, agent=agents())
    for _ in range(2):
        step_outside(second)
    (told,) = [one for one in caplog.messages if "steps outside of the loop" in one]
    assert told.startswith("an optimizer steps outside of the loop of run.batches(): attach() take")


def test_the_load_state_of_accelerate_does_not_replace_what_was_loaded(
    agents: Any, tmp_path: Path
) -> None:
    first = Training().prepare()
    first.train(attach(first.accelerator, every_steps=6, agent=agents()), epochs=1)
    first.accelerator.save_state(str(tmp_path / "own"))
    second = Training().prepare()
    attach(second.accelerator, every_steps=6, agent=agents())
    with pytest.raises(InvalidRequest, match=r"^load_state\(.*own'\) would replace step 6, which"):
        second.accelerator.load_state(str(tmp_path / "own"))
    assert torch.equal(second.model.weight, first.model.weight)


def test_a_scheduler_that_is_not_prepared_is_told(
    agents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for prepared in (True, False):
        training = Training()
        if prepared:
            training.prepare()
        else:
            made = training.accelerator.prepare(training.model, training.optimizer)
            training.model, training.optimizer = made
        attach(training.accelerator, every_steps=6, agent=agents())
    (told,) = [one for one in caplog.messages if "scheduler" in one]
    assert told.startswith("a learning rate scheduler uses this optimizer and is not prepared: it")


def test_batches_that_were_trained_on_are_not_loaded_again(agents: Any) -> None:
    class Counted(TensorDataset):
        """A data set that counts the samples that are loaded."""

        loaded = 0

        def __getitem__(self, index: int) -> Any:
            self.loaded += 1
            return super().__getitem__(index)

    def training(data: Counted) -> Training:
        made = Training()
        made.plain = DataLoader(data, batch_size=2, shuffle=True)
        return made.prepare()

    x = torch.randn(12, 2, device="cpu", dtype=torch.float32)
    before, after = Counted(x), Counted(x)
    first = training(before)
    seen = first.train(attach(first.accelerator, every_steps=2, agent=agents()), epochs=1, steps=4)
    assert (len(seen), before.loaded) == (4, 10)  # one batch ahead
    second = training(after)
    run = attach(second.accelerator, every_steps=2, agent=agents())
    assert second.train(run, epochs=1) == [(0, 5), (0, 6)]
    assert after.loaded == 4
    assert type(second.loader.batch_sampler) is BatchSampler  # as before
