"""Measures saves and restores of one training in the same rounds: with ckptd, with
PyTorch's own ways, and by the machine's limits.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from ckptd.agent.agent import Agent, link_of
from ckptd.agent.bench.budget import Budgeted, budget
from ckptd.agent.bench.training import TrainedModel
from ckptd.agent.bench.ways import (
    DirectWrite,
    PlainCopy,
    Times,
    Way,
    WithAgent,
    by_dcp_async_save,
    by_dcp_save,
    by_torch_save,
    timed,
)
from ckptd.agent.dcp.storage_reader import StorageReader
from ckptd.shared import __version__
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.units import size_text
from ckptd.shared.wire import messages as m

_JOB = "bench"
_QUIET_STEPS = 4
"""The steps before each snapshot whose cost is measured. They show how long a step
takes without it.
"""
_COPIES = 4
"""The room on the disk that is needed, in states: for two checkpoints of ckptd, one of
another way, and one to spare.
"""


class Figures(msgspec.Struct, frozen=True):
    """The medians of one way to save: seconds held, seconds until durable, and stored
    bytes (None if it is a limit of the machine).
    """

    held: float
    durable: float
    stored: int | None


class Report(msgspec.Struct, frozen=True):
    """The findings of one run. Times are in seconds and sizes in bytes.

    saves: by the name of the way. restores: into tensors that exist, with the files in
    the page cache. first: held by the first snapshot after `prepare`. lost: the
    training time that a snapshot costs, with its call. step: the time of a quiet step.
    daemon_peak: the most memory of the daemon beyond the slots. budget: by the name of
    the step of a snapshot.
    """

    machine: dict[str, Any]
    nbytes: int
    tensors: int
    rounds: int
    saves: dict[str, Figures]
    restores: dict[str, float]
    first: float
    lost: float
    step: float
    daemon_peak: int
    budget: dict[str, Budgeted]


def measure(
    root: Path, nbytes: int, rounds: int, tell: Callable[[str], None] = lambda text: None
) -> Report:
    """Measure with a state of about `nbytes`, in a directory that is made under `root`
    and deleted at the end.

    A private daemon saves; `CKPTD_*` variables in the environment set it up, like
    CKPTD_CODEC. `tell` is called with what is being done. Raises InvalidRequest if the
    disk has no room, OSError, and what an `Agent` raises.
    """
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < _COPIES * nbytes:
        raise InvalidRequest(
            f"{root} has {size_text(free)} free; {size_text(_COPIES * nbytes)} are needed for a "
            f"state of {size_text(nbytes)}: choose a "
            "smaller --megabytes or another --root"
        )
    tell(f"training a model of {size_text(nbytes)} for some steps")
    training = TrainedModel(nbytes)
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-", dir=root) as made:
        place = Path(made)
        with _agent(place) as agent, _process_group():
            return _measure(place, training, agent, rounds, tell)


@contextmanager
def _agent(place: Path) -> Iterator[Agent]:
    """Context manager.

    Start a private daemon in this directory. At the end stop it, and delete what it has
    in shared memory.
    """
    for name in ("CKPTD_SOCKET", "CKPTD_ROOT", "CKPTD_JOB"):
        os.environ.pop(name, None)
    os.environ["CKPTD_STATE_DIR"] = str(place / "state")
    os.environ.setdefault("CKPTD_KEEP_LAST", "1")
    agent = Agent(_JOB, root=place / "root")
    status = _status(agent)
    try:
        yield agent
        agent.close()
    finally:
        if not agent.closed:
            link_of(agent).let_go()  # after an error, nothing is to be saved
        with suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(status["pid"])
            daemon.terminate()
            daemon.wait(60)
        shutil.rmtree(status["shared_memory"]["directory"], ignore_errors=True)


def _status(agent: Agent) -> dict[str, Any]:
    reply, _ = link_of(agent).client.call(lambda n: m.Status(id=n), m.StatusReport, 60.0)
    found: dict[str, Any] = msgspec.json.decode(reply.report)
    return found


@contextmanager
def _process_group() -> Iterator[None]:
    """Context manager. Make the process group of one rank that dcp.async_save needs."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure(
    place: Path, training: TrainedModel, agent: Agent, rounds: int, tell: Callable[[str], None]
) -> Report:
    state, nbytes = training.tensors, training.nbytes
    agent.prepare(state)
    link_of(agent).handovers.slots.wait()  # a training would go on meanwhile
    ways: dict[str, Way] = {
        "ckptd": WithAgent(agent), "torch.save": by_torch_save, "dcp.save": by_dcp_save,
        "dcp.async_save": by_dcp_async_save, "limit: plain copy": PlainCopy(state),
    }  # fmt: skip
    if _has_direct(place):
        ways["limit: O_DIRECT write"] = DirectWrite(nbytes)
    times, stored, first = defaultdict[str, list[Times]](list), dict[str, int](), 0.0
    file = place / "file"
    for number in range(rounds + 1):
        for name, way in ways.items():
            tell(f"round {number} of {rounds}: {name}")
            training.step()  # changes every tensor
            _settle()
            found = way(state, file)
            if number:  # round 0 warms up
                times[name].append(found)
            elif name == "ckptd":
                first = found[0]
            if file.exists():
                if not name.startswith("limit"):
                    stored[name] = _nbytes(file)
                shutil.rmtree(file) if file.is_dir() else file.unlink()
    stored["ckptd"] = min(map(_nbytes, (place / "root" / _JOB).glob("step-*")))
    tell("training beside a snapshot")
    lost, step = _lost(training, agent, rounds)
    daemon_peak = _peak(_status(agent)["pid"])
    tell("restoring")
    restores = _restores(place, training, agent, rounds)
    tell("timing the steps of a snapshot")
    return Report(
        machine=_machine(), nbytes=nbytes, tensors=len(state), rounds=rounds,
        saves={
            name: Figures(median(held for held, _ in found), median(until for _, until in found),
            stored.get(name))
            for name, found in times.items()
        },
        restores=restores, first=first, lost=lost, step=step, daemon_peak=daemon_peak,
        budget=budget(agent, state),
    )  # fmt: skip


def _lost(training: TrainedModel, agent: Agent, rounds: int) -> tuple[float, float]:
    """Return the training time that a snapshot costs, the call and the slower steps
    until it is durable, and the time of a quiet step.
    """
    found, quiet = [], list[float]()
    for _ in range(rounds):
        _settle()
        quiet += [timed(training.synchronized_step) for _ in range(_QUIET_STEPS)]
        begun, steps = time.perf_counter(), 0
        pending = agent.snapshot(training.tensors, step=agent.last_step + 1)
        while not pending.done or not steps:
            training.synchronized_step()
            steps += 1
        found.append(time.perf_counter() - begun - steps * median(quiet))
        pending.wait("durable")
    return median(found), median(quiet)


def _restores(place: Path, training: TrainedModel, agent: Agent, rounds: int) -> dict[str, float]:
    """Return the medians of the seconds that restores into the tensors of the training
    take.
    """
    state, times = training.tensors, defaultdict[str, list[float]](list)
    by_dcp_save(state, place / "dcp")
    newest = max((place / "root" / _JOB).glob("step-*"))
    for _ in range(rounds):
        found = agent.recover(state)
        assert found is not None
        times[f"ckptd recover, from {found.source}"].append(found.seconds)
        times["ckptd StorageReader"].append(
            timed(lambda: load(state, storage_reader=StorageReader(newest)))
        )
        times["dcp.load"].append(
            timed(lambda: load(state, storage_reader=FileSystemReader(place / "dcp")))
        )
    return {name: median(found) for name, found in times.items()}


def _settle() -> None:
    """Wait until the accelerator is idle and the disk has written what earlier ways
    have left to it.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    os.sync()
    time.sleep(0.2)


def _has_direct(place: Path) -> bool:
    try:
        DirectWrite(1)({}, place / "probe")
    except OSError:
        return False
    finally:
        (place / "probe").unlink(missing_ok=True)
    return True


def _nbytes(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*"))
        if path.is_dir()
        else path.stat().st_size
    )


def _peak(pid: int) -> int:
    """Return the most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        * 1024
    )


def _machine() -> dict[str, Any]:
    return {
        "ckptd": __version__, "torch": str(torch.__version__), "python": platform.python_version(),
        "kernel": platform.release(), "cpus": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(), "load": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip
