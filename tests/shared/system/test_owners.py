"""What belongs to this user, and what another user of the node could have put in its
place.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.shared.errors import Forbidden
from ckptd.shared.system import owners

STRANGER = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of mode 700 with a short path."""
    with tempfile.TemporaryDirectory(prefix="ckptd-test-") as path:
        yield Path(path)


def give_away(path: Path) -> Path:
    if os.getuid():
        # CI runs it as root.
        pytest.skip("giving a file away needs root")
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    return path


@contextmanager
def as_stranger() -> Iterator[None]:
    """Another user does what follows."""
    if os.getuid():
        pytest.skip("being another user needs root")
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


def made(path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def test_this_user_and_root_are_trusted() -> None:
    assert [owners.is_trusted(uid) for uid in (os.geteuid(), 0, STRANGER)] == [True, True, False]
    with as_stranger():
        assert [owners.is_trusted(uid) for uid in (STRANGER, 0, 1)] == [True, True, False]


def test_the_peer_of_a_connection_is_the_process_that_made_it() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert owners.peer_of(one) == (os.getpid(), os.geteuid())
        owners.check_peer(one, Path("/s"))


def test_a_listener_of_another_user_is_refused(place: Path) -> None:
    path = place / "s"
    place.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        with as_stranger():
            listener.bind(str(path))
            listener.listen()
        client.connect(str(path))
        with pytest.raises(
            Forbidden,
            match=f"^the process that listens at {path} belongs to uid {STRANGER}, not to uid "
            f"{os.geteuid()}",
        ):
            owners.check_peer(client, path)


# -- sockets and their directories


def test_a_socket_in_a_directory_of_ones_own_passes_and_so_does_a_missing_one(place: Path) -> None:
    (place / "s").touch()
    for path in (place / "s", place / "missing", place / "no" / "such" / "s"):
        owners.check_socket(path)


def test_a_socket_of_another_user_is_refused_at_its_own_place_and_behind_a_link(
    place: Path,
) -> None:
    theirs = place / "theirs"
    theirs.touch()
    (place / "link").symlink_to(theirs)
    owners.check_socket(place / "link")
    give_away(theirs)
    for path in (theirs, place / "link"):
        with pytest.raises(Forbidden, match=f"^the socket {theirs} belongs to uid {STRANGER}"):
            owners.check_socket(path)


def test_a_link_of_another_user_is_refused(place: Path) -> None:
    (place / "s").touch()
    (place / "link").symlink_to(place / "s")
    give_away(place / "link")
    with pytest.raises(Forbidden, match=f"^the socket {place / 'link'} belongs to uid {STRANGER}"):
        owners.check_socket(place / "link")


@pytest.mark.parametrize(
    ("mode", "allowed"),
    [(0o700, True), (0o755, True), (0o1777, True), (0o777, False), (0o770, False), (0o702, False)],
)
def test_nobody_else_may_replace_a_socket(place: Path, mode: int, allowed: bool) -> None:
    directory = made(place / "directory", mode)
    assert owners.is_usable_for_sockets(directory) == allowed
    if allowed:
        owners.check_socket_directory(directory / "s")
    else:
        with pytest.raises(
            Forbidden,
            match=f"^{directory} has mode {mode:o}, so that other users could replace the socket s "
            f"in it: ",
        ):
            owners.check_socket_directory(directory / "s")


def test_a_directory_of_another_user_is_refused_for_sockets(place: Path) -> None:
    directory = give_away(made(place / "theirs"))
    (place / "link").symlink_to(directory)
    for path in (directory, place / "link"):
        with pytest.raises(
            Forbidden,
            match=f"^{directory} belongs to uid {STRANGER}, who could replace the socket s in it",
        ):
            owners.check_socket_directory(path / "s")
        assert not owners.is_usable_for_sockets(path)


def test_what_is_no_directory_cannot_hold_sockets(place: Path) -> None:
    (place / "file").touch()
    assert [owners.is_usable_for_sockets(place / name) for name in ("file", "missing")] == [
        False,
        False,
    ]


# -- whose a path is


def test_a_path_of_this_user_is_no_strangers(place: Path) -> None:
    assert owners.stranger(place) == ""
    directory = os.open(place, os.O_RDONLY)
    (place / "file").touch()
    assert owners.stranger("file", directory) == ""
    os.close(directory)
    with pytest.raises(FileNotFoundError):
        owners.stranger(place / "missing")


def test_a_path_of_another_user_is_named(place: Path) -> None:
    theirs = give_away(made(place / "theirs"))
    reason = f"belongs to uid {STRANGER}, not to uid {os.geteuid()} or root"
    assert owners.stranger(theirs) == f"{theirs} {reason}"
    assert owners.stranger(theirs, called="the root") == f"the root {reason}"
    directory = os.open(place, os.O_RDONLY)
    assert owners.stranger("theirs", directory, "job x") == f"job x {reason}"
    os.close(directory)


def test_both_a_link_and_its_target_count(place: Path) -> None:
    own, theirs = made(place / "own"), give_away(made(place / "theirs"))
    (place / "own link").symlink_to(theirs)
    (place / "their link").symlink_to(own)
    give_away(place / "their link")
    assert [bool(owners.stranger(place / name)) for name in ("own link", "their link", "own")] == [
        True,
        True,
        False,
    ]


def test_an_owner_that_the_file_system_makes_up_counts_as_this_user(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS with all_squash, where every new file has the same owner."""
    theirs, fstat = give_away(made(place / "theirs")), os.fstat

    def squashed(fd: int) -> os.stat_result:
        found = list(fstat(fd))
        found[4] = STRANGER
        return os.stat_result(found)

    assert owners.owns_new_files(place, None, os.geteuid())
    assert not owners.owns_new_files(theirs, None, STRANGER)
    monkeypatch.setattr(os, "fstat", squashed)
    assert owners.owns_new_files(theirs, None, STRANGER)
    assert owners.stranger(theirs) == ""
    assert list(theirs.iterdir()) == []


def test_new_files_of_what_cannot_be_written_are_nobodys(place: Path) -> None:
    (place / "file").touch()
    assert not owners.owns_new_files(place / "file", None, os.geteuid())
    closed = made(place / "closed", 0o500)
    if os.getuid() == 0:
        give_away(closed)
        place.chmod(0o755)
        os.seteuid(STRANGER)
    try:
        assert not owners.owns_new_files(closed, None, os.geteuid())
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


# -- a directory of one's own at a well-known name


def test_a_free_name_is_taken_and_kept(place: Path) -> None:
    plain = place / "ckptd-0"
    assert (owners.own_directory(plain), owners.own_directories(plain)) == (plain, [])
    assert owners.make_own_directory(plain) == plain
    assert plain.stat().st_mode & 0o777 == 0o700
    assert owners.make_own_directory(plain) == owners.own_directory(plain) == plain
    assert owners.own_directories(plain) == [plain]


@pytest.mark.parametrize("kind", ["file", "link", "open to others", "another user's"])
def test_a_taken_name_gets_a_suffix_that_is_found_again(place: Path, kind: str) -> None:
    plain = place / "ckptd-0"
    if kind == "file":
        plain.touch()
    elif kind == "link":
        plain.symlink_to(made(place / "elsewhere"))
    else:
        made(plain, 0o755 if kind == "open to others" else 0o700)
        if kind == "another user's":
            give_away(plain)
    found = owners.make_own_directory(plain)
    assert (
        found.name.startswith("ckptd-0."),
        owners.is_own_directory(found),
        owners.is_own_directory(plain),
    ) == (True, True, False)
    assert owners.make_own_directory(plain) == owners.own_directory(plain) == found
    assert owners.own_directories(plain) == [found]


def test_only_suffixes_of_ckptd_count(place: Path) -> None:
    plain, suffix = place / "ckptd-0", "0123456789abcdef"
    for name in (
        "ckptd-0.backup",
        f"ckptd-01.{suffix}",
        f"ckptd-0.{suffix}0",
        f"ckptd-0.{suffix.upper()}",
        f"ckptd-0.{suffix}",
    ):
        made(place / name)
    assert owners.own_directories(plain) == [place / f"ckptd-0.{suffix}"]
    assert owners.own_directories(place / "missing" / "x") == []


def test_a_name_that_others_take_again_and_again_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(path: Path, mode: int) -> None:
        Path(path).touch()
        raise FileExistsError

    monkeypatch.setattr(os, "mkdir", taken)
    with pytest.raises(
        PermissionError, match=f"^a new directory beside {place / 'ckptd-0'} does not belong to uid"
    ):
        owners.make_own_directory(place / "ckptd-0")
