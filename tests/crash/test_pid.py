"""Tests a trainer whose pid another process has got after its death: pidfd and lock
still show that its snapshot is orphaned.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import trainers
from tests.support.daemons import home, running

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
TRAINER = """
import sys, time
from pathlib import Path
from ckptd.agent import Agent
from tests.support import trainers
agent = Agent(trainers.JOB, socket=Path(sys.argv[1]))
print(agent.snapshot(trainers.expected(1, 1000), step=1, persist=False).state, flush=True)
time.sleep(600)
"""


def heir(pid: int) -> subprocess.Popen[bytes]:
    """Start another process that gets this pid."""
    for _ in range(100):
        LAST_PID.write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "600"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise AssertionError(f"nobody got the number {pid}")


def test_a_snapshot_is_saved_although_its_trainers_pid_is_reused() -> None:
    if subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root, for process numbers of its own")
    command = [*ALONE, sys.executable, "-m", "tests.crash.test_pid"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["sealed", "same", "saved"], done.stderr


def main() -> None:
    """Run in a pid namespace, in which no other process takes a pid."""
    with home() as place, running(place) as daemon:
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(place.socket)], stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        print(trainer.stdout.readline().strip())
        # So that the daemon cannot notice the death before the pid is reused.
        daemon.process.send_signal(signal.SIGSTOP)
        trainer.kill()
        trainer.wait()
        other = heir(trainer.pid)
        daemon.process.send_signal(signal.SIGCONT)
        until = time.monotonic() + 60
        while (
            not list(place.root.glob(f"{trainers.JOB}/*/manifest.json"))
            and time.monotonic() < until
        ):
            time.sleep(0.05)
        print("same" if other.poll() is None else "ended")
        print(
            "saved"
            if list(place.root.glob(f"{trainers.JOB}/*/manifest.json"))
            else place.log_text()
        )
        other.kill()


if __name__ == "__main__":
    main()
