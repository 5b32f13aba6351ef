"""Plays another user of the node, who tries everything that an ordinary account may do
to a victim's daemon, memory and checkpoints.

`python -m tests.crash.users --tries 60 [--seed N]`, as root. A thief (uid 65534) takes
names before the victim needs them, listens where the victim expects its daemon, locks,
opens, cuts and deletes files, signals processes, and connects to sockets. The victim (a
random uid without other processes) trains. In each try its snapshots must become
durable, and a second run must recover the newest one bit for bit. The thief must read
nothing that the victim has in memory, nothing of the thief's may be used or changed,
and no call may hang. Where the thief owns the root or the socket that the victim names,
the victim must be refused with an error, and can use its own instead.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch

from ckptd.agent import Agent
from ckptd.shared import errors, names
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader, write_header
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.session import Role, Session
from tests.crash.images import Unavailable
from tests.support import forks, trainers

THIEF = 65534
SIZE = 5_000
STEPS = 3
SECONDS = 60.0
SHAPES = (
    "directory",
    "closed directory",
    "file",
    "FIFO",
    "link",
    "dangling link",
    "second name",
    "daemon",
)
MODES = (0o755, 0o700)
GROUPS = (
    "daemon in the socket "
    "directory", "locks", "socket "
        "directory", "segment directory", "own file at the socket", "socket", "at work",
    "runtime directory", "root",
)  # fmt: skip


class Case:
    """One try: the paths of the victim `uid`, below a directory in which everybody may
    make files, as in /tmp.
    """

    def __init__(self, kind: str, shape: str, mode: int, uid: int, python: str) -> None:
        self.kind, self.shape, self.mode, self.uid, self.python = kind, shape, mode, uid, python
        self.place = Path(tempfile.mkdtemp(prefix="ckptd-users-"))
        os.chmod(self.place, 0o1777)
        self.root, self.socket, self.runtime = (
            self.place / "root",
            self.place / "s",
            self.place / "runtime",
        )
        self.thiefs = self.place / "thief"
        self.plain = Path(f"/tmp/ckptd-{uid}")
        self.segments = Path(f"/dev/shm/ckptd-{uid}-{machine.root_digest(self.root)}")
        self.home = self.place / "home"
        self.home.mkdir()
        os.chown(self.home, uid, uid)
        if kind != "root":
            self.root.mkdir()
            os.chmod(self.root, mode)
            os.chown(self.root, uid, uid)

    def __str__(self) -> str:
        return f"{self.kind}, {self.shape}, root {self.mode:o}"

    @property
    def taken(self) -> Path | None:
        """The name that the thief takes before the victim needs it."""
        where = self.kind.removeprefix("daemon in the ").replace(" ", "_")
        places = {"socket_directory": self.plain, "segment_directory": self.segments,
            "socket": self.socket,
                  "runtime_directory": self.runtime, "root": self.root}  # fmt: skip
        return places.get(where)

    def memory(self) -> list[Path]:
        """Return every directory of this victim in the tmpfs and in /tmp."""
        return [
            *Path("/dev/shm").glob(f"ckptd-{self.uid}-*"),
            *Path("/tmp").glob(f"ckptd-{self.uid}*"),
        ]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["uids"]):
            if process.info["uids"] is not None and process.info["uids"].real == self.uid:
                found.append(process)
        return found

    def remove(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes(), timeout=10)
        for path in (*self.memory(), self.place):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def python(place: Path) -> str:
    """Return a Python that other users can run, with the packages of this one.

    Raises Unavailable if there is none.

    This Python may lie in root's home. Then another of the same version in /usr/bin is
    used, in a virtual environment that is made at `place`.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (place / "bin").mkdir(parents=True)
    (place / "lib" / version).mkdir(parents=True)
    (place / "lib" / version / "site-packages").symlink_to(sysconfig.get_paths()["purelib"])
    (place / "bin" / "python").symlink_to(f"/usr/bin/{version}")
    (place / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for found in (sys.executable, str(place / "bin" / "python")):
        with suppress(OSError):
            if (
                subprocess.run(
                    [found, "-c", "import ckptd.daemon.process.app"],
                    user=THIEF,
                    group=THIEF,
                    extra_groups=[],
                    stderr=subprocess.DEVNULL,
                ).returncode
                == 0
            ):
                return found
    raise Unavailable(f"another user cannot run {sys.executable}")


def become(uid: int) -> None:
    """Run this process as `uid` from now on, with the umask that most systems set."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0o022)


# -- the victim


def victim(case: Case, life: int, answer: Connection) -> None:
    """Train in a forked process.

    Answer with the steps saved and recovered, or with the error.
    """
    become(case.uid)
    torch.set_num_threads(1)
    for key in [key for key in os.environ if key.startswith(("CKPTD_", "XDG_", "STATE_"))]:
        del os.environ[key]
    os.environ["HOME"] = str(case.home)
    sys.executable = case.python
    if case.taken == case.runtime:
        os.environ["XDG_RUNTIME_DIR"] = str(case.runtime)
    try:
        answer.send(("done", _train(case, life)))
    except BaseException as error:
        answer.send((type(error).__name__, str(error)))


def _train(case: Case, life: int) -> str:
    root = case.root
    if life == 1 and case.taken in (case.socket, case.root):
        named = case.taken == case.socket
        try:
            Agent(
                trainers.JOB,
                socket=case.socket if named else None,
                root=None if named else case.root,
            )
            return "a socket or root of the thief was used"
        except (errors.Forbidden, errors.DaemonUnreachable) as error:
            if case.shape == "daemon" and "uid 65534" not in str(error):
                return f"the victim is not told whose it is: {error}"
    if case.taken == case.root:
        root = case.place / "mine"
    agent = Agent(trainers.JOB, root=root)
    state = trainers.blank(SIZE)
    recovered = agent.recover(state)
    if life > 1:
        if recovered is None or recovered.step != STEPS * (life - 1):
            return f"life {life} recovered {recovered}"
        trainers.assert_equal(state, STEPS * (life - 1), SIZE)
    elif recovered is not None:
        return f"a first life recovered {recovered}"
    for step in range(STEPS * (life - 1) + 1, STEPS * life + 1):
        agent.snapshot(trainers.expected(step, SIZE), step=step).wait("durable", timeout=SECONDS)
        if case.kind == "at work":
            time.sleep(0.1)  # gives the thief time to work
    state = trainers.blank(SIZE)
    recovered = agent.recover(state)
    if recovered is None or recovered.step != STEPS * life:
        return f"recovered {recovered} after {STEPS * life} was durable"
    trainers.assert_equal(state, STEPS * life, SIZE)
    if case.kind == "locks":
        agent.close()  # the next run then recovers from storage
    return ""


def run_victim(case: Case, life: int) -> str:
    """Run one victim to its end.

    It exits without closing its agent, as after SIGKILL. Return what went wrong, or "".
    """
    mine, its = Pipe()
    process = forks.context().Process(target=victim, args=(case, life, its), daemon=True)
    process.start()
    its.close()
    try:
        kind, said = mine.recv() if mine.poll(SECONDS) else ("hangs", "")
    except EOFError:
        kind, said = "ended", "without a word"
    process.kill()
    process.join()
    return "" if (kind, said) == ("done", "") else f"victim: {kind} {said}".strip()


def run_daemon(case: Case) -> str:
    """Run `ckptd run` as the victim, with a socket name that the thief has taken.

    It must refuse, and leave the name alone.
    """
    before = _status(case.socket)
    command = [
        case.python,
        "-m",
        "ckptd.daemon",
        "run",
        "--root",
        str(case.root),
        "--socket",
        str(case.socket),
        "--state-dir",
        str(case.home / "state"),
    ]
    try:
        done = subprocess.run(
            command,
            user=case.uid,
            group=case.uid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=10,
            env={},
        )
    except subprocess.TimeoutExpired:
        return "a daemon runs at a socket that is not its own"
    if done.returncode == 0 or "Traceback" in done.stderr:
        return f"ckptd run ended with {done.returncode}: {done.stderr[-500:]}"
    return (
        ""
        if _status(case.socket) == before
        else "ckptd run has removed or replaced a file that was not its socket"
    )


def _status(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_uid, found.st_mode


# -- the thief


class FakeDaemon:
    """A daemon of the thief that speaks enough of the protocol for a trainer to save.

    Its memory would then hold the victim's tensors.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._root, self.heard = root, list[str]()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        os.chmod(path, 0o777)
        self._listener.listen(50)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        session = Session(Role.DAEMON)
        segments: dict[str, int] = {}
        try:
            while data := client.recv(65536):
                for message in session.receive(data):
                    self.heard.append(f"the fake daemon was sent {type(message).__name__}")
                    reply, descriptors = self._answer(message, segments)
                    socket.send_fds(client, [session.send(reply)], descriptors)
        except (errors.CkptdError, OSError):
            pass

    def _answer(self, message: Any, segments: dict[str, int]) -> tuple[m.Reply, list[int]]:
        number = message.id
        match message:
            case m.Hello():
                return m.Welcome(
                    re=number, version=1, root=str(self._root), private=True, chunk_size=MIN_CHUNK
                ), []
            case m.Begin():
                return m.Began(re=number, attempt=1), []
            case m.Allocate():
                made = [self._segment(message.capacity, slot) for slot in range(message.count)]
                segments.update((held.segment, fd) for held, fd in made)
                return m.Segments(re=number, segments=[held for held, _ in made]), [
                    fd for _, fd in made for _ in range(2)
                ]
            case m.Acquire():
                return m.Granted(re=number, segment=next(iter(segments)), step=message.step), []
            case m.Seal():
                weight = trainers.expected(message.step, SIZE)["weight"].numpy().tobytes()
                fd = segments[message.segment]
                if weight[:4096] in os.pread(fd, os.fstat(fd).st_size, 0):
                    self.heard.append(f"the thief has the tensors of step {message.step}")
                return m.Sealed(re=number, durable=True), []
            case m.Find():
                return m.Found(re=number, candidates=[]), []
            case m.Status():
                return m.StatusReport(re=number, report="{}"), []
        return m.Done(re=number), []

    def _segment(self, capacity: int, slot: int) -> tuple[m.HeldSegment, int]:
        header = SegmentHeader(
            job=trainers.JOB,
            attempt=1,
            rank=0,
            world_size=1,
            slot=slot,
            capacity=capacity,
            chunk_size=MIN_CHUNK,
        )
        fd = os.memfd_create("loot")
        os.ftruncate(fd, header.file_length)
        write_header(fd, header)
        return m.HeldSegment(
            segment=names.new_segment_file(),
            slot=slot,
            capacity=capacity,
            generation=header.generation,
        ), fd


class Thief:
    """What the thief has taken and holds.

    `loot` lists everything that the thief should not have got.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.loot: set[str] = set()
        self.daemons: list[FakeDaemon] = []
        self._held: dict[tuple[int, int], int] = {}
        self._clients: list[socket.socket] = []

    def take(self) -> None:
        """Make a file of the kind `case.shape` at the name that the victim will need."""
        path, own = self.case.taken, self.case.thiefs
        assert path is not None
        own.mkdir()
        own.chmod(0o777)
        (own / "file").write_text("the thief's")
        (own / "file").chmod(0o666)
        match self.case.shape:
            case "directory" | "closed directory":
                path.mkdir()
                path.chmod(0o777 if self.case.shape == "directory" else 0o700)
            case "file":
                path.write_text("the thief's")
                path.chmod(0o666)
            case "FIFO":
                os.mkfifo(path, 0o666)
                path.chmod(0o666)
            case "link":
                (own / "directory").mkdir()
                (own / "directory").chmod(0o777)
                path.symlink_to(own / ("directory" if path != self.case.socket else "file"))
            case "dangling link":
                path.symlink_to(own / "nothing")
            case "second name":
                with suppress(OSError):  # the name is on another file system
                    os.link(own / "file", path)
            case "daemon":
                self._take_with_daemon(path)

    def _take_with_daemon(self, path: Path) -> None:
        if path == self.case.socket:
            self.daemons.append(FakeDaemon(path, self.case.root))
            return
        path.mkdir()
        path.chmod(0o777)
        if path == self.case.root:  # together with everything in it that a daemon would make
            for part in (path / ".ckptd", path / ".ckptd" / machine.host(), path / trainers.JOB):
                part.mkdir()
                part.chmod(0o777)
            return
        for name in (f"ckptd-{machine.root_digest(self.case.root)}.sock", "ckptd.sock"):
            self.daemons.append(FakeDaemon(path / name, self.case.root))

    def lock(self) -> None:
        """Lock every file and directory that can be opened, manifests exclusively and
        the others alternately, and keep the locks.
        """
        for number, path in enumerate(self._paths()):
            kind = fcntl.LOCK_EX if path.name == names.MANIFEST or number % 2 else fcntl.LOCK_SH
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            except OSError:
                continue
            status = os.fstat(fd)
            key = status.st_dev, status.st_ino
            try:
                if key in self._held or status.st_uid == THIEF:
                    raise FileExistsError
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                # An OFD lock for reading: one for writing needs a writable descriptor.
                if stat.S_ISREG(status.st_mode):
                    fcntl.fcntl(
                        fd,
                        fcntl.F_OFD_SETLK,
                        struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0),
                    )
            except OSError:
                os.close(fd)  # the victim holds a lock; the next round tries again
            else:
                self._held[key] = fd

    def work(self) -> None:
        """Try everything once on every file, process and socket of the victim."""
        for path in self._paths():
            self._try_file(path)
        for process in self.case.processes():
            for number in (0, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
                self._try(
                    f"signal {number} to pid {process.pid}",
                    lambda p=process, n=number: os.kill(p.pid, n),  # type: ignore[misc]
                )
        for path in [path for path in self._paths() if self._is_socket(path)]:
            for _ in range(20):
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                client.settimeout(1)
                self._try(f"connect to {path}", lambda c=client, p=path: c.connect(str(p)))  # type: ignore[misc]
                client.close()

    def _try_file(self, path: Path) -> None:
        try:
            status = path.lstat()
        except OSError:
            return
        if status.st_uid == THIEF:
            return
        private = path.is_relative_to("/dev/shm") or (
            path.is_relative_to(self.case.root) and self.case.mode == 0o700
        )
        if private and stat.S_ISREG(status.st_mode):
            self._try(
                f"read {path}",
                lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)),
            )
        if stat.S_ISDIR(status.st_mode):
            self._try(f"make a file in {path}", lambda: (path / "thief").write_text(""))
        else:
            self._try(
                f"write {path}",
                lambda: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)),
            )
            self._try(f"cut {path}", lambda: os.truncate(path, 0))
            self._try(f"unlink {path}", path.unlink)
            self._try(
                f"link {path}",
                lambda: os.link(path, self.case.place / "second", follow_symlinks=False),
            )
        self._try(f"rename {path}", lambda: os.rename(path, path.with_name("thief")))
        self._try(f"chmod {path}", lambda: path.chmod(0o777))

    def _try(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ESRCH,
                errno.ENOTDIR, errno.ECONNREFUSED, errno.ENXIO,
                                   errno.EROFS, errno.EINVAL, errno.ELOOP, errno.EEXIST,
                                   errno.ENOTEMPTY, errno.EISDIR):  # fmt: skip
                self.loot.add(f"{what}: {error}")
        else:
            self.loot.add(what)

    def _paths(self) -> Iterator[Path]:
        for top in (self.case.root, self.case.socket, *self.case.memory()):
            yield top
            for directory, inner, files in os.walk(top):
                yield from (Path(directory) / name for name in (*inner, *files))

    def _is_socket(self, path: Path) -> bool:
        try:
            return path.is_socket()
        except OSError:
            return False

    def got(self) -> list[str]:
        return sorted(self.loot | {word for daemon in self.daemons for word in daemon.heard})


def thief(case: Case, orders: Connection) -> None:
    """Execute orders: take a name, or lock, or work until the next order.

    At the end, answer with the loot.
    """
    become(THIEF)
    it = Thief(case)
    while True:
        word = orders.recv()
        if word == "take":
            try:
                it.take()
            except OSError as error:
                orders.send(f"the thief could not take the name: {error}")
                continue
        elif word == "work":
            while not orders.poll(0.02):
                it.lock() if case.kind == "locks" else it.work()
            continue
        elif word == "lock":
            it.lock()
        elif word == "got":
            orders.send(it.got())
            return
        orders.send("")


# -- one try


def attempt(case: Case) -> str:
    """Do one try and return what went wrong, or ""."""
    orders, its = Pipe()
    process = forks.context().Process(target=thief, args=(case, its), daemon=True)
    process.start()
    its.close()
    try:
        if case.taken is not None:
            orders.send("take")
            if problem := orders.recv():
                return str(problem)
        before = _status(case.taken) if case.taken is not None else None
        if case.kind == "own file at the socket":
            case.socket.write_text("the victim's own")
            os.chown(case.socket, case.uid, case.uid)
        if case.taken is None:
            orders.send("work")
        problems = [run_daemon(case) if case.kind in ("own file at the socket", "socket") else ""]
        for life in (1, 2):
            if not any(problems):
                problems.append(run_victim(case, life))
                if case.kind == "locks" and life == 1:
                    # The newest checkpoint can be locked as well: the victim has ended,
                    # so nobody else holds a lock.
                    orders.send("lock")
                    orders.recv()
        if case.taken is not None and before is not None and _status(case.taken) != before:
            problems.append(f"{case.taken} was replaced")
        orders.send("got")
        problems += orders.recv() if orders.poll(SECONDS) else ["the thief hangs"]
        problems += _used(case)
        return "; ".join(problem for problem in problems if problem)
    finally:
        process.kill()
        process.join()


def _is_thiefs(path: Path) -> bool:
    """Return True if the directory belongs to the thief.

    False also if the thief could not take the name, because the file system has no hard
    links across it.
    """
    return path.is_dir() and not path.is_symlink() and path.lstat().st_uid == THIEF


def _used(case: Case) -> list[str]:
    """Return everything of the thief's that somebody has changed."""
    found = []
    for top in (
        path for path in (case.thiefs, case.taken) if path is not None and _is_thiefs(path)
    ):
        found += [
            f"{path} was made there" for path in top.rglob("*") if path.lstat().st_uid != THIEF
        ]
    if case.thiefs.exists() and (case.thiefs / "file").read_text() != "the thief's":
        found.append("the thief's file was written")
    return found


def cases(chance: Random, python: str) -> Iterator[Case]:
    """Yield every group in turn, each time with another shape and mode."""
    shapes = {group: chance.sample(SHAPES, len(SHAPES)) for group in GROUPS}
    number = 0
    while True:
        for group in GROUPS:
            shape = shapes[group][number % len(SHAPES)]
            if group.startswith("daemon in"):
                shape = "daemon"
            elif group in ("locks", "at work", "own file at the socket"):
                shape = "-"
            yield Case(group, shape, MODES[number % 2], chance.randrange(20_000, 60_000), python)
        number += 1


def run(count: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Do `count` tries, or as many as fit into `seconds`, with seed `number`.

    Return how many of each kind were done, and what went wrong.

    Raises Unavailable if this process cannot become another user.
    """
    if os.geteuid() != 0:
        raise Unavailable("not root")
    kinds, problems, end = Counter[str](), list[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="ckptd-users-") as place:
        os.chmod(place, 0o755)
        for case in cases(Random(number), python(Path(place) / "venv")):
            try:
                if kinds.total() >= count or time.monotonic() > end:
                    break
                problem = attempt(case)
            finally:
                case.remove()
            kinds[case.kind] += 1
            if problem:
                problems.append(f"{case}: {problem}")
    return kinds, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    begun = time.monotonic()
    kinds, problems = run(options.tries, options.seed)
    print(*(f"{kind:32} {count}" for kind, count in kinds.most_common()), *problems, sep="\n")
    print(
        f"{kinds.total()} tries, seed {options.seed}, {len(problems)} lost, "
        f"{time.monotonic() - begun:.0f} s"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
