"""A storage that several processes share, and its clock.

The processes are threads. One runs at a time, and chance picks it.

`SharedStorage` does what a store with conditional puts does. Its listings may be
`stale`, as those of a network file system. `Files` is the storage as one process sees
it, and `Calls` makes its calls. `in_storage` lets the code of the product use the
clock. `store_model.py` has the processes.
"""

from __future__ import annotations

import errno
import functools
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from obstore.store import MemoryStore

from ckptd.daemon.saving import joint
from ckptd.shared import names
from ckptd.shared.errors import StorageError
from ckptd.shared.storage import locks, object_leases
from ckptd.shared.storage.bucket import Bucket, ObjectMeta
from ckptd.shared.storage.object_leases import Held, Leases
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.system import machine

T = TypeVar("T")

MOST_REQUESTS = 5000
"""The most requests of one life. A life with more counts as stuck."""


class Killed(BaseException):
    """Ends the thread of a process that has been killed."""


class Broken(Exception):
    """A promise that was broken, in words."""


@dataclass(eq=False)
class Actor:
    """A process.

    `node`: its node, whose listings it sees. `dies`: the number of the request at which
    it dies or that fails, or 0.

    `died` is called after its death. `due`: the time until which it sleeps. `turn` is
    released when it may run.
    """

    name: str
    node: int
    run: Callable[[Actor], None]
    dies: int = 0
    requests: int = 0
    died: Callable[[], object] = lambda: None
    dead: bool = False
    done: bool = False
    due: float = 0.0
    turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def host(self) -> str:
        return self.name.replace(" ", "-")


class SharedStorage(Bucket):
    """The storage, the clock, and the processes. One process runs at a time.

    stale: True if listings may be old, as on a network file system: a node sees a
    directory as it was when it listed it last, unless it has changed something in it
    since.
    """

    def __init__(self, chance: random.Random, *, kills: bool) -> None:
        super().__init__(MemoryStore(), "memory://root")
        self.chance, self.stale, self.kills = chance, False, kills
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.now, self.version = 0.0, 0
        self.actors: list[Actor] = []
        self.held: dict[Held, Actor] = {}  # the leases and marks of living processes
        self.broken: list[str] = []
        self.states: set[int] = set()
        self.on_change: Callable[[str, bytes | None], None] = lambda name, data: None
        self._listed: dict[tuple[int, str], list[str]] = {}
        self._here = threading.local()
        self._back = threading.Lock()
        self._back.acquire()

    # -- processes

    def add(
        self, name: str, node: int, run: Callable[[Actor], None], *, mortal: bool = False
    ) -> Actor:
        dies = (
            self.chance.randint(1, 40)
            if mortal and self.kills and self.chance.random() < 0.5
            else 0
        )
        actor = Actor(name, node, run, dies)
        actor.turn.acquire()
        self.actors.append(actor)
        threading.Thread(target=self._live, args=(actor,), daemon=True).start()
        return actor

    def _live(self, actor: Actor) -> None:
        actor.turn.acquire()
        self._here.actor = actor
        try:
            actor.run(actor)
        except Killed:
            pass
        except (
            OSError,
            StorageError,
        ):  # of a request that has failed: what it was for is tried again
            actor.dead = True
        except Broken as error:
            self.broken.append(f"{actor.name}: {error}")
        except BaseException as error:
            self.broken.append(f"{actor.name} ended with {error!r}")
        self.held = {held: owner for held, owner in self.held.items() if owner is not actor}
        actor.done = True
        self._back.release()

    def run(self) -> None:
        """Let the processes run until all have ended."""
        total = 0
        while (living := [actor for actor in self.actors if not actor.done]) and not self.broken:
            actor = self.chance.choice(living)
            self.pass_time(actor.due)
            actor.turn.release()
            self._back.acquire()
            if actor.done and actor.dead:
                actor.died()
            total += 1
            if total > MOST_REQUESTS:
                self.broken.append(f"{[actor.name for actor in living]} never end")
        for actor in self.actors:  # after a broken promise
            while not actor.done:
                actor.dead = True
                actor.turn.release()
                self._back.acquire()

    def pass_time(self, until: float) -> None:
        if until > self.now:
            self.now = until
            for held in self.held:
                held._count += 1
                # A living process writes its lease again in time.
                self._set(held.name, f"{self.held[held].host} 1 {held._count}".encode())

    def sleep(self, seconds: float) -> None:
        self._wait(self.now + seconds)

    def _wait(self, due: float = 0.0) -> None:
        """Let the other processes go on, until it is this one's turn and the clock has
        reached `due`.
        """
        actor = self.actor
        if actor is None:  # no process runs yet, or any more
            self.pass_time(due)
            return
        actor.due = due
        self._back.release()
        actor.turn.acquire()
        if actor.dead:
            raise Killed

    def request(self, call: Callable[[], T]) -> T:
        actor = self.actor
        self._wait()
        if actor is not None:
            actor.requests += 1
            if actor.requests == actor.dies:
                if self.chance.random() < 0.5:
                    call()
                if self.chance.random() < 0.3:
                    raise OSError(errno.EIO, "no answer")
                actor.dead = True
                raise Killed
        self.states.add(
            hash(
                (frozenset(self.objects.items()), tuple((a.requests, a.dead) for a in self.actors))
            )
        )
        return call()

    @property
    def actor(self) -> Actor | None:
        """The process that runs in this thread, or None if no process has begun, or all
        have ended.
        """
        return getattr(self._here, "actor", None)

    @property
    def running(self) -> str:
        """The name of the process that makes the request."""
        return "" if self.actor is None else self.actor.name

    @property
    def _node(self) -> int:
        return -1 if self.actor is None else self.actor.node

    # -- objects

    def _set(self, name: str, data: bytes | None) -> None:
        if data is None:
            self.objects.pop(name, None)
        else:
            self.version += 1
            self.objects[name] = data, self.version

    def change(self, name: str, data: bytes | None) -> None:
        if data is not None or name in self.objects:
            self.on_change(name, data)
        self._set(name, data)
        self._listed.pop((self._node, name.rpartition("/")[0]), None)

    def refresh_listing(self, prefix: str) -> None:
        self.request(lambda: self._listed.pop((self._node, prefix), None))

    def _find(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(2, "No such file or directory", name)
        return self.objects[name][0]

    def put(self, name: str, data: bytes, *, create: bool) -> None:
        def put() -> None:
            if create and name in self.objects:
                raise FileExistsError(17, "File exists", name)
            self.change(name, data)

        self.request(put)

    def open(self, name: str, most: int) -> tuple[ObjectMeta, bytes]:
        data = self.request(lambda: self._find(name))
        return ObjectMeta(name, len(data), ""), data[:most]

    def get(self, name: str, limit: int) -> bytes:
        return self.request(lambda: self._find(name))

    def read(self, name: str, offset: int, length: int) -> memoryview:
        return memoryview(self.request(lambda: self._find(name)))[offset : offset + length]

    def head(self, name: str) -> ObjectMeta:
        return self.request(
            lambda: ObjectMeta(name, len(self._find(name)), str(self.objects[name][1]))
        )

    def children(self, prefix: str) -> tuple[list[str], list[ObjectMeta]]:
        def listed() -> list[str]:
            found = [
                name for name in self.objects if name.startswith(f"{prefix}/" if prefix else "")
            ]
            if not self.stale or prefix.startswith(names.CONTROL):
                return found
            place = self._node, prefix
            if place in self._listed and self.chance.random() < 0.7:
                return self._listed[place]
            self._listed[place] = found
            return found

        below = self.request(listed)
        skip = len(prefix) + 1 if prefix else 0
        prefixes = {name[: name.index("/", skip) + 1] for name in below if "/" in name[skip:]}
        objects = [name for name in below if "/" not in name[skip:]]
        return sorted(prefixes), [
            ObjectMeta(name, 1, str(self.objects.get(name, (b"", 0))[1])) for name in objects
        ]

    def below(self, prefix: str) -> list[str]:
        return self.request(
            lambda: [name for name in self.objects if name.startswith(f"{prefix}/")]
        )

    def delete(self, names: list[str]) -> None:
        def delete(name: str) -> None:
            self.change(name, None)

        for name in names:  # a process may die between two of them
            self.request(functools.partial(delete, name))


class Files(ObjectStorage):
    """The storage of one process, which sees a fresh listing of a directory once it has
    created a file there.
    """

    def __init__(self, world: SharedStorage) -> None:
        super().__init__(world, "digest")
        self._world = world
        # A cached property takes one lock for all processes of the model.
        self.__dict__["creates_once"] = True
        self._leases = Leases(world, names.CONTROL, lambda: world.now)

    def refresh_listing(self, prefix: str, file: str) -> None:
        self._world.refresh_listing(prefix)


class Calls:
    """Storage calls that are made at once, by the process that needs them."""

    async def run(self, call: Callable[[], T]) -> T:
        return call()

    async def read(self, action: str, call: Callable[[], T]) -> T:
        return call()

    @asynccontextmanager
    async def deadline(self, action: str) -> Any:
        yield

    @asynccontextmanager
    async def entered(self, manager: AbstractContextManager[T]) -> Any:
        with manager as value:
            yield value


def done(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for the event loop, and return its result."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("the coroutine waits for something")


@contextmanager
def in_storage(world: SharedStorage) -> Iterator[None]:
    """Context manager.

    Let the code of the product use the clock of a world, and have living processes
    renew their leases.
    """

    async def sleep(seconds: float) -> None:
        world.sleep(seconds)

    put, close = Held.put, Held.close

    def put_and_renew(self: Held) -> None:
        put(self)
        if (actor := world.actor) is not None:
            world.held[self] = actor

    def end_and_close(self: Held) -> None:
        world.held.pop(self, None)
        close(self)

    def host() -> str:
        return "test" if world.actor is None else world.actor.host

    loop = SimpleNamespace(time=lambda: world.now)
    with (
        mock.patch.object(machine, "host", host),
        mock.patch.object(names, "new_nonce", functools.partial(world.chance.randbytes, 16)),
        mock.patch.object(
            joint, "asyncio", SimpleNamespace(sleep=sleep, get_running_loop=lambda: loop)
        ),
        mock.patch.object(joint, "LATE_SECONDS", 0.3),
        mock.patch.object(
            object_leases, "time", SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)
        ),
        mock.patch.object(locks, "SECONDS", 0.3),
        mock.patch.object(Held, "put", put_and_renew),
        mock.patch.object(Held, "keep"),
        mock.patch.object(Held, "close", end_and_close),
    ):
        yield
