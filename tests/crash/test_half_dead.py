"""Tests jobs of four ranks.

One rank is killed, stopped or late in some phase of a snapshot, or makes a different
call than the others.

In each case the calls of the other ranks return, later steps are saved, and the errors
name the rank that was waited for. Nothing incomplete is committed. The job, started
again, gets the newest step that all ranks had sealed. Four jobs, each with another rank
in trouble, share a daemon and run at once, because most of the time is spent waiting
for deadlines.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ckptd.agent import Checkpoint
from ckptd.agent.read.checkpoint import opened_of
from ckptd.agent.state import values
from ckptd.shared import names
from ckptd.shared.formats.segment import read_header
from tests.crash import rank_trainer as trainer
from tests.support import forks, trainers
from tests.support.daemons import Home, running
from tests.support.ranks import Ranks

# Imported before any rank is forked, or else every rank would import it: DTensor needs
# torch._dynamo, and pytest is the main module here.
forks.context().set_forkserver_preload(
    ["tests.support.trainers", "tests.crash.rank_trainer", "torch._dynamo", "pytest"]
)

JOB = trainers.JOB
WORLD = range(4)
PHASES = (
    "before",
    "agent.planning",
    "agent.granted",
    "agent.copying",
    "agent.documents",
    "agent.sealed",
    "agent.handed_over",
)
FAST = {"CKPTD_RANK_TIMEOUT": "2", "CKPTD_STALL_BUDGET": "1"}
# As by default, ranks stop planning before the daemon fails the step.
PLANNING = {"CKPTD_RANK_TIMEOUT": "4", "CKPTD_STALL_BUDGET": "1"}
_starting = threading.Lock()


def wait_stopped(ranks: Ranks, *which: int) -> None:
    stats = [Path(f"/proc/{ranks.processes[rank].pid}/stat") for rank in which]
    deadline = time.monotonic() + 60
    while not all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats):
        assert time.monotonic() < deadline, f"ranks {which} have not all stopped"
        time.sleep(0.005)


def blamed(message: str) -> set[int]:
    """Return the ranks that a message names, except those that have passed the message
    on.
    """
    said = re.sub(r"^(rank \d+: )+", "", message)
    return {
        int(number)
        for found in re.findall(r"\branks? (\d+(?:, \d+)*)", said)
        for number in found.split(", ")
    }


def start(place: Home, job: str = JOB) -> Ranks:
    with _starting:  # starting one job after the other is faster than all at once
        ranks = Ranks(len(WORLD))
        ranks.call(trainer.begin, place.socket, job)
    return ranks


def at_once(ranks: Ranks, step: int) -> bool:
    """Return True if all ranks save this step."""
    ranks.call(trainer.take, [step])
    return ranks.call(trainer.ends, [step]) == [[("durable", "", "")]] * ranks.world_size


def save(ranks: Ranks, step: int) -> int:
    """Return the first step, from this one on, that all ranks save.

    On a busy machine any rank may be late.
    """
    return next(number for number in range(step, step + 5) if at_once(ranks, number))


def check_storage(place: Home, job: str = JOB) -> set[int]:
    """Check that every manifest verifies and holds one step of all ranks.

    Return the steps.
    """
    steps = set()
    for path in sorted((place.root / job).glob("*.a*")):
        with Checkpoint.open(place.root / job, path.name) as checkpoint:
            checkpoint.verify()
            step = checkpoint.step
            assert step is not None
            assert [part.rank for part in checkpoint.manifest.parts] == list(WORLD)
            tensors = dict(
                zip(found := checkpoint.keys(), map(checkpoint.tensor, found), strict=True)
            )
            assert [
                name
                for name, wanted in trainer.whole(step).items()
                if not torch.equal(tensors[name], wanted)
            ] == []
            for rank in WORLD:
                state = values.decode(
                    opened_of(checkpoint).values(rank), tensors.__getitem__, objects=False
                )["state"]
                assert state["step"] == step
                assert trainer.differences(state, {"own": trainer.own(step, rank)}) == []
            steps.add(step)
    return steps


# -- one rank in trouble


def hit(ranks: Ranks, victim: int, phase: str, fault: str, steps: list[int], late: float) -> None:
    """Let the victim take these steps, and wait until the fault has hit it in the given
    phase of the first step.
    """
    only = [victim]
    if fault == "kill" and phase == "before":
        ranks.kill(victim)
        return
    if fault == "stop":
        if phase == "before":
            ranks.signal(victim, signal.SIGSTOP)
            wait_stopped(ranks, victim)
        else:
            ranks.call(trainer.stop_at, phase, only=only)
    elif phase != "before":
        ranks.call(
            trainer.arm, f"{phase}={'kill' if fault == 'kill' else f'sleep({late})@1'}", only=only
        )
    ranks.begin(
        trainer.take, steps, late if (phase, fault) == ("before", "sleep") else 0.0, only=only
    )
    if fault == "stop":
        wait_stopped(ranks, victim)


def suffer(place: Home, victim: int, phase: str, fault: str) -> None:
    """Run the whole life of a job.

    Half of the stopped ranks continue later, and half are killed while they are
    stopped. Late ranks all continue.
    """
    job, others = f"job{victim}", [rank for rank in WORLD if rank != victim]
    planning = phase == "agent.planning"
    again = fault == "sleep" or (fault == "stop" and (victim + PHASES.index(phase)) % 2 == 0)
    with start(place, job) as ranks:
        first = save(ranks, 95 if planning else 1)
        step = 100 if planning else first + 1
        steps = [step, step + 1] if planning else [step, step + 1, step + 2]
        hit(ranks, victim, phase, fault, steps, 5.0 if planning else 3.0)
        ranks.call(trainer.take, steps, only=others, timeout=60)
        outcomes = ranks.call(trainer.ends, steps, only=others)
        sealed = phase == "agent.handed_over" or (phase == "agent.sealed" and fault == "kill")
        for (state, _, why), *later in outcomes:
            assert (state, blamed(why)) == (
                ("durable", set()) if sealed else ("failed", {victim})
            ), why
            for state, _, why in later:
                assert state == "durable" or (
                    victim in blamed(why) if state == "failed" else blamed(why) <= {victim}
                ), why
        if again:
            if fault == "stop":
                ranks.signal(victim, signal.SIGCONT)
            ranks.results(only=[victim])
            outcomes += ranks.call(trainer.ends, steps, only=[victim])
        saved = [
            {
                number
                for number, (state, _, _) in zip(steps, found, strict=True)
                if state == "durable"
            }
            for found in outcomes
        ]
        assert saved == saved[:1] * len(outcomes)  # each step is saved by all ranks or by none
        durable = {first} | saved[0]
        if again:
            durable.add(save(ranks, steps[-1] + 1))
    with start(place, job) as ranks:
        assert ranks.call(trainer.recover, max(durable)) == [
            (max(durable), "memory", [], [])
        ] * len(WORLD)
        durable.add(save(ranks, 200))
    assert check_storage(place, job) == durable


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", ["kill", "stop", "sleep"])
def test_a_killed_stopped_or_late_rank_fails_no_more_than_the_step(
    place: Home, phase: str, fault: str
) -> None:
    environment = PLANNING if phase == "agent.planning" else FAST
    with (
        running(place, "--keep-last", "0", environment=environment),
        ThreadPoolExecutor(len(WORLD)) as pool,
    ):
        for job in [pool.submit(suffer, place, victim, phase, fault) for victim in WORLD]:
            job.result()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_plan_that_outlasts_rank_timeout_names_the_rank(place: Home, victim: int) -> None:
    others = [rank for rank in WORLD if rank != victim]
    with (
        running(place, environment={"CKPTD_RANK_TIMEOUT": "2", "CKPTD_STALL_BUDGET": "3"}),
        start(place) as ranks,
    ):
        hit(ranks, victim, "agent.planning", "stop", [1], 0.0)
        ranks.call(trainer.take, [1], only=others)
        assert [blamed(why) for [(_, _, why)] in ranks.call(trainer.ends, [1], only=others)] == [
            {victim}
        ] * 3


@pytest.mark.parametrize("victim", [0, 2])
def test_a_plan_that_is_made_too_late_is_not_kept(place: Home, victim: int) -> None:
    others = [rank for rank in WORLD if rank != victim]
    with running(place, environment={"CKPTD_STALL_BUDGET": "1"}), start(place) as ranks:
        assert at_once(ranks, 1)
        hit(ranks, victim, "agent.planning", "stop", [100], 0.0)
        ranks.call(trainer.take, [100], only=others)
        ranks.signal(victim, signal.SIGCONT)
        ranks.results(only=[victim])
        assert [state for [(state, _, _)] in ranks.call(trainer.ends, [100])] == ["failed"] * 4
        assert at_once(ranks, 101)


def test_a_skipped_step_names_the_rank_that_has_not_sealed(place: Home) -> None:
    others = [0, 1, 3]
    with running(place, environment={"CKPTD_STALL_BUDGET": "1"}), start(place) as ranks:
        assert at_once(ranks, 1)
        hit(ranks, 2, "agent.sealed", "stop", [2], 0.0)
        ranks.call(trainer.take, [2, 3], only=others)
        assert [
            (state, blamed(why)) for [(state, _, why)] in ranks.call(trainer.ends, [3], only=others)
        ] == [("skipped", {2})] * 3


def test_a_rank_that_seals_late_completes_the_step(place: Home) -> None:
    """The rank comes after the stall budget, so that the others have skipped a step
    meanwhile, but before rank_timeout.
    """
    others = [0, 1, 3]
    with running(place, environment={"CKPTD_STALL_BUDGET": "1"}), start(place) as ranks:
        assert at_once(ranks, 1)
        assert ranks.call(trainer.take, [2, 3], only=others) == [["sealed", "skipped"]] * 3
        assert ranks.call(trainer.take, [2], only=[2]) == [["sealed"]]
        assert ranks.call(trainer.ends, [2]) == [[("durable", "", "")]] * 4
        assert save(ranks, 4) == 4


def test_a_step_that_others_have_skipped_is_skipped_by_a_late_rank(place: Home) -> None:
    others = [0, 1, 3]
    with running(place, environment={"CKPTD_STALL_BUDGET": "1"}), start(place) as ranks:
        assert at_once(ranks, 1)
        hit(ranks, 2, "agent.copying", "stop", [2], 0.0)
        assert (
            ranks.call(trainer.take, [2, 3, 4], only=others)
            == [["sealed", "skipped", "skipped"]] * 3
        )
        ranks.signal(2, signal.SIGCONT)
        ranks.results(only=[2])
        assert ranks.call(trainer.ends, [2]) == [[("durable", "", "")]] * 4
        assert ranks.call(trainer.take, [3, 4], only=[2]) == [["skipped", "skipped"]]
        assert at_once(ranks, 5)


# -- ranks that do different things


def test_a_structure_that_changes_on_one_rank_fails_one_step_on_all(place: Home) -> None:
    others = [0, 1, 3]
    with running(place), start(place) as ranks:
        assert at_once(ranks, 1)
        for step, change, what in ((2, "tensor", "more is new"), (4, "", "more is gone")):
            ranks.begin(trainer.take, [step], 0.0, None, change, only=[2])
            ranks.begin(trainer.take, [step], only=others)
            ranks.results()
            for [(state, kind, why)] in ranks.call(trainer.ends, [step]):
                assert (state, kind) == ("failed", "StructureChanged")
                assert f"rank 2: {what}" in why
            ranks.begin(trainer.take, [step + 1], 0.0, None, change, only=[2])
            ranks.begin(trainer.take, [step + 1], only=others)
            ranks.results()
            assert ranks.call(trainer.ends, [step + 1]) == [[("durable", "", "")]] * 4
        assert check_storage(place) == {1, 3, 5}


def test_ranks_save_again_after_one_has_given_up_planning_before_the_others(place: Home) -> None:
    with running(place, environment={"CKPTD_STALL_BUDGET": "0.5"}), start(place) as ranks:
        first = save(ranks, 1)
        ranks.call(trainer.arm, "agent.copying=sleep(4)@1", only=[0, 1, 3])
        ranks.begin(trainer.take, [50], 0.0, None, "tensor", only=[2])
        ranks.begin(trainer.take, [50], only=[0, 1, 3])
        ranks.results()
        outcomes = ranks.call(trainer.ends, [50])
        told = [("failed", "SnapshotFailed" if rank == 2 else "StructureChanged") for rank in WORLD]
        assert [(state, kind) for [(state, kind, _)] in outcomes] == told
        second = save(ranks, 51)
        assert check_storage(place) == {first, second}


def test_slots_requested_before_the_state_grew_are_replaced_by_larger_ones(place: Home) -> None:
    with running(place) as daemon, start(place) as ranks:
        # `extra` has a hundredth as many elements
        steps = [98, 99, 20_000_000, 20_000_001, 60_000_000]
        assert [step for step in steps if at_once(ranks, step)] == steps
        assert check_storage(place) == set(steps)
        assert daemon.status()["counters"]["failed"] == 0


def test_a_structure_that_changes_on_all_ranks_fails_no_step(place: Home) -> None:
    with running(place) as daemon, start(place) as ranks:
        steps = [98, 99, 100, 101, 200, 300, 301]
        assert [step for step in steps if at_once(ranks, step)] == steps
        assert check_storage(place) == set(steps)
        assert daemon.status()["counters"]["failed"] == 0


def test_ranks_can_plan_without_a_stall_budget(place: Home) -> None:
    with running(place, environment={"CKPTD_STALL_BUDGET": "0"}), start(place) as ranks:
        # Skipped while slots are being made.
        first = next(step for step in range(1, 90) if at_once(ranks, step))
        ranks.begin(trainer.take, [100], 0.4, only=[2])
        ranks.begin(trainer.take, [100], only=[0, 1, 3])
        ranks.results()
        assert ranks.call(trainer.ends, [100]) == [[("durable", "", "")]] * 4
        assert check_storage(place) >= {first, 100}


def test_a_step_with_different_tags_on_two_ranks_fails(place: Home) -> None:
    with running(place), start(place) as ranks:
        assert at_once(ranks, 1)
        for step, tag in ((2, "b"), (4, None)):
            ranks.call(trainer.take, [step], 0.0, f"a{step}", only=[0, 1, 2])
            ranks.call(trainer.take, [step], 0.0, tag, only=[3])
            for [(state, _, why)] in ranks.call(trainer.ends, [step]):
                assert state == "failed"
                assert f"'a{step}" in why
                assert blamed(why) == {3}
            assert at_once(ranks, step + 1)
        ranks.call(trainer.take, [6], 0.0, "a6")
        assert ranks.call(trainer.ends, [6]) == [[("durable", "", "")]] * 4
        assert check_storage(place) == {1, 3, 5, 6}


def test_a_state_that_cannot_be_saved_fails_on_all_ranks(place: Home) -> None:
    """The value comes with the first snapshot, whose plan the others wait for, and
    again later, after the others have sealed.
    """
    with running(place), start(place) as ranks:
        for step in (1, 3):
            ranks.begin(trainer.take, [step], 0.0, None, "lambda", only=[1])
            ranks.begin(trainer.take, [step], only=[0, 2, 3])
            ranks.results()
            for rank, [(state, kind, why)] in enumerate(ranks.call(trainer.ends, [step])):
                assert state == "failed"
                assert "more" in why
                assert (kind, why.startswith("rank 1: more"), why.count("rank")) == (
                    "UnsavableValue",
                    rank != 1,
                    int(rank != 1),
                ), why
            assert at_once(ranks, step + 1)
        assert check_storage(place) == {2, 4}


# -- recovery


def test_a_state_that_does_not_fit_on_one_rank_is_written_on_none(place: Home) -> None:
    with running(place):
        with start(place) as ranks:
            assert at_once(ranks, 1)
        with start(place) as ranks:
            ranks.begin(trainer.recover, 1, True, only=[2])
            ranks.begin(trainer.recover, 1, only=[0, 1, 3])
            for rank, (step, kind, [why], written) in enumerate(ranks.results()):
                assert (step, kind, written) == (-1, "StructureMismatch", [])
                assert "bias" in why
                assert rank == 2 or blamed("; " + why) == {2}
            assert ranks.call(trainer.recover, 1) == [(1, "memory", [], [])] * 4


@pytest.mark.parametrize("damaged", [0, 2])
def test_all_ranks_pass_over_a_checkpoint_with_one_damaged_part(place: Home, damaged: int) -> None:
    with running(place):
        with start(place) as ranks:
            assert [at_once(ranks, step) for step in (1, 2, 3)] == [True] * 3
            assert ranks.call(trainer.close) == [""] * 4
        files = (place.root / JOB / names.tag_directory(3, None, 1)).glob(f"*{damaged:05d}*")
        file = max(files, key=lambda file: file.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 1
        file.unlink()  # and no other checkpoint that has a link to it
        file.write_bytes(data)
        with start(place) as ranks:
            for step, source, passed_over, differences in ranks.call(trainer.recover, 2):
                assert (step, source, differences) == (2, "storage", [])
                assert len(passed_over) == 1
                assert names.tag_directory(3, None, 1) in passed_over[0]
            assert at_once(ranks, 4)


# -- beside the ranks of an older attempt, and without a daemon


def evidence(place: Home, attempt: int) -> dict[str, bytes]:
    """Return the content of everything that belongs to an attempt, its slots and
    checkpoints, and of the journal.
    """
    found = {}
    for path in place.segment_files():
        with path.open("rb") as file:
            if read_header(file.fileno()).attempt == attempt:
                found[path.name] = path.read_bytes()
    for path in (*place.root.rglob(f"*.a{attempt:04d}/*"), *place.journal.iterdir()):
        found[str(path)] = path.read_bytes()
    return found


def test_ranks_of_an_older_attempt_change_nothing_of_the_newer_one(place: Home) -> None:
    with running(place) as daemon, start(place) as old:
        assert at_once(old, 1)
        for rank in WORLD:
            old.call(
                trainer.stop_at, "agent.documents" if rank < 2 else "agent.sealed", only=[rank]
            )
        old.begin(trainer.take, [2])
        wait_stopped(old, *WORLD)
        with start(place) as new:
            assert new.call(trainer.recover, 1) == [(1, "memory", [], [])] * 4
            assert at_once(new, 2)
            assert at_once(new, 3)
            before = evidence(place, 2)
            assert len([name for name in before if name.endswith(".seg")]) == 8
            assert len([name for name in before if name.endswith(names.MANIFEST)]) == 2
            for rank in WORLD:
                old.signal(rank, signal.SIGCONT)
            old.results()
            old.call(trainer.take, [4])
            for (state, _, _), later in old.call(trainer.ends, [2, 4]):
                assert state == "failed"
                assert later[:2] == ("failed", "Fenced")
            assert old.call(trainer.hand_over, 2) == ["Fenced"] * 4
            assert old.call(trainer.close) == ["Fenced"] * 4
            assert evidence(place, 2) == before
            assert at_once(new, 4)
            assert daemon.status()["jobs"][0]["attempt"] == 2
        assert check_storage(place) == {1, 2, 3, 4}


def test_ranks_of_an_older_attempt_are_fenced(place: Home) -> None:
    with running(place), start(place) as old:
        assert at_once(old, 1)
        old.call(trainer.stop_at, "agent.documents", only=[3])
        old.begin(trainer.take, [2])
        wait_stopped(old, 3)
        old.results(only=[0, 1, 2])
        with start(place):
            old.signal(3, signal.SIGCONT)
            old.results(only=[3])
            assert [kind for [(_, kind, _)] in old.call(trainer.ends, [2], 5.0)] == ["Fenced"] * 4


@pytest.mark.parametrize("fate", ["all go on", "one dies", "all die"])
def test_a_daemon_killed_between_the_seals_of_ranks_loses_no_complete_step(
    place: Home, fate: str
) -> None:
    """All ranks have sealed step 1, which is not saved yet, and half of the ranks have
    sealed step 2.
    """
    budget = {"CKPTD_STALL_BUDGET": "20"}
    with (
        running(place, failpoints="persist.created=hang", environment=budget) as first,
        start(place) as ranks,
    ):
        assert ranks.call(trainer.take, [1]) == [["sealed"]] * 4
        ranks.call(trainer.stop_at, "agent.documents", only=[2])
        ranks.begin(trainer.take, [2], only=[2])
        wait_stopped(ranks, 2)
        assert ranks.call(trainer.take, [2], only=[0, 1]) == [["sealed"]] * 2
        first.kill()
        if fate == "all die":
            for rank in WORLD:
                ranks.kill(rank)
        with running(place, environment=budget):
            newest, left = 1, [0, 1]
            if fate == "all go on":
                ranks.signal(2, signal.SIGCONT)
                ranks.results(only=[2])
                assert ranks.call(trainer.take, [2], only=[3]) == [["sealed"]]
                newest, left = 2, list(WORLD)
            elif fate == "one dies":
                ranks.kill(2)
            if fate != "all die":
                for (state, _, _), (after, _, why) in ranks.call(trainer.ends, [1, 2], only=left):
                    assert state == "durable"
                    assert (after, blamed(why)) == (
                        ("durable", set()) if newest == 2 else ("failed", {2})
                    )
                for rank in WORLD:
                    ranks.kill(rank)
            with start(place) as again:
                assert again.call(trainer.recover, newest) == [(newest, "memory", [], [])] * 4
                assert at_once(again, 3)
            assert check_storage(place) == ({1, 2, 3} if newest == 2 else {1, 3})
