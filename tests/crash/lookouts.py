"""Looks at all places at which an operator may see that something is wrong, and notes
what is new there: the log, the commands, `on_event`, the metrics, the probes, and what
the trainers print.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from ckptd.daemon.commands import cli

ALERTS = {
    'ckptd_snapshots_total{result="failed"}': "CkptdSavesFail",
    "ckptd_room_checkpoints": "CkptdLittleRoom",
    "ckptd_verify_failures_total": "CkptdDamageFound",
    "ckptd_damaged_checkpoints": "CkptdDamagedCheckpoints",
    "ckptd_refused_processes": "CkptdTrainerRefused",
    "ckptd_event_loop_lag_seconds": "CkptdLoopStuck",
}
"""The metrics that alert rules look at, and the rule. A rule that waits for an hour is
left out, because the rig does not.
"""
_LABEL = re.compile(r"[A-Z]+ [A-Z]+  |[A-Z]{5,}  |ckptd:|ckptd .* is NOT|root  .*NOT|not saved")
"""The lines of `ckptd status` that say that something is wrong."""
_QUIET = ("save.done", "checkpoint.deleted", "attempt.begun", "daemon.ready", "daemon.stopping")
"""Events of a training that goes well."""
_METRICS = (
    *ALERTS,
    "ckptd_non_finite_values",
    "ckptd_ranks_connected",
    'ckptd_snapshots_total{result="skipped"}',
)
_LITTLE_ROOM, _LATE = 5, 5.0
_SETTLE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A sentence that was new at a place, `seconds` after the fault."""

    place: str
    sentence: str
    seconds: float


def command(*words: str) -> list[str]:
    """Run a command of `ckptd` in this process. Return the lines that it prints, each
    with its exit code if that is not 0.
    """
    out, code = io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(out):
        try:
            cli.main(list(words))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    told = f" (exit code {code})" if code else ""
    return [f"{line.strip()}{told}" for line in out.getvalue().splitlines() if line.strip()]


class Tail:
    """The lines that are added to a file, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def more(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()


class Lookouts:
    """All places of one root, as a context manager.

    Files and pages are looked at by threads of their own, because a command may wait for
    a daemon that does not answer.
    """

    def __init__(self, root: Path, port: Callable[[], int]) -> None:
        self._root, self._port = root, port
        self._tails: list[tuple[str, Tail, Callable[[str], str]]] = []
        self._known: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self.seen: list[Seen] = []
        self.since = time.monotonic()

    def __enter__(self) -> Lookouts:
        for look in (self._look_at_files, self._look_at_pages, self._run_commands):
            self._threads.append(threading.Thread(target=self._again, args=(look,), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, so that no command takes what this process prints."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def follow(self, place: str, path: Path, sentence: Callable[[str], str]) -> None:
        """Follow a file. `sentence` returns what a line says, or "" for a line of no
        interest.
        """
        self._tails.append((place, Tail(path), sentence))

    def settle(self) -> None:
        """Forget what was said while all was starting, and learn what is said now."""
        with self._lock:
            self._known.clear()
        self.watch(_SETTLE_SECONDS)

    def fault(self) -> None:
        """Count from now on. What was said before is known."""
        with self._lock:
            self.seen, self.since = [], time.monotonic()

    def take(self) -> list[Seen]:
        """Return what was seen since the last `fault`, by time, and count from now on."""
        with self._lock:
            found, self.seen, self.since = self.seen, [], time.monotonic()
        return sorted(found, key=lambda seen: seen.seconds)

    def note(self, place: str, sentence: str) -> None:
        """Note a sentence unless it is known at this place. Its numbers do not count."""
        key = (place, _shape(sentence))
        with self._lock:
            if sentence and key not in self._known:
                self._known.add(key)
                self.seen.append(Seen(place, sentence, time.monotonic() - self.since))

    def watch(self, seconds: float, ended: Callable[[], bool] = lambda: False) -> bool:
        """Wait while the places are looked at. Return True as soon as `ended` does."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ended():
                return True
            time.sleep(0.2)
        return False

    def _again(self, look: Callable[[], None]) -> None:
        while not self._ended.wait(0.3):
            look()

    def _look_at_files(self) -> None:
        for place, tail, sentence in list(self._tails):
            for line in tail.more():
                self.note(place, sentence(line))

    def _look_at_pages(self) -> None:
        self.note("/healthz", self._page("/healthz"))
        for line in self._page("/metrics").splitlines():
            self.note("/metrics", _metric(line))

    def _run_commands(self) -> None:
        root = str(self._root)
        for line in command("status", root):
            self.note("status", line if _LABEL.match(line) else "")
        for line in command("status", root, "--check"):
            self.note("status --check", line)
        for sentence in _of_history(command("history", "--root", root, "--json")):
            self.note("history", sentence)
        for line in command("logs", "--root", root, "-n", "20"):
            self.note("logs", log_sentence(line))

    def _page(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port(), timeout=2)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode().strip()
            return text if answer.status == 200 else f"{answer.status}: {text}"
        except OSError as error:
            return f"no answer: {error} (alert CkptdDaemonDown after 2 min)"
        finally:
            connection.close()


def log_sentence(line: str) -> str:
    """Return what a line of the log tells an operator: its event and its text."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if entry["level"] in ("info", "debug") and entry.get("event", "save.done") in _QUIET:
        return ""
    return f"{entry.get('event', entry['level'])}: {entry['text']}"


def event_sentence(line: str) -> str:
    """Return the event and the text of a report to `on_event`."""
    entry = json.loads(line)
    return f"{entry['event']}: {entry['text']}"


def _of_history(lines: list[str]) -> list[str]:
    """Return the events that `ckptd history --json` has printed, or its error."""
    try:
        events = json.loads("\n".join(lines))
    except ValueError:
        return lines
    if isinstance(events, dict):
        return [events["error"]["message"]]
    return [f"{e['event']}: {e['text']}" for e in events if e["event"] not in _QUIET]


def _metric(line: str) -> str:
    """Return a sentence about a metric that an alert looks at or that tells of ranks."""
    name, _, number = line.rpartition(" ")
    plain = re.sub(r'\{job="[^"]*"\}', "", name)
    if line.startswith("no answer"):
        return line
    if plain not in _METRICS:
        return ""
    value = float(number)
    wrong = {
        "ckptd_room_checkpoints": value < _LITTLE_ROOM,
        "ckptd_event_loop_lag_seconds": value > _LATE,
        "ckptd_ranks_connected": True,
    }.get(plain, value > 0)
    alert = f" (alert {ALERTS[plain]})" if plain in ALERTS else ""
    # As words, so that each number of ranks is another sentence.
    ranks = ("no rank", "one rank", "two ranks")
    shown = ranks[int(value)] if plain == "ckptd_ranks_connected" else f"{value:g}"
    return f"{plain} is {shown}{alert}" if wrong else ""


def _shape(sentence: str) -> str:
    """Return a sentence without its numbers, times and units, which change all the time."""
    plain = re.sub(r"\d[\d.,:e+-]*", "#", sentence)
    plain = re.sub(r"# (s|ms|min|h|d|B|kB|MB|GB)\b", "#", plain)
    return re.sub(r"\s+", " ", plain)
