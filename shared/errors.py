"""Every error that ckptd raises: whose fault it is, and whether a retry helps.

    CkptdError
    ├── CallerError               the caller's: change the call
    │   ├── InvalidName           (also ValueError) a job, tag or path that cannot be
    │   ├── InvalidRequest        (also ValueError) a step, size or option that cannot be
    │   ├── UnsavableValue        (also TypeError) a value that could not be brought back; names its key
    │   ├── StructureMismatch     (also ValueError) state and checkpoint differ; names the key
    │   ├── AlreadyExists         the tag is taken
    │   ├── NotFound              no such checkpoint, job or tensor
    │   ├── QuotaExceeded         more shared memory than the daemon may give
    │   └── InvalidConfig         a setting that cannot be
    ├── MachineError              the machine's: make room, look at the disk
    │   ├── StorageError          a write, sync or read failed; `errno` kept
    │   ├── SharedMemoryFull      no room in the tmpfs
    │   └── IntegrityError        bytes that do not match their checksum
    │       └── NewerFormat       written by a newer ckptd
    └── ServiceError              between agent and daemon
        ├── DaemonUnreachable     retry helps once it runs
        ├── ProtocolError         a peer that breaks PROTOCOL.md
        ├── VersionMismatch       no common protocol version
        ├── Forbidden             another user's daemon or socket
        ├── Fenced                a newer attempt of the job has begun
        ├── Busy                  retry helps
        ├── SnapshotFailed        what `Pending.wait` raises when the state asked for cannot come any more
        │   └── StructureChanged  on some ranks only; every rank plans anew at the next snapshot
        ├── RecoveryFailed        checkpoints exist and none could be loaded
        └── InternalError         a bug in ckptd

`code` is the word for it on the wire (PROTOCOL.md, section 4) and in `--json` output.
"""

from __future__ import annotations

import errno as _errno
import os


class CkptdError(Exception):
    """Base of all. `code`: its word on the wire; `retry`: whether the same call may succeed later."""

    code = "internal"
    retry = False


class CallerError(CkptdError):
    code = "invalid"


class InvalidName(CallerError, ValueError):
    pass


class InvalidRequest(CallerError, ValueError):
    pass


class UnsavableValue(CallerError, TypeError):
    code = "unsavable"


class StructureMismatch(CallerError, ValueError):
    code = "mismatch"


class AlreadyExists(CallerError):
    code = "exists"


class NotFound(CallerError):
    code = "not-found"


class QuotaExceeded(CallerError):
    code = "quota"


class InvalidConfig(CallerError, ValueError):
    code = "config"


class MachineError(CkptdError):
    pass


_RUN_OUT = frozenset({_errno.EMFILE, _errno.ENFILE, _errno.ENOMEM, _errno.ENOSPC, _errno.EDQUOT, _errno.EAGAIN})


class StorageError(MachineError):
    """`errno` is the operating system's number, or 0 where none is known."""

    code = "storage"
    retry = True

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno

    @property
    def is_of_the_machine(self) -> bool:
        """Something has run out: it says nothing about the file that was asked for."""
        return self.errno in _RUN_OUT

    @classmethod
    def of(cls, action: str, error: OSError) -> StorageError:
        """Translate at the seam: `action` reads like "write gpt/step-1"."""
        number = error.errno or 0
        hint = {
            _errno.ENOENT: " (has the root been moved or deleted?)",
            _errno.ENOSPC: " (free some space; the next snapshot tries again)",
            _errno.EDQUOT: " (the disk quota is used up)",
            _errno.EROFS: " (mounted read-only)",
            _errno.EACCES: " (the daemon's user may not write there)",
        }.get(number, "")
        return cls(f"cannot {action}: {os.strerror(number) if number else error}{hint}", number)


class SharedMemoryFull(MachineError):
    code = "shm-full"
    retry = True


class IntegrityError(MachineError):
    code = "integrity"


class NewerFormat(IntegrityError):
    code = "newer-format"


class ServiceError(CkptdError):
    pass


class DaemonUnreachable(ServiceError):
    code = "unreachable"
    retry = True


class ProtocolError(ServiceError):
    code = "protocol"


class VersionMismatch(ServiceError):
    code = "version"


class Forbidden(ServiceError):
    code = "forbidden"


class Fenced(ServiceError):
    code = "fenced"


class Busy(ServiceError):
    code = "busy"
    retry = True


class SnapshotFailed(ServiceError):
    """`__cause__` is the reason, where there is one."""

    code = "snapshot-failed"


class StructureChanged(SnapshotFailed):
    """On some ranks only: they cannot plan together with those that kept their plan."""

    code = "structure-changed"
    retry = True


class RecoveryFailed(ServiceError):
    """`overwritten`: whether bytes had already been written into the caller's state."""

    code = "recovery-failed"

    def __init__(self, message: str, *, overwritten: bool = False) -> None:
        super().__init__(message)
        self.overwritten = overwritten


class InternalError(ServiceError):
    pass


_ON_THE_WIRE: dict[str, type[CkptdError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, AlreadyExists, NotFound, QuotaExceeded, StorageError, SharedMemoryFull, IntegrityError,
        ProtocolError, VersionMismatch, Forbidden, Fenced, Busy, InternalError, NewerFormat, SnapshotFailed, StructureChanged,
        UnsavableValue, StructureMismatch, DaemonUnreachable, RecoveryFailed,
    )
}  # fmt: skip


def from_wire(code: str, message: str) -> CkptdError:
    """The exception for an Error message, or for what another rank says; a code from a newer daemon becomes a plain ServiceError."""
    return _ON_THE_WIRE.get(code, ServiceError)(message)
