"""Decodes documents in a process whose memory is limited, and returns the errors."""

from __future__ import annotations

import json
import resource
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from ckptd.shared.formats import bounds
from tests.support.forks import context

ROOM = 1 << 30
"""Number of bytes that a document may cost at most, beyond what the process had before.
20 MB of empty lists would cost 1.6 GB.
"""
SCALE = 16
"""Factor by which limits, documents and memory are made smaller, so that the same
refusals take seconds instead of minutes.
"""


def outcomes(
    module: str, function: str, documents: dict[str, bytes], place: Path, scale: int = SCALE
) -> dict[str, tuple[str, str]]:
    """Decode each document with `module.function`, all in one process of limited
    memory. Return the class and message of each error.

    `scale` divides the memory and the limit of objects.
    """
    paths = {name: place / str(number) for number, name in enumerate(documents)}
    for name, path in paths.items():
        path.write_bytes(documents[name])
    outcome = place / "outcome"
    process = context().Process(target=_decode, args=(module, function, scale, paths, outcome))
    process.start()
    process.join()
    assert process.exitcode == 0
    return {name: tuple(said) for name, said in json.loads(outcome.read_text()).items()}


def _decode(module: str, function: str, scale: int, paths: dict[str, Path], outcome: Path) -> None:
    bounds.MAX_OBJECTS //= scale
    decode = attrgetter(function)(import_module(module))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + ROOM // scale
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    said = {}
    for name, path in paths.items():
        try:
            decode(path.read_bytes())
            said[name] = ("nothing", "")
        except BaseException as error:
            said[name] = (type(error).__name__, str(error))
    outcome.write_text(json.dumps(said))
