"""Writes the metrics into a file for the textfile collector of the node exporter, from
a thread of its own: a disk that hangs delays neither saves nor answers over HTTP.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckptd.shared.errors import InvalidConfig

log = logging.getLogger("ckptd.telemetry")

PERIOD_SECONDS = 15.0
"""Seconds between two writes."""
_END_SECONDS = 2.0


class MetricsFile:
    """The file at `path`, written every 15 s with what `render` returns.

    `start` writes it once and starts the thread. `close` ends the thread and deletes
    the file, because figures that no longer change would be taken for a daemon that is
    well.
    """

    def __init__(self, path: Path, render: Callable[[], bytes]) -> None:
        self._path, self._render = path, render
        self._thread = threading.Thread(target=self._run, name="ckptd-metrics-file", daemon=True)
        self._stop = threading.Event()
        self._error = ""

    def start(self, *, required: bool = True) -> None:
        """Write the file, and start the thread.

        Raises InvalidConfig if the file cannot be written and is `required`.
        """
        try:
            if required:
                self.write()
            else:
                self.refresh()
        except OSError as error:
            raise InvalidConfig(
                f"cannot write the metrics_file {self._path}: {error.strerror or error}; name a "
                f"file in a directory that exists and that this user may write"
            ) from None
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def write(self) -> None:
        """Replace the file. A reader sees the old content or the new one, whole.

        Raises OSError.
        """
        # The node exporter does not read names that end otherwise than in .prom.
        new = self._path.with_name(f".{self._path.name}.new")
        with open(new, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # the node exporter runs as another user
            file.write(self._render())
        os.replace(new, self._path)

    def refresh(self) -> None:
        """Replace the file, and log an error unless it is the one that came last."""
        said = ""
        try:
            self.write()
        except OSError as error:
            said = f"cannot write the metrics_file {self._path}: {error.strerror or error}"
        except Exception as error:
            said = f"cannot render the metrics: {error!r}"
        if said and said != self._error:
            log.warning("%s; it is tried again every %.0f s, and saving goes on", said,
                        PERIOD_SECONDS)  # fmt: skip
        elif self._error and not said:
            log.info("the metrics_file %s is written again", self._path)
        self._error = said

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            self.refresh()
