"""Writes golden checkpoints of the names that earlier versions gave to parameters:
prefixes, numbers, and wrappers that stayed in them.

Run the script with the code of that version, from a checkout of its commit:

    cd CHECKOUT && PYTHONPATH=. .venv/bin/python THIS_REPOSITORY/tests/golden/make_names.py THIS_REPOSITORY/tests/golden/v1/names.tar.xz

It never overwrites an archive. `v1/names.tar.xz` was written by commit d0e5760. The
archive holds one directory for each program below, which is the job that it saved.
"""  # noqa: E501

from __future__ import annotations

import copy
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckptd.agent import Agent

STEP = 3


def layers(inner: Callable[[nn.Module], nn.Module] = lambda module: module) -> nn.Module:
    return nn.Sequential(inner(nn.Sequential(nn.Linear(3, 4), nn.Tanh())), nn.Linear(4, 2))


def with_average() -> dict[str, Any]:
    """The names have the key of the module as prefix: `model.0.0.weight`."""
    model = layers()
    return {
        "model": model,
        "ema": copy.deepcopy(model),
        "optim": torch.optim.AdamW(model.parameters(), lr=0.1),
    }


def with_numbers() -> dict[str, Any]:
    """One parameter is in no module, so all have numbers."""
    model = layers()
    scale = nn.Parameter(torch.ones(2))
    model.forward = lambda x, plain=model.forward: plain(x) * scale
    return {
        "model": model,
        "scale": scale,
        "optim": torch.optim.AdamW([scale, *model.parameters()], lr=0.1),
    }


def with_wrapper_inside() -> dict[str, Any]:
    """A wrapper inside a module stays in the names: `0.module.0.weight`."""
    model = layers(nn.DataParallel)
    return {"model": model, "optim": torch.optim.AdamW(model.named_parameters(), lr=0.1)}


def with_wrappers_around() -> dict[str, Any]:
    """The outer of two wrappers is left out, and the inner stays: `module.0.0.weight`."""
    model: Any = torch.compile(nn.DataParallel(layers()), backend="eager")
    return {
        "model": model,
        "ema": AveragedModel(nn.DataParallel(layers())),
        "optim": torch.optim.AdamW(model.parameters(), lr=0.1),
    }


PROGRAMS = {
    "average": with_average,
    "numbers": with_numbers,
    "inside": with_wrapper_inside,
    "around": with_wrappers_around,
}


def train(state: dict[str, Any], steps: int = STEP) -> None:
    for number in range(steps):
        data = torch.linspace(-1, 1 + number, 12).view(4, 3)
        state["optim"].zero_grad()
        state["model"](data).square().sum().backward()
        state["optim"].step()


def made(name: str, seed: int = 7) -> dict[str, Any]:
    """Return a program as it begins."""
    torch.manual_seed(seed)
    return PROGRAMS[name]()


def main(archive: Path) -> None:
    assert not archive.exists(), f"{archive} exists: jobs of this version are in use"
    with tempfile.TemporaryDirectory() as root:
        os.environ["CKPTD_ROOT"] = root
        for name in PROGRAMS:
            state = made(name)
            train(state)
            agent = Agent(name, root=root)
            agent.snapshot(state, step=STEP).wait("durable", timeout=60)
            agent.close()
        with tarfile.open(archive, "w:xz") as file:
            for name in PROGRAMS:
                file.add(Path(root) / name, name, filter=_of_nobody)


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(Path(sys.argv[1]))
