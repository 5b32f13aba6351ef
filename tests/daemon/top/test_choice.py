"""Tests what each key chooses, in the table of jobs and in the list of ranks."""

from __future__ import annotations

from ckptd.daemon.top.choice import PAGE, Choice
from tests.support.cases import each_case

JOBS = [f"job{number}" for number in range(30)]


def test_the_first_job_is_chosen_until_the_user_chooses() -> None:
    assert Choice().among(JOBS, 0) == Choice("job0")
    assert Choice("job7").among(JOBS, 0) == Choice("job7")
    assert Choice("gone", ranks=True, scrolled=3).among(JOBS, 9) == Choice("job0")
    assert Choice("gone", ranks=True).among([], 0) == Choice()


@each_case(
    ("key", "job"),
    [
        ("down", "job6"), ("j", "job6"), ("up", "job4"), ("k", "job4"), ("home", "job0"),
        ("end", "job29"), ("page down", f"job{5 + PAGE}"), ("page up", "job0"), ("x", "job5"),
    ],
)  # fmt: skip
def test_keys_move_among_the_jobs(key: str, job: str) -> None:
    assert Choice("job5").pressed(key, JOBS) == Choice(job)


def test_the_ends_of_the_table_hold() -> None:
    assert Choice("job29").pressed("down", JOBS) == Choice("job29")
    assert Choice().pressed("down", []) == Choice()


def test_enter_shows_the_ranks_and_goes_back() -> None:
    shown = Choice("job5").pressed("enter", JOBS)
    assert shown == Choice("job5", ranks=True)
    assert Choice().pressed("enter", []) == Choice()
    scrolled = shown.pressed("down", JOBS).pressed("j", JOBS).among(JOBS, 9)
    assert scrolled == Choice("job5", ranks=True, scrolled=2)
    assert scrolled.pressed("end", JOBS).among(JOBS, 9).scrolled == 8
    assert scrolled.pressed("home", JOBS).among(JOBS, 9).scrolled == 0
    assert scrolled.among(JOBS, 1).scrolled == 0
    for key in ("enter", "escape"):
        assert scrolled.pressed(key, JOBS) == Choice("job5")
    assert Choice("job5").pressed("escape", JOBS) == Choice("job5")
