"""A run of Ray Train on two workers that ckptd saves: kill it whenever you like, and
start it again.

`python examples/frameworks/train_ray.py --steps 60 --losses losses.txt`, with CKPTD_ROOT set.
Each step appends its loss to the file, and the end a hash of the model.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckptd
from ckptd.integrations.ray import attach


def train_loop_per_worker(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200, 16))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    batches = ckptd.Batches(DataLoader(data, batch_size=4, sampler=sampler))
    model = ray.train.torch.prepare_model(
        torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config["steps"])
    state = {"model": model, "optim": optimizer, "scheduler": scheduler, "data": batches}
    first = ray.train.get_context().get_world_rank() == 0

    def write(*values: object) -> None:
        if first:
            with open(config["losses"], "a") as losses:
                losses.write(" ".join(map(str, values)) + "\n")  # Ray 2.51 replaces print()

    torch.manual_seed(ray.train.get_context().get_world_rank())  # the dropout of each worker
    with attach(state, every_steps=3) as run:
        for step, (first_half,) in zip(run.steps(config["steps"]), batches, strict=False):
            # The gradients of two halves of a batch are accumulated.
            total = 0.0
            for half in first_half.chunk(2):
                loss = (model(half) - half).square().mean() / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            write(step, total.hex())
            if step % 3 == 0:
                run.report({"loss": total})
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    write("hash", digest.hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"steps": options.steps, "losses": str(options.losses.absolute())},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name="example", storage_path=str(options.losses.absolute().parent / "ray")
        ),
    )
    found = trainer.fit().checkpoint
    print("the newest reference:", found and found.get_metadata())


if __name__ == "__main__":
    main()
