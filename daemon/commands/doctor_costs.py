"""Tells for `ckptd doctor` what saves cost on this node: how fast memory is copied and
the root is written and read, how many checkpoints of each job fit, and how often a job
should be saved.

What a job's own saves have cost comes from the history. Without it, the measured rates
tell what they would cost.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.daemon.commands.doctor_check import OK, WARNING, Check
from ckptd.daemon.config import Config
from ckptd.daemon.job.stored_checkpoint import LITTLE_ROOM
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import read_history
from ckptd.daemon.telemetry.restore_rate import RestoreRate, rate_of
from ckptd.shared.errors import CkptdError, NotFound
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.interval import Costs, Failures, Intervals, choose
from ckptd.shared.location import Location
from ckptd.shared.storage import posix_rates
from ckptd.shared.storage.locate import existing_root
from ckptd.shared.system import machine
from ckptd.shared.units import count_text, size_text, span_text

_DAY = 86_400.0
_GB = 10**9
_SAVES = 200
"""The number of the last saves on this node that are looked at."""
_MOST_JOBS = 20
"""The most jobs that get a line, those with the newest checkpoints."""
MOST_READ = 200
"""The most jobs whose newest checkpoint is read, those of the history first."""
_COPIED = 64 << 20  # bytes; more than the caches of most processors
_SLOW_COPY, _SLOW_WRITE = 1e9, 50e6
"""Bytes per second, below which a rate gets a warning."""


def _median(saves: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(float(save.get(key, 0.0)) for save in saves)


def told_cost(costs: Costs) -> str:
    """Return what a snapshot costs, in words."""
    return f"holds the training for {costs.held:.3f} s and is durable after {costs.durable:.1f} s"


def told_advice(costs: Costs) -> str:
    """Return how often to save, in words."""
    (first, *others) = chosen(costs).intervals
    every = span_text(max(first, 1.0))
    if not others:
        return f"with one failure a day, a snapshot every {every} loses the least time"
    return (
        f"with one failure a day, a snapshot to memory every {every} and one to storage every "
        f"{span_text(max(others[0], 1.0))} lose the least time"
    )


def chosen(costs: Costs) -> Intervals:
    """Return how often to save with one failure a day."""
    return choose(costs.levels(Failures(_DAY)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSizes:
    """The sizes of a checkpoint that was made at `created`, in bytes.

    nbytes: on storage. raw_bytes: in memory. largest: in the memory of the rank that has
    most. ranks: the number of ranks. restored_bytes: those that a restore reads. chain:
    the number of deltas in its longest chain.
    """

    created: str
    nbytes: int
    raw_bytes: int
    largest: int
    ranks: int
    restored_bytes: int = 0
    chain: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> CheckpointSizes:
        raw = [part.raw_bytes for part in manifest.parts]
        return cls(
            created=manifest.created, nbytes=manifest.nbytes, raw_bytes=sum(raw),
            largest=max(raw, default=0), ranks=manifest.world_size,
            restored_bytes=manifest.restored_bytes, chain=manifest.chain,
        )  # fmt: skip


def check_costs(config: Config) -> Iterator[Check]:
    """Measure rates, and tell what the saves of each job cost."""
    copied = copy_rate()
    yield check_copy(copied)
    place, name = (config.root, "root") if config.stage is None else (config.stage, "stage")
    rates = None
    if isinstance(place, Path):  # a store is measured by `ckptd bench`
        try:
            rates = posix_rates.measure(machine.nearest_existing(place))
        except OSError as error:
            why = f"could not be measured ({error.strerror}): see the line `{name}`"
            yield Check(f"rates of the {name}", WARNING, why)
    if rates is not None:
        yield check_rates(name, rates)
    jobs = list(check_jobs(config, copied, rates))
    yield from jobs
    if not jobs and rates is not None:
        cost = estimated(_GB, _GB, copied, rates)
        text = (
            f"for a state of {size_text(_GB)} in one rank, about: a snapshot {told_cost(cost)}; "
            f"{told_advice(cost)}"
        )
        yield Check("interval", OK, text, {"best_interval_seconds": chosen(cost).interval})


def copy_rate() -> float:
    """Measure how many bytes per second one thread copies into memory that has been
    touched before.
    """
    source, target = bytearray(b"\1") * _COPIED, memoryview(bytearray(_COPIED))
    times = []
    for _ in range(4):  # the first one touches the memory
        begun = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - begun)
    return _COPIED / max(min(times), 1e-6)


def check_copy(rate: float) -> Check:
    """Tell how fast memory is copied, which is what holds the training."""
    text = f"one thread copies {size_text(rate)}/s"
    values = {"bytes_per_second": round(rate)}
    if rate < _SLOW_COPY:
        text += ": the machine is busy or short of cores; measure again while it is idle"
        return Check("memory copy", WARNING, text, values)
    return Check("memory copy", OK, text, values)


def check_rates(name: str, rates: posix_rates.Rates) -> Check:
    """Tell how fast the root, or the stage, is written and read."""
    cached = "" if rates.direct else ", through the page cache"
    text = (
        f"{size_text(rates.nbytes)} were written and synced with {size_text(rates.write)}/s and "
        f"read with {size_text(rates.read)}/s, by one thread{cached}"
    )
    values = {
        "nbytes": rates.nbytes, "write_bytes_per_second": round(rates.write),
        "read_bytes_per_second": round(rates.read), "direct": rates.direct,
    }  # fmt: skip
    if rates.write < _SLOW_WRITE:
        what = "put a local disk in front with --stage DIR" if name == "root" else "use another one"
        return Check(f"rates of the {name}", WARNING, f"{text}: {what}, or save less often", values)
    return Check(f"rates of the {name}", OK, text, values)


def estimated(nbytes: float, largest: float, copied: float, rates: posix_rates.Rates) -> Costs:
    """Return the costs of a snapshot by measured rates.

    nbytes: the bytes that this node writes. largest: the bytes of the largest rank. Each
    rank copies its own bytes, at the same time as the others.
    """
    held = largest / copied
    return Costs(held, held + nbytes / rates.write)


def check_jobs(config: Config, copied: float, rates: posix_rates.Rates | None) -> Iterator[Check]:
    """Tell for each job what its saves cost, how often they are worth it, and how many
    more checkpoints fit.

    copied: bytes per second that are copied in memory.
    """
    saves: Sequence[LoggedEvent] = ()
    recoveries: Sequence[LoggedEvent] = ()
    try:
        file = machine.history_file(config.state_dir, config.root)
        saves = read_history(file, names=["save.done"], limit=_SAVES)
        recoveries = read_history(file, names=["job.recovered"], limit=_SAVES)
    except NotFound:
        pass
    except CkptdError as error:
        yield Check("history", WARNING, str(error))
    saved = {save.job for save in saves}
    newest, unread = _newest(config, saved)
    names = known = sorted({*newest, *saved})
    if len(names) > _MOST_JOBS:
        by_age = sorted(newest, key=lambda name: newest[name].created, reverse=True)
        names = sorted(by_age[:_MOST_JOBS]) or names[:_MOST_JOBS]
    free = _free(config.root) if newest else None
    for name in names:
        facts = [save.facts for save in saves if save.job == name]
        restored = rate_of([event for event in recoveries if event.job == name])
        yield check_job(name, facts, newest.get(name), free, copied, rates, restored)
    if more := len(known) - len(names) + unread:
        yield Check("jobs", OK, f"{count_text(more, 'more job')} not shown")


def check_job(
    job: str,
    saves: Sequence[Mapping[str, Any]],
    newest: CheckpointSizes | None = None,
    free: int | None = None,
    copied: float = 0.0,
    rates: posix_rates.Rates | None = None,
    restored: RestoreRate | None = None,
) -> Check:
    """Tell what the saves of a job cost, from the medians of its last saves or else by
    the rates, how long a restore takes, and how many more checkpoints fit.

    saves: the facts of its last saves on this node. newest: its newest checkpoint. free:
    the free bytes under the root, or None if they are not known. restored: the rate of
    its last recoveries.
    """
    told, values = list[str](), dict[str, Any]()
    if saves:
        cost, nbytes = Costs.measured(saves), _median(saves, "bytes")
        rate = nbytes / max(_median(saves, "save_seconds"), 1e-6)
        values = {"saves": len(saves), "bytes": nbytes, "bytes_per_second": rate}
        told.append(
            f"a snapshot of {size_text(nbytes)} {told_cost(cost)} ({size_text(rate)}/s): "
            f"{told_advice(cost)}"
        )
        values |= _values(cost)
    elif newest is not None and rates is not None:
        # A manifest does not tell on which nodes the ranks were.
        cost = estimated(newest.raw_bytes, newest.largest, copied, rates)
        values = {"saves": 0, "bytes": newest.raw_bytes, **_values(cost)}
        assumed = f" and if all {newest.ranks} ranks are on this node" if newest.ranks > 1 else ""
        told.append(
            f"a snapshot of {size_text(newest.raw_bytes)} {told_cost(cost)}, by these "
            f"rates{assumed}: {told_advice(cost)}"
        )
    level = OK
    if newest is not None and newest.restored_bytes and (restored or rates):
        rate = restored.bytes_per_second if restored else rates.read if rates else 0.0
        seconds, by = newest.restored_bytes / rate, "its last recoveries" if restored else "reading"
        values |= {
            "restored_bytes": newest.restored_bytes, "restore_seconds": seconds,
            "chain": newest.chain,
        }  # fmt: skip
        chain = f" in chains of at most {newest.chain}" if newest.chain else ""
        told.append(
            f"a restore reads {size_text(newest.restored_bytes)}{chain}, in about {seconds:.1f} s "
            f"at the rate of {by}"
        )
    if newest is not None and free is not None:
        fit = free // max(newest.nbytes, 1)
        values["room_for"] = fit
        told.append(f"{count_text(fit, 'more checkpoint')} of {size_text(newest.nbytes)} fit")
        if fit < LITTLE_ROOM:
            level = WARNING
            told[-1] += ": make room, or keep fewer checkpoints (keep_last, MaxBytes)"
    return Check(f"job {job}", level, "; ".join(told) or "nothing is known of its saves", values)


def _values(costs: Costs) -> dict[str, Any]:
    intervals = chosen(costs).intervals
    return {
        "held_seconds": costs.held, "durable_seconds": costs.durable, "lost_seconds": costs.lost,
        "best_interval_seconds": intervals[0], "best_storage_interval_seconds": intervals[-1],
    }  # fmt: skip


def _free(root: Location) -> int | None:
    return shutil.disk_usage(root).free if isinstance(root, Path) else None


def _newest(config: Config, first: Collection[str]) -> tuple[dict[str, CheckpointSizes], int]:
    """Return the newest checkpoint of each job in the root, if it can be read, and how
    many jobs were not read.

    first: the jobs that are read before the others. A store is not asked: it does not
    tell how much room it has, and may be slow.
    """
    found = dict[str, CheckpointSizes]()
    if not isinstance(config.root, Path):
        return found, 0
    # The line `root` tells what is wrong with it, and `ls` what is damaged.
    try:
        repository = existing_root(config.root)
        jobs = sorted(repository.jobs(), key=lambda job: (job not in first, job))
    except (CkptdError, OSError):
        return found, 0
    for job in jobs[:MOST_READ]:
        try:
            if (tag := repository.read_newest(job)) is not None:
                found[job] = CheckpointSizes.of(repository.read_manifest(job, tag))
        except (CkptdError, OSError):
            continue
    return found, len(jobs[MOST_READ:])
