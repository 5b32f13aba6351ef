"""Runs a command or calls a webhook when something has gone wrong, as the setting
`on_event` says.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from ckptd.daemon.telemetry.background import BackgroundHandler, LoggedEvent
from ckptd.shared.system import machine

log = logging.getLogger("ckptd.on_event")

QUIET_SECONDS = 60.0
"""Seconds for which the same event of the same job is counted and not reported."""
COMMAND_SECONDS = 30.0
"""Seconds after which a command is killed."""
WEBHOOK_SECONDS = 10.0
"""Seconds that a webhook has to answer."""
_MOST_KEYS = 1_000
_SHOWN = 300


class Debounce:
    """A record of the last reports, by event and job."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet = quiet_seconds
        self._last: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def repeated(self, event: LoggedEvent) -> int | None:
        """Return how often this event of this job was left out since it was last
        reported, or None if it is to be left out too.
        """
        key = (event.name, event.job)
        last = self._last.get(key)
        if last is not None and 0 <= event.time - last < self._quiet:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return None
        if len(self._last) >= _MOST_KEYS:
            self._last.clear()
        self._last[key] = event.time
        return self._left_out.pop(key, 0)


class OnEvent(BackgroundHandler):
    """A handler that reports events of level warning and above to a command or to a
    webhook.

    A command gets the JSON of `report` on its standard input, and CKPTD_EVENT,
    CKPTD_EVENT_JOB and CKPTD_EVENT_TEXT in its environment. A webhook gets the JSON as
    the body of a POST. A report that fails is logged, and not repeated.
    """

    def __init__(self, target: str) -> None:
        """target: a command for /bin/sh, or a URL that begins with http:// or https://."""
        super().__init__("ckptd-on-event", logging.WARNING)
        self._target = target
        self._debounce = Debounce()

    def take(self, events: Sequence[LoggedEvent]) -> None:
        for event in events:
            if (repeated := self._debounce.repeated(event)) is None:
                continue
            try:
                if is_url(self._target):
                    self._call(report(event, repeated))
                else:
                    self._run_command(event, report(event, repeated))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                log.warning("on_event was not told of %s: %s", event.name, error)

    def _call(self, body: bytes) -> None:
        import urllib.request  # which takes some MB: only a daemon with a webhook pays them

        request = urllib.request.Request(
            self._target, body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=WEBHOOK_SECONDS):
            pass

    def _run_command(self, event: LoggedEvent, body: bytes) -> None:
        told = {
            "CKPTD_EVENT": event.name,
            "CKPTD_EVENT_JOB": event.job,
            "CKPTD_EVENT_TEXT": event.text,
        }
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._target],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {name: text.replace("\0", "") for name, text in told.items()},
            start_new_session=True,
        )
        try:
            _, said = process.communicate(body, COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            log.warning(
                "on_event: the command did not end within %.0f s, and was killed", COMMAND_SECONDS
            )
            return
        if process.returncode:
            log.warning(
                "on_event: the command ended with %d: %s",
                process.returncode, said.decode(errors="replace").strip()[-_SHOWN:],
            )  # fmt: skip


def is_url(target: str) -> bool:
    """Return True if the target of `on_event` is a webhook."""
    return target.startswith(("http://", "https://"))


def report(event: LoggedEvent, repeated: int) -> bytes:
    """Return the line of JSON that a command or a webhook gets: `time`, `host`, `event`,
    `level`, `text`, `facts`, and `repeated`, the number of times that it was left out
    since the last report.
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
