"""A run of DeepSpeed that ckptd saves: kill it whenever you like, and start it again.

`DS_ACCELERATOR=cpu python examples/frameworks/train_deepspeed.py --steps 60 --losses
losses.txt --stage 2`, with CKPTD_ROOT set, or `torchrun --nproc-per-node 2` instead of
python. Each step appends its loss to the file, and the end a hash of the model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckptd
from ckptd.integrations.deepspeed import attach


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.bf16},
    }


def begin() -> None:
    """Begin the process group; without torchrun that of a single rank."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    begin()
    rank = torch.distributed.get_rank()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200, 16))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    batches = ckptd.Batches(DataLoader(data, batch_size=4, sampler=sampler))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
    )
    engine, *_ = deepspeed.initialize(model=model, config=configuration(options))
    torch.manual_seed(rank)  # the dropout of each rank

    def write(*values: object) -> None:
        if rank == 0:
            with options.losses.open("a") as losses:
                print(*values, file=losses, flush=True)

    with attach(engine, every_steps=3, state={"data": batches}) as run:
        drawn = iter(batches)
        for step in run.steps(options.steps):
            total = 0.0
            for _ in range(engine.gradient_accumulation_steps()):
                (batch,) = next(drawn)
                batch = batch.to(torch.bfloat16) if options.bf16 else batch
                loss = (engine(batch) - batch).float().square().mean()
                engine.backward(loss)
                engine.step()
                total += loss.item()
            write(step, total.hex())
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        whole = deepspeed.utils.safe_get_full_fp32_param(parameter)
        whole = parameter if whole is None else whole
        digest.update(whole.detach().float().numpy().tobytes())
    write("hash", digest.hexdigest())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
