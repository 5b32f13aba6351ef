"""Loses nodes of a job that keeps copies of its snapshots on other nodes, with all that
is on them, and checks that what the copies are to save comes back.

`python -m tests.crash.peers --lives 1000 --seed 1 [--store]`. A job of three or four
nodes, with failure domains or without, lives one life after another, as in `nodes.py`.
Each life recovers, trains, and meets one line of the table "What is survived" in
docs/how-to/replicas.md, at a random moment or at a failpoint. A lost node is replaced by
an empty one, is missing in the next life, or comes back later with its old memory. In
between, copies are made to fail, and the training must go on.

All ranks of the next life must get the same step, bit for bit, and nothing older than
what was promised. A step is promised if a rank knows that it is durable, or that it is
replicated and no node was lost together with the node that holds its copies, or if all
ranks have sealed it and no node was lost. After each life, the status of each daemon must
account for every segment in its shared memory. After the last, none may be left.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckptd.agent.link.placement import NodePlace, holders
from ckptd.daemon.config import REPLICA_SLOTS
from ckptd.shared.errors import IntegrityError, InvalidRequest
from ckptd.shared.formats.segment import read_header
from ckptd.shared.system import failpoints
from tests.crash import node_trainer, nodes
from tests.crash.nodes import Key, Result, compare, has_died, in_directory, in_store, start
from tests.support import spaces
from tests.support.daemons import holds
from tests.support.nodes import Node, Nodes, become
from tests.support.ranks import Ranks
from tests.support.seen_chains import CHAINS
from tests.support.trainers import JOB, Diary

log = logging.getLogger("ckptd.rig")

TRAINERS = "trainers, on any number of nodes"
DAEMONS = "daemons, on any number of nodes"
ONE = "one node with its memory"
ANOTHER = (
    "one node, and later, after the job has begun again and has replicated a step, another one"
)
APART = "two nodes at once that hold no copies of each other"
TOGETHER = "two nodes at once, if one holds the copies of the other"
DOMAIN = "a whole domain, if all nodes have one"
DOMAINS = "two domains at once"
ALL = "all nodes"
LINES = (TRAINERS, DAEMONS, ONE, ANOTHER, APART, TOGETHER, DOMAIN, DOMAINS, ALL)
"""The lines of the table in docs/how-to/replicas.md, in its words."""
COPY = "a copy fails"
TROUBLES = (*LINES, COPY)

EMPTY = " a lost node was replaced by an empty one"
AWAY = " a lost node was missing in the next life"
BACK = " a node came back later with its old memory"
RETURNS = (EMPTY, AWAY, BACK)
COPIED = " steps replicated"
"""Outcomes begin with a space, so that `trust` does not count them as tries."""

DOMAINS_OF_PLACES = (
    ("rack0", "rack0", "rack1", "rack2"),
    ("", "", ""),
    ("", "", "", ""),
    ("rack0", "rack0", "rack1"),
    ("rack0", "rack0", "rack1", "rack1"),
)
"""The domain of each node of the places in which jobs live. The first allows all lines."""
POINTS = failpoints.AGENT + failpoints.DAEMON + failpoints.NODES + failpoints.PEERS
_COPY_POINTS = ("agent.copy.offered", "agent.copy.sealed", "agent.copy.confirmed")
LIVES_IN_A_PLACE = 20
_SECONDS = 60.0
"""Seconds in which what must happen has to happen on a machine that is busy."""
_TTL_SECONDS = 40.0
"""`memory_ttl` of the daemons, after which nothing is left of a job that has ended."""

Where = Callable[..., AbstractContextManager[tuple[Nodes, dict[str, str]]]]


@dataclass
class Life:
    """An attempt of the job.

    `here`: the numbers of its nodes. `to`: the node that holds the copies of each node;
    empty if there are none. `lost`: the nodes whose memory was lost since, or was out of
    reach in a later life.
    """

    here: list[int]
    to: dict[int, int]
    diaries: list[Diary]
    lost: set[int] = field(default_factory=set)

    def known(self, word: str) -> set[Key]:
        """Return what any rank of this life has written down under this word."""
        return {key for diary in self.diaries for noted, key in diary.read() if noted == word}

    def sealed(self) -> set[Key]:
        """Return what all ranks of this life have sealed."""
        return set.intersection(
            *({key for word, key in diary.read() if word == "sealed"} for diary in self.diaries)
        )

    def promised(self) -> Key:
        """Return the newest (attempt, step) that is known, to the ranks of this life, to
        survive all that was lost since.
        """
        lost = self.lost.intersection(self.here)
        keys = {(0, -1)} | self.known("durable")
        if lost.isdisjoint(self.to.get(node, node) for node in lost):
            keys |= self.known("replicated")
        return max(keys if lost else keys | self.sealed())

    def has_taken(self, sealed: int, replicated: int) -> bool:
        """Return True if so many snapshots of each rank are sealed, and so many steps are
        replicated.
        """
        return (
            min(diary.count("sealed") for diary in self.diaries) >= sealed
            and len(self.known("replicated")) >= replicated
        )


class Job(nodes.Job):
    """A job on the nodes of a place.

    domains: the failure domain of each node, or "". `away`: the nodes that are missing in
    the next life, each with the way in which it comes back. `lost`: the nodes that were
    lost in the last life.
    """

    def __init__(
        self, place: Nodes, per_node: int, environ: Mapping[str, str], domains: Sequence[str]
    ) -> None:
        super().__init__(
            place,
            per_node,
            {**environ, "TORCHELASTIC_RUN_ID": place.path.name, "GLOO_SOCKET_IFNAME": "lo"},
        )
        self.domains = domains
        self.lives: list[Life] = []
        self.away: dict[int, str] = {}
        self.lost: set[int] = set()

    @property
    def here(self) -> list[int]:
        """The numbers of the nodes that are not away."""
        return [number for number in range(len(self.place)) if number not in self.away]

    def holders(self) -> dict[int, int]:
        """Return the node that holds the copies of each node, or {} if none can."""
        here, per_node = self.here, self.per_node
        try:
            found = holders(
                [
                    NodePlace(range(n * per_node, (n + 1) * per_node), self.domains[number])
                    for n, number in enumerate(here)
                ]
            )
        except InvalidRequest:
            return {}
        return {here[of // per_node]: here[to // per_node] for of, to in found.items()}

    def promised(self) -> Key:
        """Return the oldest (attempt, step) that may come back now."""
        return max((life.promised() for life in self.lives), default=(0, -1))

    def lose(self, numbers: Collection[int]) -> None:
        """Record that the memory of these nodes is lost, or is out of reach."""
        for life in self.lives:
            life.lost.update(numbers)

    def begin(
        self,
        ranks: Ranks,
        function: Callable[..., Any],
        arguments: Callable[[int], tuple[Any, ...]],
    ) -> Life:
        """Begin a life on the nodes that are here: each rank calls the function with the
        socket of its node, its diary and the arguments for its number.
        """
        life = Life(self.here, self.holders(), self.diaries(ranks.world_size))
        self.lives.append(life)
        for rank, diary in enumerate(life.diaries):
            node: Node = self.place[life.here[rank // self.per_node]]
            ranks.call(_enter, node.name, node.shm if node.apart else None, self.environ,
                only=[rank])  # fmt: skip
            ranks.begin(function, node.home.socket, diary, *arguments(rank), only=[rank])
        return life

    def ranks_of(self, numbers: Collection[int]) -> list[int]:
        """Return the ranks of the next life that are on these nodes."""
        here = self.here
        return [
            rank
            for rank in range(len(here) * self.per_node)
            if here[rank // self.per_node] in numbers
        ]

    def off(self) -> list[str]:
        """Return the reasons for which the nodes make no more copies in this attempt."""
        reports = [
            report
            for number in self.lives[-1].here
            if not has_died(self.place[number])
            for report in self.place[number].daemon.status()["jobs"]
            if report["job"] == JOB
        ]
        newest = max((report["attempt"] for report in reports), default=0)
        return [
            report["replicas_off"]
            for report in reports
            if report["attempt"] == newest and report["replicas_off"]
        ]


def groups(trouble: str, job: Job) -> list[set[int]]:
    """Return the groups of nodes that may meet this trouble in the next life. There is none
    if the place has no such nodes.
    """
    here, to = job.here, job.holders()
    single = [{number} for number in here]
    pairs = [{a, b} for a in here for b in here if a < b]
    holding = [{of, holder} for of, holder in to.items()]
    domains: dict[str, set[int]] = {}
    for number in here:
        domains.setdefault(job.domains[number], set()).add(number)
    named = [] if "" in domains or not to else list(domains.values())
    several = [a | b for a in named for b in named if a is not b and a | b != set(here)]
    return {
        TRAINERS: [set(here), *pairs, *single],
        DAEMONS: [set(here), *pairs, *single],
        ONE: single,
        ANOTHER: [one for one in single if len(job.lost) == 1 and one != job.lost],
        APART: [pair for pair in pairs if to and pair not in holding],
        TOGETHER: [pair for pair in pairs if pair in holding],
        DOMAIN: named,
        DOMAINS: several,
        ALL: [set(here)],
        COPY: single if to else [],
    }[trouble]


def life(
    job: Job, chance: random.Random, result: Result, trouble: str, back: str, point: str = ""
) -> None:
    """Live one life of the job: recover and compare, train, let the trouble happen, end
    the job, and start again what is dead and not to be away.

    back: the way in which nodes come back, if the trouble takes any. point: the failpoint
    at which a node that is in trouble dies, or "" for a random moment.
    """
    struck, promised, returning = chance.choice(groups(trouble, job)), job.promised(), job.away
    theirs = job.ranks_of(struck)
    victim: Node = job.place[chance.choice(sorted(struck))]
    what, armed = f"{trouble}, {point or 'at a random moment'}", dict[int, str]()
    if trouble == COPY:
        failing = chance.choice(_COPY_POINTS)
        armed = {chance.choice(theirs): f"{failing}=error(EIO)@{chance.randint(1, 2)}"}
    elif point.startswith("agent."):
        armed = dict.fromkeys(theirs, f"{point}=kill@{chance.randint(1, 3)}")
    elif point:
        victim.kill()
        start(victim, job.place, f"{point}=kill@{chance.randint(1, 4)}", wait=False)
        victim.daemon.reached_ready()  # type: ignore[union-attr]
    moment = chance.choice(("before the life", "during it", "after it"))
    if moment == "before the life":
        _start_all(job, returning)
    with Ranks(len(job.here) * job.per_node) as ranks:
        seed = chance.getrandbits(32)
        lived = job.begin(
            ranks, node_trainer.train_with_copies, lambda rank: (armed.get(rank, ""), seed, 0.02)
        )
        compare(job, ranks, result, promised, f"{what}, before it", sure=not point)
        enough = chance.randint(1, 8), chance.randint(trouble == ANOTHER, 3)
        holds(
            lambda: (
                lived.has_taken(*enough)
                or has_died(victim)
                or not ranks.all_live
                or ranks.any_answer
            ),
            20.0,
        )
        time.sleep(chance.uniform(0, 0.1))
        if lived.to and not (point or armed) and (reasons := job.off()):
            result.lost.append(f"{what}: copies were ended without any trouble: {reasons}")
        log.debug("%s: %s of %s, promised %s", what, sorted(struck), lived.here, job.promised())
        if moment == "during it":
            _start_all(job, returning)
        if trouble == COPY:
            hit, problems = _end_copies(job, lived, ranks)
            result.lost += [f"{what}: {problem}" for problem in problems]
        else:
            # Without a step that is replicated, the two losses count as one at once.
            hit = trouble if trouble != ANOTHER or lived.known("replicated") else ONE
            _strike(job, ranks, trouble, struck, chance)
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 1.0))
    loses = trouble not in (TRAINERS, DAEMONS, COPY)
    result.hits[COPIED] += len(lived.known("replicated"))
    result.hits.update([hit, back] if loses else [hit] if hit else [])
    if loses:
        job.lose(struck)
    for number in struck if loses and back != BACK else ():
        job.place[number].lose()
    job.lost = struck if loses else set()
    job.away = dict.fromkeys(struck, back) if loses and back != EMPTY else {}
    if point:  # a failpoint that was not reached must not kill the next life
        victim.kill()
    _start_all(job, job.here)
    result.lost += [f"{what}: {problem}" for problem in check_memory(job)]


def _start_all(job: Job, numbers: Collection[int]) -> None:
    """Start the daemons of these nodes that do not run."""
    for number in numbers:
        node: Node = job.place[number]
        if has_died(node):
            node.kill()
            start(node, job.place)


def _strike(
    job: Job, ranks: Ranks, trouble: str, struck: Collection[int], chance: random.Random
) -> None:
    """Kill what the trouble is about on the nodes that are struck. Daemons alone start
    again at once.
    """
    kills: list[Callable[[], object]] = []
    if trouble != DAEMONS:
        kills += [partial(ranks.kill, rank) for rank in job.ranks_of(struck)]
    if trouble != TRAINERS:
        kills += [job.place[number].kill for number in struck]
    chance.shuffle(kills)
    for kill in kills:
        kill()
    if trouble == DAEMONS:
        time.sleep(chance.uniform(0, 0.2))
        _start_all(job, struck)
        time.sleep(chance.uniform(0, 1.0))


def _end_copies(job: Job, lived: Life, ranks: Ranks) -> tuple[str, list[str]]:
    """Wait until the nodes make no more copies because one has failed, and check that the
    training goes on. Return the trouble, if it has come, and what was wrong.
    """
    if not holds(lambda: bool(job.off()) or ranks.any_answer, _SECONDS):
        return "", []  # the failpoint was not reached
    if ranks.any_answer:
        return COPY, [f"the training has ended with the copies, {job.off()}: {ranks.answers()}"]
    before = [diary.count("sealed") for diary in lived.diaries]

    def goes_on() -> bool:
        after = [diary.count("sealed") for diary in lived.diaries]
        return all(now >= then + 3 for then, now in zip(before, after, strict=True))

    if holds(goes_on, _SECONDS):
        return COPY, []
    return COPY, [f"the training has stopped with the copies, {job.off()}: {ranks.answers()}"]


# -- memory


def check_memory(job: Job) -> list[str]:
    """Return a sentence for each segment of a running daemon that its status does not
    account for.
    """
    found: list[str] = []
    for node in job.place:
        if not has_died(node) and not holds(partial(_is_accounted_for, node), 20.0):
            found += _unaccounted(node)
    return found


def _is_accounted_for(node: Node) -> bool:
    return not _unaccounted(node)


def _unaccounted(node: Node) -> list[str]:
    """Compare the files in the shared memory of a node with the status of its daemon."""
    assert node.daemon is not None
    memory, found = node.daemon.status()["shared_memory"], list[str]()
    sizes, copies, replica_bytes = list[int](), Counter[tuple[int, int]](), 0
    for path in node.segments():
        try:
            with path.open("rb") as file:
                header, size = read_header(file.fileno()), path.stat().st_size
        except (FileNotFoundError, IntegrityError) as error:
            return [f"{node.name}: {error}"]  # it has just been removed, or is being made
        sizes.append(size)
        if header.peer_replica:
            copies[header.attempt, header.rank] += 1
            replica_bytes += size
    for what, files, status in (
        ("segments", len(sizes), memory["segments"]),
        ("bytes of segments", sum(sizes), memory["used_bytes"] + memory["on_disk_bytes"]),
        ("bytes of peer replicas", replica_bytes, memory["replica_bytes"]),
    ):
        if files != status:
            found.append(f"{node.name} has {files} {what}, its status says {status}")
    return found + [
        f"{node.name} has {count} segments for copies of rank {rank} in attempt {attempt}"
        for (attempt, rank), count in copies.items()
        if count > REPLICA_SLOTS
    ]


def _enter(name: str, shm: Path | None, environ: Mapping[str, str]) -> None:
    """Make this rank a process of a node."""
    become(name, shm=shm)
    os.environ.update(environ)


# -- the run


def run(
    lives: int,
    seed: int,
    seconds: float = float("inf"),
    *,
    points: Sequence[str] = POINTS,
    where: Where = in_directory,
    all_troubles: bool = False,
) -> tuple[Counter[str], list[str]]:
    """Live so many lives, or as many as fit into `seconds`.

    all_troubles: go on after `seconds` until each trouble has come, at most five times as
    long.
    Return how often each trouble came, each way in which nodes came back, how many steps
    were replicated, and how many checkpoints had chains; and what was lost.
    """
    chance, result, until = random.Random(seed), Result(), time.monotonic() + seconds

    def goes_on() -> bool:
        now = time.monotonic()
        late = all_troubles and now < until + 4 * seconds and missing(result.hits)
        return bool(tried(result.hits) < lives and (now < until or late) and not result.lost)

    upcoming, places = list[str](), 0
    while goes_on():
        domains = DOMAINS_OF_PLACES[places % len(DOMAINS_OF_PLACES)]
        places += 1
        with where(len(domains), apart=spaces.are_permitted()) as (place, environ):
            job = _settle(place, chance, environ, domains)
            for turn in range(LIVES_IN_A_PLACE):
                if not goes_on():
                    break
                if not upcoming:
                    upcoming = chance.sample(points, len(points))
                trouble, back = _next(job, chance, result.hits)
                at_a_point = turn % 2 and trouble != COPY
                life(job, chance, result, trouble, back, upcoming.pop() if at_a_point else "")
            if not result.lost:
                _close(job, result)
            if result.lost:
                print(place.logs())
    return Counter({**result.hits, CHAINS: len(result.chained)}), result.lost


def tried(hits: Mapping[str, int]) -> int:
    """Return the number of lives."""
    return sum(hits.get(trouble, 0) for trouble in TROUBLES)


def missing(hits: Mapping[str, int]) -> list[str]:
    """Return what has not happened yet."""
    return [name for name in (*TROUBLES, *RETURNS, COPIED) if not hits.get(name)]


def _settle(
    place: Nodes, chance: random.Random, environ: Mapping[str, str], domains: Sequence[str]
) -> Job:
    """Start the daemons of a place. Some have a stage."""
    for node, domain in zip(place, domains, strict=True):
        if chance.random() < 0.5:
            node.put_stage()
        node.home.environ |= {
            "CKPTD_REPLICAS": "1",
            "CKPTD_DOMAIN": domain,
            "CKPTD_MEMORY_TTL": str(int(_TTL_SECONDS)),
        }
        start(node, place)
    return Job(
        place, 1 if domains == DOMAINS_OF_PLACES[0] else chance.choice((1, 2)), environ, domains
    )


def _next(job: Job, chance: random.Random, hits: Counter[str]) -> tuple[str, str]:
    """Return the trouble that comes next, and the way in which nodes come back from it:
    those that are possible now and have come least often.
    """
    trouble = min(
        (trouble for trouble in TROUBLES if groups(trouble, job)),
        key=lambda trouble: (hits[trouble], trouble != ANOTHER, chance.random()),
    )
    most = max(map(len, groups(trouble, job)))
    back = min(
        RETURNS if len(job.place) - most >= 2 else (EMPTY,),
        key=lambda back: (hits[back], chance.random()),
    )
    return trouble, back


def _close(job: Job, result: Result) -> None:
    """Live a last life on all nodes, in which the job ends as it should, and check that it
    leaves nothing in memory.
    """
    _start_all(job, job.away)
    job.away = {}
    with Ranks(len(job.place) * job.per_node) as ranks:
        promised = job.promised()
        job.begin(ranks, node_trainer.close_after_a_step, lambda rank: ())
        compare(job, ranks, result, promised, "at the end", sure=True)
        if result.lost:
            return
        ranks.results()
        result.lost += check_memory(job)
        holds(lambda: not _left(job), _SECONDS + _TTL_SECONDS)
        result.lost += _left(job)


def _left(job: Job) -> list[str]:
    """Return a sentence for each segment that the job has left in memory when it ended.

    A node that has saved its part of a step of an earlier attempt keeps the slot until it
    knows whether the other nodes have, which may be never: those do not count.
    """
    found = list[str]()
    newest = max(
        report["attempt"]
        for node in job.place
        if node.daemon is not None
        for report in node.daemon.status()["jobs"]
        if report["job"] == JOB
    )
    for node in job.place:
        for segment in node.segments():
            try:
                with segment.open("rb") as file:
                    header = read_header(file.fileno())
            except FileNotFoundError:
                continue
            if header.peer_replica or header.attempt == newest:
                found.append(
                    f"{node.name} keeps a {'copy' if header.peer_replica else 'slot'} of rank "
                    f"{header.rank}, {header.state.name}, step {header.step} of attempt "
                    f"{header.attempt}, of a job that has ended"
                )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument(
        "--store", action="store_true", help="share a bucket of SeaweedFS, not a directory"
    )
    parser.add_argument("--verbose", action="store_true", help="print what each life had promised")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(format="%(asctime)s %(message)s")
        log.setLevel(logging.DEBUG)
    print(f"{options.lives} lives, seed {options.seed}", flush=True)
    begun = time.monotonic()
    hits, lost = run(options.lives, options.seed, where=in_store if options.store else in_directory)
    for name in (*TROUBLES, *RETURNS, COPIED, CHAINS):
        print(f"  {hits[name]:5,d}  {name.strip()}")
    print(f"{tried(hits)} lives in {time.monotonic() - begun:.0f} s, {len(lost)} promises broken")
    for sentence in lost:
        print("LOST", sentence)
    for name in missing(hits):
        print("NOT TRIED", name.strip())
    return bool(lost or missing(hits))


if __name__ == "__main__":
    raise SystemExit(main())
