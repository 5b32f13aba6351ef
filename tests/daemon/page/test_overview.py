"""Tests the sentence at the top of the page, and the rates of saves."""

from __future__ import annotations

from typing import Any

from ckptd.daemon.commands.health import Problem
from ckptd.daemon.page.overview import Answers, Level, SaveRates, TopSentence, overview, verdict
from tests.support.cases import each_case

WELL = "the daemon of /r is ready, 1 job runs"
FAILED = Problem("failed", "gpt", "job gpt: the last save failed 3 s ago: no room")
ROOM = Problem("room", "gpt", "job gpt: 2 more checkpoints fit")


@each_case(
    ("problems", "age", "silent", "why", "level", "text"),
    [
        ([], 0.4, 0.0, "", Level.WELL, f"All is well: {WELL}"),
        ([ROOM], 0.4, 0.0, "", Level.WARNING, "Job gpt: 2 more checkpoints fit"),
        ([FAILED], 0.4, 0.0, "", Level.BAD, "Job gpt: the last save failed 3 s ago: no room"),
        ([ROOM, FAILED], 5.0, 4.0, "", Level.BAD, "2 things need attention"),
        ([], 12.3, 11.6, "", Level.SILENT,
         "The daemon has not answered for 12 s. What is shown about it is 12 s old"),
        ([FAILED], 77.0, 17.0, "it is gone", Level.SILENT,
         "The daemon has not answered for 17 s. What is shown about it is 1 min old: it is gone"),
        ([FAILED], 1.0, 0.1, "it is gone", Level.SILENT,
         "The daemon does not answer. What is shown about it is 1 s old: it is gone"),
        ([], None, 3.0, "no daemon; others: /b", Level.SILENT,
         "No daemon has answered yet: no daemon"),
    ],
)  # fmt: skip
def test_one_sentence_says_how_it_is(
    problems: list[Problem], age: float | None, silent: float, why: str, level: Level, text: str
) -> None:
    assert verdict(problems, WELL, Answers(age, silent, why)) == TopSentence(level, text)


def status(done: int, tag: str = "t") -> dict[str, Any]:
    saving = {
        "tag": tag, "done_bytes": done, "total_bytes": 1000, "bytes_per_second": 7,
        "seconds_left": 70.0,
    }  # fmt: skip
    return {"jobs": [{"job": "gpt", "saving": [saving]}, {"job": "idle"}]}


def rated(rates: SaveRates, now: float, found: dict[str, Any]) -> tuple[Any, Any]:
    (one,) = rates.add(now, found)["jobs"][0]["saving"]
    return one["bytes_per_second"], one["seconds_left"]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rates = SaveRates()
    assert rated(rates, 10.0, status(0)) == (7, 70.0), "not known yet: what the daemon says"
    assert rated(rates, 11.0, status(100)) == (100, 9.0)
    assert rated(rates, 12.0, status(400)) == (200, 3.0)
    assert rated(rates, 16.0, status(400)) == (60, 10.0), "the answer at 10 is too old"
    assert rated(rates, 17.1, status(400)) == (0, None)


def test_another_save_begins_without_a_rate() -> None:
    rates = SaveRates()
    rated(rates, 10.0, status(900))
    assert rated(rates, 11.0, status(10, "u")) == (7, 70.0)


def test_an_answer_is_not_changed() -> None:
    rates, given = SaveRates(), status(0)
    rates.add(1.0, given)
    rates.add(2.0, given | {"more": 1})
    assert given == status(0)


def test_the_document_has_the_answer_and_the_problems() -> None:
    assert overview({"jobs": []}, [ROOM], WELL, Answers(1.26, 0.0, "")) == {
        "level": "warning", "text": "Job gpt: 2 more checkpoints fit",
        "problems": [{"what": "room", "job": "gpt", "message": ROOM.message}],
        "age_seconds": 1.3, "status": {"jobs": []},
    }  # fmt: skip
    assert overview(None, [], "", Answers(None, 0.0, ""))["status"] is None


def test_an_old_answer_ages_and_its_problems_are_not_those_of_now() -> None:
    durable = {"step": 710, "age_seconds": 25.0}
    job = {"job": "gpt", "last_durable": durable, "last_error": None, "room_for": 1}
    status = {"uptime_seconds": 9.0, "jobs": [job, {"last_durable": {"age_seconds": None}}]}
    found = overview(status, [ROOM, FAILED], WELL, Answers(60.0, 17.0, "it is gone"))
    assert found["problems"] == []
    assert found["status"] == {
        "uptime_seconds": 9.0,  # it may have ended
        "jobs": [
            {**job, "last_durable": {"step": 710, "age_seconds": 85.0}},
            {"last_durable": {"age_seconds": None}},
        ],
    }
    assert durable["age_seconds"] == 25.0
