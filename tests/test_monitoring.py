"""Tests the alert rules and the board of Grafana: with promtool, and with a real
Prometheus that scrapes a real daemon. Debian's package `prometheus` has both programs.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.shared.errors import StorageError
from tests.support.daemons import Home, running, until
from tests.support.prometheus import PROMETHEUS, PROMTOOL, Prometheus, prometheus

MONITORING = Path(__file__).parents[1] / "docs" / "monitoring"
RULES, TESTS = MONITORING / "ckptd-alerts.yml", MONITORING / "ckptd-alerts-test.yml"
BOARD: dict[str, Any] = json.loads((MONITORING / "ckptd-board.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="there is no promtool: apt-get install prometheus"
)


@needs_promtool
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("verb", "file"), [("check", RULES), ("test", TESTS)])
def test_promtool_accepts_the_rules_and_their_tests(verb: str, file: Path) -> None:
    done = subprocess.run(
        [str(PROMTOOL), verb, "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_each_alert_is_tested_when_it_fires_and_when_it_does_not() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    cases = re.findall(r"alertname: (\w+)\n +exp_alerts:( \[\])?", TESTS.read_text())
    assert len(alerts) >= 9
    assert sorted({name for name, none in cases if not none}) == sorted(alerts)
    assert sorted({name for name, none in cases if none}) == sorted(alerts)


def test_no_rule_names_the_label_that_prometheus_renames() -> None:
    text = RULES.read_text()
    expressions = re.findall(r"expr: (.*)", text)
    named = [found for found in expressions if re.search(r"\bckptd_\w+\{[^}]*job", found)]
    assert (named, text.count(" by ")) == ([], 0)
    assert len(expressions) == text.count("- alert: ")


# -- the board


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the title of a panel and a query, for each query of the board."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def filled(expression: str, instance: str = "n1", label: str = "job", job: str = ".+") -> str:
    """Return a query as Grafana sends it, with the values of the variables."""
    values = {
        "$instance": instance, "${label}": label, "$label": label, "$job": job,
        "$__rate_interval": "1m", "$__range": "10m",
    }  # fmt: skip
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def label_query() -> str:
    found = re.fullmatch(r"query_result\((.*)\)", VARIABLES["label"]["query"])
    assert found is not None
    return found[1]


@needs_promtool
@pytest.mark.usefixtures("processes")
def test_promtool_parses_each_query_of_the_board(tmp_path: Path) -> None:
    texts = [*(text for _, text in expressions()), label_query()]
    rules = [{"record": f"r{number}", "expr": filled(text)} for number, text in enumerate(texts)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(texts)} rules found" in done.stdout


def test_panels_have_their_own_ids_and_places_in_four_rows() -> None:
    places = [(panel["gridPos"], panel["title"]) for panel in BOARD["panels"]]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= 24 for at, _ in places)
    overlaps = [
        (one, other)
        for (a, one), (b, other) in itertools.combinations(places, 2)
        if a["x"] < b["x"] + b["w"]
        and b["x"] < a["x"] + a["w"]
        and a["y"] < b["y"] + b["h"]
        and b["y"] < a["y"] + a["h"]
    ]
    assert overlaps == []
    assert [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"] == [
        "Is it safe?", "What it costs", "What is about to go wrong", "Recoveries",
    ]  # fmt: skip


def test_the_board_asks_the_prometheus_that_the_reader_chooses() -> None:
    assert list(VARIABLES) == ["datasource", "instance", "label", "job"]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    targets = [target for panel in PANELS for target in panel["targets"]]
    asked = [*PANELS, *targets, *(VARIABLES[name] for name in ("instance", "label", "job"))]
    assert [found for found in asked if found["datasource"] != chosen] == []
    assert "__inputs" not in BOARD, "a board that is provisioned has no inputs"


def test_each_query_is_about_the_nodes_that_the_reader_chooses() -> None:
    texts = [text for _, text in expressions()]
    selectors = re.findall(r"\b(?:ckptd_\w+|ALERTS)(?:\{[^}]*\}+)?", "\n".join(texts))
    assert len(selectors) > len(texts) > 30
    assert [found for found in selectors if 'instance=~"$instance"' not in found] == []


# -- a real Prometheus

MAY_BE_EMPTY = {"Time until the disk is full"}
"""The panels that are rightly empty while others use the disk: its space may grow."""


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus: apt-get install prometheus")
@pytest.mark.usefixtures("processes")
def test_each_query_of_the_board_has_data_whether_labels_are_honored_or_not(
    place: Home, tmp_path: Path
) -> None:
    full = "persist.created=error(ENOSPC)@2"
    with running(place, "--http", "127.0.0.1:0", failpoints=full):
        found = re.search(r"metrics and probes at http://(\S+)", place.log_text())
        assert found is not None

        def scrape(instance: str, *, honor: bool) -> dict[str, Any]:
            targets = [{"targets": [found[1]], "labels": {"instance": instance}}]
            return {
                "job_name": f"ckptd-{instance}",
                "honor_labels": honor,
                "static_configs": targets,
            }

        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [scrape("renamed", honor=False), scrape("honored", honor=True)],
        }
        with prometheus(tmp_path, config) as server:
            until(lambda: len(server.query("ckptd_snapshots_sealed_total")) == 2, "scrapes")
            with closing(Agent("gpt", socket=place.socket)) as agent:
                fresh = Agent("fresh", socket=place.socket)
                _happen(agent, place)
                _check(server, "renamed", "exported_job")
                _check(server, "honored", "job")
                fresh.close()


def _check(server: Prometheus, instance: str, label: str) -> None:
    """Check queries and alerts of a scrape, where `label` has the names of the jobs."""
    jobs = f'ckptd_checkpoints{{instance="{instance}"}}'
    until(lambda: server.label_values(label, jobs) == ["fresh", "gpt"], "figures of both jobs")
    found = server.query(filled(label_query(), instance))
    assert [labels for labels, _ in found] == [{"label": label}]
    with suppress(AssertionError):
        until(lambda: not _empty(server, instance, label), "data")
    assert _empty(server, instance, label) == []
    until(lambda: len(_firing(server, instance)) == 2, "alerts")
    firing = _firing(server, instance)
    assert firing.keys() == {"CkptdDamagedCheckpoints", "CkptdSavesFail"}
    assert firing["CkptdDamagedCheckpoints"][label] == "gpt"


def _firing(server: Prometheus, instance: str) -> dict[str, dict[str, str]]:
    """Return the labels of each alert that fires, by its name."""
    found = server.query(f'ALERTS{{instance="{instance}",alertstate="firing"}}')
    return {labels["alertname"]: labels for labels, _ in found}


def _happen(agent: Agent, place: Home) -> None:
    """Train, save twice, fail once, recover twice, and damage a checkpoint."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}

    def saved(step: int) -> None:
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        agent.snapshot(state, step=step).wait("durable", timeout=60)

    saved(1)
    with pytest.raises(StorageError, match="No space left"):
        saved(2)
    saved(3)
    agent.recover(state)
    (place.root / "gpt" / "step-00000001.a0001" / "manifest.json").write_text("{")
    agent.recover(state)


def _empty(server: Prometheus, instance: str, label: str) -> list[tuple[str, str]]:
    """Return panel and query of all queries that have no number yet."""
    return [
        (title, text)
        for title, text in expressions()
        if title not in MAY_BE_EMPTY
        and not any(
            math.isfinite(value) for _, value in server.query(filled(text, instance, label))
        )
    ]
