"""The errors that ckptd raises: each tells whose fault it is, and whether a retry can
help.

    CkptdError
    ├── CallerError               the caller's fault: change the call
    │   ├── InvalidName           (also ValueError) a job or tag that is not allowed as a name
    │   ├── InvalidRequest        (also ValueError) a step, size or option that is not allowed
    │   ├── UnsavableValue        (also TypeError) a value that could not be restored; names its key
    │   ├── StructureMismatch     (also ValueError) state and checkpoint differ; names the key
    │   ├── AlreadyExists         the tag is taken
    │   ├── JobRunning            another run of the job is alive, and was not to be taken over
    │   ├── ForeignMemory         the job's snapshots in memory were saved for another root
    │   ├── NotFound              the checkpoint, job, segment or tensor does not exist
    │   │   └── VersionGone       the snapshot in memory that is read has been replaced
    │   ├── QuotaExceeded         more shared memory is needed than the daemon may give
    │   ├── InvalidConfig         (also ValueError) a setting that is not allowed
    │   └── UnsupportedTorch      (also ImportError) torch is not installed, or it is too old
    ├── MachineError              the machine's fault: make room, or check the disk
    │   ├── StorageError          a write, sync or read failed; `errno` is the system's error number
    │   ├── SharedMemoryFull      the tmpfs has no room
    │   └── IntegrityError        the data is damaged, as when bytes do not match their checksum
    │       └── NewerFormat       the data was written by a newer ckptd
    └── ServiceError              a problem between agent and daemon
        ├── DaemonUnreachable     no daemon answers; a retry helps once one runs
        ├── ProtocolError         the peer breaks PROTOCOL.md
        ├── VersionMismatch       agent and daemon have no protocol version in common
        ├── Forbidden             the daemon, its socket or the client belongs to another user
        ├── Fenced                a newer attempt of the job has begun
        ├── Busy                  the resource is in use now; a retry helps
        ├── SnapshotFailed        the snapshot cannot reach the state that `Pending.wait` waits for
        │   └── StructureChanged  the structure changed on some ranks only; all plan again
        ├── PeerLost              another rank has not answered, or sent an unusable message
        ├── RecoveryFailed        checkpoints exist, and none could be loaded
        └── InternalError         a bug in ckptd

`code` names the error in the protocol (PROTOCOL.md, section 4) and in `--json` output.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class CkptdError(Exception):
    """The base of all errors of ckptd.

    `code` names the error in the protocol. `retry` is True if the same call may succeed
    later. `exit_code` is that of a command that the error ends.
    """

    code = "internal"
    retry = False
    exit_code = 1


class CallerError(CkptdError):
    code = "invalid"


class InvalidName(CallerError, ValueError):
    exit_code = 2


class InvalidRequest(CallerError, ValueError):
    exit_code = 2


class UnsavableValue(CallerError, TypeError):
    code = "unsavable"


class StructureMismatch(CallerError, ValueError):
    code = "mismatch"


class AlreadyExists(CallerError):
    code = "exists"


class JobRunning(CallerError):
    code = "job-running"


class ForeignMemory(CallerError):
    code = "foreign-memory"


class NotFound(CallerError):
    code = "not-found"
    exit_code = 10


class VersionGone(NotFound):
    """A snapshot in memory that was replaced by a newer one while it was read.

    `overwritten` is True if part of the module that it was loaded into has been
    overwritten: load another version before you use that module.
    """

    retry = True

    def __init__(self, message: str, *, overwritten: bool = False) -> None:
        super().__init__(message)
        self.overwritten = overwritten


class QuotaExceeded(CallerError):
    code = "quota"


class InvalidConfig(CallerError, ValueError):
    code = "config"
    exit_code = 2


class UnsupportedTorch(CallerError, ImportError):
    code = "torch"


class MachineError(CkptdError):
    pass


_DENIED = frozenset({_errno.EACCES, _errno.EPERM})
_RUN_OUT = frozenset(
    {_errno.EMFILE, _errno.ENFILE, _errno.ENOMEM, _errno.ENOSPC, _errno.EDQUOT, _errno.EAGAIN}
)


_UNREACHABLE = frozenset(
    {
        _errno.ESTALE, _errno.ETIMEDOUT, _errno.ENOTCONN, _errno.ECONNREFUSED, _errno.ECONNRESET,
        _errno.ECONNABORTED, _errno.EHOSTDOWN, _errno.EHOSTUNREACH, _errno.ENETDOWN,
        _errno.ENETUNREACH, _errno.ESHUTDOWN,
    }
)  # fmt: skip
"""Errors of a mount whose server, or the process that serves it, cannot be reached."""


class RemoteError(OSError):
    """An error of an object store.

    Its `strerror` says more than its error number, and holds no secret.
    """


class RemoteRefusal(RemoteError, PermissionError):
    """The store has refused the credentials, or found none."""


class OutOfInodes(OSError):
    """The error ENOSPC of a file system that has space left, and no inodes."""


class StorageError(MachineError):
    """A failed write, sync or read.

    `errno` is the error number of the operating system, or 0 if none is known.
    """

    code = "storage"
    retry = True

    def __init__(self, message: str, errno: int = 0, *, remote: bool = False) -> None:
        super().__init__(message)
        self.errno, self._remote = errno, remote

    @property
    def is_no_damage(self) -> bool:
        """True if a resource of the machine has run out, or the server of an object
        store or a mount does not serve: the file itself may be sound.
        """
        return self._remote or self.errno in _RUN_OUT | _UNREACHABLE

    @property
    def is_denied(self) -> bool:
        """True if this user has no permission: the file itself may be sound."""
        return self.errno in _DENIED

    @classmethod
    def of(cls, action: str, error: OSError, *, served: bool = False) -> StorageError:
        """Return the StorageError for an OSError.

        `action` completes the sentence "cannot ...", for example "write gpt/step-1".
        served: True if a daemon serves the place, so that it was there before.
        """
        number = error.errno or 0
        hint = {
            _errno.ENOENT: " (has the root been moved or deleted?)"
            if served
            else " (nothing is there: check the path, and that its disk is mounted)",
            _errno.ENOSPC: " (free some space; the next save tries again)",
            _errno.EDQUOT: " (the disk quota is used up)",
            _errno.EROFS: " (mounted read-only: after a disk error the kernel's log says why)",
            _errno.EACCES: " (this user has no permission there: correct the owner or the mode)",
            _errno.EIO: " (the disk or the mount has failed: the kernel's log says why)",
        }.get(number, "")
        if isinstance(error, RemoteError):
            return cls(f"cannot {action}: {error.strerror}", number, remote=True)
        if isinstance(error, OutOfInodes):
            return cls(
                f"cannot {action}: no inodes are left on the file system (delete files there, "
                "small ones too; the next save tries again)",
                number,
            )
        if number == _errno.EFBIG and error.filename is None:  # of a write, which has no name
            hint = (
                " (this process may not write so large a file: raise `ulimit -f`, or LimitFSIZE= "
                "of its unit)"
            )
        return cls(f"cannot {action}: {os.strerror(number) if number else error}{hint}", number)


@contextmanager
def storage_errors(action: str, *, served: bool = False) -> Iterator[None]:
    """Context manager. Raise the StorageError for an OSError that is raised inside.

    `action` and `served` are as in `StorageError.of`.
    """
    try:
        yield
    except OSError as error:
        raise StorageError.of(action, error, served=served) from None


class SharedMemoryFull(MachineError):
    code = "shm-full"
    retry = True


class IntegrityError(MachineError):
    code = "integrity"
    exit_code = 13


class NewerFormat(IntegrityError):
    code = "newer-format"


@contextmanager
def damage_in(name: str) -> Iterator[None]:
    """Context manager. Put the name of a checkpoint, a file or a part of it in front of
    the message of an IntegrityError that is raised inside.
    """
    try:
        yield
    except IntegrityError as error:
        raise type(error)(f"{name}: {error}") from None


class ServiceError(CkptdError):
    pass


class DaemonUnreachable(ServiceError):
    code = "unreachable"
    retry = True
    exit_code = 14


class ProtocolError(ServiceError):
    code = "protocol"


class VersionMismatch(ServiceError):
    code = "version"


class Forbidden(ServiceError):
    code = "forbidden"
    exit_code = 12


class Fenced(ServiceError):
    code = "fenced"


class Busy(ServiceError):
    code = "busy"
    retry = True
    exit_code = 11


class SnapshotFailed(ServiceError):
    """A snapshot that can no longer become sealed or durable.

    `__cause__` is the error behind it, or None.
    """

    code = "snapshot-failed"


class StructureChanged(SnapshotFailed):
    """A snapshot that failed because the structure of the state changed on some ranks
    only.

    These ranks cannot plan together with the ranks that kept their plan.
    """

    code = "structure-changed"
    retry = True


class PeerLost(ServiceError):
    """A peer that has not answered in time, whose connection has ended, or that has sent
    a message that cannot be used.
    """

    code = "peer-lost"


class RecoveryFailed(ServiceError):
    """A recovery that could load none of the checkpoints.

    `overwritten` is True if part of the caller's state has been overwritten.
    """

    code = "recovery-failed"

    def __init__(self, message: str, *, overwritten: bool = False) -> None:
        super().__init__(message)
        self.overwritten = overwritten


class InternalError(ServiceError):
    pass


_ON_THE_WIRE: dict[str, type[CkptdError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, AlreadyExists, JobRunning, ForeignMemory, NotFound, QuotaExceeded,
        StorageError, SharedMemoryFull, IntegrityError, ProtocolError, VersionMismatch, Forbidden,
        Fenced, Busy, InternalError, NewerFormat, SnapshotFailed, StructureChanged, UnsavableValue,
        StructureMismatch, DaemonUnreachable, RecoveryFailed, PeerLost,
    )
}  # fmt: skip


def check_step_follows(step: int, last: int, attempt: str) -> None:
    """Raise InvalidRequest unless `step` comes after `last`, the last step of an
    attempt.

    attempt: the words for the attempt, such as "attempt 3".
    """
    if step <= last:
        raise InvalidRequest(
            f"step {step} does not follow step {last}, the last of {attempt}: steps must "
            "increase within an attempt; call recover() to go back"
        )


def from_wire(code: str, message: str) -> CkptdError:
    """Return the exception for an error that the daemon or another rank has sent.

    An unknown code gives a plain ServiceError.
    """
    return _ON_THE_WIRE.get(code, ServiceError)(message)
