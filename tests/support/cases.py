"""Checks many cases in one test, and names every case that fails.

`each_case` takes what `pytest.mark.parametrize` takes. It is for cases that start no
process, because a test for each of them costs more than its check.
"""

from __future__ import annotations

import asyncio
import inspect
import reprlib
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., Any]
Ids = Callable[[Any], object] | Iterable[str] | None
_SHORT = reprlib.Repr()  # also of values whose own representation fails
_SHORT.maxstring = _SHORT.maxother = 100


def each_case(
    names: str | Sequence[str], cases: Iterable[Any], ids: Ids = None
) -> Callable[[Test], Test]:
    """Decorator. Make one test that calls a function with the values of each case.

    Each case has a `tmp_path`, a `monkeypatch` and an event loop of its own, and shares
    the other fixtures with all cases. A case may not skip: nobody would notice.
    """
    one = isinstance(names, str)
    wanted = [names] if isinstance(names, str) else list(names)
    listed = [dict(zip(wanted, (case,) if one else case, strict=True)) for case in cases]
    show, named = (ids, []) if ids is None or callable(ids) else (None, list(ids))
    assert listed, f"there is no case of {names}"
    assert not named or len(named) == len(listed), f"{len(listed)} cases, and {len(named)} names"

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            failed = list[tuple[str, str]]()
            for number, case in enumerate(listed):
                try:
                    _call(test, fixtures, case)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    label = named[number] if named else _label(number, case, show)
                    failed.append((label, "".join(traceback.format_exception(error))))
            if failed:
                labels = "; ".join(label for label, _ in failed)
                told = "".join(f"\n\ncase {label}:\n{shown}" for label, shown in failed)
                pytest.fail(f"{len(failed)} of {len(listed)} cases: {labels}{told}", pytrace=False)

        signature = inspect.signature(test)
        left = [value for name, value in signature.parameters.items() if name not in wanted]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def _call(test: Test, fixtures: Mapping[str, Any], case: Mapping[str, Any]) -> None:
    own = dict[str, Any]()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in fixtures:
            own["monkeypatch"] = patch
        if "tmp_path" in fixtures:
            own["tmp_path"] = Path(tempfile.mkdtemp(dir=fixtures["tmp_path"]))
        made = test(**{**fixtures, **own, **case})
        if inspect.iscoroutine(made):
            asyncio.run(made)


def _label(number: int, case: Mapping[str, Any], show: Callable[[Any], object] | None) -> str:
    values = ((name, value, show(value) if show else None) for name, value in case.items())
    return f"{number}: " + ", ".join(
        f"{name}={_SHORT.repr(value)}" if shown is None else str(shown)
        for name, value, shown in values
    )
