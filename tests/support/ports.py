"""Finds ports for servers that tests start in processes of their own."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from itertools import count

_FIRST, _BELOW = 10_000, 32_768
"""The range of the ports. From `_BELOW` on, Linux gives ports to outgoing connections by
default. A server whose port was one of those could find it taken, at times by a
connection of its own.
"""
_turns = count(os.getpid() * 64)
"""Each process begins at another place, so that two of them do not take the same port."""


def free_ports(number: int) -> list[int]:
    """Return ports that were free a moment ago, and that no outgoing connection takes."""
    found: list[int] = []
    with ExitStack() as bound:
        while len(found) < number:
            port = _FIRST + next(_turns) % (_BELOW - _FIRST)
            listening = bound.enter_context(socket.socket())
            try:
                listening.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found
