"""Tests metrics and probes of real daemons: from the start to the end, with a loop that
is stuck, and with settings that cannot be met.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from ckptd.agent import Agent
from ckptd.daemon.telemetry.telemetry import Telemetry
from tests.support.daemons import Daemon, Home, running
from tests.support.forks import context


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def get(place: Home, page: str) -> tuple[int, str]:
    """Return status and body of a page at the Unix socket, or at the port in the log."""
    found = re.search(r"metrics and probes at (?:unix:|http://)(\S+)", place.log_text())
    assert found is not None
    path = Path(found[1])
    client = _Unix(path) if path.is_absolute() else http.client.HTTPConnection(found[1], timeout=60)
    client.request("GET", page)
    answer = client.getresponse()
    text = answer.read().decode()
    client.close()
    return answer.status, text


def value(place: Home, name: str, **labels: str) -> float | None:
    """Return the value of a metric, or None if it is not there."""
    status, text = get(place, "/metrics")
    assert status == 200
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return found.get((name, frozenset(labels.items())))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)


@pytest.mark.usefixtures("processes")
def test_a_save_is_seen_over_a_unix_socket_and_in_the_file(place: Home) -> None:
    file, path = place.path / "ckptd.prom", place.path / "m"
    with running(
        place, "--http", f"unix:{path}", "--metrics-file", str(file), forked=True
    ) as daemon:
        assert get(place, "/healthz")[0] == 200
        assert get(place, "/readyz") == (200, "the daemon is ready\n")
        assert "ckptd_build_info" in file.read_text()
        before = time.time()
        with closing(Agent("gpt", socket=place.socket)) as agent:
            agent.recover({"w": torch.zeros(1000)})
            agent.snapshot({"w": torch.ones(1000)}, step=7).wait("durable")
            until(lambda: value(place, "ckptd_recoveries_total", source="memory") == 0)
            agent.recover({"w": torch.zeros(1000)})
            until(lambda: value(place, "ckptd_recoveries_total", source="memory") == 1)
            assert value(place, "ckptd_recovery_seconds_count") == 1
            until(lambda: value(place, "ckptd_last_durable_step", job="gpt") == 7)
            assert value(place, "ckptd_ranks_connected", job="gpt") == 1
        when = value(place, "ckptd_last_durable_timestamp_seconds", job="gpt")
        assert when is not None
        assert before - 1 <= when <= time.time() + 1
        assert value(place, "ckptd_snapshots_total", result="durable") == 1
        assert value(place, "ckptd_snapshot_stall_seconds_count") == 1
        assert value(place, "ckptd_persist_seconds_count") == 1
        assert value(place, "ckptd_checkpoints", job="gpt") == 1
        assert (value(place, "ckptd_room_checkpoints", job="gpt") or 0) > 1
        assert daemon.stop() == 0
    assert (file.exists(), path.exists()) == (False, False)


def _train(path: Path) -> None:
    Agent("gpt", socket=path).snapshot({"w": torch.ones(1000)}, step=1)


@pytest.mark.usefixtures("processes")
def test_a_loop_that_is_stuck_is_seen(place: Home) -> None:
    with running(
        place, "--http", "127.0.0.1:0", failpoints="slot.passing=hang", forked=True
    ) as daemon:
        until(lambda: value(place, "ckptd_jobs") == 0)
        trainer = context().Process(target=_train, args=(place.socket,), daemon=True)
        trainer.start()
        until(lambda: (value(place, "ckptd_event_loop_lag_seconds") or 0) > 1)
        first = value(place, "ckptd_event_loop_lag_seconds")
        until(lambda: get(place, "/healthz")[0] == 503)
        later = value(place, "ckptd_event_loop_lag_seconds")
        assert first is not None
        assert later is not None
        assert later > first
        assert value(place, "ckptd_ready") == 1
        daemon.kill()
        trainer.kill()
        trainer.join()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--http", "0.0.0.0:9419"), "http is '0.0.0.0:9419'; expected 127.0.0.1:PORT,"),
        (("--http", "9419"), "http is '9419'; expected 127.0.0.1:PORT, [::1]:PORT,"),
        (("--metrics-file", "m.txt"), "m.txt'; expected a path that ends in .prom, because"),
        (("--metrics-file", "/no/where/m.prom"), "cannot write the metrics_file /no/where/m.prom:"),
    ],
)
def test_a_setting_that_cannot_be_met_is_one_sentence_at_the_start(
    place: Home, arguments: tuple[str, ...], said: str
) -> None:
    daemon = Daemon(place, *arguments, forked=True)
    assert not daemon.reached_ready()
    assert daemon.died() != 0
    daemon.close()
    assert said in place.log_text()
    assert "Traceback" not in place.log_text()


@pytest.mark.usefixtures("processes")
def test_a_busy_port_is_one_sentence_at_the_start_and_a_private_daemon_goes_on(
    place: Home,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = f"another process listens at {address}: name another port with --http, or stop it"
        daemon = Daemon(place, "--http", address, forked=True)
        assert not daemon.reached_ready()
        assert daemon.died() == 11
        daemon.close()
        assert said in place.log_text()
        with running(place, "--http", address, "--private", forked=True) as private:
            assert private.status()["ready"]
            private.stop()
    assert f"no metrics and no probes are served: {said}" in place.log_text()


async def test_before_it_is_ready_and_while_it_ends_a_daemon_says_so(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    def ask(page: str) -> tuple[int, bytes]:
        client = http.client.HTTPConnection(address[0], address[1], timeout=60)
        client.request("GET", page)
        answer = client.getresponse()
        body = answer.read()
        client.close()
        return answer.status, body

    with Telemetry(listener, tmp_path / "m.prom") as telemetry:
        assert ask("/readyz") == (
            503, b"the daemon is starting: it recovers its root, and serves no client yet\n",
        )  # fmt: skip
        assert ask("/healthz")[0] == 200
        assert not (tmp_path / "m.prom").exists()
        telemetry.locked()
        assert b"ckptd_ready 0" in (tmp_path / "m.prom").read_bytes()
        telemetry.ending()
        assert ask("/readyz") == (
            503, b"the daemon is ending: it saves what it owes, and begins nothing\n",
        )  # fmt: skip
        assert b"ckptd_ready 0" in ask("/metrics")[1]
    with pytest.raises(ConnectionRefusedError):
        ask("/healthz")
    assert not (tmp_path / "m.prom").exists()


async def test_without_listener_and_file_nothing_runs() -> None:
    threads = threading.active_count()
    with Telemetry(None, None) as telemetry:
        telemetry.locked()
        telemetry.ending()
        assert (threading.active_count(), len(asyncio.all_tasks())) == (threads, 1)
