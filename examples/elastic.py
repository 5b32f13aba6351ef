"""Trains on two or more nodes: a node may leave, and another one may join.

Run this on each node, with the same CKPTD_ROOT, which all nodes see:

    export CKPTD_REPLICAS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=2:4 --nproc-per-node=8 --max-restarts=100 --rdzv-id=run1 \
        --rdzv-backend=c10d --rdzv-endpoint=node0:29400 examples/elastic.py

When a node is lost, torchrun starts the ranks of the other nodes again, and they
continue after the newest step that is replicated or durable. When a node joins, they
start again with it. If a copy fails, `wait` raises, and torchrun starts the ranks
again: the next attempt makes copies. On one node, use --wait-every 0. The loss of a
step does not depend on the number of ranks, apart from rounding, because the batch of a
step does not: each rank takes an equal share.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ckptd import Recovered, close, recover, snapshot

WIDTH, BATCH = 768, 48  # both can be divided by 2, 3 and 4


def share_of_batch(step: int, rank: int, ranks: int) -> Tensor:
    """Return the rank's share of the batch, which depends on the step alone."""
    everything = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return everything[rank::ranks]


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def described(recovered: Recovered) -> str:
    """Return what came back, and where this rank has read it.

    A rank reads from storage only what no memory holds.
    """
    return (
        f"step {recovered.step} came back, {megabytes(recovered.memory_bytes)} from the memory of "
        f"its own node and {megabytes(recovered.peer_bytes)} from that of other nodes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on two or more nodes under ckptd.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--persist-every", type=int, default=100, help="steps between two saves")
    parser.add_argument(
        "--wait-every",
        type=int,
        default=10,
        help="steps between two waits for copies; 0 never waits",
    )
    parser.add_argument("--root", help="directory or URL that all nodes see")
    parser.add_argument("--losses", type=Path, help="file that receives {step: loss} at the end")
    args = parser.parse_args()
    if args.root:
        os.environ["CKPTD_ROOT"] = args.root

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
    )
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "losses": losses}

    recovered = recover(state)
    said = described(recovered) if recovered else "starts from nothing"
    print(f"rank {rank} of {ranks} on {socket.gethostname()}: {said}", flush=True)

    losses_file = f"{args.losses}.jsonl" if args.losses and rank == 0 else os.devnull
    with open(losses_file, "a", buffering=1) as lines:
        for step in range(recovered.step + 1 if recovered else 1, args.steps + 1):
            batch = share_of_batch(step, rank, ranks)
            loss = (model(batch) - batch.sin().mean(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            losses.append(mean.item())
            lines.write(json.dumps({"step": step, "loss": losses[-1]}) + "\n")
            persist = step % args.persist_every == 0 or step == args.steps
            pending = snapshot(state, step=step, persist=persist)
            if args.wait_every and step % args.wait_every == 0:
                pending.wait("replicated")
                if rank == 0:
                    print(f"step {step} is in the memory of two nodes", flush=True)
    close()
    if args.losses and rank == 0:
        args.losses.write_text(json.dumps(dict(enumerate(losses, 1))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
