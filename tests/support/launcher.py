"""Runs a Python program on several ranks of this machine, in one process group.

    python -m tests.support.launcher RANKS PROGRAM...

PROGRAM is what follows `python`, such as a script with its arguments. SIGKILL to the process
group ends all ranks, which torchrun's own groups would survive.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

LAUNCHER = Path(__file__)


def main() -> None:
    ranks, program = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    begun = [
        subprocess.Popen(
            [sys.executable, *program],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(ranks)
    ]
    sys.exit(max(abs(each.wait()) for each in begun))


if __name__ == "__main__":
    main()
