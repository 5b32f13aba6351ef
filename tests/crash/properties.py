"""Runs the tests whose values hypothesis draws, with fresh seeds.

In `make test` these tests have the same values each time, so that CI fails only because of
a change.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
OPTIONS = ("-q", "-m", "hypothesis", "--hypothesis-profile=default")


def run(count: int, number: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Check `count` properties, or as many as the time allows, file by file.

    Return how many hold of each file, and what pytest says of the first file with one that
    does not. `number` is the seed.
    """
    held, end, chance = Counter[str](), time.monotonic() + seconds, Random(number)
    files = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "\n@given(" in file.read_text()
    ]
    for file in itertools.cycle(chance.sample(files, len(files))):
        seed = chance.getrandbits(32)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, f"--hypothesis-seed={seed}", file],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        held[file] += sum(map(int, re.findall(r"(\d+) passed", done.stdout)))
        if done.returncode:
            return held, [f"{file} with --hypothesis-seed={seed}: {done.stdout[-2000:]}"]
        if held.total() >= count or time.monotonic() >= end:
            break
    return held, []
