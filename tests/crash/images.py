"""File systems in memory for tests: an ext4 that can lose its power, and one whose disk
can lose writes.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

PAGE = os.sysconf("SC_PAGESIZE")
EXT4_IOC_SHUTDOWN = 0x8004587D  # linux/fs/ext4/ext4.h
FLUSHED, NOT_FLUSHED = 1, 2
"""Whether the journal of the file system itself is written to the disk before the cut.
Data that was not synced is lost in both cases.
"""


class Unavailable(Exception):
    """Raised when this process cannot mount an image here."""


class Image:
    """An ext4 in a file in memory, mounted at `where`. Raises Unavailable."""

    def __init__(self, megabytes: int = 64) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="ckptd-image-", dir="/dev/shm"))
        self.file, self.where = self.place / "image", self.place / "mnt"
        self.where.mkdir()
        try:
            self.make(megabytes)
            self.mount()
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            raise Unavailable(f"mounting an image needs root and mkfs.ext4: {error}") from None

    def make(self, megabytes: int) -> None:
        with self.file.open("wb") as file:
            file.truncate(megabytes << 20)
        call("mkfs.ext4", "-q", "-F", str(self.file))

    def mount(self) -> None:
        call("mount", "-o", "loop,errors=continue", str(self.file), str(self.where))

    def stop(self, how: int) -> None:
        """Stop the file system as a power cut would."""
        fd = os.open(self.where, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(fd)

    def again(self) -> None:
        """Unmount and mount a copy, which drops everything that is only in the page
        cache.

        A mount of the same file would bring back the file system that was stopped, with
        EIO for every call, while a process in another mount namespace still has it.
        """
        unmount(self.where)
        copy = self.place / "copy"
        call("cp", "--sparse=always", str(self.file), str(copy))
        copy.replace(self.file)
        self.mount()

    def close(self) -> None:
        unmount(self.where)
        self.remove()

    def remove(self) -> None:
        if self.where.is_mount():
            unmount(self.where)
        shutil.rmtree(self.place)


class FewInodes(Image):
    """An ext4 with room for few files."""

    def make(self, megabytes: int) -> None:
        with self.file.open("wb") as file:
            file.truncate(megabytes << 20)
        call("mkfs.ext4", "-q", "-F", "-N", "128", str(self.file))


class ThinImage(Image):
    """An ext4 on a disk that has promised more room than it has.

    A starved disk accepts writes into the page cache, and loses them.
    """

    def make(self, megabytes: int) -> None:
        self.thin = self.place / "thin"
        self.thin.mkdir()
        call("mount", "-t", "tmpfs", "-o", f"size={3 * megabytes}m", "ckptd-thin", str(self.thin))
        sparse, self.file = self.thin / "sparse", self.thin / "image"
        with sparse.open("wb") as file:
            file.truncate(megabytes << 20)
        call("mkfs.ext4", "-q", "-F", "-b", str(PAGE), "-E", "nodiscard", str(sparse))
        # Keeps room for journal and tables.
        call("cp", "--sparse=never", str(sparse), str(self.file))
        sparse.unlink()
        self.mount()
        call("fstrim", str(self.where))
        unmount(self.where)

    def mount(self) -> None:
        """Mount with requests of one page each.

        If only half of a larger request had room, the loop device would report success.

        Blocks are as large as pages, too: a request of two smaller blocks may lie
        across the edge of a page.
        """
        super().mount()
        device = next(
            line.split()[0]
            for line in Path("/proc/mounts").read_text().splitlines()
            if line.split()[1] == str(self.where)
        )
        Path("/sys/block", Path(device).name, "queue/max_sectors_kb").write_text(str(PAGE >> 10))

    def again(self) -> None:
        """Unmount and mount again: a copy would have no room beside the image."""
        unmount(self.where)
        self.mount()

    def starve(self) -> None:
        with (self.thin / "ballast").open("wb", buffering=0) as file:
            for size in (1 << 20, PAGE):
                fill(file, size)

    def feed(self) -> None:
        (self.thin / "ballast").unlink(missing_ok=True)

    def remove(self) -> None:
        if self.where.is_mount():
            unmount(self.where)
        if hasattr(self, "thin") and self.thin.is_mount():
            unmount(self.thin)
        super().remove()


def fill(file: io.FileIO, size: int) -> None:
    """Write zeros, `size` bytes at a time, until there is no room."""
    try:
        while file.write(bytes(size)):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def unmount(where: Path) -> None:
    for _ in range(100):
        if subprocess.run(["umount", str(where)], check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.05)  # a killed process may not have closed its files yet
    raise RuntimeError(f"{where} is still in use")


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
