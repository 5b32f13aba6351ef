"""Tests that the workers of a DataLoader outlive a SIGTERM that is meant for the training,
and still end by their parent's.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ckptd.agent import Batches
from ckptd.agent.threads.loader_workers import (
    OutlivingInit,
    outlive_sigterm,
    workers_outlive_sigterm,
)
from ckptd.integrations.sampler_order import order_of
from ckptd.shared.errors import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # fewer processors than workers
CALLED = "CKPTD_TEST_CALLED"


class Numbers(Dataset[tuple[int, str]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, str]:
        return os.getpid(), os.environ.get(CALLED, "")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


def begins(number: int) -> None:
    os.environ[CALLED] = str(number)


def by_another_process(pid: int) -> None:
    subprocess.run(["kill", "-TERM", str(pid)], check=True)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_ends_by_sigterm_of_its_parent_and_of_nobody_else(method: str) -> None:
    loader = DataLoader(
        Numbers(),
        batch_size=None,
        num_workers=1,
        prefetch_factor=1,
        worker_init_fn=begins,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    batches = iter(Batches(loader))
    first, _ = next(batches)
    for _ in range(3):
        by_another_process(first)
        assert next(batches) == [first, "0"]
    for _ in range(12):  # into the next epoch
        assert next(batches)[0] == first
    (worker,) = (one for one in _children() if one.pid == first)
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


def _children() -> list[Any]:
    import multiprocessing

    return list(multiprocessing.active_children())


def test_only_the_function_of_workers_that_exist_is_replaced() -> None:
    loader = DataLoader(Numbers(), num_workers=2, worker_init_fn=begins)
    before = dict(vars(loader))
    Batches(loader)  # has a loader of its own
    assert vars(loader) == before
    workers_outlive_sigterm(loader)
    workers_outlive_sigterm(loader)
    replaced: Any = loader.worker_init_fn
    assert (type(replaced), replaced.given) == (OutlivingInit, begins)
    assert {name for name in before if vars(loader)[name] != before[name]} == {"worker_init_fn"}
    assert pickle.loads(pickle.dumps(replaced)).given is begins
    alone = DataLoader(Numbers(), worker_init_fn=begins)
    workers_outlive_sigterm(alone)
    workers_outlive_sigterm(object())
    assert alone.worker_init_fn is begins


@pytest.mark.parametrize("data", [Numbers(), Stream()], ids=["by number", "a stream"])
def test_the_loaders_of_integrations_are_reached(data: Any) -> None:
    loader = DataLoader(data, num_workers=1)
    order = order_of(loader)
    if order is not None:
        order.remove()
    assert isinstance(loader.worker_init_fn, OutlivingInit)


def test_it_is_refused_outside_workers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InvalidRequest, match="worker_init_fn=ckptd.outlive_sigterm"):
        outlive_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before
