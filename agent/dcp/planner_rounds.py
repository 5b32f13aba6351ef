"""Runs the caller's DCP planners for snapshots and recoveries, in DCP's order of calls,
over the job's own store.

The state is a dict, as `dcp.save` and `dcp.load` take it. A top-level value that has a
state_dict is saved as its state dict, and loads it at a recovery. Plans travel as plain
values that torch.save has written, and are read with `weights_only`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import io
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as p
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from ckptd.agent.link.rounds import RankGroup
from ckptd.agent.plan.layout import Layout
from ckptd.agent.plan.save_plan import Resolved, check_complete, plain_metadata
from ckptd.agent.read.loader import read_plan
from ckptd.agent.read.sources import Opened
from ckptd.agent.state.tree import PerRank
from ckptd.shared.errors import CkptdError, InvalidRequest, StructureMismatch

T = TypeVar("T")
_CLASS = "~class"
_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        p.SavePlan, p.WriteItem, p.WriteItemType, p.TensorWriteData, p.BytesIOWriteData, p.LoadPlan,
        p.ReadItem, p.LoadItemType, md.MetadataIndex, md.ChunkStorageMetadata, md.TensorProperties,
        md.TensorStorageMetadata, md.BytesStorageMetadata,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """This rank's share of a save: its items, and their layout.

    `metadata` is that of the whole save on rank 0, and None elsewhere.
    """

    resolved: Resolved
    layout: Layout
    metadata: Metadata | None


def plan_save(
    planner: SavePlanner,
    state: Any,
    ranks: RankGroup,
    topic: str,
    deadline: float,
    unwanted: Callable[[], CkptdError | None],
) -> PlannedSave:
    """Plan a save together with the other ranks, and return this rank's share.

    topic: the name of this save in the job's store. deadline: on the monotonic clock.
    unwanted: returns an error once the save is not wanted any more, and that error is
    raised. An error that a planner raises on one rank is raised on all ranks, as
    InvalidRequest unless it is a CkptdError. Raises SnapshotFailed if a rank is late.
    """
    made: list[Metadata] = []
    written: list[list[tuple[md.MetadataIndex, str]]] = []  # by rank, on rank 0
    resolved: Resolved | None = None
    token = secrets.token_bytes(32)

    def local() -> bytes:
        _set_up(planner, stateful_dicts(state, ranks.rank), ranks.rank == 0)
        return _encode(planner.create_local_plan())

    def decide(said: list[bytes]) -> list[bytes]:
        planned, metadata = planner.create_global_plan([_decode(one, SavePlan) for one in said])
        made.append(metadata)
        return [_encode(plan) for plan in planned]

    def resolve() -> bytes:
        nonlocal resolved
        resolved = Resolved.of(
            planner.finish_plan(_decode(heard, SavePlan)), planner, weights_only=True
        )
        return _encode(
            [(resolved.writes[row.key].index, row.sizes, row.dtype) for row in resolved.rows]
        )

    def complete(said: list[bytes]) -> list[bytes]:
        items = [_decode(one, list) for one in said]
        check_complete(
            made[0], [(index, sizes) for of_rank in items for index, sizes, _ in of_rank]
        )
        written.extend([(index, dtype) for index, _, dtype in of_rank] for of_rank in items)
        return [token] * len(said)

    heard = _round(ranks, f"{topic}/plan", local, decide, deadline - time.monotonic(), unwanted)
    global_plan = _round(
        ranks, f"{topic}/items", resolve, complete, deadline - time.monotonic(), unwanted
    )
    assert resolved is not None
    metadata = made[0] if made else None
    layout = resolved.lay_out(
        global_plan=global_plan,
        metadata=None if metadata is None else plain_metadata(metadata, written),
    )
    return PlannedSave(resolved, layout, metadata)


def _set_up(planner: SavePlanner, state: dict[str, Any], is_coordinator: bool) -> None:
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(state_dict=state, storage_meta=None, is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]


def stateful_dicts(state: Any, rank: int) -> dict[str, Any]:
    """Return the dict that DCP would hand to a planner, with state dicts in place of
    the objects that have one.

    The key of a `per_rank` value gets `@` and the rank appended. Raises InvalidRequest
    if the state is not a dict.
    """
    if not isinstance(state, dict):
        raise InvalidRequest(
            f"the state is of type {type(state).__name__}; with a planner, expected a dict, as "
            f"for dcp.save"
        )
    made = {}
    for key, value in state.items():
        if isinstance(value, PerRank):
            key, value = f"{key}@{rank}", value.value
        made[key] = value.state_dict() if isinstance(value, Stateful) else value
    return made


class PlannedLoad:
    """A recovery that the caller's load planner plans.

    Call `begin`, then `read`, then `finish`.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self._state: Any = None
        self._dicts: dict[str, Any] = {}
        self._rank = 0
        self._plan: LoadPlan | None = None

    def begin(
        self, state: Any, metadata: Metadata, ranks: RankGroup, topic: str, seconds: float
    ) -> None:
        """Plan the load into `state` together with the other ranks, and write nothing.

        metadata: the checkpoint's. topic: the name of this load in the job's store.
        seconds: how long to wait for the other ranks. Raises StructureMismatch on all
        ranks if a planner does not find a key or a shape that it needs.
        """
        self._state, self._rank = state, ranks.rank

        def local() -> bytes:
            self._dicts = stateful_dicts(self._state, ranks.rank)
            self._planner.set_up_planner(self._dicts, metadata, ranks.rank == 0)
            try:
                return _encode(self._planner.create_local_plan())
            except (
                RuntimeError,
                ValueError,
            ) as error:  # DCP's planner raises these for keys and shapes
                raise StructureMismatch(f"{error}; nothing was written") from None

        def decide(said: list[bytes]) -> list[bytes]:
            return [
                _encode(plan)
                for plan in self._planner.create_global_plan(
                    [_decode(one, LoadPlan) for one in said]
                )
            ]

        heard = _round(ranks, f"{topic}/plan", local, decide, seconds, lambda: None)
        self._plan = self._planner.finish_plan(_decode(heard, LoadPlan))

    def read(self, opened: Opened) -> None:
        """Read every byte of the plan, most of them straight into the state.

        Raises as `read_plan`.
        """
        assert self._plan is not None
        read_plan(opened, self._plan, self._planner)

    def finish(self) -> None:
        """Write everything into the state that `read` has not written in place.

        Objects load their state dicts.
        """
        for key, value in self._state.items():
            own = isinstance(value, PerRank)
            found, place = (
                self._dicts[f"{key}@{self._rank}" if own else key],
                value.value if own else value,
            )
            if isinstance(place, Stateful):
                place.load_state_dict(found)
            else:
                self._state[key] = PerRank(found) if own else found


def _round(
    ranks: RankGroup,
    topic: str,
    say: Callable[[], bytes],
    decide: Callable[[list[bytes]], list[bytes]],
    seconds: float,
    unwanted: Callable[[], CkptdError | None],
) -> bytes:
    mine: bytes | CkptdError
    failure: BaseException | None = None
    try:
        mine = _named(say)
    except CkptdError as error:
        mine, failure = error, error.__cause__

    def decided(said: list[bytes]) -> list[bytes]:
        return _named(lambda: decide(said))

    try:
        return ranks.round(topic, mine, decided, max(0.0, seconds), unwanted)
    except CkptdError as error:
        if failure is not None and error.__cause__ is None:
            error.__cause__ = failure
        raise


def _named(work: Callable[[], T]) -> T:
    try:
        return work()
    except CkptdError:
        raise
    except Exception as error:  # raised by the planner
        raise InvalidRequest(f"the planner has failed: {type(error).__name__}: {error}") from error


def _encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(_plain(value), buffer)
    return buffer.getvalue()


def _decode(data: bytes, kind: type) -> Any:
    try:
        found = _rebuilt(torch.load(io.BytesIO(data), weights_only=True))
    except Exception:
        raise InvalidRequest(
            "the planner's plan holds an object that another rank could not load without running "
            "pickled code; use plain values in it"
        ) from None
    if not isinstance(found, kind):
        raise InvalidRequest(
            f"the planner returned {type(found).__name__}; expected {kind.__name__}"
        )
    return found


def _plain(value: Any) -> Any:
    """Return `value` with each of DCP's objects replaced by a dict of its class name
    and its fields.

    Pickled objects would not do, because releases of Python pickle enums in different
    ways.
    """
    kind = type(value)
    if kind in _CLASSES.values():
        fields = (
            [value.value]
            if isinstance(value, enum.Enum)
            else [_plain(getattr(value, f.name)) for f in dataclasses.fields(value)]
        )
        return {_CLASS: kind.__name__, "fields": fields}
    if kind is torch.memory_format:
        return {_CLASS: "memory_format", "fields": [str(value).removeprefix("torch.")]}
    if kind is dict:
        return {key: _plain(item) for key, item in value.items()}
    return kind(map(_plain, value)) if kind in (list, tuple) else value


def _rebuilt(value: Any) -> Any:
    kind = type(value)
    if kind is dict and _CLASS in value:
        fields = [_rebuilt(item) for item in value["fields"]]
        return (
            getattr(torch, fields[0])
            if value[_CLASS] == "memory_format"
            else _CLASSES[value[_CLASS]](*fields)
        )
    if kind is dict:
        return {key: _rebuilt(item) for key, item in value.items()}
    return kind(map(_rebuilt, value)) if kind in (list, tuple) else value
