"""Collects what differs between a state and a checkpoint, and words it as one error that names every difference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptd.shared.errors import StructureMismatch


@dataclass(slots=True)
class Differences:
    """The differences between a state and a checkpoint.

    missing: the keys that are in the state and not in the checkpoint. unused: the keys that are in the checkpoint and not in the state.
    others: a sentence for each other difference.
    """

    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unused or self.others)

    def error(self) -> StructureMismatch:
        """Return the error that lists all differences."""
        found = list(dict.fromkeys(self.others))
        found += [f"{_keys(self.missing)} in the state and not in the checkpoint"] if self.missing else []
        found += [f"{_keys(self.unused)} in the checkpoint and not in the state"] if self.unused else []
        return StructureMismatch(f"{'; '.join(found)}; nothing was written")


def _keys(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return f"key {keys[0]} is"
    return f"{len(keys)} keys ({', '.join(grouped(keys))}) are"


def grouped(keys: Sequence[str]) -> list[str]:
    """Return all keys, with one entry for those that differ in their numbers only: `layers.*.weight (24 of them)`."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", key), []).append(key)
    return [same[0] if len(same) == 1 else f"{pattern} ({len(same)} of them)" for pattern, same in groups.items()]
