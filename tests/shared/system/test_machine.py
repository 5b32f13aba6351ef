"""Tests the names of host and user, the paths of sockets and segments, and the directory
that holds the state of a daemon.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem, make_directories
from tests.support.cases import each_case


@each_case(
    ("told", "name"),
    [
        ("node-7.cluster", "node-7.cluster"),
        ("..-my host/é", "my_host__"),
        ("...", "localhost"),
        ("", "localhost"),
        ("x" * 200, "x" * 128),
    ],
)
def test_the_host_name_is_made_fit_for_a_file_name(
    monkeypatch: pytest.MonkeyPatch, told: str, name: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: told)
    assert machine.host() == name


def test_root_digest_is_of_the_path() -> None:
    assert machine.root_digest(Path("/ckpts")) == hashlib.sha256(b"/ckpts").hexdigest()[:16]
    assert machine.root_digest(Path("/ckpts")) != machine.root_digest(Path("/ckpts2"))
    assert (
        machine.segment_directory(Path("/ckpts"))
        == f"ckptd-{os.getuid()}-{machine.root_digest(Path('/ckpts'))}"
    )


def test_all_paths_to_a_root_have_one_digest(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    link, real = tmp_path / "link" / "root", tmp_path / "real" / "root"
    assert machine.root_digest(link) == machine.root_digest(real)
    assert machine.private_socket(link) == machine.private_socket(real)
    assert machine.segment_directory(link) == machine.segment_directory(real)


def test_links_are_followed_only_if_no_daemon_is_at_the_path_itself(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system of the root may hang, and the daemon has the newest snapshot."""
    real, link = runtime.parent / "real", runtime.parent / "link"
    real.mkdir()
    link.symlink_to("real")
    assert list(machine.private_sockets(link))[-1] == machine.private_socket(real)
    monkeypatch.setattr(Path, "resolve", lambda path: pytest.fail("the file system is asked"))
    next(machine.private_sockets(real))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set $XDG_RUNTIME_DIR and the directory that stands for /tmp/ckptd-UID to new
    places, so that other daemons of this machine do not matter.
    """
    with tempfile.TemporaryDirectory(prefix="ckptd-test-") as name:
        path = Path(name) / "runtime"
        path.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
        monkeypatch.setattr(
            "ckptd.shared.system.machine.plain_directory", lambda: path.parent / "plain"
        )
        yield path


def test_private_socket_is_in_the_runtime_directory(runtime: Path) -> None:
    root = Path("/" + "long/" * 40)
    name = f"ckptd-{machine.root_digest(root)}.sock"
    assert machine.private_socket(root) == runtime / name
    (runtime.parent / "plain").mkdir(mode=0o700)
    assert list(machine.private_sockets(root)) == [runtime / name, runtime.parent / "plain" / name]


def test_private_socket_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("/" + "long/" * 40)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert len(os.fsencode(machine.private_socket(root))) <= 96
    assert str(machine.private_socket(root).parent).startswith(f"/tmp/ckptd-{os.getuid()}")
    monkeypatch.setattr(
        "ckptd.shared.system.machine._runtime_directory",
        lambda: Path(os.environ["XDG_RUNTIME_DIR"]),
    )
    for length in range(2, 200):
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * (length - 1))
        assert len(os.fsencode(machine.private_socket(root))) <= 96


@pytest.mark.parametrize(
    "kind", ["missing", "a file", "relative", "writable by others", "another user's"]
)
def test_an_unusable_runtime_directory_is_ignored(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "missing":
        runtime.rmdir()
    elif kind == "a file":
        runtime.rmdir()
        runtime.touch()
    elif kind == "relative":
        monkeypatch.chdir(runtime.parent)
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime.name)
    elif kind == "writable by others":
        runtime.chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert machine.private_socket(Path("/ckpts")).parent == runtime.parent / "plain"
    assert len(machine.default_sockets()) == 1


def test_default_sockets(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pwd.getpwuid",
        lambda uid: pwd.struct_passwd(("ada", "x", uid, uid, "", "/home/ada", "/bin/sh")),
    )
    assert machine.default_sockets() == [Path("/run/ckptd/ada.sock"), runtime / "ckptd.sock"]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert machine.default_sockets() == [Path("/run/ckptd/ada.sock")]


def test_default_socket_of_a_uid_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert machine.default_sockets() == [Path(f"/run/ckptd/{os.getuid()}.sock")]


def test_systemd_comes_first() -> None:
    assert machine.default_state_dir(
        {"STATE_DIRECTORY": "/var/lib/ckptd/alice:/other", "HOME": "/home/alice"}
    ) == Path("/var/lib/ckptd/alice")


def test_root_uses_the_directory_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert machine.default_state_dir({"HOME": "/root"}) == Path("/var/lib/ckptd")


def test_another_user_uses_a_directory_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert (
        machine.default_state_dir({"HOME": str(tmp_path)})
        == tmp_path / ".local" / "state" / "ckptd"
    )
    assert (
        machine.default_state_dir({"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"})
        == tmp_path / ".local" / "state" / "ckptd"
    )
    assert (
        machine.default_state_dir({"HOME": str(tmp_path), "XDG_STATE_HOME": f"{tmp_path}/xdg"})
        == tmp_path / "xdg" / "ckptd"
    )


@pytest.mark.parametrize("home", [{}, {"HOME": "/proc/nowhere"}, {"HOME": "relative"}])
def test_without_a_home_the_default_is_in_var_tmp(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Path("/var/tmp") == machine._TEMPORARY
    monkeypatch.setattr(machine, "_TEMPORARY", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "mkdir", made_by(12345, os.mkdir))
    monkeypatch.setattr(
        os, "access", lambda path, mode, **options: not str(path).startswith("/proc")
    )
    assert machine.default_state_dir(home) == tmp_path / "ckptd-12345"


@pytest.mark.parametrize("taken", [False, True])
def test_the_directory_in_var_tmp_is_the_same_at_every_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: bool
) -> None:
    """Another directory would have no journal, and not the slots that lie on the disk."""
    monkeypatch.setattr(machine, "_TEMPORARY", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "mkdir", made_by(12345, os.mkdir))
    if taken:
        (tmp_path / "ckptd-12345").mkdir(mode=0o777)
        os.chown(tmp_path / "ckptd-12345", 1, 1)
    first = machine.default_state_dir({})
    make_directories(PosixFileSystem(), first / "host" / "root")
    assert (first.stat().st_mode & 0o777, machine.default_state_dir({})) == (0o700, first)
    assert len(list(tmp_path.iterdir())) == 1 + taken


def made_by(uid: int, mkdir: Callable[..., None]) -> Callable[..., None]:
    """Return `mkdir` with directories that belong to a user."""

    def made(path: Path, mode: int = 0o777, **options: Any) -> None:
        mkdir(path, mode, **options)
        os.chown(path, uid, uid, **options)

    return made


def test_a_home_that_this_user_cannot_see_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run as another user with the home of root."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    (tmp_path / "home").mkdir(mode=0o700)
    monkeypatch.setattr(machine, "_TEMPORARY", tmp_path)  # where this user may make nothing
    os.seteuid(12345)
    try:
        assert (
            machine.default_state_dir({"HOME": str(tmp_path / "home" / "inner")})
            == tmp_path / "ckptd-12345"
        )
    finally:
        os.seteuid(0)


def test_the_environment_variable_names_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTD_STATE_DIR", "here")
    assert machine.configured_state_dir() == tmp_path / "here"
    monkeypatch.delenv("CKPTD_STATE_DIR")
    assert machine.configured_state_dir() == machine.default_state_dir()


def test_a_root_has_a_directory_for_each_host_and_real_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    first = machine.state_directory(tmp_path, tmp_path / "root")
    assert (
        first
        == machine.state_directory(tmp_path, tmp_path / "link")
        != machine.state_directory(tmp_path, tmp_path / "other")
    )
    monkeypatch.setattr(machine, "host", lambda: "another-host")
    assert (
        machine.state_directory(tmp_path, tmp_path / "root")
        == tmp_path / "another-host" / first.name
    )
