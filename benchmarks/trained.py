"""Trains the model whose state the benchmarks save, once, and keeps it in the user's
cache directory.

`python -m benchmarks.trained [--megabytes N] [--steps N]`. The model is the GPT of
`examples/train_gpt.py`. AdamW trains it on the source code of the standard library. Its
weights and both moments have the statistics of a real training, on which the size of
encoded chunks depends. The default of 300 MB takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_gpt import GPT, draw_batch, read_text

WIDTH, CONTEXT, BATCH = 768, 128, 4
_BLOCK = 12 * WIDTH * WIDTH + 13 * WIDTH
"""The parameters of one block of the GPT."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The fp32 tensors of a trained model, by the names of its parameters.

    The tied head is left out.
    """

    weights: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"model": self.weights, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def kept(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors of the file `name` in the user's cache directory.

    If there is no such file, call `make` and write what it returns.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cache / "ckptd" / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(make(), file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def trained(megabytes: int = 300, steps: int = 100) -> Trained:
    """Return the state of a model of about `megabytes` in fp32, moments included.

    Train the model unless an earlier call has done so.
    """
    state = kept(
        f"trained-{megabytes}mb-{steps}-steps.pt", lambda: dict(_train(megabytes, steps).state())
    )
    return Trained(state["model"], state["exp_avg"], state["exp_avg_sq"])


def _train(megabytes: int, steps: int) -> Trained:
    torch.manual_seed(0)
    text, model = read_text(), GPT(CONTEXT, max(1, round(megabytes * 1e6 / 12 / _BLOCK)), WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        batch = draw_batch(text, BATCH, CONTEXT)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps:
            print(
                f"training the state: step {step} of {steps}, loss {loss.item():.3f}, "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
    named = dict(model.named_parameters())
    moments = {name: optimizer.state[parameter] for name, parameter in named.items()}
    return Trained(
        {name: parameter.detach() for name, parameter in named.items()},
        {name: state["exp_avg"] for name, state in moments.items()},
        {name: state["exp_avg_sq"] for name, state in moments.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    for name, tensors in trained(options.megabytes, options.steps).state().items():
        print(
            f"{name}: {len(tensors)} tensors, "
            f"{sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
