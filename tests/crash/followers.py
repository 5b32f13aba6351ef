"""Follows a job of two ranks that trains at full speed, while its processes are killed,
stopped and rolled back.

`python -m tests.crash.followers --rounds 20 [--seed N]`. Before each snapshot, each rank
writes a digest of its state into its diary. A follower compares every version that it
gets with the digests of all ranks. So a version that mixes steps or ranks, has bytes of
another step, or comes before all ranks have sealed it, is found. The ranks, the daemon
and the follower are killed with SIGKILL, the follower is stopped with SIGSTOP, and the
ranks recover an older step. After each fault, the ranks take a few snapshots, and then
wait: the follower must get the newest that all of them have sealed. A training never
waits for a follower that is stopped. In the end, no segment is left, the daemon has none
open, and those that the follower has open have no memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptd import follow
from ckptd.agent import Agent, Pending, per_rank
from ckptd.shared.errors import NotFound, VersionGone
from tests.crash.rounds import main, run_rounds
from tests.support import forks
from tests.support.daemons import Daemon, Home, until
from tests.support.ranks import Ranks
from tests.support.trainers import JOB, Diary

RANKS = 2
SIZE = 300_000
"""The number of elements of the sharded tensor."""
FEW = 5
"""The number of snapshots that the ranks take until a follower must have a newer version."""
MANY = 15
"""The number of snapshots that the ranks must take while a follower is stopped."""
FAULTS = 2
"""The number of faults of a round."""
SECONDS = 120.0
"""Timeout in seconds for anything that must happen. It measures nothing."""
OPTIONS = ("--keep-last", "20", "--codec", "raw", "--threads", "1")
ENVIRONMENT = {"CKPTD_MEMORY_TTL": "1"}

Key = tuple[int, int]
"""The number of a training, which the state has in it, and the step."""


def model_of(key: Key) -> dict[str, torch.Tensor]:
    """Return the tensors of a step, each whole.

    No element is the same in two steps of less than 100 trainings.
    """
    run, step = key
    first = 1_000_000 * run + 7 * step
    return {
        "weight": torch.arange(first, first + SIZE, dtype=torch.int32),
        "bias": torch.full((1000,), first, dtype=torch.int32),
        "key": torch.tensor(key),
    }


def digest(part: torch.Tensor, bias: torch.Tensor) -> str:
    """Return the digest of what one rank has: its part of the weight, and the bias."""
    data = hashlib.sha256(part.numpy().tobytes())
    data.update(bias.numpy().tobytes())
    return data.hexdigest()[:24]


class Held(nn.Module):
    """A module that a follower loads each version into."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in model_of((0, 0)).items():
            self.register_buffer(name, torch.zeros_like(tensor))


@dataclass(frozen=True, slots=True)
class Places:
    """The files that the processes of a round share.

    `wait`: while it exists, the ranks take no steps. `end`: the ranks close their
    agents once it exists.
    """

    home: Path
    socket: Path

    @property
    def wait(self) -> Path:
        return self.home / "wait"

    @property
    def end(self) -> Path:
        return self.home / "end"

    def diary(self, rank: int) -> Diary:
        return Diary(self.home / f"diary-{rank}")

    @property
    def seen(self) -> Path:
        return self.home / "seen"


# -- the ranks


def train(places: Places, run: int, back_to: int | None) -> int:
    """Recover, and take snapshots until the round ends. Return the number of steps.

    back_to: the step that is recovered, or None for the newest.
    """
    logging.disable()
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,))
    chance, diary = Random(f"{run} {rank}"), places.diary(rank)
    agent, pendings = Agent(JOB, socket=places.socket), dict[Pending, str]()
    try:
        found = agent.recover(_state((0, 0), rank, mesh), step=back_to)
    except NotFound:  # retention has deleted it
        found = agent.recover(_state((0, 0), rank, mesh))
    step = first = 1 if found is None or found.step is None else found.step + 1
    while (order := _order(places)) >= 0:
        _note_promises(diary, pendings, run)
        if order == 0:
            if ("waits", (run, step - 1)) not in diary.read():
                diary.note("waits", run, step - 1)
            time.sleep(0.01)
            continue
        state = _state((run, step), rank, mesh)
        weight = state["model"]["weight"].to_local()
        diary.note(f"taken:{digest(weight, state['model']['bias'])}", run, step)
        if chance.random() < 0.2:  # so that the other ranks have sealed it already
            time.sleep(chance.uniform(0.0, 0.05))
        pendings[agent.snapshot(state, step=step, persist=step % 5 == 0)] = ""
        step += 1
    agent.close()
    return step - first


def _note_promises(diary: Diary, pendings: dict[Pending, str], run: int) -> None:
    """Note each snapshot that has become sealed or durable, or has ended otherwise."""
    for pending, before in list(pendings.items()):
        state = pending.state
        assert pending.step is not None
        if before == "" and state in ("sealed", "durable"):
            diary.note("sealed", run, pending.step)
        if state in ("sealed", "staged"):
            pendings[pending] = "sealed" if state == "sealed" else ""
            continue
        diary.note(state, run, pending.step)
        del pendings[pending]


def _state(key: Key, rank: int, mesh: Any) -> dict[str, Any]:
    model: dict[str, Any] = model_of(key)
    local = model["weight"].chunk(RANKS)[rank].clone()
    model["weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return {"model": model, "step": key[1], "own": per_rank((rank, *key))}


def _order(places: Places) -> int:
    """Return what all ranks do next: 1 to take a step, 0 to wait, -1 to end."""
    order = torch.tensor(-1 if places.end.exists() else int(not places.wait.exists()))
    dist.all_reduce(order, dist.ReduceOp.MIN)
    return int(order)


# -- the follower


def read_on(places: Places, into: bool, seed: int) -> None:
    """Follow the job, and write each version to a file: "ok", or what is wrong."""
    torch.set_num_threads(1)
    logging.disable()
    checks, module, chance = Checks(places), Held(), Random(seed)
    with places.seen.open("a", buffering=1) as file:
        try:
            for version in follow(
                JOB, into=module if into else None, socket=places.socket, interval=0.05
            ):
                if not into and chance.random() < 0.3:  # it may be replaced meanwhile
                    time.sleep(chance.uniform(0.0, 0.1))
                try:
                    problem = checks.of_module(version, module) if into else checks.of(version)
                except VersionGone:
                    continue
                run, step = checks.key
                file.write(f"{run} {step} {problem or 'ok'}\n")
        except Exception as error:
            file.write(f"0 0 the follower ended: {error!r}\n")


class Checks:
    """Compares versions with what the ranks have written into their diaries.

    `key`: that of the last version.
    """

    def __init__(self, places: Places) -> None:
        self._diaries = [places.diary(rank) for rank in range(RANKS)]
        self._order: tuple[int, int] = (0, -1)
        self._runs: dict[int, int] = {}
        self.key: Key = (0, 0)

    def of_module(self, version: Any, module: Held) -> str:
        values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        return self._unlike(version, values)

    def of(self, version: Any) -> str:
        tree = version.load()
        problem = self._unlike(version, tree["model"])
        own = [(rank, *self.key) for rank in range(RANKS)]
        if not problem and (tree["step"], list(tree["own"])) != (self.key[1], own):
            problem = f"step {tree['step']} and {tree['own']}, not {own}"
        return problem

    def _unlike(self, version: Any, values: dict[str, torch.Tensor]) -> str:
        run, step = (int(value) for value in values["key"])
        self.key = run, step
        before, self._order = self._order, (version.attempt, version.step)
        if version.step != step:
            return f"version of step {version.step} has the values of step {step}"
        if self._order <= before:
            return f"{self._order} came after {before}"
        if version.rolled_back != (version.attempt > before[0] > 0 and step <= before[1]):
            return f"rolled_back is {version.rolled_back} for {self._order} after {before}"
        if self._runs.setdefault(version.attempt, run) != run:
            return f"attempt {version.attempt} has values of another training"
        for rank, part in enumerate(values["weight"].chunk(RANKS)):
            word = f"taken:{digest(part, values['bias'])}"
            if (word, self.key) not in self._diaries[rank].read():
                return f"{self._order} has a part of rank {rank} that it had not written"
        return ""


# -- the round


def are_quiet(diaries: Sequence[Diary]) -> bool:
    """Return True once all ranks wait, and their last step is sealed or has failed.

    A rank that has sealed a step may have read its next order before the ranks were told
    to wait. So each must have noted that it waits.
    """
    last = {max(key for _, key in diary.read()) for diary in diaries}
    ended = {(word, *last) for word in ("sealed", "durable", "failed", "skipped")}
    return len(last) == 1 and all(
        ("waits", *last) in diary.read() and not ended.isdisjoint(diary.read()) for diary in diaries
    )


@dataclass(slots=True)
class Round:
    """A daemon, two ranks and a follower, and what happens to them."""

    home: Home
    chance: Random
    done: Counter[str]
    left: ExitStack = field(default_factory=ExitStack)
    run: int = 0
    ranks: Ranks = field(init=False)
    daemon: Daemon = field(init=False)
    follower: Any = None
    places: Places = field(init=False)
    diaries: list[Diary] = field(init=False)

    def live(self) -> None:
        self.places = Places(self.home.path, self.home.socket)
        self.diaries = [self.places.diary(rank) for rank in range(RANKS)]
        with self.left:
            self._start_daemon()
            self._start_ranks(None)
            self._start_follower()
            self._follows()
            for _ in range(FAULTS):
                fault = self.chance.choice(
                    (
                        self._kill_ranks,
                        self._roll_back,
                        self._kill_daemon,
                        self._kill_follower,
                        self._stop_follower,
                    )
                )
                time.sleep(self.chance.uniform(0.0, 0.3))
                fault()
                self.done[fault.__name__.strip("_").replace("_", " ")] += 1
                self._follows()
            self._end()

    # -- processes

    def _start_daemon(self) -> None:
        self.daemon = Daemon(self.home, *OPTIONS, environment=ENVIRONMENT, forked=True)
        self.left.callback(self.daemon.close)
        self.daemon.wait_ready()

    def _start_ranks(self, back_to: int | None) -> None:
        self.run += 1
        self.ranks = self.left.enter_context(Ranks(RANKS))
        self.ranks.begin(train, self.places, self.run, back_to)

    def _start_follower(self) -> None:
        arguments = (self.places, self.chance.random() < 0.5, self.chance.getrandbits(32))
        self.follower = forks.context().Process(target=read_on, args=arguments, daemon=True)
        self.follower.start()
        self.left.callback(self.follower.kill)

    # -- faults

    def _kill_ranks(self, back_to: int | None = None) -> None:
        """Kill all ranks, one some time after the other, and start them again."""
        first = self.chance.randrange(RANKS)
        for number in range(RANKS):
            self.ranks.kill((first + number) % RANKS)
            time.sleep(self.chance.uniform(0.0, 0.02))
        self._start_ranks(back_to)

    def _roll_back(self) -> None:
        durable = sorted({step for word, (_, step) in self.diaries[0].read() if word == "durable"})
        self._kill_ranks(durable[-2] if len(durable) > 1 else None)

    def _kill_daemon(self) -> None:
        self.daemon.kill()
        time.sleep(self.chance.uniform(0.0, 0.3))
        self._start_daemon()

    def _kill_follower(self) -> None:
        self.follower.kill()
        self.follower.join()
        self._start_follower()

    def _stop_follower(self) -> None:
        os.kill(self.follower.pid, signal.SIGSTOP)
        try:
            self._goes_on(MANY)
        finally:
            os.kill(self.follower.pid, signal.SIGCONT)

    # -- promises

    def _goes_on(self, steps: int) -> None:
        """Wait until the ranks have sealed so many steps more."""
        before = len(self._sealed())
        self._until(lambda: len(self._sealed()) >= before + steps, f"{steps} more steps sealed")

    def _follows(self) -> None:
        """Have the ranks take a few snapshots, and check that the follower gets the last
        that all of them have sealed.
        """
        run, before = self.run, len(self._sealed())

        def sealed() -> bool:
            found = self._sealed()
            return len(found) >= before + FEW and max(found)[0] == run

        self._until(sealed, f"{FEW} snapshots of training {run}")
        self.places.wait.touch()
        self._until(lambda: are_quiet(self.diaries), "rank that waits")
        newest = max(self._sealed())
        self._until(lambda: self._seen()[-1:] == [newest], f"version of {newest}")
        self.places.wait.unlink()

    def _sealed(self) -> set[Key]:
        """Return the steps that all ranks have sealed."""
        return set.intersection(
            *({key for word, key in diary.read() if word == "sealed"} for diary in self.diaries)
        )

    def _seen(self) -> list[Key]:
        """Return the versions that the followers have got. Each must be right."""
        found = []
        text = self.places.seen.read_text() if self.places.seen.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():
            run, step, said = line.split(" ", 2)
            assert said == "ok", f"training {run}, step {step}: {said}"
            found.append((int(run), int(step)))
        return found

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. A rank that has ended by an error is a fault."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert not self.ranks.any_answer, self.ranks.answers()
            seen = self._seen()
            assert time.monotonic() < deadline, (
                f"no {what}: {max(self._sealed(), default=None)} is sealed, and {seen[-3:]} were "
                f"seen"
            )
            time.sleep(0.01)

    def _end(self) -> None:
        """End the ranks, and check that nothing of what they have used is left.

        The follower may still have segments open, but no memory is in them.
        """
        self.places.end.touch()
        self.ranks.results()
        until(lambda: not self.home.segment_files(), "end of the segments")
        until(lambda: not _segments(self.daemon.process.pid), "daemon without segments")
        until(lambda: not any(_segments(self.follower.pid)), "memory that is free")
        self.done["  rounds"] += 1
        self.done["  versions"] += len(self._seen())


def _segments(pid: int) -> list[int]:
    """Return the number of blocks of memory in each segment that a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if ".seg" in os.readlink(link):
                found.append(link.stat().st_blocks)
    return found


def run(rounds: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return what happened to the processes, how many versions were checked, and what
    was wrong. `number` is the random seed.
    """
    return run_rounds(
        lambda place, chance, done: Round(place, chance, done).live(), rounds, number, seconds
    )


if __name__ == "__main__":
    main(__doc__, run)
