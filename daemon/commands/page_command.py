"""Defines `ckptd page`, which serves a page about a daemon, its history and its
checkpoints.

The page is a process of its own and a client of the daemon, like `ckptd status`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket as sockets
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptd.daemon.commands import health, neighbours
from ckptd.daemon.http_address import HttpAddress, parse_http_address
from ckptd.shared import errors as e
from ckptd.shared.command import PLACE, complete_path, configured_root, socket_option, speaks
from ckptd.shared.location import Location, located
from ckptd.shared.storage.locate import is_root, meant
from ckptd.shared.system import machine

if TYPE_CHECKING:  # asyncio, which most commands do without
    from ckptd.daemon.page.feed import DaemonView

DEFAULT_ADDRESS = "127.0.0.1:9420"
TOKEN = "CKPTD_PAGE_TOKEN"
_TOKEN = re.compile(r"[A-Za-z0-9._~-]+")


@click.command(short_help="Show a daemon and its checkpoints in a browser.")
@click.option("--root", type=PLACE, help="The root. Default: that of the daemon, or CKPTD_ROOT.")
@socket_option
@click.option(
    "--http",
    metavar="ADDRESS",
    default=DEFAULT_ADDRESS,
    help=f"Serve at 127.0.0.1:PORT, unix:PATH, or with a token at any address of this machine. "
    f"Default: {DEFAULT_ADDRESS}.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    shell_complete=complete_path,
    help=f"File of mode 600 with the token that readers need. Default: {TOKEN}.",
)
@speaks
def page(root: Location | None, socket: Path | None, http: str, token_file: Path | None) -> None:
    """Show a daemon, what it did, and the checkpoints of its root in a browser, until
    Ctrl-C.

    The page only reads. It is served by this command and not by the daemon, so it shows
    what it knows also while no daemon runs. Only this machine can read it; for another
    address, readers need a token.
    """
    try:
        address = parse_http_address(http, remote=True)
    except ValueError as error:
        raise e.InvalidConfig(f"--{error}") from None
    token = _token(token_file)
    if not token and not address.is_local:
        raise e.InvalidConfig(
            f"{address} can be reached from other machines, so readers need a token: pass "
            f"--token-file FILE, or serve at 127.0.0.1"
        )
    root = root or (configured_root() if socket is None else None)
    asked = neighbours.AskedDaemon(root, socket, "ckptd page --root ROOT")
    place = _served(root, asked)
    _serve(place, asked, address, token)


def _served(root: Location | None, asked: neighbours.AskedDaemon) -> Location:
    """Return the root that the page is about.

    Raises DaemonUnreachable if that needs a daemon and none answers.
    """
    if root is not None and is_root(root):
        return root
    try:
        return located(asked.status()["root"])
    except e.DaemonUnreachable as error:
        if root is None:
            raise
        raise e.NotFound(
            f"{root} is not a root of ckptd, and no daemon serves it{meant(root)}"
        ) from error


def daemon_view(ask: Callable[[], Mapping[str, Any]]) -> DaemonView:
    """Return a daemon that is judged by the rules of `ckptd status --check`.

    ask: returns its status.
    """
    from ckptd.daemon.page.feed import DaemonView

    def well(status: Mapping[str, Any]) -> str:
        return health.health_text([], dict(status)).removeprefix("ok: ")

    return DaemonView(ask, health.problems, well)


def _token(file: Path | None) -> str:
    """Return the token, or "" if none is set. Raises InvalidConfig."""
    from ckptd.daemon.page.access import MAX_TOKEN, MIN_TOKEN

    if file is None:
        token, place = os.environ.get(TOKEN, ""), TOKEN
        if not token:
            return ""
    else:
        place = str(file)
        try:
            with file.open("rb") as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
                token = opened.read(4096).decode("ascii", "replace").strip()
        except OSError as error:
            raise e.InvalidConfig(
                f"--token-file {file} cannot be read: {error.strerror or error}"
            ) from None
        if mode & 0o077:
            raise e.InvalidConfig(
                f"--token-file {file} has mode {mode:o}, so other users can read it: run "
                f"`chmod 600 {file}`, and use a new token"
            )
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not _TOKEN.fullmatch(token):
        raise e.InvalidConfig(
            f"{place} holds no token; expected {MIN_TOKEN} to {MAX_TOKEN} of the characters A-Z "
            f"a-z 0-9 - . _ ~, which an address can hold, as `openssl rand -hex 16` prints them"
        )
    return token


def _serve(
    root: Location, asked: neighbours.AskedDaemon, address: HttpAddress, token: str
) -> NoReturn:
    from ckptd.daemon.page.access import Access
    from ckptd.daemon.page.server import PageServer
    from ckptd.daemon.process.listener import listen_for_http

    ends = {signal.SIGINT, signal.SIGTERM}
    listener = listen_for_http(address)
    port = 0 if address.path else listener.getsockname()[1]
    access = Access(token, {sockets.gethostname(), sockets.getfqdn()}, port)
    own = machine.history_file(machine.configured_state_dir(), root)
    server = PageServer(listener, access, root, daemon_view(asked.status), own)
    # Before there are threads, and after all that can fail: a process keeps its mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    server.start()
    where = f"unix:{address.path}" if address.path else f"http://{HttpAddress(address.host, port)}/"
    how = ", with ?token=TOKEN at the first time" if token else ""
    click.echo(f"the page of {root} is at {where}{how}; Ctrl-C ends it")
    sys.stdout.flush()
    signal.sigwait(ends)
    server.close()
    if address.path is not None:
        address.path.unlink(missing_ok=True)
    logging.shutdown()
    os._exit(0)  # Python would wait for threads that still read, which may hang
