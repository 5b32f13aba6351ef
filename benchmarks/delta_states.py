"""Trains the states between which the benchmarks measure deltas, once, and keeps them
in the user's cache directory.

`python -m benchmarks.delta_states`. The model is the GPT of `examples/train_gpt.py`, with
28 million parameters. It is trained with weights in bf16 and master copies in fp32, as
Megatron does: AdamW updates the master copies, and the model computes with the copies
rounded to bf16. Activations and gradients are fp32, because few processors are fast with
bf16. First comes a pre-training on the source code of the standard library, then a
fine-tuning by policy gradients (GRPO) at a learning rate of 1e-6, rewarded for words that
the text contains. Both together take about twelve minutes on one core.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.trained import BATCH, CONTEXT, WIDTH, kept
from examples.train_gpt import GPT, draw_batch, read_text

LAYERS = 4
PLANNED, WARM_UP, PEAK, FLOOR = 400, 40, 3e-4, 3e-5
"""The steps of the pre-training's schedule and of its warm-up, and the highest and the
last learning rate.
"""
FIRST = 200
"""The step of the first pre-trained state that is kept. It is in the middle of the
schedule, where the learning rate is 1.9e-4.
"""
APART = (0, 5, 50)
"""The distances of the kept states from the first one, in steps."""
RATE, UPDATES, KEPT = 1e-6, 12, 6
"""The learning rate of the fine-tuning, its steps, and how many of the last are kept."""
PROMPTS, GROUP, PROMPT, CONTINUATION = 4, 8, 16, 16
"""The prompts of a step, the continuations of each, and the bytes of both."""


@dataclass(frozen=True, slots=True)
class MixedState:
    """The state of a mixed-precision training, by the names of the parameters: weights in
    bf16, and master copies and moments in fp32.
    """

    weights: dict[str, Tensor]
    master: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


class MixedTraining:
    """A GPT whose parameters hold the values of bf16 weights, and AdamW on their master
    copies.
    """

    def __init__(self, betas: tuple[float, float], weight_decay: float) -> None:
        self.model = GPT(CONTEXT, LAYERS, WIDTH, dropout=0.0)
        self._parameters = dict(self.model.named_parameters())
        self._master = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._master.values()), betas=betas, weight_decay=weight_decay, fused=True
        )
        self._round()

    def load(self, master: dict[str, Tensor]) -> None:
        for name, tensor in self._master.items():
            tensor.copy_(master[name])
        self._round()

    def step(self, loss: Tensor, rate: float) -> None:
        """Update the master copies by the gradients of `loss`, and round them."""
        loss.backward()
        for name, parameter in self._parameters.items():
            self._master[name].grad, parameter.grad = parameter.grad, None
        torch.nn.utils.clip_grad_norm_(self._master.values(), 1.0)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._round()

    def state(self) -> MixedState:
        moments = {name: self._optimizer.state[copy] for name, copy in self._master.items()}
        return MixedState(
            weights={name: copy.bfloat16() for name, copy in self._master.items()},
            master={name: copy.clone() for name, copy in self._master.items()},
            exp_avg={name: state["exp_avg"].clone() for name, state in moments.items()},
            exp_avg_sq={name: state["exp_avg_sq"].clone() for name, state in moments.items()},
        )

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._master[name].bfloat16())


def pretraining() -> dict[int, MixedState]:
    """Return the states of the pre-training by their distances from the first one, in
    steps.
    """
    states = kept("deltas-pretraining.pt", _pretrain)
    return {int(apart): MixedState(**state) for apart, state in states.items()}


def fine_tuning() -> list[MixedState]:
    """Return the states of the last `KEPT` consecutive steps of the fine-tuning."""
    states = kept("deltas-fine-tuning.pt", _fine_tune)
    return [MixedState(**states[name]) for name in sorted(states)]


def _pretrain() -> dict[str, Any]:
    torch.manual_seed(0)
    text, training = read_text(), MixedTraining(betas=(0.9, 0.95), weight_decay=0.1)
    states, begun = dict[str, Any](), time.monotonic()
    for step in range(1, FIRST + max(APART) + 1):
        batch = draw_batch(text, BATCH, CONTEXT)
        logits = training.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        training.step(loss, _rate(step))
        if step - FIRST in APART:
            states[str(step - FIRST)] = asdict(training.state())
        if step % 10 == 0:
            print(
                f"pre-training: step {step}, loss {loss.item():.3f}, "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
    return states


def _rate(step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return PEAK * step / WARM_UP
    done = (step - WARM_UP) / (PLANNED - WARM_UP)
    return FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * done)) / 2


def _fine_tune() -> dict[str, Any]:
    master = pretraining()[max(APART)].master
    torch.manual_seed(1)
    text, training = read_text(), MixedTraining(betas=(0.9, 0.999), weight_decay=0.0)
    training.load(master)
    words = set(_words(bytes(text.tolist())))
    states, begun = dict[str, Any](), time.monotonic()
    for step in range(1, UPDATES + 1):
        prompts = draw_batch(text, PROMPTS, PROMPT)[:, :PROMPT].repeat_interleave(GROUP, dim=0)
        sequences = _continued(training.model, prompts)
        rewards = torch.tensor(
            [_reward(bytes(row.tolist()), words) for row in sequences[:, PROMPT:]]
        ).unflatten(0, (PROMPTS, GROUP))
        spread = rewards.std(dim=1, keepdim=True)
        advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)).flatten()
        logits = training.model(sequences[:, :-1])[:, PROMPT - 1 :]
        chosen = -F.cross_entropy(logits.transpose(1, 2), sequences[:, PROMPT:], reduction="none")
        training.step(-(advantages[:, None] * chosen).mean(), RATE)
        if step > UPDATES - KEPT:
            states[f"{step:03}"] = asdict(training.state())
        print(
            f"fine-tuning: step {step}, mean reward {rewards.mean():.3f}, "
            f"{time.monotonic() - begun:.0f} s",
            flush=True,
        )
    return states


@torch.no_grad()
def _continued(model: GPT, sequences: Tensor) -> Tensor:
    """Return the sequences with `CONTINUATION` sampled bytes behind each."""
    for _ in range(CONTINUATION):
        drawn = torch.multinomial(model(sequences)[:, -1].softmax(dim=1), 1)
        sequences = torch.cat([sequences, drawn], dim=1)
    return sequences


def _words(text: bytes) -> list[bytes]:
    return re.findall(rb"[A-Za-z_]{2,}", text)


def _reward(continuation: bytes, words: set[bytes]) -> float:
    """Return the share of the continuation's words that the training text contains."""
    found = _words(continuation)
    return sum(word in words for word in found) / max(1, len(found))


def main() -> None:
    torch.set_num_threads(1)
    states = {apart: state.weights for apart, state in pretraining().items()}
    for apart in APART[1:]:
        print(f"bf16 words that change in {apart} steps of pre-training: ", end="")
        print(f"{changed(states[0], states[apart]):.2%}")
    steps = [state.weights for state in fine_tuning()]
    for before, after in itertools.pairwise(steps):
        print(f"bf16 words that change in a step of fine-tuning: {changed(before, after):.2%}")


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Return the share of the words that differ between two sets of bf16 tensors."""
    words = sum(tensor.numel() for tensor in after.values())
    differing = sum(
        int((before[name].view(torch.int16) != tensor.view(torch.int16)).sum())
        for name, tensor in after.items()
    )
    return differing / words


if __name__ == "__main__":
    main()
