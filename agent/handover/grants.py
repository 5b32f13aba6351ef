"""Slots that were asked for, until each is handed over or given back: no interruption may leave one granted for ever.

A call opens a question before it is sent and settles it at its end. What Ctrl-C keeps it from settling is settled when the call leaves, or
when the next one enters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.copy.sealer import Sealer
from ckptd.agent.copy.slots import MappedSlots
from ckptd.agent.link.client import Client
from ckptd.agent.link.slot_requests import SlotRequest
from ckptd.agent.pending import Pending
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, IntegrityError, SnapshotFailed
from ckptd.shared.segment import SlotState

log = logging.getLogger("ckptd.agent")

MOST_REASON = 4096


@dataclass(slots=True, eq=False)
class Question:
    """`kept`: the segment that now belongs to a seal under way, or to whoever called `fill`."""

    pending: Pending
    asking: SlotRequest
    kept: str = ""


class Grants:
    """The questions of one attachment. `hand_over` tells the daemon of a seal; `failed` tells others of a step that this rank has not."""

    def __init__(
        self,
        client: Client,
        slots: MappedSlots,
        sealer: Sealer,
        hand_over: Callable[[Pending], None],
        failed: Callable[[Pending, CkptdError], None],
    ) -> None:
        self._client, self._slots, self._sealer = client, slots, sealer
        self._hand_over, self._failed = hand_over, failed
        self._open: list[Question] = []
        self._owed: dict[tuple[str, int | None], tuple[str, str]] = {}
        """Slots to give back, by segment and step, until the daemon has confirmed them; the values are the reason and its error code."""

    def ask(self, pending: Pending, tag: str | None) -> Question:
        """Remember a question for a slot of this snapshot. It is not sent yet."""
        question = Question(pending, SlotRequest(self._client, pending.step, tag))
        self._open.append(question)
        return question

    def settle(self, question: Question) -> None:
        """Give back every slot that was granted for this question, and is not the one that is kept."""
        error = question.pending.error
        for slot in self._found(question):
            self.give_back(slot, question.pending.step, error)
        self._forget(question)

    def settle_interrupted(self) -> None:
        """Settle what is still open. A slot whose header says sealed is handed over, any other slot is given back and its step fails.

        Only for when no call is in, but for the one that calls this.
        """
        for question in tuple(self._open):
            self._settle_interrupted(question)
            self._forget(question)

    def _settle_interrupted(self, question: Question) -> None:
        pending, sealed = question.pending, bool(question.kept)
        for slot in self._found(question):
            self._sealer.settle(slot.name)  # the seal may be another thread's already
            if not sealed and self._is_sealed(slot, pending):
                sealed = True
                pending.segment = slot.name
                pending.seal()
                self._hand_over(pending)
            else:
                self._sealer.drain()  # nothing may be copied into it any more
                self.give_back(slot, pending.step, pending.error)
        if not sealed:
            self._failed(pending, SnapshotFailed(f"the snapshot of step {pending.step} was interrupted"))

    @staticmethod
    def _is_sealed(slot: MappedSlot, pending: Pending) -> bool:
        try:
            header = slot.refresh()
        except (IntegrityError, OSError, ValueError):
            return False
        return (header.state, header.step, header.attempt) == (SlotState.SEALED, pending.step, pending.attempt) and pending.error is None

    def _found(self, question: Question) -> list[MappedSlot]:
        """Return the slots that may be granted for this question, without the one that is kept: all, where an answer was lost."""
        names = self._slots.names if question.asking.lost else question.asking.taken
        found = [self._slots.find(name) for name in names if name != question.kept]
        return [slot for slot in found if slot is not None]

    def _forget(self, question: Question) -> None:
        question.asking.drop()
        if question in self._open:
            self._open.remove(question)

    def give_back(self, slot: MappedSlot, step: int, error: BaseException | None) -> None:
        """Say that nothing is in a slot granted for `step`, and why. Nothing if it is another step's: then it is not ours any more."""
        try:
            if slot.header.step == step and slot.header.state is not SlotState.FREE:
                slot.clear()
        except (OSError, ValueError) as problem:  # its descriptors are closed: a larger one has taken its place
            log.debug("slot %s: %s", slot.name[:8], problem)
        self.owe(slot.name, step, error)

    def owe(self, segment: str, step: int | None, error: BaseException | None = None) -> None:
        """Give back a segment granted for `step`; again on every new connection, until the daemon has heard it."""
        code = error.code if isinstance(error, CkptdError) else ""
        self._owed[segment, step] = ("" if error is None else str(error)[:MOST_REASON], code)
        self._pay(segment, step)

    def pay_again(self) -> None:
        """Give back, on a new connection, every slot of which the daemon may not have heard."""
        for segment, step in tuple(self._owed):
            self._pay(segment, step)

    def owe_nothing(self) -> None:
        """Forget all slots to give back: the attempt is over, and its slots are gone."""
        self._owed.clear()

    def _pay(self, segment: str, step: int | None) -> None:
        reason, code = self._owed.get((segment, step), ("", ""))
        self._client.post(
            lambda n: m.Abandon(id=n, segment=segment, step=step, reason=reason, code=code), lambda _: self._paid(segment, step)
        )

    def _paid(self, segment: str, step: int | None) -> None:
        self._owed.pop((segment, step), None)
