"""Models and optimizers to save with SageMaker's calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support import sharded


def pair(seed: int, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {name: sharded.plain(tensor) for name, tensor in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    return found | {
        f"{number}.{key}": sharded.plain(value)
        for number, state in states.items()
        for key, value in state.items()
    }
