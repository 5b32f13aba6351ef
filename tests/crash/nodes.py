"""Kills ranks, daemons and whole nodes of a job on three nodes, cuts nodes off their
storage, and checks that nothing promised is lost.

`python -m tests.crash.nodes --kills 500 --seed 1 [--store]`. The nodes share a
directory or, with `--store`, a bucket of SeaweedFS. The daemons of some nodes have a
stage, as the seed says. Each life of the job recovers, and trains until the fault
comes, which may be during the recovery. Then the whole job dies, as torchrun would end
it, and dead daemons start again. All ranks of the next life must get the same step, bit
for bit, and nothing older than what was promised: a step that any rank knows to be
durable, or, unless a node is lost or left out, the newest one that all ranks have
sealed.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ckptd.daemon.engine import orphans
from ckptd.daemon.saving import joint
from ckptd.shared.location import Url
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import failpoints
from tests.crash import node_trainer
from tests.crash.hung import make_calls_wait
from tests.crash.images import Unavailable
from tests.support import stores
from tests.support.daemons import holds
from tests.support.fault_proxy import proxied
from tests.support.nodes import Node, Nodes
from tests.support.ranks import Ranks
from tests.support.seen_chains import CHAINS, chained
from tests.support.trainers import JOB, Diary

log = logging.getLogger("ckptd.rig")

FAULTS = (
    "trainers of a node",
    "all trainers",
    "a daemon",
    "a node",
    "a node with its memory",
    "a node's storage",
)
STORAGE_CALLS = (
    "open",
    "write",
    "pwrite",
    "pwritev",
    "fsync",
    "link",
    "rename",
    "scandir",
    "listdir",
    "preadv",
)
_CUT_SECONDS = (1.0, 5.0)
POINTS = failpoints.AGENT + failpoints.DAEMON + failpoints.NODES
_STEPS = 40

Key = tuple[int, int]
Where = Callable[[], AbstractContextManager[tuple[Nodes, dict[str, str]]]]


@dataclass
class Result:
    """The outcome of the lives.

    `hits` counts the faults. `lost` has a sentence for each promise that was broken.
    `chained` are the checkpoints with chains of deltas that were there between lives.
    """

    hits: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    chained: set[str] = field(default_factory=set)


class Job:
    """A job on several nodes, which lives one life after another.

    `environ`: variables that its ranks need to find the storage.
    """

    def __init__(self, place: Nodes, per_node: int, environ: Mapping[str, str]) -> None:
        self.place, self.per_node, self.environ = place, per_node, dict(environ)
        self._diaries = 0
        self._known: list[list[Diary]] = []  # of each life, by rank
        self._intact: list[bool] = []  # of each life, whether the memory of its nodes was kept

    @property
    def last(self) -> list[Diary]:
        """The diaries of the last life, by rank."""
        return self._known[-1]

    def diaries(self, count: int) -> list[Diary]:
        self._diaries += 1
        made = [Diary(self.place.path / f"diary.{self._diaries}.{rank}") for rank in range(count)]
        self._known.append(made)
        self._intact.append(True)
        return made

    def lose_memory(self) -> None:
        """Record that what was only in memory is lost with a node, or out of reach on
        it.
        """
        self._intact = [False] * len(self._intact)

    def promised(self) -> Key:
        """Return the oldest (attempt, step) that may come back now."""
        found: Key = (0, -1)
        for life, intact in zip(self._known, self._intact, strict=True):
            notes = [diary.read() for diary in life]
            durable = {
                key for said in notes for word, key in said if word in ("durable", "recovered")
            }
            sealed = (
                set.intersection(
                    *({key for word, key in said if word == "sealed"} for said in notes)
                )
                if intact and notes
                else set()
            )
            found = max([found, *durable, *sealed])
        return found

    def came_back(self) -> set[Key]:
        """Return what the ranks of the last life have recovered."""
        return {key for diary in self.last for word, key in diary.read() if word == "recovered"}


def socket_of(place: Nodes, rank: int, per_node: int) -> Path:
    node: Node = place[rank // per_node]
    return node.home.socket


def set_up(environ: dict[str, str]) -> None:
    os.environ.update(environ)


def begin(
    job: Job,
    ranks: Ranks,
    armed: dict[int, str],
    *,
    persist: bool,
    wait_every: int,
    steps: int = _STEPS,
) -> None:
    diaries = job.diaries(ranks.world_size)
    ranks.call(set_up, job.environ)
    for rank in range(ranks.world_size):
        socket = socket_of(job.place, rank, job.per_node)
        ranks.begin(
            node_trainer.train,
            socket,
            diaries[rank],
            steps,
            armed.get(rank, ""),
            persist,
            wait_every,
            0.02,
            only=[rank],
        )


def check_manifests(place: Nodes) -> list[str]:
    """Return a sentence for each step of an attempt that has several checkpoints."""
    repository, seen = open_root(place.root), Counter[Key]()
    for tag in repository.tags(JOB):
        if repository.has_manifest(JOB, tag):
            try:
                manifest = repository.read_manifest(JOB, tag)
            except (
                Exception
            ) as error:  # an abandonment, or a manifest that retention has just deleted
                if "no checkpoint" not in str(error):
                    return [f"{tag}: {error}"]
                continue
            seen[manifest.attempt, manifest.step or 0] += 1
    return [
        f"step {step} of attempt {attempt} has {count} checkpoints"
        for (attempt, step), count in seen.items()
        if count > 1
    ]


def life(job: Job, chance: random.Random, result: Result, fault: str, point: str = "") -> None:
    """Live one life of the job: recover and compare, train, let the fault happen, end
    the job, and start again what is dead.

    point: the failpoint at which the victim dies, or "" for a random moment.
    """
    fewer = chance.random() < 0.2
    if fewer:
        job.lose_memory()
    here: list[Node] = list(job.place)[: len(job.place) - fewer]
    victim, promised = chance.choice(here), job.promised()
    first = here.index(victim) * job.per_node
    theirs = list(range(first, first + job.per_node))
    armed = (
        {rank: f"{point}=kill@{chance.randint(1, 3)}" for rank in theirs}
        if point in failpoints.AGENT
        else {}
    )
    if point and not armed:
        victim.kill()
        start(victim, job.place, f"{point}=kill@{chance.randint(1, 4)}", wait=False)
        victim.daemon.reached_ready()  # type: ignore[union-attr]
    persist, wait_every = chance.random() < 0.7, chance.choice((0, 1, 3))
    with Ranks(len(here) * job.per_node) as ranks:
        begin(job, ranks, armed, persist=persist, wait_every=wait_every)
        compare(
            job,
            ranks,
            result,
            promised,
            f"{fault}, {point or 'at a random moment'}, before it",
            sure=not point,
        )
        wanted = chance.randint(1, 8)
        holds(
            lambda: (
                min(diary.count("sealed") for diary in job.last) >= wanted
                or has_died(victim)
                or not ranks.all_live
            ),
            20.0,
        )
        time.sleep(chance.uniform(0, 0.1))
        log.debug(
            "%s: %s sealed, persist=%s, waits every %s",
            fault,
            [d.count("sealed") for d in job.last],
            persist,
            wait_every,
        )
        match fault:
            case "trainers of a node":
                for rank in theirs:
                    ranks.kill(rank)
                time.sleep(chance.uniform(0, 0.3))
            case "a daemon":
                victim.kill()
                time.sleep(chance.uniform(0, 0.2))
                start(victim, job.place)
            case "a node" | "a node with its memory":
                for rank in theirs:
                    ranks.kill(rank)
                victim.kill()
            case "a node's storage":
                cut_flag(victim).touch()
                time.sleep(chance.uniform(*_CUT_SECONDS))
                cut_flag(victim).unlink()
                time.sleep(0.2)
        if fault == "a daemon" or chance.random() < 0.3:
            time.sleep(chance.uniform(0, 1.0))
    result.hits[fault] += 1
    if fault == "a node with its memory":
        victim.lose()
        job.lose_memory()
    for node in job.place:
        # A failpoint that was not reached must not kill the next life.
        if has_died(node) or (node is victim and point):
            node.kill()
            start(node, job.place)


def compare(
    job: Job, ranks: Ranks, result: Result, promised: Key, what: str, *, sure: bool
) -> None:
    """Wait until the ranks have recovered, and compare what came back with what was
    promised. `sure`: nothing is to die meanwhile.
    """
    done = holds(
        lambda: all(diary.count("recovered") for diary in job.last) or ranks.any_answer, 180.0
    )
    back = job.came_back()
    log.debug("%s: promised %s, came back %s", what, promised, back)
    if sure and not (done and all(diary.count("recovered") for diary in job.last)):
        result.lost.append(f"{what}: no recovery, but {back}: {ranks.answers()}")
    if len(back) > 1 or any(one < promised for one in back):
        result.lost.append(f"{what}: {back} came back, {promised} was promised")
    result.lost += [f"{what}: {sentence}" for sentence in check_manifests(job.place)]
    result.chained |= chained(job.place.root)


def has_died(node: Node) -> bool:
    """Return True if the daemon of a node does not run."""
    return node.daemon is None or node.daemon.process.poll() is not None


def cut_flag(node: Node) -> Path:
    """Return the file that cuts a node off its storage while it exists."""
    return Path(f"{node.home.path}/cut")


def start(node: Node, place: Nodes, failpoints: str = "", *, wait: bool = True) -> None:
    """Start the daemon of a node, with the retention of the rig, which calls that a cut
    holds back, and less patience than a daemon has by default.
    """
    cut = (
        None
        if isinstance(place.root, Url)
        else partial(make_calls_wait, cut_flag(node), Path(str(place.root)), STORAGE_CALLS)
    )
    node.start(
        "--keep-last", "6", "--deltas", "small",
        failpoints=failpoints, first=partial(_wait_less, cut), wait=wait,
    )  # fmt: skip


def _wait_less(first: Callable[[], None] | None) -> None:
    """Make this daemon wait a second for the receipts of nodes that have left the job,
    because every fifth life leaves one out, and for the nodes that it holds copies of.
    """
    joint.LATE_SECONDS = orphans.BEHALF_SECONDS = 1.0
    if first is not None:
        first()


@contextmanager
def in_directory(count: int = 3, *, apart: bool = False) -> Iterator[tuple[Nodes, dict[str, str]]]:
    """Yield nodes that share a directory, and the variables by which their ranks find
    it, which are none. apart: True if each node gets name spaces of its own.
    """
    place = Nodes(count, apart=apart)
    try:
        yield place, {}
    finally:
        place.remove()


@contextmanager
def in_store(count: int = 3, *, apart: bool = False) -> Iterator[tuple[Nodes, dict[str, str]]]:
    """Yield nodes that share a bucket of SeaweedFS, each through a proxy of its own.
    Raises Unavailable if it is not installed. apart: as for `in_directory`.
    """
    if stores.program("weed") is None:
        raise Unavailable("SeaweedFS is not installed")
    with tempfile.TemporaryDirectory() as there, ExitStack() as held:
        server = held.enter_context(stores.Servers(Path(there))).get("seaweed")
        held.enter_context(stores.in_environment(server))
        # A process connects to a URL once, and the next server has another port.
        place = Nodes(count, Url("s3", "bucket", (Path(there).name,)), apart=apart)
        held.callback(place.remove)
        for node in place:
            proxy = held.enter_context(proxied(server.port))
            proxy.begin(partial(_wait_while, cut_flag(node)))
            node.home.environ = server.environ | {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"
            }
        yield place, server.environ


def _wait_while(flag: Path, *_: object) -> str:
    """Hold a request back while the flag is set, and then let it pass."""
    while flag.exists():
        time.sleep(0.01)
    return ""


def pair(turn: int, points: Sequence[str]) -> tuple[str, str]:
    """Return the fault and the failpoint of a turn.

    As many turns as there are pairs have each pair once, whatever the numbers are.
    """
    lap, place = divmod(turn, len(points))
    return FAULTS[(place + lap) % len(FAULTS)], points[place]


def run(
    lives: int,
    seed: int,
    seconds: float = float("inf"),
    *,
    points: Sequence[str] = POINTS,
    where: Where = in_directory,
) -> tuple[Counter[str], list[str]]:
    """Live so many lives, or as many as fit into `seconds`.

    Return how often each fault came, how many checkpoints had chains, and what was lost.

    Every second life has its victim die at a failpoint. The seed says with which `pair`
    this begins; the next such life has the next one.
    """
    chance, result, until = random.Random(seed), Result(), time.monotonic() + seconds
    turn = chance.randrange(len(points) * len(FAULTS))
    with where() as (place, environ):
        for node in place:
            if chance.random() < 0.5:
                node.put_stage()
            start(node, place)
        job = Job(place, per_node=2, environ=environ)
        while result.hits.total() < lives and time.monotonic() < until and not result.lost:
            number = result.hits.total()
            fault, point = pair(turn + number // 2, points)
            life(job, chance, result, fault, point if number % 2 else "")
        with Ranks(len(place) * job.per_node) as ranks:
            promised = job.promised()
            begin(job, ranks, {}, persist=True, wait_every=1, steps=1)
            compare(job, ranks, result, promised, "at the end", sure=True)
        if result.lost:
            print(place.logs())
    return Counter({**result.hits, CHAINS: len(result.chained)}), result.lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument(
        "--store", action="store_true", help="share a bucket of SeaweedFS, not a directory"
    )
    parser.add_argument("--verbose", action="store_true", help="print what each life had promised")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(format="%(asctime)s %(message)s")
        log.setLevel(logging.DEBUG)
    print(f"{options.kills} lives on 3 nodes with 2 ranks each, seed {options.seed}", flush=True)
    begun = time.monotonic()
    hits, lost = run(options.kills, options.seed, where=in_store if options.store else in_directory)
    for fault, count in sorted(hits.items()):
        print(f"  {count:5,d}  {fault}")
    lives = hits.total() - hits[CHAINS]
    print(f"{lives} lives in {time.monotonic() - begun:.0f} s, {len(lost)} promises broken")
    for sentence in lost:
        print("LOST", sentence)
    return bool(lost)


if __name__ == "__main__":
    raise SystemExit(main())
