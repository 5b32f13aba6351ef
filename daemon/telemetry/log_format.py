"""Formats the lines of the daemon's log: as text, as JSON, or as text for journald."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO

import msgspec

from ckptd.daemon.log_events import event_of, facts_of
from ckptd.shared.units import printable

_PRIORITIES = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
"""The priorities of syslog(3), by level."""


class _LineFormatter(logging.Formatter):
    """A formatter whose messages take one line, and have no characters that a terminal
    obeys. A message may have text from a client or a file.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)


class TextFormatter(_LineFormatter):
    """A formatter for lines like "TIME LEVEL LOGGER: TEXT"."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )


class JournalFormatter(_LineFormatter):
    """A formatter for lines that journald reads from standard error.

    Each begins with its priority, as in sd-daemon(3). journald has the time already. It
    makes an entry of each line, so each line of a traceback has the priority too.
    """

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        priority = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(priority + line for line in super().format(record).splitlines())


class JsonFormatter(logging.Formatter):
    """A formatter that makes one JSON object of each line.

    Its members: `time` (RFC 3339, UTC), `level`, `logger`, `text`; `event` and `facts`
    if the line tells an event; `traceback` if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if event := event_of(record):
            line |= {"event": event, "facts": facts_of(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def formatter_for(
    log_format: str, stream: IO[str] | None, environ: Mapping[str, str]
) -> logging.Formatter:
    """Return the formatter for the setting `log_format`, of a log that goes to `stream`
    or, if it is None, to a file.
    """
    if log_format == "json":
        return JsonFormatter()
    if stream is not None and _is_journal(stream, environ):
        return JournalFormatter()
    return TextFormatter()


def _is_journal(stream: IO[str], environ: Mapping[str, str]) -> bool:
    """Return True if journald reads the stream. systemd.exec(5) describes
    JOURNAL_STREAM.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
