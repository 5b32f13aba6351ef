"""Loads one candidate of a recovery, from memory or from storage, into the state of
this rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ckptd.agent.dcp.planner_rounds import PlannedLoad
from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import Exchange, RankGroup
from ckptd.agent.peers.chunk_exchange import ChunkExchange
from ckptd.agent.read.loader import check_partition, empty_on, load, materialize, needed_shards
from ckptd.agent.read.saved import Saved
from ckptd.agent.read.slot_source import SlotSource
from ckptd.agent.read.sources import Opened, newer, open_checkpoint, open_memory, open_slots
from ckptd.agent.read.upload import Upload
from ckptd.agent.recover.binding import Binding
from ckptd.agent.recover.options import Options
from ckptd.agent.state.capture import set_rng_state
from ckptd.agent.state.merge import Foreign, merge
from ckptd.agent.state.versions import merged_versions
from ckptd.shared.errors import (
    CkptdError,
    IntegrityError,
    NewerFormat,
    NotFound,
    StorageError,
    StructureMismatch,
)
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.wire import messages as m

log = logging.getLogger("ckptd.agent")

FIND_SECONDS = 120.0  # long enough for a root with many checkpoints on a slow mount
# How long one rank waits for another to reach the same point, or to finish loading.
RANKS_SECONDS = 600.0
# How long the nodes have to save what they hold in memory, on storage that may be slow.
DELIVER_SECONDS = 3600.0
# How long the daemon has to return the slots of a checkpoint; without them, storage is
# read.
_SLOTS_SECONDS = 5.0


class Loading:
    """The loading of one candidate into the state of this rank.

    Call `open`, `bind`, `load` and `finish`, and `close` in any case. All ranks return
    from one call before any rank makes the next one, because FSDP1 makes the ranks wait
    for each other in `bind` and `finish`. The ranks exchange the dicts that these calls
    return. On several nodes, the ranks read from each other's memory in `load`.
    """

    def __init__(
        self,
        client: Client,
        ranks: RankGroup,
        job: str,
        candidate: m.RecoveryCandidate,
        options: Options,
        overwritten: set[str],
        *,
        nodes: bool = False,
    ) -> None:
        """nodes: True if the job is on several nodes."""
        self._client = client
        self._ranks = ranks
        self._job = job
        self._candidate = candidate
        self._options, self._overwritten = options, overwritten
        self.opened: Opened | None = None
        self._documents: list[dict[str, Any]] = []
        self._fresh: dict[str, torch.Tensor] = {}
        self.rng: dict[str, Any] | None = None
        self._binding: Binding | None = None
        self._writing = False
        self._descriptors: Sequence[Descriptor] = ()
        self._slots: dict[int, SlotSource] = {}
        # The ranks to exchange chunks with.
        self._peers = (
            ranks
            if nodes and candidate.source == "storage" and isinstance(ranks, Exchange)
            else None
        )
        self._exchange: ChunkExchange | None = None

    def open(self) -> dict[str, Any]:
        """Open the candidate, and check it as far as that is cheap.

        Return the damage that was found.
        """
        try:
            opened = self.opened = self._open()
            ranks = self._ranks_to_read(len(opened.sources))
            if not self._options.same_partition:
                opened.saved.check_all_whole()
            failpoint("agent.recover.opened")
        except (IntegrityError, NotFound, OSError) as error:
            return {"damaged": self._damage(error)}
        try:
            self._documents = [opened.document(rank) for rank in ranks]
        except (
            IntegrityError,
            OSError,
        ) as error:  # NotFound is raised instead: a class that is not imported is no damage
            return {"damaged": self._damage(error)}
        return {"damaged": ""}

    def _ranks_to_read(self, saved_on: int) -> Sequence[int]:
        """Return the ranks whose values documents are read: all, or only this one.

        Raises StructureMismatch if this rank saved none.
        """
        if not self._options.same_partition:
            return range(saved_on)
        if saved_on != self._ranks.world_size:
            raise StructureMismatch(
                f"it was saved on {saved_on} ranks, and this job has {self._ranks.world_size}: "
                f"recover without same_partition"
            )
        return [self._ranks.rank]

    def _damage(self, error: Exception) -> str:
        """Return a description of the damage to the checkpoint.

        Raises StorageError if the machine or this user could not read it, and NewerFormat
        if a newer ckptd wrote it: going back to an older checkpoint would lose one that may be
        sound.
        """
        where = f"{self._job}/{self._candidate.tag}"
        if isinstance(error, NewerFormat):
            raise newer(error, where, "step=") from None
        if isinstance(error, OSError):
            failure = StorageError.of(f"read {where}", error)
            if failure.is_no_damage or failure.is_denied:
                raise failure from None
        return str(error)

    def bind(self, state: Any) -> dict[str, Any]:
        """Compare the checkpoint with `state`.

        Return the keys that have no place in `state`.

        Writes nothing. Reads the saved values that decide whether the recovery would
        lose anything, and also returns the damage that was found in them. Raises
        StructureMismatch, and NotFound for a tensor whose dtype this torch does not
        have.
        """
        assert self.opened is not None
        documents = self._documents
        own = self._own_document()
        foreign: Foreign = {}
        tree = merge([document["state"] for document in documents], own, foreign)
        saved = self.opened.saved
        parameters = [document.get("parameters", {}) for document in documents]
        binding = self._binding = Binding(
            state, tree, saved, self._options, foreign, parameters, merged_versions(documents, own)
        )
        if self._options.same_partition:
            check_partition(saved, binding.in_place)
        for name in (*binding.in_place, *binding.fresh):
            # Raises now, because in `load` other ranks could already have written to
            # their states.
            saved.dtype(name)
        found = {
            "unused": binding.unused,
            "kept": sorted(binding.kept),
            "lacking": sorted(self._overwritten.difference(binding.in_place))[:3],
            "matched": binding.matched,
            "damaged": "",
        }
        try:
            binding.judge(lambda wanted: load(saved, wanted))
            return found | self._offer(self.opened, binding)
        except (IntegrityError, OSError) as error:
            return found | {"damaged": self._damage(error)}

    def _offer(self, opened: Opened, binding: Binding) -> dict[str, Any]:
        """Return what this rank can send the others and what it lacks, or nothing if no
        chunks are exchanged.
        """
        if self._peers is None:
            return {}
        self._exchange = ChunkExchange(self._peers, self._job, opened, self._slots, RANKS_SECONDS)
        return self._exchange.offer(_bytes_of_parts(opened, binding))

    def _own_document(self) -> int | None:
        """Return the index of this rank's values document, and take the RNG states from
        it. Return None on another number of ranks.
        """
        documents = self._documents
        if self._options.same_partition:
            self.rng = documents[0].get("rng")
            return 0
        if len(documents) == self._ranks.world_size:
            self.rng = documents[self._ranks.rank].get("rng")
            return self._ranks.rank
        if any(document.get("rng") for document in documents):
            log.warning(
                "random generators are left as they are: they were saved on %d ranks, and this "
                "job has %d",
                len(documents), self._ranks.world_size,
            )  # fmt: skip
        return None

    def _open(self) -> Opened:
        candidate = self._candidate
        if candidate.source == "memory":
            assert candidate.step is not None
            step = candidate.step
            _, descriptors = self._client.call(
                lambda n: m.Fetch(id=n, attempt=candidate.attempt, step=step),
                m.Fetched,
                FIND_SECONDS,
            )
            return open_memory(descriptors, candidate.attempt, step, candidate.tag)
        welcome = self._client.welcome
        repository = open_root(welcome.stage if candidate.source == "stage" else welcome.root)
        return open_checkpoint(
            repository,
            self._job,
            candidate.tag,
            slots=self._slots_in_memory(),
            slots_later=self._peers is not None,
        )

    def _slots_in_memory(self) -> dict[int, SlotSource]:
        """Return the slots in the memory of this node that still hold the candidate, by
        rank. They are closed after the load.
        """
        attempt, step = self._candidate.attempt, self._candidate.step
        if step is None or not self._client.connected:
            return {}
        try:
            fetched, self._descriptors = self._client.call(
                lambda n: m.Fetch(id=n, attempt=attempt, step=step, check=False),
                m.Fetched,
                _SLOTS_SECONDS,
            )
        except CkptdError as error:  # nothing depends on the slots
            log.debug(
                "%s/%s has no copy in the memory of this node: %s",
                self._job,
                self._candidate.tag,
                error,
            )
            return {}
        self._slots = open_slots(
            dict(zip(fetched.ranks, self._descriptors, strict=False)), attempt, step
        )
        return self._slots

    def load(self, bound: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Read and verify every byte, most of them straight into the state.

        Return the damage that was found. bound: what `bind` has returned on each rank.
        """
        assert self.opened is not None
        assert self._binding is not None
        binding, saved = self._binding, self.opened.saved
        try:
            if self._exchange is not None:
                self._exchange.begin(bound)
            with Upload() as upload:
                self._make(binding, saved, upload)
                failpoint("agent.recover.loading")
                self._writing = True
                load(saved, binding.in_place, upload=upload)
        except (IntegrityError, OSError) as error:
            self._overwritten.update(binding.in_place if self._writing else ())
            return {"damaged": self._damage(error), "writing": self._writing}
        finally:
            if self._exchange is not None:
                self._exchange.end_reading()
        return {"damaged": "", "writing": True}

    def _make(self, binding: Binding, saved: Saved, upload: Upload) -> None:
        """Make and fill the tensors that the state does not have, where they belong: on
        the host, and then on the device, an optimizer would need its memory twice.
        """
        fresh = {
            name: device for name, device in binding.fresh.items() if name not in binding.in_place
        }
        unconverted = {
            name: device for name, device in fresh.items() if name not in binding.fresh_dtypes
        }
        made = empty_on(saved, unconverted)
        self._fresh = materialize(saved, [name for name in fresh if name not in made])
        if made:
            load(saved, made, upload=upload)
            self._fresh |= made

    def finish(self) -> dict[str, Any]:
        """Write everything that `load` has not: plain values, states that objects load
        by themselves, and last the RNG states.
        """
        self._close_sources()  # not before: until now other ranks could read from the slots
        binding = self._binding
        assert binding is not None

        def resolve(name: str) -> torch.Tensor:
            tensor = self._fresh.get(name)
            if tensor is None:
                return binding.in_place[name].clone()
            device = binding.fresh[name]
            if (dtype := binding.fresh_dtypes.get(name)) is not None:
                tensor = tensor.to(dtype)
            return tensor if tensor.device.type == device.type == "cpu" else tensor.to(device)

        binding.finish(resolve)
        for level, remark in binding.remarks(same_script=self._same_script()):
            log.log(level, "%s", remark)
        if self.rng is not None:
            set_rng_state(self.rng)
        return {}

    def _same_script(self) -> bool:
        """Return False if rank 0 must tell which settings of the script the checkpoint
        replaces.

        What differs otherwise has changed while the script trained.
        """
        assert self.opened is not None
        mine = self._options.settings
        if mine is None or self._ranks.rank != 0:
            return True
        return self.opened.writer.get("settings") == mine

    @property
    def left(self) -> list[str]:
        """The keys of the state that the checkpoint lacks, after a load that is not
        strict.
        """
        return [] if self._binding is None else self._binding.left

    @property
    def memory_bytes(self) -> int:
        """The number of bytes that were read from memory, not from storage."""
        slots = (
            [source for source in self.opened.sources if isinstance(source, SlotSource)]
            if self.opened is not None
            else []
        )
        return sum(slot.bytes_read for slot in (*slots, *self._slots.values()))

    @property
    def peer_bytes(self) -> int:
        """The number of bytes that were read from the memory of other nodes."""
        return 0 if self._exchange is None else self._exchange.bytes_read

    def close(self) -> None:
        if self._binding is not None and not self._writing:
            self._binding.discard()
        self._close_sources()

    def _close_sources(self) -> None:
        """Close slots and parts as soon as all is read, because ranks that train on
        need the memory. May be called again.
        """
        if self._exchange is not None:
            self._exchange.close()
        if self.opened is not None:
            self.opened.close()
        for slot in self._slots.values():
            slot.close()
        for descriptor in self._descriptors:
            descriptor.close()


class PlannedLoading(Loading):
    """The loading of one candidate, planned by the caller's LoadPlanner."""

    def __init__(
        self,
        client: Client,
        ranks: RankGroup,
        job: str,
        candidate: m.RecoveryCandidate,
        planned: PlannedLoad,
        topic: str,
    ) -> None:
        super().__init__(client, ranks, job, candidate, Options(strict=False), set())
        self._planned, self._topic = planned, topic

    def bind(self, state: Any) -> dict[str, Any]:
        assert self.opened is not None
        self._own_document()
        self._planned.begin(
            state, self.opened.metadata(self._documents), self._ranks, self._topic, RANKS_SECONDS
        )
        return {"unused": [], "kept": [], "lacking": [], "matched": 1, "damaged": ""}

    def load(self, bound: Sequence[dict[str, Any]]) -> dict[str, Any]:
        assert self.opened is not None
        self._writing = True
        try:
            self._planned.read(self.opened)
        except (IntegrityError, OSError) as error:
            return {"damaged": self._damage(error), "writing": True}
        return {"damaged": "", "writing": True}

    def finish(self) -> dict[str, Any]:
        self._close_sources()
        self._planned.finish()
        if self.rng is not None:
            set_rng_state(self.rng)
        return {}


def _bytes_of_parts(opened: Opened, binding: Binding) -> Counter[int]:
    """Return how many bytes a load reads of each part, by the rank that saved the part.

    Counts a replica of a shard for each part that has one.
    """
    saved = opened.saved
    shards = needed_shards(saved, binding.in_place)
    for name in binding.fresh:
        if name not in shards:
            saved.describe(name)
            shards[name] = [saved.aliases[name][0]] if name in saved.aliases else saved.shards[name]
    ranks = {id(source): rank for rank, source in enumerate(opened.sources)}
    found = Counter[int]()
    every = (shard for some in shards.values() for shard in some)
    for shard in {(id(shard.source), shard.item.offset): shard for shard in every}.values():
        found[ranks[id(shard.source)]] += shard.item.length
    return found
