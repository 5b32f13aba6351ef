"""Trees of files as the kernel shows control groups, below a directory that plays the
root of a machine.
"""

from __future__ import annotations

from pathlib import Path

UNLIMITED = 9_223_372_036_854_771_712


class System:
    """A machine with `proc/self/cgroup` and `proc/self/mountinfo`.

    A process is in the group `v1` of version 1, or `v2` of version 2, or both. `root` is
    the group that is mounted. The attributes `v1` and `v2` are the directories where the
    groups are mounted.
    """

    def __init__(
        self,
        place: Path,
        v1: str = "",
        v2: str = "",
        root: str = "/",
        mounted: str = "/sys/fs/cgroup/memory",
    ) -> None:
        proc = place / "proc/self"
        proc.mkdir(parents=True)
        self.v1 = place / mounted.lstrip("/")
        self.v2 = place / "sys/fs/cgroup/unified"
        groups, mounts = ["8:pids:/elsewhere"], ["22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"]
        mounts.append("33 31 0:31 / /sys/fs/cgroup/pids rw shared:9 - cgroup cgroup rw,pids")
        if v1:
            groups.append(f"4:memory:{v1}")
            where = mounted.replace(" ", "\\040")
            mounts.append(f"35 31 0:32 {root} {where} rw shared:7 - cgroup cgroup rw,memory")
        if v2:
            groups.append(f"0::{v2}")
            mounts.append(f"41 31 0:38 {root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
        (proc / "cgroup").write_text("".join(f"{line}\n" for line in groups))
        (proc / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))


def v1(group: Path, limit: int | None, used: int, cache: int = 0) -> None:
    """Write the files of a group of version 1."""
    group.mkdir(parents=True, exist_ok=True)
    limit = UNLIMITED if limit is None else limit
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(
        f"cache {cache}\ninactive_file 1\nactive_file 1\n"
        f"total_inactive_file {cache - cache // 3}\ntotal_active_file {cache // 3}\n"
    )


def v2(group: Path, limit: int | None, used: int, cache: int = 0) -> None:
    """Write the files of a group of version 2."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (group / "memory.high").write_text("max\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(
        f"anon 5\nfile {cache}\nshmem 7\ninactive_file {cache // 2}\nactive_file {cache // 4}\n"
        f"slab_reclaimable {cache - cache // 2 - cache // 4}\n"
    )
