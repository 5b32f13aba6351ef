"""Saves and resumes full checkpoints with SageMaker's calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.agent import smp
from ckptd.shared.errors import (
    AlreadyExists,
    InvalidName,
    InvalidRequest,
    StructureMismatch,
    UnsavableValue,
)
from tests.agent.smp.pairs import pair, plain
from tests.support import sharded
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Ranks


def test_a_full_checkpoint_is_one_file_with_everything(root: Path) -> None:
    saved = pair(1, steps=2)
    smp.save_checkpoint(
        root, "whole", partial=False, model=saved[0], optimizer=saved[1], user_content={"epoch": 3}
    )
    loaded = torch.load(root / "whole.pt", weights_only=True)
    assert torch.equal(loaded["model"]["0.weight"], saved[0][0].weight)  # type: ignore[index]
    model, optimizer = pair(9)
    assert smp.resume_from_checkpoint(root, partial=False, model=model, optimizer=optimizer) == {
        "epoch": 3
    }
    assert plain(model, optimizer) == plain(*saved)
    with pytest.raises(
        AlreadyExists, match="whole.pt exists already: choose another name, or remove it first"
    ):
        smp.save_checkpoint(root, "whole", partial=False, model=saved[0])


def test_a_function_translates_the_names(root: Path) -> None:
    saved, _ = pair(1)
    smp.save_checkpoint(root, "whole", partial=False, model=saved)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    model = Named()
    names = {"0": "first", "1": "second"}

    def translate(state: dict[str, Any]) -> dict[str, Any]:
        return {f"{names[name[0]]}.{name[2:]}": tensor for name, tensor in state.items()}

    smp.resume_from_checkpoint(
        root, tag="whole", partial=False, model=model, translate_function=translate
    )
    assert torch.equal(model.second.weight, saved[1].weight)  # type: ignore[index]
    with pytest.raises(InvalidRequest, match="^translate_function: only for partial=False"):
        smp.resume_from_checkpoint(root, model=model, translate_function=translate)


def test_content_that_torch_cannot_load_fails_a_full_checkpoint_by_its_name(root: Path) -> None:
    model, _ = pair(1)
    with pytest.raises(
        UnsavableValue, match=r"user_content\.content\.place: a pathlib\.PosixPath cannot be loaded"
    ):
        smp.save_checkpoint(
            root, "whole", partial=False, model=model, user_content={"place": Path("/x")}
        )
    assert not (root / "whole.pt").exists()


@pytest.mark.parametrize("kind", ["fresh", "sgd", "groups"])
def test_every_optimizer_of_a_full_checkpoint(root: Path, kind: str) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, adam = pair(seed)
        if kind == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.1 * seed)
        if kind == "groups":
            groups: Any = [
                {"params": [model[0].weight], "lr": 0.3 * seed},  # type: ignore[index]
                {"params": list(model[1].parameters())},  # type: ignore[index]
            ]
            return model, torch.optim.AdamW(groups, lr=0.1, foreach=False)
        return model, adam

    model, optimizer = made(1)
    if kind == "groups":
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    smp.save_checkpoint(root, "whole", partial=False, model=model, optimizer=optimizer)
    other, restored = made(2)
    smp.resume_from_checkpoint(root, partial=False, model=other, optimizer=restored)
    assert plain(other, restored) == plain(model, optimizer)
    assert restored.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_parameter_that_was_saved_without_moments_has_none(tmp_path: Path) -> None:
    model, optimizer = pair(9, steps=1)
    named = [name for name, _ in model.named_parameters()]
    saved = {"state": {}, "param_groups": [{"lr": 0.5, "params": named}]}
    content = {"rank": 0, "content": None}
    torch.save(
        {"model": model.state_dict(), "optimizer": saved, "user_content": content},
        tmp_path / "whole.pt",
    )
    smp.resume_from_checkpoint(tmp_path, partial=False, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


def test_nothing_of_a_full_checkpoint_is_loaded_if_the_optimizer_does_not_fit(root: Path) -> None:
    model, optimizer = pair(1, steps=1)
    smp.save_checkpoint(root, "whole", partial=False, model=model, optimizer=optimizer)
    other, _ = pair(2)
    foreign = torch.optim.AdamW([*other.parameters(), nn.Parameter(torch.ones(1))])
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(
        StructureMismatch,
        match="no state of the optimizer for a parameter that is not in the model: pass "
        "strict=False",
    ):
        smp.resume_from_checkpoint(root, partial=False, model=other, optimizer=foreign)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    smp.resume_from_checkpoint(root, partial=False, model=other, optimizer=foreign, strict=False)
    assert len(foreign.state) == 4
    with pytest.raises(
        InvalidRequest,
        match="^translate_function translates the names of the model only: pass "
        "load_optimizer=False",
    ):
        smp.resume_from_checkpoint(
            root, partial=False, model=other, optimizer=foreign, translate_function=dict
        )
    with pytest.raises(InvalidName):
        smp.resume_from_checkpoint(root, tag="../x", partial=False, model=other)


def fail_on_rank(socket: Path, place: Path) -> str:
    os.environ["CKPTD_SOCKET"] = str(socket)
    try:
        smp.save_checkpoint(
            place, "full", partial=False, model=HERE["model"], user_content=Path("/x")
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        smp.close()
    return ""


def test_an_error_of_rank_0_is_raised_on_all_ranks(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        ranks.call(sharded.build, "ddp", 1)
        first, second = ranks.call(fail_on_rank, daemon.home.socket, daemon.home.root)
    assert first.startswith("UnsavableValue: ")
    assert second.startswith(
        f"StorageError: rank 0 could not write {daemon.home.root / 'full.pt'}: "
    )
