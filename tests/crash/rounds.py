"""Runs a rig round after round, and prints what it did: the part that rigs of this kind
have in common.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from ckptd.agent import CkptdError
from tests.support.daemons import Home, home


def run_rounds(
    live: Callable[[Home, Random, Counter[str]], None], rounds: int, number: int, seconds: float
) -> tuple[Counter[str], list[str]]:
    """Call `live` up to `rounds` times, each time with a new home, until `seconds` have
    passed or a round goes wrong.

    `number` is the random seed. Return what `live` has counted, and what went wrong.
    """
    chance, done, end = Random(number), Counter[str](), time.monotonic() + seconds
    for _ in range(rounds):
        if time.monotonic() > end:
            break
        with home() as place:
            try:
                live(place, chance, done)
            except (AssertionError, CkptdError, OSError) as error:
                return done, [f"{error!r}\n{place.log_text()[-3000:]}"]
    return done, []


def main(
    description: str | None, run: Callable[[int, int], tuple[Counter[str], list[str]]]
) -> None:
    """Run a rig as its command line says, print what it counted and what went wrong,
    and exit with 1 if anything did.
    """
    logging.disable()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    done, problems = run(options.rounds, options.seed)
    print(*(f"{what:40} {count}" for what, count in done.most_common()), *problems, sep="\n")
    print(f"seed {options.seed}, {len(problems)} lost")
    sys.exit(bool(problems))
