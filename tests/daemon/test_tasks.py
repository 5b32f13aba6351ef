"""Tests that failed tasks are reported, and that the daemon ends with the error of one
and a new start continues.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon import tasks
from ckptd.daemon.config import Config
from ckptd.daemon.process.app import App
from ckptd.shared.errors import Busy, CkptdError, InternalError
from tests.support.daemons import Home, running


async def fails(error: BaseException) -> int:
    raise error


def test_all_of_waits_for_all_and_raises_the_first_error() -> None:
    ended: list[int] = []

    async def ends(number: int) -> int:
        await asyncio.sleep(0)
        ended.append(number)
        return number

    async def run() -> None:
        assert await tasks.all_of([ends(1), ends(2)]) == [1, 2]
        with pytest.raises(Busy, match="one"):
            await tasks.all_of([fails(Busy("one")), ends(3), fails(Busy("two"))])

    asyncio.run(run())
    assert ended == [1, 2, 3]


def reported(error: BaseException | None, *, cancel: bool = False) -> list[BaseException]:
    """Return what is reported of a watched task that ends in this way.

    A callback starts it, as for most tasks of the daemon.
    """
    found: list[BaseException] = []

    async def run() -> None:
        tasks.on_failure(found.append)

        def start() -> asyncio.Task[Any]:
            return tasks.watched(
                asyncio.sleep(100 if cancel else 0) if error is None else fails(error),
                "counting sheep",
            )

        started: list[asyncio.Task[Any]] = []
        asyncio.get_running_loop().call_soon(lambda: started.append(start()))
        await asyncio.sleep(0.01)
        if cancel:
            started[0].cancel()
        await asyncio.wait(started)

    asyncio.run(run())
    return found


def test_an_error_is_reported_with_the_tasks_name() -> None:
    (error,) = reported(ValueError("17"))
    assert isinstance(error, InternalError)
    assert "counting sheep failed: ValueError('17')" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_an_error_of_ckptd_is_reported_as_it_is() -> None:
    busy = Busy("later")
    assert reported(busy) == [busy]


def test_a_task_that_ends_well_or_is_cancelled_is_not_reported() -> None:
    assert reported(None) == []
    assert reported(None, cancel=True) == []


def test_the_reporter_of_a_task_replaces_that_of_the_daemon() -> None:
    ours: list[BaseException] = []

    async def run() -> None:
        tasks.on_failure(lambda error: pytest.fail("not this one"))
        await asyncio.wait([tasks.watched(fails(Busy("later")), "counting", ours.append)])

    asyncio.run(run())
    assert len(ours) == 1


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", ["watch", "serve", "run"])
def test_a_failed_task_ends_the_daemon_and_the_next_one_continues(
    place: Home, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`serve` accepts clients, and `run` is the task of a connection."""
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"x": torch.arange(10)}, step=1).wait("durable", timeout=60)
        agent.close()

    async def broken(this: Any, *_: Any) -> None:
        await asyncio.sleep(0)
        if name == "run":
            this._close()
        raise KeyError("no such key")

    where = {
        "watch": "ckptd.daemon.process.vitals.Vitals",
        "serve": "ckptd.daemon.process.server.Server",
        "run": "ckptd.daemon.process.server.Connection",
    }[name]
    monkeypatch.setattr(f"{where}.{name}", broken)

    async def live() -> None:
        app = App(Config(root=place.root, socket=place.socket, threads=1))
        daemon = asyncio.get_running_loop().create_task(app.run())
        if name == "run":
            while not app.ready:
                await asyncio.sleep(0.01)
            _, writer = await asyncio.open_unix_connection(str(place.socket))
            writer.close()
        await asyncio.wait_for(daemon, 60)

    with pytest.raises(CkptdError, match=r"failed: KeyError\('no such key'\)"):
        asyncio.run(live())
    monkeypatch.undo()
    with running(place, forked=True):
        agent, state = Agent("job", socket=place.socket), {"x": torch.zeros(10, dtype=torch.int64)}
        assert agent.recover(state) is not None
        assert torch.equal(state["x"], torch.arange(10))
        agent.close()
