"""Ends daemons with SIGTERM while the root hangs in the middle of their start.

`python -m tests.crash.starts --rounds 20 [--seed N]`. A daemon dies, and leaves a
deletion, a save and a snapshot in memory. From a call on that is drawn at random, each
call of the next daemon to the root hangs. That daemon gets one SIGTERM, as from a
service manager, or one after the other. It must end. The daemon after it has a root
that answers, and the newest step must come back from it, bit for bit.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from random import Random

from ckptd.agent import Agent, CkptdError
from ckptd.daemon.process import app
from tests.crash.hung import CALLS, make_calls_wait
from tests.crash.rounds import main, run_rounds
from tests.support import trainers
from tests.support.daemons import Daemon, Home, running, until

MOST = 90
"""The highest number of the first call that hangs. A start makes about as many."""
SECONDS = 60.0
"""Timeout in seconds for the end of a daemon. It measures nothing."""
SIZE = 100
START_SECONDS = 0.5
"""Seconds that a start goes on after SIGTERM, in place of the ten seconds that users
have.
"""
ENVIRONMENT = {"CKPTD_STORAGE_TIMEOUT": "1", "CKPTD_STALL_BUDGET": "0.5"}
ENDS = {
    -signal.SIGTERM: "ended by the signal, before the daemon handles it",
    128 + signal.SIGTERM: "ended some time after one SIGTERM",
    130: "ended by the second SIGTERM",
    1: "ended because the storage did not answer",
}
"""The exit codes of a daemon that is ended while its root hangs."""


def hang_from(number: int, root: Path, hangs: Path) -> None:
    """Make this process's call of this number under the root wait for ever, and each
    later one, and create the file `hangs` then.
    """
    flag, left = root.parent / "never", itertools.count(1)
    flag.touch()
    app._START_SECONDS = START_SECONDS

    def at() -> bool:
        if next(left) < number:
            return False
        hangs.touch()
        return True

    make_calls_wait(flag, root, (*CALLS, "scandir"), at)


def leave(place: Home) -> int:
    """Leave a deletion, a save and a snapshot in memory to the next daemon.

    Return the newest step that is durable or sealed.
    """
    daemon = Daemon(
        place,
        "--keep-last",
        "1",
        failpoints="retire.uncommitted=kill@1",
        environment=ENVIRONMENT,
        forked=True,
    ).wait_ready()
    agent = Agent("gpt", socket=place.socket)
    newest = 0
    for step in (1, 2, 3):
        with suppress(CkptdError):
            pending = agent.snapshot(trainers.expected(step, SIZE), step=step)
            newest = pending.wait("sealed", timeout=SECONDS).step
            if step < 3:
                pending.wait("durable", timeout=SECONDS)
    assert daemon.died() == -signal.SIGKILL
    with suppress(CkptdError):
        agent.close()
    daemon.close()
    return newest


def end_start(place: Home, number: int, *, repeat: bool) -> str:
    """Start a daemon whose call of this number hangs, and end it with SIGTERM.

    Return how it ended.

    repeat: send SIGTERM again and again. Otherwise, a second one is sent only to a
    daemon that has started, because it waits for the saves of the snapshots in memory.
    """
    hangs = place.path / "hangs"
    first = partial(hang_from, number, place.root, hangs)
    daemon = Daemon(place, "--keep-last", "1", environment=ENVIRONMENT, forked=first)
    try:
        until(lambda: hangs.exists() or daemon.process.poll() is not None, "call that hangs")
        daemon.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + SECONDS
        while daemon.process.poll() is None:
            assert time.monotonic() < deadline, (
                f"the daemon does not end, because its call {number} hangs (repeat={repeat})"
            )
            time.sleep(0.05)
            if repeat or place.log_text().count(" ready in ") > 1:
                daemon.process.send_signal(signal.SIGTERM)
        code = daemon.process.poll()
        assert code in ENDS, f"the daemon whose call {number} hangs ended with {code}"
        return ENDS[code]
    finally:
        daemon.kill()
        hangs.unlink(missing_ok=True)


def live(place: Home, chance: Random, done: Counter[str]) -> None:
    """Leave work to a daemon whose root hangs, end that daemon, and recover from the
    next one.
    """
    newest = leave(place)
    how = end_start(place, chance.randint(1, MOST), repeat=chance.random() < 0.3)
    with running(place, forked=True), closing(Agent("gpt", socket=place.socket)) as agent:
        state = trainers.blank(SIZE)
        recovered = agent.recover(state)
        assert recovered is not None, (
            f"nothing came back, although step {newest} was sealed; the start before was {how}"
        )
        assert recovered.step == newest, (
            f"step {recovered.step} came back, not step {newest}; the start before was {how}"
        )
        trainers.assert_equal(state, newest, SIZE)
    done["starts that hang"] += 1
    done[f"  {how}"] += 1


def run(rounds: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how many starts were ended, how they ended, and what went wrong.

    `number` is the random seed.
    """
    return run_rounds(live, rounds, number, seconds)


if __name__ == "__main__":
    main(__doc__, run)
