"""Holds the options of a recovery, as the caller of `recover` gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

OnReshape = Callable[[str, list[Any]], Any]
"""Takes the key of a `per_rank` value and the list of the values of all ranks that
saved it. Returns the value for this rank.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `Agent.recover`.

    strict: keys, classes of optimizers and schedulers, and parameter groups must agree.
    keep: patterns of keys, as for `fnmatch`, whose values stay the caller's.
    on_reshape: the function that makes a `per_rank` value of those that another number
    of ranks has saved. same_partition: the ranks and their shards are those that saved,
    so that each rank reads only its own. step: the step to recover, or None for the
    newest. tag: the tag to recover, such as "best" or "step-00000100", or None for any.
    settings: the settings with which the script has made its optimizers and schedules,
    as `settings_of` gives them, or None if this process has recovered before.
    """

    strict: bool = True
    keep: Sequence[str] = ()
    on_reshape: OnReshape | None = None
    same_partition: bool = False
    step: int | None = None
    tag: str | None = None
    settings: str | None = None

    def call(self, **changes: Any) -> str:
        """Return the text of the call of `recover` with these options, which the caller
        can paste.

        `changes` replaces some of the options. A function is written by its name if it
        has one, and otherwise by the name of the option; one of ckptd's own is left out.
        """
        options = replace(self, **changes)
        arguments = [f"step={options.step}"] if options.step is not None else []
        arguments += ["strict=False"] if not options.strict else []
        arguments += [f"keep={list(options.keep)!r}"] if options.keep else []
        arguments += (
            [f"on_reshape={_name(options.on_reshape)}"] if _is_given(options.on_reshape) else []
        )
        arguments += ["same_partition=True"] if options.same_partition else []
        return f"recover({', '.join(['state', *arguments])})"

    def call_that_keeps(self, key: str) -> str:
        """Return the call of `recover` with these options that leaves the value of one
        more key as it is.
        """
        return self.call(keep=[*self.keep, pattern_of(key)])


def pattern_of(key: str) -> str:
    """Return the pattern of `keep` that matches this key and no other."""
    return re.sub(r"([*?[])", r"[\1]", key)


def _is_given(function: OnReshape | None) -> TypeGuard[OnReshape]:
    """Return True for a function of the caller, and not of an integration of ckptd."""
    return function is not None and not str(function.__module__).startswith("ckptd.")


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "on_reshape"
