"""Tests the lines that `ckptd top` draws: in windows of any size, with any number of
jobs, and with names that a terminal would obey.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ckptd.daemon.top import screen as s
from ckptd.daemon.top.choice import Choice
from ckptd.daemon.top.contact import Contact
from ckptd.daemon.top.poller import Seen
from ckptd.daemon.top.screen import ASCII, UNICODE, View, screen
from ckptd.daemon.top.trends import Trend
from ckptd.shared.units import printable
from tests.shared.samples import steady
from tests.support.cases import each_case
from tests.support.reports import SAVING, job_report, status_report
from tests.support.top_picture import picture

EVIL = "w\x1b[2J\x07\n\x9b31m\u202ehtap"
WIDE = "模型训练🔥" * 8
TREND = Trend((0.1, 0.2, 0.4), (0.01, 0.0, 0.02), 8e9, 6.5)


def view(*jobs: dict[str, Any], choice: Choice | None = None, **changes: Any) -> View:
    """Return a view of a daemon that has answered one second ago."""
    status = status_report(*jobs, **changes.pop("status", {}))
    trends = {job["job"]: TREND for job in jobs}
    seen = Seen(Contact().answered(status, 1000.0), trends, 0.034)
    names = s.job_names(status)
    return View(
        seen=changes.pop("seen", seen),
        choice=(choice or Choice()).among(names, 9),
        now=changes.pop("now", 1001.0),
        **changes,
    )


def lines(shown: View, columns: int, rows: int) -> list[str]:
    """Return the lines of a window, after the checks that each must pass."""
    drawn = screen(shown, columns, rows)
    assert len(drawn) <= rows
    assert [line.plain for line in drawn if line.cell_len > columns] == []
    assert [line.plain for line in drawn if not line.plain.isprintable()] == []
    return [line.plain.rstrip() for line in drawn]


@each_case("columns", [40, 80, 200])
@each_case("jobs", [0, 1, 60])
def test_every_window_shows_as_many_jobs_as_fit(columns: int, jobs: int) -> None:
    names = [f"job-{number:02d}" for number in range(jobs)]
    shown = lines(view(*(job_report(name) for name in names)), columns, 24)
    assert len(shown) == 24
    assert shown[0].startswith("ckptd top  /ckpts")
    assert "Enter ranks" in shown[-1]
    found = [line[3:].split()[0] for line in shown if line[3:7] == "job-"]
    if not jobs:
        assert "no jobs yet" in shown
    elif jobs == 1:
        assert found == names
        assert "  in memory   step 400" in shown
    else:
        assert len(found) >= 3
        assert found == names[: len(found)]
        assert f"   {60 - len(found)} more jobs" in shown


@each_case("rows", [1, 2, 3, 4, 5, 8, 14, 24, 39])
@each_case("ranks", [False, True])
def test_windows_of_every_height_are_filled_and_not_more(rows: int, ranks: bool) -> None:
    jobs = [job_report(f"job-{number:02d}", saving=[SAVING]) for number in range(20)]
    problems = [(job["job"], f"{job['job']} is not well") for job in jobs]
    shown = view(*jobs, choice=Choice("job-11", ranks=ranks), problems=problems)
    for columns in (1, 2, 10, 40, 120):
        assert len(lines(shown, columns, rows)) == rows
    if rows >= 14 and not ranks:
        assert any(line.startswith(">! job-11") for line in lines(shown, 80, rows))


def test_forty_columns_have_what_matters_most() -> None:
    shown = lines(view(job_report("gpt-small", saving=[SAVING])), 40, 24)
    (titles,) = [line for line in shown if line.startswith("   JOB")]
    assert titles.split() == ["JOB", "AGE", "ROOM", "SAVING"]
    (row,) = [line for line in shown if line.startswith(">")]
    assert row.split() == [">", "gpt-small", "13", "s", "97", "39", "%"]


def test_two_hundred_columns_have_everything() -> None:
    shown = lines(view(job_report(saving=[SAVING])), 200, 24)
    titles = next(line for line in shown if line.startswith("   JOB"))
    assert titles.split() == [
        "JOB", "RANKS", "STEP", "STORED", "AGE", "ROOM", "HELD", "LOST", "SAVING",
    ]  # fmt: skip
    row = next(line for line in shown if line.startswith(">"))
    assert row.split()[1:7] == ["gpt", "1", "400", "380", "13", "s"]
    assert "▃▅█ 0.400 s" in row
    assert row.endswith("39 %    1.2 GB/s  4 s left")
    assert "━━" in row
    for fact in (
        "  on storage  step 380, 13 s ago, 8.0 GB durable after 6.500 s; room for 97 more",
        "  saving      step 400: 3.1 of 8.0 GB at 1.2 GB/s, 4 s left",
    ):
        assert fact in shown
    (held,) = [line for line in shown if line.startswith("  held")]
    assert held.endswith("▃▅█ last 0.400 s, median 0.200 s, most 0.400 s of 3")


def test_the_head_tells_of_the_daemon_itself() -> None:
    text = " ".join(lines(view(), 200, 10))
    for fact in (
        "ready, up 1 min", "pid 4711", "CPU 3.4 %", "memory 41.2 MB", "loop 2 ms late",
        "shared memory 85.4 MB of 22.7 GB", "disk 54.7 GB free", "12 sealed, 11 saved",
        "3 skipped, 1 failed",
    ):  # fmt: skip
        assert fact in text
    gone = view(status={"disk_free_bytes": None, "ready": False, "rss_bytes": None})
    text = " ".join(lines(gone, 200, 10))
    for fact in ("STOPPING, up", "disk NOT AVAILABLE", "memory -"):
        assert fact in text
    stage = {"waiting": 2, "waiting_bytes": 4 * 10**9}
    text = " ".join(lines(view(status={"stage": stage}), 200, 10))
    assert "stage 54.7 GB free" in text
    assert "2 checkpoints (4.0 GB) to upload" in text


def test_problems_are_told_and_their_jobs_are_marked() -> None:
    jobs = [job_report(name) for name in ("a", "b")]
    problems = [("b", f"problem {number}") for number in range(5)]
    shown = lines(view(*jobs, problems=problems), 80, 24)
    assert [line for line in shown if line.startswith("!")] == [
        "! problem 0", "! problem 1", "! problem 2", "! 2 more problems: ckptd status --check",
    ]  # fmt: skip
    assert [line[:4] for line in shown if line[3:5] in ("a ", "b ")] == [">  a", " ! b"]


def test_the_last_error_is_shown_whole() -> None:
    reason = "no space is left on the device, " * 8
    error = {"step": 360, "reason": reason, "age_seconds": 179.0}
    shown = lines(view(job_report(last_error=error)), 60, 40)
    start = next(at for at, line in enumerate(shown) if line.startswith("  last error"))
    text = " ".join(line[14:].strip() for line in shown[start : start + 8])
    assert f"step 360, 3 min ago: {reason.strip()}" in " ".join(text.split())


@each_case(
    ("changes", "shown"),
    [
        ({}, "step 400"),
        ({"replicated": None, "replicas_off": None}, "step 400"),
        ({"replicated": 390}, "step 400; step 390 in the memory of other nodes, too"),
        (
            {"replicated": 390, "replicas_off": "rank 1: the peer is gone"},
            "step 400; step 390 in the memory of other nodes, too; "
            "no more copies: rank 1: the peer is gone",
        ),
        ({"replicas_off": "no domain"}, "step 400; no more copies: no domain"),
    ],
)
def test_steps_in_other_nodes_are_shown(changes: dict[str, Any], shown: str) -> None:
    drawn = lines(view(job_report(**changes)), 120, 40)
    assert f"  in memory   {shown}" in [line.rstrip() for line in drawn]


def test_jobs_with_ranks_come_first_and_a_job_without_a_checkpoint_says_so() -> None:
    jobs = [
        job_report("ended", ranks_connected=0, last_durable=None, room_for=None),
        job_report("new", last_durable=None, last_sealed=None, pending=["x"], room_for=2),
        job_report("waits", delivered=["x"], pending=["x"]),
    ]
    shown = lines(view(*jobs), 100, 24)
    rows = [line[3:].split() for line in shown if line[3:].startswith(("ended", "new", "waits"))]
    assert [row[0] for row in rows[:3]] == ["new", "waits", "ended"]
    assert rows[0][1:5] == ["1", "-", "never", "2"]
    assert rows[0][-1] == "queued"
    assert rows[1][-1] == "waits"
    assert rows[2][-1] == "-"


def test_a_daemon_that_is_gone_says_since_when_and_ages_go_on() -> None:
    contact = Contact().answered(status_report(job_report()), 1000.0).failed("gone", 1001.0)
    gone = view(job_report(), seen=Seen(contact), now=1048.0)
    shown = lines(gone, 100, 24)
    assert shown[1].startswith("no answer since ")
    assert shown[1].endswith("(47 s): gone")
    assert any("  on storage  step 380, 1 min ago" in line for line in shown)
    (row,) = [line for line in screen(gone, 100, 24) if line.plain.startswith(">")]
    assert "dim" in [span.style for span in row.spans if span.end - span.start == len(row)]
    before = lines(view(seen=Seen(Contact().failed("gone", 1.0)), now=2.0), 80, 24)
    assert before[1].endswith("(1 s): gone")


@pytest.mark.parametrize(("waited", "late"), [(1.9, False), (2.0, True)])
def test_a_daemon_that_is_late_is_not_called_ready(waited: float, late: bool) -> None:
    slow = view(job_report(), waited=waited, now=1003.0, problems=[("gpt", "it is full")])
    shown = lines(slow, 100, 24)
    assert shown[1].startswith("no answer since ") is late
    assert shown[1 + late].startswith("was ready, up 1 min" if late else "ready, up 1 min")
    (problem,) = [line for line in screen(slow, 100, 24) if line.plain == "! it is full"]
    assert problem.style == ("dim" if late else "yellow")
    (row,) = [line for line in screen(slow, 100, 24) if line.plain.startswith(">")]
    whole = [span.style for span in row.spans if span.end - span.start == len(row)]
    assert ("dim" in whole) is late


def test_the_ranks_of_a_job_are_listed_and_scrolled() -> None:
    ranks = [
        {
            "rank": number, "pid": 100 + number if number else None, "connected": number != 3,
            "slots": [{"bytes": 10**6, "state": "filling", "step": 7}],
        }
        for number in range(30)
    ]  # fmt: skip
    job = job_report(ranks=ranks, ranks_here=list(range(30)), ranks_connected=29)
    shown = lines(view(job, choice=Choice("gpt", ranks=True)), 80, 20)
    assert "gpt   attempt 2   29 ranks connected of 30 on node1" in shown
    assert "     0         -  step 7 filling (1.0 MB)" in shown
    assert "     3       103  not connected  step 7 filling (1.0 MB)" in shown
    found = [int(line.split()[0]) for line in shown if line.endswith("filling (1.0 MB)")]
    assert f"  {30 - len(found)} more ranks" in shown
    chosen = Choice("gpt", ranks=True, scrolled=5)
    scrolled = lines(view(job, choice=chosen), 80, 20)
    numbers = [int(line.split()[0]) for line in scrolled if line.endswith("filling (1.0 MB)")]
    assert numbers[0] == 5
    end = lines(View(seen=view(job).seen, choice=Choice("gpt", True, 29)), 80, 20)
    assert [line.split()[0] for line in end if line.endswith("filling (1.0 MB)")] == ["29"]


@pytest.mark.parametrize(
    ("connected", "not_shown", "told"),
    [
        (0, 0, "  no rank of this attempt is here"),
        (8, 0, "  the report has no ranks"),
        (8, 8, "  8 ranks, for which the report has no room"),
    ],
)
def test_a_job_whose_ranks_are_not_in_the_report_says_so(
    connected: int, not_shown: int, told: str
) -> None:
    job = job_report(ranks=[], ranks_connected=connected, ranks_not_shown=not_shown)
    assert told in lines(view(job, choice=Choice("gpt", ranks=True)), 80, 20)


@pytest.mark.parametrize(("rows", "more"), [(40, 64), (9, 65)])
def test_ranks_that_the_report_leaves_out_are_counted(rows: int, more: int) -> None:
    job = job_report(ranks=[*job_report()["ranks"]] * 2, ranks_not_shown=64)
    shown = lines(view(job, choice=Choice("gpt", ranks=True)), 120, rows)
    assert f"  {more} more ranks" in shown


@each_case("columns", [1, 7, 40, 80, 200])
@each_case("name", [EVIL, WIDE, "e\u0301" * 40, "\u200b\ufeff", ""])
def test_hostile_names_stay_in_their_lines(name: str, columns: int) -> None:
    error = {"step": None, "reason": name * 3, "age_seconds": 1.0}
    slot = {"bytes": 1, "state": name, "step": name}
    rank = {"rank": name, "pid": name, "connected": True, "slots": [slot]}
    where = {"attempt": 2, "step": name, "tag": name}
    job = job_report(
        name, attempt=name, last_error=error, host=name, ranks_here=[0], ranks=[rank],
        ranks_connected=name, last_sealed=where, last_durable={**where, "age_seconds": 1.0},
        room_for=1, saving=[{**SAVING, "step": name, "tag": name}],
    )  # fmt: skip
    for ranks in (False, True):
        shown = view(
            job, job_report("other"), status={"root": f"/{name}"}, problems=[(name, name)],
            choice=Choice(name, ranks=ranks),
        )  # fmt: skip
        for rows in (3, 10, 30):
            assert len(lines(shown, columns, rows)) == rows


def test_wide_characters_are_cut_by_cells() -> None:
    shown = lines(view(job_report(WIDE), job_report("other")), 40, 24)
    row, other = (
        next(line for line in shown if line.startswith(begin)) for begin in ("   模", ">  other")
    )
    assert row.startswith("   模型")
    assert "…" in row
    assert cell_len(row.split(" 97")[0]) == cell_len(other.split(" 97")[0])


@steady
@given(st.text(max_size=60), st.integers(1, 60))
def test_texts_are_fitted_to_any_width(text: str, width: int) -> None:
    text = printable(text)
    assert cell_len(s.fit(text, width, UNICODE)) == width
    parts = s.wrapped(text, max(width, 2))
    assert [part for part in parts if cell_len(part) > max(width, 2)] == []
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")


@each_case(
    ("values", "width", "drawn"),
    [
        ((), 4, "    "),
        ((0.0, 0.0), 4, "  ▁▁"),
        ((0.0, 0.5, 1.0), 4, " ▁▅█"),
        ((9.0, 0.0, 1.0), 2, "▁█"),
        ((1.0, math.nan, math.inf, -1.0), 4, "█▁█▁"),
        ((1.0,), 0, ""),
    ],
)
def test_sparklines_are_as_high_as_their_share(
    values: tuple[float, ...], width: int, drawn: str
) -> None:
    assert s.spark(values, width, UNICODE) == drawn


@each_case(
    ("share", "drawn"), [(0.0, "----"), (0.5, "##--"), (1.0, "####"), (1.7, "####"), (-1.0, "----")]
)
def test_bars_are_never_longer_than_their_room(share: float, drawn: str) -> None:
    assert s.bar(share, 4, ASCII).plain == drawn


def test_a_terminal_without_unicode_gets_ascii() -> None:
    drawn = lines(view(job_report(saving=[SAVING]), glyphs=ASCII), 100, 24)
    assert all(line.isascii() for line in drawn)
    assert any("#" in line for line in drawn)


@each_case(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3599, "59 min"),
        (86400, "24 h"),
        (2 * 86400, "2 d"),
    ],
)
def test_spans_are_short(seconds: float, text: str) -> None:
    assert s.short_span(seconds) == text


@each_case(
    ("chosen", "count", "room", "found"),
    [(0, 3, 5, (0, 3)), (0, 9, 5, (0, 4)), (5, 9, 5, (3, 4)), (8, 9, 5, (5, 4)), (4, 9, 0, (4, 1))],
)
def test_the_chosen_line_is_in_the_window(
    chosen: int, count: int, room: int, found: tuple[int, int]
) -> None:
    assert s.window(chosen, count, room) == found


def test_no_color_leaves_the_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"step": 3, "reason": "full", "age_seconds": 1.0}
    shown = screen(view(job_report(last_error=error), problems=[("gpt", "full")]), 80, 24)

    def drawn() -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system="standard", width=80)
        console.print(Text("\n").join(shown))
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in drawn()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = drawn()
    assert "\x1b[1;31m" not in plain
    assert "\x1b[33m" not in plain
    for words in (">", "!", "last error", "step 3, 2 s ago: full"):
        assert words in plain


def test_a_picture_for_the_documents_loads_nothing_from_elsewhere() -> None:
    drawn = picture(view(job_report("gpt", saving=[SAVING])), 100, 20)
    assert [word for word in ("@font-face", "url(http", "url(//", "href") if word in drawn] == []
    # Text does not begin with a space, which not every viewer keeps.
    texts = re.findall(r'<text class="top-r\d+" x="([\d.]+)"[^>]*>([^<]+)</text>', drawn)
    assert (texts[0], len(texts) > 20) == (("0.0", "ckptd&#160;top"), True)
    assert [text for _, text in texts if text.startswith(("&#160;", " "))] == []
    assert ("36.6", "gpt") in texts
