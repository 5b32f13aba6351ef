"""Collects what differs between a state and a checkpoint, and words it as one error
that names every difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptd.agent.recover.options import Options, pattern_of
from ckptd.shared.errors import StructureMismatch

_LISTED = 8
"""The most keys that a remedy lists one by one. If there are more, it lists their
patterns.
"""


@dataclass(slots=True)
class Differences:
    """The differences between a state and a checkpoint.

    missing: the keys that are in the state and not in the checkpoint. unused: the keys
    that are in the checkpoint and not in the state. others: a sentence for each other
    difference. to_keep: the keys of the state that `keep` would leave as they are, so
    that these differences do not matter. loose: True if `strict=False` would accept one
    of `others`. options: the options of the call that has found the differences.
    """

    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    to_keep: list[str] = field(default_factory=list)
    loose: bool = False
    options: Options = field(default_factory=Options)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unused or self.others)

    def error(self) -> StructureMismatch:
        """Return the error that lists all differences."""
        found = list(dict.fromkeys(self.others))
        found += (
            [f"{_keys(self.missing)} in the state and not in the checkpoint"]
            if self.missing
            else []
        )
        found += (
            [f"{_keys(self.unused)} in the checkpoint and not in the state"] if self.unused else []
        )
        return StructureMismatch(f"{'; '.join(found)}; nothing was written{self._remedy()}")

    def _remedy(self) -> str:
        """Return a sentence with the call that recovers the rest, or "" if there is
        none.
        """
        if not (self.missing or self.unused or self.to_keep or self.loose):
            return ""
        strict = self.options.strict and not (self.missing or self.unused or self.loose)
        keys = list(dict.fromkeys(map(pattern_of, self.to_keep)))
        keep = [*self.options.keep, *(keys if len(keys) <= _LISTED else _patterns(keys))]
        return f". To recover the rest, call {self.options.call(strict=strict, keep=keep)}"


def _keys(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return f"key {keys[0]} is"
    return f"{len(keys)} keys ({', '.join(grouped(keys))}) are"


def grouped(keys: Sequence[str]) -> list[str]:
    """Return all keys, with one entry for those that differ in their numbers only:
    `layers.*.weight (24 of them)`.
    """
    return [
        same[0] if len(same) == 1 else f"{pattern} ({len(same)} of them)"
        for pattern, same in _patterns(keys).items()
    ]


def _patterns(keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys by pattern. A pattern is a key with a star for each number in it."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", key), []).append(key)
    return groups
