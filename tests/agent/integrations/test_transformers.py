"""Tests the Trainer of transformers with ckptd attached. A training that is killed with
SIGKILL and started again must end as one that was not interrupted, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint, Schedule
from ckptd.integrations.transformers import attach
from ckptd.shared.errors import InvalidRequest
from tests.support.daemons import Daemon

# The tests import transformers when they run, because that takes seconds.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers and accelerate
    # Each process of a test imports transformers, which takes long on a busy machine.
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "frameworks" / "transformers_trainer.py"


def run(
    command: list[str], home: Path, root: str, *, ranks: int = 1, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python command with a private daemon, on one or more ranks."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    environ = clean | {
        "CKPTD_ROOT": str(home / root),
        "CKPTD_IDLE_TIMEOUT": "1",
        "CKPTD_STALL_BUDGET": "60",
        "XDG_RUNTIME_DIR": str(home),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), *command],
        env=environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("kind", "ranks", "kill_at"),
    [
        ("plain", 1, 10),  # in the middle of an epoch, after one was logged and evaluated
        ("workers", 1, 13),  # in the second epoch
        ("length", 1, 14),  # its order follows from the global generator
        ("stream", 1, 7),
        ("seq2seq", 1, 17),
        ("peft", 1, 10),
        ("sft", 1, 10),
        ("plain", 2, 9),
        ("fsdp2", 2, 10),
    ],
)
def test_a_killed_training_ends_as_an_uninterrupted_one(
    kind: str, ranks: int, kill_at: int, tmp_path: Path
) -> None:
    for package, kinds in (("peft", ["peft"]), ("trl", ["sft"])):
        if kind in kinds and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    command = ["-m", "tests.support.hf_training", kind]
    first = run([*command, str(whole)], tmp_path, "a", ranks=ranks)
    assert first.returncode == 0, first.stderr[-3000:]
    dead = run([*command, str(killed)], tmp_path, "b", ranks=ranks, KILL_AT=str(kill_at))
    assert dead.returncode in ((-9,) if ranks == 1 else (1,)), dead.stderr[-3000:]
    before = len((killed / "log").read_text().splitlines())
    again = run([*command, str(killed)], tmp_path, "b", ranks=ranks)
    assert again.returncode == 0, again.stderr[-3000:]

    lines = (killed / "log").read_text().splitlines()
    assert before > 1
    first_step = int(lines[before].split()[0])
    assert kill_at // 4 * 4 < first_step <= kill_at + 3  # it has not begun again
    assert set(lines) == set((whole / "log").read_text().splitlines())
    outcomes = [
        [(directory / f"outcome-{rank}").read_text() for rank in range(ranks)]
        for directory in (whole, killed)
    ]
    assert outcomes[0] == outcomes[1]


@pytest.mark.usefixtures("processes")
def test_the_example_gives_the_same_losses_when_it_is_killed(tmp_path: Path) -> None:
    """Fork all three lives from one interpreter that has imported transformers."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code = (
        "import os, runpy, signal, sys\n"
        "from transformers import Trainer, TrainerCallback\n"
        "def end(self, args, state, control, **kwargs):\n"
        "    if state.global_step == 8: os.kill(os.getpid(), signal.SIGKILL)\n"
        "script, *lives = sys.argv[1:]\n"
        "for life, losses in enumerate(lives):\n"
        "    if not (child := os.fork()):\n"
        "        os.environ['CKPTD_ROOT'] = f'{losses}-root'\n"
        "        if life == 1: TrainerCallback.on_step_end = end\n"
        "        sys.argv = [script, '--steps', '14', '--losses', losses]\n"
        "        runpy.run_path(script, run_name='__main__')\n"
        "        sys.exit()\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    print(f'life {life}: {code}', flush=True)\n"
    )
    lives = run(["-c", code, *map(str, (EXAMPLE, whole, killed, killed))], tmp_path, "root")
    ended = [line for line in lives.stdout.splitlines() if line.startswith("life ")]
    assert ended == ["life 0: 0", "life 1: -9", "life 2: 0"], lives.stderr[-3000:]
    lines, again = whole.read_text().splitlines(), killed.read_text().splitlines()
    assert [line.split()[0] for line in lines] == [*map(str, range(1, 15)), "hash"]
    assert [line.split()[0] for line in again] == [
        *map(str, range(1, 8)),
        *map(str, range(7, 15)),
        "hash",
    ]
    assert set(again) == set(lines)


# -- in this process, with a daemon


@pytest.fixture
def agents(daemon: Daemon) -> Any:
    """A function that makes the agent of another life of one job."""
    made: list[Agent] = []

    def make(job: str = "job") -> Agent:
        for agent in made:
            agent.close()
        made.append(Agent(job, socket=daemon.home.socket))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def other(directory: Path, **changes: Any) -> Any:
    from tests.support.hf_training import trainer_of

    return trainer_of(
        "plain", directory, **{"save_strategy": "no", "load_best_model_at_end": False} | changes
    )


def same_parameters(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(mine, other) for mine, other in pairs)


def test_a_finished_training_has_nothing_left_to_do(
    agents: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = other(tmp_path)
    attach(first, every_steps=4, agent=agents())
    result = first.train()
    second = other(tmp_path)
    agent = agents()
    attach(second, every_steps=4, agent=agent)
    again = second.train()
    assert "nothing is left to do: step 21 of 21 is saved" in caplog.messages
    assert again.training_loss.hex() == result.training_loss.hex()
    assert agent.last_step == -1  # nothing was saved again
    assert same_parameters(second.model, first.model)
    steps = [entry["step"] for entry in second.state.log_history if "loss" in entry]
    assert steps == [3, 6, 9, 12, 15, 18, 21]


def test_more_epochs_continue_a_finished_training(agents: Any, tmp_path: Path) -> None:
    """With a constant learning rate and without the evaluation at the end, which draws
    random numbers, the longer training equals an uninterrupted one.
    """
    constant: Any = {"lr_scheduler_type": "constant", "eval_strategy": "no"}
    whole = other(tmp_path, num_train_epochs=3, **constant)
    attach(whole, every_steps=4, agent=agents("whole"))
    whole.train()
    for epochs in (2, 3):
        trainer = other(tmp_path, num_train_epochs=epochs, **constant)
        attach(trainer, every_steps=4, agent=agents("parts"))
        trainer.train()
    assert trainer.state.global_step == 21
    assert same_parameters(trainer.model, whole.model)


def test_what_was_logged_is_saved_as_metrics(agents: Any, tmp_path: Path, daemon: Daemon) -> None:
    trainer = other(tmp_path, max_steps=12)
    attach(trainer, schedule=Schedule(every_steps=12, agent=(agent := agents())))
    trainer.train()
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.step == 12
        (logged,) = [
            entry for entry in trainer.state.log_history if entry["step"] == 12 and "loss" in entry
        ]
        assert checkpoint.manifest.metrics["loss"] == logged["loss"]
        (evaluated,) = [
            entry
            for entry in trainer.state.log_history
            if entry["step"] == 12 and "eval_loss" in entry
        ]
        assert checkpoint.manifest.metrics["eval_loss"] == evaluated["eval_loss"]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_were_trained_on_are_not_loaded_again(
    agents: Any, tmp_path: Path, workers: int
) -> None:
    from tests.support.hf_training import Sentences

    class Counted(Sentences):
        """Sentences that count how many of them were loaded, by workers too."""

        loaded = multiprocessing.Value("q")

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            with self.loaded.get_lock():
                self.loaded.value += 1
            return super().__getitem__(index)

    def quiet(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    trainers: list[Any] = []
    for stop in (17, 10, 17):  # an epoch has 7 steps of 2 batches
        trainer = other(tmp_path, dataloader_num_workers=workers, eval_strategy="no")
        trainer.train_dataset = Counted()
        trainer.data_collator = quiet
        attach(trainer, every_steps=4, agent=agents("whole" if not trainers else "parts"))
        Counted.loaded.value = 0
        trainer.args.max_steps = stop
        trainer.args.lr_scheduler_type = "constant"
        trainer.train()
        trainers.append(trainer)
    # 7 of 13 batches are left of the second epoch, and 6 of the third; one is ahead
    expected = 37 - 6 * 3 + 7 * 3
    if workers:
        assert expected <= Counted.loaded.value <= 37 - 6 * 3 + 37  # they load ahead
    else:
        assert Counted.loaded.value == expected
    assert same_parameters(trainers[2].model, trainers[0].model)


# -- bad input


def test_a_second_attach_is_refused(agents: Any, tmp_path: Path) -> None:
    trainer = other(tmp_path)
    attach(trainer, every_steps=4, agent=agents())
    with pytest.raises(
        InvalidRequest, match=r"^ckptd is attached to this Trainer already: call attach\(\) once$"
    ):
        attach(trainer, every_steps=4)


def test_attach_after_the_training_began_is_refused(agents: Any, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    said: list[str] = []

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with pytest.raises(InvalidRequest) as caught:
                attach(trainer, every_steps=4)
            said.append(str(caught.value))
            control.should_training_stop = True

    trainer = other(tmp_path)
    trainer.add_callback(Late())
    trainer.train()
    assert said == [
        "the training of this Trainer has begun already: call attach() before train(); if an "
        "earlier train() has failed, make a new Trainer"
    ]
    with pytest.raises(InvalidRequest, match="^the training of this Trainer has begun already"):
        attach(trainer, every_steps=4)
    with pytest.raises(InvalidRequest, match="^attach.. got a .*; expected a Trainer of transfor"):
        attach(trainer.model, every_steps=4)


def first_life(agents: Any, directory: Path, **changes: Any) -> None:
    """Train the first 10 of 21 steps, and save step 10 as a training that was stopped."""
    trainer = other(directory, **changes)
    attach(trainer, every_steps=4, agent=agents())
    trainer.args.max_steps = 10
    trainer.train()


def test_a_dataset_of_another_length_is_refused(agents: Any, tmp_path: Path) -> None:
    from tests.support.hf_training import Sentences

    first_life(agents, tmp_path)
    trainer = other(tmp_path)
    trainer.train_dataset = Sentences(40)
    attach(trainer, every_steps=4, agent=(agent := agents()))
    with pytest.raises(
        InvalidRequest,
        match="^the training data have 40 samples, and had 37 when step 10 was saved, so that the "
        "position in them is lost: give the same data, or set ignore_data_skip=True",
    ):
        trainer.train()
    assert agent.last_step == -1


def test_ignore_data_skip_begins_the_epoch_again(
    agents: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.support.hf_training import Sentences

    first_life(agents, tmp_path)
    trainer = other(tmp_path, ignore_data_skip=True)
    trainer.train_dataset = Sentences(40)
    attach(trainer, every_steps=4, agent=agents())
    trainer.train()
    assert "ignore_data_skip is set: the epoch begins again with its first batch" in caplog.messages
    (record,) = [one for one in caplog.records if "resumes" in one.getMessage()]
    assert (record.levelname, record.getMessage().partition(" of ")[0]) == (
        "WARNING", "training resumes after step 10",
    )  # fmt: skip
    assert record.getMessage().endswith((", which was recovered from memory", " from storage"))
    assert trainer.state.global_step == 10 + 2 * 7  # two epochs of 14 batches


def test_another_batch_size_resumes_at_the_same_sample(
    agents: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_life(agents, tmp_path)
    trainer = other(tmp_path, per_device_train_batch_size=6)
    attach(trainer, every_steps=4, agent=agents())
    trainer.train()
    # Step 10 has trained 6 batches of 3 samples of epoch 1, which is 3 batches of 6.
    assert (
        "a step now takes 12 samples, in batches of 6, and took 6, in batches of 3, when step 10 "
        "was saved: the epoch resumes at sample 12, after 18 samples were trained; a learning "
        "rate schedule goes on with the number of steps"
    ) in caplog.messages
    assert trainer.state.global_step == 10 + 3 + 4  # of 4 steps an epoch
    assert trainer.state.epoch == 3.0


def test_a_newer_directory_of_the_trainer_stops_the_training(agents: Any, tmp_path: Path) -> None:
    from tests.support.hf_training import trainer_of

    first_life(agents, tmp_path)
    theirs = trainer_of("plain", tmp_path / "theirs", save_steps=12, max_steps=12)
    theirs.train()
    trainer = other(tmp_path)
    attach(trainer, every_steps=4, agent=agents())
    folder = str(tmp_path / "theirs" / "checkpoint-12")
    refusal = (
        f"resume_from_checkpoint={folder!r} has step 12, and the newest snapshot of job 'job' has "
        "step 10: leave out resume_from_checkpoint to resume from step 10, or name another job "
        "with CKPTD_JOB to resume from step 12"
    )
    with pytest.raises(InvalidRequest, match=f"^{re.escape(refusal)}$"):
        trainer.train(resume_from_checkpoint=folder)


def test_an_older_directory_is_used_once_and_then_the_snapshots(
    agents: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first run takes the training over from the Trainer's own checkpoint. A restart
    with the same arguments resumes from the snapshot.
    """
    from tests.support.hf_training import trainer_of

    theirs = trainer_of("plain", tmp_path / "theirs", save_steps=8)
    theirs.args.save_total_limit = None
    theirs.train()
    folder = str(tmp_path / "theirs" / "checkpoint-8")
    lives = []
    for stop in (10, 0):
        trainer = other(tmp_path)
        attach(trainer, every_steps=2, agent=agents())
        trainer.args.max_steps = stop or -1
        trainer.train(resume_from_checkpoint=folder)
        lives.append(trainer)
    assert [life.state.global_step for life in lives] == [10, 21]
    assert (
        f"resume_from_checkpoint={folder!r}, of step 8, is not used, because job 'job' has a "
        "snapshot of step 10; to begin from that directory, name another job with CKPTD_JOB"
    ) in caplog.messages


def test_a_hyperparameter_search_is_refused(agents: Any, tmp_path: Path) -> None:
    trainer = other(tmp_path)
    attach(trainer, every_steps=4, agent=agents())
    trainer._hp_search_setup = lambda trial: None
    with pytest.raises(InvalidRequest, match="^ckptd cannot follow a hyperparameter search"):
        trainer.train(trial={"learning_rate": 1e-3})


def test_a_model_that_is_replaced_after_attach_is_the_one_that_is_saved(
    agents: Any, tmp_path: Path, daemon: Daemon
) -> None:
    trainer = other(tmp_path)
    attach(trainer, every_steps=4, agent=(agent := agents()))
    trainer.model = trainer.model_wrapped = other(tmp_path).model
    trainer.train()
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        saved = checkpoint.tensor("model.transformer.wte.weight")
    assert torch.equal(saved, trainer.model.transformer.wte.weight)
