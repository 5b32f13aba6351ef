"""Compares recoveries with torch's own round trip: `python -m tests.oracle --pairs 2000 [--seed S] [--minutes M]`.

Prints how the pairs ended, by change and by kind of fault, with the smallest program of each kind. The exit code is 1 if any differed.
`--pair JSON` judges one pair that an earlier run has printed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.oracle import grammar
from tests.oracle.program import from_json, to_json
from tests.oracle.runner import Result, judging, results
from tests.oracle.shrink import features, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--lanes", type=int, default=1, help="how many pairs to judge at a time")
    parser.add_argument("--pair", help="judge this pair, which an earlier run has printed as JSON")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="make the first N pairs of each kind of fault smaller")
    parser.add_argument("--report", type=Path, help="write the causes of the faults to this file, each with its smallest pair")
    options = parser.parse_args()
    with judging(options.lanes) as judge:
        if options.pair:
            verdict = judge(from_json(options.pair))
            print(verdict.kind, verdict.details, sep="\n")
            return int(not verdict.sound)
        begun, spent = time.monotonic(), 0.0
        seeds = iter(range(options.seed, options.seed + options.pairs))
        ends, changes = Counter[str](), Counter[tuple[str, bool]]()
        faults, causes = Counter[tuple[str, str]](), dict[str, Cause]()
        for number, result in enumerate(results(grammar.make, seeds, begun + 60 * options.minutes, judge, options.lanes), 1):
            verdict, label = result.verdict, " + ".join(result.pair.changes) or "none"
            ends[verdict.kind] += 1
            changes[label, verdict.sound] += 1
            if verdict.sound:
                continue
            faults[verdict.kind, label] += 1
            print(f"seed {result.pair.seed} after {number} pairs, {label}: {verdict.kind}: {verdict.details}"[:500], flush=True)
            if sum(count for (kind, _), count in faults.items() if kind == verdict.kind) <= options.shrink:
                before = time.monotonic()
                small = Result(*shrink(result.pair, verdict, judge))
                spent += time.monotonic() - before
                name = f"{small.verdict.kind}: {', '.join(features(small.pair))}"
                print(f"   smallest: {to_json(small.pair)}\n   ckptd: {small.verdict.details[:600]}", flush=True)
                causes.setdefault(name, Cause(number, small)).count += 1
                if options.report:
                    _report(options.report, causes, number)
        seconds = time.monotonic() - begun - spent
    _table(ends, changes, faults)
    bad = sum(faults.values())
    print(f"{ends.total():,d} pairs in {seconds:.0f} s ({ends.total() / seconds:.1f}/s), {bad} faults")
    return int(bad > 0)


@dataclass(slots=True)
class Cause:
    """Pairs that fail alike once they are small: after how many pairs the first was found, how many there were, and the smallest."""

    after: int
    small: Result
    count: int = 0


def _report(path: Path, causes: dict[str, Cause], pairs: int) -> None:
    lines = [f"# {len(causes)} causes in {pairs} pairs", ""]
    for name, cause in sorted(causes.items(), key=lambda one: -one[1].count):
        lines += [
            f"## {name}",
            f"seed {cause.small.pair.seed}, first after {cause.after} pairs, {cause.count} times",
            f"* smallest: `{to_json(cause.small.pair)}`",
            f"* ckptd: {cause.small.verdict.details[:700]}",
            "",
        ]
    path.write_text("\n".join(lines))


def _table(ends: Counter[str], changes: Counter[tuple[str, bool]], faults: Counter[tuple[str, str]]) -> None:
    print("\nchange                                   pairs  faults")
    labels = sorted({label for label, _ in changes if " + " not in label})
    for label in labels:
        print(f"{label:40}{changes[label, True] + changes[label, False]:6}{changes[label, False]:8}")
    both = [(label, sound) for label, sound in changes if " + " in label]
    print(f"{'two changes':40}{sum(changes[one] for one in both):6}{sum(changes[one] for one in both if not one[1]):8}")
    print("\nend                                                     pairs")
    for kind, count in ends.most_common():
        print(f"{kind:55}{count:6}")
        for (_, label), number in itertools.islice(
            sorted((one for one in faults.items() if one[0][0] == kind), key=lambda one: -one[1]), 8
        ):
            print(f"    {label:51}{number:6}")


if __name__ == "__main__":
    sys.exit(main())
