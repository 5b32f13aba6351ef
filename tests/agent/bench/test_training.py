"""The training of the benchmark changes every tensor of its state at every step."""

from __future__ import annotations

import torch

from ckptd.agent.bench.training import TrainedModel


def test_every_tensor_changes_at_every_step() -> None:
    training = TrainedModel(1)
    assert training.nbytes == 12 * (1024 * 1024 + 1024)
    assert sorted({name.partition(".")[0] for name in training.tensors}) == [
        "exp_avg",
        "exp_avg_sq",
        "weights",
    ]
    before = {name: tensor.clone() for name, tensor in training.tensors.items()}
    training.step()
    assert [
        name for name, tensor in training.tensors.items() if torch.equal(tensor, before[name])
    ] == []


def test_the_size_is_about_that_which_was_asked_for() -> None:
    assert abs(TrainedModel(50_000_000).nbytes - 50_000_000) < 7e6
