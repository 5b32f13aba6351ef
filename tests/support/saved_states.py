"""States that were saved, held in memory, so that a test can compare and recover them
without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from ckptd.agent.read.saved import Saved
from ckptd.agent.recover.binding import Binding
from ckptd.agent.recover.options import Options
from ckptd.agent.state.capture import capture
from ckptd.agent.state.dtypes import dtype_name
from ckptd.agent.state.merge import Foreign, merge
from ckptd.agent.state.values import decode
from ckptd.agent.state.versions import attach_versions, merged_versions


class Checkpoint:
    """States that were saved, one for each rank, with their tensors in memory."""

    def __init__(self, *states: Any) -> None:
        captured = [capture(state, rank=rank) for rank, state in enumerate(states)]
        self.forms = [decode(one.parameters) for one in captured if one.parameters]
        self.versions = [decode(one.versions) if one.versions else {} for one in captured]
        self.trees = [
            attach_versions(decode(one.state), self.versions[rank], rank)
            for rank, one in enumerate(captured)
        ]
        self.tensors = {
            name: tensor.detach().clone()
            for one in captured
            for name, tensor in one.tensors.items()
        }

    def describe(self, name: str) -> Any:
        return SimpleNamespace(
            size=tuple(self.tensors[name].shape), dtype=dtype_name(self.tensors[name].dtype)
        )

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def described(self, names: Sequence[str]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(self.describe(name).size, self.dtype(name)) for name in names]

    def bind(self, state: Any, own: int | None = 0, **options: Any) -> Binding:
        foreign: Foreign = {}
        tree = merge(self.trees, own, foreign)
        versions = merged_versions([{"versions": one} for one in self.versions], own)
        binding = Binding(
            state, tree, cast(Saved, self), Options(**options), foreign, self.forms, versions
        )
        binding.judge(self.read)
        return binding

    def read(self, places: Mapping[str, torch.Tensor]) -> None:
        for name, place in places.items():
            place.copy_(self.tensors[name])

    def recover(self, state: Any, own: int | None = 0, **options: Any) -> None:
        binding = self.bind(state, own, **options)
        self.read(binding.in_place)

        def resolve(name: str) -> torch.Tensor:
            if name not in binding.fresh:
                return binding.in_place[name]
            return self.tensors[name].to(
                binding.fresh[name], binding.fresh_dtypes.get(name, self.tensors[name].dtype)
            )

        binding.finish(resolve)
