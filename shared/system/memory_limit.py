"""Reads the memory limits of the control groups of this process, and how much of them is
left for slots.

Pages of a tmpfs are charged to the group of the process that writes them first, which
for slots is the daemon. The kernel kills a process of a group that reaches its limit,
however much of the tmpfs is free. Both versions of control groups are read. For the
background see https://docs.kernel.org/admin-guide/cgroup-v2.html#memory, and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("ckptd.memory")

_MOST_RESERVED = 1 << 30
_NO_LIMIT = 1 << 60
"""The kernel writes the largest multiple of a page in 63 bits where version 1 has no
limit. No machine has this much memory.
"""
_MOUNT = re.compile(r"(?:\S+ ){3}(\S+) (\S+) .* - (cgroup2?) \S+ (\S+)")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory limit of one control group.

    group: the directory of the group. limit: its limit in bytes. used: the bytes that
    the group uses and that the kernel cannot reclaim.
    """

    group: Path
    limit: int
    used: int

    @property
    def free(self) -> int:
        """The bytes that new slots may take.

        A tenth of the limit, and at most 1 GiB, is reserved for the daemon and the other
        processes of the group, which need more memory after the slots are made.
        """
        return max(0, self.limit - self.used - min(self.limit // 10, _MOST_RESERVED))


def tightest(system: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit that leaves the least memory for slots, of all groups that this
    process is in, or None if no group has a limit.

    The limits of a group and of all its parents apply. system: the root directory of the
    machine.
    """
    found = (_limit(group) for group in _groups(system))
    return min(filter(None, found), key=lambda limit: limit.free, default=None)


def _groups(system: Path) -> Iterator[Path]:
    """Yield the directories of the groups that this process is in, with their parents,
    as far as these can be seen from here: a container may see its own group only.
    """
    try:
        memberships = (system / "proc/self/cgroup").read_text().splitlines()
        mounts = (system / "proc/self/mountinfo").read_text().splitlines()
    except OSError as error:  # no /proc
        log.debug("the control groups of this process are unknown: %s", error)
        return
    own = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = Path(path)
    for line in mounts:
        if (found := _MOUNT.match(line)) is None:
            continue
        root, mounted, kind, options = found.groups()
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top = system / _unescaped(mounted).lstrip("/")
        group = top
        if own[kind].is_relative_to(_unescaped(root)) and ".." not in own[kind].parts:
            group = top / own[kind].relative_to(_unescaped(root))
        yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


def _unescaped(path: str) -> str:
    """Return a path of mountinfo with its spaces, which the kernel writes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), path)


def _limit(group: Path) -> MemoryLimit | None:
    """Return the limit of this group alone, or None if it has none.

    A group of version 2 that exceeds `memory.high` is slowed down until it uses less,
    which slots never do.
    """
    limits = [
        number
        for name in ("memory.limit_in_bytes", "memory.max", "memory.high")
        if (number := _number(group / name)) is not None and number < _NO_LIMIT
    ]
    usage = _number(group / "memory.usage_in_bytes")
    if usage is None:
        usage = _number(group / "memory.current")
    if not limits or usage is None:
        return None
    return MemoryLimit(group, min(limits), max(0, usage - _reclaimable(group)))


def _reclaimable(group: Path) -> int:
    """Return the bytes of the page cache and of other caches in this group and those
    below it. Pages of a tmpfs are not among them.
    """
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError as error:
        log.debug("%s", error)
        return 0
    stat = dict(line.split(maxsplit=1) for line in lines if " " in line)
    # In version 1, only the names that begin with `total_` count the groups below.
    prefix = "total_" if "total_inactive_file" in stat else ""
    names = (f"{prefix}inactive_file", f"{prefix}active_file", "slab_reclaimable")
    return sum(int(stat.get(name, 0)) for name in names)


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
