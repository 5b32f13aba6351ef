"""Trains a model in one process and serves it in another one, which loads every newer
snapshot out of memory; kills both with SIGKILL, and starts them again.

    python examples/follow.py --root /tmp/ckpts

The trainer prints the hash of its weights at each snapshot, and the server that of its
own model after each version that it has loaded. The demo ends with exit code 0 only if
every version had, bit for bit, the weights of its step. `serve` is all that a serving
process needs. Without --root the demo uses a directory that it deletes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import ckptd

LINE = re.compile(r"(?:trained|serves) attempt (\d+) step (\d+) (\w+)")
SECONDS = 120.0
"""The longest that the demo waits for a process."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8))


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for tensor in model.state_dict().values():
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()[:16]


def train(stop: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    agent = ckptd.Agent("follow")
    recovered = agent.recover({"model": model, "optim": optimizer})
    step = recovered.step if recovered else -1
    while not stop.exists():
        step += 1
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"trained attempt {agent.attempt} step {step} {digest(model)}", flush=True)
        # Most snapshots stay in memory: a server needs them, and storage does not.
        agent.snapshot({"model": model, "optim": optimizer}, step=step, persist=step % 10 == 0)
        time.sleep(0.05)  # a step of a real model takes longer than that of this one
    agent.close()


def serve() -> None:
    model = build()
    for version in ckptd.follow("follow", into=model):
        # The model has the whole of this version until the loop takes the next one.
        back = ", after the training went back" if version.rolled_back else ""
        said = f"serves attempt {version.attempt} step {version.step} {digest(model)}{back}"
        print(said, flush=True)


class Process:
    """A trainer or a server, and the file that it prints into."""

    def __init__(self, role: str, root: Path) -> None:
        self.log = root.with_name(f"{root.name}-{role}.log")
        self._command = [sys.executable, __file__, role, "--root", str(root)]
        self._running: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._running = subprocess.Popen(self._command, stdout=log, stderr=log)

    def lines(self) -> dict[tuple[int, int], str]:
        """Return the hashes that it has printed, by attempt and step."""
        found = LINE.findall(self.log.read_text())
        return {(int(attempt), int(step)): hashed for attempt, step, hashed in found}

    def wait_for(self, more: int) -> None:
        """Wait until it has printed so many more lines."""
        before, end = len(self.lines()), time.monotonic() + SECONDS
        while len(self.lines()) < before + more:
            assert self._running is not None
            if time.monotonic() > end or self._running.poll() not in (None, 0):
                sys.exit(f"{self.log} does not go on:\n{self.log.read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        assert self._running is not None
        self._running.send_signal(signal.SIGKILL)
        self._running.wait()

    def end(self) -> int:
        assert self._running is not None
        return self._running.wait(SECONDS)


def demo(root: Path) -> None:
    trainer, server = Process("train", root), Process("serve", root)
    try:
        server.wait_for(3)
        server.kill()
        print(f"killed the server at step {max(server.lines())[1]}")
        server.start()
        server.wait_for(3)
        trainer.kill()
        print(f"killed the trainer at step {max(trainer.lines())[1]}")
        trainer.start()
        server.wait_for(3)
        stop_file(root).touch()
        if trainer.end():
            sys.exit(f"the trainer has failed: see {trainer.log}")
        while max(server.lines()) != max(trainer.lines()):
            server.wait_for(1)
    finally:
        trainer.kill()
        server.kill()
    trained, served = trainer.lines(), server.lines()
    wrong = [key for key, hashed in served.items() if trained.get(key) != hashed]
    if wrong:
        sys.exit(f"these versions are not what was trained: {wrong}")
    attempts = len({attempt for attempt, _ in served})
    print(
        f"{len(served)} of {len(trained)} snapshots were served, in {attempts} attempts, and each "
        f"was bit-equal: the last one is step {max(served)[1]}"
    )


def stop_file(root: Path) -> Path:
    """Return the path of the file that tells the trainer to end."""
    return root.with_name(f"{root.name}-stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", choices=("train", "serve"))
    parser.add_argument("--root", type=Path)
    given = parser.parse_args()
    root = given.root or Path(tempfile.mkdtemp(prefix="ckptd-follow-")) / "root"
    os.environ["CKPTD_ROOT"] = str(root.absolute())
    if given.role == "train":
        return train(stop_file(root))
    if given.role == "serve":
        return serve()
    try:
        demo(root.absolute())
    finally:
        if given.root is None:
            shutil.rmtree(root.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
