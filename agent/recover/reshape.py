"""What `on_reshape` has made, put into what the caller's state has in that place."""

from __future__ import annotations

from typing import Any

import torch

from ckptd.agent.state.values import PerRank


def put_into(place: Any, made: Any) -> Any:
    """Tensors of the same shape and objects with `load_state_dict` are changed themselves, in containers too; whatever else is replaced.

    Returns what then belongs in the place: `place` itself if that was changed.
    """
    if isinstance(place, PerRank):
        place = place.value
    if isinstance(place, torch.Tensor):
        if not isinstance(made, torch.Tensor) or made.shape != place.shape or made.dtype != place.dtype:
            return made
        place.detach().copy_(made)
        return place
    if isinstance(place, dict):
        if not isinstance(made, dict):
            return made
        filled = {key: put_into(place[key], value) if key in place else value for key, value in made.items()}
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
