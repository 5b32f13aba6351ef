"""Waits for newer versions of a job: in the memory of this node, through its daemon, or
in the root, where no daemon runs or nothing is in memory.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType

import torch

from ckptd.agent.follow.version import Order, Version, order_of
from ckptd.agent.link.arguments import job_name
from ckptd.agent.link.launch import Place, connect_to_running, find_place
from ckptd.agent.link.loans import borrow
from ckptd.agent.read.checkpoint import PassedOver, newest_first, no_such_job
from ckptd.agent.read.loans import open_loan
from ckptd.agent.read.sources import Opened, open_checkpoint
from ckptd.agent.read.staged_source import ChunkMemory
from ckptd.agent.threads.flag import Flag
from ckptd.agent.threads.interruptible import interruptible
from ckptd.shared.errors import (
    Busy,
    DaemonUnreachable,
    IntegrityError,
    InvalidRequest,
    NotFound,
    StorageError,
    VersionGone,
    storage_errors,
)
from ckptd.shared.location import Location, located
from ckptd.shared.names import check_name
from ckptd.shared.storage.locate import open_root
from ckptd.shared.units import some_text
from ckptd.shared.wire.channel import Channel

log = logging.getLogger("ckptd.agent")

_WAIT_SECONDS = 20.0
"""The longest wait in one request to the daemon. The root is looked at in between."""
_BACK_SECONDS = 1.0
"""The seconds until a daemon that has just ended is asked for again."""


class VersionFeed:
    """An iterator over the newer and newer versions of a job, made by `follow`.

    Use it in a `for` loop, or in a `with` statement. `close` ends a loop that waits;
    any thread may call it.
    """

    def __init__(
        self,
        place: Place,
        job: str | None,
        patterns: Sequence[str],
        *,
        into: torch.nn.Module | None,
        prefix: str,
        timeout: float | None,
        interval: float,
    ) -> None:
        self._place, self._job = place, job
        self._patterns = patterns
        self._into, self._prefix = into, prefix
        self._timeout, self._interval = timeout, interval
        self._root: Location | None = place.root
        self._channel: Channel | None = None
        self._current: Version | None = None
        self._last: Order | None = None
        self._kept = ChunkMemory()
        self._was_in_memory = False
        self._torn: VersionGone | IntegrityError | None = None
        """The error that left the caller's module half overwritten."""
        self._damaged = set[Order]()
        self._closed = Flag()
        self._said = ""
        self._passed: PassedOver | None = None

    def __iter__(self) -> Iterator[Version]:
        return self

    @interruptible
    def __next__(self) -> Version:
        """Return the next version, once there is one.

        Raises StopIteration after the timeout, or once this loop is closed; NotFound
        if the timeout is over and the job has never had a snapshot; StorageError if the
        root cannot be read before the first version; and what `load_into` raises.
        IntegrityError, and VersionGone with `overwritten`, mean that the module must not
        be used before a load succeeds.
        """
        self._end_current()
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not self._closed.is_set():
            left = _WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            found = self._look(max(0.0, left))
            if found is not None and self._take(found):
                return found
            if found is None and deadline is not None and time.monotonic() >= deadline:
                break
        if self._torn is not None:
            raise self._torn
        if not self._closed.is_set():
            self._check_known()
        raise StopIteration

    def _take(self, found: Version) -> bool:
        """Make this the current version, loaded into the caller's module if there is
        one. Return False if it has been replaced meanwhile, or is damaged.

        Raises NotFound if no tensor has a name that is followed.
        """
        try:
            if self._patterns and not found.keys():
                raise NotFound(
                    f"no tensor of {found.job} step {found.step} matches "
                    f"{some_text(self._patterns)}: `Checkpoint.keys()` has the names"
                )
            if self._into is not None:
                # Straight into the module: if the version is replaced meanwhile, the
                # next one is loaded before the caller sees the module again.
                found.load_into(self._into, prefix=self._prefix, staged=not found.in_memory)
            elif not found.in_memory and self._patterns:
                found.pull()
        except VersionGone as error:
            log.debug("%s", error)
            self._torn = error if error.overwritten else self._torn
            found.close()
            return False
        except IntegrityError as error:
            log.error("job %s: a damaged version is passed over: %s", self._job, error)
            self._damaged.add(found.order)
            if self._into is not None and found.in_memory:
                self._torn = error
            found.close()
            return False
        except BaseException:
            found.close()
            raise
        self._current, self._last = found, found.order
        self._torn = None
        return True

    def _look(self, seconds: float) -> Version | None:
        """Return a newer version, or None if there is none within so many seconds, or
        something has happened meanwhile.
        """
        in_memory = self._last is not None and self._was_in_memory
        seconds = min(seconds, _WAIT_SECONDS if in_memory else self._interval)
        try:
            channel = self._connected()
            loan = borrow(channel, self._name(channel), _key(self._asked_after()), seconds)
            if loan is not None:
                with suppress(VersionGone, NotFound):
                    return self._version(open_loan(self._name(), loan, self._kept))
                return None
            seconds = 0.0
        except (DaemonUnreachable, Busy) as error:
            if self._channel is not None:
                log.info("job %s is followed in its root until its daemon is back", self._job)
                seconds = min(seconds, _BACK_SECONDS)
            seconds = min(seconds, self._interval)
            self._disconnect()
            log.debug("job %s: %s", self._job, error)
        except BaseException:
            self._disconnect()
            raise
        # The daemon of this node may know nothing of a job that trains elsewhere.
        found = None if self._closed.is_set() else self._in_root()
        if found is None:
            self._closed.wait(seconds)
        return found

    # -- the daemon

    def _connected(self) -> Channel:
        if self._channel is None:
            self._channel = connect_to_running(self._place)
            self._root = located(self._channel.welcome.root)
        if self._closed.is_set():
            raise DaemonUnreachable("this loop is closed")
        return self._channel

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _name(self, channel: Channel | None = None) -> str:
        private = self._place.private if channel is None else channel.welcome.private
        self._job = job_name(self._job, private=private)
        return self._job

    def _after(self) -> Order | None:
        """Return the order that the next version must be above, or None if any version
        is taken: the first one, and one for a module that is half overwritten.
        """
        return None if self._torn is not None else self._last

    def _asked_after(self) -> Order | None:
        """Return the order that the daemon is asked to lend a version above. The daemon
        would lend a damaged checkpoint again.
        """
        known = [order for order in (self._after(), *self._damaged) if order is not None]
        return max(known, default=None)

    # -- the root

    def _in_root(self) -> Version | None:
        """Return the newest checkpoint if it is newer than the last version.

        Once there was a version, a root that cannot be read is only logged, and so is
        one that is not there yet.
        """
        root, job = self._root, self._name()
        if root is None:
            return None
        try:
            with storage_errors(f"read {root / job}"):
                return self._newest_checkpoint(root, job)
        except StorageError as error:
            if self._last is None and error.errno == errno.ENOENT:
                self._say_waiting(root, job)  # the training may not have made it yet
                return None
            if self._last is None:
                raise
            if str(error) != self._said:
                self._said = str(error)
                log.warning("job %s is followed again once its root can be read: %s", job, error)
            return None

    def _newest_checkpoint(self, root: Location, job: str) -> Version | None:
        repository, after = open_root(root), self._after()
        passed = self._passed = self._passed or PassedOver(job)
        for manifest in newest_first(repository, job, repository.tags(job), "newest", passed):
            order = order_of(manifest.attempt, manifest.step, manifest.seq)
            if after is not None and order <= after:
                return None
            if order in self._damaged:
                continue
            try:
                opened = open_checkpoint(repository, job, manifest.tag, manifest, kept=self._kept)
                return self._version(opened)
            except (IntegrityError, NotFound) as error:
                passed.add(manifest.tag, error)
        if self._last is None:
            self._say_waiting(root, job)
        return None

    def _say_waiting(self, root: Location, job: str) -> None:
        if not self._said:
            self._said = f"job {job} has no snapshot yet in {root}: it is waited for"
            log.info("%s", self._said)

    def _check_known(self) -> None:
        """Raise NotFound if nothing of the job has been found so far."""
        if self._last is None and self._root is not None:
            with storage_errors(f"list {self._root}"):
                raise no_such_job(self._root, self._name(), open_root(self._root).jobs())

    # -- versions

    def _version(self, opened: Opened) -> Version:
        self._was_in_memory = opened.manifest is None
        return Version(self._name(), opened, self._patterns, self._last)

    def _end_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()

    def close(self) -> None:
        """End the loop, and close the current version. May be called again."""
        self._closed.set()
        channel = self._channel
        if channel is not None:
            channel.end()  # wakes the thread that waits for it

    def __enter__(self) -> VersionFeed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        self._end_current()
        self._disconnect()

    def __del__(self) -> None:
        # The last version stays open, as after `break`, until it is collected itself.
        self._disconnect()


def _key(order: Order | None) -> tuple[int, int] | None:
    """Return the attempt and the step of a version that a reader has."""
    return None if order is None else (order[0], max(0, order[1]))


def follow(
    job: str | None = None,
    *,
    keys: str | Sequence[str] = (),
    into: torch.nn.Module | None = None,
    prefix: str = "model",
    root: str | os.PathLike[str] | None = None,
    socket: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    interval: float = 5.0,
) -> VersionFeed:
    """Follow the newest snapshot of a job: return an iterator that waits for each newer
    one, and skips those that are replaced before they are read.

    No attempt begins, and the training is not held up. On the node that trains, the
    snapshots come from memory, as soon as all ranks have sealed them. Elsewhere, and of
    a job of several nodes, they come from the root, once they are committed.

    job: name of the training run. Default: as for `Agent`. keys: patterns like
    "model.*" of the names of tensors: only these are listed, and fetched from the root
    before the version is returned. into: a module that each version is loaded into
    before it is returned, as by `Version.load_into` with `prefix`. The module then
    always has the whole of one version while the body of the loop runs. root, socket:
    the root or the daemon, as for `Agent`; no daemon is started. timeout: seconds after
    which the loop ends if there is no newer version; None waits for ever. interval:
    seconds between two looks at the root.

    Raises DaemonUnreachable if neither a daemon nor a root is known, Forbidden,
    VersionMismatch for a daemon of an earlier version, InvalidName, InvalidRequest; and
    what `VersionFeed.__next__` raises.
    """
    if interval <= 0 or (timeout is not None and timeout < 0):
        raise InvalidRequest(
            f"interval is {interval} and timeout {timeout}; expected seconds, and an interval "
            f"above 0"
        )
    if job is not None:
        check_name("job", job)
    patterns = (keys,) if isinstance(keys, str) else tuple(keys)
    return VersionFeed(
        find_place(socket, root),
        job,
        patterns,
        into=into,
        prefix=prefix,
        timeout=timeout,
        interval=interval,
    )
