"""Reports events to commands and servers that misbehave: each event is told, or is named
as untold, in time.

`python -m tests.crash.notifications --rounds 20 [--seed N]`. A round sends some events to
one target of `on_event`, a command or a webhook that fails, hangs, floods, drips,
redirects, speaks no HTTP or leaves children behind. What a target that works has got is
told; a line of the log names what is not. The reports to one target must not stop, also
while the daemon ends, and no line may be a traceback. With LONG=1 the rounds of many
events have 10,000 of them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

from ckptd.daemon.log_events import SAVE_FAILED, event_of
from ckptd.daemon.telemetry import on_event
from ckptd.daemon.telemetry.on_event import OnEvent
from tests.crash.rounds import main

EVENTS = 3
LIMIT = 0.4
"""Seconds that a command and a webhook have in this rig."""
SPARE = 15.0
"""Seconds that a round may take beside the limits: the machine is shared."""
MANY = 10_000 if os.environ.get("LONG") == "1" else 400
JOBS_OF_MANY = 40

COMMANDS = {
    "works": "cat >> {got}",
    "works, and says much": "cat >> {got}; head -c 300000 /dev/zero >&2",
    "reads nothing": 'printf \'{{"facts": {{"job": "%s"}}}}\\n\' $CKPTD_EVENT_JOB >> {got}',
    "leaves a child": "cat >> {got}; {hold} >/dev/null &",
    "leaves a child with stderr": "cat >> {got}; {hold} &",
    "leaves a session with stderr": "cat >> {got}; setsid {hold} &",
    "fails": "exit 3",
    "fails and says bytes": "printf '\\377\\376\\n' >&2; exit 1",
    "is missing": "/nowhere/at/all",
    "hangs": "{hold}",
    "hangs with a session": "setsid {hold} & {hold}",
    "hangs without stderr": "exec 2>&-; {hold}",
    "ignores SIGTERM": "trap '' TERM; {hold}",
    "floods stderr": "yes {pid} >&2",
    "floods stderr from a session": "setsid timeout 3 yes {pid} >&2 & exit 2",
    "stops itself": "kill -STOP $$",
    "kills itself": "kill -KILL $$",
    "kills its group": "kill -KILL 0",
    "is no command": "if then )",
}
"""Commands by what they do. `{got}` is the file of those that take the report, `{hold}`
takes long, and `{pid}` is the number of this process, which names what they leave behind.
"""
_HOLD = f"sleep 77.{os.getpid()}"

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def _drip(client: socket.socket, head: bytes, each: bytes) -> None:
    with suppress(OSError):
        client.sendall(head)
        for _ in range(int(60 * LIMIT / 0.1)):
            client.sendall(each)
            time.sleep(0.1)


def _flood(client: socket.socket) -> None:
    with suppress(OSError):
        client.sendall(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100_000):
            client.sendall(b"X: y\r\n" * 100)


ANSWERS: dict[str, Callable[[socket.socket], None]] = {
    "answers": lambda client: client.sendall(OK),
    "answers without a length": lambda client: client.sendall(b"HTTP/1.0 204 x\r\n\r\n"),
    "answers, then drips a body": lambda client: _drip(
        client, b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b"x"
    ),
    "is unavailable": lambda client: client.sendall(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n"),
    "is forbidden": lambda client: client.sendall(b"HTTP/1.1 401 x\r\nContent-Length: 0\r\n\r\n"),
    "redirects": lambda client: client.sendall(
        b"HTTP/1.1 302 x\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    ),
    "redirects for good": lambda client: client.sendall(
        b"HTTP/1.1 308 x\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    ),
    "redirects to nothing": lambda client: client.sendall(b"HTTP/1.1 303 x\r\n\r\n"),
    "redirects to a file": lambda client: client.sendall(
        b"HTTP/1.1 301 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"
    ),
    "speaks no HTTP": lambda client: client.sendall(b"SSH-2.0-OpenSSH\r\n"),
    "says bytes": lambda client: client.sendall(bytes(range(256)) * 20),
    "hangs up": lambda client: None,
    "hangs": lambda client: time.sleep(60 * LIMIT),
    "drips headers": lambda client: _drip(client, b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "drips one line": lambda client: _drip(client, b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "goes on without end": lambda client: _drip(client, b"", b"HTTP/1.1 100 x\r\n\r\n"),
    "floods headers": _flood,
    "has a long line": lambda client: client.sendall(b"HTTP/1.1 200 " + b"x" * 99_999 + b"\r\n"),
    "has a false status": lambda client: client.sendall(b"HTTP/1.1 9999999 x\r\n\r\n"),
}
"""The ways in which servers answer once they have read the report."""


class Server:
    """A server on the loopback interface. `got` lists the reports that it has taken, which
    it did if it has read a POST and says 2xx.
    """

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self.got: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(10)
            file = client.makefile("rb")
            first, length = file.readline(), 0
            while (line := file.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = file.read(length).decode()
            if not first.startswith(b"POST"):
                # What a redirected POST must not become: told without a report.
                client.sendall(OK)
                return
            if body:
                self.got.append(body)
            self._answer(client)


class Lines(logging.Handler):
    """The lines of the log about reports."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        if not event_of(record):
            self.texts.append(text)


@contextmanager
def _limits() -> Iterator[Lines]:
    """Context manager. While it is held, reports have little time, and nobody reads the
    log but the lines that it yields.
    """
    before, lines, logger = _settings(), Lines(), logging.getLogger("ckptd")
    level, propagates, disabled = logger.level, logger.propagate, logging.root.manager.disable
    on_event.COMMAND_SECONDS = on_event.WEBHOOK_SECONDS = LIMIT
    logging.disable(logging.NOTSET)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(lines)
    try:
        yield lines
    finally:
        on_event.COMMAND_SECONDS, on_event.WEBHOOK_SECONDS = before
        logger.removeHandler(lines)
        logger.setLevel(level)
        logger.propagate = propagates
        logging.disable(disabled)


def _settings() -> tuple[float, float]:
    return on_event.COMMAND_SECONDS, on_event.WEBHOOK_SECONDS


_ONE = re.compile(r"on_event was not told of [^\s:]+(?: of job ([^\s:,]+))?(?:, nor of (\d+))?")
_SOME = re.compile(r"on_event was not told of (\d+) events?, for which|.*has left out (\d+) events")


def _untold(texts: list[str]) -> tuple[set[str], int]:
    """Return the jobs whose event is named as untold, and the number of further events
    that are.
    """
    jobs, more = set[str](), 0
    for text in texts:
        if some := _SOME.match(text):
            more += int(some[1] or some[2])
        elif one := _ONE.match(text):
            more += int(one[2] or 0) + (not one[1])
            jobs |= {one[1]} if one[1] else set()
    return jobs, more


def _told(bodies: list[str]) -> tuple[set[str], int]:
    """Return the jobs whose events were told, and the number of events that were."""
    reports = [json.loads(line) for body in bodies for line in body.splitlines()]
    return {one["facts"]["job"] for one in reports}, sum(
        1 + one.get("repeated", 0) for one in reports
    )


def _end(handler: OnEvent, seconds: float) -> bool:
    """End the thread of the handler. Return False if it does not end in time."""
    handler._queue.put(None)
    handler._thread.join(seconds)
    return not handler._thread.is_alive()


def one_target(target: str, got: Callable[[], list[str]]) -> list[str]:
    """Send a few events to a target. Return what became of none of them, and what else
    was wrong.
    """
    with _limits() as lines:
        handler = OnEvent(target)
        logger = logging.getLogger("ckptd")
        logger.addHandler(handler)
        jobs = {f"job-{number}" for number in range(EVENTS)}
        for job in sorted(jobs):
            SAVE_FAILED.log(logger, "the disk is full", job=job)
        logger.removeHandler(handler)
        ended = _end(handler, EVENTS * (LIMIT + 1.5) + SPARE)
        texts = list(lines.texts)
    problems = [] if ended else ["the reports have stopped"]
    told, (untold, more) = _told(got())[0], _untold(texts)
    if len(silent := jobs - told - untold) > more:
        problems.append(f"nobody was told of {sorted(silent)}, and no line says so: {texts}")
    problems += [f"a traceback: {text}" for text in texts if "Traceback" in text]
    return problems


def command(kind: str) -> list[str]:
    """Try one command."""
    place = Path(tempfile.mkdtemp(prefix="ckptd-notes-"))
    file = place / "got"
    before = _children()
    try:
        return one_target(
            COMMANDS[kind].format(got=file, hold=_HOLD, pid=os.getpid()),
            lambda: [file.read_text()] if file.exists() else [],
        )
    finally:
        for pid in _children() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(place)


def _children() -> set[int]:
    """Return the numbers of the processes that commands leave behind."""
    found = subprocess.run(
        ["pgrep", "-f", f"^({_HOLD}|yes {os.getpid()})$"],
        capture_output=True,
        text=True,
        check=False,
    )
    return set(map(int, found.stdout.split()))


def webhook(kind: str) -> list[str]:
    """Try one server."""
    server = Server(ANSWERS[kind])
    fine = kind.startswith("answers")
    try:
        return one_target(
            f"http://127.0.0.1:{server.port}/hook", lambda: list(server.got) if fine else []
        )
    finally:
        server.close()


def nobody(kind: str) -> list[str]:
    """Try a server that is not there, accepts nobody, or speaks no TLS."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        scheme, port = "http", place.getsockname()[1]
        held = []
        if kind == "accepts nobody":
            place.listen(0)
            for _ in range(4):
                held.append(socket.socket())
                held[-1].setblocking(False)
                held[-1].connect_ex(("127.0.0.1", port))
        elif kind == "speaks no TLS":
            scheme = "https"
            server = Server(ANSWERS["answers"])
            port = server.port
        try:
            return one_target(f"{scheme}://127.0.0.1:{port}/hook", list)
        finally:
            for each in held:
                each.close()


NOBODY = ("is not there", "accepts nobody", "speaks no TLS")


def many(kind: str) -> list[str]:
    """Log many events of few jobs, while reports are slow or fail, and end the daemon
    before there is time for all. The sum of all that was told, named or counted is the
    number of events.
    """
    server = Server(ANSWERS[kind])
    with _limits() as lines:
        handler = OnEvent(f"http://127.0.0.1:{server.port}/hook")
        logger = logging.getLogger("ckptd")
        logger.addHandler(handler)
        for number in range(MANY):
            SAVE_FAILED.log(logger, "the disk is full", job=f"job-{number % JOBS_OF_MANY}")
        logger.removeHandler(handler)
        begun = time.monotonic()
        with handler.lock or threading.Lock():  # as logging.shutdown does
            handler.close()
        took = time.monotonic() - begun
        texts = list(lines.texts)
    server.close()
    told = _told(server.got)[1] if kind == "answers" else 0
    jobs, more = _untold(texts)
    problems = [f"a traceback: {text}" for text in texts if "Traceback" in text]
    if took > SPARE:
        problems.append(f"the end took {took:.0f} s")
    # A report that is under way when the daemon ends may be told and named.
    found = told + more + len(jobs)
    if not MANY <= found <= MANY + len(jobs) + 1:
        problems.append(f"of {MANY} events {told} were told, {found - told} named: {texts[-3:]}")
    return problems


def kinds(chance: Random) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield the rounds in a random order. Every kind comes once before any comes again."""
    all_of_them: list[tuple[str, Callable[[], list[str]]]] = [
        *((f"command that {kind}", partial(command, kind)) for kind in COMMANDS),
        *((f"server that {kind}", partial(webhook, kind)) for kind in ANSWERS),
        *((f"server that {kind}", partial(nobody, kind)) for kind in NOBODY),
        *((f"many events, {kind}", partial(many, kind)) for kind in ("answers", "hangs")),
    ]
    while True:
        chance.shuffle(all_of_them)
        yield from all_of_them


def run(count: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how many rounds of each kind were made, and what went wrong. `number` is the
    random seed.
    """
    done, problems, end = Counter[str](), list[str](), time.monotonic() + seconds
    for tried, (kind, act) in enumerate(kinds(Random(number))):
        if tried >= count or time.monotonic() > end:
            break
        done[kind] += 1
        problems += [f"{kind}: {problem}" for problem in act()]
    return done, problems


if __name__ == "__main__":
    main(__doc__, run)
