"""Checks for `ckptd doctor` whether a node has everything that a daemon needs, and how
much fits.

Each check is a function that returns or yields `Check` values and changes nothing. Only
`check_root` makes a directory in the root, and removes it again. No check talks to a
daemon.
"""

from __future__ import annotations

import errno
import getpass
import importlib.util
import os
import resource
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptd.daemon.commands.doctor_check import FAILED, OK, WARNING, Check
from ckptd.daemon.commands.doctor_costs import check_costs
from ckptd.daemon.config import Config
from ckptd.daemon.memory.foreign_memory import described, read_held
from ckptd.daemon.process import limits
from ckptd.daemon.process.peers import SO_PEERPIDFD
from ckptd.shared import native_code
from ckptd.shared.errors import CkptdError, Forbidden
from ckptd.shared.location import Location, Url
from ckptd.shared.storage import posix_probe
from ckptd.shared.storage.locate import object_storage, open_root
from ckptd.shared.system import machine, memory_limit, owners
from ckptd.shared.system.memory_limit import MemoryLimit
from ckptd.shared.units import size_text

VOLATILE = {
    machine.TMPFS: "a tmpfs, which a reboot empties",
    0x794C7630: "an overlay, which usually ends with its container",
}
SHARED = {0x6969: "NFS", 0x0BD00BD0: "Lustre"}
TRIED_ON = "one NVIDIA H200 (driver 580.159.04, torch 2.11, 2026-11-28)"
LEAST_FREE = 1 << 30  # bytes; a root with less free space gets a warning
LEAST_INODES = 10_000
_FIRST_USER = 1000  # systemd's SYSTEM_UID_MAX is 999
_CLOCK_SECONDS = 2.0


def check_all(config: Config, *, with_root: bool = True) -> Iterator[Check]:
    """Run the checks for a daemon with these settings, and yield the results.

    Without `with_root` the checks of the root are left out.
    """
    plan = limits.DescriptorPlan(config.segments, config.open_files)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield check_files(plan, soft, hard, config.max_connections)
    yield check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield accelerators()
    yield check_shared_memory(
        config.shm_dir, config.slots, config.shm_quota, config.segments - config.slots,
        memory_limit.tightest(),
    )  # fmt: skip
    if config.shm_dir.is_relative_to("/dev/shm"):
        yield check_remove_ipc(os.geteuid(), removes_ipc(Path("/")), _lingers())
    if with_root:
        yield from check_root(config.root)
        yield check_memory(config.root, config.shm_dir)
        yield from check_costs(config)
    if config.stage is not None:
        yield from check_stage(config.stage)
    yield check_state_dir(config.state_dir)
    yield check_socket_directory(config.socket.parent)
    yield from check_kernel()
    yield check_native_code()
    yield check_event_loop(importlib.util.find_spec("uvloop") is not None)


def check_files(plan: limits.DescriptorPlan, soft: int, hard: int, most: int) -> Check:
    """Check that the hard limit of open files is enough for `most` clients.

    The daemon raises its soft limit to the hard limit.
    """
    limit = 1 << 30 if hard == resource.RLIM_INFINITY else hard
    fit, values = (
        plan.ranks(limit),
        {"soft": soft, "hard": hard, "ranks_fit": plan.ranks(limit), "needed": plan.needed(most)},
    )
    if fit == 0:
        text = (
            f"at most {limit} open files (RLIMIT_NOFILE): one rank needs {plan.least}; "
            f"{limits.HOW_TO_RAISE}"
        )
        return Check("open files", FAILED, text, values)
    if fit < most:
        text = (
            f"{fit} ranks fit into {limit} open files (RLIMIT_NOFILE), and max_connections is "
            f"{most}: for all of them "
            f"{limits.HOW_TO_RAISE}, to {plan.needed(most)} (LimitNOFILE={plan.needed(most)})"
        )
        return Check("open files", WARNING, text, values)
    return Check(
        "open files",
        OK,
        f"{fit} ranks fit into {limit} open files (max_connections is {most})",
        values,
    )


def check_locked_memory(limit: int, amd: Path = Path("/dev/kfd")) -> Check:
    """Check the limit of locked memory, where it may matter.

    It is that of trainers with GPUs, which lock their slots: the daemon locks nothing.
    NVIDIA's driver does not check it. `amd` exists if AMD's driver is loaded.
    """
    values = {"limit": None if limit == resource.RLIM_INFINITY else limit}
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", OK, "no limit (RLIMIT_MEMLOCK)", values)
    if amd.exists():
        return Check(
            "locked memory", WARNING,
            f"at most {size_text(limit)} (RLIMIT_MEMLOCK): whether AMD's driver counts the slots "
            f"that a trainer locks against it is not known; start the trainer with "
            f"LimitMEMLOCK=infinity or `ulimit -l unlimited` if it warns that memory for "
            f"copies could not be page-locked", values,
        )  # fmt: skip
    return Check(
        "locked memory",
        OK,
        f"at most {size_text(limit)} (RLIMIT_MEMLOCK), which NVIDIA's driver does not count the "
        f"slots of a trainer against",
        values,
    )


def accelerators() -> Check:
    """Tell on which accelerators ckptd itself has been run."""
    return Check(
        "accelerators",
        OK,
        f"copies from accelerators were tried on {TRIED_ON}, changes since then on a CPU only, "
        f"and nothing on several GPUs, other kinds, or ROCm; `make gpu` in a clone of ckptd tries "
        f"yours; a write through `.data` during a copy is not noticed, and `ckptd status` and the "
        f"metric ckptd_unlocked_bytes tell of slots that are not page-locked",
        {"tried_on": TRIED_ON},
    )


def check_shared_memory(
    path: Path, slots: int, quota: int, copies: int = 0, limit: MemoryLimit | None = None
) -> Check:
    """Check the tmpfs at `path`, and tell the largest state of all local ranks together
    for which `slots` slots fit.

    quota: most bytes of all slots; 0 means nine tenths of the tmpfs. copies: the segments
    for copies of another node, for each rank. limit: the memory limit of this process,
    which a daemon started in its place has, too.
    """
    name = "shared memory"
    try:
        free, total = shutil.disk_usage(path).free, shutil.disk_usage(path).total
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        return Check(
            name, FAILED, f"{path} cannot be used: {error.strerror}; set shm_dir to a tmpfs"
        )
    kind = machine.file_system(path)
    if kind != machine.TMPFS:  # no control group is charged for a disk
        limit = None
    most = min(free, quota or total * 9 // 10, free if limit is None else limit.free)
    largest = most // (slots + copies)
    values = {
        "path": str(path),
        "total_bytes": total,
        "free_bytes": free,
        "largest_state_bytes": largest,
        "slots": slots,
        "replica_slots": copies,
        "memory_limit_bytes": None if limit is None else limit.limit,
        "memory_limit_free_bytes": None if limit is None else limit.free,
        "control_group": None if limit is None else str(limit.group),
    }
    more = f" and {copies} for copies of another node" if copies else ""
    fits = (
        f"with {slots} slots{more} one state of {size_text(largest)} fits, all local ranks together"
    )
    limited = ""
    if limit is not None:
        limited = (
            f", and the memory limit of {size_text(limit.limit)} of {limit.group} leaves "
            f"{size_text(limit.free)} for slots"
        )
    text = f"{path} has {size_text(free)} free of {size_text(total)}{limited}: {fits}"
    if not writable:
        return Check(
            name,
            FAILED,
            f"{path} cannot be written by this user; set shm_dir to another tmpfs",
            values,
        )
    if kind != machine.TMPFS:
        return Check(
            name,
            WARNING,
            f"{text}, but it is not a tmpfs: copies go to a disk, and training waits for it; set "
            f"shm_dir to a tmpfs",
            {**values, "magic": kind},
        )
    if largest < 64 << 20:
        text += (
            "; raise the limit (`--memory` of a container, MemoryMax= of a unit)"
            if limit is not None and most == limit.free
            else "; make it larger (`--shm-size` of a container, `mount -o remount,size=`)"
        )
        return Check(name, WARNING, text, values)
    return Check(name, OK, text, values)


def removes_ipc(system: Path) -> bool:
    """Return True if systemd-logind runs and has RemoveIPC=yes, its default: it then
    deletes what a user has in /dev/shm when the last session of the user ends;
    logind.conf(5).

    system: the root directory of the machine.
    """
    if not (system / "run/systemd/users").is_dir():
        return False
    places = [system / place / "systemd" for place in ("usr/lib", "run", "etc")]
    mains = [file for place in places if (file := place / "logind.conf").is_file()]
    more = {file.name: file for place in places for file in place.glob("logind.conf.d/*.conf")}
    removes = True
    for file in [*mains[-1:], *(more[name] for name in sorted(more))]:
        for line in file.read_text(errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "RemoveIPC":
                removes = value.strip().lower() not in ("no", "false", "off", "0", "n", "f")
    return removes


def _lingers() -> bool:
    try:
        return os.path.exists(f"/var/lib/systemd/linger/{getpass.getuser()}")
    except (OSError, KeyError):  # the user has no name
        return False


def check_remove_ipc(uid: int, removes: bool, lingers: bool) -> Check:
    """Check that systemd-logind does not delete the slots of this user.

    It spares the users of the system, whose uid is below 1000.
    """
    values = {"removes": removes, "lingers": lingers, "uid": uid}
    if not removes or uid < _FIRST_USER or lingers:
        return Check("RemoveIPC", OK, "systemd-logind leaves the slots of this user alone", values)
    return Check(
        "RemoveIPC", WARNING,
        "systemd-logind deletes the slots of this user in /dev/shm, and the snapshots in them, "
        "when the last session of the user ends: run `loginctl enable-linger`, or set RemoveIPC=no "
        "in /etc/systemd/logind.conf", values,
    )  # fmt: skip


def check_root(root: Location) -> Iterator[Check]:
    """Check the place of the checkpoints: a directory, or the URL of a prefix in an
    object store.
    """
    return _check_directory(root) if isinstance(root, Path) else _check_store(root)


def check_memory(root: Location, shm_dir: Path) -> Check:
    """Check that the snapshots in memory were saved for the root that is there now."""
    name = "identity"
    try:
        identity = open_root(root).known_identity()
    except (CkptdError, OSError) as error:
        return Check(
            name,
            FAILED,
            f"the identity of the root at {root} cannot be read: {error}",
            {"identity": None, "foreign": []},
        )
    held = list(read_held(shm_dir / machine.segment_directory(root)))
    foreign = [one for one in held if one.root.identity != identity]
    values = {"identity": identity, "foreign": [one.report() for one in foreign]}
    if foreign:
        return Check(name, WARNING, described(foreign[0], str(root), identity), values)
    if identity is None:
        return Check(
            name,
            OK,
            f"the root at {root} has no identity yet: the first daemon there gives it one",
            values,
        )
    jobs = f"; its jobs in memory: {len(held)}" if held else ""
    return Check(name, OK, f"the root at {root} has the identity {identity}{jobs}", values)


def _check_store(root: Url) -> Iterator[Check]:
    """Check that the store can be written, and measure what it guarantees."""
    try:
        storage = object_storage(root)
        storage.serve(f"doctor-{os.getpid()}").close()
        once, copies = storage.measure(), storage.copies()
    except (CkptdError, OSError) as error:
        yield Check("root", FAILED, str(error), {"url": str(root)})
        return
    yield Check(
        "root", OK, f"{root} can be written, listed, read in part and deleted", {"url": str(root)}
    )
    values = {"creates_once": once}
    if once:
        yield Check(
            "exclusive creation",
            OK,
            "of several callers that create an object, one succeeds",
            values,
        )
    else:
        yield Check(
            "exclusive creation", WARNING,
            "the store lets several callers create the same object: attempts are claimed by names "
            "of their own, and two daemons that start "
            "the same job at the same moment may both have to try again", values,
        )  # fmt: skip
    if copies:
        text = "the store copies objects, which deltas and tensors that do not change need"
        yield Check("copies by the store", OK, text, {"copies": True})
    else:
        text = (
            "the store cannot copy an object: deltas are off, and tensors that have not changed "
            "are written again"
        )
        yield Check("copies by the store", WARNING, text, {"copies": False})


def _remedy(error: OSError) -> str:
    return (
        "make room, or name another directory"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "name a directory of this user"
    )


def _check_directory(root: Path) -> Iterator[Check]:
    """Check the directory for checkpoints.

    If it does not exist yet, check the nearest parent that does.
    """
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    called = str(root) if place == root else f"{place} (where {root} will be made)"
    try:
        found = posix_probe.probe(place)
    except OSError as error:
        yield Check(
            "root",
            FAILED,
            f"{called} cannot be written: {error.strerror}; {_remedy(error)}",
            {"path": str(place)},
        )
        return
    values = {
        "path": str(place),
        "exists": place == root,
        "free_bytes": found.free,
        "free_inodes": found.inodes,
    }
    values |= {"uid": found.uid, "mode": f"{found.mode:o}"}
    few = found.free < LEAST_FREE or (found.inodes is not None and found.inodes < LEAST_INODES)
    count = "no limit of" if found.inodes is None else f"{found.inodes:,d}"
    yield Check(
        "root",
        WARNING if few else OK,
        f"{called} can be written; {size_text(found.free)} and {count} inodes are free"
        + ("; make room, or name another directory" if few else ""),
        values,
    )
    yield _check_owner(place, found)
    yield check_clock(found.ahead)
    for name, level, advice in (
        (
            "O_DIRECT",
            WARNING,
            "checkpoints are written through the page cache instead; with ext4 or XFS they are not",
        ),
        (
            "fsync of a directory",
            FAILED,
            "a power cut may lose a checkpoint's name on this file system; use another one",
        ),
        (
            "flock",
            FAILED,
            "two daemons, or a reader and retention, would not see each other on this file system; "
            "use another one, or mount it with locks",
        ),
        (
            "OFD locks",
            WARNING,
            "only flock is used then, by which any reader can keep others from reading; ext4, XFS "
            "and NFS 4 have both",
        ),
    ):
        if why := found.failures.get(name):
            yield Check(name, level, f"does not work in {called} ({why}): {advice}")
        else:
            yield Check(name, OK, f"works in {called}")


def check_clock(ahead: float) -> Check:
    """Check that the file system of the root and this node agree on the time."""
    values = {"ahead_seconds": ahead}
    if abs(ahead) < _CLOCK_SECONDS:
        return Check("clock", OK, "this node and the file system agree on the time", values)
    return Check(
        "clock", WARNING,
        f"the clock of the file system is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}: "
        f"ages of checkpoints are wrong by that; synchronize both clocks with NTP", values,
    )  # fmt: skip


def check_stage(stage: Path) -> Iterator[Check]:
    """Check the directory in front of the root as a root is checked, and that a reboot
    does not empty it.
    """
    for check in _check_directory(stage):
        yield replace(check, name="stage" if check.name == "root" else f"stage: {check.name}")
    if (kind := machine.file_system(machine.nearest_existing(stage))) in VOLATILE:
        yield Check(
            "stage: kind",
            WARNING,
            f"{stage} is on {VOLATILE[kind]}: checkpoints that are not uploaded yet are then lost; "
            f"name a directory on a disk",
        )


def _check_owner(place: Path, found: posix_probe.Probe) -> Check:
    mask = os.umask(0o077)
    os.umask(mask)
    mode, values = 0o666 & ~mask, {"umask": f"{mask:03o}", "file_mode": f"{0o666 & ~mask:03o}"}
    text = (
        f"{place} belongs to uid {found.uid} with mode {found.mode:04o}; new files get mode "
        f"{mode:04o} (umask {mask:03o})"
    )
    if found.stranger and os.geteuid() != 0:
        return Check(
            "permissions",
            FAILED,
            f"{found.stranger}, who could replace checkpoints there: use a directory of your own",
            values,
        )
    if found.mode & stat.S_IWOTH:
        return Check(
            "permissions", WARNING, f"{text}: every user may write there; chmod o-w {place}", values
        )
    if mode & 0o004 and found.mode & stat.S_IXOTH:
        return Check(
            "permissions",
            WARNING,
            f"{text}: every user can read checkpoints; use umask 027 or 077 if they are secret",
            values,
        )
    return Check("permissions", OK, text, values)


def check_state_dir(path: Path) -> Check:
    """Check that the journal can be written in the directory, or in the nearest parent
    that exists, and that a reboot does not empty it.
    """
    there = machine.nearest_existing(path)
    kind, values = machine.file_system(there), {"path": str(path), "exists": there == path}
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(
            "state directory",
            FAILED,
            f"{there} cannot be written by this user; set state_dir to a directory of yours",
            values,
        )
    if kind in VOLATILE:
        return Check(
            "state directory", WARNING,
            f"{path} is on {VOLATILE[kind]}: if it is lost, files of interrupted saves stay in "
            f"the root; set state_dir to a volume", values,
        )  # fmt: skip
    if kind in SHARED:
        return Check(
            "state directory", WARNING,
            f"{path} is on {SHARED[kind]}: each save waits for the journal there; set state_dir "
            f"to a directory on a local disk", values,
        )  # fmt: skip
    return Check("state directory", OK, f"the journal is kept in {path}", values)


def check_socket_directory(path: Path) -> Check:
    """Check that this user can make a socket in the directory, and that no other user
    can replace it.
    """
    name = "socket directory"
    try:
        status = path.stat()
    except FileNotFoundError:
        return Check(
            name,
            OK,
            f"{path} does not exist yet: the daemon will make it with mode 0700",
            {"path": str(path), "exists": False},
        )
    except OSError as error:
        text = f"{path} cannot be used: {error.strerror}; name another place with --socket"
        return Check(name, FAILED, text, {"path": str(path)})
    values = {
        "path": str(path),
        "exists": True,
        "uid": status.st_uid,
        "mode": f"{status.st_mode & 0o7777:o}",
    }
    text = f"{path} belongs to uid {status.st_uid} with mode {status.st_mode & 0o7777:04o}"
    try:
        owners.check_socket_directory(path / "socket")
    except Forbidden as error:
        return Check(name, FAILED, str(error), values)
    if not os.access(path, os.W_OK | os.X_OK):
        return Check(
            name,
            FAILED,
            f"{text}: this user cannot make a socket there; name another place with --socket",
            values,
        )
    return Check(name, OK, text, values)


def check_kernel() -> Iterator[Check]:
    """Check which features the kernel has: pidfds, which report the death of a trainer,
    and memfds, which replace too small a tmpfs.
    """
    release = os.uname().release
    one, other = socket.socketpair()
    with one, other:
        probes: tuple[tuple[str, Callable[[], int], str, str], ...] = (
            (
                "pidfd",
                lambda: os.pidfd_open(os.getpid()),
                WARNING,
                "a trainer's death is noticed by its locks, up to a second later; Linux 5.3 has it",
            ),
            (
                "SO_PEERPIDFD",
                lambda: one.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD),
                OK,
                "pidfd_open is used instead",
            ),
            (
                "memfd",
                lambda: os.memfd_create("ckptd-doctor"),
                WARNING,
                "there is no fallback where shared memory is too small; Linux 3.17 has it",
            ),
        )
        for name, act, level, advice in probes:
            try:
                os.close(act())
            except (OSError, AttributeError) as error:
                yield Check(
                    name,
                    level,
                    f"missing in this kernel ({release}: {error}): {advice}",
                    {"there": False, "kernel": release},
                )
            else:
                yield Check(
                    name, OK, f"available (Linux {release})", {"there": True, "kernel": release}
                )


def check_native_code() -> Check:
    """Check that a C compiler was there when ckptd was installed."""
    values = {"missing": native_code.missing()}
    if problem := native_code.problem():
        return Check("native code", WARNING, problem, values)
    return Check("native code", OK, "is installed", values)


def check_event_loop(uvloop: bool) -> Check:
    """Check that uvloop, the faster event loop, is installed."""
    if uvloop:
        return Check("uvloop", OK, "is installed", {"there": True})
    return Check(
        "uvloop",
        WARNING,
        "is not installed, so answers take longer: run `pip install uvloop`",
        {"there": False},
    )


def text(checks: list[Check]) -> str:
    """Return one line for each check. The levels warning and failed are in capitals."""
    width = max(len(check.name) for check in checks)
    return "\n".join(
        f"{check.level if check.level == OK else check.level.upper():8} {check.name:{width}}  "
        f"{check.message}"
        for check in checks
    )
