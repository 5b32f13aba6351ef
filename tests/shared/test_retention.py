"""Tests which checkpoints each policy keeps, and which texts are not policies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPMethod
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptd.shared import retention as r
from tests.shared.samples import steady
from tests.support.cases import each_case


@dataclass
class Made:
    step: int | None
    attempt: int = 1
    created: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    nbytes: int = 10
    non_finite: int | None = None


def steps(policy: r.Policy, ordered: list[Made]) -> list[int | None]:
    return [ordered[place].step for place in sorted(policy.keeps(ordered))]


def at(*seconds: float) -> list[Made]:
    return [Made(step, created=when) for step, when in enumerate(seconds)]


def losses(*values: float | None) -> list[Made]:
    return [
        Made(step, metrics={} if value is None else {"loss": value, "other": 0.0})
        for step, value in enumerate(values)
    ]


HOUR, DAY = 3600, 86400
TEN = [Made(step) for step in range(0, 100, 10)]


def test_preserve_all_and_latest_n() -> None:
    assert steps(r.PreserveAll(), TEN) == list(range(0, 100, 10))
    assert steps(r.LatestN(3), TEN) == [70, 80, 90]
    assert steps(r.LatestN(99), TEN) == list(range(0, 100, 10))
    assert r.LatestN(3).keeps([]) == r.PreserveAll().keeps([]) == set()


def test_every_n_steps_and_custom_steps() -> None:
    assert steps(r.EveryNSteps(30), TEN) == [0, 30, 60, 90]
    assert steps(r.CustomSteps((20, 25, 90)), TEN) == [20, 90]
    assert steps(r.EveryNSteps(30), [Made(None), Made(30)]) == [30]


def test_of_a_step_trained_again_only_the_newest_attempt_counts() -> None:
    twice = [Made(10), Made(20), Made(10, attempt=2), Made(30, attempt=2)]
    assert r.EveryNSteps(10).keeps(twice) == {1, 2, 3}
    assert r.CustomSteps((10,)).keeps(twice) == {2}


def test_every_n_seconds_counts_from_the_oldest() -> None:
    assert steps(r.EveryNSeconds(10), at(0, 5, 9.5, 10, 15, 20, 29)) == [0, 3, 5]
    assert steps(r.EveryNSeconds(10), at(3, 12, 13, 22, 23.5)) == [0, 2, 4]


def test_a_clock_that_was_set_back_costs_no_checkpoint() -> None:
    assert steps(r.EveryNSeconds(10), at(1000, 1005, 10, 15, 20)) == [0, 2, 4]
    assert steps(r.LatestDuration(10), at(1000, 1005, 10, 15, 20)) == [0, 1, 2, 3, 4]


def test_checkpoints_of_unknown_time_are_kept() -> None:
    assert steps(r.EveryNSeconds(10), at(0, math.nan, 5, 10)) == [0, 1, 3]
    assert steps(r.LatestDuration(10), at(0, math.nan, 50, 55)) == [1, 2, 3]
    assert steps(r.LatestDuration(10), at(0, 10, math.nan)) == [0, 1, 2]


def test_the_latest_duration_counts_from_the_newest() -> None:
    assert steps(r.LatestDuration(10), at(0, 49, 50, 55, 60)) == [2, 3, 4]
    assert r.LatestDuration(10).keeps([]) == set()


def test_daily_keeps_the_newest_of_each_day_that_has_one() -> None:
    made = at(0, HOUR, DAY - 1, DAY, 3 * DAY + HOUR, 3 * DAY + 2 * HOUR)
    assert steps(r.Daily(1), made) == [5]
    assert steps(r.Daily(2), made) == [3, 5]
    assert steps(r.Daily(3), made) == [2, 3, 5]
    assert steps(r.Daily(99), made) == [2, 3, 5]
    assert r.Daily(3).keeps([]) == r.Weekly(3).keeps([]) == set()


def test_a_pause_of_a_year_costs_no_daily_checkpoint() -> None:
    made = at(0, DAY, 2 * DAY, 400 * DAY)
    assert steps(r.Daily(4), made) == [0, 1, 2, 3]
    assert steps(r.Daily(3), made) == [1, 2, 3]


def test_a_week_begins_on_monday_in_utc() -> None:
    monday = datetime(2026, 1, 5, tzinfo=UTC).timestamp()
    made = at(monday - 1, monday, monday + 6 * DAY, monday + 7 * DAY - 1, monday + 7 * DAY)
    assert steps(r.Weekly(3), made) == [0, 3, 4]
    assert steps(r.Weekly(2), made) == [3, 4]


@steady
@given(st.lists(st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31)), max_size=12))
def test_days_and_weeks_are_those_of_the_calendar(times: list[datetime]) -> None:
    ordered = sorted(times)
    made = at(*(time.replace(tzinfo=UTC).timestamp() for time in ordered))
    last_of_days = {time.date(): place for place, time in enumerate(ordered)}
    last_of_weeks = {time.isocalendar()[:2]: place for place, time in enumerate(ordered)}
    assert r.Daily(99).keeps(made) == set(last_of_days.values())
    assert r.Weekly(99).keeps(made) == set(last_of_weeks.values())
    assert r.Daily(2).keeps(made) == set(sorted(last_of_days.values())[-2:])
    assert r.Weekly(2).keeps(made) == set(sorted(last_of_weeks.values())[-2:])


def test_a_clock_that_was_set_back_costs_no_daily_checkpoint() -> None:
    made = at(*(day * DAY for day in (10, 11, 12, 10, 11)))
    assert steps(r.Daily(3), made) == [0, 1, 2, 3, 4]  # three days, two of them twice
    assert steps(r.Daily(2), made) == [0, 1, 3, 4]


def test_finite_keeps_the_newest_checkpoints_without_nan() -> None:
    made = [Made(step, non_finite=n) for step, n in enumerate([0, 0, None, 0, 7, None, 9])]
    assert steps(r.Finite(), made) == [3]
    assert steps(r.Finite(2), made) == [1, 3]
    assert steps(r.Finite(4), made) == [0, 1, 3, 5], "one that was not counted, in place of the 4th"
    assert steps(r.Finite(9), made) == [0, 1, 2, 3, 5]
    assert steps(r.Finite(), made[4:]) == [5]
    assert steps(r.Finite(), made[4:5]) == []
    assert r.Finite().keeps([]) == set()


@pytest.mark.parametrize("policy", [r.Daily(1), r.Weekly(1)])
def test_daily_and_weekly_keep_checkpoints_of_unknown_time(policy: r.Policy) -> None:
    made = at(math.nan, 0, math.nan, math.inf, HOUR, 2 * HOUR, math.nan)
    assert steps(policy, made) == [0, 2, 3, 5, 6]


@steady
@given(
    st.lists(st.one_of(st.just(math.nan), st.integers(0, 40).map(lambda n: n * DAY / 2))),
    st.integers(1, 5),
)
def test_daily_and_weekly_delete_nothing_more_when_they_are_applied_again(
    times: list[float], n: int
) -> None:
    for policy in (r.Daily(n), r.Weekly(n)):
        made = at(*times)
        left = [made[place] for place in sorted(policy.keeps(made))]
        assert policy.keeps(left) == set(range(len(left)))


def test_best_n_keeps_the_best_and_of_equals_the_newer() -> None:
    made = losses(3.0, 1.0, 2.0, 1.0, 5.0)
    assert steps(r.BestN("loss", 1), made) == [3]  # of two equals the newer one
    assert steps(r.BestN("loss", 2), made) == [1, 3]
    assert steps(r.BestN("loss", 2, mode="max"), made) == [0, 4]
    assert steps(r.BestN("other", 2), made) == [3, 4]


@pytest.mark.parametrize("keep", [False, True])
def test_best_n_keeps_everything_if_nothing_can_be_ranked(keep: bool) -> None:
    """The name of the metric is probably wrong, and then the best ones are not known."""
    made = losses(3.0, 1.0, 2.0)
    assert steps(r.BestN("unheard of", 2, "min", keep), made) == [0, 1, 2]
    assert steps(r.BestN("loss", 1, "min", keep), losses(math.nan, None, math.nan)) == [0, 1, 2]
    assert r.BestN("loss", 1).keeps([]) == set()


def test_the_newest_checkpoints_without_the_metric_stand_in_for_missing_ones() -> None:
    made = losses(3.0, None, None, math.nan, None, 1.0, None)
    assert steps(r.BestN("loss", 1), made) == [5]
    assert steps(r.BestN("loss", 2), made) == [0, 5]
    assert steps(r.BestN("loss", 3), made) == [0, 5, 6]
    assert steps(r.BestN("loss", 4), made) == [0, 4, 5, 6]
    assert steps(r.BestN("loss", 99), made) == [0, 1, 2, 4, 5, 6]


@steady
@given(
    st.lists(st.one_of(st.none(), st.just(math.nan), st.integers(0, 3).map(float)), max_size=12),
    st.integers(1, 4),
)
def test_best_n_deletes_nothing_more_when_it_is_applied_again(
    values: list[float | None], n: int
) -> None:
    policy, made = r.BestN("loss", n), losses(*values)
    left = [made[place] for place in sorted(policy.keeps(made))]
    assert len(policy.keeps(left)) == len(left)
    numbers = [value for value in values if value is None or not math.isnan(value)]
    assert len(left) >= min(n, len(numbers))


def test_a_policy_that_can_rank_nothing_says_which_metrics_there_are() -> None:
    made = losses(3.0, 1.0)
    wrong, right = r.BestN("los", 2), r.BestN("loss", 2)
    assert r.unrankable([r.LatestN(1), wrong, right], made) == {
        wrong: "no checkpoint has the metric 'los' (their metrics are 'loss', 'other'); did you "
        "mean 'loss'?"
    }
    assert (
        r.BestN("zzz", 1).problem(made)
        == "no checkpoint has the metric 'zzz' (their metrics are 'loss', 'other')"
    )
    assert (
        r.BestN("zzz", 1).problem(TEN)
        == "no checkpoint has the metric 'zzz' (they have no metrics at all)"
    )
    assert (
        r.BestN("loss", 1).problem(losses(None, math.nan))
        == "every value of the metric 'loss' is NaN"
    )
    assert r.unrankable([wrong], []) == {}


def test_nan_and_infinity_are_never_the_best() -> None:
    assert steps(r.BestN("loss", 2), losses(math.nan, 3.0, math.inf, 4.0)) == [1, 3]
    assert steps(r.BestN("loss", 9, mode="max"), losses(math.nan, 3.0, -math.inf)) == [1, 2]


def test_checkpoints_without_the_metric_are_kept_on_request() -> None:
    made = losses(3.0, None, 1.0, None)
    assert steps(r.BestN("loss", 1), made) == [2]
    assert steps(r.BestN("loss", 1, keep_checkpoints_without_metrics=True), made) == [1, 2, 3]


def test_a_checkpoint_is_kept_if_any_policy_keeps_it() -> None:
    assert r.keeps([r.LatestN(1), r.EveryNSteps(50), r.CustomSteps((20,))], TEN) == {0, 2, 5, 9}
    assert r.keeps([], TEN) == set()


def left(policies: list[r.Policy], ordered: list[Made], safe: tuple[int, ...]) -> list[int]:
    kept = r.keeps(policies, ordered)
    return sorted((kept | set(safe)) - r.excess(policies, ordered, kept, safe).keys())


def test_a_limit_of_bytes_takes_the_oldest_of_what_the_others_keep() -> None:
    some: list[r.Policy] = [r.EveryNSteps(20), r.LatestN(2)]  # 0, 2, 4, 6, 8 and 9
    assert left([*some, r.MaxBytes(60)], TEN, (9,)) == [0, 2, 4, 6, 8, 9]
    assert left([*some, r.MaxBytes(59)], TEN, (9,)) == [2, 4, 6, 8, 9]
    assert left([r.MaxBytes(20), *some], TEN, (9,)) == [8, 9]
    assert left([*some, r.MaxBytes(1)], TEN, (9,)) == [9]


def test_limits_alone_keep_everything_up_to_them() -> None:
    assert left([r.MaxBytes(100)], TEN, (9,)) == list(range(10))
    assert left([r.MaxBytes(35)], TEN, (9,)) == [7, 8, 9]
    assert left([r.MaxAge("10s")], at(0, 49, 50, 55, 60), (4,)) == [2, 3, 4]
    assert (r.keeps([r.MaxBytes(1)], []), r.excess([r.MaxAge(1)], [], (), ())) == (set(), {})


def test_what_may_not_be_deleted_counts_in_the_bytes_and_stays() -> None:
    assert left([r.MaxBytes(35)], TEN, (0, 9)) == [0, 8, 9]
    assert left([r.LatestN(3), r.MaxBytes(35)], TEN, (0, 1, 9)) == [0, 1, 9]
    assert left([r.MaxBytes(5)], TEN, (0, 1, 9)) == [0, 1, 9]
    assert left([r.MaxAge(1)], at(0, 50, 60), (0, 2)) == [0, 2]


def test_the_bytes_of_a_checkpoint_that_is_too_old_do_not_count() -> None:
    made = at(0, 50, 55, 60)
    both: list[r.Policy] = [r.MaxBytes(30), r.MaxAge(10)]
    assert left([*both], made, (3,)) == left([*reversed(both)], made, (3,)) == [1, 2, 3]
    assert r.excess(both, made, {0, 1, 2, 3}, (3,)) == {0: r.MaxAge(10)}
    assert left([*both, r.MaxBytes(20), r.MaxAge(7)], made, (3,)) == [2, 3]  # the stricter ones


def test_without_a_time_there_is_no_age() -> None:
    assert left([r.MaxAge(10)], at(0, math.nan, 60), (2,)) == [1, 2]
    assert left([r.MaxAge(10)], at(0, 1, math.nan), (2,)) == [0, 1, 2]
    assert left([r.MaxAge(10)], at(1000, 1005, 10), (2,)) == [0, 1, 2]  # a clock was set back


def test_a_limit_beside_a_policy_of_a_newer_ckptd_does_not_count() -> None:
    """Nobody knows here which checkpoints the newer policy keeps, so no limit may take one
    away.
    """
    found = r.understood(["MaxBytes(nbytes=1)", "Sparse()", "MaxAge(seconds=1)", "LatestN(1)"])
    assert found == (r.PreserveAll(), r.LatestN(1))
    assert r.understood(["MaxBytes(files=3)"]) == (r.PreserveAll(),)
    assert r.understood(["MaxBytes(nbytes=1)"]) == (r.MaxBytes(1),)


def test_limits_take_text_with_a_unit() -> None:
    assert r.checked(r.MaxBytes("500GB")) == (r.MaxBytes(500 * 10**9),)
    assert repr(r.MaxBytes("2TiB")) == "MaxBytes(nbytes=2199023255552)"
    assert (r.MaxAge("12h"), r.MaxAge("30d")) == (r.MaxAge(43200), r.MaxAge(2592000))


EVERY: list[tuple[r.Policy, str]] = [
    (r.PreserveAll(), "PreserveAll"), (r.PreserveAll(), "PreserveAll()"), (r.LatestN(5), " "
        "LatestN( 5 "
        ") "), (r.LatestN(5), "LatestN(n=5)"),
    (r.LatestDuration(3600), "LatestDuration(3600)"), (r.EveryNSteps(7), "EveryNSteps(7)"),
    (r.EveryNSeconds(0.5), "EveryNSeconds(0.5)"), (r.BestN("loss", 3), "BestN('loss', "
        "3)"), (r.BestN("a b", 3, "max", True), 'BestN("a b", 3, "max", True)'),
    (r.Daily(7), "Daily(7)"), (r.Weekly(4), "Weekly(n=4)"),
    (r.Finite(), "Finite"), (r.Finite(2), "Finite(n=2)"),
    (r.MaxBytes(5), "MaxBytes('5B')"), (r.MaxAge(86400), "MaxAge('1d')"),
    (r.CustomSteps((1, 2)), "CustomSteps([1, 2])"), (r.CustomSteps(()), "CustomSteps(())"),
]  # fmt: skip


@each_case(("policy", "text"), EVERY, ids=[text for _, text in EVERY])
def test_every_policy_is_parsed_from_its_text(policy: r.Policy, text: str) -> None:
    assert r.parse(text) == policy
    assert r.parse(repr(policy)) == policy
    assert r.parse(r.brief(policy)) == policy


def test_a_policy_is_written_briefly_for_people() -> None:
    several = (
        r.PreserveAll(), r.Daily(7), r.BestN("loss", 3), r.BestN("acc", 1, "max"),
        r.CustomSteps((1, 2)), r.MaxAge("4w"), r.MaxAge(90), r.MaxBytes("500GB"),
        r.MaxBytes("2TB"), r.MaxBytes(1234),
    )  # fmt: skip
    assert [r.brief(policy) for policy in several] == [
        "PreserveAll()", "Daily(7)", "BestN('loss', 3)", "BestN('acc', 1, 'max')",
        "CustomSteps((1, 2))", "MaxAge('28d')", "MaxAge(90)", "MaxBytes('500GB')",
        "MaxBytes('2TB')", "MaxBytes(1234)",
    ]  # fmt: skip


@each_case(
    ("text", "words"),
    [
        ("", r"'' is no retention policy; expected one like 'LatestN\(5\)' or"),
        ("5", "'5' is no retention policy"),
        ("LatestN(5", "is no retention policy"),
        ("LatestN(n)", "is no retention policy"),
        ("LatestN(*[5])", "is no retention policy"),
        ("LatestN(**{'n': 5})", "is no retention policy|unexpected|Unexpected"),
        ("a.LatestN(5)", "is no retention policy"),
        ("__import__('os').mkdir('x')", "is no retention policy"),
        ("(" * 500, "is no retention policy"),
        ("LatestN(0x" + "f" * 300 + "+1j)", "is no retention policy"),
        (
            "LatestN(" + "1" * 5000 + ")",
            "is 5009 characters long; expected a retention policy of at most 4096",
        ),
        ("LatestM(5)", "there is no retention policy 'LatestM'; did you mean 'LatestN'"),
        ("Zzz(5)", "there is no retention policy 'Zzz'; the policies are PreserveAll, LatestN, "),
        ("LatestN()", "LatestN takes n"),
        ("LatestN(1, 2)", "LatestN takes n"),
        ("PreserveAll(1)", "PreserveAll takes nothing"),
        ("LatestN(0)", "LatestN: n is 0; expected a number from 1 up"),
        ("LatestN(True)", "LatestN: n is True"),
        ("Daily(0)", "Daily: n is 0; expected a number from 1 up"),
        ("Weekly('4')", "Weekly: n is '4'; expected a number from 1 up"),
        ("Dayly(7)", "there is no retention policy 'Dayly'; did you mean 'Daily'"),
        (
            "MaxBytes('lots')",
            "MaxBytes: nbytes is 'lots'; expected a number of bytes, or text like '500GB' or",
        ),
        ("MaxBytes(0)", "MaxBytes: nbytes is 0; expected a number from 1 up"),
        ("MaxBytes('0GB')", "MaxBytes: nbytes is 0"),
        ("MaxBytes(1.5)", "MaxBytes: nbytes is 1.5"),
        (
            "MaxAge('30')",
            "MaxAge: seconds is '30'; expected a number of seconds, or text like '12h', '30d' or",
        ),
        ("MaxAge(-1)", "MaxAge: seconds is -1; expected a finite number of seconds above 0"),
        ("MaxAge('0d')", "MaxAge: seconds is 0"),
        ("EveryNSteps(1.5)", "EveryNSteps: interval_steps is 1.5"),
        (
            "EveryNSeconds(0)",
            "EveryNSeconds: interval_secs is 0; expected a finite number of seconds above 0",
        ),
        ("LatestDuration('1h')", "LatestDuration: seconds is '1h'"),
        ("LatestDuration(1e999)", "LatestDuration: seconds is inf"),
        ("BestN(3, 'loss')", "BestN: n is 'loss'"),
        ("BestN('', 3)", "BestN: metric is ''"),
        ("BestN('loss', 3, 'least')", "BestN: mode is 'least'; expected 'min' or 'max'"),
        ("CustomSteps(5)", "CustomSteps: steps is 5; expected numbers"),
        ("CustomSteps('12')", "CustomSteps: steps is '12'"),
        ("CustomSteps([1, -2])", "CustomSteps: a step is -2; expected a number from 0 up"),
    ],
)
def test_a_text_that_is_not_a_policy_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        r.parse(text)


@steady
@given(st.text(max_size=60))
def test_any_other_text_is_an_error_in_one_sentence(text: str) -> None:
    assume(not any(name in text for name in r.POLICIES))
    with pytest.raises(ValueError) as refused:
        r.parse(text)
    assert str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_policy_of_a_newer_ckptd_keeps_everything() -> None:
    assert r.understood(["LatestN(n=2)", "LatestMoon(phase='full')"]) == (
        r.LatestN(2),
        r.PreserveAll(),
    )


@pytest.mark.parametrize("given", [r.LatestN(2), [r.LatestN(2)], (r.LatestN(2),)])
def test_one_policy_may_be_given_without_a_list(given: Any) -> None:
    assert r.checked(given) == (r.LatestN(2),)


@each_case(
    ("given", "words"),
    [
        ([], "retention has 0 policies; expected 1 to 64"),
        ([r.LatestN(1)] * 65, "retention has 65 policies"),
        (
            [r.CustomSteps(tuple(range(5000)))],
            "characters long; expected a retention policy of at most 4096",
        ),
        (
            [r.BestN(HTTPMethod.GET, 3)],
            "expected plain numbers and text in it|is no retention policy",
        ),
        ("LatestN(5)", r"retention has 'LatestN\(5\)'; expected policies like LatestN\(5\)"),
        (["LatestN(5)"], r"retention has 'LatestN\(5\)'; expected policies like LatestN\(5\)"),
        ([r.LatestN], "retention has <class"),
    ],
)
def test_what_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        r.checked(given)
