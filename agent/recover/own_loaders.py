"""Calls the methods with which the caller's objects load their state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptd.agent.recover.options import Options
from ckptd.agent.state.optimizers import class_of
from ckptd.shared.errors import CkptdError, RecoveryFailed


def load_into(place: Any, state: Any, path: str, options: Options, **arguments: Any) -> Any:
    """Call an object's own `load_state_dict`, and return what it returns.

    Raises RecoveryFailed for an exception in it. `options` are the options of the
    recovery.
    """
    with loader_of(place, path, options):
        return place.load_state_dict(state, **arguments)


@contextmanager
def loader_of(place: Any, path: str, options: Options) -> Iterator[None]:
    """Context manager.

    Raise RecoveryFailed for an exception of the caller's object in its loader.

    The error has the call of `recover` that leaves this object as it is. `options` are
    the options of the recovery.
    """
    try:
        yield
    except CkptdError:
        raise
    except Exception as error:
        raise RecoveryFailed(
            f"{path or 'the state'}: load_state_dict() of {class_of(place)} raised {error!r}; the "
            f"state is partly overwritten: "
            "rebuild it, and make this object ready for its state before the recovery. To leave "
            "this object as it is, call "
            f"{options.call_that_keeps(path)}",
            overwritten=True,
        ) from error
