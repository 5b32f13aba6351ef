"""Copies of snapshots in the memory of other nodes: what comes back when a node is lost
with its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.agent import Agent
from ckptd.shared.errors import CkptdError
from tests.crash.node_trainer import check, state_of
from tests.support.nodes import Node, Nodes, nodes
from tests.support.ranks import HERE, Ranks

JOB = "gpt"
REPLICAS = {"CKPTD_REPLICAS": "1"}
Sockets = list[Path]


@pytest.fixture
def three() -> Iterator[Nodes]:
    with nodes(3, environ=REPLICAS) as made:
        yield made


def sockets(place: Nodes, *where: int) -> Sockets:
    """Return the socket of each rank, given the node of each rank."""
    return [place[node].home.socket for node in where]


def begin(where: Sockets) -> None:
    HERE["agent"] = Agent(JOB, socket=where[dist.get_rank()])


def copy(step: int, **options: Any) -> str:
    """Take a snapshot that is kept in memory, and wait until it is copied to the other
    nodes. Return the error, or "".
    """
    pending = HERE["agent"].snapshot(state_of(step), step=step, persist=False, **options)
    try:
        pending.wait("replicated", timeout=60)
    except (CkptdError, TimeoutError) as error:
        return str(error)
    assert pending.replicated
    return ""


def recover(where: Sockets) -> tuple[int, str] | None:
    """Recover, and compare every value. Return the step and the source."""
    begin(where)
    state = state_of(-1)
    found = HERE["agent"].recover(state, on_reshape=lambda key, values: values[-1])
    if found is None:
        return None
    check(state, found.step)
    return found.step, found.source


def close() -> None:
    HERE["agent"].close()


def replicas(node: Node) -> list[dict[str, Any]]:
    """Return the part of the status of a node's daemon that is about peer replicas."""
    (found,) = (job for job in node.status()["jobs"] if job["job"] == JOB)
    listed: list[dict[str, Any]] = found["peer_replicas"]
    return listed


# -- one node is lost with its memory


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_step_that_was_only_in_memory_comes_back_without_the_node(
    three: Nodes, lost: int
) -> None:
    where = sockets(three, 0, 0, 1, 1, 2, 2)
    with Ranks(6) as ranks:
        ranks.call(begin, where)
        assert ranks.call(copy, 5) == [""] * 6
        assert ranks.call(copy, 6) == [""] * 6
        three[lost].lose()
    three[lost].start()
    with Ranks(6) as ranks:
        assert ranks.call(recover, where) == [(6, "storage")] * 6
        ranks.call(close)
