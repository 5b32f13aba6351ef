"""Kills the examples of the frameworks with SIGKILL at random moments, and compares every
loss with that of a run that was not killed.

`python -m tests.frameworks.kills plain transformers [--kills 50] [--seed N]`. An example is
a script in examples/frameworks that appends `STEP LOSS` to a file after each step, and
`hash SHA256` at its end. A step that is trained twice must have the same loss both times.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.daemons import Home, home
from tests.support.forks import context
from tests.support.scripts import Script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
SECONDS = 600.0
_EARLY = 0.1
"""The share of kills before the first step of a life, while the process imports, builds
and recovers.
"""
_FRAMEWORKS = ("transformers", "accelerate", "lightning", "deepspeed", "ray.train.torch")
"""Modules whose import takes longer than a short training."""
_SAVED = 10
"""The number of steps of all lives after which the next one must not begin at the first
step: the examples save every fifth step or more often.
"""


@dataclass(slots=True)
class Compared:
    """The lines that the lives of a run have written, beside those of one that was not
    killed.

    runs: the number of runs that were killed and started again until their end.
    hash: the hash of the parameters at the end of the run that was not killed.
    problems: one text for each line that differs, or that is missing.
    """

    kills: int = 0
    lives: int = 0
    runs: int = 0
    steps: int = 0
    hash: str = ""
    problems: list[str] = field(default_factory=list)


def compare(whole: Sequence[str], lives: Sequence[str]) -> list[str]:
    """Return one text for each difference between the lines of an uninterrupted run and
    those of all lives of one that was killed.
    """
    expected = dict(line.split() for line in whole)
    found = [line.split() for line in lives]
    problems = [
        f"{key}: {value} instead of {expected.get(key, 'nothing')}"
        for key, value in found
        if expected.get(key) != value
    ]
    missing = sorted(expected.keys() - {key for key, _ in found})
    return problems + [f"{key} is missing" for key in missing]


def lines(losses: Path) -> list[str]:
    """Return the lines that have been written completely."""
    if not losses.exists():
        return []
    text = losses.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


@dataclass(frozen=True, slots=True)
class _Spans:
    """The seconds of a run before its first step has ended, and after that."""

    before: float
    steps: float


class Example:
    """A script that is run and killed, each run with a root of its own.

    It gets its own arguments, and then the options `--steps N --losses FILE`.
    """

    def __init__(
        self, script: Path, steps: int, chance: random.Random, arguments: Sequence[str] = ()
    ) -> None:
        self._script, self._arguments = script, arguments
        self._steps, self._chance = steps, chance

    def run(self, kills: int) -> Compared:
        """Run the example once without a kill, and then until it has been killed often
        enough and has ended.
        """
        found = Compared()
        first: list[float] = []

        def note(now: float, count: int) -> bool:
            if count and not first:
                first.append(now)
            return False

        with home() as place:
            begun = time.monotonic()
            whole, _ = self._live(place, note)
            ended = time.monotonic()
            started = (first or [ended])[0]
            spans = _Spans(started - begun, ended - started)
        if not whole or not whole[-1].startswith("hash "):
            found.problems.append("the run without a kill did not reach its end")
            return found
        found.steps, found.hash = len(whole) - 1, whole[-1].split()[1]
        while found.kills < kills and not found.problems:
            self._killed(found, kills, whole, spans)
        return found

    def _killed(self, found: Compared, kills: int, whole: list[str], spans: _Spans) -> None:
        """Start one run again and again until it ends, with at most as many kills as are
        left.
        """
        with home() as place:
            while True:
                dies = self._moment(spans) if found.kills < kills else _never
                before = len(lines(place.path / "losses"))
                written, killed = self._live(place, dies)
                if (
                    before > _SAVED
                    and written[before:]
                    and written[before].split()[0] == (whole[0].split()[0])
                ):
                    found.problems.append(f"a life after {before} steps began at the first one")
                found.lives, found.kills = found.lives + 1, found.kills + killed
                if not killed:
                    break
            found.runs += 1
            found.problems += compare(whole, written)

    def _moment(self, spans: _Spans) -> Callable[[float, int], bool]:
        """Return the condition under which a life is killed: some time after it began, or
        after its first step.
        """
        early = self._chance.random() < _EARLY
        after = self._chance.uniform(0.0, spans.before if early else spans.steps)
        first: list[float] = []

        def due(now: float, count: int) -> bool:
            if not first and (early or count):
                first.append(now)
            return bool(first) and now > first[0] + after

        return due

    def _live(self, place: Home, due: Callable[[float, int], bool]) -> tuple[list[str], bool]:
        """Run one process. Return all lines so far, and True if it was killed.

        Raises AssertionError if it fails by itself.
        """
        losses = place.path / "losses"
        before = len(lines(losses))
        environ = {
            **os.environ, "CKPTD_ROOT": str(place.root), "CKPTD_JOB": "run", "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": str(place.path), "CKPTD_STATE_DIR": str(place.path / "state"),
            "CKPTD_IDLE_TIMEOUT": "1", "CKPTD_MEMORY_TTL": "60",
        }  # fmt: skip
        environ.pop("CKPTD_SOCKET", None)
        output = place.path / "output"
        script = Script(
            self._script, *self._arguments, "--steps", str(self._steps), "--losses", str(losses),
            environment=environ, directory=place.path, output=output,
        )  # fmt: skip
        end = time.monotonic() + SECONDS
        while script.code is None:
            now = time.monotonic()
            assert now < end, f"the example has not ended within {SECONDS:g} s"
            if due(now, len(lines(losses)) - before):
                script.kill()
                return lines(losses), True
            time.sleep(0.01)
        if script.code:
            said = output.read_text(errors="replace")[-3000:]
            raise AssertionError(f"the example has failed with {script.code}:\n{said}")
        return lines(losses), False


def _never(now: float, count: int) -> bool:
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options = parser.parse_args()
    context(*_FRAMEWORKS)
    bad = 0
    head = ("steps", "runs", "lives", "kills", "differ")
    print(f"{'example':<26}{''.join(f'{name:>8}' for name in head)}  hash, seed {options.seed}")
    for name in options.names:
        script = EXAMPLES / f"{name}.py"
        found = Example(script, options.steps, random.Random(options.seed)).run(options.kills)
        bad += bool(found.problems)
        counts = (found.steps, found.runs, found.lives, found.kills, len(found.problems))
        row = f"{name:<26}{''.join(f'{count:>8}' for count in counts)}  {found.hash[:16]}"
        print(row, *found.problems[:5], sep="\n    ", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
