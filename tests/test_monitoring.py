"""Tests the alert rules with promtool, which Debian's package `prometheus` has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MONITORING = Path(__file__).parents[1] / "docs" / "monitoring"
RULES, TESTS = MONITORING / "ckptd-alerts.yml", MONITORING / "ckptd-alerts-test.yml"
PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: apt-get install prometheus")
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
    assert len(alerts) == 8
    assert sorted({name for name, none in cases if not none}) == sorted(alerts)
    assert sorted({name for name, none in cases if none}) == sorted(alerts)


def test_no_rule_names_the_label_that_prometheus_renames() -> None:
    text = RULES.read_text()
    expressions = re.findall(r"expr: (.*)", text)
    named = [found for found in expressions if re.search(r"\bckptd_\w+\{[^}]*job", found)]
    assert (named, len(expressions), text.count(" by ")) == ([], 8, 0)
