"""Tests that tickets go over the job's store, each once and to its rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptd.agent.dcp.targets import RankDaemon, SaveTicket, Target
from ckptd.agent.dcp.tickets import Ticket, receive, send, show, shown
from ckptd.agent.link.arguments import job_store
from ckptd.agent.link.attempt import BegunAttempt, RankPlace
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.formats.membership import Membership

PLACE = RankPlace(b"\x00boot", "node0", "a daemon", "/ckpts", "gpt")
TARGET = Target("/run/s", "/ckpts", "gpt", None, 7, PLACE)
SAVE = SaveTicket(TARGET, BegunAttempt(3, Membership(run_id="0a" * 16, ranks=[1]), [0, 1]), 7)
NOWHERE = (
    "this rank saves to /ckpts/other, but the coordinator saves to another path: use the same "
    "path on all ranks"
)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tickets(plan: bytes, save: SaveTicket | None = SAVE) -> list[Ticket]:
    return [Ticket("/ckpts/gpt/step-7", rank, 3, plan, save) for rank in range(3)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("save", [SAVE, None])
def test_each_rank_gets_its_own_once(save: SaveTicket | None) -> None:
    sent = tickets(bytes(32), save)
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


@pytest.mark.usefixtures("group")
def test_the_coordinator_sees_the_daemons_of_the_ranks_that_save_to_its_job() -> None:
    path, found = (
        Path("/ckpts/gpt/step-7"),
        [RankDaemon(b"boot", f"node{rank}", why="none") for rank in (1, 2)],
    )
    show(path, 1, found[0])
    assert shown(path, 3) == [found[0], None]
    assert shown(path, 1) == []
    show(path, 2, found[1])
    assert shown(path.with_name("step-8"), 3) == found


@pytest.mark.usefixtures("group")
def test_one_key_has_the_daemons_for_all_jobs() -> None:
    """A save to a directory of its own leaves no key behind, and saves of several jobs
    may overlap.
    """
    found = [RankDaemon(b"boot", f"node{number}") for number in range(40)]
    show(Path("/runs/first/model"), 1, found[0])
    before = job_store().num_keys()
    for number, daemon in enumerate(found):
        show(Path(f"/runs/step{number}/model"), 1, daemon)
    assert [shown(Path(f"/runs/step{number}/optimizer"), 2) for number in (38, 39, 0)] == [
        [found[38]],
        [found[39]],
        [None],
    ]
    assert job_store().num_keys() == before


@pytest.mark.usefixtures("group")
def test_a_job_that_is_saved_again_and_again_is_not_forgotten() -> None:
    found = RankDaemon(b"boot", "node1")
    for number in range(40):
        show(Path("/runs/busy/model"), 1, found)
        show(Path(f"/runs/step{number}/model"), 1, found)
        assert shown(Path("/runs/busy/optimizer"), 2) == [found]
