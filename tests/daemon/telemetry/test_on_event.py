"""Tests what a command and a webhook are told, how often, and what their failures do."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckptd.daemon.log_events import JOB_RECOVERED, SAVE_DONE, SAVE_FAILED
from ckptd.daemon.telemetry import background, on_event
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.debounce import Debounce
from ckptd.daemon.telemetry.on_event import OnEvent, report
from ckptd.shared.system import machine
from tests.support.daemons import until


def event(seconds: float = 0.0, job: str = "gpt", name: str = "save.failed") -> LoggedEvent:
    return LoggedEvent(
        1_700_000_000.25 + seconds, name, 40, f"{job}: the disk is full", {"job": job, "step": 7}
    )


def told(target: str, *events: LoggedEvent) -> None:
    handler = OnEvent(target)
    handler.take(events)
    handler.close()


REPORT: dict[str, Any] = {
    "time": "2023-11-14T22:13:20.250Z",
    "host": machine.host(),
    "event": "save.failed",
    "level": "error",
    "text": "gpt: the disk is full",
    "facts": {"job": "gpt", "step": 7},
    "repeated": 0,
}


@pytest.mark.usefixtures("processes")
def test_the_last_event_of_a_kind_is_told_when_its_quiet_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Debounce(0.3)
    monkeypatch.setattr(on_event, "Debounce", lambda: made)
    out = tmp_path / "out"
    handler = OnEvent(f"cat >> '{out}'")
    logger = logging.getLogger("ckptd.tests.on_event")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    for number in range(5):
        SAVE_FAILED.log(logger, "%d", number, job="gpt")
        SAVE_DONE.log(logger, "which is not reported", job="gpt")
    until(lambda: out.exists() and out.read_text().count("\n") == 2, "second report")
    JOB_RECOVERED.log(logger, "recovered", job="gpt")
    logger.removeHandler(handler)
    handler.close()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["event"], one["text"], one["repeated"]) for one in found] == [
        ("save.failed", "0", 0), ("save.failed", "4", 3), ("job.recovered", "recovered", 0),
    ]  # fmt: skip


@pytest.mark.usefixtures("processes")
def test_a_command_gets_the_report_and_the_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    told(
        f"cat >> '{out}'; echo \"|$CKPTD_EVENT|$CKPTD_EVENT_JOB|$CKPTD_EVENT_TEXT\" >> '{out}'",
        event(),
        event(1.0),
        event(2.0, job="$(touch x)"),
    )
    lines = out.read_text().splitlines()
    assert [json.loads(line) for line in lines[::2]] == [
        REPORT,
        json.loads(report(event(2.0, job="$(touch x)"), 0)),
        json.loads(report(event(1.0), 0)),
    ]
    assert [line.partition("|")[2] for line in lines[1::2]] == [
        "save.failed|gpt|gpt: the disk is full",
        "save.failed|$(touch x)|$(touch x): the disk is full",
        "save.failed|gpt|gpt: the disk is full",
    ]


@pytest.mark.usefixtures("processes")
def test_a_command_that_fails_is_logged_and_the_next_event_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    told(f"echo x >> '{out}'; echo 'no such host' >&2; exit 3", event(), event(job="bert"))
    assert [record.getMessage() for record in caplog.records] == [
        f"on_event was not told of save.failed of job {job}: the command ended with 3: no such host"
        for job in ("gpt", "bert")
    ]
    assert out.read_text() == "x\nx\n"


@pytest.mark.usefixtures("processes")
def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_event, "COMMAND_SECONDS", 0.3)
    told("sleep 600 & sleep 600", event())
    assert [record.getMessage() for record in caplog.records] == [
        "on_event was not told of save.failed of job gpt: the command did not end within "
        "0.3 s, and was killed"
    ]


@pytest.mark.usefixtures("processes")
def test_a_child_that_a_command_leaves_behind_holds_no_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has a session of its own, and keeps standard error open."""
    monkeypatch.setattr(on_event, "COMMAND_SECONDS", 1e6)
    pid = tmp_path / "pid"
    told(f"setsid sh -c 'echo $$ > {pid}; exec sleep 600' & echo late >&2; exit 4", event())
    assert [record.getMessage() for record in caplog.records] == [
        "on_event was not told of save.failed of job gpt: the command ended with 4: late"
    ]
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), "the child's number")
    os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("processes")
def test_a_command_may_say_much_and_read_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told("head -c 1000000 /dev/zero >&2; echo the end >&2; exit 1", event())
    assert [record.getMessage()[-8:] for record in caplog.records] == ["\0the end"]


class Webhook(BaseHTTPRequestHandler):
    got: ClassVar[list[tuple[str, Any]]] = []
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    Webhook.got, Webhook.status = [], 200
    made = HTTPServer(("127.0.0.1", 0), Webhook)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_webhook_gets_the_report(server: HTTPServer) -> None:
    told(f"http://127.0.0.1:{server.server_port}/hook", event())
    assert Webhook.got == [("application/json", REPORT)]


def test_a_webhook_that_refuses_or_hangs_or_is_gone_is_logged(
    server: HTTPServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Webhook.status = 503
    told(f"http://127.0.0.1:{server.server_port}/hook", event(), event(job="bert"))
    monkeypatch.setattr(on_event, "WEBHOOK_SECONDS", 0.2)
    with HTTPServer(("127.0.0.1", 0), Webhook) as silent:  # it accepts and never answers
        told(f"http://127.0.0.1:{silent.server_port}/hook", event())
        port = silent.server_port
    told(f"http://127.0.0.1:{port}/hook", event())
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[0] for text in texts] == [
        f"on_event was not told of save.failed of job {job}"
        for job in ("gpt", "bert", "gpt", "gpt")
    ]
    assert "503" in texts[0]
    assert "503" in texts[1]
    assert "no answer within 0.2 s" in texts[2]
    assert "refused" in texts[3]


def test_a_report_is_one_line_of_json() -> None:
    found = report(event(), 4)
    assert found.index(b"\n") == len(found) - 1
    assert json.loads(found) == REPORT | {"repeated": 4}


@pytest.mark.usefixtures("processes")
def test_events_for_which_there_is_no_time_at_the_end_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some were taken, some are left out for now, and some wait for the thread."""
    monkeypatch.setattr(background, "END_SECONDS", 0.1)
    flag = tmp_path / "flag"
    handler = OnEvent(f"until [ -e '{flag}' ]; do sleep 0.05; done")
    logger = logging.getLogger("ckptd.tests.on_event")
    logger.addHandler(handler)
    SAVE_FAILED.log(logger, "first", job="gpt")
    until(lambda: bool(handler._owed), "first report")
    for job in ("gpt", "bert", "gpt"):
        SAVE_FAILED.log(logger, "later", job=job)
        SAVE_DONE.log(logger, "which is not reported", job=job)
    JOB_RECOVERED.log(logger, "recovered", job="gpt")
    logger.removeHandler(handler)
    caplog.clear()
    handler.close()
    assert [record.getMessage() for record in caplog.records] == [
        "on_event was not told of 5 events, for which there was no time at the end: "
        "4 save.failed, 1 job.recovered"
    ]
    flag.touch()
    handler._queue.put(None)  # `left` has taken the one of `close`
    handler._thread.join()


@pytest.mark.usefixtures("processes")
def test_a_report_that_fails_while_the_log_is_closed_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logging.shutdown` holds the lock of a handler while it closes it, and the line
    about the failure goes to all handlers, this one too.
    """
    monkeypatch.setattr(background, "END_SECONDS", 20.0)
    out = tmp_path / "out"
    handler = OnEvent(f"echo x >> '{out}'; sleep 0.2; exit 3")
    logger = logging.getLogger("ckptd")
    logger.addHandler(handler)
    for job in ("a", "b", "c"):
        SAVE_FAILED.log(logger, "failed", job=job)
    assert handler.lock is not None
    with handler.lock:
        handler.close()
    logger.removeHandler(handler)
    assert (out.read_text(), handler.is_busy) == ("x\n" * 3, False)
