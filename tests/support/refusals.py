"""Checks a refusal of a recovery: its sentence, the exit that the sentence gives, and
that the state is as it was to the bit.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckptd.shared.errors import StructureMismatch
from tests.oracle.prints import text
from tests.support.saved_states import Checkpoint

_CALL = re.compile(
    r"; nothing was written(?:\. To recover the rest, call recover\(state, (.+)\))?$"
)


def exit_of(error: StructureMismatch) -> dict[str, Any]:
    """Return the options of the call that a refusal gives, as a user would paste them.

    Empty if it gives none.
    """
    found = _CALL.search(str(error))
    assert found is not None, str(error)
    # The text of a call, which is evaluated as its reader would.
    made: dict[str, Any] = eval(f"dict({found[1] or ''})")
    return made


def refusal(checkpoint: Checkpoint, state: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return the sentence of a refusal and the options that it gives.

    Asserts that no bit of the state has changed.
    """
    before = text(state)
    with pytest.raises(StructureMismatch) as caught:
        checkpoint.recover(state, **options)
    assert text(state) == before
    return str(caught.value).partition("; nothing was written")[0], exit_of(caught.value)


def refuses(
    checkpoint: Checkpoint, state: Any, words: str, call: dict[str, Any], **options: Any
) -> None:
    """Assert that a state is refused with these words, and that the call that the
    refusal gives then recovers the rest.
    """
    assert refusal(checkpoint, state, **options) == (words, call)
    assert call
    checkpoint.recover(state, **{**options, **call})
