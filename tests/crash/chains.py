"""Puts chains of deltas through all that may happen to them, and compares every
checkpoint, bit for bit, with what was saved.

`python -m tests.crash.chains --rounds 20 [--seed N]`, with `--store` on a root in an
object store. A round has random settings and a trainer whose tensors change little. It
saves faster than the daemon writes, goes back, moves its tensors to other places of the
slot, forgets checkpoints, and is followed by other attempts and other daemons. Files
cannot be linked or not created, writes fail, and bases are read slowly, so that their
slot is filled again meanwhile. At last each file of the newest chains is damaged. A
checkpoint then loads bit for bit or is refused, and the next trainer gets the newest
one that loads.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from ckptd.agent import Agent, Checkpoint, CkptdError, Pending
from ckptd.daemon.chunks.base_slot import BaseSlot
from ckptd.daemon.commands import forgetting
from ckptd.shared import names
from ckptd.shared.errors import DaemonUnreachable, IntegrityError, NotFound
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.reuse import StoredFile
from ckptd.shared.location import Location, Url
from ckptd.shared.storage import repository
from ckptd.shared.storage.bucket import open_bucket
from ckptd.shared.storage.locate import open_root, tags_of
from ckptd.shared.system.fs import PosixFileSystem
from tests.crash import places
from tests.crash.places import Where
from tests.shared.samples import flip
from tests.support.daemons import Daemon, Home, home
from tests.support.seen_chains import CHAINS, chained
from tests.support.trainers import JOB, drifting, vanish

SECONDS = 60.0
"""Timeout in seconds for anything that must happen. It measures nothing."""
CODECS = ("auto", "auto", "planes", "zstd:1")
CHUNKS = (64 << 10, 64 << 10, 1 << 20, 16 << 20)
TROUBLES = ("link", "create", "write", "slow")
"""The faults in the daemon: a file cannot be linked; there is no room for a new
file; a write fails; a base is read so slowly that its slot is filled again.
"""
DAMAGES = ("bit", "cut", "gone", "other")
_MOST_BYTES = 1 << 28

Key = tuple[int, int]
"""An attempt and a step."""


# -- the state


def state_of(step: int) -> dict[str, Any]:
    """Return the state after `step`: tensors of several types, in which few words change
    at a step, or all of them a little, and one that seldom changes.

    From time to time they change their order, and with it their places in the slot.
    """
    size = 20_000
    generator = torch.Generator().manual_seed(step)
    base = torch.randn(size, generator=torch.Generator().manual_seed(3)).bfloat16()
    near = base.view(torch.int16) + torch.randint(-3, 4, (size,), generator=generator).short()
    tensors = {
        "few": drifting(step, size),
        "all": near.view(torch.bfloat16),
        "single": drifting(step // 2, size).float(),
        "bytes": (torch.arange(size) * 7 + (torch.arange(size) + step) // 89).to(torch.uint8),
        "frozen": drifting(0, size) * (1 + step // 8),
        "random": torch.randn(500, generator=generator),
    }
    order = list(tensors)
    Random(step // 12).shuffle(order)
    return {**{key: tensors[key] for key in order}, "step": step}


def differs(state: Mapping[str, Any], step: int) -> str:
    """Return the keys whose values are not, bit for bit, those of the step."""
    wanted = state_of(step)
    return ", ".join(
        key
        for key in {**wanted, **state}
        if key not in state
        or key not in wanted
        or not (
            torch.equal(_bits(state[key]), _bits(wanted[key]))
            if isinstance(wanted[key], torch.Tensor)
            else state[key] == wanted[key]
        )
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# -- troubles in the daemon


def make_trouble(flags: Path, seed: int) -> None:
    """Make calls of this process fail or take long, now and then, while the flag of
    their kind is there. Write down each time that this happens.
    """
    chance = Random(seed)
    linker: Any = repository._Linker
    fs: Any = PosixFileSystem
    slot: Any = BaseSlot
    link, create, write, read = linker.link, fs.create, fs.write, slot.read
    parts = set[int]()  # the descriptors of files of parts

    def comes(kind: str) -> bool:
        if not (flags / kind).exists() or chance.random() < 0.7:
            return False
        tell(flags, kind)
        return True

    def linked(self: Any, older: StoredFile, name: str) -> bool:
        return not comes("link") and bool(link(self, older, name))

    def created(self: Any, name: str, directory: int, **options: Any) -> int:
        if names.part_of(name) and comes("create"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fd: int = create(self, name, directory, **options)
        (parts.add if names.part_of(name) else parts.discard)(fd)
        return fd

    def written(self: Any, fd: int, data: Any, offset: int) -> None:
        if fd in parts and comes("write"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, fd, data, offset)

    def read_slowly(self: Any, chunk: Any, buffer: memoryview, crc: int) -> bool:
        if (flags / "slow").exists():
            time.sleep(chance.uniform(0, 0.2))
        sound = bool(read(self, chunk, buffer, crc))
        if not sound:
            tell(flags, "slow")
        return sound

    linker.link, slot.read = linked, read_slowly
    fs.create, fs.write = created, written


def tell(flags: Path, kind: str) -> None:
    with (flags / "told").open("a") as file:
        file.write(f"{kind}\n")


# -- damage of files


class Files:
    """The files of the checkpoints of a root, which can be damaged and mended."""

    def __init__(self, root: Location) -> None:
        self._root = root
        self._bucket = open_bucket(root) if isinstance(root, Url) else None

    def of(self, tag: str) -> list[str]:
        return open_root(self._root).files(JOB, tag)

    def read(self, tag: str, file: str) -> bytes:
        if self._bucket is None:
            return self._path(tag, file).read_bytes()
        return self._bucket.get(f"{JOB}/{tag}/{file}", _MOST_BYTES)

    def write(self, tag: str, file: str, data: bytes) -> None:
        """Write a file. In a directory, the checkpoints that link it get these bytes, too."""
        if self._bucket is None:
            self._path(tag, file).write_bytes(data)
        else:
            self._bucket.put(f"{JOB}/{tag}/{file}", data, create=False)

    @contextmanager
    def without(self, tag: str, file: str) -> Iterator[None]:
        """Context manager. Removes the file, and puts it back, with the same inode."""
        if self._bucket is None:
            path = self._path(tag, file)
            path.rename(aside := Path(f"{self._root}-aside"))
            yield
            aside.replace(path)
        else:
            data = self.read(tag, file)
            self._bucket.delete([f"{JOB}/{tag}/{file}"])
            yield
            self.write(tag, file, data)

    @contextmanager
    def damaged(self, tag: str, file: str, kind: str, chance: Random) -> Iterator[None]:
        """Context manager. Damages the file, and mends it."""
        if kind in ("gone", "other"):
            with self.without(tag, file):
                if kind == "other":
                    self.write(tag, file, self.read(tag, chance.choice(_parts(self.of(tag)))))
                yield
            return
        data = self.read(tag, file)
        self.write(tag, file, spoilt(data, kind, chance))
        yield
        self.write(tag, file, data)

    def _path(self, tag: str, file: str) -> Path:
        assert isinstance(self._root, Path)
        return self._root / JOB / tag / file


def spoilt(data: bytes, kind: str, chance: Random) -> bytes:
    """Return the bytes of a file without its end, or with another bit in one of those
    that are not 0 and behind the header.
    """
    if kind == "cut":
        return data[: chance.randrange(len(data))]
    used = [at for at in range(ALIGN, len(data)) if data[at]]
    return flip(data, 8 * chance.choice(used or [0]) + chance.randrange(8))


def _parts(files: list[str]) -> list[str]:
    return [file for file in files if names.part_of(file)]


# -- the rig


class Job:
    """A job with chains, its trainer in this process and its daemon, and what must hold.

    _promised: the newest step that was sealed and not forgotten. _seen: the checkpoints
    that have been loaded. _chained: those with chains of several deltas.
    """

    def __init__(self, place: Home, chance: Random, done: Counter[str]) -> None:
        self._place, self._chance, self._done = place, chance, done
        self._flags = place.path / "flags"
        self._flags.mkdir()
        self._files = Files(place.root)
        self._options, self._environ = self._drawn()
        self._daemon: Daemon | None = None
        self._agent: Agent | None = None
        self._step = 0
        self._promised: Key = (0, -1)
        self._seen, self._chained = set[str](), set[str]()

    def _drawn(self) -> tuple[list[str], dict[str, str]]:
        chance = self._chance
        chunk = chance.choice(CHUNKS)
        environ = {
            "CKPTD_CHUNK_SIZE": str(chunk),
            "CKPTD_FILES_PER_RANK": str(chance.choice((1, 1, 3))),
            "CKPTD_BYTES_PER_FILE": str(chance.choice((0, 0, 2 * chunk))),
            "CKPTD_LINK_UNCHANGED": str(chance.random() < 0.95).lower(),
            "CKPTD_MAKE_ROOM": str(chance.random() < 0.3).lower(),
            "CKPTD_SLOTS": str(chance.choice((2, 2, 3))),
            "CKPTD_DELTAS": "small",
            "CKPTD_STALL_BUDGET": "1",
            "CKPTD_MEMORY_TTL": "1",
        }
        # With fewer checkpoints, no chain would have several deltas.
        keep, codec = str(chance.randint(5, 9)), chance.choice(CODECS)
        return ["--keep-last", keep, "--codec", codec, "--threads", "2"], environ

    def run(self) -> None:
        """Live, and then let files be damaged."""
        actions: dict[Callable[[], None], int] = {
            self._save: 16,
            self._change_trouble: 4,
            self._forget: 2,
            self._roll_back: 1,
            self._follow: 1,
            self._change_daemon: 1,
        }
        try:
            self._follow()
            for action in self._chance.choices(
                list(actions), list(actions.values()), k=self._chance.randint(6, 18)
            ):
                action()
                self._look()
            for _ in range(6):
                self._settle()
            self._look()
            newest = key_of(self._tags()[-1])
            assert newest == self._promised, f"the newest is {newest}, not {self._promised}"
            self._spoil()
        finally:
            if self._agent is not None:
                vanish(self._agent)
            if self._daemon is not None:
                self._daemon.close()
            self._done[CHAINS] += len(self._chained)
            told = self._flags / "told"
            for kind in told.read_text().split() if told.exists() else ():
                self._done[f" {kind}"] += 1

    # -- what may happen

    def _start_daemon(self) -> None:
        trouble = partial(make_trouble, self._flags, self._chance.getrandbits(32))
        self._daemon = Daemon(
            self._place, *self._options, environment=self._environ, forked=trouble
        ).wait_ready()

    def _begin(self) -> None:
        """Begin the next attempt, and check what comes back."""
        if self._daemon is None:
            self._start_daemon()
        self._agent = Agent(JOB, socket=self._place.socket, takeover=True)
        self._recover()

    def _recover(self) -> None:
        assert self._agent is not None
        state = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
            for key, value in state_of(0).items()
        }
        until = time.monotonic() + SECONDS
        while True:
            try:
                found = self._agent.recover(state)
                break
            except DaemonUnreachable:  # the daemon has just been replaced
                assert time.monotonic() < until, "the daemon is not found again"
                time.sleep(0.05)
        back: Key = (0, -1) if found is None else (found.attempt, found.step)
        assert back >= self._promised, f"{back} was recovered, and {self._promised} was promised"
        if found is not None:
            wrong = differs(state, found.step)
            assert not wrong, f"{back} came back from {found.source} with another {wrong}"
        self._step = max(0, back[1])
        self._done["recover"] += 1

    def _follow(self) -> None:
        """End the trainer, if there is one, and begin the next."""
        if self._agent is not None:
            vanish(self._agent)
            self._agent = None
        self._begin()

    def _roll_back(self) -> None:
        self._recover()

    def _change_daemon(self) -> None:
        assert self._daemon is not None
        if self._chance.random() < 0.5:
            self._daemon.kill()
        else:
            self._daemon.stop()
        self._start_daemon()
        self._done["change daemon"] += 1
        assert self._agent is not None
        if self._promised[0] < self._agent.attempt:
            # The next daemon knows nothing of an attempt that has sealed nothing, and
            # fences its trainer.
            self._follow()

    def _save(self) -> None:
        """Take some snapshots without a pause, and often wait for the last one."""
        pending = None
        for _ in range(self._chance.choice((1, 1, 1, 2, 6))):
            pending = self._snapshot() or pending
        if pending is not None and self._chance.random() < 0.8:
            self._wait(pending)

    def _snapshot(self) -> Pending | None:
        assert self._agent is not None
        self._step += 1
        pending = self._agent.snapshot(state_of(self._step), step=self._step)
        self._done["save"] += 1
        if pending.state not in ("sealed", "durable"):
            return None
        self._promised = max(self._promised, (pending.attempt, self._step))
        return pending

    def _wait(self, pending: Pending) -> bool:
        try:
            pending.wait("durable", timeout=SECONDS)
        except CkptdError:
            self._done[" failed"] += 1
            return False
        return True

    def _change_trouble(self) -> None:
        self._end_trouble()
        if self._chance.random() < 0.7:
            (self._flags / self._chance.choice(TROUBLES)).touch()

    def _end_trouble(self) -> None:
        for kind in TROUBLES:
            (self._flags / kind).unlink(missing_ok=True)

    def _forget(self) -> None:
        if not (tags := self._tags()):
            return
        tag = self._chance.choice(tags)
        try:
            deletion = forgetting.planned(self._place.root / JOB / tag, [])
        except NotFound:
            return  # retention has deleted it meanwhile
        deletion.run(self._place.socket)
        if deletion.rows[0]["deleted"]:
            self._done["forget"] += 1
            if key_of(tag) == self._promised:
                self._promised = max(map(key_of, self._tags()), default=(0, -1))

    def _settle(self) -> None:
        """End all trouble, and save until a step is durable."""
        self._end_trouble()
        until = time.monotonic() + SECONDS
        while True:
            pending = self._snapshot()
            if pending is not None and self._wait(pending):
                return
            assert time.monotonic() < until, "nothing is saved any more"

    def _tags(self) -> list[str]:
        """Return the directories of the committed checkpoints, the newest last."""
        repository = open_root(self._place.root)
        return sorted(
            (
                tag
                for tag in tags_of(repository, JOB)
                if names.MANIFEST in repository.files(JOB, tag)
            ),
            key=key_of,
        )

    # -- what must hold

    def _load(self, tag: str) -> bool:
        """Load a checkpoint, and compare it. Return False if it is refused."""
        try:
            with Checkpoint.open(str(self._place.root / JOB), tag) as opened:
                wrong = differs(opened.load(), key_of(tag)[1])
        except IntegrityError:
            return False
        assert not wrong, f"{tag} loads with another {wrong}"
        return True

    def _look(self) -> None:
        """Check that every checkpoint loads that has been committed since the last call,
        and is still there.
        """
        for tag in self._tags():
            if tag in self._seen:
                continue
            try:
                assert self._load(tag), f"{tag} is refused"
            except NotFound:
                continue  # retention has deleted it meanwhile
            self._seen.add(tag)
            self._done["load"] += 1
        self._chained |= chained(self._place.root)

    def _spoil(self) -> None:
        """Damage files of the newest chain, one after the other, and then one for good:
        while the trainer saves, or before another one begins.
        """
        assert self._agent is not None
        assert self._daemon is not None
        tags = [tag for tag in self._tags() if tag in self._chained]
        if tags and self._chance.random() < 0.3:
            self._spoil_one(tags[-1])
            for _ in range(3):
                self._save()
            self._settle()
        self._agent.close(timeout=SECONDS)
        assert self._daemon.stop() == 0
        self._daemon = self._agent = None
        shutil.rmtree(self._place.segments, ignore_errors=True)
        for tag in [tag for tag in tags if tag in self._tags()][-1:]:
            sound = [other for other in self._tags() if self._load(other)]
            for file in _parts(self._files.of(tag)):
                kind = self._chance.choice(DAMAGES)
                with self._files.damaged(tag, file, kind, self._chance):
                    loads = [other for other in self._tags() if self._load(other)]
                self._done[f"damage: {kind}"] += 1
                self._done[" refused"] += len(sound) - len(loads)
                assert kind in ("bit", "other") or tag not in loads, (
                    f"{tag}, {kind}: it is accepted"
                )
            assert sound == [other for other in self._tags() if self._load(other)]
            self._spoil_one(tag)
        loads = [tag for tag in self._tags() if self._load(tag)]
        self._promised = key_of(loads[-1]) if loads else (0, -1)
        if not loads:
            return  # a single checkpoint, and it was damaged: nothing can come back
        self._begin()
        for _ in range(3):
            self._settle()
        assert all(self._load(tag) for tag in self._tags()[-1:])

    def _spoil_one(self, tag: str) -> None:
        file = self._chance.choice(_parts(self._files.of(tag)))
        data = self._files.read(tag, file)
        self._files.write(tag, file, spoilt(data, "bit", self._chance))
        self._done["damage for good"] += 1


def key_of(tag: str) -> Key:
    """Return (attempt, step) of a checkpoint's directory."""
    parsed = names.parse_tag_directory(tag)
    assert parsed is not None
    assert parsed.step is not None
    return parsed.attempt, parsed.step


def run(
    rounds: int, number: int, seconds: float = float("inf"), where: Where = home
) -> tuple[Counter[str], list[str]]:
    """Run up to `rounds` jobs, until `seconds` have passed or one goes wrong.

    `number` is the random seed. Return what was done, and what went wrong.
    """
    chance, done, until = Random(number), Counter({CHAINS: 0}), time.monotonic() + seconds
    for _ in range(rounds):
        if time.monotonic() > until:
            break
        seed = chance.getrandbits(32)
        with where() as place:
            try:
                Job(place, Random(seed), done).run()
            except (AssertionError, CkptdError, OSError, TimeoutError) as error:
                return done, [f"round {seed}: {error!r}\n{place.log_text()[-3000:]}"]
    return done, []


def main() -> None:
    logging.disable()
    torch.set_num_threads(1)
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    places.add_option(parser)
    options = parser.parse_args()
    done, problems = run(options.rounds, options.seed, where=places.where(options.store))
    print(*(f"{what:40} {count}" for what, count in done.most_common()), *problems, sep="\n")
    print(f"seed {options.seed}, {len(problems)} lost")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
