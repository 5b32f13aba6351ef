"""Which checkpoints of a job are worth keeping: policies under orbax's names (checkpoint_managers.preservation_policy). Pure.

A policy says what to keep; of several, what any of them keeps stays. What no policy decides (the newest, users' own tags, pins, what is
being read, steps that a newer attempt has not passed) is the daemon's affair. As text a policy is what Python would say: `LatestN(5)`,
`BestN('loss', 3)`, and so it stands in files (FORMAT.md, section 4).
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

MOST_POLICIES, MAX_TEXT = 64, 4096


class Retainable(Protocol):
    """What a policy looks at. `created`: Unix seconds by the trainer's clock, NaN if that cannot be told; `metrics` as `snapshot` had."""

    @property
    def attempt(self) -> int: ...
    @property
    def step(self) -> int | None: ...
    @property
    def created(self) -> float: ...
    @property
    def metrics(self) -> dict[str, float]: ...


class _Policy(msgspec.Struct, frozen=True):
    """Raises ValueError in one sentence for what cannot be meant. `keeps`: which of these, oldest first, by their places."""


class PreserveAll(_Policy, frozen=True):
    """Every one."""

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return set(range(len(ordered)))


class LatestN(_Policy, frozen=True):
    """The `n` newest."""

    n: int

    def __post_init__(self) -> None:
        _whole("LatestN", "n", self.n)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return set(range(len(ordered))[-self.n :])


class LatestDuration(_Policy, frozen=True):
    """Those that were made within `seconds` of the newest, by the clock of whoever made them."""

    seconds: float

    def __post_init__(self) -> None:
        _positive("LatestDuration", "seconds", self.seconds)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        newest = ordered[-1].created if ordered else math.nan
        return {place for place, c in enumerate(ordered) if not newest - c.created > self.seconds}


class EveryNSteps(_Policy, frozen=True):
    """Those whose step is a multiple of `interval_steps`; of a step that was trained again, the newest attempt's."""

    interval_steps: int

    def __post_init__(self) -> None:
        _whole("EveryNSteps", "interval_steps", self.interval_steps)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return _newest_of_steps(ordered, lambda step: step % self.interval_steps == 0)


class EveryNSeconds(_Policy, frozen=True):
    """The oldest, and from there each that was made `interval_secs` or more after the last one kept, by the clock of whoever made them."""

    interval_secs: float

    def __post_init__(self) -> None:
        _positive("EveryNSeconds", "interval_secs", self.interval_secs)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        kept, last = set(), -math.inf
        for place, candidate in enumerate(ordered):
            if not 0 <= candidate.created - last < self.interval_secs:  # also where a clock was set back
                kept.add(place)
                last = last if math.isnan(candidate.created) else candidate.created
        return kept


class BestN(_Policy, frozen=True):
    """The `n` whose `metric` is the least ("min") or the greatest ("max"); of equals the newer. NaN is never among them.

    keep_checkpoints_without_metrics: whether those that do not have this metric stay as well.
    """

    metric: str
    n: int
    mode: str = "min"
    keep_checkpoints_without_metrics: bool = False

    def __post_init__(self) -> None:
        _whole("BestN", "n", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"BestN: metric is {self.metric!r}; expected the name that snapshot(metrics=) has it under")
        if self.mode not in ("min", "max"):
            raise ValueError(f"BestN: mode is {self.mode!r}; expected 'min' or 'max'")

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        sign = 1 if self.mode == "min" else -1
        ranked = [(sign * c.metrics[self.metric], -place) for place, c in enumerate(ordered) if self.metric in c.metrics]
        best = {-place for value, place in sorted(r for r in ranked if not math.isnan(r[0]))[: self.n]}
        without = {place for place, c in enumerate(ordered) if self.metric not in c.metrics}
        return best | without if self.keep_checkpoints_without_metrics else best


class CustomSteps(_Policy, frozen=True):
    """Those of these steps; of a step that was trained again, the newest attempt's."""

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(self.steps, (str, bytes)) or not isinstance(self.steps, Iterable):
            raise ValueError(f"CustomSteps: steps is {self.steps!r}; expected numbers, like [1000, 5000]")
        msgspec.structs.force_setattr(self, "steps", tuple(self.steps))
        for step in self.steps:
            _whole("CustomSteps", "a step", step, least=0)

    def keeps(self, ordered: Sequence[Retainable]) -> set[int]:
        return _newest_of_steps(ordered, set(self.steps).__contains__)


Policy = PreserveAll | LatestN | LatestDuration | EveryNSteps | EveryNSeconds | BestN | CustomSteps
POLICIES = {cls.__name__: cls for cls in (PreserveAll, LatestN, LatestDuration, EveryNSteps, EveryNSeconds, BestN, CustomSteps)}


def keeps(policies: Iterable[Policy], ordered: Sequence[Retainable]) -> set[int]:
    """What any of them keeps."""
    return set[int]().union(*(policy.keeps(ordered) for policy in policies))


def parse(text: str) -> Policy:
    """Of `LatestN(5)` and the like; nothing in it is run. Raises ValueError in one sentence."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"{text[:40]!r}... is {len(text)} characters long; a retention policy has {MAX_TEXT} at most")
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        name = call.func.id
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except Exception:  # whatever the text makes of the parser
        raise ValueError(f"{text[:80]!r} is no retention policy; expected one like 'LatestN(5)' or \"BestN('loss', 3)\"") from None
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(POLICIES)}"
        raise ValueError(f"there is no retention policy {name!r}; {hint}")
    try:
        return POLICIES[name](*arguments, **named)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{text[:80]}: {error}; {name} takes {', '.join(POLICIES[name].__struct_fields__) or 'nothing'}") from None


def understood(texts: Iterable[str]) -> tuple[Policy, ...]:
    """As `parse`; what a newer ckptd says, and this one does not know, keeps everything."""
    found: list[Policy] = []
    for text in texts:
        try:
            found.append(parse(text))
        except ValueError:
            found.append(PreserveAll())
    return tuple(found)


def checked(policies: Any) -> tuple[Policy, ...]:
    """One policy or several, as the caller of `Agent` gave them. Raises ValueError."""
    found = (policies,) if isinstance(policies, (_Policy, str)) else tuple(policies)
    for policy in found:
        if type(policy) not in POLICIES.values():
            raise ValueError(f"retention has {policy!r}; expected policies like LatestN(5)")
        if parse(repr(policy)) != policy:
            raise ValueError(f"retention has {policy!r}; expected plain numbers and text in it")
    if not found or len(found) > MOST_POLICIES:
        raise ValueError(f"retention has {len(found)} policies; expected 1 to {MOST_POLICIES}, such as PreserveAll() or LatestN(5)")
    return found


def _newest_of_steps(ordered: Sequence[Retainable], wanted: Any) -> set[int]:
    newest = {c.step: place for place, c in enumerate(ordered) if c.step is not None and wanted(c.step)}
    return set(newest.values())


def _whole(policy: str, name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise ValueError(f"{policy}: {name} is {value!r}; expected a number from {least} up")


def _positive(policy: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{policy}: {name} is {value!r}; expected seconds, more than 0")
