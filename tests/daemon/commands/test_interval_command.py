"""Tests `ckptd interval` without a daemon, with the history of a real training, against
its page, and its mistakes.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands import neighbours
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.interval_command import arithmetic
from ckptd.shared.interval import Costs, Failures, SaveLevel, best_interval, choose, share_of_time
from ckptd.shared.units import ordinal, parse_span, short_span_text
from tests.support.cases import each_case
from tests.support.daemons import Home, holds, running

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "how-often.md"
EXAMPLE = (
    "--mtbf", "3h", "--mtbf-node", "30h", "--held", "20ms", "--lost", "2.02s", "--durable", "40s",
)  # fmt: skip


def interval(*arguments: object) -> str:
    told = CliRunner().invoke(main, ["interval", *map(str, arguments)])
    assert told.exit_code == 0, told.output
    return told.output


# -- the page


def test_the_page_shows_what_the_command_prints() -> None:
    examples = re.findall(
        r"```sh\n(ckptd interval [^\n]*)\n```\n\n```text\n(.*?)```", PAGE.read_text(), re.S
    )
    assert len(examples) == 1
    for command, shown in examples:
        assert interval(*shlex.split(command)[2:]) == shown


def test_the_log_line_of_the_page_is_that_of_the_choice() -> None:
    costs, failures = Costs(0.02, 40.0, 2.02), Failures(3 * 3600, 30 * 3600)
    found = choose(costs.levels(failures), step=0.5)
    line = (
        f"{found}: {costs}; {failures}; {share_of_time(found.lost)} of the training time is "
        f"expected to be lost"
    )
    assert f"```text\n{line}\n```" in PAGE.read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the page, without its head."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_worked_example_follows_from_the_function() -> None:
    found = choose(Costs(0.02, 40.0, 2.02).levels(Failures(3 * 3600, 30 * 3600)), step=0.5)
    table = {name: cells for name, *cells in rows("An example")}
    young = [f"{(2 * level.cost * level.mtbf) ** 0.5:.3g} s" for level in found.levels]
    assert table["√(2 c M)"] == young
    for row, shares in (
        ("lost to snapshots", found.lost_to_saves),
        ("lost to failures", found.lost_to_failures),
    ):
        told, results = zip(*(cell.split(" = ") for cell in table[row]), strict=True)
        assert list(results) == [share_of_time(share) for share in shares]
        computed = [eval(text.replace(",", "")) for text in told]
        assert computed == [pytest.approx(share, rel=0.01) for share in shares]
    assert table["chosen"] == [
        "21.9 s, 44 steps", f"each {ordinal(found.every[1])}: 10.9 min, 1320 steps",
    ]  # fmt: skip


def test_the_typical_cases_follow_from_the_function() -> None:
    cases = rows("Typical cases")
    assert len(cases) >= 5
    for _, *given, memory, storage, lost in cases:
        mtbf, node, held, with_storage, durable = map(parse_span, given)
        found = choose(Costs(held, durable, with_storage).levels(Failures(mtbf, node)))
        first, second = map(short_span_text, found.intervals)
        assert (memory, storage) == (first, f"{second}, each {ordinal(found.every[1])}")
        assert lost == share_of_time(found.lost)


# -- the command


def test_a_save_that_is_slow_against_memory_asks_for_a_third_slot() -> None:
    assert "slots = 3" not in interval(*EXAMPLE)
    told = interval(*EXAMPLE, "--durable", "2m").splitlines()[-1]
    assert told == (
        "Saves take so long that snapshots to memory pause meanwhile, unless the daemon has "
        "slots = 3."
    )


def test_json_has_the_numbers_of_the_choice_and_of_half_and_double() -> None:
    told = json.loads(interval(*EXAMPLE, "--step", "500ms", "--restore", "1m", "--json"))
    assert told["costs"] == {"held_seconds": 0.02, "durable_seconds": 40.0, "lost_seconds": 2.02}
    assert (told["mtbf_seconds"], told["step_seconds"], told["saves"]) == (10800, 0.5, 0)
    memory, storage = told["best"]["levels"]
    assert (memory["level"], memory["every"], memory["steps"]) == ("memory", 1, 44)
    assert (storage["level"], storage["every"], storage["steps"]) == ("storage", 30, 1320)
    assert told["best"]["lost"] == pytest.approx(
        sum(one["lost_to_saves"] + one["lost_to_failures"] for one in (memory, storage))
    )
    assert told["best"]["lost"] < min(told["half"]["lost"], told["double"]["lost"])
    without = json.loads(interval(*EXAMPLE, "--step", "500ms", "--json"))
    assert told["best"]["lost"] - without["best"]["lost"] == pytest.approx(60 / (30 * 3600))


def test_what_is_not_known_is_said() -> None:
    told = interval("--mtbf", "1d", "--held", "1s", "--durable", "5s")
    assert short_span_text(best_interval(1.0, 86400)) in told
    assert "MEMORY" not in told
    assert "Without --lost, it is not known what storage costs" in told
    told = interval("--mtbf", "1d", "--held", "1s", "--durable", "5s", "--lost", "9s")
    assert "as if all failures were of its kind: this is the most that is lost" in told
    assert "A failure comes every 24.0 h, and may lose a node." in told


def test_a_training_that_loses_more_than_it_trains_is_told_so() -> None:
    costs = ("--held", "10s", "--lost", "60s", "--durable", "2m", "--restore", "5m")
    assert "More time is lost than is trained." in interval("--mtbf", "3m", *costs)
    assert "More time is lost than is trained." not in interval("--mtbf", "3h", *costs)


def test_the_arithmetic_has_a_line_for_each_level_and_their_sum() -> None:
    found = choose(
        [SaveLevel("memory", 1.0, 3600.0), SaveLevel("storage", 4.0, 36000.0, 9.0, 60.0)]
    )
    memory, storage, whole = arithmetic(found)
    assert memory.startswith(
        "memory: 1.0 s every 85.5 s lose 1.2 %; half an interval (42.7 s) every"
    )
    assert "half an interval (4.3 min) and the time until a snapshot is durable (9.0 s)" in storage
    assert "and the recovery (60.0 s) every 10.0 h lose" in storage
    assert whole == f"in all: {share_of_time(found.lost)} of the training time"


def test_a_level_that_no_failure_needs_is_named() -> None:
    alike = ("--mtbf", "3h", "--mtbf-node", "3h", "--held", "1s", "--durable", "5s", "--lost", "2s")
    assert "memory: 1.0 s every 3.4 min lose 0.48 %; no failure needs this level: 0 %" in interval(
        *alike
    )
    memory, _ = json.loads(interval(*alike, "--json"))["best"]["levels"]
    assert memory["mtbf_seconds"] is None


@pytest.mark.usefixtures("processes")
def test_the_costs_of_a_job_come_from_its_history(place: Home, monkeypatch: Any) -> None:
    monkeypatch.setenv("CKPTD_STATE_DIR", str(place.state))
    parameter = torch.zeros(100, requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    with running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        for number in range(1, 5):
            for _ in range(4):
                optimizer.step()
            agent.snapshot({"w": parameter}, step=number).wait("durable", timeout=60)
        optimizer.step()
        agent.close()
        asked = (place.root / "gpt", "--mtbf", "3h")

        def measured() -> bool:
            told = CliRunner().invoke(main, ["interval", *map(str, asked), "--json"])
            return told.exit_code == 0 and json.loads(told.output)["saves"] == 4

        assert holds(measured, 60)
        told = json.loads(interval(*asked, "--json"))
    assert told["costs"]["lost_seconds"] is not None
    assert told["step_seconds"] > 0
    assert 0 < told["costs"]["held_seconds"] < 10
    assert [level["level"] for level in told["best"]["levels"]] == ["memory", "storage"]
    after = json.loads(interval(*asked, "--json", "--held", "5s", "--lost", "7s"))
    assert after["costs"] == told["costs"] | {"held_seconds": 5.0, "lost_seconds": 7.0}
    assert "(medians of the last 4 saves)" in interval(*asked)


@each_case(
    ("arguments", "code", "words"),
    [
        ((), 2, "Missing option '--mtbf'"),
        (("--mtbf", "soon"), 2, "'soon' is no time: expected more than 0"),
        (("--mtbf", "3h"), 2, "--held is missing: give --held and --durable, or the path of a job"),
        (("--mtbf", "3h", "--held", "1s"), 2, "--durable is missing"),
        (("--mtbf", "3h", "--mtbf-node", "1h"), 2, "--mtbf-node is 60.0 min, less than --mtbf"),
        (("--mtbf", "3h", "--held", "2s", "--lost", "1s"), 2, "--lost is 1.0 s, less than --held"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments: tuple[str, ...], code: int, words: str) -> None:
    told = CliRunner().invoke(main, ["interval", *arguments])
    assert (told.exit_code, words in told.output) == (code, True), told.output


def test_without_a_path_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(neighbours, "AskedDaemon")
    assert "in all: 0.83 % of the training time" in interval(*EXAMPLE)
