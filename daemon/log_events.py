"""Names what happens in a daemon. An event is a line of the log that has a stable name
and facts as plain data; the handlers of `telemetry/` give them to programs.

The text of a line may change from version to version. The names of events and of their
facts do not: docs/reference/events.md lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

Fact = str | int | float | None


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event that a daemon may log.

    `name` is its stable name, `level` the level of its line.
    """

    name: str
    level: int

    def log(self, logger: logging.Logger, text: str, *args: object, **facts: Fact) -> None:
        """Log the event. `text` and `args` are those of `Logger.log`. `facts` that are
        None are left out.
        """
        known = {key: value for key, value in facts.items() if value is not None}
        extra = {"event": self.name, "facts": known}
        logger.log(self.level, text, *args, extra=extra, stacklevel=2)


def event_of(record: logging.LogRecord) -> str:
    """Return the name of the event that a line of the log tells, or ""."""
    name: str = getattr(record, "event", "")
    return name


def facts_of(record: logging.LogRecord) -> Mapping[str, Fact]:
    """Return the facts of the event that a line of the log tells."""
    facts: Mapping[str, Fact] = getattr(record, "facts", {})
    return facts


DAEMON_READY = LogEvent("daemon.ready", logging.INFO)
DAEMON_STOPPING = LogEvent("daemon.stopping", logging.INFO)
DAEMON_FAILED = LogEvent("daemon.failed", logging.CRITICAL)
MEMORY_UNSAVED = LogEvent("memory.unsaved", logging.ERROR)
MEMORY_FOREIGN = LogEvent("memory.foreign", logging.ERROR)
ATTEMPT_BEGUN = LogEvent("attempt.begun", logging.INFO)
ATTEMPT_REPEATS = LogEvent("attempt.repeats", logging.WARNING)
TRAINER_GONE = LogEvent("trainer.gone", logging.INFO)
TRAINER_REFUSED = LogEvent("trainer.refused", logging.WARNING)
JOB_RECOVERED = LogEvent("job.recovered", logging.INFO)
STEP_FAILED = LogEvent("step.failed", logging.INFO)
STEPS_FAILING = LogEvent("steps.failing", logging.WARNING)
SAVE_DONE = LogEvent("save.done", logging.INFO)
SAVE_FAILED = LogEvent("save.failed", logging.ERROR)
SAVES_OVERDUE = LogEvent("saves.overdue", logging.WARNING)
SAVE_STUCK = LogEvent("save.stuck", logging.WARNING)
STATE_NON_FINITE = LogEvent("state.non_finite", logging.WARNING)
CHECKPOINT_DAMAGED = LogEvent("checkpoint.damaged", logging.ERROR)
CHECKPOINT_DELETED = LogEvent("checkpoint.deleted", logging.INFO)
RETENTION_HELD = LogEvent("retention.held", logging.WARNING)
ROOM_LITTLE = LogEvent("room.little", logging.WARNING)
QUOTA_EXCEEDED = LogEvent("quota.exceeded", logging.WARNING)
ROOM_MADE = LogEvent("room.made", logging.WARNING)
UPLOAD_DONE = LogEvent("upload.done", logging.INFO)
UPLOAD_FAILED = LogEvent("upload.failed", logging.ERROR)
UPLOADS_STOPPED = LogEvent("uploads.stopped", logging.ERROR)
UPLOADS_RESUMED = LogEvent("uploads.resumed", logging.INFO)
DRAIN_DONE = LogEvent("drain.done", logging.INFO)
DRAIN_LEFT = LogEvent("drain.left", logging.WARNING)
REPLICAS_OFF = LogEvent("replicas.off", logging.WARNING)
RUN_REPLACED = LogEvent("run.replaced", logging.WARNING)

EVENTS = {value.name: value for value in list(globals().values()) if isinstance(value, LogEvent)}
"""All events, by name."""
