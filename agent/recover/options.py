"""Holds the options of a recovery, as the caller of `recover` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OnReshape = Callable[[str, list[Any]], Any]
"""Takes the key of a `per_rank` value and the list of the values of all ranks that saved it. Returns the value for this rank."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `Agent.recover`.

    strict: keys, classes of optimizers and schedulers, and parameter groups must agree. keep: patterns of keys, as for `fnmatch`, whose
    values stay the caller's. same_partition: the ranks and their shards are those that saved, so that each rank reads only its own.
    """

    strict: bool = True
    keep: Sequence[str] = ()
    on_reshape: OnReshape | None = None
    same_partition: bool = False
