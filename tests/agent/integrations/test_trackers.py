"""Tests what trackers are told of snapshots that become durable, stay in memory or fail,
and that a tracker which fails or hangs leaves the training alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.integrations.trackers import attach
from ckptd.shared.errors import InvalidRequest
from tests.support.daemons import Daemon, holds


class Writer:
    """Has the interface of a SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


class Run:
    """Has the interface of a run of wandb."""

    def __init__(self) -> None:
        self.defined: list[tuple[str, dict[str, str]]] = []
        self.logged: list[tuple[dict[str, float], bool]] = []

    def define_metric(self, name: str, **options: str) -> None:
        self.defined.append((name, options))

    def log(self, values: dict[str, float], commit: bool) -> None:
        self.logged.append((values, commit))


class Mlflow:
    """Has the interface of the module mlflow."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.logged: list[tuple[dict[str, float], int, str]] = []

    def active_run(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=self.run_id)) if self.run_id else None

    def log_metrics(self, values: dict[str, float], step: int, run_id: str) -> None:
        self.logged.append((values, step, run_id))


STATE = {"w": torch.zeros(100)}


def test_a_function_gets_the_costs_of_each_snapshot_and_the_number_of_failures(
    daemon: Daemon,
) -> None:
    told: list[tuple[Mapping[str, float], int]] = []
    agent = Agent("gpt", socket=daemon.home.socket)
    attach(lambda values, step: told.append((values, step)), agent=agent)
    saved = agent.snapshot(STATE, step=1).wait("durable", timeout=60)
    assert holds(lambda: len(told) == 1, 60)
    agent.snapshot(STATE, step=2, persist=False)
    assert holds(lambda: len(told) == 2, 60)
    agent.snapshot({"w": lambda: None}, step=3, on_error="log")
    assert holds(lambda: len(told) == 3, 60)
    agent.close()
    assert [step for _, step in told] == [1, 2, 3]
    (first, _), (second, _), (third, _) = told
    assert (first["ckptd/step"], first["ckptd/held_seconds"]) == (1.0, saved.stall)
    assert first["ckptd/bytes"] == saved.nbytes > 400
    assert first["ckptd/durable_seconds"] > saved.stall
    assert "ckptd/durable_seconds" not in second.keys() | third.keys()
    assert [values["ckptd/failed"] for values, _ in told] == [0.0, 0.0, 1.0]


def test_each_kind_of_tracker_is_called_as_it_wants(daemon: Daemon) -> None:
    writer, run, mlflow = Writer(), Run(), Mlflow("r1")
    agent = Agent("gpt", socket=daemon.home.socket)
    for tracker in (writer, run, mlflow):
        attach(tracker, agent=agent, prefix="c/")
    agent.snapshot(STATE, step=7).wait("durable", timeout=60)
    assert holds(lambda: len(writer.scalars) == 5 and bool(run.logged and mlflow.logged), 60)
    agent.close()
    names = {"c/step", "c/held_seconds", "c/bytes", "c/durable_seconds", "c/failed"}
    assert {name for name, _, _ in writer.scalars} == names
    assert ("c/step", 7.0, 7) in writer.scalars
    assert run.defined == [("c/step", {}), ("c/*", {"step_metric": "c/step"})]
    ((values, commit),) = run.logged
    assert (set(values), commit) == (names, False)
    ((values, step, run_id),) = mlflow.logged
    assert (set(values), step, run_id) == (names, 7, "r1")


def test_a_tracker_that_fails_or_hangs_leaves_the_training_alone(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    may_go = threading.Event()

    def fail(values: Mapping[str, float], step: int) -> None:
        raise OSError("no network")

    agent = Agent("gpt", socket=daemon.home.socket)
    attach(fail, agent=agent)
    attach(lambda values, step: may_go.wait(60), agent=agent)
    for step in (1, 2, 3):
        agent.snapshot(STATE, step=step).wait("durable", timeout=60)
    may_go.set()
    agent.close()
    assert holds(lambda: caplog.text.count("the tracker was not told of the snapshot") == 3, 60)
    assert "no network" in caplog.text


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        (Mlflow(""), "^mlflow has no active run: call mlflow.start_run\\(\\) before attach\\(\\)$"),
        (3, "^a int is no tracker: pass a run of wandb, the module mlflow, a SummaryWriter, or"),
    ],
)
def test_what_is_no_tracker_is_refused(daemon: Daemon, tracker: Any, words: str) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    with pytest.raises(InvalidRequest, match=words):
        attach(tracker, agent=agent)
    agent.close()
