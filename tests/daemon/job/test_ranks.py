"""Which ranks are here, which have left, and who is told."""

from __future__ import annotations

from ckptd.daemon.job.ranks import NOT_KNOWN, Owner, Process, Ranks, processes
from ckptd.shared.wire.messages import Notification, Progress
from tests.support.cases import each_case

NEWS = Progress(re=0, attempt=1, step=5, state="durable")


def owner(
    rank: int = 0, attempt: int = 1, size: int = 2, told: list[Notification] | None = None
) -> Owner:
    return Owner("gpt", attempt, rank, size, None if told is None else told.append)


def test_a_rank_that_comes_back_takes_the_place_of_its_earlier_connection() -> None:
    ranks, first, second = Ranks(), owner(), owner()
    ranks.join(first)
    ranks.join(second)
    assert (ranks.is_here(first), ranks.is_here(second)) == (False, True)
    ranks.leave(first, "ended")  # its death is noticed late
    ranks.remove(first)
    assert (ranks.is_here(second), ranks.gone) == (True, {})


def test_a_rank_that_has_left_is_gone_until_it_comes_back() -> None:
    ranks, first = Ranks(), owner()
    ranks.join(first)
    ranks.leave(first, "closed")
    assert (ranks.owners, ranks.gone, ranks.has(1, 0)) == ({}, {0: "closed"}, False)
    ranks.join(owner())
    assert (ranks.gone, ranks.has(1, 0), ranks.has(2, 0), ranks.has(1, 1)) == (
        {},
        True,
        False,
        False,
    )


def test_a_rank_whose_seals_are_still_being_read_is_removed_and_not_yet_gone() -> None:
    ranks, first = Ranks(), owner()
    ranks.join(first)
    ranks.remove(first)
    assert (ranks.owners, ranks.gone) == ({}, {})
    ranks.leave(first, "ended")
    assert ranks.gone == {0: "ended"}


def test_nobody_waits_for_the_rank_of_a_job_of_one() -> None:
    ranks, only = Ranks(), owner(size=1)
    ranks.join(only)
    ranks.leave(only, "closed")
    assert (ranks.owners, ranks.gone) == ({}, {})


def test_a_new_attempt_retires_the_owners_of_older_ones() -> None:
    ranks, old, lost, new = Ranks(), owner(0, 1, told=[]), owner(1, 1), owner(2, 2)
    for one in (old, lost, new):
        ranks.join(one)
    ranks.gone = {3: "ended"}
    assert ranks.retire(2) == [old, lost]
    assert (ranks.owners, ranks.former, ranks.gone) == ({2: new}, [old], {})
    assert ranks.retire(2) == []


def test_connected_ranks_are_told_those_of_earlier_attempts_too() -> None:
    heard: list[Notification] = []
    lost, former = owner(0, 2), owner(0, 1, told=heard)
    ranks = Ranks(owners={0: lost, 1: owner(1, 2, told=heard)}, former=[former])
    ranks.tell(NEWS)
    assert heard == [NEWS, NEWS]
    ranks.disconnect(former)
    ranks.tell(NEWS)
    assert (len(heard), ranks.former) == (3, [])


def test_rank_0_alone_is_told_a_remark_if_it_is_connected() -> None:
    heard: list[Notification] = []
    ranks = Ranks(owners={0: owner(0, told=heard), 1: owner(1, told=[])})
    ranks.tell_first(NEWS)
    assert heard == [NEWS]
    ranks.disconnect(ranks.owners[0])
    ranks.tell_first(NEWS)
    Ranks().tell_first(NEWS)
    assert heard == [NEWS]


def run_of(*pids: int, launch: str = "") -> Ranks:
    ranks = Ranks()
    for rank, pid in enumerate(pids):
        ranks.join(
            Owner(
                "gpt",
                1,
                rank,
                len(pids),
                process=Process(pid, 1000.0 - pid, launch) if pid else NOT_KNOWN,
            )
        )
    return ranks


@each_case(
    ("ranks", "process", "others"),
    [
        (run_of(), Process(7), 0),
        (run_of(7), Process(7), 0),
        (run_of(8), Process(7), 1),
        (run_of(7, 8), Process(8), 0),
        (run_of(8, 9), Process(7), 2),  # no launch is not the same launch
        (run_of(8, 9, launch="a"), Process(7, run="a"), 0),
        (run_of(8, 9, launch="a"), Process(7, run="b"), 2),
        (run_of(0), NOT_KNOWN, 1),  # two processes that are not known are not the same process
        (run_of(0), Process(7), 1),
    ],
)
def test_the_ranks_of_another_run_share_neither_process_nor_launch(
    ranks: Ranks, process: Process, others: int
) -> None:
    assert [owner.rank for owner in ranks.others(process)] == list(range(others))


@each_case(
    ("ranks", "said"),
    [
        (run_of(7), "process 7 since 1970-01-01 00:16:33 UTC"),
        (run_of(9, 7), "processes 7, 9 since 1970-01-01 00:16:31 UTC"),
        (run_of(1, 2, 3, 4, 5, 6), "processes 1, 2, 3, 4 and 2 more since 1970-01-01 00:16:34 UTC"),
        (
            run_of(0),
            "a process that this daemon cannot see, or that has not reconnected since the daemon "
            "started",
        ),
        (Ranks(owners={0: Owner("gpt", 1, 0, 1, process=Process(7))}), "process 7"),
    ],
)
def test_the_processes_of_a_run_are_named_with_their_start(ranks: Ranks, said: str) -> None:
    assert processes(list(ranks.owners.values())) == said
