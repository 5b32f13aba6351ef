"""Finds the segments of a root that was moved: they lie in the directory of its former
path, and their marks have its identity.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptd.daemon.memory.foreign_memory import HeldElsewhere, read_held
from ckptd.daemon.memory.slots import Slots
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError
from ckptd.shared.formats.segment import RootMark, read_header, read_root_mark
from ckptd.shared.location import Location, located
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system.fs import READ, closing_at_end

log = logging.getLogger("ckptd.slots")


def gather(slots: Slots, root: Location, disks: Path | None) -> list[HeldElsewhere]:
    """Move the segments of this root from the directories of its former paths to those
    of `slots`.

    `slots` must have the mark of the root. disks: the directory of this host below the
    daemon's `state_dir`, if segments may be on the disk. Segments that a daemon uses
    stay where they are, and so do those of a root that was copied and not moved. Any
    thread may call this before the slots are adopted.

    Return the snapshots of this root that another daemon keeps from being moved.
    """
    assert slots.mark is not None
    moved: dict[str, bool] = {}
    left: list[HeldElsewhere] = []
    for directory in _beside(slots.path.parent, slots.path):
        left += _gather(
            directory, slots.mark, moved, root, lambda fd, name: slots.move_in(fd, name)
        )
    if disks is not None:
        for directory in sorted(disks.glob("*/segments")):
            left += _gather(
                directory,
                slots.mark,
                moved,
                root,
                lambda fd, name: slots.move_in(fd, name, on_disk=True),
            )
    return left


def held_elsewhere(
    directories: Iterable[Path], root: Location, identity: str
) -> Iterator[HeldElsewhere]:
    """Yield the newest sealed snapshot of each job that was saved for a root, by its
    identity, when it was at another path. Changes nothing.
    """
    mark, moved = RootMark(identity, str(root)), dict[str, bool]()
    for directory in directories:
        for held in read_held(directory):
            place = held.root.place
            if held.root.identity == identity and _has_moved(place, mark, moved, root):
                yield HeldElsewhere(directory, held, is_used(directory))


def is_used(directory: Path) -> bool:
    """Return True if a daemon has locked a directory of segments."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with closing_at_end(os.open(directory, flags)) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # there is none, or it belongs to another user
    return False


def _beside(shm_dir: Path, own: Path) -> list[Path]:
    return [path for path in sorted(shm_dir.glob(f"ckptd-{os.getuid()}-*")) if path != own]


def _gather(
    directory: Path,
    mark: RootMark,
    moved: dict[str, bool],
    root: Location,
    move: Callable[[int, str], None],
) -> list[HeldElsewhere]:
    """Move the segments of this root out of a directory. Return the snapshots that stay
    there, because another daemon uses the directory.
    """
    try:
        with _opened(directory) as fd:
            found = [
                (name, place)
                for name, place in _marked(fd, mark.identity)
                if place != mark.place and _has_moved(place, mark, moved, root)
            ]
            if not found:
                return []
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name, place in found:
                move(fd, name)
                log.info(
                    "segment %s is taken over from %s: the root was at %s before",
                    name,
                    directory,
                    place,
                )
        with suppress(OSError):  # the directory holds other files
            os.rmdir(directory)
    except BlockingIOError:
        log.warning(
            "segments of this root in %s are left alone, because another daemon uses that "
            "directory",
            directory,
        )
        return list(held_elsewhere([directory], root, mark.identity))
    except OSError as error:
        log.debug("%s is passed over: %s", directory, error)
    return []


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_at_end(os.open(directory, flags)) as fd:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError("it belongs to another user")
        yield fd


def _marked(directory: int, identity: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each segment of the root with this identity, and the place that
    its mark names.
    """
    for name in sorted(filter(names.is_segment_file, os.listdir(directory))):
        try:
            with closing_at_end(os.open(name, READ | os.O_RDONLY, dir_fd=directory)) as fd:
                mark = read_root_mark(fd, read_header(fd))
        except IntegrityError:
            mark = None
        if mark is not None and mark.identity == identity:
            yield name, mark.place


def _has_moved(place: str, mark: RootMark, known: dict[str, bool], root: Location) -> bool:
    """Return True unless another root of this identity is still at the former place.

    If there is one, the root of this daemon is a copy of it, and has not moved.
    """
    if place not in known:
        try:
            known[place] = not place or _is_no_copy(located(place), mark.identity, root)
        except (OSError, CkptdError) as error:
            log.warning(
                "segments that were made for this root at %s are left alone, because that place "
                "cannot be read: %s",
                place,
                error,
            )
            known[place] = False
    return known[place]


def _is_no_copy(former: Location, identity: str, root: Location) -> bool:
    return open_root(former).known_identity() != identity or (
        isinstance(former, Path) and isinstance(root, Path) and os.path.samefile(former, root)
    )
