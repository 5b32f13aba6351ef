"""Tests the root: it is made, refused if another user owns part of it, and locked."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.shared import names
from ckptd.shared.errors import Busy, StorageError
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.system import machine, root_lock
from tests.support.daemons import Daemon, Home, running, until
from tests.support.descriptors import opened
from tests.support.rooms import modules

USER, STRANGER = 12345, 65534


@pytest.fixture
def root() -> Iterator[Path]:
    """A root of `USER`. This process runs as that user during the test."""
    if os.getuid():
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(prefix="ckptd-test-") as name:
        os.chmod(name, 0o755)
        path = Path(name) / "root"
        path.mkdir()
        os.chown(path, USER, USER)
        os.seteuid(USER)
        try:
            yield path
        finally:
            os.seteuid(0)


def give(path: Path, uid: int) -> None:
    os.seteuid(0)
    os.chown(path, uid, uid, follow_symlinks=False)
    os.seteuid(USER)


def prepare(root: Path) -> None:
    """Prepare the root as the start of a daemon does, and unlock it again."""
    PosixStorage(root).serve(machine.host()).close()


def test_a_missing_root_is_made(root: Path) -> None:
    prepare(root / "a" / "b")
    assert [str(path.relative_to(root)) for path in sorted(root.rglob("*"))] == [
        "a",
        "a/b",
        "a/b/.ckptd",
        f"a/b/.ckptd/{machine.host()}",
        f"a/b/.ckptd/{machine.host()}/lock",
    ]
    prepare(root / "a" / "b")


@pytest.mark.parametrize(
    "where", ["", ".ckptd", ".ckptd/{host}", ".ckptd/attempts", ".ckptd/another-host"]
)
def test_a_directory_of_another_user_is_refused(root: Path, where: str) -> None:
    path = root / where.format(host=machine.host())
    path.mkdir(parents=True, exist_ok=True)
    prepare(root)
    path.chmod(0o777)
    before = {found: found.stat().st_mtime_ns for found in path.rglob("*")}
    give(path, STRANGER)
    with pytest.raises(
        StorageError,
        match=f"^{path} belongs to uid {STRANGER}, not to uid {USER} or root: that user could "
        f"replace",
    ):
        prepare(root)
    assert {found: found.stat().st_mtime_ns for found in path.rglob("*")} == before
    give(path, 0)
    prepare(root)


def test_nothing_is_made_in_a_root_of_another_user(root: Path) -> None:
    root.chmod(0o777)
    give(root, STRANGER)
    with pytest.raises(StorageError, match="use a directory of your own in it"):
        prepare(root)
    assert list(root.iterdir()) == []


def test_a_link_of_another_user_to_a_directory_of_ours_is_refused(root: Path) -> None:
    root.chmod(0o777)
    (root / "mine").mkdir()
    (root / "link").symlink_to("mine")
    prepare(root / "link")
    give(root / "link", STRANGER)
    with pytest.raises(StorageError, match=f"link belongs to uid {STRANGER}"):
        prepare(root / "link")


def test_a_daemon_that_runs_as_root_warns_and_continues(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.seteuid(0)
    prepare(root)
    assert (
        f"{root} belongs to uid {USER}, not to uid 0 or root; it is used because this daemon runs "
        f"as root" in caplog.text
    )
    assert open_root(root).refusal("job") == ""


def test_a_root_that_every_user_may_write_gives_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.chmod(0o1777)
    prepare(root)
    assert (
        f"every user of this node may write to the root {root}: run `chmod o-w {root}`"
        in caplog.text
    )


def test_a_job_directory_of_another_user_is_refused(root: Path) -> None:
    storage = open_root(root)
    assert storage.refusal("gpt") == ""
    (root / "gpt").mkdir()
    assert storage.refusal("gpt") == ""
    give(root / "gpt", STRANGER)
    assert storage.refusal("gpt") == (
        f"{root}/gpt belongs to uid {STRANGER}, not to uid {USER} or root, who could replace "
        f"checkpoints in it: "
        "use another job name or another root"
    )
    give(root / "gpt", 0)
    assert storage.refusal("gpt") == ""


def test_a_second_daemon_does_not_get_the_lock(root: Path) -> None:
    held = PosixStorage(root).serve(machine.host())
    for where in ("", f", at /run/s (pid {os.getpid()})"):
        with pytest.raises(Busy) as refused:
            PosixStorage(root).serve(machine.host())
        assert str(refused.value) == (
            f"another ckptd already serves {root}{where}, under the host name {machine.host()}: "
            f"use that one, or stop it first; if it runs on another node, give each node a name of "
            f"its own"
        )
        root_lock.write_hint(held.fileno(), Path("/run/s"))
    PosixStorage(root).serve("another-host").close()
    held.close()
    prepare(root)


def test_a_root_without_locks_is_refused_in_one_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    prepare(root)
    monkeypatch.setattr(fcntl, "flock", flock)
    before = opened(root)
    with pytest.raises(
        StorageError,
        match=f"cannot lock {root}, which keeps a second daemon out of it: No locks available",
    ):
        prepare(root)
    assert opened(root) == before


def import_everything() -> None:
    """Import all modules, because another user may not be able to read them later: a
    clone may lie below a directory of mode 0700.
    """
    for name in modules():
        if not name.endswith("__main__"):
            importlib.import_module(name)
    importlib.import_module("numpy.random")  # which NumPy imports at the first use


def become_user() -> None:
    import_everything()
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)


@pytest.mark.usefixtures("processes")
def test_a_daemon_does_not_save_into_another_users_job_directory(place: Home) -> None:
    if os.getuid():
        pytest.skip("becoming another user needs root")
    import_everything()
    os.chmod(place.path, 0o1777)
    place.root.mkdir()
    os.chown(place.root, USER, USER)
    (place.root / "gpt").mkdir()
    os.chown(place.root / "gpt", STRANGER, STRANGER)
    with place.log.open("ab"):
        os.chmod(place.log, 0o666)
    daemon = Daemon(place, forked=become_user)
    try:
        daemon.wait_ready()
        os.seteuid(USER)
        try:
            with pytest.raises(
                StorageError,
                match=f"gpt belongs to uid {STRANGER}, not to uid {USER} or root, who could "
                f"replace",
            ):
                Agent("gpt", socket=place.socket)
            agent = Agent("mine", socket=place.socket)
            agent.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
            agent.close()
        finally:
            os.seteuid(0)
    finally:
        daemon.close()
        for path in Path("/dev/shm").glob(f"ckptd-{USER}-{machine.root_digest(place.root)}*"):
            path.rmdir()


def modes(home: Home) -> dict[str, str]:
    """Return the mode of every file and directory that a daemon and its agent have
    made, by its name without the random part.
    """
    found = {}
    for top in (home.root, home.segments, home.socket):
        for path in (top, *sorted(top.rglob("*"))):
            name = (
                str(path)
                .replace(str(home.segments), "MEMORY")
                .replace(str(home.path), "")
                .replace(machine.host(), "HOST")
            )
            found[re.sub(r"[0-9a-f]{32}", "X", name)] = f"{stat.S_IMODE(path.lstat().st_mode):o}"
    return found


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("mask", "directory", "file"), [(0o022, "755", "644"), (0o077, "700", "600")]
)
def test_modes_of_everything_that_is_made(
    place: Home, mask: int, directory: str, file: str
) -> None:
    """Checkpoints have the modes that the daemon's umask leaves.

    Sockets, segments, journal and lock are accessible to their user only.
    """
    before = os.umask(mask)
    try:
        with running(place):
            agent = Agent("gpt", socket=place.socket)
            agent.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
            open_root(place.root).pin("gpt", "step-00000001.a0001")
            until(lambda: (place.root / "gpt" / "newest").exists(), "newest")
            until(lambda: (place.root / names.runs("gpt") / "a0001").exists(), "the heartbeat")
            found = modes(place)
            agent.close()
    finally:
        os.umask(before)
    assert found == {
        "/root": directory,
        "/root/.ckptd": directory,
        "/root/.ckptd/HOST": directory,
        "/root/.ckptd/HOST/lock": "600",
        "/root/.ckptd/id": file,
        "/root/.ckptd/attempts": directory,
        "/root/.ckptd/attempts/gpt": directory,
        "/root/.ckptd/attempts/gpt/a0001": file,
        "/root/.ckptd/pins": directory,
        "/root/.ckptd/pins/gpt": directory,
        "/root/.ckptd/pins/gpt/step-00000001.a0001": file,
        "/root/.ckptd/runs": directory,
        "/root/.ckptd/runs/gpt": directory,
        "/root/.ckptd/runs/gpt/a0001": file,
        "/root/gpt": directory,
        "/root/gpt/newest": file,
        "/root/gpt/step-00000001.a0001": directory,
        "/root/gpt/step-00000001.a0001/manifest.json": file,
        "/root/gpt/step-00000001.a0001/rank-00000.X.ckpt": file,
        "MEMORY": "700",
        "MEMORY/X.seg": "600",
        "/s": "700",
    }
