"""Nodes on one machine, for the acts of demo.py that lose one.

A node is a set of name spaces of the kernel (unshare(1)): it has a host name, processes
and shared memory of its own, and a daemon. All nodes share a root, which stands for a
shared file system, or is the URL of an object store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ckptd.shared.location import Location
from examples.runs import (
    NOT_FOR_THE_TRAINER,
    SETTINGS,
    TRAINER,
    DemoFailed,
    Run,
    newest,
    status_of,
)

_SPACES = (
    "--user",
    "--map-root-user",
    "--mount",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_SETUP = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && echo ready && exec sleep infinity'
_SECONDS = 60.0


class Node:
    """A node and its daemon.

    `place` is the directory that stands for its local disk and has its socket.
    `environ` has more variables for all processes on the node.
    """

    def __init__(self, name: str, place: Path, root: Location, environ: Mapping[str, str]) -> None:
        self.name, self._place, self._root, self._environ = name, place, root, environ
        self.socket = place / "s"
        self._spaces: subprocess.Popen[bytes] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._init = 0

    def start(self) -> None:
        """Start an empty node and its daemon.

        Raises DemoFailed if this machine does not let its users make name spaces.
        """
        self._place.mkdir(parents=True, mode=0o700)
        self._spaces = subprocess.Popen(
            ["unshare", *_SPACES, "sh", "-c", _SETUP, self.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._spaces.stdout is not None
        assert self._spaces.stderr is not None
        if self._spaces.stdout.readline() != b"ready\n":
            raise DemoFailed(
                f"this machine lets its users make no name spaces: "
                f"{self._spaces.stderr.read().decode().strip()}"
            )
        (init,) = psutil.Process(self._spaces.pid).children()
        self._init = init.pid
        ready, told = os.pipe()
        with open(self._place / "daemon.log", "wb") as log:
            self._daemon = self.run(
                [sys.executable, "-m", "ckptd.daemon", "run", "--root", str(self._root), "--socket",
                str(self.socket), "--state-dir",
                 str(self._place / "state"), "--ready-fd", str(told)],
                log, pass_fds=[told],
            )  # fmt: skip
        os.close(told)
        with open(ready, "rb") as end:
            if not end.read(1):
                raise DemoFailed(
                    f"the daemon of {self.name} did not start: "
                    f"{(self._place / 'daemon.log').read_text()[-2000:]}"
                )

    def run(self, command: list[str], log: Any, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on this node."""
        others = {key: value for key, value in os.environ.items() if key not in NOT_FOR_THE_TRAINER}
        enter = [
            "nsenter",
            "--target",
            str(self._init),
            "--user",
            "--preserve-credentials",
            "--mount",
            "--uts",
            "--pid",
        ]
        here = {
            "CKPTD_SOCKET": str(self.socket),
            "GLOO_SOCKET_IFNAME": "lo",
            **self._environ,
        }
        return subprocess.Popen(
            [*enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=SETTINGS | others | here,
            **options,
        )

    def lose(self) -> None:
        """Lose the node: the kernel kills all its processes and frees its shared
        memory, and its disk is gone.
        """
        if self._spaces is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self._init).kill()
            self._spaces.kill()
            self._spaces.communicate()
            self._spaces = None
        if self._daemon is not None:
            self._daemon.wait()
        shutil.rmtree(self._place, ignore_errors=True)

    def last_durable(self) -> int:
        """Return the newest step in storage that the daemon of this node knows, or 0."""
        return newest(status_of(self.socket), "last_durable")


class NodesRun(Run):
    """A training run on several nodes, with one rank on each.

    `environ` has more variables for the daemons and the ranks.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        count: int,
        steps: int,
        arguments: str,
        *,
        root: Location | None = None,
        trainer: Path = TRAINER,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(out, name, steps, arguments, ranks=count, trainer=trainer)
        if root is not None:
            self.root = root  # type: ignore[assignment]
        self._place = Path(tempfile.mkdtemp(prefix="ckptd-demo-"))
        variables = {"CKPTD_JOB": trainer.stem, **(environ or {})}
        self.nodes = [
            Node(f"node{number}", self._place / str(number), self.root, variables)
            for number in range(count)
        ]
        self._torchruns: dict[int, subprocess.Popen[bytes]] = {}
        self._port = 0

    def start_nodes(self) -> None:
        """Start empty nodes, each with its daemon."""
        for node in self.nodes:
            node.start()

    def start(self) -> None:
        """Start torchrun on all nodes, as on several machines."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._printed_before = len(self.printed())
        for number in range(len(self.nodes)):
            self.join(number)
        self._trainer = self._torchruns[0]

    def join(self, number: int) -> None:
        """Start torchrun on one node."""
        trainer = [str(self.trainer), "--root", str(self.root), "--losses", str(self.losses)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
        command = [*launcher, *self._options(number), *trainer, *self._arguments]
        with open(self.log, "ab") as log:
            self._torchruns[number] = self.nodes[number].run(command, log)

    def _options(self, number: int) -> list[str]:
        """Return the options by which torchrun on this node finds the others."""
        there = ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
        return ["--nnodes", str(self.ranks), "--node-rank", str(number), *there]

    def kill(self) -> int:
        """SIGKILL torchrun and all ranks, where they still run.

        Return the step that they were computing.
        """
        for torchrun in self._torchruns.values():
            if torchrun.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(torchrun.pid).children(recursive=True):
                        process.kill()
                torchrun.kill()
            torchrun.wait()
        return self.computing()

    def lose(self, number: int) -> int:
        """Lose a node with everything on it. Return the step that was being computed."""
        self.nodes[number].lose()
        self._torchruns.pop(number).wait()
        return self.computing()

    def end_ranks(self) -> None:
        """Wait until torchrun on the nodes that are left has ended its rank, and end
        what is still running.
        """
        for torchrun in self._torchruns.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                torchrun.wait(_SECONDS)
        self.kill()

    def end(self) -> None:
        self.kill()
        for node in self.nodes:
            node.lose()
        shutil.rmtree(self._place, ignore_errors=True)


class ElasticRun(NodesRun):
    """A run that torchrun itself starts again after the loss of a node.

    Node 0 serves as the meeting point of all nodes, and must not be lost.
    """

    fewest: int | None = None
    """The number of nodes that is enough to go on. None: only with all nodes."""

    def _options(self, number: int) -> list[str]:
        """Return the options by which torchrun on this node finds the others.

        Each node has an address of its own, by which torchrun tells nodes apart and
        orders the ranks. A dead node is given up sooner than by default.
        """
        times = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8"
        return [
            "--nnodes", f"{self.fewest or self.ranks}:{self.ranks}", "--max-restarts", "9",
            "--rdzv-backend", "c10d", "--rdzv-id", f"{self.trainer.stem}-{self._port}",
            "--rdzv-endpoint", f"127.0.0.1:{self._port}",
            "--rdzv-conf", f"is_host={number == 0},{times}",
            "--local-addr", f"127.0.0.{number + 1}",
        ]  # fmt: skip


def refusal() -> str:
    """Return the reason why this machine cannot show two nodes, or ""."""
    if missing := [tool for tool in ("unshare", "nsenter") if shutil.which(tool) is None]:
        return f"there is no {missing[0]} (of util-linux) on this machine"
    tried = subprocess.run(
        ["unshare", *_SPACES, "sh", "-c", _SETUP.replace("exec sleep infinity", "true"), "node"],
        capture_output=True,
    )
    return (
        ""
        if tried.returncode == 0
        else f"this machine lets its users make no name spaces ({tried.stderr.decode().strip()})"
    )
