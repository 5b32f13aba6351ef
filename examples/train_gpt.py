"""Trains a small GPT on the source code of Python's standard library, and continues
after any kill.

    python examples/train_gpt.py --root /tmp/ckpts --steps 200

Kill it (`kill -9`) and start it again with the same command. It continues after the
newest snapshot, and every loss from there on is, bit for bit, the one that it would
have had without the kill. Everything that ckptd needs is in `main`: `state`, `recover`,
`snapshot`, `close`. The rest is an ordinary training script. On several ranks
(`torchrun --nproc-per-node 2 examples/train_gpt.py ...`) it trains with FSDP, and each
rank uses batches of its own. Without --root, CKPTD_SOCKET or CKPTD_ROOT say where the
daemon is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ckptd import CkptdError, Pending, close, recover, snapshot


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.before_attention(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + F.dropout(
            self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training
        )
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Maps bytes (batch, length) to the logits of the next byte (batch, length, 256)."""

    def __init__(self, context: int, layers: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes, self.positions, self.dropout = (
            nn.Embedding(256, width),
            nn.Embedding(context, width),
            nn.Dropout(dropout),
        )
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight
        for weight in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.bytes(x) + self.positions(torch.arange(x.shape[1])))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def read_text(most: int = 4_000_000) -> Tensor:
    """Return the first `most` bytes of the standard library's modules, sorted by name
    and joined.
    """
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
    return torch.frombuffer(text[:most], dtype=torch.uint8).long()


def draw_batch(text: Tensor, batch: int, context: int) -> Tensor:
    """Draw a batch with torch's global generator.

    Its state is in every snapshot, so a recovered run draws the batches that it would
    have drawn.
    """
    starts = torch.randint(len(text) - context, (batch,))
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()])


class Display:
    """Shows a progress bar on a terminal if rich is installed, and otherwise prints a
    line at every snapshot.
    """

    def __init__(self, done: int, steps: int) -> None:
        self.steps, self.bar, self.snapshots = steps, None, list[Pending]()
        if sys.stdout.isatty() and find_spec("rich"):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self.bar = Progress(
                "step", MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
            )
            self.task = self.bar.add_task("", total=steps, completed=done)
            self.bar.start()

    def show(self, step: int, loss: float, pending: Pending | None) -> None:
        if pending is not None:
            self.snapshots.append(pending)
        durable = max((p.step for p in self.snapshots if p.state == "durable"), default="-")
        stall = f"{1000 * self.snapshots[-1].stall:.0f} ms" if self.snapshots else "-"
        text = f"loss {loss:.4f}, durable step {durable}, stall {stall}"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        elif pending is not None:
            print(f"step {step}/{self.steps}: {text}", flush=True)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT under ckptd.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from one snapshot to the next")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--root",
        help="directory or URL (s3://...) for the checkpoints; a private daemon is started for it",
    )
    parser.add_argument(
        "--losses",
        type=Path,
        help="gets {step: loss} at the end; beside it, FILE.jsonl gets a line at every step",
    )
    args = parser.parse_args()
    if args.root:
        os.environ["CKPTD_ROOT"] = args.root

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    # So that a recovered run can be compared with another one, bit for bit.
    torch.use_deterministic_algorithms(True)
    text = read_text()
    model = GPT(args.context, args.layers, args.width)
    size = sum(p.numel() for p in model.parameters())
    if ranks > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        torch.manual_seed(args.seed + rank + 1)  # so that every rank draws batches of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    # Averaged over the ranks: a value that is not per_rank() must be the same on all
    # ranks.
    losses: list[float] = []
    if rank == 0:
        print(
            f"GPT of {size / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text, "
            f"{torch.get_num_threads()} threads",
            flush=True,
        )

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "losses": losses}
    recovered = recover(state)
    done = (recovered.step or 0) if recovered else 0
    if recovered:
        where = f" on rank {rank}" if ranks > 1 else ""
        print(
            f"recovered step {done} of attempt {recovered.attempt} from {recovered.source} in "
            f"{recovered.seconds:.2f} s{where}",
            flush=True,
        )

    display = Display(done, args.steps)
    with open(
        f"{args.losses}.jsonl" if args.losses and rank == 0 else os.devnull, "a", buffering=1
    ) as lines:  # so that a kill finds every line written
        for step in range(done + 1, args.steps + 1):
            batch = draw_batch(text, args.batch, args.context)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            mean = loss.detach() / ranks
            if ranks > 1:
                dist.all_reduce(mean)
            losses.append(mean.item())
            lines.write(json.dumps({"step": step, "loss": losses[-1]}) + "\n")
            due = step % args.every == 0 or step == args.steps
            pending = snapshot(state, step=step) if due else None
            if rank == 0:
                display.show(step, losses[-1], pending)
    display.stop()
    close()  # returns when the last snapshot is durable
    if args.losses and rank == 0:
        args.losses.write_text(json.dumps(dict(enumerate(losses, 1))))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except CkptdError as error:
        sys.exit(f"ckptd: {error}")
