"""NUMA nodes as sysfs shows them, and memory near to one of them. https://docs.kernel.org/admin-guide/mm/numaperf.html

Where there is one node, or none is known, everything is near and nothing is done.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("ckptd.numa")

SYSTEM = Path("/sys/devices/system/node")
UNKNOWN = -1


def nodes(system: Path = SYSTEM) -> dict[int, set[int]]:
    """The CPUs of each node."""
    found = {}
    for path in system.glob("node*/cpulist"):
        if number := re.fullmatch(r"node(\d+)", path.parent.name):
            try:
                found[int(number[1])] = _cpus(path.read_text())
            except (OSError, ValueError) as error:
                log.debug("%s: %s", path, error)
    return found


def _cpus(text: str) -> set[int]:
    """ "0-3,8" """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def node_of(cpus: set[int], system: Path = SYSTEM) -> int:
    """The one of several nodes that all these CPUs are on, or UNKNOWN."""
    known = nodes(system)
    touched = [node for node, its in known.items() if its & cpus]
    return touched[0] if len(known) > 1 and len(touched) == 1 else UNKNOWN


@contextmanager
def near(node: int, system: Path = SYSTEM) -> Iterator[None]:
    """Pages that this thread touches first are of the node, as long as it has free ones: the thread runs there meanwhile."""
    here = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, nodes(system)[node])
    except (KeyError, OSError) as error:  # no such node, or all its CPUs are forbidden to this process
        log.debug("memory is not asked of NUMA node %d: %r", node, error)
    try:
        yield
    finally:
        os.sched_setaffinity(0, here)
