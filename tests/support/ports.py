"""Finds ports for servers that tests start in processes of their own."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

_BELOW = 32_768
"""The first port that Linux gives to an outgoing connection by default. A server whose
port was one of those could find it taken, at times by a connection of its own.
"""


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, and that no outgoing connection takes."""
    found: list[int] = []
    with ExitStack() as bound:
        while len(found) < count:
            port = random.SystemRandom().randrange(10_000, _BELOW)
            listening = bound.enter_context(socket.socket())
            try:
                listening.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found
