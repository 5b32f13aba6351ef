"""Keeps snapshots in memory that were saved for another root apart from the root that
is served, until a person decides about them.

A root is known by its identity (FORMAT.md, section 1). If the root was deleted and
created again, or if another disk is mounted at its path, the segments of the former
root are still in memory. Neither their snapshots nor the numbers of their attempts
belong to the new root.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptd.daemon import log_events
from ckptd.daemon.memory.slots import ForeignSlot, Slot, Slots
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, ForeignMemory, IntegrityError
from ckptd.shared.formats.segment import RootMark, SlotState, read_header, read_root_mark
from ckptd.shared.system.settings import FOREIGN_MEMORY_CHOICES

log = logging.getLogger("ckptd.slots")

SHOWN = 8
"""The digits of an identity that a sentence shows."""


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """The foreign memory of one job: its newest sealed snapshot by (attempt, step), the
    root that it was saved for, and its bytes.
    """

    job: str
    attempt: int
    step: int
    root: RootMark
    nbytes: int

    def report(self) -> dict[str, object]:
        """Return the entry of this snapshot in `ckptd status --json`."""
        root = self.root
        return {
            "job": self.job, "attempt": self.attempt, "step": self.step, "identity": root.identity,
            "root": root.place, "bytes": self.nbytes
        }  # fmt: skip


def described(held: HeldSnapshot, place: str, identity: str | None) -> str:
    """Return the text of ForeignMemory: what memory holds, for which root, and what to
    do.

    place: the path or the URL of the root that is served. identity: the identity of the
    root that is there now, or None if there is none.
    """
    former = "" if held.root.place in ("", place) else f", which was at {held.root.place}"
    return (
        f"the memory of this node holds step {held.step} of attempt {held.attempt} of job "
        f"{held.job!r}, saved for root "
        f"{held.root.identity[:SHOWN]}{former}, but {_found(place, identity)}: the root was "
        "deleted or replaced, or another disk is mounted there. Nothing was recovered, and nothing "
        f"was written. Either mount or restore the right root at {place} and start again, or set "
        "CKPTD_FOREIGN_MEMORY for one run: `adopt` recovers the snapshots in memory and saves them "
        "to the root that is there now, and `drop` deletes them"
    )


def _found(place: str, identity: str | None) -> str:
    """Return a clause that says which root is at a place now."""
    if identity is None:
        return f"there is no root at {place} now"
    return f"{place} has another root now, {identity[:SHOWN]}"


def read_held(directory: Path) -> Iterator[HeldSnapshot]:
    """Yield the newest sealed snapshot of each job and root in a directory of segments.

    They come in the order of the names of the jobs. Changes nothing. Segments without a
    root mark, and segments that cannot be read, are passed over.
    """
    newest: dict[tuple[str, str], HeldSnapshot] = {}
    try:
        found = sorted(path for path in directory.iterdir() if names.is_segment_file(path.name))
    except OSError:
        return
    for path in found:
        try:
            with path.open("rb") as file:
                header = read_header(file.fileno())
                mark = read_root_mark(file.fileno(), header)
                nbytes = os.fstat(file.fileno()).st_size
        except (IntegrityError, OSError):
            continue
        if mark is None or header.state is not SlotState.SEALED or header.step is None:
            continue
        one = HeldSnapshot(header.job, header.attempt, header.step, mark, nbytes)
        other = newest.get(key := (header.job, mark.identity))
        newest[key] = (
            one if other is None or (one.attempt, one.step) > (other.attempt, other.step) else other
        )
    yield from (newest[key] for key in sorted(newest))


@dataclass(frozen=True, slots=True)
class HeldElsewhere:
    """A snapshot of this root in a directory of segments that belongs to a former path.

    used: True if another daemon uses the directory.
    """

    directory: Path
    held: HeldSnapshot
    used: bool = True

    def __str__(self) -> str:
        held = self.held
        user = ", which another daemon uses now" if self.used else ""
        return (
            f"step {held.step} of attempt {held.attempt} of job {held.job!r} is in memory only, "
            f"saved for this root when it was at {held.root.place}, in {self.directory}{user}"
        )

    def report(self) -> dict[str, object]:
        """Return the entry of this snapshot in `ckptd status --json`."""
        return {**self.held.report(), "directory": str(self.directory)}


class ForeignMemoryKeeper:
    """The keeper of the snapshots in memory that were saved for other roots than this
    one, and of those of this root that another daemon holds, which are in `elsewhere`:
    the root was moved, and that daemon serves another one at its former path.

    place: the path or the URL of this daemon's root. setting: the setting
    `foreign_memory` of the daemon. take_over: adopts slots while the daemon is running,
    as a starting daemon adopts those that it finds.
    """

    def __init__(
        self,
        slots: Slots,
        place: str,
        setting: str,
        take_over: Callable[[list[Slot]], Awaitable[None]],
        newest: Callable[[str], tuple[int, int]] = lambda job: (0, -1),
    ) -> None:
        """newest: returns attempt and step of the newest snapshot of a job that this
        daemon has, in memory or on storage.
        """
        self.elsewhere: Sequence[HeldElsewhere] = ()
        self._newest_known = newest
        self._slots = slots
        self._place = place
        self._setting = setting
        self._take_over = take_over

    def held(self) -> list[HeldSnapshot]:
        """Return the newest foreign snapshot of each job, by the name of the job."""
        jobs = sorted({each.slot.header.job for each in self._slots.foreign.values()})
        return [found for job in jobs if (found := self._newest(self._of(job))) is not None]

    def missed(self, job: str = "") -> list[HeldElsewhere]:
        """Return the snapshots of this root, of one job or of all, that another daemon
        still holds, and that are newer than all that this daemon has.
        """
        return [
            one
            for one in self.elsewhere
            if job in ("", one.held.job)
            and (one.held.attempt, one.held.step) > self._newest_known(one.held.job)
            and one.held in read_held(one.directory)
        ]

    def start(self) -> list[Slot]:
        """Apply the daemon's setting to the foreign slots that are in memory when it
        starts.

        Return the slots that belong to this root from now on. With `drop`, the slots of
        trainers that are alive stay, and runs of their jobs are refused.
        """
        admitted: list[Slot] = []
        self._slots.set_aside_half_admitted()
        for held in self.held():
            if self._setting == "adopt":
                admitted += self._admit(held)
            elif self._setting != "drop" or self._drop(self._of(held.job)):
                log_events.MEMORY_FOREIGN.log(
                    log, "%s", described(held, self._place, self._identity()),
                    job=held.job, attempt=held.attempt, step=held.step,
                    identity=held.root.identity,
                )  # fmt: skip
        return admitted

    async def apply_choice(self, job: str, choice: str = "") -> None:
        """Keep, adopt or drop the foreign memory of a job before a run of the job begins.

        choice: the choice of the run, or "" for the daemon's setting. Raises
        ForeignMemory if another daemon holds a newer snapshot of the job, unless the choice
        is to drop it, which leaves it where it is; if the choice is to refuse the memory,
        or to drop the memory of a trainer that is alive.
        """
        choice = choice if choice in FOREIGN_MEMORY_CHOICES else self._setting
        if choice != "drop" and (missed := self.missed(job)):
            place = missed[0].held.root.place
            raise ForeignMemory(
                f"{missed[0]}. Nothing was recovered, and nothing was written. Run `ckptd stop "
                f"{place}` and `ckptd stop {self._place}`, and start again: the step is then "
                f"recovered. To go on without it, set CKPTD_FOREIGN_MEMORY=drop for one run"
            )
        mine = self._of(job)
        if not mine:
            return
        held = self._newest(mine)
        if held is None:
            self._drop([each for each in mine if self._is_empty(each)])
        elif choice == "adopt":
            await self._take_over(self._admit(held))
        elif choice == "drop":
            if self._drop(mine):
                raise ForeignMemory(
                    f"the snapshots of job {job!r} in memory, which were saved for another root "
                    f"than the one at {self._place}, belong to a "
                    "trainer that is still running: end that trainer first, then start again"
                )
            log.warning(
                "job %s: step %d of attempt %d, saved for another root, was dropped on request",
                job,
                held.step,
                held.attempt,
            )
        else:
            raise ForeignMemory(described(held, self._place, self._identity()))

    def check_attempt(self, job: str, attempt: int, identity: str, choice: str = "") -> None:
        """Check that the attempt of a live trainer was begun for this root.

        identity: the identity of the root for which it was begun, or "" if that is not
        known. choice: the choice of the run, or "" for the daemon's setting; with
        `adopt`, the attempt continues in this root. Raises ForeignMemory.
        """
        ours = self._identity()
        choice = choice if choice in FOREIGN_MEMORY_CHOICES else self._setting
        if identity and identity != ours and choice != "adopt":
            raise ForeignMemory(
                f"attempt {attempt} of job {job!r} was begun for root {identity[:SHOWN]}, but "
                f"{_found(self._place, ours)}: mount or restore the right root there, and restart "
                f"the daemon. To continue in the root that is there now, start the daemon with "
                f"CKPTD_FOREIGN_MEMORY=adopt"
            )

    def _identity(self) -> str | None:
        return None if self._slots.mark is None else self._slots.mark.identity

    def _of(self, job: str) -> list[ForeignSlot]:
        return [each for each in self._slots.foreign.values() if each.slot.header.job == job]

    @staticmethod
    def _is_empty(foreign: ForeignSlot) -> bool:
        """Return True if a slot can be read and nothing is sealed in it."""
        try:
            return foreign.slot.refresh().state is not SlotState.SEALED
        except (CkptdError, OSError):
            return False

    def _newest(self, foreign: Sequence[ForeignSlot]) -> HeldSnapshot | None:
        """Return the newest snapshot in these slots of one job, or None if there is
        none.

        The headers of the slots are read again for this.
        """
        newest: tuple[int, int, RootMark] | None = None
        for each in foreign:
            try:
                header = each.slot.refresh()
            except (CkptdError, OSError) as error:
                log.warning("%r cannot be read, and is left alone: %s", each.slot, error)
                continue
            if header.state is SlotState.SEALED and header.step is not None:
                found = (header.attempt, header.step, each.mark)
                newest = found if newest is None or found[:2] > newest[:2] else newest
        if newest is None:
            return None
        return HeldSnapshot(
            foreign[0].slot.header.job, *newest, sum(each.slot.nbytes for each in foreign)
        )

    def _admit(self, held: HeldSnapshot) -> list[Slot]:
        log.warning(
            "job %s: step %d of attempt %d, saved for root %s, is adopted into the root at %s on "
            "request",
            held.job, held.step, held.attempt, held.root.identity[:SHOWN], self._place,
        )  # fmt: skip
        return self._slots.admit([each.slot for each in self._of(held.job)])

    def _drop(self, foreign: Sequence[ForeignSlot]) -> bool:
        """Drop the slots.

        Return True instead, and drop none, if a trainer holds one of them.
        """
        if any(self._slots.is_held(each.slot) for each in foreign):
            return True
        for each in foreign:
            self._slots.drop(each.slot)
        return False
