"""Runs a command or calls a webhook when something has gone wrong, as the setting
`on_event` says.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from ckptd.daemon.log_events import JOB_RECOVERED, event_of
from ckptd.daemon.telemetry.background import BackgroundHandler, LoggedEvent
from ckptd.daemon.telemetry.debounce import Debounce, EventReport
from ckptd.shared.system import machine
from ckptd.shared.units import count_text, some_text

log = logging.getLogger("ckptd.on_event")

COMMAND_SECONDS = 30.0
"""Seconds after which a command is killed."""
WEBHOOK_SECONDS = 10.0
"""Seconds that a webhook has to answer."""
_KILLED_SECONDS = 1.0
_SHOWN = 300


class OnEvent(BackgroundHandler):
    """A handler that reports events of level warning and above, and recoveries, to a
    command or to a webhook.

    A command gets the JSON of `report` on its standard input, and CKPTD_EVENT,
    CKPTD_EVENT_JOB and CKPTD_EVENT_TEXT in its environment. A webhook gets the JSON as
    the body of a POST. A report that fails is logged, and not repeated. So are, when the
    daemon ends, the events for which there was no time.
    """

    def __init__(self, target: str) -> None:
        """target: a command for /bin/sh, or a URL that begins with http:// or https://."""
        self._target = target
        self._debounce = Debounce()
        self._owed = deque[EventReport]()
        super().__init__("ckptd-on-event")
        self.addFilter(is_reported)

    def take(self, events: Sequence[LoggedEvent]) -> None:
        for event in events:
            first = self._debounce.now_or_later(event, time.monotonic())
            if first is not None:
                self._owed.append(first)
        self._owed.extend(self._debounce.due(time.monotonic()))
        self._tell_owed()

    def pause(self) -> float | None:
        return self._debounce.pause(time.monotonic())

    def end(self) -> None:
        self._owed.extend(self._debounce.rest())
        self._tell_owed()

    def close(self) -> None:
        super().close()
        if not self.is_busy:
            return
        untold = Counter(event.name for event in self.left() if _is_due(event.level, event.name))
        for event, repeated in [*self._owed, *self._debounce.rest()]:
            untold[event.name] += 1 + repeated
        if untold:
            log.warning(
                "on_event was not told of %s, for which there was no time at the end: %s",
                count_text(untold.total(), "event"),
                some_text([f"{count} {name}" for name, count in untold.most_common()]),
            )

    def _tell_owed(self) -> None:
        while self._owed:
            self._tell(*self._owed[0])
            self._owed.popleft()

    def _tell(self, event: LoggedEvent, repeated: int) -> None:
        try:
            if is_url(self._target):
                from ckptd.daemon.telemetry import webhook

                webhook.call(self._target, report(event, repeated), WEBHOOK_SECONDS)
            else:
                self._run_command(event, report(event, repeated))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            job = f" of job {event.job}" if event.job else ""
            more = f", nor of {repeated} before it" if repeated else ""
            log.warning("on_event was not told of %s%s%s: %s", event.name, job, more, error)

    def _run_command(self, event: LoggedEvent, body: bytes) -> None:
        """Raises OSError if the command fails or takes too long."""
        told = {
            "CKPTD_EVENT": event.name,
            "CKPTD_EVENT_JOB": event.job,
            "CKPTD_EVENT_TEXT": event.text,
        }
        with os.fdopen(os.memfd_create("ckptd-report"), "w+b") as given:
            given.write(body)
            given.seek(0)
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._target],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=os.environ | {name: text.replace("\0", "") for name, text in told.items()},
                start_new_session=True,
            )
        ended, said = _wait(process, COMMAND_SECONDS)
        if not ended:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
                process.wait(_KILLED_SECONDS)
            raise TimeoutError(
                f"the command did not end within {COMMAND_SECONDS:g} s, and was killed"
            )
        if process.returncode:
            text = said.decode(errors="replace").strip()[-_SHOWN:]
            raise ChildProcessError(f"the command ended with {process.returncode}: {text}")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> tuple[bool, bytes]:
    """Wait until the process has ended, at most for so many seconds. Return whether it
    has, and the last bytes of its standard error.

    A child that the process has left behind may hold standard error open: its end is
    not waited for.
    """
    stderr, said = process.stderr, b""
    assert stderr is not None
    end, waiting = time.monotonic() + seconds, select.poll()
    with stderr:
        os.set_blocking(stderr.fileno(), False)
        alive = os.pidfd_open(process.pid)
        try:
            waiting.register(alive, select.POLLIN)
            waiting.register(stderr, select.POLLIN)
            ended = False
            while not ended and (left := end - time.monotonic()) > 0:
                ready = dict(waiting.poll(left * 1000))
                ended = alive in ready
                if stderr.fileno() in ready:
                    if more := stderr.read(1 << 16):
                        said = (said + more)[-4 * _SHOWN :]
                    else:
                        waiting.unregister(stderr)
        finally:
            os.close(alive)
    if ended:
        process.wait()
    return ended, said


def is_reported(record: logging.LogRecord) -> bool:
    """Return True if a line of the log is reported.

    The lines of this module are not, because they tell no event. A filter that let them
    pass would make its thread wait for `close`, which holds the lock of the handler.
    """
    return _is_due(record.levelno, event_of(record))


def _is_due(level: int, name: str) -> bool:
    return bool(name) and (level >= logging.WARNING or name == JOB_RECOVERED.name)


def is_url(target: str) -> bool:
    """Return True if the target of `on_event` is a webhook."""
    return target.startswith(("http://", "https://"))


def report(event: LoggedEvent, repeated: int) -> bytes:
    """Return the line of JSON that a command or a webhook gets: `time`, `host`, `event`,
    `level`, `text`, `facts`, and `repeated`, the number of such events of the job that
    were left out since the last report.
    """
    when = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
    line = msgspec.json.encode(
        {
            "time": when.replace("+00:00", "Z"),
            "host": machine.host(),
            "event": event.name,
            "level": logging.getLevelName(event.level).lower(),
            "text": event.text,
            "facts": event.facts,
            "repeated": repeated,
        }
    )
    return line + b"\n"
