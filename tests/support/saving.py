"""A saver and a deleter on a real disk and real slots, without a daemon around them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.saving.saver import Saver
from ckptd.shared.errors import NotFound, StorageError
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system.fs import PosixFileSystem
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.shared.samples import sample_plan, seal

PLAN = sample_plan(30_000)


class Faulty(PosixFileSystem):
    """The first calls of a kind fail: `faults` says how many, and with what."""

    def __init__(self) -> None:
        self.faults: dict[str, tuple[int, int]] = {}

    def _pass(self, call: str) -> None:
        count, number = self.faults.get(call, (0, 0))
        if count:
            self.faults[call] = count - 1, number
            raise OSError(number, os.strerror(number))

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        self._pass("create")
        return super().create(name, directory, direct=direct, mode=mode)

    def rename(self, old: str, new: str, directory: int, *, replace: bool) -> None:
        self._pass("replace" if replace else "rename")
        super().rename(old, new, directory, replace=replace)

    def remove_directory(self, name: str, directory: int) -> None:
        self._pass("remove_directory")
        super().remove_directory(name, directory)


@dataclass
class Journal:
    """What was appended, in order.

    It breaks at the first record of a kind in `breaks`, and has no room for those in
    `refuses`.
    """

    records: list[r.Record] = field(default_factory=list)
    state: r.JournalState = field(default_factory=r.JournalState)
    breaks: tuple[type[r.Record], ...] = ()
    refuses: tuple[type[r.Record], ...] = ()

    async def append(self, *records: r.Record) -> None:
        for record in records:
            if isinstance(record, self.refuses):
                raise StorageError("cannot begin a new journal file: No space left on device")
            if isinstance(record, self.breaks):
                raise JournalBroken("cannot write the journal: Input/output error")
            self.records.append(record)
            self.state.apply(record)


class World:
    """A saver on a real disk and real slots, one for each rank of a snapshot; `told`:
    where the snapshot was when ranks heard of it.
    """

    def __init__(self, place: Path, world_size: int = 1) -> None:
        (place / "root").mkdir()
        (place / "shm").mkdir()
        self.fs, self.root = Faulty(), place / "root"
        fs = self.fs
        self.storage, self.journal = open_root(place / "root", fs), Journal()
        self.pipeline = Pipeline(1, 1 << 20, MIN_CHUNK)
        self.calls = StorageCalls(60.0)
        self.claimed = list[tuple[str, int]]()
        self.slots = Slots(fs, place / "shm", "segments", 1 << 30)
        self.catalog, self.told, self.counters = Catalog(), list[SnapshotState](), Counter[str]()
        config = Config(root=place / "root", socket=place / "s", codec="raw", keep_last=1)

        def tell(snapshot: Snapshot) -> None:
            self.told.append(snapshot.state)

        events = Events(on_saved=[tell])
        root = Destination(
            config,
            self.storage,
            self.journal,  # type: ignore[arg-type]
            self.catalog,
            self.calls,
            self.pipeline,
            self.counters,
            events,
        )
        self.claims = SimpleNamespace(claimed=self._claimed)
        claims: Any = self.claims
        self.saver = Saver(config, self.slots, root, root, claims, events)
        self.snapshot = Snapshot(
            "gpt", 1, 5, "step-00000005.a0001", world_size, persist=True, state=SnapshotState.SEALED
        )
        self.held: list[Slot] = []
        for rank in range(world_size):
            header = SegmentHeader(
                job="gpt",
                attempt=1,
                rank=rank,
                world_size=world_size,
                slot=0,
                capacity=200_000,
                chunk_size=MIN_CHUNK,
            )
            slot = self.slots.add(self.slots.create(header, -1))
            seal(slot.fd, header, PLAN)
            slot.refresh()
            self.held.append(slot)
            self.snapshot.seals[rank] = RankSeal(
                rank, slot.name, slot.header.generation, slot.header.signature
            )

    @property
    def job(self) -> Job:
        return self.catalog.job("gpt")

    async def _claimed(self, job: Job, attempt: int) -> None:
        self.claimed.append((job.name, attempt))

    def run(self) -> None:
        async def save() -> None:
            task = self.saver.start(self.snapshot)
            assert self.saver.start(self.snapshot) is task
            assert self.saver.busy
            await self.saver.drain()
            await asyncio.sleep(0)
            assert not self.saver.busy

        asyncio.run(save())

    def committed(self) -> bool:
        try:
            self.storage.read_manifest("gpt", self.snapshot.tag)
        except NotFound:
            return False
        return True

    def check_failed(self, words: str) -> None:
        """Check that nothing is committed, that no file is left, and that the ranks got
        the reason.
        """
        assert words in self.snapshot.reason
        assert self.told == [SnapshotState.FAILED]
        assert not self.committed()
        assert self.storage.tags("gpt") == []
        assert (self.counters["failed"], self.counters["persisted"]) == (1, 0)

    def close(self) -> None:
        self.slots.close()
        self.pipeline.close()
        self.calls.close()
