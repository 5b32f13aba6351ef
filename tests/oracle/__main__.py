"""Compares recoveries with torch's own round trip: `python -m tests.oracle --pairs 2000
[--seed S] [--minutes M] [--ranks 2]`.

Prints how the pairs ended, by change and by kind of fault, with the smallest program of
each kind. The exit code is 1 if any differed. `--pair JSON` judges one pair that an
earlier run has printed. `--ranks 2` tries programs on one or two ranks, as `spread.py`
says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle import grammar, program, shrink, spread
from tests.oracle.judge import Verdict
from tests.oracle.runner import judging, judging_spread, results


@dataclass(slots=True)
class Cause:
    """Pairs that fail alike once they are small: after how many pairs the first was
    found, how many there were, and the smallest.
    """

    after: int
    seed: int
    small: str
    details: str
    count: int = 0


class Tally:
    """Counts how pairs ended, and prints each fault.

    `module` has `shrink` and `features` for them, and `to_json` writes one.
    """

    def __init__(
        self,
        module: Any,
        to_json: Callable[[Any], str],
        judge: Callable[[Any], Verdict],
        shrunk: int,
        report: Path | None,
    ) -> None:
        self.faults, self.spent = Counter[tuple[str, str]](), 0.0
        self._module, self._to_json, self._judge, self._shrunk, self._report = (
            module,
            to_json,
            judge,
            shrunk,
            report,
        )
        self._ends, self._changes, self._causes = (
            Counter[str](),
            Counter[tuple[str, bool]](),
            dict[str, Cause](),
        )

    def note(self, pair: Any, verdict: Verdict) -> None:
        """Count a pair.

        Print it if it shows a fault, and its smallest form if there are few of this
        kind so far.
        """
        label = " + ".join(pair.changes) or "none"
        self._ends[verdict.kind] += 1
        self._changes[label, verdict.sound] += 1
        if verdict.sound:
            return
        number = self._ends.total()
        self.faults[verdict.kind, label] += 1
        print(
            f"seed {pair.seed} after {number} pairs, {label}: {verdict.kind}: {verdict.details}"[
                :500
            ],
            flush=True,
        )
        if (
            sum(count for (kind, _), count in self.faults.items() if kind == verdict.kind)
            <= self._shrunk
        ):
            begun = time.monotonic()
            small, found = self._module.shrink(pair, verdict, self._judge)
            self.spent += time.monotonic() - begun
            print(
                f"   smallest: {self._to_json(small)}\n   ckptd: {found.details[:600]}", flush=True
            )
            name = f"{found.kind}: {', '.join(self._module.features(small))}"
            self._causes.setdefault(
                name, Cause(number, pair.seed, self._to_json(small), found.details)
            ).count += 1
            if self._report is not None:
                self._write(self._report, number)

    def _write(self, path: Path, pairs: int) -> None:
        lines = [f"# {len(self._causes)} causes in {pairs} pairs", ""]
        for name, cause in sorted(self._causes.items(), key=lambda one: -one[1].count):
            lines += [
                f"## {name}",
                f"seed {cause.seed}, first after {cause.after} pairs, {cause.count} times",
                f"* smallest: `{cause.small}`",
                f"* ckptd: {cause.details[:700]}",
                "",
            ]
        path.write_text("\n".join(lines))

    def print(self, seconds: float) -> None:
        """Print the tables by change and by end."""
        print(f"\n{'change':40}{'pairs':>6}{'faults':>8}")
        changes = self._changes
        for label in sorted({label for label, _ in changes if " + " not in label}):
            print(
                f"{label:40}{changes[label, True] + changes[label, False]:6}{changes[label, False]:8}"  # noqa: E501
            )
        both = [one for one in changes if " + " in one[0]]
        print(
            f"{'two changes':40}{sum(changes[one] for one in both):6}{sum(changes[one] for one in both if not one[1]):8}"  # noqa: E501
        )
        print(f"\n{'end':55}{'pairs':>6}")
        for kind, count in self._ends.most_common():
            print(f"{kind:55}{count:6}")
            of_kind = Counter(
                {label: number for (other, label), number in self.faults.items() if other == kind}
            )
            for label, number in of_kind.most_common(8):
                print(f"    {label:51}{number:6}")
        pairs = self._ends.total()
        print(
            f"{pairs:,d} pairs in {seconds:.0f} s ({pairs / max(seconds, 0.001):.1f}/s), "
            f"{self.faults.total()} faults"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--lanes", type=int, default=1, help="how many pairs to judge at a time, on one rank"
    )
    parser.add_argument("--pair", help="judge this pair, which an earlier run has printed as JSON")
    parser.add_argument(
        "--shrink",
        type=int,
        default=1,
        metavar="N",
        help="make the first N pairs of each kind of fault smaller",
    )
    parser.add_argument(
        "--report",
        type=Path,
        help="write the causes of the faults to this file, each with its smallest pair",
    )
    options = parser.parse_args()
    module: Any = spread if options.ranks == 2 else shrink
    texts: Any = spread if options.ranks == 2 else program
    make: Callable[[int], Any] = spread.make if options.ranks == 2 else grammar.make
    lanes = 1 if options.ranks == 2 else options.lanes
    judged: AbstractContextManager[Callable[[Any], Verdict]] = (
        judging_spread() if options.ranks == 2 else judging(lanes)
    )
    with judged as judge:
        if options.pair:
            verdict = judge(texts.from_json(options.pair))
            print(verdict.kind, verdict.details, sep="\n")
            return int(not verdict.sound)
        begun, tally = (
            time.monotonic(),
            Tally(module, texts.to_json, judge, options.shrink, options.report),
        )
        seeds = iter(range(options.seed, options.seed + options.pairs))
        for pair, verdict in results(make, seeds, begun + 60 * options.minutes, judge, lanes):
            tally.note(pair, verdict)
        tally.print(time.monotonic() - begun - tally.spent)
    return int(bool(tally.faults))


if __name__ == "__main__":
    sys.exit(main())
