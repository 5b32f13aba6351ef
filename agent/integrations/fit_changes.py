"""Notes the changes that hooks make to a Lightning training and that no state dict has:
modes of modules, frozen parameters, the number of batches that are accumulated, and
parameter groups that are added.

Lightning does not call `on_train_epoch_start` again if a training goes on inside an
epoch. Calling it would draw random numbers again, or count an epoch twice.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

log = logging.getLogger("ckptd.agent")

_MODES = ("training", "track_running_stats")
"""The flags of a module that decide how it computes. `BaseFinetuning` sets the second."""
_TRAINED = "requires_grad"
_ACCUMULATED = "accumulate_grad_batches"
_GROUPS = "groups"

Flags = dict[str, dict[str, bool]]
"""The values of each flag, by the name of the module or the parameter."""


class FitChanges:
    """The changes since `fit` began.

    The values at the beginning come from the script. They are no part of a snapshot, so
    that a script may be given other values.
    """

    def __init__(self) -> None:
        self._flags: Flags = {}
        self._accumulated = 1
        self._groups: list[int] = []  # the number of groups of each optimizer

    def begin(self, trainer: Any) -> None:
        """Note the values at the beginning.

        A second `fit` makes the optimizers again, and finds the other values changed.
        """
        self._groups = [len(one.param_groups) for one in trainer.optimizers]
        if not self._flags:
            self._flags = flags_of(trainer.lightning_module)
            self._accumulated = trainer.accumulate_grad_batches

    def state(self, trainer: Any) -> dict[str, Any]:
        """Return the values that have changed."""
        changed: dict[str, Any] = changed_flags(self._flags, flags_of(trainer.lightning_module))
        if trainer.accumulate_grad_batches != self._accumulated:
            changed[_ACCUMULATED] = trainer.accumulate_grad_batches
        added = [
            one.param_groups[number:]
            for one, number in zip(trainer.optimizers, self._groups, strict=False)
        ]
        if any(added):
            names = {one: name for name, one in trainer.lightning_module.named_parameters()}
            changed[_GROUPS] = [
                [{**group, "params": [names.get(p) for p in group["params"]]} for group in groups]
                for groups in added
            ]
        return changed


def accumulated(trainer: Any, saved: dict[str, Any]) -> int:
    """Return the number of batches that are accumulated after `restore`."""
    return int(saved.get(_ACCUMULATED, trainer.accumulate_grad_batches))


def add_groups(trainer: Any, saved: dict[str, Any]) -> bool:
    """Add the parameter groups to the optimizers again, before their state is recovered.

    Return False, and add nothing, if there are none or if the model or the optimizers
    of the script have changed.
    """
    parameters = dict(trainer.lightning_module.named_parameters())
    groups = saved.get(_GROUPS, [])
    names = [name for several in groups for group in several for name in group["params"]]
    held = {
        id(p) for one in trainer.optimizers for group in one.param_groups for p in group["params"]
    }
    if len(groups) != len(trainer.optimizers) or any(
        name not in parameters or id(parameters[name]) in held for name in names
    ):
        return False
    for optimizer, several in zip(trainer.optimizers, groups, strict=True):
        for group in several:
            optimizer.add_param_group({**group, "params": [parameters[n] for n in group["params"]]})
    return bool(groups)


def restore(trainer: Any, saved: dict[str, Any]) -> None:
    """Make the changes again that `FitChanges.state` has returned."""
    trainer.accumulate_grad_batches = accumulated(trainer, saved)
    if missing := set_flags(trainer.lightning_module, saved):
        log.warning(
            "hooks have changed the mode of %s since the training began, and the model has no "
            "module or parameter of this name: set the mode in on_train_start",
            ", ".join(missing),
        )


def flags_of(module: nn.Module) -> Flags:
    """Return the flags of all modules and parameters."""
    flags: Flags = {
        flag: {
            name: value
            for name, one in module.named_modules()
            if type(value := getattr(one, flag, None)) is bool
        }
        for flag in _MODES
    }
    flags[_TRAINED] = {name: one.requires_grad for name, one in module.named_parameters()}
    return flags


def changed_flags(before: Flags, now: Flags) -> Flags:
    """Return the flags that are not as before. New modules have no value before."""
    changed = {
        flag: {
            name: value for name, value in found.items() if before[flag].get(name, value) != value
        }
        for flag, found in now.items()
    }
    return {flag: found for flag, found in changed.items() if found}


def set_flags(module: nn.Module, flags: Flags) -> list[str]:
    """Set flags, and return the names that the module does not have."""
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
    owners: dict[str, dict[str, Any]] = {**dict.fromkeys(_MODES, modules), _TRAINED: parameters}
    missing: list[str] = []
    for flag, named in owners.items():
        for name, value in flags.get(flag, {}).items():
            if name in named:
                setattr(named[name], flag, value)
            else:
                missing.append(name)
    return missing
