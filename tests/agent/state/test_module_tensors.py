"""Tests which tensors of a module are named, and which pairs of tensors fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckptd.agent.state.module_tensors import difference, missing, raw_tensors, tensors_of


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("not_kept", torch.ones(1), persistent=False)
    return model


def test_tied_tensors_have_all_their_names_and_buffers_that_are_not_saved_none() -> None:
    model = tied()
    assert list(raw_tensors(model)) == ["kept", "0.weight", "1.weight"]
    wrapped: Any = torch.compile(model, backend="eager")
    assert next(iter(raw_tensors(wrapped))) == "_orig_mod.kept"
    assert tensors_of(wrapped) == raw_tensors(model)


def test_a_tied_tensor_is_not_missing_if_it_is_there_under_another_name() -> None:
    own = tensors_of(tied())
    assert missing(own, ["kept", "1.weight"]) == []
    assert missing(own, ["kept"]) == ["0.weight", "1.weight"]


def test_values_that_would_be_lost_do_not_fit() -> None:
    half = torch.ones(2, dtype=torch.float16)
    assert difference("w", (2,), torch.float64, half) == ""
    assert difference("w", (2,), torch.int64, half) == ""
    assert difference("w", (3,), torch.float16, half) == (
        "w: the checkpoint has shape [3], the model [2]"
    )
    for dtype, own in ((torch.complex64, half), (torch.float32, half.int())):
        assert "cannot hold its values" in difference("w", (2,), dtype, own)
