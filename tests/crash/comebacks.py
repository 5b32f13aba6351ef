"""Brings daemons back with less than they had, while their trainers train on.

`python -m tests.crash.comebacks --rounds 96 [--seed N]`. A daemon ends in order or by
SIGKILL, with a snapshot in flight. Some of its things are then taken away: the slots,
the journal or the whole state directory, the socket, the identity of the root, the
clock, the host name. Each subset of them comes once in 96 rounds. The next daemon must
continue with the trainer: every later snapshot becomes durable under the same attempt.
Where it refuses the trainer, because the root is another one or another run has taken
over, `ckptd status --check` must say so. The trainer has one rank, two ranks, or two
ranks on two nodes, where the first or the second loses its daemon.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import socket as sockets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch.distributed as dist

from ckptd.agent import Agent, Checkpoint, CkptdError, Pending
from ckptd.agent.link import client
from ckptd.agent.link.launch import Place
from ckptd.daemon.commands import health
from ckptd.daemon.telemetry import refusals
from ckptd.shared import names
from ckptd.shared.errors import DaemonUnreachable
from ckptd.shared.system import machine
from ckptd.shared.wire.channel import Channel
from tests.crash.node_trainer import check, state_of
from tests.crash.rounds import main
from tests.support import trainers
from tests.support.daemons import Daemon, Home, holds, home
from tests.support.nodes import nodes
from tests.support.ranks import HERE, Ranks

JOB, SIZE = "gpt", 100
SECONDS = 60.0
"""Timeout in seconds for anything that a trainer waits for. It measures nothing."""
OPTIONS = ("--codec", "raw", "--threads", "1")
ENVIRONMENT = {"CKPTD_RANK_TIMEOUT": "10"}
STATE = ("", "journal", "state directory")
OTHERS = ("slots", "socket", "root identity", "clock", "host name")
SUBSETS = [
    frozenset(filter(None, (state, *taken)))
    for state in STATE
    for count in range(len(OTHERS) + 1)
    for taken in itertools.combinations(OTHERS, count)
]
"""The things that can be taken away together. The journal is in the state directory."""
REFUSING = frozenset({"root identity"})
"""The things without which a daemon may refuse the trainer, if it says so."""
_DAY = 86_400.0


@dataclass(slots=True)
class Site:
    """The place of a daemon: its home, the directories of its slots and of its state, more
    options, and a function that a process of its node calls first.
    """

    home: Home
    segments: Path
    state: Path
    options: tuple[str, ...] = ()
    first: Callable[[], None] | None = None
    daemons: list[Daemon] = field(default_factory=list)

    def start(self, taken: frozenset[str] = frozenset()) -> Daemon:
        daemon = Daemon(
            self.home,
            *OPTIONS,
            *self.options,
            environment=ENVIRONMENT,
            forked=partial(_become, self.first, taken),
        )
        self.daemons.append(daemon)
        return daemon.wait_ready()

    def take(self, taken: frozenset[str]) -> None:
        """Take away what lies in files. The daemon must have ended."""
        places = {
            "slots": self.segments,
            "state directory": self.state,
            "socket": self.home.socket,
            "root identity": Path(self.home.root) / names.CONTROL / names.IDENTITY,
        }
        if "journal" in taken:
            for journal in self.state.rglob("journal-*"):
                shutil.rmtree(journal)
        for thing in taken & places.keys():
            if places[thing].is_dir():
                shutil.rmtree(places[thing])
            else:
                places[thing].unlink(missing_ok=thing == "socket")

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()


def _become(first: Callable[[], None] | None, taken: frozenset[str]) -> None:
    """Make this process a daemon that has another clock or host name, and that reports
    refusals soon.
    """
    if first is not None:
        first()
    refusals.LASTING_SECONDS = 0.3
    if "clock" in taken:
        now = time.time
        time.time = lambda: now() - _DAY
    if "host name" in taken:
        before = machine.host()
        sockets.gethostname = machine.host = lambda: f"{before}-2"


# -- trainers


class Alone:
    """A trainer of one rank, in this process."""

    def __init__(self, socket: Path) -> None:
        self.agent = Agent(JOB, socket=socket)
        self.flying: Pending | None = None

    def fly(self, step: int) -> None:
        """Take a step, and do not wait for the outcome."""
        self.flying = self.agent.snapshot(trainers.expected(step, SIZE), step=step)

    def take(self, step: int) -> str:
        """Take a step, wait until it is durable or has failed, and return the error."""
        pending = self.agent.snapshot(trainers.expected(step, SIZE), step=step, on_error="log")
        return ended(pending)

    def landed(self) -> bool:
        """Return True if the step in flight has an outcome."""
        assert self.flying is not None
        return ended(self.flying) != "it has no outcome"

    def check(self, root: Path, step: int) -> None:
        """Check that this step of this attempt is the newest checkpoint, bit for bit."""
        with Checkpoint.open(root / JOB, "newest") as found:
            assert (found.step, found.attempt) == (step, self.agent.attempt)
            trainers.assert_equal(found.load(), step, SIZE)

    def vanish(self) -> None:
        trainers.vanish(self.agent)


class Together:
    """A trainer of two ranks, each a process of its own, at the sockets of their nodes."""

    def __init__(self, ranks: Ranks, where: Sequence[Path]) -> None:
        self._ranks = ranks
        ranks.call(_begin, where)

    def fly(self, step: int) -> None:
        self._ranks.call(_fly, step)

    def take(self, step: int) -> str:
        return "; ".join(sorted({error for error in self._ranks.call(_take, step) if error}))

    def landed(self) -> bool:
        return all(self._ranks.call(_landed))

    def check(self, root: Path, step: int) -> None:
        with Checkpoint.open(root / JOB, "newest") as found:
            assert (found.step, found.attempt) == (step, 1)
        self._ranks.call(_check, root, step)

    def vanish(self) -> None:
        self._ranks.call(_vanish)


def _begin(where: Sequence[Path]) -> None:
    logging.disable()
    client._FOREIGN_DELAY = 0.1
    HERE["agent"] = Agent(JOB, socket=where[dist.get_rank()])


def _fly(step: int) -> None:
    HERE["flying"] = HERE["agent"].snapshot(state_of(step), step=step)


def _take(step: int) -> str:
    return ended(HERE["agent"].snapshot(state_of(step), step=step, on_error="log"))


def _landed() -> bool:
    return ended(HERE["flying"]) != "it has no outcome"


def _check(root: Path, step: int) -> None:
    state = state_of(-1)
    found = HERE["agent"].recover(state)
    assert found.step == step
    check(state, step)


def _vanish() -> None:
    trainers.vanish(HERE["agent"])


def ended(pending: Pending) -> str:
    """Wait until a snapshot is durable or has failed, and return its error."""
    try:
        pending.wait("durable", timeout=SECONDS)
    except TimeoutError:
        return "it has no outcome"
    except CkptdError as error:
        return str(error)
    return ""


# -- rounds


def come_back(trainer: Alone | Together, site: Site, taken: frozenset[str], chance: Random) -> str:
    """End the daemon of this site, bring it back without these things, and let the
    trainer go on. Return how that went on.
    """
    assert trainer.take(1) == ""
    trainer.fly(2)
    daemon = site.daemons[-1]
    if chance.random() < 0.5:
        assert daemon.stop() == 0
    else:
        daemon.kill()
    site.take(taken)
    daemon = site.start(taken)
    errors = [trainer.take(step) for step in (3, 4, 5)]
    assert trainer.landed(), "the step in flight has no outcome"
    if not any(errors):
        trainer.check(site.home.root, 5)
        return "continued"
    assert taken & REFUSING, f"steps 3 to 5 are not all saved: {errors}"
    seen_refused(daemon)
    return "refused"


def seen_refused(daemon: Daemon) -> None:
    """Check that `ckptd status --check` says that a trainer of the job is refused."""
    found: list[health.Problem] = []

    def seen() -> bool:
        found[:] = health.problems(daemon.status())
        return any(one.job == JOB and one.what in ("refused", "memory") for one in found)

    assert holds(seen, SECONDS), f"a trainer is refused, and `status --check` says {found}"


def alone(taken: frozenset[str], chance: Random, ranks: Callable[[], Ranks]) -> str:
    with site_of_one() as (site, stack):
        trainer = Alone(site.home.socket)
        stack.callback(trainer.vanish)
        return come_back(trainer, site, taken, chance)


def together(taken: frozenset[str], chance: Random, ranks: Callable[[], Ranks]) -> str:
    with site_of_one() as (site, stack):
        trainer = Together(ranks(), [site.home.socket] * 2)
        stack.callback(trainer.vanish)
        return come_back(trainer, site, taken, chance)


def replaced(taken: frozenset[str], chance: Random, ranks: Callable[[], Ranks]) -> str:
    """Let another run take over while the first one cannot reach the daemon. The first
    one must not save any more, whatever the next daemon has lost.
    """
    with site_of_one() as (site, stack):
        trainer = Alone(site.home.socket)
        stack.callback(trainer.vanish)
        assert trainer.take(1) == ""
        gate = Gate(trainer.agent)
        site.daemons[-1].kill()
        site.start()
        with closing(Agent(JOB, socket=site.home.socket, takeover=True)) as other:
            assert ended(other.snapshot(trainers.expected(7, SIZE), step=7)) == ""
        site.daemons[-1].kill()
        site.take(taken)
        daemon = site.start(taken)
        gate.open = True
        assert all(trainer.take(step) for step in (2, 3)), "a run that was replaced has saved"
        seen_refused(daemon)
        with Checkpoint.open(site.home.root / JOB, "newest") as found:
            assert (found.step, found.attempt) == (7, 2)
        return "refused"


class Gate:
    """A gate that keeps an agent from its daemon until it is open."""

    def __init__(self, agent: Agent) -> None:
        self.open = False
        self._place = agent._link.client._place
        agent._link.client._place = self  # type: ignore[assignment]

    def connect(self) -> Channel:
        if not self.open:
            raise DaemonUnreachable("the gate is closed")
        return Place.connect(self._place)


def on_two_nodes(taken: frozenset[str], chance: Random, ranks: Callable[[], Ranks]) -> str:
    with nodes(2, environ=ENVIRONMENT) as two:
        sites = [
            Site(
                node.home,
                node.shm,
                node.home.path / "state",
                ("--shm-dir", str(node.shm), "--state-dir", str(node.home.path / "state")),
                node.entry(),
            )
            for node in two
        ]
        with ExitStack() as stack:
            for node, site in zip(two, sites, strict=True):
                stack.callback(site.close)
                assert node.daemon is not None
                site.daemons.append(node.daemon)
            trainer = Together(ranks(), [site.home.socket for site in sites])
            stack.callback(trainer.vanish)
            # The daemon of the other node ends if the identity of the root is another one.
            return come_back(trainer, chance.choice(sites), taken - REFUSING, chance)


@contextmanager
def site_of_one() -> Iterator[tuple[Site, ExitStack]]:
    """Context manager. Yield the site of a daemon that runs, and a stack of what is to be
    ended before it.
    """
    with home() as place:
        site = Site(place, place.segments, place.state)
        try:
            with ExitStack() as stack:
                site.start()
                yield site, stack
        except BaseException:
            print(place.log_text()[-3000:])
            raise
        finally:
            site.close()


Kind = Callable[[frozenset[str], Random, Callable[[], Ranks]], str]
KINDS: dict[str, tuple[Kind, int]] = {
    "one rank": (alone, 8), "replaced": (replaced, 3), "two ranks": (together, 3),
    "two nodes": (on_two_nodes, 1),
}  # fmt: skip
"""The kinds of trainers, each with its weight among the rounds."""


def run(rounds: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how the daemons came back, and what went wrong. `number` is the random seed."""
    chance, done, end = Random(number), Counter[str](), time.monotonic() + seconds
    subsets: list[frozenset[str]] = []
    delay, client._FOREIGN_DELAY = client._FOREIGN_DELAY, 0.1
    with ExitStack() as stack:
        stack.callback(setattr, client, "_FOREIGN_DELAY", delay)
        pool: list[Ranks] = []

        def ranks() -> Ranks:
            if not pool:
                pool.append(stack.enter_context(Ranks(2)))
            return pool[0]

        for _ in range(rounds):
            if time.monotonic() > end:
                break
            subsets = subsets or chance.sample(SUBSETS, len(SUBSETS))
            taken = subsets.pop()
            weights = [weight for _, weight in KINDS.values()]
            (kind,) = chance.choices(list(KINDS), weights)
            try:
                how = KINDS[kind][0](taken, Random(chance.getrandbits(32)), ranks)
            except Exception as error:
                return done, [f"{kind} without {sorted(taken)}: {error!r}"]
            done[kind] += 1
            done[f"  {how}"] += 1
    return done, []


if __name__ == "__main__":
    main(__doc__, run)
