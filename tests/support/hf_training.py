"""Trains a tiny model with a Trainer of transformers, and writes what it has done:
`python -m tests.support.hf_training KIND OUT`.

Every entry of the log is appended to OUT as a line. At the end, OUT gets the state of
the Trainer, of its callbacks and of the parameters. KILL_AT=STEP sends SIGKILL to the
process at the end of this step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckptd.integrations.transformers import attach

SAMPLES = 37
_MEASURED = ("runtime", "per_second", "flops")
"""Parts of the names of values that depend on the time."""


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sentences, each of which follows from its number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self._samples:
            raise IndexError(index)  # without this, a loop over the data would not end
        generator = torch.Generator(device="cpu").manual_seed(index)
        ids = torch.randint(3, 50, (8,), generator=generator, device="cpu", dtype=torch.int64)
        return {"input_ids": ids}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same sentences, without a length."""

    def __iter__(self) -> Any:
        return (Sentences()[index] for index in range(SAMPLES))


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch with random masks, which the global generator draws."""
    ids = torch.stack([torch.as_tensor(row["input_ids"], device="cpu") for row in rows])
    masked = torch.rand(ids.shape, device="cpu", dtype=torch.float32) < 0.2
    everything = torch.ones_like(ids)
    inputs = torch.where(masked, 0, ids)
    return {"input_ids": inputs, "labels": ids.clone(), "attention_mask": everything}


class Counter(TrainerCallback):
    """A callback with a state of its own, which counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Writer(TrainerCallback):
    """A callback that appends each entry of the log to a file, on rank 0, and kills the
    process when its time has come.
    """

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
        if state.is_world_process_zero:
            with self._out.open("a") as file:
                file.write(f"{state.global_step} {json.dumps(exact(logs), sort_keys=True)}\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if str(state.global_step) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)


def exact(logs: dict[str, Any]) -> dict[str, str]:
    """Return the entries that do not depend on the time, as text without rounding."""
    return {
        name: float(value).hex()
        for name, value in logs.items()
        if not any(part in name for part in _MEASURED)
    }


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "seq2seq":
        config = T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
        )  # fmt: skip
        config.decoder_start_token_id = 0
        return T5ForConditionalGeneration(config)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(model, adapter)
    return model


def trainer_of(kind: str, directory: Path, **changes: Any) -> Any:
    """Return a Trainer of one kind: "plain", "workers", "stream", "length", "seq2seq",
    "peft", "sft", "fsdp" or "fsdp2".
    """
    options: dict[str, Any] = {
        "output_dir": str(directory),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 8,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "eval_on_start": True,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_num_workers": 2 if kind == "workers" else 0,
    }
    train: Any = Sentences()
    if kind == "stream":
        train, options["max_steps"], options["num_train_epochs"] = Stream(), 15, 1
    if kind == "length":
        options["train_sampling_strategy"] = "group_by_length"
    if kind.startswith("fsdp"):
        options |= {
            "fsdp": "full_shard",
            "fsdp_config": {"version": 2 if kind == "fsdp2" else 1},
            "load_best_model_at_end": False,
            "save_strategy": "no",
        }
    kinds: dict[str, Any] = {"seq2seq": (Seq2SeqTrainer, Seq2SeqTrainingArguments)}
    held_out: Any = Sentences(5)
    more: dict[str, Any] = {}
    if kind == "sft":
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        kinds["sft"] = (SFTTrainer, SFTConfig)
        train, held_out = (
            Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows]})
            for rows in (train, held_out)
        )
        words = models.WordLevel({f"w{number}": number for number in range(50)}, unk_token="w0")
        more["processing_class"] = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words), eos_token="w2", pad_token="w1", unk_token="w0"
        )
    made, arguments = kinds.get(kind, (Trainer, TrainingArguments))
    options |= changes
    evaluated = not kind.startswith("fsdp") and options["eval_strategy"] != "no"
    stopping = [EarlyStoppingCallback(9)] if evaluated else []
    return made(
        model=model_of(kind),
        args=arguments(**options),
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collate,
        callbacks=[Counter(), *stopping, Writer(directory / "log")],
        **more,
    )


def outcome(trainer: Any, result: Any) -> str:
    """Return what the training has come to, as text."""
    state, hashed = trainer.state, hashlib.sha256()
    for value in trainer.model.parameters():
        local = value.to_local() if hasattr(value, "to_local") else value
        hashed.update(local.detach().float().contiguous().numpy().tobytes())
    callbacks = trainer.callback_handler.callbacks
    return json.dumps(
        {
            "history": [exact(entry) for entry in state.log_history],
            "loss": float(result.training_loss).hex(),
            "best": [state.best_metric, state.best_global_step],
            "steps": [state.global_step, state.max_steps, state.epoch, state.total_flos],
            "callbacks": [
                vars(callback)
                for callback in callbacks
                if isinstance(callback, (Counter, EarlyStoppingCallback))
            ],
            "parameters": hashed.hexdigest(),
        }
    )


def main(kind: str, directory: Path) -> None:
    trainer = trainer_of(kind, directory)
    attach(trainer, every_steps=4)
    result = trainer.train()
    rank = os.environ.get("RANK", "0")
    (directory / f"outcome-{rank}").write_text(outcome(trainer, result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
