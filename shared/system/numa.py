"""Reads the NUMA nodes of this machine from sysfs, and places the new memory of a
thread on one of them.

On a machine with one node, or if sysfs shows none, `node_of` returns UNKNOWN.
`near(UNKNOWN)` changes nothing. For the background see
https://docs.kernel.org/admin-guide/mm/numaperf.html.
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
_MOST_CPUS = 8192  # the most that the kernel can be built for


def nodes(system: Path = SYSTEM) -> dict[int, set[int]]:
    """Return the CPU numbers of each node, by node number.

    A node whose list of CPUs cannot be read is left out.
    """
    found = {}
    for path in system.glob("node*/cpulist"):
        if number := re.fullmatch(r"node(\d+)", path.parent.name):
            try:
                found[int(number[1])] = parse_cpus(path.read_text())
            except (OSError, ValueError) as error:
                log.debug("%s: %s", path, error)
    return found


def parse_cpus(text: str) -> set[int]:
    """Return the CPU numbers in a list of the kernel's form, such as "0-3,8".

    Raises ValueError for other text.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if int(last or first) >= _MOST_CPUS:
            raise ValueError(f"there is no CPU {last or first}")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def node_of(cpus: set[int], system: Path = SYSTEM) -> int:
    """Return the node that all these CPUs are on, or UNKNOWN if they are on several
    nodes or none, or if there is only one node.
    """
    known = nodes(system)
    touched = [node for node, its in known.items() if its & cpus]
    return touched[0] if len(known) > 1 and len(touched) == 1 else UNKNOWN


@contextmanager
def near(node: int, system: Path = SYSTEM) -> Iterator[None]:
    """Context manager. While it is active, this thread is pinned to the CPUs of `node`,
    so that its new pages are allocated on that node.

    The kernel takes a page from the node of the CPU that first touches the page, as
    long as that node has free pages. If the node is unknown, or if this process is not
    allowed to run on any CPU of the node, the thread is not pinned. On exit, the thread
    gets its former CPUs back.
    """
    here = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, nodes(system)[node])
    except (
        KeyError,
        OSError,
    ) as error:  # the node is unknown, or this process may use none of its CPUs
        log.debug(
            "memory may come from any NUMA node, because this thread cannot run on node %d: %r",
            node,
            error,
        )
    try:
        yield
    finally:
        os.sched_setaffinity(0, here)
