"""Tests the error classes and their codes on the wire."""

from __future__ import annotations

import errno
import inspect
import re

import pytest

from ckptd.shared import errors as e
from tests.support.cases import each_case


def _classes() -> list[type[e.CkptdError]]:
    return [
        cls for _, cls in inspect.getmembers(e, inspect.isclass) if issubclass(cls, e.CkptdError)
    ]


def test_the_classes_are_those_of_the_docstring() -> None:
    assert e.__doc__ is not None
    drawn = {"CkptdError", *re.findall(r"── (\w+)", e.__doc__)}
    assert drawn == {cls.__name__ for cls in _classes()}


@each_case(
    ("code", "cls"),
    [
        ("protocol", e.ProtocolError), ("version", e.VersionMismatch), ("forbidden", e.Forbidden),
        ("fenced", e.Fenced), ("exists", e.AlreadyExists), ("invalid", e.InvalidRequest), ("quota",
        e.QuotaExceeded), ("shm-full", e.SharedMemoryFull), ("storage", e.StorageError),
        ("integrity", e.IntegrityError), ("not-found", e.NotFound), ("busy", e.Busy), ("internal",
        e.InternalError),
    ],
)  # fmt: skip
def test_codes_on_the_wire(code: str, cls: type[e.CkptdError]) -> None:
    error = e.from_wire(code, "what happened")
    assert type(error) is cls
    assert (error.code, str(error)) == (code, "what happened")


def test_a_code_of_a_newer_daemon_is_a_service_error() -> None:
    error = e.from_wire("novelty", "what happened")
    assert type(error) is e.ServiceError
    assert str(error) == "what happened"


def test_no_two_classes_share_a_code() -> None:
    by_code: dict[str, list[type[e.CkptdError]]] = {}
    for cls in _classes():
        if "code" in vars(cls):
            by_code.setdefault(cls.code, []).append(cls)
    assert {code: found for code, found in by_code.items() if len(found) > 1} == {}


@each_case(
    ("number", "text"),
    [
        (
            errno.ENOSPC,
            "cannot save it: No space left on device (free some space; the next save tries again)",
        ),
        (errno.EDQUOT, "cannot save it: Disk quota exceeded (the disk quota is used up)"),
        (
            errno.EROFS,
            "cannot save it: Read-only file system (mounted read-only: after a disk error the "
            "kernel's log says why)",
        ),
        (
            errno.EACCES,
            "cannot save it: Permission denied (this user has no permission there: correct the "
            "owner or the mode)",
        ),
        (
            errno.EIO,
            "cannot save it: Input/output error (the disk or the mount has failed: the kernel's "
            "log says why)",
        ),
    ],
)
def test_storage_errors_use_the_systems_words(number: int, text: str) -> None:
    error = e.StorageError.of("save it", OSError(number, "whatever"))
    assert (str(error), error.errno, error.retry, error.code) == (text, number, True, "storage")


def test_only_what_a_daemon_serves_can_have_been_moved() -> None:
    gone = OSError(errno.ENOENT, "whatever")
    assert str(e.StorageError.of("save it", gone, served=True)) == (
        "cannot save it: No such file or directory (has the root been moved or deleted?)"
    )
    expected = (
        "^cannot list /nope: No such file or directory \\(nothing is there: check the path, and "
        "that its disk is mounted\\)$"
    )
    with pytest.raises(e.StorageError, match=expected), e.storage_errors("list /nope"):
        raise gone


def test_a_storage_error_without_a_number() -> None:
    error = e.StorageError.of("save it", OSError("just so"))
    assert (str(error), error.errno) == ("cannot save it: just so", 0)


def test_each_error_says_whose_fault_it_is_and_whether_a_retry_helps() -> None:
    assert {cls for cls in _classes() if cls.retry} == {
        e.StorageError,
        e.SharedMemoryFull,
        e.DaemonUnreachable,
        e.Busy,
        e.StructureChanged,
        e.VersionGone,
    }
    for name, builtin in (
        ("InvalidName", ValueError),
        ("InvalidRequest", ValueError),
        ("UnsavableValue", TypeError),
        ("StructureMismatch", ValueError),
    ):
        assert issubclass(getattr(e, name), builtin)
        assert issubclass(getattr(e, name), e.CallerError)
    assert issubclass(e.NewerFormat, e.IntegrityError)
    assert issubclass(e.IntegrityError, e.MachineError)
