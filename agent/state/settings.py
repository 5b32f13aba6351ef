"""Tells the settings with which a script has made its optimizers and schedules, and
which of their values change as a training runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckptd.agent.state.naming import find
from ckptd.agent.state.optimizers import without_wrappers
from ckptd.shared.formats.bounds import is_flat

PROGRESS = frozenset(
    {
        "last_epoch",
        "_step_count",
        "_last_lr",
        "_get_lr_called_within_step",
        "_is_initial",
        "num_bad_epochs",
        "best",
        "cooldown_counter",
        "T_cur",
        "T_i",
    }
)
"""The values that a schedule counts up as it runs. They change with every recovery."""
PLAIN_SETTINGS = (bool, int, float, str)
MOST_NUMBERS = 8
"""The length up to which a list of numbers counts as a setting, such as the learning
rate of each group.
"""
_SCHEDULED = frozenset({"lr", "momentum", "betas"})
_MOST = 1000  # characters, of the 1,024 that an entry of a Writer may have


@runtime_checkable
class _Stepping(Protocol):
    """An optimizer, a schedule, or a wrapper of accelerate around one."""

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def progress_of(group: Mapping[str, Any]) -> frozenset[str]:
    """Return the names in a parameter group whose values a schedule changes as it runs.

    A schedule of torch notes the learning rate that it begins with as `initial_lr`.
    """
    return _SCHEDULED if "initial_lr" in group else frozenset()


def is_schedule(value: Any) -> bool:
    """Return True for a scheduler of torch, also inside a wrapper of accelerate."""
    return isinstance(without_wrappers(value), LRScheduler)


def settings_of(state: Any) -> str:
    """Return the settings of all optimizers and schedules in a state, as one text.

    Two scripts that make these objects with the same settings have the same text. A
    setting that is False or None is left out. A text that is too long for a `Writer`
    is cut, and ends with a digest of the whole.
    """
    try:
        objects = list(find(state, "", _Stepping))
    except RecursionError:  # a container holds itself, which `capture` refuses by its key
        return ""
    text = "; ".join(
        f"{key or 'the state'}: {', '.join(found)}"
        for key, value in objects
        if (found := list(_settings(value)))
    ).encode(errors="backslashreplace")
    if len(text) > _MOST:
        text = text[: _MOST - 16] + hashlib.sha256(text).hexdigest()[:16].encode()
    return text.decode(errors="ignore")


def _settings(value: Any) -> Iterator[str]:
    """Yield the settings of an optimizer or a schedule."""
    if isinstance(value, Optimizer):
        for number, group in enumerate(value.param_groups):
            prefix = f"{number}." if len(value.param_groups) > 1 else ""
            for name, setting in group.items():
                if name != "params" and name not in progress_of(group):
                    yield from _named(prefix + str(name), setting)
    elif is_schedule(value):
        with suppress(Exception):  # of the caller's own class; `bind` reports it
            for name, setting in value.state_dict().items():
                if name not in PROGRESS:
                    yield from _named(str(name), setting)


def _named(name: str, setting: Any) -> Iterator[str]:
    few = isinstance(setting, (list, tuple)) and len(setting) <= MOST_NUMBERS
    if (few and is_flat(setting)) or (isinstance(setting, PLAIN_SETTINGS) and setting is not False):
        yield f"{name} {setting!r}"
    elif few:  # a chain of schedules
        for number, inner in enumerate(setting):
            for key, value in inner.items() if isinstance(inner, dict) else ():
                if key not in PROGRESS:
                    yield from _named(f"{name}.{number}.{key}", value)
