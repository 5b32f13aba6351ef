"""Tests that tickets go over the job's store, each once and to its rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptd.agent.dcp.targets import Claim, Target
from ckptd.agent.dcp.tickets import Ticket, receive, send
from ckptd.shared.errors import InvalidRequest

CLAIM = Claim(Target("/run/s", "/ckpts", "gpt", None, 7), 3, 7, b"\x00boot")
NOWHERE = "this rank saves to /ckpts/other, but the coordinator saves to another path: use the same path on all ranks"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tickets(plan: bytes, claimed: Claim | None = CLAIM) -> list[Ticket]:
    return [Ticket("/ckpts/gpt/step-7", rank, 3, plan, claimed) for rank in range(3)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("claimed", [CLAIM, None])
def test_each_rank_gets_its_own_once(claimed: Claim | None) -> None:
    sent = tickets(bytes(32), claimed)
    send(sent)
    for rank in (2, 1):
        assert receive("/ckpts/gpt/step-7", rank) == sent[rank]
        with pytest.raises(InvalidRequest):
            receive("/ckpts/gpt/step-7", rank)


@pytest.mark.usefixtures("group")
def test_a_ticket_that_was_not_received_is_replaced_by_the_next() -> None:
    send(tickets(b"\x01" * 32))
    send(tickets(b"\x02" * 32))
    assert receive("/ckpts/gpt/step-7", 1).global_plan == b"\x02" * 32


@pytest.mark.usefixtures("group")
def test_a_rank_with_another_path_gets_an_error() -> None:
    send(tickets(bytes(32)))
    with pytest.raises(InvalidRequest, match=NOWHERE):
        receive("/ckpts/other", 1)


def test_a_rank_alone_needs_no_store() -> None:
    send(tickets(bytes(32))[:1])
    with pytest.raises(InvalidRequest, match=NOWHERE):
        receive("/ckpts/other", 1)
