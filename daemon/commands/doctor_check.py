"""Holds the result of a check of `ckptd doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: a message for people, and values for programs.

    `level` is ok, warning or failed. A message that is not ok says what to do.
    """

    name: str
    level: str
    message: str
    values: dict[str, Any] = field(default_factory=dict)
