"""Several nodes on one machine: each has a daemon with a host name, a journal and
shared memory of its own, and all share one root.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ckptd.daemon.job import sightings
from ckptd.daemon.runs import heartbeats, run_guard
from ckptd.shared.location import Location
from ckptd.shared.system import machine
from tests.support import spaces
from tests.support.daemons import Daemon, Home

SHM = Path("/dev/shm")


def become(name: str, then: Callable[[], None] | None = None, shm: Path | None = None) -> None:
    """Give this process the name of another host, which is all that a daemon knows of
    the machine it runs on.

    shm: the directory that is to be its /dev/shm, if it gets name spaces of its own.
    """
    if shm is not None:
        spaces.enter(name, shm)
    else:
        machine.host = lambda: name
    if then is not None:
        then()


def beat_fast() -> None:
    """Make this daemon know sooner whether the heartbeat of another one is dead, but
    late enough for a slow machine.
    """
    heartbeats.RENEWAL_SECONDS, run_guard.LOOK_SECONDS, sightings.DEAD_SECONDS = 0.2, 0.1, 8.0


class Node:
    """A node, whose daemon is not running yet.

    `stage`: the stage of its daemon, if it is to have one. apart: True if its processes
    get a host name and a /dev/shm of their own from the kernel.
    """

    def __init__(
        self, name: str, root: Location, environ: Mapping[str, str], *, apart: bool = False
    ) -> None:
        self.name, self.apart = name, apart
        self.home = Home()
        self.home.root = root  # type: ignore[assignment]
        self.home.environ = dict(environ)
        self.shm = Path(tempfile.mkdtemp(prefix=f"ckptd-test-{name}-", dir=SHM))
        self.stage: Path | None = None
        self.daemon: Daemon | None = None

    def start(
        self,
        *arguments: str,
        failpoints: str = "",
        first: Callable[[], None] | None = None,
        wait: bool = True,
    ) -> Daemon:
        """Start the daemon of this node.

        `first` is called in its process, before anything else.
        """
        here = [
            "--shm-dir",
            str(SHM if self.apart else self.shm),
            "--state-dir",
            str(self.home.path / "state"),
            "--socket",
            str(self.home.socket),
        ]
        here += [] if self.stage is None else ["--stage", str(self.stage)]
        self.daemon = Daemon(
            self.home,
            *here,
            *arguments,
            failpoints=failpoints,
            forked=self.entry(first),
        )
        return self.daemon.wait_ready() if wait else self.daemon

    def entry(self, then: Callable[[], None] | None = None) -> Callable[[], None]:
        """Return a function that makes a process one of this node, and then calls `then`."""
        return partial(become, self.name, then, self.shm if self.apart else None)

    def kill(self) -> None:
        """Kill the daemon, if it runs."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon = None

    def segments(self) -> list[Path]:
        """Return the files of all segments in the shared memory of this node."""
        return sorted(self.shm.glob("*/*.seg"))

    def lose(self, *, disk: bool = True) -> None:
        """Lose the node: its daemon, its shared memory and its disk.

        It may be started again, as an empty node of the same name. disk: False if its
        disk comes back with it, as after a reboot.
        """
        self.kill()
        disks = (self.home.path / "state", self.home.path / "stage") if disk else ()
        for path in (*self.shm.iterdir(), *disks):
            shutil.rmtree(path, ignore_errors=True)

    def put_stage(self) -> None:
        """Put a local disk in front of the root, from the next start on."""
        self.stage = self.home.path / "stage"

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.home.path, ignore_errors=True)


class Nodes(Sequence[Node]):
    """Some nodes and the root that they share, by default a directory.

    `environ`: more variables for the daemons. apart: True if each node gets name spaces
    of its own from the kernel.
    """

    def __init__(
        self,
        count: int,
        root: Location | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ckptd-test-nodes-"))
        self.root = root or self.path / "root"
        self._nodes = [
            Node(f"node{number}", self.root, environ or {}, apart=apart) for number in range(count)
        ]

    def __getitem__(self, number):  # type: ignore[no-untyped-def]
        return self._nodes[number]

    def __len__(self) -> int:
        return len(self._nodes)

    def remove(self) -> None:
        for node in self._nodes:
            node.remove()
        shutil.rmtree(self.path, ignore_errors=True)

    def logs(self) -> str:
        """Return the end of each daemon's log."""
        return "\n".join(f"-- {node.name}\n{node.home.log_text()[-4000:]}" for node in self._nodes)


@contextmanager
def nodes(
    count: int,
    *arguments: str,
    root: Location | None = None,
    environ: Mapping[str, str] | None = None,
    staged: bool = False,
    first: Callable[[], None] | None = None,
) -> Iterator[Nodes]:
    """Context manager.

    Start so many nodes. If the body fails, the error's report has the ends of their
    logs.

    staged: True if each daemon has a stage. first: called in the process of each
    daemon, before anything else.
    """
    made = Nodes(count, root, environ)
    try:
        for node in made:
            if staged:
                node.put_stage()
            node.start(*arguments, first=first)
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        made.remove()
