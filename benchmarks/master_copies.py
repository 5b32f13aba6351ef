"""Measures what a checkpoint would save if bf16 weights that are the rounded fp32 master
copies in the same part took no bytes.

`python -m benchmarks.master_copies`. The state is that of `benchmarks/delta_states.py`:
weights in bf16, master copies and both moments in fp32. Stored bytes are those of the
codec `planes`, or of `delta` against the state five steps before, chunk by chunk. On
several data-parallel ranks, every rank has all weights and a share of the optimizer's
state. Which rank stores which weights is decided by ckptd's planner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from benchmarks.delta_states import MixedState, fine_tuning, pretraining
from benchmarks.deltas import Ours, Pair, whole_sizes
from benchmarks.rows import Row, keep
from ckptd.agent.plan import layout
from ckptd.agent.plan.shares import Offer, share_out

RANKS = (2, 4, 8)
OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")


def sizes(after: MixedState, before: MixedState | None) -> tuple[int, int]:
    """Return the stored bytes of the weights and of the optimizer's state.

    before: the state that the deltas are from, or None for a whole checkpoint.
    """

    def stored(kind: str) -> int:
        pair = Pair.of(getattr(after, kind), getattr(before or after, kind))
        if before is None:
            return sum(whole_sizes(pair))
        ours = Ours(pair)
        ours.encode()
        return ours.smallest()

    return stored("weights"), sum(stored(kind) for kind in OPTIMIZER)


def by_first_dimension(shape: tuple[int, ...], ranks: int) -> list[range]:
    """Return the elements of a tensor that each rank has of its optimizer's state, if
    every tensor is divided along its first dimension, as `fully_shard` does.
    """
    rows, width = -(-shape[0] // ranks), math.prod(shape[1:])
    starts = [min(rank * rows, shape[0]) * width for rank in range(ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def on_every_rank(shape: tuple[int, ...], ranks: int) -> list[range]:
    """Return the same if every rank has the whole state, as in DistributedDataParallel."""
    return [range(math.prod(shape))] * ranks


def in_one_buffer(shapes: dict[str, tuple[int, ...]], ranks: int) -> dict[str, list[range]]:
    """Return the same for a distributed optimizer as in Megatron, which joins all
    tensors and gives each rank an equal part of the whole.
    """
    total, start, found = sum(map(math.prod, shapes.values())), 0, dict[str, list[range]]()
    share = -(-total // ranks)
    for name, shape in shapes.items():
        size = math.prod(shape)
        found[name] = [
            range(
                min(max(rank * share - start, 0), size),
                min(max((rank + 1) * share - start, 0), size),
            )
            for rank in range(ranks)
        ]
        start += size
    return found


def beside_their_masters(
    shapes: dict[str, tuple[int, ...]], owned: dict[str, list[range]]
) -> float:
    """Return the share of the weights whose master copies are in the same part.

    owned: the elements of each tensor whose master copies each rank has.
    """
    ranks = len(next(iter(owned.values())))
    offers = [Offer(list(_rows(shapes, owned, rank))) for rank in range(ranks)]
    together = 0
    for offer, share in zip(offers, share_out(offers), strict=True):
        kept = {row.fqn: row for row in (offer.rows[number] for number in share.rows)}
        together += sum(
            math.prod(kept[copy].sizes)
            for name in shapes
            if f"model.{name}" in kept and (copy := f"optimizer.master.{name}") in kept
        )
    return together / sum(map(math.prod, shapes.values()))


def _rows(
    shapes: dict[str, tuple[int, ...]], owned: dict[str, list[range]], rank: int
) -> Iterator[layout.Row]:
    """Yield the rows that a rank could write: all weights, and its optimizer's state."""
    for name, shape in shapes.items():
        yield layout.Row(
            f"model.{name}", "bfloat16", shape, (0,) * len(shape), shape, None, "cpu", True
        )
        elements, size = owned[name][rank], (math.prod(shape),)
        for kind in OPTIMIZER if elements else ():
            yield layout.Row(
                f"optimizer.{kind}.{name}", "float32", size, (elements.start,), (len(elements),),
                None, "cpu", False, replicated=len(elements) == size[0],
            )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    states, tuned = pretraining(), fine_tuning()
    after, rows = states[5], list[Row]()
    shapes = {name: tuple(tensor.shape) for name, tensor in after.weights.items()}
    for name, copy in after.master.items():
        assert torch.equal(copy.bfloat16(), after.weights[name]), name
    placed: dict[str, Callable[[int], dict[str, list[range]]]] = {
        "first dimension": lambda ranks: {
            name: by_first_dimension(shape, ranks) for name, shape in shapes.items()
        },
        "one buffer": lambda ranks: in_one_buffer(shapes, ranks),
        "every rank": lambda ranks: {
            name: on_every_rank(shape, ranks) for name, shape in shapes.items()
        },
    }
    together = {
        f"{ranks} ranks, {name}": beside_their_masters(shapes, owned(ranks))
        for name, owned in placed.items()
        for ranks in RANKS
    }
    rows += [
        Row(name=f"weights beside their masters, {where}", value=share, unit="")
        for where, share in together.items()
    ]
    for title, newer, base in (
        ("a whole checkpoint", after, None),
        ("deltas 5 steps apart", after, states[0]),
        ("deltas at RL rates", tuned[-1], tuned[-2]),
    ):
        weights, optimizer = sizes(newer, base)
        saved = weights / (weights + optimizer)
        raw = sum(tensor.nbytes for tensor in newer.weights.values())
        stored = {"weights / raw": weights / raw, "optimizer / raw": optimizer / (6 * raw)}
        rows.append(
            Row(
                name=f"saved of {title}",
                value=saved,
                unit="",
                limit=0.1,
                at_most=False,
                beside={**stored, **{where: saved * share for where, share in together.items()}},
            )
        )
    keep(rows, "master-copies")


if __name__ == "__main__":
    main()
