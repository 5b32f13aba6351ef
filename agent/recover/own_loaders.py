"""Calls the methods with which the caller's objects load their state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptd.agent.state.optimizers import class_of
from ckptd.shared.errors import CkptdError, RecoveryFailed


def load_into(place: Any, state: Any, path: str, **options: Any) -> Any:
    """Return what an object's own `load_state_dict` returns. Raises RecoveryFailed for an exception in it."""
    with loader_of(place, path):
        return place.load_state_dict(state, **options)


@contextmanager
def loader_of(place: Any, path: str) -> Iterator[None]:
    """Raise RecoveryFailed for an exception in the caller's object, while it loads its state."""
    try:
        yield
    except CkptdError:
        raise
    except Exception as error:
        raise RecoveryFailed(
            f"{path or 'the state'}: load_state_dict() of {class_of(place)} raised {error!r}; the state is partly overwritten: "
            f"rebuild it, and leave this object as it is with recover(keep=[{path!r}]), or make it ready for its state first",
            overwritten=True,
        ) from error
