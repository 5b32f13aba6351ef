"""The interface to systemd: readiness, watchdog and passed sockets (sd_notify(3),
sd_listen_fds(3)).
"""

from __future__ import annotations

import os
import socket

FIRST_PASSED = 3  # SD_LISTEN_FDS_START


def notify(state: str) -> None:
    """Send `state`, for example `READY=1`, to the service manager.

    Do nothing if the daemon was started without one.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.sendto(
                state.encode(), "\0" + address[1:] if address.startswith("@") else address
            )
    except OSError:
        pass  # the service manager is gone, or descriptors have run out


def passed_socket() -> socket.socket | None:
    """Return the listening socket that systemd has made for this process, or None."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS", "0") == "0":
        return None
    listener = socket.socket(fileno=FIRST_PASSED)
    listener.setblocking(False)
    os.set_inheritable(FIRST_PASSED, False)
    return listener


def watchdog_seconds() -> float:
    """Return the seconds between two messages to the watchdog: half of the time that
    systemd waits for one. Return 0 without a watchdog.
    """
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    return int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
