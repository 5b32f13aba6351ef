"""Says where the root of a rig lies: in a directory or, with `--store`, in an object
store.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from tests.crash.images import Unavailable
from tests.support import stores
from tests.support.daemons import Home, home

Where = Callable[[], AbstractContextManager[Home]]


@contextmanager
def in_store(kind: str) -> Iterator[Home]:
    """Context manager.

    Yields a home whose root is in an object store. Raises Unavailable if the store's
    server is not installed.

    kind: one of `stores.KINDS`.
    """
    run_server, needs = stores.KINDS[kind]
    if stores.program(needs) is None:
        raise Unavailable(f"{needs} is not installed")
    with tempfile.TemporaryDirectory() as there, run_server(Path(there) / kind) as server:
        stores.make_bucket(server, "bucket")
        with stores.home_in(server) as place:
            yield place


def add_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        choices=list(stores.KINDS),
        help="the object store with the root; default: a directory",
    )


def where(kind: str | None) -> Where:
    """Return the place that `--store` names."""
    return home if kind is None else partial(in_store, kind)
