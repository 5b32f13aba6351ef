"""Tests snapshots in which some tensors do not change: these are written once, and
every checkpoint brings them back.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent, Checkpoint, per_rank
from ckptd.agent.copy import checked_copy
from ckptd.shared.formats.manifest import Manifest
from tests.support.daemons import Home, running
from tests.support.ranks import HERE, Ranks

pytestmark = pytest.mark.usefixtures("processes")

State = dict[str, torch.Tensor]


def state_of(step: int) -> State:
    """Return a state as in a fine-tuning with LoRA: much is frozen, and little changes."""
    frozen = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {
        "frozen": frozen,
        "adapter": torch.full((1000,), float(step)),
        "step": torch.tensor(step, dtype=torch.int32),
    }


def blank() -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}


def assert_state(state: State, step: int) -> None:
    assert all(torch.equal(state[name], tensor) for name, tensor in state_of(step).items())


def save(agent: Agent, *steps: int) -> None:
    for step in steps:
        agent.snapshot(state_of(step), step=step).wait("durable", timeout=60)


def manifests(root: Path) -> dict[int, Manifest]:
    """Return the manifests of the job by their steps."""
    found = [
        Manifest.decode(path.read_bytes())
        for path in sorted((root / "job").glob("*/manifest.json"))
    ]
    return {manifest.step: manifest for manifest in found if manifest.step is not None}


def written(root: Path, step: int) -> tuple[int, int]:
    """Return the bytes that were written for a step, and the bytes in linked files."""
    (part,) = manifests(root)[step].parts
    return part.new_bytes, part.linked_bytes


@pytest.mark.parametrize(
    ("codec", "checked_by"),
    [("raw", "trainer"), ("raw", "daemon"), ("planes", "trainer"), ("auto", "daemon")],
)
def test_what_is_frozen_is_written_once_and_every_checkpoint_stands_alone(
    place: Home, monkeypatch: pytest.MonkeyPatch, codec: str, checked_by: str
) -> None:
    if checked_by == "daemon":
        monkeypatch.setattr(checked_copy, "copy_bytes", None)
    with running(place, "--keep-last", "2", "--codec", codec, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2)
        first, _ = written(place.root, 1)
        new, linked = written(place.root, 2)
        assert new < 0.05 * first
        assert linked > 0.95 * first
        save(agent, 3, 4, 5)
        assert "in files of older checkpoints" in place.log_text()
        agent.close()
        assert daemon.stop() == 0
    assert sorted(manifests(place.root)) == [4, 5], (
        "the checkpoint that wrote the frozen tensor is gone"
    )
    for step in (4, 5):
        with Checkpoint.open(place.root / "job", f"step-{step:08d}.a0001") as checkpoint:
            checkpoint.verify()
            assert_state(checkpoint.load(), step)
    with running(place, "--codec", codec, forked=True):
        agent, state = Agent("job", socket=place.socket), blank()
        found = agent.recover(state)
        assert found is not None
        assert (found.step, found.source) == (5, "storage")
        assert_state(state, 5)
        save(agent, 6, 7)
        agent.close()
    assert written(place.root, 6)[1] == 0, "the first checkpoint of an attempt is whole"
    assert written(place.root, 7)[1] > 0


def test_a_state_that_changes_everywhere_has_no_links(place: Home) -> None:
    with running(place, "--codec", "raw", forked=True):
        agent = Agent("job", socket=place.socket)
        for step in range(1, 5):
            state = {name: tensor + step for name, tensor in state_of(step).items()}
            agent.snapshot(state, step=step).wait("durable", timeout=60)
        agent.close()
    assert [
        (written(place.root, step)[1], len(manifests(place.root)[step].features))
        for step in range(1, 5)
    ] == [(0, 0)] * 4


def test_a_tensor_that_is_frozen_later_is_linked_later(place: Home) -> None:
    with running(place, "--codec", "raw", forked=True):
        agent = Agent("job", socket=place.socket)
        for step in range(1, 9):
            state = state_of(step)
            state["frozen"] += min(step, 4)
            agent.snapshot(state, step=step).wait("durable", timeout=60)
        agent.close()
    assert [written(place.root, step)[1] > 0 for step in range(1, 9)] == [False] * 6 + [True] * 2
    with Checkpoint.open(place.root / "job") as checkpoint:
        assert torch.equal(checkpoint.tensor("frozen"), state["frozen"])


def test_a_restarted_daemon_writes_everything_once(place: Home) -> None:
    with running(place, "--codec", "raw", forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2)
        daemon.kill()
        with running(place, "--codec", "raw", forked=True):
            pending = agent.snapshot(state_of(3), step=3)
            while pending.state == "failed":
                pending = agent.snapshot(state_of(3), step=3)
            pending.wait("durable", timeout=60)
            save(agent, 4)
            agent.close()
    assert [written(place.root, step)[1] > 0 for step in (1, 2, 3, 4)] == [False, True, False, True]


def test_checkpoints_that_a_user_has_removed_are_not_needed(place: Home) -> None:
    with running(place, "--codec", "raw", forked=True):
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2)
        for step in (1, 2):
            shutil.rmtree(place.root / "job" / f"step-{step:08d}.a0001")
        save(agent, 3, 4)
        agent.close()
    assert [written(place.root, step)[1] > 0 for step in (3, 4)] == [False, True]
    with Checkpoint.open(place.root / "job") as checkpoint:
        assert_state(checkpoint.load(), 4)


def test_links_can_be_turned_off(place: Home) -> None:
    with running(place, "--codec", "raw", "--no-link-unchanged", forked=True):
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2, 3)
        agent.close()
    assert [written(place.root, step)[1] for step in (1, 2, 3)] == [0, 0, 0]


def save_as_rank(socket: Path, *steps: int) -> None:
    """Save on one rank of two, whose own adapter differs from that of the other.

    Runs on ranks.
    """
    if "agent" not in HERE:
        HERE["agent"] = Agent("job", socket=socket)
    rank = HERE["agent"].rank
    for step in steps:
        state = {
            **state_of(step),
            "own": per_rank(torch.full((50_000,), float(rank), dtype=torch.float64)),
        }
        HERE["agent"].snapshot(state, step=step).wait("durable", timeout=60)


def test_each_rank_links_its_own_files(place: Home) -> None:
    with running(place, "--codec", "raw", forked=True), Ranks(2) as ranks:
        ranks.call(save_as_rank, place.socket, 1, 2, 3)
    for step in (1, 2):
        shutil.rmtree(place.root / "job" / f"step-{step:08d}.a0001")
    manifest = manifests(place.root)[3]
    assert [part.linked_bytes > 0 for part in manifest.parts] == [True, True]
    with Checkpoint.open(place.root / "job") as checkpoint:
        checkpoint.verify()
        assert torch.equal(checkpoint.tensor("frozen"), state_of(3)["frozen"])
        assert [float(checkpoint.tensor(f"own@{rank}")[7]) for rank in (0, 1)] == [0.0, 1.0]
