"""Shows that a job on two nodes loses nothing when a node dies: `python -m
examples.two_nodes`, which is also the third act of the demo.

A node is a set of name spaces of the kernel (unshare(1)): it has a host name, processes
and shared memory of its own, and a daemon. Both nodes share a root, which stands for a
shared file system, or is the URL of an object store. One rank trains on each node,
started by torchrun as on two machines. In the middle of a step everything on the second
node is killed, and its memory and its disk are gone. An empty node takes its place, and
the job must continue from storage. Every loss and every value of the last checkpoint
are compared with those of a run on one node that was not interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from ckptd.shared.location import Location, located
from examples.runs import (
    NOT_FOR_THE_TRAINER,
    RECOVERED,
    SETTINGS,
    TRAINER,
    Act,
    DemoFailed,
    Run,
    check_checkpoints,
    check_losses,
    print_table,
    say,
    wipe,
)

STEPS, ARGUMENTS = 24, "--every 4 --batch 2 --context 96 --layers 3 --width 256"
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
    """

    def __init__(self, name: str, place: Path, root: Location) -> None:
        self.name, self._place, self._root = name, place, root
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
            "CKPTD_JOB": TRAINER.stem,
            "GLOO_SOCKET_IFNAME": "lo",
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

    def last_durable(self) -> dict[str, Any]:
        """Return the newest checkpoint that the daemon of this node knows."""
        command = [
            sys.executable,
            "-m",
            "ckptd.daemon",
            "status",
            "--json",
            "--socket",
            str(self.socket),
        ]
        jobs: list[dict[str, Any]] = json.loads(
            subprocess.run(command, stdout=subprocess.PIPE).stdout
        ).get("jobs", [])
        if not jobs or jobs[0]["last_durable"] is None:
            raise DemoFailed(f"the daemon of {self.name} knows no checkpoint")
        durable: dict[str, Any] = jobs[0]["last_durable"]
        return durable


class NodesRun(Run):
    """A training run on two nodes, with one rank on each."""

    def __init__(self, out: Path, name: str, root: Location | None = None) -> None:
        super().__init__(out, name, STEPS, ARGUMENTS, ranks=2)
        if root is not None:
            self.root = root  # type: ignore[assignment]
        self._place = Path(tempfile.mkdtemp(prefix="ckptd-demo-"))
        self.nodes = [
            Node(f"node{number}", self._place / str(number), self.root) for number in range(2)
        ]
        self._torchruns: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start torchrun on both nodes, as on two machines."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._torchruns = []
        for number, node in enumerate(self.nodes):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
                str(number), "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port",
                str(port), str(TRAINER), "--root", str(self.root), "--losses", str(self.losses),
                *self._arguments,
            ]  # fmt: skip
            with open(self.log, "ab") as log:
                self._torchruns.append(node.run(command, log))
        self._trainer = self._torchruns[0]

    def kill(self) -> int:
        """SIGKILL torchrun and all ranks, where they still run.

        Return the step that they were computing.
        """
        for torchrun in self._torchruns:
            if torchrun.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(torchrun.pid).children(recursive=True):
                        process.kill()
                torchrun.kill()
            torchrun.wait()
        return max((step for step, _ in self.computed()), default=0) + 1

    def lose_second_node(self) -> int:
        """Lose the second node, and wait until torchrun on the first one has ended its
        rank. Return the step that they were computing.
        """
        self.nodes[1].lose()
        at = max((step for step, _ in self.computed()), default=0) + 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchruns[0].wait(_SECONDS)
        self.kill()
        return at

    def end(self) -> None:
        self.kill()
        for node in self.nodes:
            node.lose()
        shutil.rmtree(self._place, ignore_errors=True)


def third_act(reference: Run, interrupted: NodesRun, chance: random.Random, seconds: float) -> None:
    """Train on two nodes, lose the second one, go on with an empty one, and compare.

    `seconds`: how long a step takes.
    """
    for node in interrupted.nodes:
        node.start()
    say("Now on two nodes, each with a daemon of its own, and one root. One node will be lost.")
    interrupted.start()
    interrupted.wait_for(chance.randrange(STEPS // 2, STEPS - 3))
    time.sleep(chance.uniform(0.1, 0.9) * seconds)
    before, known = (
        len(RECOVERED.findall(interrupted.printed())),
        interrupted.nodes[0].last_durable(),
    )
    at = interrupted.lose_second_node()
    say(
        f"Killed everything on node1 in the middle of step {at}; its memory and its disk are "
        f"gone. An empty node takes its place."
    )
    interrupted.nodes[1].start()
    interrupted.start()
    interrupted.wait_until(
        lambda: len(RECOVERED.findall(interrupted.printed())) >= before + 2,
        "both ranks had recovered",
    )
    found = RECOVERED.findall(interrupted.printed())[before:]
    if len({each[:3] for each in found}) != 1:
        raise DemoFailed(f"the ranks have recovered different things: {found}")
    step, attempt, source, took = found[0]
    act = Act(
        killed="node 1 of 2",
        at=at,
        step=int(step),
        attempt=int(attempt),
        source=source,
        seconds=float(took),
    )
    say(
        f"Both ranks have recovered step {act.step} of attempt {act.attempt} from {act.source} in "
        f"{act.seconds:.2f} s."
    )
    if act.source != "storage" or act.step < known["step"]:
        raise DemoFailed(f"{known} was durable before")
    interrupted.wait_for_end()
    say("It has come to its end. Comparing.")
    print_table([act.row()])
    computed = check_losses(reference, interrupted)
    print(
        f"{computed} losses computed for {reference.steps} steps: 0 differ from the reference, "
        f"which was on one node."
    )
    print(
        f"{check_checkpoints(reference, interrupted)} tensors and values in the last checkpoint: "
        f"0 differ."
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on two nodes, lose one of them, and compare with a run that was not "
        "interrupted."
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument(
        "--root",
        help="a directory or a URL for the run on two nodes; default: a directory in --out",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10_000),
        help="of the moment of the loss; default: by chance",
    )
    args = parser.parse_args()
    if why := refusal():
        sys.exit(f"two nodes cannot be shown: {why}")
    out = Path(os.path.abspath(args.out))
    place = located(os.path.expanduser(args.root)) if args.root else None
    reference, interrupted = (
        Run(out, "nodes-reference", STEPS, ARGUMENTS, ranks=2),
        NodesRun(out, "nodes-interrupted", place),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(f"The loss is at a random moment; the same again with --seed {args.seed}.")
    try:
        wipe(out, reference)
        say(f"Training {STEPS} steps on one node without interruption, as the reference.")
        reference.start()
        reference.wait_for_end()
        third_act(reference, interrupted, random.Random(args.seed), 0.3)
    except DemoFailed as failure:
        sys.exit(f"FAILED: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        reference.end()
        interrupted.end()
    say("Everything came back as it was.")


if __name__ == "__main__":
    main()
