"""Tells the user, from time to time, what a call waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

REMINDER_SECONDS = 30.0


@contextmanager
def reminder(log: logging.Logger, text: str) -> Iterator[None]:
    """Context manager. Log `text` every 30 seconds until the block ends. Nothing is logged in a block that ends sooner."""
    over = threading.Event()

    def remind() -> None:
        while not over.wait(REMINDER_SECONDS):
            log.warning("%s", text)

    threading.Thread(target=remind, name="ckptd-reminder", daemon=True).start()
    try:
        yield
    finally:
        over.set()
