"""Measures how long a snapshot holds a training under each framework, beside a plain loop
with the same state and beside the checkpoints of the framework itself.

`python -m benchmarks.frameworks NAME... [--rounds N] [--megabytes N]`. A name is one of
`transformers`, `accelerate`, `lightning`, `deepspeed` and `ray`, and must be installed.
The same model trains on the CPU in all of them. A gap is the time from the end of an
optimizer step to the beginning of the next forward pass, in which every framework runs
its callbacks and saves. `held` is the gap after a step that is saved, less the median gap
after the others. The first snapshot of a run, which makes its segments, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from benchmarks.rows import Row, keep, settled
from ckptd.agent import Agent, training
from tests.support.daemons import home, running

WIDTH, BATCH = 1024, 4
EVERY, STEPS = 3, 19
"""Steps between two saves, and of a run: five saves count."""


class Net(nn.Module):
    """A model whose weights and moments take so many megabytes."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = max(1, round(megabytes * 1e6 / (12 * WIDTH * WIDTH)))
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), 1 / (1 + index))}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def batches() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Samples(), batch_size=BATCH)


class Gaps:
    """The gaps of a run, in seconds, for a `with` statement.

    first: the number of the first step that is saved, if steps count from 1. After the
    gap of a saved step, the training waits until the save is over: no save meets the
    work of the one before.
    """

    def __init__(self, first: int = EVERY) -> None:
        self.found: list[float] = []
        self._first = first
        self._ended = 0.0

    def __enter__(self) -> Gaps:
        self._hooks = (
            register_optimizer_step_post_hook(self._stepped),
            nn.modules.module.register_module_forward_pre_hook(self._begins),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _stepped(self, *_: object) -> None:
        self._ended = time.perf_counter()

    def _begins(self, *_: object) -> None:
        if self._ended:
            self.found.append(time.perf_counter() - self._ended)
            self._ended = 0.0
            if self._is_saved(len(self.found)):
                time.sleep(1.0)
                settled()

    def _is_saved(self, step: int) -> bool:
        return (step - self._first) % EVERY == 0

    def held(self) -> list[float]:
        """Return the seconds of each save but the first."""
        gaps = list(enumerate(self.found, 1))
        quiet = median(gap for step, gap in gaps if not self._is_saved(step))
        return [gap - quiet for step, gap in gaps if self._is_saved(step)][1:]


def of_plain(megabytes: int, place: Path, agent: Agent) -> list[float]:
    model = Net(megabytes)
    optimizer = adam(model)
    state = {"model": model, "optimizer": optimizer}
    with Gaps(first=1) as gaps, training(state, every=EVERY, agent=agent) as run:
        for _, batch in zip(run.steps(STEPS), batches(), strict=False):
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    return gaps.held()


def of_transformers(megabytes: int, place: Path, agent: Agent | None) -> list[float]:
    from transformers import Trainer, TrainingArguments

    from ckptd.integrations.transformers import attach

    model = Net(megabytes)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(place), max_steps=STEPS, per_device_train_batch_size=BATCH,
            save_strategy="no" if agent else "steps", save_steps=EVERY, save_total_limit=1,
            logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=Samples(), optimizers=(adam(model), None),
    )  # fmt: skip
    if agent is not None:
        attach(trainer, every_steps=EVERY, agent=agent)
    with Gaps() as gaps:
        trainer.train()
    return gaps.held()


def of_accelerate(megabytes: int, place: Path, agent: Agent | None) -> list[float]:
    from accelerate import Accelerator

    from ckptd.integrations.accelerate import attach

    accelerator, net = Accelerator(cpu=True), Net(megabytes)
    model, optimizer, loader = accelerator.prepare(net, adam(net), batches())

    def train(batch: dict[str, Tensor]) -> None:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()

    with Gaps() as gaps:
        if agent is not None:
            run = attach(accelerator, every_steps=EVERY, agent=agent)
            for _, _, batch in run.batches(loader, epochs=1):
                train(batch)
        else:
            for step, batch in enumerate(loader, 1):
                train(batch)
                if step % EVERY == 0:
                    accelerator.save_state(str(place / "state"))
    return gaps.held()


def of_lightning(megabytes: int, place: Path, agent: Agent | None) -> list[float]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ckptd.integrations.lightning import attach

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(megabytes)

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self)

    own = ModelCheckpoint(place, every_n_train_steps=EVERY, save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False,
        callbacks=[] if agent else [own], enable_checkpointing=agent is None,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if agent is not None:
        attach(trainer, every_n_steps=EVERY, agent=agent)
    with Gaps() as gaps:
        trainer.fit(Module(), batches())
    return gaps.held()


def of_deepspeed(megabytes: int, place: Path, agent: Agent | None) -> list[float]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    from ckptd.integrations.deepspeed import attach
    from examples.frameworks.train_deepspeed import begin

    if not torch.distributed.is_initialized():
        begin()
    engine, *_ = deepspeed.initialize(
        model=Net(megabytes),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )

    def train(batch: dict[str, Tensor]) -> None:
        engine.backward(engine(**batch)["loss"])
        engine.step()

    if agent is not None:
        # Inside, because `attach` steps the optimizer once to make its state.
        with attach(engine, every_steps=EVERY, agent=agent) as run, Gaps(first=1) as gaps:
            for _, batch in zip(run.steps(STEPS), batches(), strict=False):
                train(batch)
    else:
        with Gaps() as gaps:
            for step, batch in enumerate(batches(), 1):
                train(batch)
                if step % EVERY == 0:
                    engine.save_checkpoint(str(place), tag="own")
    return gaps.held()


def _on_ray(config: dict[str, Any]) -> None:
    """Train on a worker of Ray, and write what `Gaps.held` returns to a file."""
    import ray.train

    from ckptd.integrations.ray import attach

    model = Net(config["megabytes"])
    optimizer = adam(model)
    state = {"model": model, "optimizer": optimizer}

    def train(batch: dict[str, Tensor]) -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    with Gaps(1 if config["socket"] else EVERY) as gaps:
        if config["socket"]:
            agent = Agent(config["job"], socket=config["socket"])
            with attach(state, every_steps=EVERY, agent=agent) as run:
                for _, batch in zip(run.steps(STEPS), batches(), strict=False):
                    train(batch)
        else:
            for step, batch in enumerate(batches(), 1):
                train(batch)
                if step % EVERY == 0:
                    with tempfile.TemporaryDirectory() as directory:
                        torch.save(
                            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                            Path(directory) / "state.pt",
                        )
                        made = ray.train.Checkpoint.from_directory(directory)
                        ray.train.report({}, checkpoint=made)
    Path(config["file"]).write_text(json.dumps(gaps.held()))


def of_ray(megabytes: int, place: Path, agent: Agent | None) -> list[float]:
    import ray
    import ray.train.torch

    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
    )  # fmt: skip
    if agent is not None:
        agent.close()  # the worker begins the next attempt of the job
    file = place / "held.json"
    ray.train.torch.TorchTrainer(
        _on_ray,
        train_loop_config={
            "megabytes": megabytes, "file": str(file), "job": agent.job if agent else "",
            "socket": os.environ["CKPTD_SOCKET"] if agent else "",
        },
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name="bench", storage_path=str(place / "ray")),
    ).fit()  # fmt: skip
    found: list[float] = json.loads(file.read_text())
    return found


FRAMEWORKS: dict[str, Callable[[int, Path, Agent | None], list[float]]] = {
    "transformers": of_transformers,
    "accelerate": of_accelerate,
    "lightning": of_lightning,
    "deepspeed": of_deepspeed,
    "ray": of_ray,
}


def measured(name: str, megabytes: int, rounds: int) -> Row:
    """Run the plain loop, the framework with ckptd, and the framework's own checkpoints,
    one after the other, in each round.
    """
    helds: dict[str, list[float]] = {"plain": [], "ckptd": [], "own": []}
    with home() as place, running(place, "--keep-last", "1"):
        os.environ["CKPTD_SOCKET"] = str(place.socket)
        for number in range(rounds):
            for kind, found in helds.items():
                directory = place.path / "work"
                directory.mkdir()
                agent = None
                if kind != "own":
                    agent = Agent(f"{name}-{kind}-{number}", socket=place.socket)
                if kind == "plain":
                    assert agent is not None
                    found += of_plain(megabytes, directory, agent)
                else:
                    found += FRAMEWORKS[name](megabytes, directory, agent)
                if agent is not None:
                    agent.close()
                shutil.rmtree(directory)
                settled()
    plain, ours, own = (median(found) for found in helds.values())
    return Row(
        name=f"held under {name} / in a plain loop", value=ours / plain, unit="", limit=1.1,
        beside={
            "ms held": 1000 * ours, "ms in the plain loop": 1000 * plain,
            f"ms by {name}'s own checkpoints": 1000 * own, "saves of each": len(helds["ckptd"]),
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=FRAMEWORKS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(name, options.megabytes, options.rounds) for name in options.names]
    keep(rows, "-".join(("frameworks", *options.names)))


if __name__ == "__main__":
    main()
