from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckptd.shared.system.numa import UNKNOWN, near, node_of, nodes


def write(system: Path, **lists: str) -> Path:
    for name, cpus in lists.items():
        (system / name).mkdir(parents=True)
        (system / name / "cpulist").write_text(cpus + "\n")
    return system


def test_nodes(tmp_path: Path) -> None:
    system = write(tmp_path, node0="0-2,8", node1="3,5-6", node10="", nodes="1", node2="x-y")
    assert nodes(system) == {0: {0, 1, 2, 8}, 1: {3, 5, 6}, 10: set()}
    assert nodes(tmp_path / "none") == {}


def test_node_of(tmp_path: Path) -> None:
    system = write(tmp_path / "two", node0="0-3", node1="4-7")
    assert node_of({0, 3}, system) == 0
    assert node_of({5}, system) == 1
    assert node_of({3, 4}, system) == UNKNOWN
    assert node_of({9}, system) == UNKNOWN
    assert node_of({0}, write(tmp_path / "one", node0="0-7")) == UNKNOWN


def test_near_runs_this_thread_on_the_node(tmp_path: Path) -> None:
    here = os.sched_getaffinity(0)
    one = min(here)
    system = write(tmp_path, node0="100000", node1=str(one))
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    assert other.native_id is not None
    with near(1, system):
        assert os.sched_getaffinity(0) == {one}
        assert os.sched_getaffinity(other.native_id) == here
    over.set()
    assert os.sched_getaffinity(0) == here


def test_an_error_inside_near_restores_the_cpus_of_the_thread(tmp_path: Path) -> None:
    here = os.sched_getaffinity(0)
    system = write(tmp_path, node0=str(min(here)), node1="100000")

    def fail() -> None:
        with near(0, system):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert os.sched_getaffinity(0) == here


@pytest.mark.parametrize("node", [UNKNOWN, 0, 7])
def test_a_node_that_cannot_be_used_changes_nothing(tmp_path: Path, node: int) -> None:
    """The node is unknown, or this process may not use its CPUs, or it does not exist."""
    here = os.sched_getaffinity(0)
    with near(node, write(tmp_path, node0="100000", node1="0")):
        assert os.sched_getaffinity(0) == here
    assert os.sched_getaffinity(0) == here
