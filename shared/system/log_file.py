"""Opens the log of a private daemon, which must be a regular file of this user."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ckptd.shared import owners


def open_log(path: Path) -> int:
    """Return a descriptor that appends to the log. The caller closes it.

    Raises OSError if the log cannot be opened or belongs to another user: that user
    could read the log, or make the daemon write elsewhere.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, or a FIFO without a reader
            raise OSError(f"{path} is not a regular file: remove it") from None
        raise
    status = os.fstat(fd)
    strange = not owners.is_trusted(status.st_uid) and not owners.owns_new_files(
        path.parent, None, status.st_uid
    )
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or strange:
        os.close(fd)
        raise OSError(
            f"{path} is not a regular file of uid {os.geteuid()} without other hard links: remove "
            f"it"
        )
    return fd
