"""Runs torchtitan's own Trainer on the CPU, with two layers of its debug model of llama3.

    python -m tests.support.torchtitan_trainer STEPS LOSSES FOLDER [--hf] [--own]

Each step appends its loss to LOSSES, and the end a hash of the model. --hf writes the model
at the last step as safetensors. --own uses torchtitan's own manager. The Trainer is made
for accelerators, and its text models attend with FlexAttention or with a kernel for CUDA,
which cannot train on the CPU. So a stand-in for `torch.cuda` is put in place before it is
imported, and attention is torchtitan's ScaledDotProductAttention.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.tools import utils


def _nothing(device: Any = None) -> None:
    pass


Processor = SimpleNamespace(
    set_device=_nothing,
    reset_peak_memory_stats=_nothing,
    empty_cache=_nothing,
    synchronize=_nothing,
    current_device=lambda: 0,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device=None: {},
)
"""A stand-in for `torch.cuda`, without memory to report."""
utils.device_type, utils.device_module = "cpu", Processor

# The modules below take the device from `utils` when they are imported.
from torchtitan.components import checkpointer  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from ckptd.integrations.torchtitan import CheckpointManager  # noqa: E402

WORDS, LENGTH = 2048, 16


class Rows(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Random tokens of one rank, without end."""

    def __init__(self, rank: int) -> None:
        self._rank, self._given = rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            words = torch.Generator().manual_seed(1000 * self._rank + self._given)
            row = torch.randint(WORDS, (LENGTH + 1,), generator=words)
            self._given += 1
            yield {"input": row[:-1], "positions": torch.arange(LENGTH)}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given = state["given"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **options: Any) -> None:
        super().__init__(
            Rows(dp_rank), dp_rank, dp_world_size, batch_size=options["local_batch_size"]
        )


class Tokenizer(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer that is never asked: the data are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


def configuration(options: argparse.Namespace) -> Any:
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.optimizer.implementation = "for-loop"
    config.training = replace(
        config.training, local_batch_size=2, global_batch_size=8, seq_len=LENGTH,
        steps=options.steps, disable_cuda_graphs=True, mixed_precision_param="float32",
    )  # fmt: skip
    config.lr_scheduler = replace(config.lr_scheduler, total_steps=20)
    config.dataloader, config.tokenizer = Loader.Config(), Tokenizer.Config()
    config.debug.seed, config.comm.trace_buf_size = 0, 0
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a nightly torch
    config.dump_folder = str(options.folder)
    manager = checkpointer.CheckpointManager if options.own else CheckpointManager
    config.checkpoint = manager.Config(enable=True, interval=2, last_save_in_hf=options.hf)
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("losses", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hf", action="store_true")
    parser.add_argument("--own", action="store_true")
    options = parser.parse_args()

    def write(*values: object) -> None:
        if torch.distributed.get_rank() == 0:
            with options.losses.open("a") as losses:
                print(*values, file=losses, flush=True)

    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan is made for a nightly torch
        dist_utils.set_pg_timeouts = lambda **options: None
    trainer = configuration(options).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply
            module.set_force_sum_reduction_for_comms(True)
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: write(step, loss.hex())
    trainer.train()
    digest = hashlib.sha256()
    for parameter in trainer.model_parts[0].parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().numpy().tobytes())
    write("hash", digest.hexdigest())
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main()
