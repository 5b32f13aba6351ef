"""Reads full checkpoints, which are files of torch.save with whole tensors, into a
model and an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptd.agent.convert.contents import Contents, with_leaves
from ckptd.agent.convert.formats import one_sentence
from ckptd.agent.convert.load_model import load_contents
from ckptd.agent.convert.selection import Selection
from ckptd.agent.smp.runs import source_rank
from ckptd.agent.state.naming import Names, with_current_names
from ckptd.shared.errors import InvalidRequest, NotFound, StructureMismatch
from ckptd.shared.names import check_name
from ckptd.shared.units import some_text

SUFFIX = ".pt"
StateDict = dict[str, Any]


def resume_full(
    where: Path,
    tag: str | None,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
    translate: Callable[[StateDict], StateDict] | None,
    device: str | torch.device,
) -> Any:
    """Load the file of a full checkpoint. See `resume_from_checkpoint`."""
    if model is None:
        raise InvalidRequest(
            "a full checkpoint is loaded into a model: pass it, because the names in an optimizer "
            "are its own"
        )
    if translate is not None and optimizer is not None:
        raise InvalidRequest(
            "translate_function translates the names of the model only: pass load_optimizer=False"
        )
    file = where / f"{check_name('tag', tag)}{SUFFIX}" if tag is not None else _newest_file(where)
    if not file.is_file():
        raise NotFound(f"no full checkpoint {file}")
    with one_sentence(file):
        loaded = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(loaded, dict) or not {"model", "user_content"} <= loaded.keys():
        raise NotFound(
            f"{file} is no full checkpoint of save_checkpoint with a model: load it with load_model"
        )
    if optimizer is not None and "optimizer" not in loaded:
        raise NotFound(f"{file} has no optimizer: pass load_optimizer=False")
    restored = (
        None
        if optimizer is None
        else _state_of(model, optimizer, loaded["optimizer"], strict=strict)
    )
    weights = loaded["model"] if translate is None else translate(loaded["model"])
    if not isinstance(weights, dict):
        raise InvalidRequest(
            f"translate_function returned a {type(weights).__name__}; expected a state dict"
        )
    load_contents(
        model,
        Contents(with_leaves(weights), lambda leaves: {}),
        Selection(),
        strict=strict,
        device=device,
    )
    if optimizer is not None and restored is not None:
        optimizer.load_state_dict(restored)
    content = loaded["user_content"]
    rank = dist.get_rank() if dist.is_initialized() else 0
    contents = content if isinstance(content, list) else [content]
    return contents[source_rank("user_content", len(contents), rank)]["content"]


def _state_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: StateDict, *, strict: bool
) -> StateDict:
    """Return a saved state, which has names of parameters, as `load_state_dict` of this
    optimizer takes it.

    Raises StructureMismatch if the optimizer has a parameter that no saved group has,
    or one that is in no module. With `strict` off, such parameters keep their state and
    settings.
    """
    names = Names(model)
    keys, saved = names.of(optimizer), with_current_names(saved, optimizer, names)
    groups = {name: group for group in saved["param_groups"] for name in group["params"]}
    made, number, lacking = optimizer.state_dict(), 0, list[str]()
    for mine, group in zip(made["param_groups"], optimizer.param_groups, strict=True):
        for parameter in group["params"]:
            name = keys[number]
            if name not in groups:
                lacking.append(
                    name if isinstance(name, str) else "a parameter that is not in the model"
                )
            else:
                mine.update({key: value for key, value in groups[name].items() if key != "params"})
                made["state"].pop(number, None)
                if name in saved["state"]:
                    made["state"][number] = {
                        key: _placed(value, parameter)
                        for key, value in saved["state"][name].items()
                    }
            number += 1
    # They belong to no parameter.
    made["state"].update({key: value for key, value in saved["state"].items() if key not in groups})
    if lacking and strict:
        raise StructureMismatch(
            f"the checkpoint has no state of the optimizer for {some_text(lacking)}: pass "
            f"strict=False to keep theirs"
        )
    return made


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    """Return a moment as it has to be for a parameter: sharded as that is.

    Any other value stays.
    """
    if (
        isinstance(parameter, DTensor)
        and isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
    ):
        whole = value.to(parameter.device_mesh.device_type)
        return distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return value


def _newest_file(where: Path) -> Path:
    files = sorted(where.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise NotFound(f"no full checkpoint in {where}")
    return files[-1]
