"""Reads the address at which metrics or the page are served: a port of this machine, or
a Unix socket.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

EXPECTED = "127.0.0.1:PORT, [::1]:PORT, localhost:PORT or unix:PATH"
LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "[::1]": "::1"}
"""The hosts that an address may name, each with the IP address that it stands for."""
_TCP = re.compile(r"(?P<host>\[[^\]]*\]|[^:]*):(?P<port>\d{1,5})", re.ASCII)
_MOST_BYTES = 107  # of the path of a Unix socket: unix(7)


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """A port of an IP address, or the path of a Unix socket.

    `path` is None for a port. Port 0 stands for any free port.
    """

    host: str = ""
    port: int = 0
    path: Path | None = None

    @property
    def is_local(self) -> bool:
        """True if no other machine can reach the address."""
        return self.path is not None or self.host in LOOPBACK.values()

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_http_address(text: str, *, remote: bool = False) -> HttpAddress:
    """Return the address that a text stands for.

    remote: allow any IP address of this machine, such as 0.0.0.0 for all of them. Raises
    ValueError with a sentence that says what was expected.
    """
    if text.startswith("unix:"):
        path = os.path.abspath(os.path.expanduser(text.removeprefix("unix:")))
        if text == "unix:" or len(os.fsencode(path)) > _MOST_BYTES:
            raise ValueError(
                f"http is {text!r}; expected unix: and the path of a socket, of at most "
                f"{_MOST_BYTES} bytes"
            )
        return HttpAddress(path=Path(path))
    found = _TCP.fullmatch(text)
    if found is None or not found["host"] or int(found["port"]) > 65535:
        raise ValueError(f"http is {text!r}; expected {EXPECTED}")
    host = LOOPBACK.get(found["host"].lower())
    if host is None and remote:
        host = _ip_address(found["host"])
        if host is None:
            raise ValueError(
                f"http is {text!r}; expected {EXPECTED}, or an IP address in place of 127.0.0.1"
            )
    if host is None:
        raise ValueError(
            f"http is {text!r}; expected {EXPECTED}, because only this machine may read the "
            f"metrics: let another machine read them through the node exporter, with "
            f"metrics_file, or through a proxy that checks its clients"
        )
    return HttpAddress(host, int(found["port"]))


def _ip_address(host: str) -> str | None:
    """Return the address of a host in a URL, or None if it is a name."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return None
