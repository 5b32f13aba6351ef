"""Tests the count of values that are NaN or infinite, from a training to its checkpoints:
parameters and optimizer state count, on every way that bytes take to storage.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptd.agent import Agent, Finite, LatestN
from ckptd.agent.copy import checked_copy
from ckptd.shared.formats.manifest import Manifest
from tests.support.commands import ckptd
from tests.support.daemons import Home, running
from tests.support.ranks import HERE, Ranks

pytestmark = pytest.mark.usefixtures("processes")

INF, NAN = float("inf"), float("nan")
WIDE = 600


class Trained:
    """A module with buffers, and its optimizer after one step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 2))
        self.model.register_buffer("mask", torch.full((3, 3), -INF))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(4, 8)).sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> dict[str, object]:
        best = torch.tensor(INF)  # of no module: it may be infinite
        return {"model": self.model, "optimizer": self.optimizer, "best": best}

    def spoil(self) -> None:
        """Make two values of a parameter and one of its moments non-finite."""
        layer = self.model[0]
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight[5, :2] = torch.tensor([NAN, -INF])
        self.optimizer.state[layer.bias]["exp_avg"][3] = INF


def counts(root: Path) -> dict[int | None, int | None]:
    """Return the count of each checkpoint of the job, by its step."""
    found = (root / "job").glob("*/manifest.json")
    manifests = [Manifest.decode(path.read_bytes()) for path in sorted(found)]
    return {manifest.step: manifest.non_finite for manifest in manifests}


@pytest.mark.parametrize("checked_by", ["trainer", "daemon"])
def test_a_state_that_turns_nan_is_counted_told_and_named(
    place: Home, monkeypatch: pytest.MonkeyPatch, checked_by: str
) -> None:
    if checked_by == "daemon":
        monkeypatch.setattr(checked_copy, "copy_bytes", None)
    trained = Trained()
    with running(place, "--log-format", "json", forked=True) as daemon:
        agent = Agent("job", socket=place.socket, retention=[LatestN(2), Finite()])
        for step in (1, 2, 3, 4, 5):
            if step == 3:
                trained.spoil()
            agent.snapshot(trained.state, step=step).wait("durable", timeout=60)
        status = ckptd("status", "--socket", place.socket).stdout
        assert (
            "NOT FINITE     job: 3 values of the newest checkpoint, step-00000005.a0001" in status
        )
        agent.close()
        assert daemon.stop() == 0
    assert counts(place.root) == {2: 0, 4: 3, 5: 3}, "Finite() has kept step 2"
    told = re.findall("turned non-finite: 3 values .* in job/step-0000000(.).a", place.log_text())
    assert told == ["3"], "the first one, and no other"
    (event,) = place.events("state.non_finite")
    assert (event["step"], event["values"]) == (3, 3)
    shown = ckptd("show", place.root / "job" / "newest").stdout
    assert "non-finite     3 values of parameters and optimizer state\n" in shown
    assert re.findall(r"\n +(\S+): (\d)\n", shown.replace("\n", "\n\n")) == [
        ("model.0.weight", "2"), ("optimizer.state.0.bias.exp_avg", "1"),
    ]  # fmt: skip
    listed = ckptd("ls", place.root, "--columns", "step,non_finite").stdout.split()
    assert listed == ["STEP", "NON-FINITE", "2", "0", "4", "3", "5", "3"]


def test_show_tells_the_count_if_the_part_is_gone(place: Home) -> None:
    trained = Trained()
    trained.spoil()
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        agent.snapshot(trained.state, step=1).wait("durable", timeout=60)
        agent.close()
    (part,) = place.root.glob("job/*/rank-*.ckpt")
    part.unlink()
    shown = ckptd("show", place.root / "job" / "newest").stdout
    assert "non-finite     3 values of parameters and optimizer state\n" in shown
    assert "                 the tensors cannot be read: " in shown


def test_show_tells_how_many_tensors_it_does_not_name(place: Home) -> None:
    model = nn.ParameterList(torch.full((4,), NAN) for _ in range(20))
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"model": model}, step=1).wait("durable", timeout=60)
        agent.close()
    shown = ckptd("show", place.root / "job" / "newest").stdout
    assert len(re.findall(r"\n {17}model\.\d+: 4(?=\n)", shown)) == 16
    assert "\n                 and 4 more\n" in shown


def test_chunks_that_are_linked_keep_their_count(place: Home) -> None:
    """The frozen weight has NaN. It is a buffer at first, and a parameter from step 3 on."""
    frozen, head = nn.Module(), nn.Linear(2, 2)
    weight = torch.ones(60_000, dtype=torch.float64)
    weight[777] = NAN
    frozen.register_buffer("weight", weight)
    state: dict[str, object] = {"frozen": frozen, "head": head}
    with running(place, "--codec", "raw", forked=True):
        agent = Agent("job", socket=place.socket)
        for step in (1, 2, 3, 4, 5):
            with torch.no_grad():
                head.bias.fill_(INF if step == 5 else step)
            if step == 3:
                del frozen.weight
                frozen.weight = nn.Parameter(weight)
                state["new"] = torch.tensor(1, dtype=torch.uint8)  # so that the plan is another
            agent.snapshot(state, step=step).wait("durable", timeout=60)
        agent.close()
    linked = re.findall("saved job.step-0000000(.).*files of older checkpoints", place.log_text())
    assert linked == ["2", "3", "4", "5"]
    assert counts(place.root) == {1: 0, 2: 0, 3: 1, 4: 1, 5: 3}


def test_a_commit_that_the_next_daemon_makes_has_the_count(place: Home) -> None:
    trained = Trained()
    trained.spoil()
    with running(place, failpoints="commit.starting=kill", forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot(trained.state, step=1)
        daemon.process.wait(60)
        with running(place, forked=True):
            agent.close()
    assert counts(place.root) == {1: 3}


def test_a_state_without_modules_and_optimizers_is_not_counted(place: Home) -> None:
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"w": torch.tensor([NAN])}, step=1).wait("durable", timeout=60)
        agent.close()
    assert counts(place.root) == {1: None}
    assert (
        "non-finite" not in ckptd("show", place.root / "job" / "newest").stdout + place.log_text()
    )


def save_as_rank(socket: Path) -> None:
    """Save a module whose parameters both ranks hold, and one of the rank's own."""
    if "agent" not in HERE:
        HERE["agent"] = Agent("job", socket=socket)
    torch.manual_seed(0)
    shared, rank = nn.Linear(50, 50), HERE["agent"].rank
    own = nn.Linear(4, 4)
    with torch.no_grad():
        shared.weight[0] = NAN
        own.bias[rank] = INF
    state = {"shared": shared, f"own{rank}": own}
    HERE["agent"].snapshot(state, step=1).wait("durable", timeout=60)


def test_values_that_several_ranks_hold_count_once(place: Home) -> None:
    with running(place, forked=True), Ranks(2) as ranks:
        ranks.call(save_as_rank, place.socket)
    assert counts(place.root) == {1: 50 + 2}
