"""Tells the user, from time to time, what a call waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptd.agent.threads.flag import Flag

REMINDER_SECONDS = 30.0


@contextmanager
def reminder(log: logging.Logger, text: str, first: float | None = None) -> Iterator[None]:
    """Context manager. Log `text` every 30 seconds until the block ends.

    first: the seconds before the first line, if they are not 30. Nothing is logged in a
    block that ends sooner.
    """
    over = Flag()

    def remind() -> None:
        pause = REMINDER_SECONDS if first is None else first
        while not over.wait(pause):
            log.warning("%s", text)
            pause = REMINDER_SECONDS

    threading.Thread(target=remind, name="ckptd-reminder", daemon=True).start()
    try:
        yield
    finally:
        over.set()
