"""Retention policies, which decide which checkpoints of a job to keep.

The policies have the names that orbax uses (checkpoint_managers.preservation_policy).
`Daily` and `Weekly` are those of restic. A job may have several; a checkpoint stays if
at least one of them keeps it. `MaxBytes` and `MaxAge` are limits: they keep nothing,
and take away from what the others keep. Policies do not decide on the newest
checkpoint, users' own tags, pins, checkpoints that are being read, and steps that a
newer attempt has not passed. The daemon decides on those.

As text, a policy is written like a call in Python, such as `LatestN(5)` or
`BestN('loss', 3)`. Manifests and request documents hold this text (FORMAT.md, sections
3 and 4). This module does no I/O.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from ckptd.shared.units import parse_size, parse_span, size_text, some_text

MOST_POLICIES, MAX_TEXT = 64, 4096
_DAY = 24 * 60 * 60


class Retainable(Protocol):
    """A checkpoint, as far as policies need to know it.

    attempt, step: the attempt and the step of the snapshot. A checkpoint without a step
    has None. created: the time of the snapshot in Unix seconds, by the trainer's clock,
    or NaN if it is unknown. metrics: the metrics that were passed to `snapshot`.
    nbytes: the size of its files. non_finite: how many values of its parameters and
    optimizer state are NaN or infinite, or None if they were not counted.
    """

    @property
    def attempt(self) -> int: ...
    @property
    def step(self) -> int | None: ...
    @property
    def created(self) -> float: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def non_finite(self) -> int | None: ...


class _Policy(msgspec.Struct, frozen=True):
    """The base class of all policies.

    The method `keeps` of a policy takes the checkpoints of a job, oldest first, and
    returns the indices of those that it keeps. The constructor raises ValueError, with
    one sentence that says what was expected, if an argument makes no sense.
    """


class PreserveAll(_Policy, frozen=True):
    """The policy that keeps every checkpoint."""

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return set(range(len(ordered)))


class LatestN(_Policy, frozen=True):
    """The policy that keeps the `n` newest checkpoints."""

    n: int

    def __post_init__(self) -> None:
        _whole("LatestN", "n", self.n)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return set(range(len(ordered))[-self.n :])


class LatestDuration(_Policy, frozen=True):
    """The policy that keeps the checkpoints made at most `seconds` before the newest
    one, by the clocks of the trainers.

    It also keeps every checkpoint whose time is unknown, and all of them if the time of
    the newest one is.
    """

    seconds: float

    def __post_init__(self) -> None:
        _positive("LatestDuration", "seconds", self.seconds)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        newest = ordered[-1].created if ordered else math.nan
        return {place for place, c in enumerate(ordered) if not newest - c.created > self.seconds}


class EveryNSteps(_Policy, frozen=True):
    """The policy that keeps the checkpoints whose step is a multiple of
    `interval_steps`.

    If a step was trained again, it keeps only the checkpoint of the newest attempt.
    """

    interval_steps: int

    def __post_init__(self) -> None:
        _whole("EveryNSteps", "interval_steps", self.interval_steps)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return _newest_of_steps(ordered, lambda step: step % self.interval_steps == 0)


class EveryNSeconds(_Policy, frozen=True):
    """The policy that keeps the oldest checkpoint, and each one made `interval_secs` or
    more after the last one it keeps.

    Times are those of the trainers' clocks. It also keeps every checkpoint whose time
    is unknown or before that of the last one it keeps.
    """

    interval_secs: float

    def __post_init__(self) -> None:
        _positive("EveryNSeconds", "interval_secs", self.interval_secs)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        kept, last = set(), -math.inf
        for place, candidate in enumerate(ordered):
            # Also if NaN, or if a clock was set back.
            if not 0 <= candidate.created - last < self.interval_secs:
                kept.add(place)
                last = last if math.isnan(candidate.created) else candidate.created
        return kept


class Daily(_Policy, frozen=True):
    """The policy that keeps the newest checkpoint of each of the last `n` days that
    have one.

    A day is one of UTC, by the clocks of the trainers. Days are counted from the newest
    checkpoint, so that a job that pauses for a year loses nothing. If a clock was set
    back, a day that comes twice counts once, and a checkpoint is kept each time. The
    policy also keeps every checkpoint whose time is unknown.
    """

    n: int

    def __post_init__(self) -> None:
        _whole("Daily", "n", self.n)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return _newest_of_periods(ordered, self.n, _day)


class Weekly(_Policy, frozen=True):
    """The policy that keeps the newest checkpoint of each of the last `n` weeks that
    have one.

    A week is one of ISO 8601: it begins on Monday, at midnight in UTC. Everything else
    is as in `Daily`.
    """

    n: int

    def __post_init__(self) -> None:
        _whole("Weekly", "n", self.n)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return _newest_of_periods(ordered, self.n, _week)


class BestN(_Policy, frozen=True):
    """The policy that keeps the `n` checkpoints with the best value of one metric.

    Of equal values, the newer checkpoint is better.

    metric: the name of the metric in `snapshot(metrics=)`. A checkpoint with the value
    NaN is never among the best. n: the number of checkpoints to keep. mode: "min" if
    the least value is the best, "max" if the greatest is.
    keep_checkpoints_without_metrics: True to keep all checkpoints without this metric,
    too.

    If no checkpoint has a value that can be ranked, the policy keeps all checkpoints,
    because the name of the metric is probably wrong. If fewer than `n` checkpoints have
    such a value, the newest checkpoints without the metric are kept in place of the
    missing ones.
    """

    metric: str
    n: int
    mode: str = "min"
    keep_checkpoints_without_metrics: bool = False

    def __post_init__(self) -> None:
        _whole("BestN", "n", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(
                f"BestN: metric is {self.metric!r}; expected the name that snapshot(metrics=) has "
                f"it under"
            )
        if self.mode not in ("min", "max"):
            raise ValueError(f"BestN: mode is {self.mode!r}; expected 'min' or 'max'")

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(
            (sign * c.metrics[self.metric], -place)
            for place, c in enumerate(ordered)
            if self._ranks(c)
        )
        if not ranked:
            return set(range(len(ordered)))
        best = {-place for _, place in ranked[: self.n]}
        without = [place for place, c in enumerate(ordered) if self.metric not in c.metrics]
        missing = len(without) if self.keep_checkpoints_without_metrics else self.n - len(best)
        return best | set(without[max(0, len(without) - missing) :])

    def problem(self, ordered: Sequence[Retainable]) -> str:
        """Return the reason why none of these checkpoints can be ranked, with the
        metrics that they have, or "" if one can be.
        """
        if not ordered or any(map(self._ranks, ordered)):
            return ""
        known = sorted({name for c in ordered for name in c.metrics})
        if self.metric in known:
            return f"every value of the metric {self.metric!r} is NaN"
        near = difflib.get_close_matches(self.metric, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        have = (
            f"their metrics are {some_text([repr(name) for name in known])}"
            if known
            else "they have no metrics at all"
        )
        return f"no checkpoint has the metric {self.metric!r} ({have}){hint}"

    def _ranks(self, checkpoint: Retainable) -> bool:
        return self.metric in checkpoint.metrics and not math.isnan(checkpoint.metrics[self.metric])


class CustomSteps(_Policy, frozen=True):
    """The policy that keeps the checkpoints of the given steps.

    If a step was trained again, it keeps only the checkpoint of the newest attempt.
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(self.steps, (str, bytes)) or not isinstance(self.steps, Iterable):
            raise ValueError(
                f"CustomSteps: steps is {self.steps!r}; expected numbers, like [1000, 5000]"
            )
        msgspec.structs.force_setattr(self, "steps", tuple(self.steps))
        for step in self.steps:
            _whole("CustomSteps", "a step", step, least=0)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return _newest_of_steps(ordered, set(self.steps).__contains__)


class Finite(_Policy, frozen=True):
    """The policy that keeps the `n` newest checkpoints whose parameters and optimizer
    state have no value that is NaN or infinite.

    The daemon counts such values while it saves. They are not counted in a state that
    has neither a module nor an optimizer, and by versions without the count. As long as
    fewer than `n` checkpoints are known to be finite, the newest that were not counted
    are kept in place of the missing ones.
    """

    n: int = 1

    def __post_init__(self) -> None:
        _whole("Finite", "n", self.n)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        finite = [place for place, c in enumerate(ordered) if c.non_finite == 0]
        unknown = [place for place, c in enumerate(ordered) if c.non_finite is None]
        missing = max(0, self.n - len(finite))
        return {*finite[-self.n :], *unknown[max(0, len(unknown) - missing) :]}


class MaxAge(_Policy, frozen=True):
    """The limit that takes away the checkpoints made more than `seconds` before the
    newest one, by the clocks of the trainers.

    `seconds` may be text, like "12h", "30d" or "4w". A checkpoint whose time is unknown
    stays, and all of them do if the time of the newest one is.
    """

    seconds: float | str

    def __post_init__(self) -> None:
        if isinstance(self.seconds, str):
            try:
                if self.seconds.strip()[-1:].isdigit():
                    raise ValueError  # text without a unit may be meant as days
                msgspec.structs.force_setattr(self, "seconds", parse_span(self.seconds))
            except ValueError:
                raise ValueError(
                    f"MaxAge: seconds is {self.seconds!r}; expected a number of seconds, or text "
                    f"like '12h', '30d' or '4w'"
                ) from None
        _positive("MaxAge", "seconds", self.seconds)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return set()

    def excess(
        self, ordered: Sequence[Retainable], kept: Collection[int], safe: Collection[int]
    ) -> set[int]:
        limit, newest = float(self.seconds), ordered[-1].created if ordered else math.nan
        return {
            place for place in kept if place not in safe and newest - ordered[place].created > limit
        }


class MaxBytes(_Policy, frozen=True):
    """The limit that takes away the oldest checkpoints, until the rest holds at most
    `nbytes` bytes.

    `nbytes` may be text, like "500GB" or "2TiB".
    """

    nbytes: int | str

    def __post_init__(self) -> None:
        if isinstance(self.nbytes, str):
            try:
                msgspec.structs.force_setattr(self, "nbytes", parse_size(self.nbytes))
            except ValueError:
                raise ValueError(
                    f"MaxBytes: nbytes is {self.nbytes!r}; expected a number of bytes, or text "
                    f"like '500GB' or '2TiB'"
                ) from None
        _whole("MaxBytes", "nbytes", self.nbytes)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return set()

    def excess(
        self, ordered: Sequence[Retainable], kept: Collection[int], safe: Collection[int]
    ) -> set[int]:
        over = sum(ordered[place].nbytes for place in {*kept, *safe}) - int(self.nbytes)
        found = set[int]()
        for place in sorted(set(kept).difference(safe)):
            if over <= 0:
                break
            found.add(place)
            over -= ordered[place].nbytes
        return found


Limit = MaxAge | MaxBytes
Policy = (
    PreserveAll
    | LatestN
    | LatestDuration
    | EveryNSteps
    | EveryNSeconds
    | Daily
    | Weekly
    | Finite
    | BestN
    | CustomSteps
    | Limit
)
POLICIES = {
    cls.__name__: cls
    for cls in (
        PreserveAll,
        LatestN,
        LatestDuration,
        EveryNSteps,
        EveryNSeconds,
        Daily,
        Weekly,
        Finite,
        BestN,
        CustomSteps,
        MaxAge,
        MaxBytes,
    )
}


def keeps(policies: Iterable[Policy], ordered: Sequence[Retainable]) -> set[int]:
    """Return the indices in `ordered` of the checkpoints that at least one of the
    policies keeps, before the limits. `ordered` begins with the oldest.

    If all policies are limits, all checkpoints are kept at this point.
    """
    return set[int]().union(*(policy.keeps(ordered) for policy in keepers(policies)))


def keepers(policies: Iterable[Policy]) -> tuple[Policy, ...]:
    """Return the policies that are not limits, or PreserveAll() if all are limits."""
    given = tuple(policies)
    found = tuple(policy for policy in given if not isinstance(policy, Limit))
    return found or ((PreserveAll(),) if given else ())


def excess(
    policies: Iterable[Policy],
    ordered: Sequence[Retainable],
    kept: Collection[int],
    safe: Collection[int],
) -> dict[int, Limit]:
    """Return the indices of the checkpoints that the limits among the policies take
    away, each with the limit that does.

    kept: what the other policies keep. safe: the checkpoints that may not be deleted,
    which count in the bytes. Limits of age come first, so that the bytes of a
    checkpoint that is too old do not count.
    """
    limits = [policy for policy in policies if isinstance(policy, Limit)]
    found: dict[int, Limit] = {}
    for limit in sorted(limits, key=lambda limit: isinstance(limit, MaxBytes)):
        left = [place for place in kept if place not in found]
        found |= dict.fromkeys(limit.excess(ordered, left, safe), limit)
    return found


def unrankable(policies: Iterable[Policy], ordered: Sequence[Retainable]) -> dict[BestN, str]:
    """Return the policies that can rank none of these checkpoints, each with the
    reason.
    """
    return {
        policy: why
        for policy in policies
        if isinstance(policy, BestN) and (why := policy.problem(ordered))
    }


def parse(text: str) -> Policy:
    """Return the policy that a text such as `LatestN(5)` or `PreserveAll` describes.

    No code in the text is run.

    Raises ValueError for other text, with one sentence that says what was expected.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(
            f"{text[:40]!r}... is {len(text)} characters long; expected a retention policy of at "
            f"most {MAX_TEXT}"
        )
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        name = call.func.id
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except Exception:  # the parser raises errors of many types for arbitrary text
        raise ValueError(
            f"{text[:80]!r} is no retention policy; expected one like 'LatestN(5)' or "
            f"\"BestN('loss', 3)\""
        ) from None
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the policies are {', '.join(POLICIES)}"
        raise ValueError(f"there is no retention policy {name!r}; {hint}")
    try:
        return POLICIES[name](*arguments, **named)
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"{text[:80]}: {error}; {name} takes "
            f"{', '.join(POLICIES[name].__struct_fields__) or 'nothing'}"
        ) from None


def brief(policy: Policy) -> str:
    """Return the policy as a person would write it, like `Daily(7)` or
    `MaxAge('30d')`. `parse` returns the policy for this text, as for its `repr`.
    """
    values = [getattr(policy, name) for name in policy.__struct_fields__]
    defaults = policy.__struct_defaults__
    while defaults and values[-1] == defaults[-1]:
        values, defaults = values[:-1], defaults[:-1]
    texts = [repr(value) for value in values]
    if isinstance(policy, MaxAge) and float(policy.seconds) % _DAY == 0:
        texts = [repr(f"{float(policy.seconds) / _DAY:.0f}d")]
    if isinstance(policy, MaxBytes):
        size = re.sub(r"(\.0+)? ", "", size_text(int(policy.nbytes)))
        texts = [repr(size)] if parse_size(size) == policy.nbytes else texts
    return f"{type(policy).__name__}({', '.join(texts)})"


def understood(texts: Iterable[str]) -> tuple[Policy, ...]:
    """Return the policies in these texts.

    A text that this version does not know, as from a newer ckptd, becomes PreserveAll,
    and limits are left out, because it is not known what they are to limit.
    """
    found: list[Policy] = []
    is_known = True
    for text in texts:
        try:
            found.append(parse(text))
        except ValueError:
            found.append(PreserveAll())
            is_known = False
    return tuple(policy for policy in found if is_known or not isinstance(policy, Limit))


def checked(policies: Any) -> tuple[Policy, ...]:
    """Return the policies that the caller of `Agent` passed, one or several, as a
    tuple.

    Raises ValueError if an object is not a policy, if a policy holds anything but plain
    numbers and text, or if there are no policies or more than MOST_POLICIES. Raises
    TypeError if `policies` is neither a policy nor iterable.
    """
    found = (policies,) if isinstance(policies, (_Policy, str)) else tuple(policies)
    for policy in found:
        if type(policy) not in POLICIES.values():
            raise ValueError(f"retention has {policy!r}; expected policies like LatestN(5)")
        if parse(repr(policy)) != policy:
            raise ValueError(f"retention has {policy!r}; expected plain numbers and text in it")
    if not found or len(found) > MOST_POLICIES:
        raise ValueError(
            f"retention has {len(found)} policies; expected 1 to {MOST_POLICIES}, such as "
            f"PreserveAll() or LatestN(5)"
        )
    return found


def _newest_of_steps(ordered: Sequence[Retainable], wanted: Any) -> set[int]:
    newest = {
        c.step: place for place, c in enumerate(ordered) if c.step is not None and wanted(c.step)
    }
    return set(newest.values())


def _newest_of_periods(
    ordered: Sequence[Retainable], n: int, period_of: Callable[[float], int]
) -> set[int]:
    """Return the indices of the newest checkpoint of each of the last `n` periods, and
    of the checkpoints whose time is unknown.

    Checkpoints are ordered by attempt and step, never by a clock. So this walks back
    from the newest one, and keeps a checkpoint where the period changes.
    """
    kept, counted, last = set[int](), set[int](), None
    for place in reversed(range(len(ordered))):
        created = ordered[place].created
        if not math.isfinite(created):
            kept.add(place)
            continue
        period = period_of(created)
        if period != last and (period in counted or len(counted) < n):
            kept.add(place)
            counted.add(period)
            last = period
    return kept


def _day(created: float) -> int:
    return math.floor(created / _DAY)


def _week(created: float) -> int:
    return (_day(created) + 3) // 7  # 1 January 1970 was a Thursday


def _whole(policy: str, name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise ValueError(f"{policy}: {name} is {value!r}; expected a number from {least} up")


def _positive(policy: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(
            f"{policy}: {name} is {value!r}; expected a finite number of seconds above 0"
        )
