"""Tests each check of `ckptd doctor`, with given values and on this machine, and the
command itself.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from obstore.store import MemoryStore

from ckptd.daemon.commands import doctor
from ckptd.daemon.commands.doctor_check import FAILED, OK, WARNING, Check
from ckptd.daemon.config import load
from ckptd.daemon.process import limits
from ckptd.daemon.process.peers import SO_PEERPIDFD
from ckptd.shared.errors import RemoteError
from ckptd.shared.location import Url
from ckptd.shared.storage import posix_probe
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.system import machine
from ckptd.shared.system.memory_limit import MemoryLimit
from tests.crash.images import Image, Unavailable
from tests.support.cases import each_case
from tests.support.commands import ckptd

PLAN = limits.DescriptorPlan(slots=2)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@each_case(
    ("hard", "most", "level", "fit", "words"),
    [
        (50, 256, FAILED, 0, "one rank needs 51"),
        (51, 256, WARNING, 1, "LimitNOFILE=2601"),
        (2601, 256, OK, 256, "256 ranks fit into 2601 open files"),
        (2601, 257, WARNING, 256, "max_connections is 257"),
        (resource.RLIM_INFINITY, 256, OK, 107374178, "ranks fit"),
    ],
)
def test_the_limit_of_open_files_is_checked(
    hard: int, most: int, level: str, fit: int, words: str
) -> None:
    check = doctor.check_files(PLAN, 20, hard, most)
    assert (check.level, check.values["ranks_fit"]) == (level, fit)
    assert words in check.message


def test_the_limit_of_locked_memory_is_a_warning_only_where_a_driver_may_check_it(
    tmp_path: Path,
) -> None:
    assert doctor.check_locked_memory(resource.RLIM_INFINITY, tmp_path).level == OK
    for amd, level in ((tmp_path / "none", OK), (tmp_path, WARNING)):
        check = doctor.check_locked_memory(8 << 20, amd)
        assert (check.level, check.values) == (level, {"limit": 8 << 20})
        assert ("LimitMEMLOCK" in check.message) == (level == WARNING)


def test_doctor_says_on_which_gpu_the_copies_were_tried() -> None:
    (results,) = Path("benchmarks/results").glob("*-gpu-*.md")
    check, text = doctor.accelerators(), results.read_text()
    assert check.level == OK
    assert check.values["tried_on"] in check.message
    for words in ("one NVIDIA H200", "driver 580.159.04", "torch 2.11", "2026-11-28"):
        assert words in doctor.TRIED_ON
        assert words.lower() in text.lower()
    for words in ("several GPUs", "ROCm", "`.data`", "not page-locked"):
        assert words in check.message


def test_a_user_whose_slots_logind_deletes_is_warned() -> None:
    assert [
        doctor.check_remove_ipc(*given).level
        for given in (
            (1000, True, False),
            (1000, True, True),
            (1000, False, False),
            (0, True, False),
        )
    ] == [WARNING, OK, OK, OK]


@each_case(
    ("files", "removes"),
    [
        ({}, True),
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
        (
            {
                "usr/lib/systemd/logind.conf": "RemoveIPC=no\n",
                "etc/systemd/logind.conf": "KillUserProcesses=no\n",
            },
            True,
        ),
        (
            {
                "etc/systemd/logind.conf": "RemoveIPC=no\n",
                "usr/lib/systemd/logind.conf.d/90-ipc.conf": "RemoveIPC = yes\n",
                "etc/systemd/logind.conf.d/50-ipc.conf": "RemoveIPC=no\n",
            },
            True,
        ),
    ],
)
def test_the_configuration_of_logind_is_read_as_systemd_reads_it(
    tmp_path: Path, files: dict[str, str], removes: bool
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert not doctor.removes_ipc(tmp_path)  # logind does not run
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    assert doctor.removes_ipc(tmp_path) == removes


@pytest.mark.parametrize(
    ("ahead", "level", "words"),
    [
        (0.0, OK, "agree"),
        (1.9, OK, "agree"),
        (-90.0, WARNING, "is 90 s behind"),
        (5.0, WARNING, "is 5 s ahead"),
    ],
)
def test_clocks_that_differ_are_told(ahead: float, level: str, words: str) -> None:
    check = doctor.check_clock(ahead)
    assert (check.level, check.values) == (level, {"ahead_seconds": ahead})
    assert words in check.message


def test_the_size_of_shared_memory_is_checked(tmp_path: Path) -> None:
    check = doctor.check_shared_memory(Path("/dev/shm"), 4, 4 << 20)
    assert check.values["largest_state_bytes"] == 1 << 20
    assert check.level == WARNING  # little shared memory is free
    assert doctor.check_shared_memory(Path("/dev/shm"), 2, 0).values["slots"] == 2
    assert doctor.check_shared_memory(tmp_path / "nowhere", 2, 0).level == FAILED


def test_the_memory_limit_of_the_control_group_is_told() -> None:
    group = Path("/sys/fs/cgroup/memory/job")
    check = doctor.check_shared_memory(
        Path("/dev/shm"), 2, 0, 0, MemoryLimit(group, 700_000_000, 459_000_000)
    )
    assert (check.level, check.values["largest_state_bytes"]) == (OK, 85_500_000)
    assert (
        f"and the memory limit of 700.0 MB of {group} leaves 171.0 MB for slots: with 2 slots one "
        f"state of 85.5 MB fits"
    ) in check.message
    assert check.values["memory_limit_bytes"] == 700_000_000
    assert check.values["memory_limit_free_bytes"] == 171_000_000
    check = doctor.check_shared_memory(
        Path("/dev/shm"), 2, 0, 0, MemoryLimit(group, 700_000_000, 650_000_000)
    )
    assert check.level == WARNING
    assert check.message.endswith(
        "; raise the limit (`--memory` of a container, MemoryMax= of a unit)"
    )


def test_no_memory_limit_counts_for_a_disk(tmp_path: Path) -> None:
    limit = MemoryLimit(Path("/g"), 700, 459)
    check = doctor.check_shared_memory(tmp_path, 2, 0, 0, limit)
    assert check.values["memory_limit_bytes"] is None
    assert check.values["largest_state_bytes"] > 700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write to every directory")
def test_shared_memory_is_a_tmpfs() -> None:
    assert "it is not a tmpfs" in doctor.check_shared_memory(Path("/proc"), 2, 0).message


def test_a_usable_root_passes(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    before = list(tmp_path.iterdir())
    found = by_name(list(doctor.check_root(tmp_path)))
    assert set(found) == {
        "root",
        "permissions",
        "clock",
        "O_DIRECT",
        "fsync of a directory",
        "flock",
        "OFD locks",
    }
    assert {name for name, check in found.items() if check.level == FAILED} == set()
    assert (
        found["flock"].level
        == found["fsync of a directory"].level
        == found["OFD locks"].level
        == OK
    )
    assert found["root"].values["exists"]
    assert list(tmp_path.iterdir()) == before


def test_of_a_missing_root_the_nearest_parent_is_checked(tmp_path: Path) -> None:
    found = by_name(list(doctor.check_root(tmp_path / "a" / "b")))
    assert f"{tmp_path} (where {tmp_path / 'a' / 'b'} will be made)" in found["root"].message
    assert not found["root"].values["exists"]
    assert not (tmp_path / "a").exists()


def test_a_root_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check,) = doctor.check_root(tmp_path / "file")
    assert (check.name, check.level) == ("root", FAILED)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device; make room, or name another directory"),
        (errno.EDQUOT, "Disk quota exceeded; make room, or name another directory"),
        (errno.EACCES, "Permission denied; name a directory of this user"),
    ],
)
def test_a_root_without_room_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    monkeypatch.setattr(
        posix_probe, "probe", Mock(side_effect=OSError(number, os.strerror(number)))
    )
    (check,) = doctor.check_root(tmp_path)
    assert check.message == f"{tmp_path} cannot be written: {remedy}"


def test_a_stage_is_checked_as_a_root_is(tmp_path: Path) -> None:
    config = load(
        {
            "root": str(tmp_path / "root"),
            "socket": str(tmp_path / "s"),
            "stage": str(tmp_path / "stage"),
        },
        {},
        None,
    )
    found = by_name(list(doctor.check_all(config)))
    assert {
        "root",
        "flock",
        "stage",
        "stage: permissions",
        "stage: flock",
        "stage: fsync of a directory",
    } <= set(found)
    assert str(tmp_path / "stage") in found["stage"].message
    (tmp_path / "file").write_bytes(b"")
    assert [check.level for check in doctor.check_stage(tmp_path / "file")] == [FAILED]
    volatile = by_name(list(doctor.check_stage(Path("/dev/shm/ckptd-test-no-such-stage"))))[
        "stage: kind"
    ]
    assert (volatile.level, "not uploaded yet are then lost" in volatile.message) == (
        WARNING,
        True,
    )


@pytest.mark.usefixtures("processes")
def test_a_root_with_little_room_is_a_warning() -> None:
    try:
        image = Image(16)
    except Unavailable as error:
        pytest.skip(str(error))
    try:
        check = by_name(list(doctor.check_root(image.where)))["root"]
        assert check.level == WARNING
        assert check.values["free_bytes"] < 16 << 20
        assert 0 < check.values["free_inodes"] < 10_000
    finally:
        image.close()


@pytest.mark.parametrize(
    ("mode", "mask", "level", "words"),
    [
        (0o700, 0o022, OK, "new files get mode 0644 (umask 022)"),
        (0o755, 0o022, WARNING, "every user can read checkpoints"),
        (0o755, 0o027, OK, "new files get mode 0640"),
        (0o777, 0o077, WARNING, "every user may write there"),
    ],
)
def test_the_permissions_of_the_root_are_checked(
    tmp_path: Path, mode: int, mask: int, level: str, words: str
) -> None:
    tmp_path.chmod(mode)
    before = os.umask(mask)
    try:
        check = by_name(list(doctor.check_root(tmp_path)))["permissions"]
    finally:
        os.umask(before)
    assert check.level == level
    assert words in check.message


def test_the_directory_of_the_socket_is_checked(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert doctor.check_socket_directory(tmp_path).level == OK
    assert doctor.check_socket_directory(tmp_path / "later").values["exists"] is False
    tmp_path.chmod(0o777)
    assert "chmod go-w" in doctor.check_socket_directory(tmp_path).message
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to somebody else")
def test_a_directory_of_another_user_is_no_place_for_the_socket(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    assert "who could replace the socket" in doctor.check_socket_directory(tmp_path).message


def test_the_kernel_and_the_event_loop_are_checked() -> None:
    found = by_name(list(doctor.check_kernel()))
    assert set(found) == {"pidfd", "SO_PEERPIDFD", "memfd"}
    one, other = socket.socketpair()
    with one, other:
        try:
            os.close(one.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
            there = True
        except OSError:
            there = False
    assert found["SO_PEERPIDFD"].values["there"] is there
    assert [doctor.check_event_loop(there).level for there in (True, False)] == [OK, WARNING]


@pytest.mark.usefixtures("processes")
def test_the_command_prints_the_checks(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    done = ckptd("doctor", "--root", tmp_path, "--socket", tmp_path / "s")
    assert done.returncode == 0, done.stdout
    assert "open files" in done.stdout
    done = ckptd(
        "doctor", "--socket", tmp_path / "s", "--json", environment={"CKPTD_SHM_DIR": "/nowhere"}
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    assert [check["name"] for check in found["checks"] if check["level"] == FAILED] == [
        "shared memory"
    ]
    assert not [check for check in found["checks"] if check["name"] == "root"]


def test_the_state_directory_is_to_be_written_and_to_last(tmp_path: Path) -> None:
    # A test's directory may be on a tmpfs or an overlay.
    assert doctor.check_state_dir(tmp_path / "state").level in (OK, WARNING)
    volatile = doctor.check_state_dir(Path("/dev/shm/state"))
    assert (volatile.level, "a tmpfs, which a reboot empties" in volatile.message) == (
        WARNING,
        True,
    )
    (tmp_path / "file").touch()
    refused = doctor.check_state_dir(tmp_path / "file" / "state")
    assert (refused.level, "set state_dir to a directory of yours" in refused.message) == (
        FAILED,
        True,
    )


def test_a_state_directory_on_nfs_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "file_system", lambda path: 0x6969)
    found = doctor.check_state_dir(tmp_path)
    assert (found.level, f"{tmp_path} is on NFS: " in found.message) == (WARNING, True)


@pytest.mark.parametrize("copies", [True, False])
def test_a_store_that_cannot_copy_has_no_deltas(
    monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    def refuse(self: Bucket, name: str, new: str) -> None:
        raise RemoteError(errno.EOPNOTSUPP, "the store answered 501 Not Implemented", name)

    if not copies:
        monkeypatch.setattr(Bucket, "copy", refuse)
    storage = ObjectStorage(Bucket(MemoryStore(), "s3://bucket/runs"), "0" * 16)
    monkeypatch.setattr(doctor, "object_storage", lambda url: storage)
    check = by_name(list(doctor.check_root(Url("s3", "bucket", ("runs",)))))["copies by the store"]
    assert (check.level, check.values) == (OK if copies else WARNING, {"copies": copies})
    assert ("deltas are off" in check.message) is not copies
