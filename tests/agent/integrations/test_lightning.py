"""Tests that a Lightning training that was killed equals one that was not."""

from __future__ import annotations

import copy
import csv
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ckptd.agent import Agent, Schedule
from ckptd.integrations.lightning import attach
from ckptd.shared.errors import InvalidRequest, StructureMismatch
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    import lightning as L

    from tests.support.lightning_trainer import Data

# The tests import lightning when they run, because that takes seconds.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on speed
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "frameworks" / "train_lightning.py"


def environment(home: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    return {
        **clean,
        "CKPTD_ROOT": str(home / "root"),
        "CKPTD_IDLE_TIMEOUT": "1",
        "CKPTD_STALL_BUDGET": "60",
        "XDG_RUNTIME_DIR": str(home),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }


def life(home: Path, variant: str, kill_at: int = 0, ranks: int = 1) -> str:
    """Run the trainer until it ends or kills itself, and return what it has said."""
    home.mkdir(exist_ok=True)
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [*start, "-m"] if ranks > 1 else [sys.executable, "-m"]
    command += ["tests.support.lightning_trainer", variant, str(home)]
    done = subprocess.run(
        [*command, *([str(kill_at)] if kill_at else [])],
        env=environment(home),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    killed = 1 if ranks > 1 else -9  # torchrun answers a killed rank with an exit code of its own
    assert done.returncode == (killed if kill_at else 0), done.stderr
    return done.stderr


def lines(home: Path) -> list[str]:
    """Return the lines of all lives, each once."""
    return sorted(set((home / "losses").read_text().splitlines()))


def logged(home: Path) -> list[tuple[str, str, str]]:
    """Return all values that the logger of any life has written: step, name and value."""
    return sorted(
        {
            (row["step"], name, value)
            for file in home.glob("logs/*/metrics.csv")
            for row in csv.DictReader(file.open())
            for name, value in row.items()
            if value and name != "step"
        }
    )


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("variant", "kills", "goes_on"),
    [
        ("epochs", (13, 33), (10, 30)),  # inside the first epoch, and at the end of the second
        ("workers", (28,), (25,)),
        ("augmented", (28,), (25,)),
        ("pairs", (13,), (10,)),
        ("iterable", (28,), (25,)),
        ("stateful", (28,), (25,)),
        ("manual", (28,), (25,)),
        ("estimated", (13, 33), (10, 30)),
        ("estimated-stateful", (13,), (10,)),
    ],
)
def test_a_killed_run_equals_an_uninterrupted_one(
    tmp_path: Path, variant: str, kills: tuple[int, ...], goes_on: tuple[int, ...]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    life(whole, variant)
    said = [life(killed, variant, kill_at) for kill_at in kills] + [life(killed, variant)]
    for text, step in zip(said[1:], goes_on, strict=True):
        assert f"ckptd: the training goes on from step {step}, from memory" in text
    assert lines(killed) == lines(whole)
    assert len(lines(whole)) == 46
    assert logged(killed) == logged(whole)
    assert (len(logged(whole)) > 100) == (variant != "manual")


@pytest.mark.frameworks
@pytest.mark.parametrize("variant", ["epochs", "sharded"])
def test_two_ranks_are_exact(tmp_path: Path, variant: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    life(whole, variant, ranks=2)
    life(killed, variant, kill_at=13, ranks=2)
    said = life(killed, variant, ranks=2)
    assert said.count("ckptd: the training goes on from step 10, from memory") == 1
    assert lines(killed) == lines(whole)
    assert len(lines(whole)) == 25
    assert logged(killed) == logged(whole)


@pytest.mark.frameworks
def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    life(tmp_path / "a", "epochs")
    before = (tmp_path / "a" / "end").read_text()
    said = life(tmp_path / "a", "epochs")
    assert "nothing is left to do: step 45 is saved, and max_epochs=3 is reached" in said
    assert (tmp_path / "a" / "end").read_text() == before
    assert len((tmp_path / "a" / "losses").read_text().splitlines()) == 47  # two lines of ends


LIVES = """
import os, runpy, signal, sys, time
import lightning.pytorch

script, *homes = sys.argv[1:]
for life, home in enumerate(homes):
    kills = life == 1
    losses = os.path.join(home, "losses")
    if not (child := os.fork()):
        os.environ |= {"CKPTD_ROOT": os.path.join(home, "root"), "XDG_RUNTIME_DIR": home}
        os.dup2(os.open(os.path.join(home, f"said-{life}"), os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [script, "--steps", "30", "--losses", losses]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    while kills and len(open(losses).readlines()) < 12:
        time.sleep(0.01)
    if kills:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"life {life}: {code}", flush=True)
"""
"""Forks three lives of a script, of which the second is killed, because each new
interpreter would import lightning again, for five seconds.
"""


@pytest.mark.usefixtures("processes")
def test_the_example_is_exact(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for home in (whole, killed):
        home.mkdir()
        (home / "losses").touch()
    lives = subprocess.run(
        [sys.executable, "-c", LIVES, str(EXAMPLE), str(whole), str(killed), str(killed)],
        env=environment(whole),
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=False,
    )
    ended = [line for line in lives.stdout.splitlines() if line.startswith("life ")]
    assert ended == ["life 0: 0", "life 1: -9", "life 2: 0"]
    assert (whole / "said-0").read_text().count("ckptd:") == 1
    assert "ckptd: the training goes on from step" in (killed / "said-2").read_text()
    assert lines(killed) == lines(whole)
    assert len(lines(whole)) == 31


def trainer(path: Path, **options: Any) -> L.Trainer:
    import lightning as L

    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **{"max_epochs": 2, **options},
    )


def patient() -> Any:
    """Return a callback that would stop a training which has not improved for long."""
    from lightning.pytorch.callbacks import EarlyStopping

    return EarlyStopping("val_loss", patience=9)


def train(daemon: Daemon, path: Path, data: Data, model: Any = None, **options: Any) -> Any:
    """Train in this process, and return the trainer and its agent."""
    from tests.support.lightning_trainer import Model

    agent = Agent("job", socket=daemon.home.socket)
    made = trainer(path, callbacks=[patient()], **options)
    attach(made, every_n_steps=5, agent=agent)
    made.fit(model or Model(), datamodule=data)
    agent.close()
    return made


def numbers(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in state.items()}


def test_best_and_last_are_checkpoints_of_ckptd(daemon: Daemon, tmp_path: Path) -> None:
    import lightning as L

    from tests.support.lightning_trainer import Data, Model

    L.seed_everything(1, verbose=False)

    class Kept(Model):
        """A model that makes its validation worse, and keeps its weights at each epoch."""

        def on_train_epoch_end(self) -> None:
            kept.append(copy.deepcopy(self.state_dict()))

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", 1.0 + self.current_epoch)

    kept: list[Any] = []
    made = train(daemon, tmp_path, Data(), Kept())
    assert len(kept) == 2
    for path, wanted in (("best", kept[0]), ("last", kept[1])):
        model = Kept()
        made.validate(model, datamodule=Data(), ckpt_path=path)
        assert numbers(model.state_dict()) == numbers(wanted), path
    again = trainer(tmp_path, callbacks=[patient()], max_epochs=2)
    agent = Agent("job", socket=daemon.home.socket)
    attach(again, every_n_steps=5, agent=agent)
    again.fit(Kept(), datamodule=Data(), ckpt_path="best")
    agent.close()
    assert [len(kept), again.global_step] == [3, 30]  # the second epoch was trained once more
    assert numbers(kept[1]) == numbers(kept[2])
    assert numbers(kept[0]) != numbers(kept[1])


def test_a_file_is_loaded_only_while_there_is_nothing_to_recover(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.support.lightning_trainer import Data, Model

    first = trainer(tmp_path, max_epochs=1)
    first.fit(Model(), datamodule=Data())
    first.save_checkpoint(tmp_path / "file.ckpt")
    for epochs, goes_on in ((2, ""), (3, "the training goes on from step 30, which ckptd")):
        agent = Agent("job", socket=daemon.home.socket)
        made = trainer(tmp_path, max_epochs=epochs)
        attach(made, every_n_steps=5, agent=agent)
        caplog.clear()
        made.fit(Model(), datamodule=Data(), ckpt_path=tmp_path / "file.ckpt", weights_only=False)
        assert made.global_step == 15 * epochs
        assert agent.last_step == 15 * epochs
        agent.close()
        assert (goes_on in caplog.text, "is read and not used" in caplog.text) == (
            True,
            bool(goes_on),
        )


class Killed(Exception):
    """The end of a training inside an epoch."""


def interrupted(model: Any) -> Any:
    """Return a model of this class whose training ends inside the first epoch."""

    class Interrupted(model):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, number: int) -> None:
            if self.global_step == 12:
                raise Killed

    return Interrupted()


def test_other_data_are_refused_or_their_position_is_kept_in_samples(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.support.lightning_trainer import Data, Model

    with pytest.raises(Killed):
        train(daemon, tmp_path, Data(), interrupted(Model))
    with pytest.raises(InvalidRequest, match="the data set had 60 samples .* has 64 now"):
        train(daemon, tmp_path, Data(64))
    assert "the position in the epoch is kept in samples" not in caplog.text
    made = train(daemon, tmp_path, Data(batch=8), max_epochs=1)
    assert "sample 40 is batch 5 now" in caplog.text
    assert made.global_step == 10 + 3  # of 8 batches in the epoch, 3 were left


def test_batches_that_were_trained_on_are_not_loaded_again(daemon: Daemon, tmp_path: Path) -> None:
    import lightning as L

    from tests.support.lightning_trainer import Data, Model

    loaded: list[int] = []

    class Counted(Dataset[Any]):
        """Samples with noise from the generator of the process, which are counted."""

        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            x = torch.rand(4, device="cpu", dtype=torch.float32)
            return x + index, torch.tensor(index % 3, device="cpu", dtype=torch.int64)

    class Samples(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(Counted(), batch_size=4, shuffle=True)

    class Kept(Model):
        """A model that keeps its losses."""

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            losses.append(float(outputs["loss"]))

    losses: list[float] = []

    L.seed_everything(1, verbose=False)
    with pytest.raises(Killed):
        train(daemon, tmp_path, Samples(), interrupted(Kept))
    first = list(losses)
    loaded.clear()
    train(daemon, tmp_path, Samples(), Kept(), max_epochs=1)
    assert len(loaded) == 60 - 40  # the snapshot has step 10
    assert losses[12:14] == first[10:12]
    assert len(losses) == 12 + 5


def trained(daemon: Daemon, path: Path, model: Any, *callbacks: Any, ends: Any = ()) -> Any:
    """Train for three epochs of 15 batches, in lives that end after these numbers of
    batches. Return the loss and the number of optimizer steps of each batch.
    """
    import lightning as L

    from tests.support.lightning_trainer import Data

    found: dict[int, Any] = {}

    class Noting(L.Callback):
        """Notes the loss of each batch, and ends the training inside an epoch."""

        def __init__(self, end: int | None) -> None:
            self._end = end

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            seen = trainer.current_epoch * 15 + number + 1
            found[seen] = float(outputs["loss"].detach()), trainer.global_step
            if len(found) == self._end:
                raise Killed

    for end in (*ends, None):
        L.seed_everything(1, verbose=False)
        made = trainer(path, max_epochs=3, callbacks=[*(make() for make in callbacks), Noting(end)])
        agent = Agent(f"{model.__name__}-{len(ends)}", socket=daemon.home.socket)
        attach(made, every_n_steps=2, agent=agent)
        with pytest.raises((Killed, SystemExit)) if end else nullcontext():
            made.fit(model(), datamodule=Data())
        agent.close()
    return found


def test_a_schedule_of_accumulation_goes_on_inside_an_epoch(daemon: Daemon, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from tests.support.lightning_trainer import Model

    scheduler = partial(GradientAccumulationScheduler, {0: 1, 1: 3, 2: 2})
    whole = trained(daemon, tmp_path, Model, scheduler)
    assert [whole[15][1], whole[30][1], whole[45][1]] == [15, 15 + 5, 15 + 5 + 8]
    assert trained(daemon, tmp_path, Model, scheduler, ends=(23, 36)) == whole


@pytest.mark.parametrize("first", [0, 1])
def test_modes_that_a_hook_has_set_come_back(daemon: Daemon, tmp_path: Path, first: int) -> None:
    from tests.support.lightning_trainer import Model

    class Frozen(Model):
        """A model that keeps two of its layers as they are from an epoch on."""

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == first:
                self.layers[1].eval()
                self.layers[0].requires_grad_(False)

    whole = trained(daemon, tmp_path, Frozen)
    assert trained(daemon, tmp_path, Frozen, ends=(8, 17, 36)) == whole
    assert trained(daemon, tmp_path, Model)[45] != whole[45]


@pytest.mark.parametrize("by", ["callback", "module"])
def test_parameters_that_are_added_to_an_optimizer_are_recovered(
    daemon: Daemon, tmp_path: Path, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning.pytorch.callbacks import BackboneFinetuning

    from tests.support.lightning_trainer import Model

    class Finetuned(Model):
        """A model whose first epoch trains only the last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.layers[:-1]

        def on_train_epoch_start(self) -> None:
            if by == "module" and self.current_epoch == 1:
                group = {"params": self.backbone.parameters(), "lr": 1e-3, "name": "backbone"}
                self.trainer.optimizers[0].add_param_group(group)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.layers[-1].parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    unfreezing = partial(BackboneFinetuning, 1, backbone_initial_lr=0.01, should_align=False)
    callbacks = [unfreezing] if by == "callback" else []
    whole = trained(daemon, tmp_path, Finetuned, *callbacks)
    assert trained(daemon, tmp_path, Finetuned, *callbacks, ends=(8, 17, 36)) == whole
    assert caplog.text.count("the training goes on from step") == 3
    assert "settings of the script" not in caplog.text
    with pytest.raises(StructureMismatch, match="the checkpoint has the optimizer SGD"):
        trained(daemon, tmp_path, type("Finetuned", (Model,), {}), ends=(8, 17, 36))


def test_a_validation_that_sigterm_ends_is_made_again(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from tests.support.lightning_trainer import Model

    class Terminated(Model):
        """A model whose first validation is ended."""

        def on_validation_batch_end(self, *_: Any) -> None:
            if comes and self.global_step == 15:
                comes.pop()
                raise SIGTERMException

    comes = [True]
    found = trained(daemon, tmp_path, Terminated, patient, ends=(99,))
    assert "the newest snapshot is that of step 14" in caplog.text
    assert found == trained(daemon, tmp_path, Model, patient)


def test_fast_dev_run_saves_nothing(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.support.lightning_trainer import Data, Model

    agent = Agent("job", socket=daemon.home.socket)
    made = trainer(tmp_path, fast_dev_run=True)
    attach(made, every_n_steps=1, agent=agent)
    made.fit(Model(), datamodule=Data())
    assert (made.global_step, agent.last_step) == (1, -1)
    assert "fast_dev_run: ckptd recovers and saves nothing" in caplog.text
    agent.close()


def test_invalid_calls_are_refused(tmp_path: Path) -> None:
    from tests.support.lightning_trainer import Data, Model

    made = trainer(tmp_path)
    for call, expected in (
        (lambda: attach(Model(), every_n_steps=1), "Model is not a Trainer of lightning or"),
        (lambda: attach(made), "give either every_n_steps="),
        (
            lambda: attach(made, every_n_steps=1, schedule=Schedule(every_steps=2)),
            "give either every_n_steps=",
        ),
        (lambda: attach(made, every_n_steps=0), "every_n_steps is 0; expected a number from 1 up"),
        (
            lambda: attach(trainer(tmp_path, strategy="ddp_spawn"), every_n_steps=1),
            "starts the ranks from within fit",
        ),
    ):
        with pytest.raises(InvalidRequest, match=expected):
            call()
    attach(made, every_n_steps=1)
    with pytest.raises(InvalidRequest, match="attached to this Trainer already"):
        attach(made, every_n_steps=1)
    begun = trainer(tmp_path, max_epochs=1)
    begun.fit(Model(), datamodule=Data(8))
    with pytest.raises(InvalidRequest, match="has begun, and is at step 2: call attach"):
        attach(begun, every_n_steps=1)
