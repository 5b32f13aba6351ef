"""Trains a tiny GPT-2 with the Trainer of Hugging Face transformers. Kill it at any time
and start it again: it resumes with the same losses.

`CKPTD_ROOT=/ckpts python examples/frameworks/transformers_trainer.py --steps 20`. It
needs `pip install '.[hf]'`, and downloads nothing. The name is not
`transformers.py`, because a script is imported instead of a package with its name.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import ckptd
from ckptd.integrations.transformers import attach

CONFIG = GPT2Config(
    n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=1, eos_token_id=2
)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random sentences, each of which follows from its number."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator(device="cpu").manual_seed(index)
        ids = torch.randint(3, 64, (16,), generator=generator, device="cpu", dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}


class Losses(TrainerCallback):
    """A callback that appends the loss of each step to a file, on rank 0."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, line: str) -> None:
        if self._path is not None and os.environ.get("RANK", "0") == "0":
            with self._path.open("a") as file:
                file.write(line + "\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
        if "loss" in logs:
            self.write(f"{state.global_step} {logs['loss'].hex()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--every", type=int, default=3, help="steps between two snapshots")
    chosen = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(CONFIG)
    losses = Losses(chosen.losses)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=".",  # nothing is written to it
            max_steps=chosen.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Sentences(),
        callbacks=[losses],
    )
    attach(trainer, every_steps=chosen.every)
    trainer.train()

    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    losses.write(f"hash {hashed.hexdigest()}")
    ckptd.close()


if __name__ == "__main__":
    main()
