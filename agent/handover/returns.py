"""Gives granted slots that will not be sealed back to the daemon, again after each lost
connection until it confirms.
"""

from __future__ import annotations

import logging

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.link.client import Client
from ckptd.shared.errors import CkptdError
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.wire import messages as m

log = logging.getLogger("ckptd.agent")

MAX_REASON = 4096
"""The most characters of a reason that are sent to the daemon."""


class Returns:
    """The slots that one rank gives back, remembered until the daemon confirms them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._unconfirmed: dict[tuple[str, int | None], tuple[str, str]] = {}
        """The reason and its error code, by segment and step."""

    def give_back(self, slot: MappedSlot, step: int, error: BaseException | None) -> None:
        """Mark the slot as free if it still belongs to `step`, and return it to the
        daemon with `error` as the reason.
        """
        try:
            if slot.header.step == step and slot.header.state is not SlotState.FREE:
                slot.clear()
        except (
            OSError,
            ValueError,
        ) as problem:  # its descriptors are closed, because a larger slot has replaced it
            log.debug("slot %s: %s", slot.name[:8], problem)
        self.send(slot.name, step, error)

    def send(self, segment: str, step: int | None, error: BaseException | None = None) -> None:
        """Return to the daemon a segment that was granted for `step`, with `error` as
        the reason. Does not wait for the answer.
        """
        code = error.code if isinstance(error, CkptdError) else ""
        self._unconfirmed[segment, step] = ("" if error is None else str(error)[:MAX_REASON], code)
        self._post(segment, step)

    def send_again(self) -> None:
        """Send again every return that the daemon has not confirmed.

        Called on a new connection.
        """
        for segment, step in tuple(self._unconfirmed):
            self._post(segment, step)

    def clear(self) -> None:
        """Forget all unconfirmed segments.

        Called when their attempt is over: its segments are gone.
        """
        self._unconfirmed.clear()

    def _post(self, segment: str, step: int | None) -> None:
        reason, code = self._unconfirmed.get((segment, step), ("", ""))
        self._client.post(
            lambda n: m.Abandon(id=n, segment=segment, step=step, reason=reason, code=code),
            lambda _: self._confirmed(segment, step),
        )

    def _confirmed(self, segment: str, step: int | None) -> None:
        self._unconfirmed.pop((segment, step), None)
