"""Tests how the rigs share the time, and what makes a run fail. No rig is started here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.crash import trust
from tests.crash.trust import RIGS, Row
from tests.support.seen_chains import CHAINS


@pytest.mark.parametrize("minutes", [0.5, 1, 5, 6, 7, 20, 600])
def test_every_rig_has_its_share_of_any_number_of_minutes(minutes: float) -> None:
    tasks = trust.tasks(minutes, seed=1)
    assert {name for name, *_ in tasks} == set(RIGS)
    assert {count for _, count, _, _ in tasks} == {trust.FOREVER}
    shares = {seconds for _, _, seconds, _ in tasks}
    assert len(shares) == 1
    assert shares.pop() * len(tasks) == pytest.approx(60 * minutes * trust.LANES)


def test_rigs_that_are_chosen_share_all_of_the_time() -> None:
    assert [(name, seconds) for name, _, seconds, _ in trust.tasks(3, seed=1, only=["lives",
    "power"])] == [
        ("lives", 180.0), ("power", 180.0),
    ]  # fmt: skip


def test_without_minutes_every_rig_has_its_counts_and_no_limit() -> None:
    tasks = trust.tasks(None, seed=1)
    for name, rig in RIGS.items():
        assert [count for other, count, _, _ in tasks if other == name] == list(rig.long)
    assert {seconds for _, _, seconds, _ in tasks} == {float("inf")}


@pytest.mark.parametrize("minutes", [None, 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_task_has_a_seed_of_its_own_and_the_guards_both_halves(
    minutes: float | None, seed: int
) -> None:
    tasks = trust.tasks(minutes, seed=seed)
    seeds = [seed for *_, seed in tasks]
    assert len(set(seeds)) == len(seeds)
    assert {seed % trust.LANES for name, _, _, seed in tasks if name == "guards"} == set(
        range(trust.LANES)
    )


def row(tried: int = 1, lost: int = 0, absent: str = "") -> Row:
    return Row("kind", "things", tried, lost * ["lost"], absent=absent)


def test_a_run_without_losses_succeeds() -> None:
    assert trust.verdict({"lives": row(3), "power": row(4)}, ["lives", "power"]) == (
        ["7 tried, 0 lost"],
        0,
    )


def test_a_rig_that_tried_nothing_makes_the_run_fail() -> None:
    lines, code = trust.verdict({"lives": row(3), "power": row(0)}, ["lives", "power", "gate"])
    assert code == 1
    assert lines[0].startswith("tried nothing: power, gate;")
    assert lines[-1] == "3 tried, 0 lost"


def test_a_rig_that_saw_no_chain_is_named_and_fails_the_run_if_none_saw_any() -> None:
    rows = {"lives": replace(row(3), chains=0), "power": replace(row(4), chains=0)}
    lines, code = trust.verdict(rows, list(rows))
    assert code == 1
    assert lines[0].startswith("tried no chain of deltas: lives, power;")
    rows["power"] += replace(row(1), chains=2)
    assert rows["power"].chains == 2
    lines, code = trust.verdict(rows, list(rows))
    assert code == 0
    assert lines[0].startswith("tried no chain of deltas: lives;")
    assert trust.verdict({"lives": row(3)}, ["lives"]) == (["3 tried, 0 lost"], 0)


def test_chains_are_counted_apart_and_only_by_rigs_that_look_for_them() -> None:
    for counted, chains in (({CHAINS: 0}, 0), ({CHAINS: 3}, 3), ({}, None)):
        found = {"kill": 2, **counted}
        made = trust.Alike("k", "u", lambda c, n, s, f=found: (Counter(f), []))(3, 1.0, 7)  # type: ignore[misc]
        assert (made.tried, made.chains) == (2, chains)
        assert (row() + row()).chains is None


def test_a_rig_that_this_machine_cannot_run_does_not_make_the_run_fail() -> None:
    assert (
        trust.verdict(
            {"lives": row(3), "power": row(0, absent="no loop mounts")}, ["lives", "power"]
        )[1]
        == 0
    )


def test_a_loss_makes_the_run_fail() -> None:
    assert trust.verdict({"lives": row(3, lost=2)}, ["lives"]) == (["3 tried, 2 lost"], 1)


def test_outcomes_of_tries_are_not_counted_as_tries() -> None:
    counted = Counter({"memory": 2, "  durable": 40, "not tried: inodes: no loop mounts": 1})
    made = trust.Alike("shortages", "tries", lambda count, number, seconds: (counted, ["lost"]))(
        3, 1.0, 7
    )
    assert (made.kind, made.unit, made.tried, made.problems) == ("shortages", "tries", 2, ["lost"])


def test_the_tasks_of_a_rig_are_summed() -> None:
    both = row(2, lost=1) + row(3)
    assert (both.tried, both.problems, both.absent) == (5, ["lost"], "")
    assert (row(0, absent="no strace") + row(0, absent="no strace")).absent == "no strace"
    assert (row(0, absent="no strace") + row(3)).absent == ""
