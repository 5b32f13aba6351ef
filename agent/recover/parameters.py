"""Finds the shapes and dtypes of the parameters of saved optimizers, and the parameters
of the state that stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ckptd.agent.read.saved import Saved
from ckptd.agent.state.dtypes import dtype_of
from ckptd.agent.state.naming import Names
from ckptd.agent.state.tree import ObjectNode, TensorRef


class Form(NamedTuple):
    """The shape and the dtype of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SavedParameters:
    """The forms of the parameters in a checkpoint, by the names that optimizers have
    for them.

    They are the forms of the tensors of the saved modules. A name that several modules
    have may stand for any of their tensors. `recorded` has the member `parameters` of
    each rank's values document (FORMAT.md, section 3): for each optimizer that also
    held other parameters, the name, dtype and shape of all of its parameters.
    """

    def __init__(
        self, tree: Any, saved: Saved, recorded: Collection[Mapping[str, Any]] = ()
    ) -> None:
        self._saved = saved
        self._unnamed = {
            path for forms in recorded for path, parameters in forms.items() if not parameters
        }
        self._several_ranks = len(recorded) > 1
        self._recorded: dict[tuple[str, Any], Form] = {
            (path, name): Form(tuple(shape), dtype_of(dtype))
            for forms in recorded
            for path, parameters in forms.items()
            for name, dtype, shape in parameters
        }
        self._former: dict[str, dict[Any, Any]] = {}
        self._tree = tree

    def rename(self, path: str, former: dict[Any, Any]) -> None:
        """Set the names of an optimizer's parameters in the checkpoint, by their
        present names.

        path: the key of the optimizer.
        """
        self._former[path] = former

    def are_unnamed(self, path: str) -> bool:
        """Return True if the optimizer at `path` may have had flat parameters without
        names.

        A checkpoint of an earlier version does not say so. The answer is then True if
        it is a checkpoint of several ranks.
        """
        return path in self._unnamed or self._several_ranks

    def tensors(self, name: Any) -> Sequence[str]:
        """Return the keys of the saved tensors for which a name in an optimizer may
        stand.
        """
        return self._names.keys.get(name, ())

    def forms(self, path: str, name: Any) -> list[Form]:
        """Return the forms that a parameter of the optimizer at `path` may have had.

        Return [] if the checkpoint does not say.
        """
        recorded = self._recorded.get((path, self._former.get(path, {}).get(name, name)))
        if recorded is not None:
            return [recorded]
        return [
            Form(tuple(self._saved.describe(fqn).size), self._saved.dtype(fqn))
            for fqn in self._names.tensors.get(name, ())
        ]

    @cached_property
    def _names(self) -> _Names:
        """Return the names in the saved tree, which only optimizers ask for."""
        found = _Names()
        found.collect(self._tree, "")
        return found


class _Names:
    """The names in a saved tree that optimizers may have for parameters.

    tensors: the saved tensors for which a name may stand. keys: their keys.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, list[str]] = {}
        self.keys: dict[str, list[str]] = {}

    def collect(self, tree: Any, path: str) -> None:
        if isinstance(tree, ObjectNode) and tree.kind == "module" and isinstance(tree.tree, dict):
            for name, value in tree.tree.items():
                key = f"{path}.{name}" if path else str(name)
                for known in {str(name), key}:
                    self.keys.setdefault(known, []).append(key)
                    if type(value) is TensorRef:
                        self.tensors.setdefault(known, []).append(value.fqn)
        elif type(tree) is TensorRef:
            self.tensors.setdefault(path, []).append(tree.fqn)
            self.keys.setdefault(path, []).append(path)
        elif isinstance(tree, ObjectNode):
            return
        elif isinstance(tree, dict):
            for key, value in tree.items():
                self.collect(value, f"{path}.{key}" if path else str(key))
        elif isinstance(tree, (list, tuple)):
            for number, value in enumerate(tree):
                self.collect(value, f"{path}.{number}" if path else str(number))


def kept_parameters(names: Names, is_kept: Callable[[str], bool]) -> frozenset[int]:
    """Return the ids of the parameters whose keys `is_kept` names.

    They stay as they are, and so does their state in optimizers.
    """
    found = set[int]()
    for (path, _), held in zip(names.modules, names.held(), strict=True):
        inside = f"{path}." if path else ""
        whole = bool(path) and is_kept(path)
        found |= {
            parameter
            for parameter, number in held.number.items()
            if whole or is_kept(f"{inside}{held.names[number]}")
        }
    return frozenset(found)
