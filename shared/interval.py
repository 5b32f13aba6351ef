"""Computes how often a training should be saved."""

from __future__ import annotations

import math


def best_interval(cost: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that lose the least time to
    saves and failures.

    `cost` is the time in seconds for which a save holds the training, and `mtbf` the
    mean seconds between two failures. The formula is equation 37 of J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22
    (2006). Its first term is J. W. Young's of 1974.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
