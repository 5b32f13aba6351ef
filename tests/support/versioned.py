"""Modules whose classes have a later version, which migrates the state of the earlier
one, and torch's own round trip of them.
"""

from __future__ import annotations

import io
from typing import Any

import torch


class Scale(torch.nn.Module):
    """The class of the first program: it keeps the logarithm of its factor."""

    def __init__(self) -> None:
        super().__init__()
        self.log = torch.nn.Parameter(torch.zeros(2))


class LaterScale(torch.nn.Module):
    """The class of a later program, which keeps the factor itself."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros(2))
        self.seen: list[Any] = []

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        self.seen.append(local_metadata.get("version"))
        if local_metadata.get("version", 0) < 2:
            state_dict[f"{prefix}factor"] = state_dict.pop(f"{prefix}log").exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Same(torch.nn.Module):
    """A class whose values changed their meaning with version 2, and not their names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))


class LaterSame(Same):
    _version = 2

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if local_metadata.get("version") == 1:
            state_dict[f"{prefix}w"] = state_dict[f"{prefix}w"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def of_torch(
    saved: torch.nn.Module, module: torch.nn.Module, **options: Any
) -> dict[str, list[float]]:
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    module.load_state_dict(torch.load(file), **options)
    return weights(module)


def weights(module: torch.nn.Module) -> dict[str, list[float]]:
    return {
        name: value.tolist()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
