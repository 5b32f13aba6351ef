"""The parts of a binding that every kind of destination needs: tensors to fill, tensors
to make, keys to compare, differences, and calls of the loaders of the caller's objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckptd.agent.plan.structure import all_lacking_memory, firsts, lacking_memory, local_part
from ckptd.agent.read.saved import Saved
from ckptd.agent.recover.conversions import (
    Read,
    converted_losses,
    narrows,
    refused,
    shared_losses,
    unequal,
)
from ckptd.agent.recover.differences import Differences
from ckptd.agent.recover.optimizer_check import changed_settings
from ckptd.agent.recover.options import Options
from ckptd.agent.state.merge import Foreign, OfRanks, has_own, own_part
from ckptd.agent.state.optimizers import class_of
from ckptd.agent.state.records import as_dict
from ckptd.agent.state.settings import progress_of
from ckptd.agent.state.tensor_check import is_expanded, is_fake, is_uninitialized
from ckptd.agent.state.tree import (
    RECORDS,
    ObjectNode,
    PerRank,
    TensorRef,
    any_node,
    empty_like,
    filled,
    like,
    tensor_names,
    unavailable,
)
from ckptd.shared.errors import CkptdError, RecoveryFailed

_dtype, _shape, _is_meta, _requires_grad = (
    attrgetter(name) for name in ("dtype", "shape", "is_meta", "requires_grad")
)
_stride = torch.Tensor.stride

Resolve = Callable[[str], torch.Tensor]
KEEP = object()
Value = Callable[[Resolve], Any]
"""Makes the value for a place in the caller's state, or returns `KEEP` if the object in
that place stays and is changed in place.
"""


def unchanged(resolve: Resolve) -> Any:
    """Return `KEEP`: the `Value` of a place that stays as it is."""
    return KEEP


class Leaves:
    """The findings of one comparison of a state with a saved tree. Nothing is written.

    in_place: the destinations of tensors, by name. fresh: the devices of the tensors to
    make, by name. fresh_dtypes: the new dtypes of the tensors to make that are
    converted. matched: the number of saved values that have a place in the state.
    differences: all differences. kept: the patterns in `options.keep` that match a key.
    changed: a phrase for each plain value of an object that gets another value.
    overridden: a phrase for each such value with which the script has set up an
    optimizer or a schedule. left: with `strict` off, the keys of the state that the
    checkpoint does not have. unsaved: the keys of values that the checkpoint leaves
    out. as_dicts: the keys under which records come back as dicts of their fields.

    undo: the calls that undo the changes that the comparison had to make in the state.
    paths: the keys of the tensors in the state, by name. wholes: for each key that
    cannot be kept alone, the key that can be kept instead. of_ranks: binds a `per_rank`
    value.
    """

    def __init__(
        self,
        saved: Saved,
        options: Options,
        foreign: Foreign,
        of_ranks: Callable[[Any, OfRanks, str], Value],
    ) -> None:
        self.saved, self.options = saved, options
        self.in_place: dict[str, torch.Tensor] = {}
        self.fresh: dict[str, torch.device] = {}
        self.fresh_dtypes: dict[str, torch.dtype] = {}
        self.matched = 0
        self.differences = Differences(options=options)
        self.kept: set[str] = set()
        self.changed: list[str] = []
        self.overridden: list[str] = []
        self.left: list[str] = []
        self.unsaved: list[str] = []
        self.as_dicts: list[str] = []
        self.undo: list[Callable[[], None]] = []
        self.paths: dict[str, str] = {}
        self.differences.bound = self.paths.values()
        # The caller's tensors that a loader will write to, by name.
        self._loaded: dict[str, torch.Tensor] = {}
        # By two names, a sentence for a difference, and what can be kept.
        self._expected: dict[tuple[str, str], tuple[str, str]] = {}
        self.wholes: dict[str, str] = {}
        self._foreign, self._of_ranks = foreign, of_ranks

    def differ(self, *sentences: str, keep: str = "") -> Value:
        """Record differences. Return a value that changes nothing.

        keep: the key that the caller can keep so that these differences do not matter.
        """
        self.differences.others += sentences
        self.differences.to_keep += [self.wholes.get(keep, keep)] if keep and sentences else []
        return unchanged

    def expect_equal(self, pairs: Iterable[tuple[str, str]], sentence: str, keep: str) -> None:
        """Record the sentence as a difference if the saved tensors of a pair of names
        are not equal. `judge` reads and compares them.
        """
        self._expected |= {pair: (sentence, keep) for pair in pairs if pair[0] != pair[1]}

    def is_kept(self, path: str) -> bool:
        """Return True if `keep` leaves the caller's value of this key as it is."""
        if not self.options.keep:
            return False
        matching = self.note_kept(path)
        self.matched += matching
        return matching

    def note_kept(self, path: str) -> bool:
        """Note which patterns in `keep` match this key of the state.

        Return True if any does.
        """
        matching = {pattern for pattern in self.options.keep if fnmatchcase(path, pattern)}
        self.kept |= matching
        return bool(matching)

    def note_settings(self, own: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> None:
        """Note the settings of a parameter group that the recovery changes."""
        progress = progress_of(own)
        self.changed += changed_settings(own, {n: saved[n] for n in saved if n in progress}, path)
        self.overridden += changed_settings(
            own, {n: saved[n] for n in saved if n not in progress}, path
        )

    def other_kind(self, path: str, saved: Any, expected: str) -> Value:
        """Record that the checkpoint has a value of another kind than the state."""
        found = "a tensor" if isinstance(saved, TensorRef) else type(saved).__name__
        if isinstance(saved, ObjectNode):
            found = f"a {saved.kind}" if saved.kind in RECORDS else "an object"
        return self.differ(
            f"{path or 'the state'}: the checkpoint has {found}, the state {expected}", keep=path
        )

    def tensor(self, place: torch.Tensor, saved: Any, path: str) -> Value:
        """Bind a tensor, which is filled in place."""
        if not isinstance(saved, TensorRef):
            return self.other_kind(path, saved, "a tensor")
        size, dtype = self.saved.describe(saved.fqn).size, self.saved.dtype(saved.fqn)
        part = local_part(place)
        if why := _misfit(place, size, dtype) or _without_memory(part):
            return self.differ(f"{path}: {why}", keep=path)
        self.matched += 1
        self.in_place[saved.fqn] = place if isinstance(place, ShardedTensor) else place.detach()
        self.paths[saved.fqn] = path
        return unchanged

    def tensors(
        self, places: Sequence[torch.Tensor], names: Sequence[str], paths: Sequence[str]
    ) -> list[int]:
        """Bind strided tensors of the classes in PLAIN that fit, as `tensor` does.

        Return the numbers of the others.
        """
        forms = self.saved.described(names)
        columns = map(type, places), map(_dtype, places), map(_shape, places), map(_stride, places)
        kinds = list(zip(*columns, map(_is_meta, places), forms, strict=True))
        fitting = {
            kind
            for kind, place in firsts(kinds, places).items()
            if not _misfit(place, *kind[-1]) and not place.is_meta
        }
        others = all_lacking_memory(places)
        if len(fitting) < len(set(kinds)):
            others = sorted({*others, *(n for n, kind in enumerate(kinds) if kind not in fitting)})
        if others:
            left = set(others)
            numbers = [number for number in range(len(places)) if number not in left]
            names, paths = [names[n] for n in numbers], [paths[n] for n in numbers]
            places = [places[n] for n in numbers]
        self.matched += len(places)
        if set(map(type, places)) != {torch.Tensor} or any(map(_requires_grad, places)):
            places = [place.detach() for place in places]
        self.in_place.update(zip(names, places, strict=True))
        self.paths.update(zip(names, paths, strict=True))
        return others

    def convert(self, name: str, path: str, dtype: torch.dtype) -> None:
        """Have the saved tensor of this name made in another dtype.

        Record a difference if that dtype cannot hold its values.
        """
        own = self.saved.dtype(name)
        if why := refused(own, dtype):
            self.differ(_other_dtype(path, own, dtype, why), keep=path)
        self.fresh_dtypes[name] = dtype
        self.paths[name] = path

    def have_memory(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Return True if all tensors have memory.

        Methods of the caller's objects may be called then. Otherwise, record the
        tensors without memory as differences. `tensors` has pairs of a key in the state
        and a tensor.
        """
        lacking = {
            path: why
            for path, tensor in tensors
            if not is_uninitialized(tensor)
            and not isinstance(tensor, ShardedTensor)
            and (why := _without_memory(local_part(tensor)))
            and not self.is_kept(path)
        }
        for path, why in lacking.items():
            self.differ(f"{path}: {why}", keep=path)
        return not lacking

    def judge(self, read: Read) -> None:
        """Read the saved values, and record what would be lost where these values
        decide it.
        """
        places = self.in_place | self._loaded
        theirs = self.saved.described(list(places))
        wanted: dict[str, tuple[torch.Tensor | None, torch.dtype]] = {
            name: (place, place.dtype)
            for (name, place), (_, dtype) in zip(places.items(), theirs, strict=True)
            if place.dtype is not dtype
        }
        wanted |= {name: (None, dtype) for name, dtype in self.fresh_dtypes.items()}
        for name, loss in converted_losses(self.saved, wanted, read):
            path = self.paths[name]
            self.differ(
                _other_dtype(path, self.saved.dtype(name), wanted[name][1], loss), keep=path
            )
        for pair in unequal(self.saved, self._expected, read):
            sentence, keep = self._expected[pair]
            self.differ(sentence, keep=keep)
        for one, other in shared_losses(self.saved, places, read):
            self.differ(
                f"{self.paths[one]} and {self.paths[other]} share memory in the state, and differ "
                f"in the checkpoint: untie them, or "
                "save them tied",
                keep=self.paths[other],
            )

    def narrowed(self) -> dict[tuple[torch.dtype, torch.dtype], int]:
        """Return the number of tensors that are converted to a narrower dtype, by
        dtypes.
        """
        dtypes = {name: place.dtype for name, place in self.in_place.items()} | self.fresh_dtypes
        own = [dtype for _, dtype in self.saved.described(list(dtypes))]
        found = Counter(zip(own, dtypes.values(), strict=True))
        return {pair: count for pair, count in found.items() if narrows(*pair)}

    def compare(self, theirs: list[Any], ours: list[Any], path: str) -> None:
        """Record the keys that only one side has.

        What the checkpoint lacks differs if `strict` is on, otherwise it is `left`.
        """
        known, wanted = set(theirs), set(ours)
        prefix = f"{path}." if path else ""
        missing = [
            key
            for key in (f"{prefix}{key}" for key in ours if key not in known)
            if not self.is_kept(key)
        ]
        if self.options.strict:
            self.differences.missing += missing
        else:
            self.left += missing
        self.differences.unused += [f"{prefix}{key}" for key in theirs if key not in wanted]

    def make(
        self, saved: Any, path: str, device: torch.device | None = None, *, mark: bool = True
    ) -> Value:
        """Make the saved value itself, with new tensors.

        With `mark`, the `per_rank` values in it get their mark again.
        """
        saved = own_part(saved, self._foreign)
        self.matched += 1
        for key, why in unavailable(saved, path):
            self.differ(f"{key or 'the state'}: {why}", keep=path)
        if any_node(
            saved,
            lambda node: (
                isinstance(node, ObjectNode)
                and node.kind in RECORDS
                and RECORDS[node.kind].alone is as_dict
            ),
        ):
            self.as_dicts.append(path)
        if has_own(saved):
            return self._with_own(saved, path, mark=mark)
        for name in tensor_names(saved):
            self.fresh.setdefault(name, device or torch.device("cpu"))
        return lambda resolve: filled(saved, resolve)

    def alike(
        self, saved: Any, template: Mapping[str, torch.Tensor], path: str, *, lossless: bool = False
    ) -> Value:
        """Make the saved value itself, with its tensors placed like those of the
        template.

        Each tensor goes to the device and gets the placements of the template's tensor
        of the same name. With `lossless`, record each tensor whose values the
        template's tensor of the same shape could not hold.
        """
        fresh = self.make(saved, path, mark=False)
        sharded: dict[str, torch.Tensor] = {}
        for name in self.fresh.keys() & template.keys():
            own = template[name]
            self.fresh[name] = own.device
            if is_uninitialized(own):
                continue
            if lossless and tuple(own.shape) == tuple(self.saved.describe(name).size):
                self.paths[name] = name
                if why := refused(self.saved.dtype(name), own.dtype):
                    self.differ(
                        _other_dtype(name, self.saved.dtype(name), own.dtype, why), keep=name
                    )
                else:
                    self._loaded[name] = own.detach()
            if isinstance(own, (DTensor, ShardedTensor)) and tuple(own.shape) == tuple(
                self.saved.describe(name).size
            ):
                del self.fresh[name]
                sharded[name] = self.in_place[name] = (
                    own if isinstance(own, ShardedTensor) else torch.empty_like(own.detach())
                )
                self.paths[name] = name
        return lambda resolve: fresh(
            lambda name: sharded[name] if name in sharded else resolve(name)
        )

    def into(self, put: Callable[[Any], None], saved: Any, path: str) -> Value:
        """Make the saved value itself, and pass it to `put`."""
        fresh = self.make(saved, path)

        def take(resolve: Resolve) -> Any:
            put(fresh(resolve))
            return KEEP

        return take

    def _with_own(self, saved: Any, path: str, *, mark: bool) -> Value:
        if isinstance(saved, OfRanks):
            return self._of_ranks(PerRank(None) if mark else None, saved, path)
        if isinstance(saved, ObjectNode):
            value = self._with_own(saved.tree, path, mark=mark)
            return lambda resolve: filled(
                ObjectNode(saved.kind, value(resolve), saved.cls), resolve
            )
        if isinstance(saved, dict):
            values = {
                key: self.make(value, f"{path}.{key}" if path else str(key), mark=mark)
                for key, value in saved.items()
            }

            def fill(resolve: Resolve) -> Any:
                made = empty_like(saved)
                made.update({key: value(resolve) for key, value in values.items()})
                return made

            return fill
        items = [
            self.make(value, f"{path}.{n}" if path else str(n), mark=mark)
            for n, value in enumerate(saved)
        ]
        return lambda resolve: like(saved, [item(resolve) for item in items])


def _misfit(place: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return the reason why a tensor of the state does not take a saved tensor of this
    size and dtype, or "".

    It does not depend on the tensor's values and memory.
    """
    if is_fake(place):
        return (
            "the state's tensor is a fake tensor, which has no memory; make it outside of "
            "FakeTensorMode"
        )
    if is_uninitialized(place):
        return "the state's tensor has no memory yet; run one forward pass of the lazy module first"
    if place.shape != size:
        return f"the checkpoint has shape {list(size)}, the state {list(place.shape)}"
    part = local_part(place)
    if not part.is_meta and is_expanded(part):
        return "the state's tensor is expanded, so that its elements share memory; clone() it first"
    why = "" if part.is_meta else refused(dtype, place.dtype)
    return why and _dtypes_differ(dtype, place.dtype, why)


def _dtypes_differ(theirs: torch.dtype, ours: torch.dtype, why: str) -> str:
    theirs_name, ours_name = (str(dtype).removeprefix("torch.") for dtype in (theirs, ours))
    return f"the checkpoint has {theirs_name}, the state {ours_name}, and {why}"


def _other_dtype(path: str, theirs: torch.dtype, ours: torch.dtype, why: str) -> str:
    return f"{path}: {_dtypes_differ(theirs, ours, why)}"


def _without_memory(part: torch.Tensor) -> str:
    """Return the reason why a tensor's memory does not hold its elements, or "" if it
    does.
    """
    if part.is_meta:
        return (
            "the state's tensor is on the meta device; give it memory first "
            "(module.to_empty(device=...))"
        )
    lacking = lacking_memory(part) if part.layout is torch.strided else ""
    return lacking and f"{lacking}: give it memory first"


def load_into(place: Any, state: Any, path: str, options: Options, **arguments: Any) -> Any:
    """Call an object's own `load_state_dict`, and return what it returns.

    Raises RecoveryFailed for an exception in it. `options` are the options of the
    recovery.
    """
    with loader_of(place, path, options):
        return place.load_state_dict(state, **arguments)


@contextmanager
def loader_of(place: Any, path: str, options: Options) -> Iterator[None]:
    """Context manager.

    Raise RecoveryFailed for an exception of the caller's object in its loader.

    The error has the call of `recover` that leaves this object as it is. `options` are
    the options of the recovery.
    """
    try:
        yield
    except CkptdError:
        raise
    except Exception as error:
        raise RecoveryFailed(
            f"{path or 'the state'}: load_state_dict() of {class_of(place)} raised {error!r}; the "
            f"state is partly overwritten: rebuild it, with this object set up so that it can load "
            f"its saved state, and recover again. To leave this object as it is, call "
            f"{options.call_that_keeps(path)}",
            overwritten=True,
        ) from error
