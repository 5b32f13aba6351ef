"""Brings a saved state back into the caller's own state: first compares the two, then
writes.

`Binding` walks the caller's state beside the saved tree. It writes nothing. It collects
every difference, the tensors to fill in place, the tensors to make, and the work for
the end. `Binding.finish` then does that work with the loaded tensors.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptd.agent.plan.structure import PLAIN
from ckptd.agent.read.saved import Saved
from ckptd.agent.recover.conversions import Read
from ckptd.agent.recover.differences import grouped
from ckptd.agent.recover.leaves import KEEP, Leaves, Resolve, Value, load_into, unchanged
from ckptd.agent.recover.module_binding import Modules
from ckptd.agent.recover.optimizer_binding import Optimizers
from ckptd.agent.recover.optimizer_check import class_difference
from ckptd.agent.recover.options import Options
from ckptd.agent.recover.parameters import SavedParameters, kept_parameters
from ckptd.agent.state.capture import state_of, tensors_in
from ckptd.agent.state.components import kind_of_tensor
from ckptd.agent.state.merge import Foreign, OfRanks
from ckptd.agent.state.naming import Names, is_stateful
from ckptd.agent.state.optimizers import without_wrappers
from ckptd.agent.state.records import as_dict, kind_of
from ckptd.agent.state.settings import MOST_NUMBERS, PLAIN_SETTINGS, PROGRESS, is_schedule
from ckptd.agent.state.tree import (
    RECORDS,
    ObjectNode,
    PerRank,
    TensorRef,
    Unavailable,
    Unsaved,
    empty_like,
    tensor_names,
)
from ckptd.agent.state.versions import Versions, take_versions
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.bounds import PLAIN_TYPES, is_flat
from ckptd.shared.units import some_text

_COMPARED = (torch.Tensor, dict, list, tuple, PerRank)


class Binding:
    """A saved tree that fits the caller's state.

    Load its tensors, then call `finish`, or call `discard`. Raises StructureMismatch.

    in_place: the destinations of tensors, by name. fresh: the devices of the tensors to
    make, by name. unused: the keys of the checkpoint that have no place in the state;
    empty unless `options.strict`. kept: the patterns in `options.keep` that match a
    key.
    """

    def __init__(
        self,
        state: Any,
        tree: Any,
        saved: Saved,
        options: Options,
        foreign: Foreign | None = None,
        recorded: Collection[Mapping[str, Any]] = (),
        versions: Mapping[str, Versions] | None = None,
    ) -> None:
        self._leaves = leaves = Leaves(saved, options, foreign or {}, self._of_ranks)
        names = Names(state)
        kept = kept_parameters(names, leaves.is_kept) if options.keep else frozenset[int]()
        self._modules = Modules(leaves, self._bind_each, versions or {})
        self._optimizers = Optimizers(
            leaves, names, SavedParameters(tree, saved, recorded), self._bind, kept
        )
        self.in_place = leaves.in_place
        self.fresh = leaves.fresh
        self.kept = leaves.kept
        value = self._bind(state, tree, "")
        self.matched, self.fresh_dtypes = leaves.matched, leaves.fresh_dtypes
        # Other ranks may have a place for these keys.
        self.unused, leaves.differences.unused = leaves.differences.unused, []
        self._raise_differences()
        self._value = value

    @property
    def left(self) -> list[str]:
        """The keys of the state that the checkpoint lacks, unless `strict` is on."""
        return self._leaves.left

    def judge(self, read: Read) -> None:
        """Read the saved values that decide whether the recovery would lose anything.

        Raises StructureMismatch if it would; nothing is written. `read` fills the
        tensors that it is given by name.
        """
        self._leaves.judge(read)
        self._raise_differences()

    def _raise_differences(self) -> None:
        if self._leaves.differences:
            self.discard()
            raise self._leaves.differences.error()

    def discard(self) -> None:
        """Remove the tensors that the comparison has made in the state.

        Called instead of `finish`.
        """
        for undo in self._leaves.undo:
            undo()
        self._leaves.undo.clear()

    def remarks(self, *, same_script: bool = True) -> Iterator[tuple[int, str]]:
        """Yield a level of the log and a sentence for each thing that the caller should
        know about what is brought back.

        same_script: False if the script has made its optimizers and schedules with
        other settings than the script that saved them.
        """
        leaves = self._leaves
        if not same_script and leaves.overridden:
            yield (
                logging.WARNING,
                f"settings of the script are replaced by those of the checkpoint: "
                f"{', '.join(leaves.overridden)}; to keep one as the script has set it, pass its "
                f"key in keep=[...] to recover() or training()",
            )
        if values := leaves.changed + (leaves.overridden if same_script else []):
            yield (
                logging.INFO,
                f"restored from the checkpoint: {', '.join(values)}; recover(keep=...) keeps the "
                f"caller's",
            )
        for (theirs, ours), count in leaves.narrowed().items():
            names = f"{str(theirs).removeprefix('torch.')} to {str(ours).removeprefix('torch.')}"
            yield (
                logging.WARNING,
                f"{count} tensors were converted from {names}, which holds fewer digits",
            )
        if leaves.left:
            yield (
                logging.WARNING,
                f"not in the checkpoint, and left as they are: {some_text(grouped(leaves.left))}",
            )
        if leaves.unsaved:
            yield (
                logging.WARNING,
                f"not in the checkpoint, since they could not be saved, and left as they are: "
                f"{some_text(grouped(leaves.unsaved))}",
            )
        if leaves.as_dicts:
            yield (
                logging.WARNING,
                (
                    f"objects under {some_text(grouped(leaves.as_dicts))} came back as dicts of "
                    f"their fields: the state has no such object "
                    "for the fields"
                ),
            )

    def finish(self, resolve: Resolve) -> None:
        """Write everything but the tensors in place.

        `resolve` returns the loaded tensor of a name in `fresh`.
        """
        with torch.no_grad():
            self._value(resolve)

    # -- one method for each kind of destination

    def _bind(self, place: Any, saved: Any, path: str) -> Value:
        if self._leaves.is_kept(path):
            return unchanged
        # Nearly all values of a large state.
        if type(saved) is TensorRef and type(place) in PLAIN and not kind_of_tensor(place):
            return self._leaves.tensor(place, saved, path)
        if isinstance(saved, Unsaved):
            self._leaves.unsaved.append(path)
            return unchanged
        if isinstance(saved, Unavailable):
            return self._leaves.make(saved, path)
        if isinstance(saved, OfRanks):
            return self._of_ranks(place, saved, path)
        if isinstance(place, PerRank):
            return _marked(self._bind(place.value, saved, path))
        if isinstance(place, torch.nn.Module):
            return self._modules.bind(place, saved, path)
        if isinstance(place, torch.optim.Optimizer):
            return self._optimizers.bind(place, saved, path)
        if isinstance(place, torch.Tensor):
            kind = kind_of_tensor(place)
            return (
                self._record(place, kind, saved, path)
                if kind
                else self._leaves.tensor(place, saved, path)
            )
        if type(place) is not dict and is_stateful(place):
            return self._stateful(place, saved, path)
        if kind := kind_of(place):
            return self._record(place, kind, saved, path)
        if isinstance(saved, ObjectNode) and saved.kind not in RECORDS:
            saved = saved.tree
        if isinstance(place, dict):
            return self._dict(place, saved, path)
        if isinstance(place, list):
            return self._list(place, saved, path)
        if type(place) is tuple:
            return self._tuple(place, saved, path)
        if (
            isinstance(saved, ObjectNode)
            and RECORDS[saved.kind].alone is as_dict
            and place is not None
        ):
            return self._leaves.other_kind(path, saved, f"a {type(place).__name__}")
        return self._leaves.make(saved, path)

    def _bind_each(self, pairs: Mapping[Any, tuple[Any, Any, str]]) -> dict[Any, Value]:
        """Bind values of the state, by any key: each with the saved value, and its path.

        Return the `Value` of each. Tensors that fit are bound all at once.
        """
        if self._leaves.options.keep:
            return {key: self._bind(*pair) for key, pair in pairs.items()}
        tensors = {
            key: pair
            for key, pair in pairs.items()
            if type(pair[1]) is TensorRef
            and type(pair[0]) in PLAIN
            and pair[0].layout is torch.strided
            and not pair[0].is_nested
        }
        if tensors:
            places, refs, paths = zip(*tensors.values(), strict=True)
            keys = list(tensors)
            for number in self._leaves.tensors(places, [ref.fqn for ref in refs], paths):
                del tensors[keys[number]]
        return {
            key: unchanged if key in tensors else self._bind(*pair) for key, pair in pairs.items()
        }

    def _of_ranks(self, place: Any, saved: OfRanks, path: str) -> Value:
        if isinstance(place, PerRank):
            return _marked(self._of_ranks(place.value, saved, path))
        if saved.own is not None:
            return self._bind(place, saved.values[saved.own], path)
        on_reshape = self._leaves.options.on_reshape
        if on_reshape is None:
            return self._leaves.differ(
                f"{path} is each rank's own, was saved on {len(saved.values)} ranks, none of them "
                f"this one: recover on as many "
                "ranks, or pass recover() a function on_reshape(key, values) that makes this "
                "rank's value",
                keep=path,
            )
        fresh = self._leaves.make(saved.values, path)

        def put(resolve: Resolve) -> Any:
            made = put_into(place, on_reshape(path, fresh(resolve)))
            return KEEP if made is place else made

        return put

    def _dict(self, place: dict[Any, Any], saved: Any, path: str) -> Value:
        if not isinstance(saved, dict):
            return self._leaves.other_kind(path, saved, "a dict")
        if not place:
            return self._leaves.into(partial(_update, place), saved, path)
        self._leaves.compare(list(saved), list(place), path)
        inside = f"{path}." if path else ""
        keys = [key for key in place if key in saved]
        values = self._bind_each({key: (place[key], saved[key], f"{inside}{key}") for key in keys})
        taken = [
            key
            for key in keys
            if hasattr(saved, "_metadata") and not self._leaves.is_kept(f"{inside}{key}")
        ]

        def put(resolve: Resolve) -> Any:
            for key, value in values.items():
                if value is not unchanged and (made := value(resolve)) is not KEEP:
                    place[key] = made
            if isinstance(place, OrderedDict):  # its order is part of its value
                for key in saved:
                    if key in place:
                        place.move_to_end(key)
                take_versions(place, saved, taken)
            return KEEP

        return put

    def _list(self, place: list[Any], saved: Any, path: str) -> Value:
        if not isinstance(saved, list):
            return self._leaves.other_kind(path, saved, "a list")
        # Plain values, like a history, which may have a million numbers: any length fits.
        if (is_flat(place) and is_flat(saved)) or not (
            any(isinstance(item, Unsaved) for item in saved) or any(map(_is_compared, place))
        ):
            return self._leaves.into(partial(place.__setitem__, slice(None)), saved, path)
        if len(place) != len(saved):
            return self._leaves.differ(
                f"{path}: the checkpoint has a list of {len(saved)}, the state one of {len(place)}",
                keep=path,
            )
        values = [
            self._bind(item, saved[n], f"{path}.{n}" if path else str(n))
            for n, item in enumerate(place)
        ]

        def put(resolve: Resolve) -> Any:
            for n, value in enumerate(values):
                if (made := value(resolve)) is not KEEP:
                    place[n] = made
            return KEEP

        return put

    def _tuple(self, place: tuple[Any, ...], saved: Any, path: str) -> Value:
        if not isinstance(saved, tuple) or len(saved) != len(place):
            return (
                self._leaves.make(saved, path)
                if not place
                else self._leaves.other_kind(path, saved, f"a tuple of {len(place)}")
            )
        values = [
            self._bind(item, saved[n], f"{path}.{n}" if path else str(n))
            for n, item in enumerate(place)
        ]

        def make(resolve: Resolve) -> Any:
            made = [value(resolve) for value in values]
            return tuple(
                item if new is KEEP else new for item, new in zip(place, made, strict=True)
            )

        return make

    def _record(self, place: Any, name: str, saved: Any, path: str) -> Value:
        """Bind an object that is saved as its fields.

        It keeps its identity, unless it cannot be changed.
        """
        kind, leaves = RECORDS[name], self._leaves
        if not isinstance(saved, ObjectNode) or saved.kind != name:
            return leaves.other_kind(path, saved, f"a {name}")
        if why := kind.differs(place, saved.tree):
            return leaves.differ(f"{path}: {why}", keep=path)
        own = {} if kind.whole else kind.fields(place)
        if not own:
            for fqn in tensor_names(saved.tree.get(kind.values)):
                leaves.convert(fqn, path, place.dtype)
            fresh = leaves.make(
                saved.tree, path, place.device if isinstance(place, torch.Tensor) else None
            )
        else:
            leaves.compare(list(saved.tree), list(own), path)
            values = {
                key: self._bind(own[key], saved.tree[key], f"{path}.{key}" if path else key)
                for key in own
                if key in saved.tree
            }

            def fresh(resolve: Resolve) -> Any:
                made = {key: value(resolve) for key, value in values.items()}
                return own | {key: value for key, value in made.items() if value is not KEEP}

        def put(resolve: Resolve) -> Any:
            made = kind.restore(place, fresh(resolve))
            return KEEP if made is place else made

        return put

    def _stateful(self, place: Any, saved: Any, path: str) -> Value:
        """Bind an object with load_state_dict.

        It loads its whole saved state, each tensor placed and sharded like its own of
        that name.
        """
        leaves = self._leaves
        try:
            with state_of(place, path):
                template = place.state_dict()
        except UnsavableValue as error:
            return leaves.differ(str(error), keep=path)
        if leaves.options.strict and isinstance(saved, ObjectNode):
            leaves.differ(*class_difference(place, saved.cls, path), keep=path)
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        disabled = isinstance(tree, dict) and not tree
        if (
            isinstance(template, dict)
            and template
            and disabled
            and isinstance(place, torch.amp.GradScaler)
        ):
            return leaves.differ(
                f"{path}: the checkpoint has a scaler that was disabled, and has no state; the "
                f"scaler of the state is enabled",
                keep=path,
            )
        if isinstance(inner := without_wrappers(place), LRScheduler) and (
            count := _other_groups(tree, len(inner.optimizer.param_groups))
        ):
            return leaves.differ(
                f"{path}: the scheduler was saved for {count} parameter groups, and its optimizer "
                f"has {len(inner.optimizer.param_groups)}",
                keep=path,
            )
        tree, kept = self._without_kept(tree, template, path)
        values = _changed_values(template, tree, path)
        if is_schedule(place):
            leaves.overridden += values
        else:
            leaves.changed += values
        fresh = leaves.alike(tree, tensors_in(template, path), path)

        def put(resolve: Resolve) -> Any:
            load_into(place, _with_kept(fresh(resolve), kept), path, leaves.options)
            return KEEP

        return put

    def _without_kept(self, saved: Any, own: Any, path: str) -> tuple[Any, dict[str, Any]]:
        """Return the saved tree without the keys that the caller keeps.

        Also returns the caller's values of these keys, in containers that are nested
        like the tree.
        """
        if not self._leaves.options.keep:
            return saved, {}
        kept: dict[Any, Any] = {}
        if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
            items = [
                self._without_kept(value, own[n], f"{path}.{n}" if path else str(n))
                for n, value in enumerate(saved)
            ]
            kept = {n: _Kept(deeper) for n, (_, deeper) in enumerate(items) if deeper}
            return ([item for item, _ in items] if kept else saved), kept
        if not isinstance(saved, dict) or not isinstance(own, dict):
            return saved, {}
        made = empty_like(saved)
        for key, value in saved.items():
            inside = f"{path}.{key}" if path else str(key)
            if key in own and self._leaves.is_kept(inside):
                kept[key] = own[key]
                continue
            made[key], deeper = self._without_kept(value, own.get(key), inside)
            if deeper:
                kept[key] = _Kept(deeper)
        return (made if kept else saved), kept


@dataclass(frozen=True, slots=True)
class _Kept:
    """The values inside a dict or a list that the caller keeps.

    A dict that is kept as a whole is no _Kept.
    """

    values: dict[Any, Any]


def _with_kept(made: Any, kept: dict[Any, Any]) -> Any:
    """Put the values that the caller keeps back into their places."""
    for key, value in kept.items():
        if isinstance(value, _Kept):
            _with_kept(made[key], value.values)
        else:
            made[key] = value
    return made


def _update(place: dict[Any, Any], made: dict[Any, Any]) -> None:
    """Put everything that was saved into an empty dict of the caller's."""
    place.update(made)
    if isinstance(place, OrderedDict):
        take_versions(place, made, made)


def _other_groups(saved: Any, groups: int) -> int:
    """Return the number of learning rates of a saved scheduler if its optimizer has
    other groups.

    A scheduler has one learning rate for each parameter group. The schedulers inside
    this one are examined, too. Return 0 if all fit.
    """
    if isinstance(saved, dict):
        rates = saved.get("base_lrs")
        if isinstance(rates, list) and len(rates) != groups:
            return len(rates)
        saved = list(saved.values())
    return (
        next(filter(None, (_other_groups(one, groups) for one in saved)), 0)
        if isinstance(saved, (list, tuple))
        else 0
    )


def _changed_values(own: Any, saved: Any, path: str) -> list[str]:
    """Return a phrase for each plain setting of an object with a state dict that the
    recovery changes.
    """
    # A chain of schedulers.
    if (
        isinstance(own, list)
        and isinstance(saved, list)
        and len(own) == len(saved)
        and not is_flat(saved)
    ):
        return [
            text
            for n, value in enumerate(saved)
            for text in _changed_values(own[n], value, f"{path}.{n}")
        ]
    if not isinstance(own, dict) or not isinstance(saved, dict):
        return []
    found = []
    for name, value in saved.items():
        if name not in own or name in PROGRESS:
            continue
        if _is_setting(value) and _is_setting(own[name]) and value != own[name]:
            found.append(f"{path}.{name} {value!r} (was {own[name]!r})")
        elif isinstance(value, list):
            found += _changed_values(own[name], value, f"{path}.{name}")
    return found


def _is_setting(value: Any) -> bool:
    if type(value) is list:  # such as the learning rate of each group
        return 0 < len(value) <= MOST_NUMBERS and is_flat(value)
    return type(value) in PLAIN_SETTINGS


def _is_compared(item: Any) -> bool:
    """Return True if an item of a list is compared with the saved one, and brought back
    in place.
    """
    return type(item) not in PLAIN_TYPES and (
        isinstance(item, _COMPARED) or bool(kind_of(item)) or is_stateful(item)
    )


def _marked(value: Value) -> Value:
    def put(resolve: Resolve) -> Any:
        made = value(resolve)
        return made if made is KEEP else PerRank(made)

    return put


def put_into(place: Any, made: Any) -> Any:
    """Put `made`, a value that `on_reshape` has returned, into `place`.

    Return the object that then belongs there: `place` itself if it was changed in place.

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
