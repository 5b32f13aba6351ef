"""Each way of the benchmark saves the bytes that it is measured with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.bench.ways import DirectWrite, PlainCopy, WithAgent, by_dcp_save, by_torch_save
from tests.support.daemons import Daemon

STATE = {"a": torch.arange(100_000.0), "b": torch.ones(3, dtype=torch.bfloat16)}


def test_an_agent_saves_one_step_after_another(daemon: Daemon, tmp_path: Path) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    way = WithAgent(agent)
    times = [way(STATE, tmp_path), way(STATE, tmp_path)]
    agent.close()
    assert all(held > 0 and durable > 0 for held, durable in times)
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert (checkpoint.step, torch.equal(checkpoint.tensor("a"), STATE["a"])) == (2, True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_peers_save_the_state(tmp_path: Path) -> None:
    for name, way in (("torch.save", by_torch_save), ("dcp", by_dcp_save)):
        held, durable = way(STATE, tmp_path / name)
        assert 0 < held == durable
    found = torch.load(tmp_path / "torch.save", weights_only=True)
    again = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(again, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for state in (found, again):
        assert all(torch.equal(state[name], tensor) for name, tensor in STATE.items())


def test_a_plain_copy_copies_everything(tmp_path: Path) -> None:
    copy = PlainCopy(STATE)
    copy(STATE, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(copy._place, STATE.values(), strict=True))


def test_a_direct_write_writes_as_many_bytes(tmp_path: Path) -> None:
    try:
        DirectWrite(5)(STATE, tmp_path / "file")
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    assert (tmp_path / "file").stat().st_size == 16 << 20
