"""Chooses the snapshot to recover and the tier to read it from, and loads it into the
caller's state.

The candidates that all ranks can get are tried best first: highest (attempt, step),
memory before storage. Parts of a checkpoint that are still in the memory of the node,
or of another node, are read from there. The structure is compared before the first byte
is written. If damage is found later, the next candidate is tried, and overwrites every
item. RNG states are set last.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any

import msgspec
from torch.distributed.checkpoint.planner import LoadPlanner

from ckptd.agent.advice import Restart
from ckptd.agent.dcp.planner_rounds import PlannedLoad
from ckptd.agent.link.arguments import as_step
from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import LATER, RankGroup
from ckptd.agent.read.sources import Opened
from ckptd.agent.recover.differences import Differences
from ckptd.agent.recover.loading import (
    DELIVER_SECONDS,
    FIND_SECONDS,
    RANKS_SECONDS,
    Loading,
    PlannedLoading,
)
from ckptd.agent.recover.options import Options
from ckptd.agent.state.capture import set_rng_state
from ckptd.agent.threads.reminder import reminder
from ckptd.shared import names
from ckptd.shared.errors import (
    CkptdError,
    InternalError,
    InvalidRequest,
    NotFound,
    RecoveryFailed,
    StructureMismatch,
)
from ckptd.shared.formats.plan import origin
from ckptd.shared.system.collector import paused_collector
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.units import size_text
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.session import PEERS, RECOVERIES

log = logging.getLogger("ckptd.agent")

# Looks for a checkpoint that only some ranks see, and the seconds between; NFS caches
# for up to 60 s.
_LOOKS, _LOOK_SECONDS = 90, 1.0
_MAX_DAMAGE = 1000
"""The most characters about one damaged candidate that are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The snapshot that a recovery has brought back.

    step: -1 if it was saved without one. tag: the name of its directory. source:
    "memory", "storage" or, from a copy that is still on the local disk in front of the
    root, "stage". seconds: how long the recovery took. passed_over: one text for each
    newer checkpoint that was damaged, with the reason. origin: who saved it and when,
    like "train.py on node1 as alice, 2026-11-22 17:08 UTC"; "" if an earlier version
    saved it. memory_bytes: the bytes that this rank has read from the memory of its
    node. peer_bytes: those that it has read from the memory of other nodes. If `source`
    is "storage", the nodes still held these bytes, and the others came from storage.
    left: with `strict=False`, the keys of the state that the checkpoint lacks, whose
    values are left as they are.
    """

    step: int
    attempt: int
    tag: str
    source: str
    metrics: dict[str, float]
    user_content: Any
    seconds: float
    passed_over: list[str] = field(default_factory=list)
    origin: str = ""
    memory_bytes: int = 0
    peer_bytes: int = 0
    left: list[str] = field(default_factory=list)
    _rng: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    def restore_rng(self) -> bool:
        """Set the random generators again as they were when the snapshot was taken.

        Return False if none were saved for this rank.

        `recover` has set them already. Call this after code that draws from them before
        training goes on, like the shuffling of a data loader.
        """
        if self._rng is None:
            log.warning("no random generators were saved for this rank: they are left as they are")
            return False
        set_rng_state(self._rng)
        return True


class Recovery:
    """One call of `Agent.recover`, made on all ranks together.

    All ranks go through the same phases and exchange the result of each phase, so that
    they all make the same decisions. `topic` is the name of this call in the job's
    store. `nodes` is True if the job is on several nodes.
    """

    def __init__(
        self,
        client: Client,
        ranks: RankGroup,
        job: str,
        topic: str,
        options: Options,
        planner: LoadPlanner | None = None,
        *,
        nodes: bool = False,
    ) -> None:
        self._client = client
        self._ranks = ranks
        self._job = job
        self._topic = topic
        self._options = options
        self._planner = planner
        self._nodes = nodes
        self.last_step = -1
        """The highest step that any rank has captured in this attempt, or -1. Known
        once `run` has heard from all ranks.
        """
        self.restart: Restart | None = None
        """The snapshot at which the training begins.

        Known once `run` has recovered a snapshot without being given its step.
        """
        # Names of the tensors that a damaged candidate may have overwritten on this
        # rank.
        self._overwritten: set[str] = set()
        self._finds = count()
        self._called = False  # True once all ranks are known to have called recover()
        self._nbytes = 0  # the size of the snapshot that was recovered

    @paused_collector()
    def run(self, state: Any, *, step: int | None, last_step: int) -> Recovered | None:
        """Recover `state`, and return the snapshot that came back, or None.

        `Agent.recover` has the whole contract.

        last_step: the last step that this rank has captured in this attempt.
        """
        begun = time.monotonic()
        # An attempt on one node may follow one on several, and hold copies of lost nodes.
        if self._nodes or PEERS in self._client.welcome.features:
            with reminder(
                log,
                "recover() waits for the nodes to save what they hold in memory: `ckptd status` "
                "shows how far they are",
            ):
                # One daemon answers all ranks of a node at once.
                seconds = DELIVER_SECONDS if self._nodes else None
                said = self._all("deliver", self._deliver, seconds)
                delivered, absent = _delivered(said)
                # A node that was part of the attempt may have lost its memory since. Whether
                # it has delivered is known from storage alone.
                if absent or (delivered and any(one["copies"] for one in said)):
                    said = self._all("deliver-copies", lambda: self._deliver(copies=True), seconds)
                    missing = absent.difference(*(one["ranks"] for one in said))
                    delivered = 0 if missing else delivered
            if self._nodes or absent:
                self._all(
                    "decide",
                    lambda: self._find(step, last_step, delivered) if self._ranks.rank == 0 else {},
                )
        failed: list[tuple[m.RecoveryCandidate, str]] = []
        overwritten, tries = False, count()
        while True:
            heard = self._find_all(step, last_step)
            self.last_step = max(found["last_step"] for found in heard)
            candidates = _common_candidates(heard)
            for text in dict.fromkeys(text for found in heard for text in found["incomplete"]):
                log.warning("%s: this step is not complete, and cannot be recovered", text)
            damaged = [reason for found in heard for reason in found["damaged"]]
            passed_over = list(dict.fromkeys([*damaged, *(why for _, why in failed)]))
            for number, candidate in enumerate(candidates):
                if any(candidate == other for other, _ in failed):
                    continue
                where = f"{self._job}/{candidate.tag} in {candidate.source}"
                topic = str(next(tries))
                with closing(self._loading(candidate, f"{self._topic}/{topic}")) as loading:
                    damage, writing = self._load(loading, topic, state)
                overwritten = overwritten or writing
                if not damage:
                    failpoint("agent.recover.loaded")
                    if step is None and self._options.tag is None:
                        self.restart = restart(candidates, number, damaged, self._options)
                    recovered = _recovered(
                        candidate, loading, time.monotonic() - begun, passed_over
                    )
                    assert loading.opened is not None
                    self._nbytes = loading.opened.nbytes
                    log.info(
                        "recovered %s in %.2f s%s", where, recovered.seconds, _details(recovered)
                    )
                    return recovered
                if self._is_gone(candidate, topic, step, last_step):
                    log.info("%s was deleted meanwhile: the newest is looked for again", where)
                    break
                log.error("%s cannot be recovered and is skipped: %s", where, damage)
                failed.append((candidate, f"{where}: {damage}"))
                passed_over.append(f"{where}: {damage}")
            else:
                break
        if passed_over or overwritten:
            after = (
                "; the state is partly overwritten: rebuild it before training"
                if overwritten
                else "; the state is unchanged"
            )
            reasons = "; ".join(passed_over) or "the last one was deleted while it was read"
            raise RecoveryFailed(
                f"no sound checkpoint of job {self._job!r} is left: {reasons}{after}",
                overwritten=overwritten,
            )
        if step is not None:
            raise NotFound(f"job {self._job!r} has no checkpoint of step {step}")
        return None

    def report(self, recovered: Recovered) -> None:
        """Report to the daemon that all ranks have recovered this snapshot, on rank 0.

        Nothing depends on the report: it is sent without waiting for an answer, and is
        lost if the daemon is gone or of an earlier version.
        """
        if self._ranks.rank != 0 or RECOVERIES not in self._client.welcome.features:
            return
        with suppress(CkptdError):
            self._client.post(
                lambda n: m.ReportRecovery(
                    id=n, step=None if recovered.step == -1 else recovered.step,
                    attempt=recovered.attempt, tag=recovered.tag, source=recovered.source,
                    seconds=recovered.seconds, bytes=self._nbytes,
                    passed_over=[text[:_MAX_DAMAGE] for text in recovered.passed_over],
                ),
                lambda _: None,
            )  # fmt: skip

    def _load(self, loading: Loading, topic: str, state: Any) -> tuple[str, bool]:
        """Load a candidate into the state, on all ranks together.

        Return the damage that was found, or "", and whether it was found when values of
        the state had been overwritten.
        """
        if damage := _damage(self._all(f"{topic}/open", loading.open)):
            return damage, False
        said = self._all(f"{topic}/bind", lambda: loading.bind(state))
        if damage := _damage(said):
            return damage, False
        self._check_keys(said, state)
        bound = said
        said = self._all(f"{topic}/load", lambda: loading.load(bound))
        if damage := _damage(said):
            return damage, any(found["writing"] for found in said)
        self._all(f"{topic}/finish", loading.finish)
        return "", False

    def _is_gone(
        self, candidate: m.RecoveryCandidate, topic: str, step: int | None, last_step: int
    ) -> bool:
        """Return True if a candidate that cannot be loaded is no longer there for a
        rank: retention or a user has deleted it since it was found.
        """
        said = self._all(f"{topic}/find", lambda: self._find(step, last_step))
        listed = msgspec.to_builtins(candidate)
        return any(listed not in found["candidates"] for found in said)

    def _loading(self, candidate: m.RecoveryCandidate, topic: str) -> Loading:
        if self._planner is not None:
            return PlannedLoading(
                self._client, self._ranks, self._job, candidate, PlannedLoad(self._planner), topic
            )
        return Loading(
            self._client,
            self._ranks,
            self._job,
            candidate,
            self._options,
            self._overwritten,
            nodes=self._nodes,
        )

    def _find_all(self, step: int | None, last_step: int) -> list[dict[str, Any]]:
        """Return what each rank has found.

        A checkpoint that not all nodes see yet is waited for: a file system may cache
        for a minute.

        Raises RecoveryFailed if the newest checkpoint stays invisible to a rank.
        """
        said, unseen = list[dict[str, Any]](), ""
        for number in range(_LOOKS):
            find = next(self._finds)
            said = self._all(
                f"find-{find}" if find else "find", lambda: self._find(step, last_step)
            )
            if not (unseen := _unseen(said)):
                return said
            if number == 0 and self._ranks.rank == 0:
                log.warning("waiting until all ranks see %s/%s in storage", self._job, unseen)
            time.sleep(_LOOK_SECONDS)
        raise RecoveryFailed(
            f"only some ranks see {self._job}/{unseen}, the newest checkpoint: check that all "
            f"nodes have the same storage at the root, "
            "then call recover() again"
        )

    def _deliver(self, *, copies: bool = False) -> dict[str, Any]:
        """Have this node's daemon save what it holds in memory, because ranks on other
        nodes can read it from storage only.

        Once all nodes have delivered, the daemon of rank 0 decides which checkpoints
        are complete, before the other ranks look for them.

        copies: True to save the copies of ranks of other nodes instead, if these nodes
        have not delivered.
        """
        welcome = self._client.welcome
        if copies and PEERS not in welcome.features:
            return {"ranks": []}
        done, _ = self._client.call(
            lambda n: m.Deliver(id=n, copies=copies), m.Delivered, DELIVER_SECONDS
        )
        return {
            "attempt": done.attempt,
            "world_size": done.world_size,
            "ranks": done.ranks,
            "copies": welcome.copies is not None,
        }

    def _find(self, step: int | None, last_step: int, delivered: int = 0) -> dict[str, Any]:
        asked = None if step is None else as_step(step)
        if asked == -1:
            raise InvalidRequest(f"step is {step!r}; expected an integer from 0 to 10**18 - 1")
        found, _ = self._client.call(
            lambda n: m.Find(id=n, step=asked, delivered=delivered), m.Found, FIND_SECONDS
        )
        failpoint("agent.recover.found")
        tag = self._options.tag
        wanted = [c for c in found.candidates if tag is None or _has_tag(c.tag, tag)]
        damaged = [
            text for text in found.damaged if tag is None or _has_tag(text.partition(":")[0], tag)
        ]
        return {
            "candidates": [msgspec.to_builtins(c) for c in wanted],
            "damaged": damaged,
            "incomplete": found.incomplete,
            "last_step": last_step,
            "asked": asked if tag is None else tag,
            "same_partition": self._options.same_partition,
        }

    def _check_keys(self, said: list[dict[str, Any]], state: Any) -> None:
        """Check the keys of all ranks together.

        Raises StructureMismatch if no key has a place on any rank, or if `strict` is on
        and a key of the checkpoint has none. Raises InvalidRequest if a pattern in
        `keep` matches no key on any rank, and RecoveryFailed if the checkpoint lacks a
        tensor that a damaged one may have overwritten.
        """
        if not any(found["matched"] for found in said):
            mine = f" ({_some(state)})" if isinstance(state, dict) and state else ""
            saved = f", which has {_some(said[0]['unused'])}" if said[0]["unused"] else ""
            raise StructureMismatch(
                f"no key of the state{mine} is in the checkpoint{saved}; nothing was written: "
                f"compare the keys of the state with those "
                "that `ckptd show` lists, or use another job name if this training is not the one "
                "that saved the checkpoint"
            )
        if lacking := sorted({name for found in said for name in found["lacking"]}):
            raise RecoveryFailed(
                f"the next sound checkpoint lacks {', '.join(lacking[:3])}, which a damaged one "
                f"has overwritten: rebuild the state before "
                "training, or recover with step=",
                overwritten=True,
            )
        if idle := sorted(set(self._options.keep).difference(*(found["kept"] for found in said))):
            raise InvalidRequest(
                f"keep has {', '.join(map(repr, idle))}, which match no key of the state: use "
                f"keys like 'optim.param_groups.*.lr'"
            )
        if self._options.same_partition:  # each rank has looked at its own keys only
            nowhere = list(dict.fromkeys(key for found in said for key in found["unused"]))
        else:
            nowhere = [
                key for key in said[0]["unused"] if all(key in found["unused"] for found in said)
            ]
        if nowhere and self._options.strict:
            raise Differences(unused=nowhere, options=self._options).error()

    def _all(
        self, topic: str, work: Callable[[], dict[str, Any]], seconds: float | None = None
    ) -> list[dict[str, Any]]:
        """Do the work, wait for the other ranks, and return the results of all ranks.

        An error on one rank is raised on all ranks.

        seconds: how long this rank waits for the others. Default: `RANKS_SECONDS`.
        """
        seconds = RANKS_SECONDS if seconds is None else seconds
        failure: Exception | None = None
        mine: bytes | CkptdError
        try:
            mine = msgspec.msgpack.encode(work())
        except CkptdError as error:
            mine = failure = error
        except Exception as error:
            failure, mine = error, InternalError(f"{type(error).__name__}: {error}")
        try:
            heard = self._ranks.round(
                f"{self._topic}{LATER if self._called else '/'}{topic}",
                mine,
                lambda said: [msgspec.msgpack.encode(said)] * len(said),
                seconds,
            )
        except CkptdError:
            if failure is not None:
                raise failure from None
            raise
        self._called = True
        said: list[dict[str, Any]] = [
            msgspec.msgpack.decode(one) for one in msgspec.msgpack.decode(heard)
        ]
        return said


def _has_tag(directory: str, tag: str) -> bool:
    """Return True if the directory of this name holds a checkpoint with the tag."""
    parsed = names.parse_tag_directory(directory)
    return parsed is not None and parsed.tag == tag


def _some(keys: Collection[Any]) -> str:
    """Return the first three keys as text, and how many more there are."""
    more = len(keys) - 3
    return ", ".join(map(str, list(keys)[:3])) + (f" and {more} more" if more > 0 else "")


def _delivered(said: list[dict[str, Any]]) -> tuple[int, set[int]]:
    """Return the last attempt that the daemons of these ranks know, and its ranks that
    none of them had.
    """
    last = max(said, key=lambda one: int(one["attempt"]))
    here = {rank for one in said if one["attempt"] == last["attempt"] for rank in one["ranks"]}
    return int(last["attempt"]), set(range(last["world_size"])) - here


def _unseen(said: list[dict[str, Any]]) -> str:
    """Return the tag of a checkpoint that is the newest for one rank, and that another
    rank sees neither sound nor damaged, or "".
    """
    if len({found["asked"] for found in said}) > 1:
        return ""  # the ranks look for different steps
    for one in said:
        best = next(
            (candidate for candidate in one["candidates"] if candidate["source"] != "memory"), None
        )
        if best is None:
            continue
        for other in said:
            if best not in other["candidates"] and not any(
                text.startswith(f"{best['tag']}:") for text in other["damaged"]
            ):
                return str(best["tag"])
    return ""


def _common_candidates(said: list[dict[str, Any]]) -> list[m.RecoveryCandidate]:
    """Return the candidates that every rank has found, in the order of rank 0.

    `said` has what each rank has found, by rank.

    Raises InvalidRequest if the ranks want different steps or differ in
    `same_partition`. Raises RecoveryFailed if there are candidates, but none that all
    ranks have.
    """
    if len(asked := {found["asked"] for found in said}) > 1:
        raise InvalidRequest(
            f"the ranks want to recover step {' and '.join(sorted(map(str, asked)))}: pass the "
            f"same step on all ranks"
        )
    if len({found["same_partition"] for found in said}) > 1:
        raise InvalidRequest(
            "some ranks recover with same_partition and others without: pass the same on all ranks"
        )
    common = [
        m.RecoveryCandidate(**c)
        for c in said[0]["candidates"]
        if all(c in found["candidates"] for found in said)
    ]
    if not common and any(found["candidates"] for found in said):
        raise RecoveryFailed(
            "the ranks have found different checkpoints, because some were saved or deleted "
            "meanwhile: call recover() again"
        )
    return common


def restart(
    candidates: Sequence[m.RecoveryCandidate], number: int, damaged: Iterable[str], options: Options
) -> Restart:
    """Return where a training begins that has recovered the candidate with this number.

    damaged: a text for each damaged checkpoint, which begins with its tag and a colon.
    options: the options of this recovery.
    """
    chosen = candidates[number]
    tags = [names.parse_tag_directory(text.partition(":")[0]) for text in damaged]
    attempts = [candidate.attempt for candidate in candidates[: number + 1]] + [
        parsed.attempt for parsed in tags if parsed is not None
    ]
    older = (one.step for one in candidates[number + 1 :] if one.step not in (None, chosen.step))
    place = (
        f"checkpoint {chosen.tag}"
        if chosen.step is None
        else f"step {chosen.step} of attempt {chosen.attempt}"
    )
    step = next(older, None)
    return Restart(place, max(attempts), "" if step is None else options.call(step=step))


def _damage(said: list[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(found["damaged"] for found in said if found["damaged"]))


def _recovered(
    candidate: m.RecoveryCandidate, loading: Loading, seconds: float, passed_over: list[str]
) -> Recovered:
    opened = loading.opened
    assert opened is not None
    return Recovered(
        step=-1 if candidate.step is None else candidate.step, attempt=candidate.attempt,
        tag=candidate.tag, source=candidate.source, metrics=opened.metrics,
        user_content=opened.user_content, seconds=seconds, passed_over=passed_over,
        origin=_origin(opened), memory_bytes=loading.memory_bytes,
        peer_bytes=loading.peer_bytes, left=loading.left, _rng=loading.rng,
    )  # fmt: skip


def _details(recovered: Recovered) -> str:
    read = recovered.memory_bytes if recovered.source != "memory" else 0
    own = f", {size_text(read)} of it from the memory of this node" if read else ""
    peers = f", {size_text(recovered.peer_bytes)} "
    peers += "from that of other nodes" if own else "of it from the memory of other nodes"
    memory = own + (peers if recovered.peer_bytes else "")
    return memory + (f"; saved by {recovered.origin}" if recovered.origin else "")


def _origin(opened: Opened) -> str:
    who = origin(opened.writer)
    when = (
        ""
        if math.isnan(opened.created)
        else f", {datetime.fromtimestamp(opened.created, UTC):%Y-%m-%d %H:%M} UTC"
    )
    return who and who + when
