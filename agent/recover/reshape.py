"""Puts a value that `on_reshape` has returned into its place in the caller's state."""

from __future__ import annotations

from typing import Any

import torch

from ckptd.agent.state.tree import PerRank


def put_into(place: Any, made: Any) -> Any:
    """Put `made` into `place`, and return the object that then belongs there: `place`
    itself if it was changed in place.

    Tensors of the same shape and dtype, objects with `load_state_dict`, dicts, and
    lists of the same length are changed in place. The same holds for everything inside
    these containers. Anything else is replaced.
    """
    if isinstance(place, PerRank):
        place = place.value
    if isinstance(place, torch.Tensor):
        if (
            not isinstance(made, torch.Tensor)
            or made.shape != place.shape
            or made.dtype != place.dtype
        ):
            return made
        place.detach().copy_(made)
        return place
    if isinstance(place, dict):
        if not isinstance(made, dict):
            return made
        filled = {
            key: put_into(place[key], value) if key in place else value
            for key, value in made.items()
        }
        place.clear()
        place.update(filled)
        return place
    if not isinstance(place, type) and callable(getattr(place, "load_state_dict", None)):
        place.load_state_dict(made)
        return place
    if isinstance(place, list) and isinstance(made, list) and len(place) == len(made):
        place[:] = [put_into(own, value) for own, value in zip(place, made, strict=True)]
        return place
    return made
