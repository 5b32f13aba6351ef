"""Judges one pair: runs the saving program, torch's round trips and the recovery, and
compares how they end.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptd.shared.errors import CkptdError
from tests.oracle import rules
from tests.oracle.build import Run, between, build, context, damage
from tests.oracle.prints import Print, differences, print_of, text
from tests.oracle.program import Call, Pair
from tests.oracle.references import (
    Facts,
    by_position,
    dump,
    facts_of,
    load_as_torch,
    load_by_name,
    names_by_group,
)

STEPS = 3
"""How many steps are trained after a recovery."""

AGREED, REFUSED, BETTER, NOTHING = "agreed", "refused", "better", "torch cannot run it"
Save = Callable[[dict[str, Any], int], None]
"""Takes a snapshot of a state. Called as often as `Call.snapshots` says, with the
number of the snapshot.
"""
Restore = Callable[[dict[str, Any], Call], None]
"""Recovers into a state. Raises CkptdError if it refuses."""
Elsewhere = Callable[[], "End"]
"""Recovers the program of a pair in another process. Returns how that ended."""
Read = Callable[[Run], str]
"""Reads the newest snapshot of the saving program as a reader does. Returns what differs,
or "".
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a pair ended.

    kind: "agreed", "refused", "better", "torch cannot run it", or the kind of fault.
    details: more about a fault, for a person to read.
    """

    kind: str
    details: str = ""

    @property
    def sound(self) -> bool:
        return self.kind in (AGREED, REFUSED, BETTER, NOTHING)


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes an exception in a form that other processes can read.

    ours: it is an error of ckptd. overwritten: it says that the state is partly
    overwritten. key: the key of the object that raised it, if a reference has loaded
    the state.
    """

    name: str
    text: str
    ours: bool
    overwritten: bool
    key: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        ours = isinstance(error, CkptdError)
        return cls(
            type(error).__name__,
            str(error),
            ours,
            ours and getattr(error, "overwritten", False),
            getattr(error, "key", ""),
        )

    def __repr__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, slots=True)
class End:
    """How a recovery and the steps after it ended.

    loaded and trained: the prints after the recovery and after the steps, None if it
    did not come to that. error: what was raised, and `at` says where: "load" or "step".
    changed: the state differs from before, although an error was raised.
    """

    loaded: Print | None = None
    trained: Print | None = None
    losses: tuple[Any, ...] = ()
    error: Failure | None = None
    at: str = ""
    changed: bool = False

    def same(self, other: End) -> bool:
        return (self.loaded, self.trained, self.losses) == (
            other.loaded,
            other.trained,
            other.losses,
        ) and self.at == other.at

    def unlike(self, other: End) -> str:
        """Return a sentence about the first differences from another end."""
        if self.at != other.at:
            return (
                f"ended at {self.at or 'the end'} ({self.error!r}), not at "
                f"{other.at or 'the end'} ({other.error!r})"
            )
        for what, mine, theirs in (
            ("recovered", self.loaded, other.loaded),
            ("trained", self.trained, other.trained),
        ):
            if mine is not None and theirs is not None and (names := differences(mine, theirs)):
                shown = "; ".join(
                    f"{name}: ckptd {mine.get(name)} / expected {theirs.get(name)}"
                    for name in names[:3]
                )
                return f"{what}, {len(names)} differ: {shown}"
        return f"losses {self.losses} / {other.losses}"


def judge(
    pair: Pair,
    save: Save,
    restore: Restore,
    elsewhere: Elsewhere | None = None,
    read: Read | None = None,
) -> Verdict:
    """Run a pair and return the verdict.

    `elsewhere` recovers instead of `restore`, if it is given. `read`, if it is given,
    reads the snapshot before that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(pair, save, restore, elsewhere, read)


def recovered(pair: Pair, restore: Restore) -> End:
    """Recover into the recovering program of a pair, and train it.

    Return how that ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _end(_target(pair), lambda run: _restore(run, restore, pair.call))


def _judge(
    pair: Pair, save: Save, restore: Restore, elsewhere: Elsewhere | None, read: Read | None
) -> Verdict:
    call = pair.call
    if call.only and any(
        model.transform and model.key not in call.only for model in pair.after.models
    ):
        return Verdict(NOTHING, "a model without memory is not recovered, and cannot train")
    try:
        run = build(pair.before)
        target = _target(pair)
        trial = build(pair.before)
        for _ in range(STEPS):
            trial.step()
    except Exception as error:  # of torch: this program cannot be built, or cannot train
        return Verdict(NOTHING, repr(error))
    for number in range(call.snapshots):
        for _ in range(pair.before.steps):
            run.step()
        # An optimizer that is saved alone cannot know that names have moved.
        if number and not call.saved:
            between(run, call.between)
        saved = {
            key: value for key, value in run.state.items() if not call.saved or key in call.saved
        }
        try:
            save(saved, number)
        except CkptdError as error:
            run.state = saved
            return _unsaved(pair, run, error)
    if call.saved:
        run.state = {key: value for key, value in run.state.items() if key in call.saved}
    if read is not None and (fault := _unread(run, read)) is not None:
        return fault
    data = dump(run.state)
    facts = facts_of(run)
    must = rules.must_refuse(pair, run, target, facts)
    may = rules.may_refuse(pair, run, target)
    ours = (
        elsewhere()
        if elsewhere is not None
        else _end(target, lambda run: _restore(run, restore, call))
    )
    if ours.error is not None and ours.at == "load":
        return _refused(pair, target, ours, [*must, *may], data, facts)
    if must:
        return Verdict(f"not refused: {must[0].why}", f"{', '.join(must[0].keys)}: {_said(ours)}")
    return _compared(pair, target, ours, data, facts)


def _unread(run: Run, read: Read) -> Verdict | None:
    """Return the verdict of a reading that fails or gives something else."""
    try:
        unlike = read(run)
    except Exception as error:
        return Verdict("a reader raises", repr(error))
    return Verdict("a reader differs", unlike) if unlike else None


def _compared(pair: Pair, target: Run, ours: End, data: bytes, facts: Facts) -> Verdict:
    """Judge a recovery that returned: it must end as the one by name, or as torch's
    own, if that does not mix up parameters.
    """
    known = by_position(facts, target) if pair.call.saved else facts
    named = _end(_target(pair), lambda run: load_by_name(run, data, pair.call, known))
    plain = None
    if named.at == "load" or pair.call.saved or (_in_order(target, facts) and not pair.call.keep):
        plain = _end(_target(pair), lambda run: load_as_torch(run, data, pair.call))
    if named.at != "load" and ours.same(named):
        return Verdict(AGREED if plain is not None and plain.same(named) else BETTER)
    if plain is not None and plain.at != "load" and ours.same(plain):
        return Verdict(AGREED)
    if ours.at == "step":
        return Verdict("the next step raises", f"{ours.error!r}")
    wanted = named if named.at != "load" else plain
    if wanted is None or wanted.at == "load":
        return Verdict(
            "accepted what torch refuses",
            f"torch: {plain.error if plain else None!r}; by name: {named.error!r}",
        )
    return Verdict(_kind(ours, wanted), ours.unlike(wanted))


def _in_order(target: Run, facts: Facts) -> bool:
    """Return True if each optimizer has the parameters that it was saved with, in the
    same order: torch goes by their numbers.
    """
    return all(
        list(chain.from_iterable(facts.groups.get(key, [])))
        == list(chain.from_iterable(names_by_group(target, optimizer)))
        for key, optimizer in target.optimizers.items()
    )


def _kind(ours: End, wanted: End) -> str:
    """Return the kind of a difference, by what differs first."""
    mine, theirs = ours.loaded or {}, wanted.loaded or {}
    names = differences(mine, theirs)
    if not names:
        return "trains differently"
    for word, kind in (
        (" state of ", "an optimizer's state differs"),
        (" group ", "a param group differs"),
        (" own ", "an optimizer's own values differ"),
        ("(buffer)", "a buffer differs"),
        ("(extra state)", "extra state differs"),
        ("(shared memory)", "shared memory differs"),
        (":", "a parameter differs"),
    ):
        if any(word in name for name in names):
            return kind
    return "a value differs"


def _said(end: End) -> str:
    return f"recover() returned{f', then the step raised {end.error!r}' if end.error else ''}"


def _unsaved(pair: Pair, run: Run, error: CkptdError) -> Verdict:
    """Judge a snapshot that was refused: torch must refuse as well, or the value must
    be one that is refused on purpose.
    """
    said = str(error)
    try:
        dump(run.state)
    except Exception:
        return Verdict(
            REFUSED
            if any(rules.names(key, said) for key in run.state)
            else "the refusal names no key",
            said,
        )
    return Verdict(REFUSED if rules.may_not_save(pair).explains(said) else "snapshot refused", said)


def _refused(
    pair: Pair, target: Run, ours: End, reasons: list[rules.Reason], data: bytes, facts: Facts
) -> Verdict:
    """Judge a recovery that was refused: cleanly, and for a reason.

    Without a reason of the contract, torch must refuse as well.
    """
    error, call = ours.error, pair.call
    assert error is not None
    said, late = error.text, error.overwritten
    if not error.ours:
        return Verdict("recover raised another error", repr(error))
    if error.name == "InternalError":
        return Verdict("recover raised an internal error", said)
    if ours.changed and not late:
        return Verdict("refused, and the state has changed", said)
    named_keys = [key for key in _keys(pair) if rules.names(key, said)]
    silent = "" if named_keys else "the refusal names no key"
    if not late and any(reason.explains(said) for reason in reasons):
        return Verdict(REFUSED, said)
    plain = _end(_target(pair), lambda run: load_as_torch(run, data, call))
    known = by_position(facts, target) if call.saved else facts
    named = _end(_target(pair), lambda run: load_by_name(run, data, call, known))
    raised = {one.error.key for one in (plain, named) if one.error is not None and one.at == "load"}
    if late and not any(
        rules.may_be_late(pair, target, key) for key in raised.intersection(named_keys)
    ):
        return Verdict("refused after the state was partly overwritten", said)
    if named.at == "" and not any(rules.loads_by_itself(pair, key) for key in named_keys):
        return Verdict("refused what must come back", said)
    if plain.at == "" and not call.keep:
        return Verdict("refused what torch loads", said)
    return Verdict(silent or REFUSED, said)


def _keys(pair: Pair) -> set[str]:
    things: list[Any] = [
        one
        for which in (pair.before, pair.after)
        for one in (*which.models, *which.optimizers, *which.extras)
    ]
    return {one.key for one in things}


def _target(pair: Pair) -> Run:
    """Return the recovering program as it is when it recovers."""
    run = build(pair.after)
    for _ in range(pair.after.steps):
        run.step()
    damage(run)
    if pair.call.only:
        run.state = {key: value for key, value in run.state.items() if key in pair.call.only}
    return run


def _restore(run: Run, restore: Restore, call: Call) -> None:
    with context(call.context):
        restore(run.state, call)


def _end(run: Run, load: Callable[[Run], None]) -> End:
    before = fixed_print(run)
    try:
        load(run)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return End(error=Failure.of(error), at="load", changed=fixed_print(run) != before)
    loaded = print_of(run)
    losses: list[Any] = []
    try:
        return End(loaded, _trained(run, losses), tuple(losses))
    except Exception as error:
        return End(loaded, error=Failure.of(error), at="step", losses=())


def _trained(run: Run, losses: list[Any]) -> Print:
    for _ in range(STEPS):
        losses.append(text(run.step()))
    return print_of(run)


def fixed_print(run: Run) -> dict[str, Any]:
    """Return the print of a state, of the objects that make it up, and of the random
    generators: what a refusal must not change.
    """
    found: dict[str, Any] = {**print_of(run)}
    for key, value in run.state.items():
        found[f"{key} is"] = id(value)
        if isinstance(value, nn.Module):
            found[f"{key} has"] = [id(one) for one in (*value.parameters(), *value.buffers())]
        elif key in run.optimizers:
            found[f"{key} has"] = [
                id(one) for group in run.optimizers[key].param_groups for one in group["params"]
            ]
    found["torch"] = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
    found["python"] = hashlib.sha1(repr(random.getstate()).encode()).hexdigest()
    found["numpy"] = hashlib.sha1(np.random.get_state()[1].tobytes()).hexdigest()  # type: ignore[index]
    return found
