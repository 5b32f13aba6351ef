"""torch_checkpointing: `attach(manager)` makes a `CheckpointManager` save to ckptd and
load from it, tensor by tensor.

from ckptd.integrations.torch_checkpointing import attach

manager = CheckpointManager(CheckpointManager.Config())
storage = attach(manager)
if newest := storage.newest():
    manager.load(newest, into=state)
manager.save("step_100", state)

A `Storage` of torch_checkpointing gets the bytes of files, one file for each item, and
is not told when the last file of a checkpoint is written. So the saver and the loader
of the manager are replaced, which get the tensors.

Tried with torch_checkpointing 0.1.1. These names of the manager are private: `_saver`,
`_loader`, `_config`, `_write_future` and `_closed`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ckptd.agent import default
from ckptd.agent.agent import Agent, link_of, recover_tag, silence_advice
from ckptd.agent.pending import Pending
from ckptd.agent.state.tree import PerRank
from ckptd.integrations.framework import attach_once, check_version
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, InvalidRequest, RecoveryFailed
from ckptd.shared.wire import messages as m

if TYPE_CHECKING:
    from torch_checkpointing import CheckpointManager

log = logging.getLogger("ckptd.agent")

_VERSIONS = ("0.1.1", "0.2")
_NUMBERED = re.compile(r"(?:.*[-_.])?(\d{1,18})")
_FIND_SECONDS = 600.0
_IDS = msgspec.msgpack.Decoder(list[str])


def attach(
    manager: CheckpointManager,
    *,
    agent: Agent | None = None,
    per_rank: Collection[str] = (),
    rng: bool = True,
) -> CkptdStorage:
    """Make the manager save to ckptd and load from it, and return the storage.

    Call it on every rank, before the first `save` or `load`.

    manager: a CheckpointManager with any configuration. With a synchronous saver,
        `save` returns once the checkpoint is durable.
    agent: the agent that saves and recovers. Default: the agent of this process, which
        the manager's `close` then closes.
    per_rank: the items of which each rank has its own value, such as the position in
        its data.
    rng: also save the random generators. `load` sets them.

    Raises InvalidRequest for a version of torch_checkpointing with which this was not
    tried, for another object, for a manager that has saved or is closed, has callbacks,
    or is attached already. Raises the errors of `Agent` and of `CkptdStorage.newest`.
    """
    check_version("torch_checkpointing", *_VERSIONS)
    from torch_checkpointing import CheckpointManager

    if not isinstance(manager, CheckpointManager):
        raise InvalidRequest(
            f"attach() got a {type(manager).__name__}; expected a CheckpointManager of "
            f"torch_checkpointing"
        )
    if manager._closed or manager._write_future is not None:
        state = "is closed" if manager._closed else "has saved already"
        raise InvalidRequest(
            f"this CheckpointManager {state}: call attach() right after it is made"
        )
    if manager._config.pre_finalize_callback or manager._config.finalize_callback:
        raise InvalidRequest(
            "this CheckpointManager has a callback for the files of a checkpoint, which ckptd does "
            "not write: leave it out, and use the future that save() returns"
        )
    chosen = default.default_agent("attach") if agent is None else agent
    attach_once(manager, "CheckpointManager")
    return CkptdStorage(manager, chosen, frozenset(per_rank), rng=rng, closes=agent is None)


class CkptdStorage:
    """The saver and the loader of a CheckpointManager, made by `attach`.

    agent: the agent that takes the snapshots.
    """

    def __init__(
        self, manager: Any, agent: Agent, per_rank: Collection[str], *, rng: bool, closes: bool
    ) -> None:
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        self.agent = agent
        silence_advice(agent)
        self._per_rank = per_rank
        self._rng, self._closes = rng, closes
        self._waits = isinstance(manager._config.save, SyncCheckpointSaverConfig)
        self._seconds = manager._config.save.wait_timeout_secs
        self._saving: deque[Pending] = deque()
        self._last = -1
        self._follow_attempt()
        link = link_of(agent)
        link.schedules += 1
        self._topic, self._asked = f"torch_checkpointing/{link.schedules}", 0
        self._files = manager._loader
        self._unloaded = self.newest()
        # Ending the process that would write files takes seconds.
        self._ending = threading.Thread(
            target=manager._saver.close, name="ckptd-saver-close", daemon=True
        )
        self._ending.start()
        manager._saver = manager._loader = self

    def _follow_attempt(self) -> None:
        """Start over with the steps and tags of an attempt: all are free in a new one."""
        self._attempt = self.agent.attempt
        self._taken = self.agent.last_step
        self._tags: set[str] = set()

    def newest(self) -> str | None:
        """Return the id of the newest checkpoint of the job, in memory or on storage, or
        None if there is none.

        It is "step-100" for a checkpoint that was saved as "run/step_100". An id that is
        a tag is returned only if no id has a number. Call this on every rank. All ranks
        get the answer of rank 0.

        Raises RecoveryFailed if all checkpoints of the job are damaged;
        DaemonUnreachable, StorageError; SnapshotFailed if a rank does not call it.
        """
        link = link_of(self.agent)
        with link.calls("newest"):
            link.ready()
            found, _ = link.client.call(lambda n: m.Find(id=n), m.Found, _FIND_SECONDS)
            for text in found.damaged:
                log.error("%s/%s", link.job, text)
            if found.damaged and not found.candidates:
                raise RecoveryFailed(
                    f"no sound checkpoint of job {link.job!r} is left: {'; '.join(found.damaged)}; "
                    f"to begin without them, name another job with CKPTD_JOB"
                )
            parsed = [names.parse_tag_directory(one.tag) for one in found.candidates]
            numbers = [f"step-{one.step}" for one in parsed if one and one.step is not None]
            tags = [one.tag for one in parsed if one and one.by_user]
            self._asked += 1
            heard = link.ranks.round(
                f"{self._topic}/{link.attempt}/{self._asked}",
                msgspec.msgpack.encode((numbers + tags)[:1]),
                lambda said: said[:1] * len(said),
                _FIND_SECONDS,
            )
        return next(iter(_IDS.decode(heard)), None)

    @property
    def stager(self) -> CkptdStorage:
        """The object whose `stage` the manager's `prewarm_staging` calls."""
        return self

    def stage(self, state_dict: Any, keys_not_requiring_copy: Sequence[str] = ()) -> Any:
        """Make slots that have room for this payload, and return the payload.

        Raises the errors of `Agent.prepare`.
        """
        self.agent.prepare(dict(state_dict))
        return state_dict

    def save(
        self, path: str | os.PathLike[str], checkpoint: Any
    ) -> tuple[Future[Any], Future[Any]] | None:
        """Take a snapshot of the items of the checkpoint.

        Return two futures: that of the copy, which is done, and that of the save, whose
        result is a `Pending`. Return None with a synchronous saver, after the save.

        An id that ends in a number is the checkpoint of that step, and any other id is a
        tag. If the id does not follow those that were saved before, the next attempt
        begins, so that the newer checkpoint of an id counts.

        Raises InvalidName for an id that cannot be a name, InvalidRequest if nothing was
        loaded although there is a checkpoint, and the errors of `Agent.snapshot`. With a
        synchronous saver, raises the error of a failed save.
        """
        step, tag = _name(path)
        if self._unloaded is not None:
            raise InvalidRequest(
                f"checkpoint {self._unloaded} of job {self.agent.job!r} was not loaded, and this "
                f"run would replace it from its beginning: load storage.newest() before the first "
                f"save, or name another job with CKPTD_JOB"
            )
        state = {
            key: PerRank(item.value) if key in self._per_rank else item.value
            for key, item in checkpoint.get_items().items()
        }
        self._wait(1)
        if self.agent.attempt != self._attempt:
            self._follow_attempt()
        chosen = self._last + 1 if step is None else step
        if chosen <= self._taken or tag in self._tags:
            self._begin_next()
        pending = self.agent.snapshot(
            state,
            step=chosen,
            tag=tag,
            rng=self._rng,
            user_content={"id": os.fspath(path)},
            hold="now",  # as after the copy that `copied` stands for
        )
        self._last = self._taken = chosen
        if tag is not None:
            self._tags.add(tag)
        self._saving.append(pending)
        if self._waits:
            pending.wait("durable", self._seconds)
            return None
        copied: Future[Any] = Future()
        copied.set_result(None)
        return copied, pending.future()

    def _wait(self, left: int) -> None:
        """Wait until at most this many saves are under way, so that a slot is free."""
        while len(self._saving) > left:
            pending = self._saving.popleft()
            try:
                pending.wait("durable", self._seconds)
            except (CkptdError, TimeoutError) as error:
                log.debug("step %d is not durable: %s", pending.step, error)

    def _begin_next(self) -> None:
        self._wait(0)
        link = link_of(self.agent)
        with link.calls("save"):
            link.ready()
            link.begin_next()
        self._follow_attempt()

    def load(
        self,
        path: str | os.PathLike[str],
        checkpoint: Any,
        default_map_location: Any = None,
        strict: bool = False,
        *,
        metadata_format: Any = None,
    ) -> None:
        """Load the newest checkpoint of an id into the items of the checkpoint.

        Tensors are filled in place. An item whose value is None is loaded whole. If
        ckptd has no checkpoint of this id, the files at this path are loaded, as before
        `attach`.

        Raises FileNotFoundError if there are no such files, RuntimeError for a missing
        item, and for any missing key with `strict`; InvalidRequest for a map_location
        that is not a device; and the errors of `Agent.recover`.
        """
        step, tag = _name(path)
        items = checkpoint.get_items()
        recovered = None
        state = {
            key: PerRank(item.value) if key in self._per_rank else item.value
            for key, item in items.items()
        }
        fresh = [key for key, item in items.items() if item.value is None]
        place = _device(default_map_location) if fresh else None
        if metadata_format is None:
            recovered = recover_tag(self.agent, state, tag or f"step-{step:08d}")
        if recovered is None:
            log.info("job %s has no checkpoint %s: its files are loaded", self.agent.job, path)
            self._files.load(
                path, checkpoint, default_map_location, strict, metadata_format=metadata_format
            )
            return
        self._unloaded, self._last = None, recovered.step
        if missing := [key for key in recovered.left if key in items]:
            raise RuntimeError(f"checkpoint {path} has no item {', '.join(missing)}")
        if strict and recovered.left:
            raise RuntimeError(f"checkpoint {path} is missing keys: {', '.join(recovered.left)}")
        loaded = {
            key: value.value if isinstance(value, PerRank) else value
            for key, value in state.items()
        }
        if place is not None:
            loaded |= {key: _moved(loaded[key], place) for key in fresh}
        checkpoint.load_state_dict(loaded)

    def close(self) -> None:
        """Make the newest checkpoint durable, and close the agent unless it was given.

        Raises the errors of `Agent.close`.
        """
        if self._closes and not self.agent.closed:
            self._files.close()
            self.agent.close()
            self._ending.join()


def _name(path: str | os.PathLike[str]) -> tuple[int | None, str | None]:
    """Return the step that the last part of an id ends in, and None; or None and the tag.

    Raises InvalidName if the last part is neither.
    """
    name = os.path.basename(os.fspath(path).rstrip("/"))
    if numbered := _NUMBERED.fullmatch(name):
        return int(numbered[1]), None
    return None, names.check_user_tag(name)


def _device(map_location: Any) -> torch.device | None:
    if map_location is None:
        return None
    if isinstance(map_location, (str, torch.device)):
        return torch.device(map_location)
    raise InvalidRequest(
        f"map_location is a {type(map_location).__name__}; ckptd loads an item that is None in "
        f"into= to one device: give a device, or give tensors in into="
    )


def _moved(value: Any, place: torch.device) -> Any:
    """Return the value with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(place)
    if isinstance(value, dict):
        return {key: _moved(one, place) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(one, place) for one in value)
    return value
