"""Judges pairs of programs on one or two ranks: compares the gathered tensors of a
recovery with those that were saved.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.oracle import spread_rank as on
from tests.oracle.judge import AGREED, REFUSED, STEPS, Verdict
from tests.oracle.prints import Print, differences
from tests.oracle.spread import ELEMENTWISE, REPLICATED, SpreadPair
from tests.support.daemons import Home
from tests.support.ranks import RankFailed, Ranks

LATER = 3
"""The number of snapshots of replicas where every element differs."""


class Pools:
    """Rank processes that judge many pairs: one alone, and two together.

    They are started again after one has died.
    """

    def __init__(self, place: Home, after: str = "") -> None:
        """`after`: how each rank spoils its state once it has recovered, for the tests
        of the rig.
        """
        self._place, self._number, self._after = place, 0, after
        self._pools: dict[int, Ranks] = {}

    def _pool(self, world: int) -> Ranks:
        if world not in self._pools or not self._pools[world].all_live:
            self._end(world)
            self._pools[world] = Ranks(world)
        return self._pools[world]

    def _end(self, world: int) -> None:
        if (pool := self._pools.pop(world, None)) is not None:
            for rank in range(world):
                pool.kill(rank)

    def close(self) -> None:
        for world in list(self._pools):
            self._end(world)

    def judge(self, pair: SpreadPair) -> Verdict:
        """Return the verdict of a pair."""
        self._number += 1
        try:
            return self._judge(pair, f"spread-{self._number}-{pair.seed}")
        except RankFailed as error:
            self.close()
            return Verdict("a rank failed", str(error)[-600:])
        except (TimeoutError, EOFError, ConnectionError) as error:
            self.close()
            return Verdict("a rank died or hung", repr(error))

    def _judge(self, pair: SpreadPair, job: str) -> Verdict:
        first, second = self._pool(pair.before.world), self._pool(pair.after.world)
        socket = self._place.socket
        first.call(on.build, pair.before)
        try:
            sharded = any(first.call(on.quantized))
            if pair.spoilt and pair.spoilt != "buffer" and not sharded:
                return _spoilt(pair, first, socket, job)
            if pair.spoilt:
                first.call(on.spoil, pair.spoilt, pair.seed)
            errors = first.call(on.save, socket, job, 0, True, pair.compare)
            if len(set(map(bool, errors))) > 1:
                return Verdict("the ranks disagree about a snapshot", repr(errors))
            if pair.before.unmarked:
                return _unmarked(pair, errors, first, socket, job, sharded)
            if errors[0]:
                if sharded and _names_optimizer(errors):
                    return Verdict(REFUSED, errors[0])
                return Verdict("snapshot refused", errors[0])
            return self._recovered(pair, first, second, job)
        finally:
            for pool in {id(one): one for one in (first, second)}.values():
                with suppress(RankFailed, TimeoutError, EOFError, ConnectionError):
                    pool.call(on.close)

    def _recovered(self, pair: SpreadPair, first: Ranks, second: Ranks, job: str) -> Verdict:
        """Judge the recovery of what the first ranks have saved."""
        wanted = _together(first.call(on.whole))
        again = pair.source == "storage" or pair.before.world != pair.after.world
        first.call(on.steps, STEPS)
        later = _together(first.call(on.whole))
        if again:
            first.call(on.close)
        second.call(on.build, pair.after)
        untouched = second.call(on.whole)
        answers = second.call(on.recover, self._place.socket, job, again)
        if any(error for error, _, _ in answers):
            return _refused(
                pair, [error for error, _, _ in answers], untouched != second.call(on.whole)
            )
        if why := _must_refuse(pair):
            return Verdict(f"not refused: {why}")
        source = "storage" if again else "memory"
        if {(step, where) for _, step, where in answers} != {(0, source)}:
            return Verdict("another snapshot came back", repr(answers))
        if self._after:
            second.call(on.spoil, self._after, pair.seed)
        ends = second.call(on.whole)
        second.call(on.set_count, pair.before.steps)
        second.call(on.steps, STEPS)
        trained = second.call(on.whole)
        compared = [("recovered", ends, wanted)]
        if pair.before.optimizer in ELEMENTWISE or {pair.before.kind, pair.after.kind} <= {
            *REPLICATED
        }:
            compared.append(("trained", trained, later))
        for when, mine, theirs in compared:
            if names := _at_odds(mine):
                return Verdict(
                    "the ranks differ after the recovery", f"{when}: {', '.join(names[:3])}"
                )
            if names := differences(found := _together(mine), theirs):
                shown = "; ".join(
                    f"{name}: ckptd {found.get(name)} / saved {theirs.get(name)}"
                    for name in names[:3]
                )
                return Verdict(
                    "tensors differ from the saved ones", f"{when}, {len(names)} differ: {shown}"
                )
        return Verdict(AGREED)


def _together(found: list[Print]) -> Print:
    """Return the union of what all ranks have.

    The lowest rank counts, as for the buffers of DistributedDataParallel.
    """
    return {name: value for one in reversed(found) for name, value in one.items()}


def _at_odds(found: list[Print]) -> list[str]:
    """Return the names under which ranks have different texts."""
    first, *others = found
    return [name for one in others for name in one if first.get(name, one[name]) != one[name]]


def _names_optimizer(errors: list[str]) -> bool:
    """Return True if each error names a moment, or the optimizer whose moments FSDP1 could not
    gather, or could not divide because their class does not know how.
    """
    reasons = (
        "optim.state.",
        "optim: FullyShardedDataParallel cannot gather ",
        "EightBit has no aten.split",
    )
    return all(any(reason in error for reason in reasons) for error in errors)


def _unmarked(
    pair: SpreadPair, errors: list[str], ranks: Ranks, socket: Path, job: str, sharded: bool
) -> Verdict:
    """Judge the first snapshot of experts under equal keys, which must be refused with
    the way out, and so must the next one.
    """
    key = "model.experts." if pair.before.experts == "inside" else "experts"
    for number, said in enumerate(
        (errors, ranks.call(on.save, socket, job, pair.stride, False, 0))
    ):
        if not all(said):
            return Verdict("experts were saved as one", f"at snapshot {number}: {said}")
        if sharded and _names_optimizer(said):  # refused for another reason, which is found first
            return Verdict(REFUSED, said[0])
        if not all(key in error and "per_rank" in error for error in said):
            return Verdict("the refusal names no key", repr(said))
    return _last(pair, ranks, socket, job, None) or Verdict(REFUSED)


def _spoilt(pair: SpreadPair, ranks: Ranks, socket: Path, job: str) -> Verdict:
    """Judge snapshots of replicas that begin to differ: those before must succeed, and
    the others must fail as soon as the contract says.

    Replicas where every element differs fail at every snapshot. Where one bit
    differs, a snapshot fails that plans, and so does at least one of as many snapshots
    in turn as the setting says.
    """
    element = pair.spoilt == "element"
    count = pair.when + (2 * pair.compare + 1 if element else LATER)
    failed: list[bool] = []
    keys: list[str] = []
    wanted: list[Print] = []
    for number in range(count):
        if number == pair.when:
            wanted = ranks.call(on.whole)
            keys = ranks.call(on.spoil, pair.spoilt, pair.seed)[0]
        errors = ranks.call(on.save, socket, job, number * pair.stride, number == 0, pair.compare)
        if len(set(map(bool, errors))) > 1:
            return Verdict("the ranks disagree about a snapshot", repr(errors))
        failed.append(bool(errors[0]))
        if failed[-1] and number < pair.when:
            return Verdict("snapshot refused", errors[0])
        if failed[-1] and not keys:
            return Verdict("snapshot refused", errors[0])
        if failed[-1] and not ("per_rank" in errors[0] and any(key in errors[0] for key in keys)):
            return Verdict("the refusal names no key", f"{keys}: {errors[0]}")
    if not keys:  # this program has nothing of this kind
        return Verdict(AGREED)
    window = pair.compare if element and pair.when else 1
    for number in range(pair.when, count - window + 1):
        if not any(failed[number : number + window]):
            return Verdict(
                "replicas that differ were saved as one",
                f"{keys} before snapshot {pair.when}: {failed}",
            )
    last = max((number for number, one in enumerate(failed) if not one), default=None)
    whole = None if last is None or last >= pair.when else _together(wanted)
    return _last(pair, ranks, socket, job, last, whole) or Verdict(REFUSED)


def _last(
    pair: SpreadPair,
    ranks: Ranks,
    socket: Path,
    job: str,
    number: int | None,
    wanted: Print | None = None,
) -> Verdict | None:
    """Return a verdict if another snapshot than the one with this number is the newest
    that comes back, or if it is not as `wanted`.
    """
    ranks.call(on.close)
    ranks.call(on.build, replace(pair.before, seed=pair.before.seed + 1))
    answers = ranks.call(on.recover, socket, job, True)
    step = None if number is None else number * pair.stride
    if any(error or found != step for error, found, _ in answers):
        return Verdict("another snapshot came back", f"expected {step}, found {answers}")
    if step is None:
        return None
    found = ranks.call(on.whole)
    if names := _at_odds(found):
        return Verdict("the ranks differ after the recovery", ", ".join(names[:3]))
    if wanted is not None and (names := differences(_together(found), wanted)):
        return Verdict("tensors differ from the saved ones", ", ".join(names[:3]))
    return None


def _must_refuse(pair: SpreadPair) -> str:
    """Return why a recovery must be refused, or ""."""
    before, after = pair.before, pair.after
    if before.copied != after.copied:
        return "the states have other keys"
    if before.optimizer != after.optimizer:
        return "the optimizer is of another class, or keeps another state"
    return ""


def _refused(pair: SpreadPair, errors: list[str], changed: bool) -> Verdict:
    before, after = pair.before, pair.after
    if not all(errors):
        return Verdict("the ranks disagree about a recovery", repr(errors))
    if changed:
        return Verdict("refused, and the state has changed", errors[0])
    sharded = "eight-bit" in (before.optimizer, after.optimizer) and not {
        before.kind,
        after.kind,
    } <= {*REPLICATED}
    # One flat parameter cannot be in two groups.
    flat = before.grouping == "decay" and "fsdp1-flat" in (before.kind, after.kind)
    if not (_must_refuse(pair) or sharded or flat):
        return Verdict("refused what must come back", errors[0])
    keys = [
        key for key, differs in (("ema", before.copied != after.copied), ("optim", True)) if differs
    ]
    if not all(any(key in error for key in keys) for error in errors):
        return Verdict("the refusal names no key", errors[0])
    return Verdict(REFUSED, errors[0])
