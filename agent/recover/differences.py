"""Collects what differs between a state and a checkpoint, and words it as one error
that names the first differences, counts the others, and says how to recover the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckptd.agent.recover.options import Options, pattern_of
from ckptd.shared.errors import StructureMismatch
from ckptd.shared.units import some_text

_LISTED = 8
"""The most keys or differences that an error lists one by one. A remedy lists the
patterns of more keys, where these match no other key.
"""


@dataclass(slots=True)
class Differences:
    """The differences between a state and a checkpoint.

    missing: the keys that are in the state and not in the checkpoint. unused: the keys
    that are in the checkpoint and not in the state. others: a sentence for each other
    difference. to_keep: the keys of the state that `keep` would leave as they are, so
    that these differences do not matter. loose: True if `strict=False` would accept one
    of `others`. options: the options of the call that has found the differences. bound:
    the keys of the state that have a place in the checkpoint, which a remedy must not
    leave out.
    """

    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    to_keep: list[str] = field(default_factory=list)
    loose: bool = False
    options: Options = field(default_factory=Options)
    bound: Collection[str] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unused or self.others)

    def error(self) -> StructureMismatch:
        """Return the error that lists the differences."""
        found = list(dict.fromkeys(self.others))
        if len(found) > _LISTED:
            found[_LISTED:] = [f"and {len(found) - _LISTED:,d} more like these"]
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
        keep = [*self.options.keep, *(keys if len(keys) <= _LISTED else self._short(keys))]
        return f". To recover the rest, call {self.options.call(strict=strict, keep=keep)}"

    def _short(self, keys: list[str]) -> list[str]:
        """Return patterns that match these keys and no other key that is bound."""
        inside = tuple(f"{key}." for key in self.to_keep)
        bound = [
            key for key in set(self.bound).difference(self.to_keep) if not key.startswith(inside)
        ]
        return [
            one
            for pattern, same in _patterns(keys).items()
            for one in (same if any(fnmatchcase(key, pattern) for key in bound) else [pattern])
        ]


def _keys(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return f"key {keys[0]} is"
    return f"{len(keys)} keys ({some_text(grouped(keys), _LISTED)}) are"


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
