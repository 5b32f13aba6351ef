"""Tests that a fresh process can load what a snapshot accepts: values of every kind,
and what it lacks is named in its place.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.errors import StructureMismatch
from tests.support import kinds
from tests.support.daemons import Daemon
from tests.support.scripts import python

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = python(*arguments, directory=ROOT, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 or not check, done.stderr
    return done


@pytest.mark.parametrize("seed", range(2))
def test_values_of_every_kind_are_loaded_by_another_process_bit_for_bit_and_type_for_type(
    daemon: Daemon, seed: int
) -> None:
    state = kinds.state(seed, 1000)
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(state, step=1).wait("durable", timeout=60)
        found: dict[str, Any] = {key: [] for key in state}
        agent.recover(found)
    assert sum(map(len, state.values())) >= 1000
    for key, items in state.items():
        assert list(map(kinds.described, found[key])) == list(map(kinds.described, items)), key
    done = run("-m", "tests.support.kinds", daemon.home.root / "job", str(seed), "1000")
    assert done.stdout.endswith("values are as they were saved\n")
    with ArrayCheckpoint.open(daemon.home.root / "job") as arrays:
        assert list(arrays.load()) == list(state)


PROGRAM = """
import contextlib, enum, multiprocessing, sys, torch
from ckptd.agent import Agent, Checkpoint

class Phase(enum.Enum):
    WARM = 1

class Parts(enum.Flag):
    A = 1
    B = 2

class Net(torch.nn.Module):
    class Kind(enum.IntEnum):
        SMALL = 1

STATE = {"phase": Phase.WARM, "parts": Parts.A | Parts.B, "none": Parts(0), "class": Net, "kind": Net.Kind.SMALL}

def save(socket):
    with contextlib.closing(Agent("job", socket=socket)) as agent:
        agent.snapshot(STATE, step=1).wait("durable", timeout=60)

def load(job):
    with Checkpoint.open(job) as checkpoint:
        found = checkpoint.load()
    assert all(found[key] is value for key, value in STATE.items()), found
    print("loaded")

if __name__ == "__main__":
    call = {"save": save, "load": load}[sys.argv[2]]
    if sys.argv[1] == "spawned":
        process = multiprocessing.get_context("spawn").Process(target=call, args=sys.argv[3:])
        process.start(); process.join(); sys.exit(process.exitcode)
    call(*sys.argv[3:])
"""  # noqa: E501


@pytest.mark.parametrize(("saver", "loader"), [("spawned", "main"), ("main", "spawned")])
def test_classes_of_the_main_script_are_found_by_its_next_run(
    daemon: Daemon, tmp_path: Path, saver: str, loader: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    run(script, saver, "save", daemon.home.socket)
    assert run(script, loader, "load", daemon.home.root / "job").stdout == "loaded\n"


FIRST_SNAPSHOT = """
import contextlib, sys, numpy, torch
from ckptd.agent import Agent

with contextlib.closing(Agent("job", socket=sys.argv[1])) as agent:
    agent.prepare({"w": torch.zeros(3)})
    before = set(sys.modules)
    agent.snapshot({"w": torch.zeros(3)}, step=1)
    print(sorted(name for name in set(sys.modules) - before if "numpy" in name))
"""


def test_prepare_loads_the_generators_of_numpy_before_the_first_snapshot(daemon: Daemon) -> None:
    command = [sys.executable, "-c", FIRST_SNAPSHOT, str(daemon.home.socket)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


MODULE = """
import enum, torch

class Colour(enum.Enum):
    RED = 1

class Mode(enum.Flag):
    A = 1
    B = 2

class Net(torch.nn.Module):
    pass
"""


def test_what_a_process_lacks_is_named_and_everything_else_comes_with_it(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "palette.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import palette  # type: ignore[import-not-found]

    colours = {
        "now": palette.Colour.RED,
        "mode": palette.Mode.A | palette.Mode.B,
        "net": palette.Net,
    }
    state = {
        "w": torch.arange(3.0),
        "epoch": 7,
        "colours": [colours],
        "by colour": {palette.Colour.RED: 0.5},
    }
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(state, step=1).wait("durable", timeout=60)
        monkeypatch.delitem(sys.modules, "palette")
        with Checkpoint.open(daemon.home.root / "job") as checkpoint:
            found = checkpoint.load()
        assert found["w"].tolist() == [0, 1, 2]
        assert found["epoch"] == 7
        [reds] = found["colours"]
        assert (
            repr(reds["now"])
            == "<not available: the checkpoint holds Colour.RED of module palette: import that "
            "module before loading>"
        )
        assert (
            repr(reds["mode"])
            == "<not available: the checkpoint holds Mode.A|B of module palette: import that "
            "module before loading>"
        )
        assert (
            repr(reds["net"])
            == "<not available: the checkpoint holds class Net of module palette: import that "
            "module before loading>"
        )
        assert list(found["by colour"]) == [reds["now"]]
        mine: dict[str, Any] = {
            "w": torch.zeros(3),
            "epoch": 0,
            "colours": [{"now": 1, "mode": 2, "net": 3}],
            "by colour": {},
        }
        with pytest.raises(StructureMismatch) as caught:
            agent.recover(mine)
        said = str(caught.value)
        for key, what in (
            ("colours.0.now", "Colour.RED"),
            ("colours.0.mode", "Mode.A|B"),
            ("by colour.0", "Colour.RED"),
        ):
            assert (
                f"{key}: the checkpoint holds {what} of module palette: import that module before "
                f"loading; " in said
            )
        call = (
            "recover(state, keep=['colours.0.now', 'colours.0.mode', 'colours.0.net', 'by colour'])"
        )
        assert said.endswith(f"; nothing was written. To recover the rest, call {call}")
        assert mine["w"].tolist() == [0, 0, 0]
        assert (mine["epoch"], mine["colours"][0]["now"], mine["by colour"]) == (0, 1, {})
        agent.recover(mine, keep=["colours", "by colour"])
        assert mine["w"].tolist() == [0, 1, 2]
        assert (mine["epoch"], mine["colours"][0]["now"], mine["by colour"]) == (7, 1, {})
        again = agent.snapshot(found, step=2)  # what was not available is saved again as it was
        again.wait("durable", timeout=60)
    import palette

    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        found = checkpoint.load()
    assert found["colours"] == [
        {"now": palette.Colour.RED, "mode": palette.Mode(3), "net": palette.Net}
    ]
    assert found["by colour"] == {palette.Colour.RED: 0.5}


def test_long_histories_come_back_bit_for_bit_and_type_for_type(daemon: Daemon) -> None:
    floats = torch.randn(30_000, dtype=torch.float64).tolist()
    state = {
        "losses": [*floats, float("nan"), -0.0, 0.0, float("inf")],
        "steps": list(range(-20_000, 20_000)),
        "flags": [value > 0 for value in floats],
        "mixed": [0, 0.0, False, 1, 1.0, True, None, "a", 2**64 - 1] * 1_000,
        "by name": {str(n): value for n, value in enumerate(floats)},
        "by number": dict(enumerate(floats)),
        "pair": tuple(floats),
    }
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(state, step=1).wait("durable", timeout=60)
        found: dict[str, Any] = {
            "losses": [0.0],
            "steps": [],
            "flags": [1],
            "mixed": [],
            "by name": {},
            "by number": {},
            "pair": (),
        }
        agent.recover(found)
    with (
        Checkpoint.open(daemon.home.root / "job") as checkpoint,
        ArrayCheckpoint.open(daemon.home.root / "job") as arrays,
    ):
        for loaded in (found, checkpoint.load(), arrays.load()):
            for key, values in state.items():
                assert kinds.described(loaded[key]) == kinds.described(values), key
