"""Measures one row of `benchmarks.perf` with the version of ckptd that Python finds:
`python -m benchmarks.probes ROW`.

It calls public names, so that it also runs an earlier version. It prints one line of
JSON: each figure with the values of ckptd and of the peer, which does the same with the
same bytes right before, call by call; the CPU seconds and the peak of memory of the
trainer and of the daemon; and the step time that the training loses by a snapshot.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

Pairs = list[tuple[float, float]]
"""The values of ckptd and of the peer, for each call."""
Tensors = dict[str, torch.Tensor]
CALLS = 5
CLI = [sys.executable, "-c", "from ckptd.daemon.commands.cli import main; main()"]
SYNCS = "syncs"
"""The file that has a byte for each sync of the daemon."""
COUNTED = f"""
import os
log = os.open({SYNCS!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for name in ("fsync", "fdatasync"):
    def counted(fd, sync=getattr(os, name)):
        sync(fd)
        os.write(log, b".")
    setattr(os, name, counted)
"""
DELTAS = 19
"""Saves of a fine-tuning: the longest chain of deltas, and what is whole before it."""


@dataclass(frozen=True)
class Figure:
    """The pairs of one figure.

    peer: the work that the other value of each pair measures. nbytes: the bytes that the
    peer moves, 0 if no rate is to be told. pages: where the bytes are before the call.
    """

    pairs: Pairs
    peer: str
    nbytes: int = 0
    pages: str = ""


@dataclass
class Row:
    """The figures of one state, and the seconds of training that a snapshot of it costs."""

    figures: dict[str, Figure] = field(default_factory=dict)
    lost: float | None = None


@contextmanager
def agent(*options: str, keep: int = 1) -> Iterator[tuple[Any, Path]]:
    """Context manager. Start a daemon, and return an agent of it, and its directory."""
    from ckptd.agent import Agent

    with tempfile.TemporaryDirectory(prefix="ckptd-perf-") as made:
        place = Path(made)
        places = ["--root", f"{place}/root", "--socket", f"{place}/s", "--state-dir", made]
        python, run, code = CLI
        daemon = subprocess.Popen(
            [python, run, COUNTED + code, "run", *places, "--keep-last", str(keep), *options],
            stderr=subprocess.DEVNULL, cwd=made,
        )  # fmt: skip
        try:
            while not (place / "s").exists():
                time.sleep(0.01)
            to = Agent("perf", socket=place / "s")
            yield to, place
            to.close()
        finally:
            daemon.terminate()
            daemon.wait()


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class State:
    """Tensors, warm memory for a plain copy of them, and files for their bytes."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._copies = [torch.empty_like(tensor) for tensor in tensors.values()]
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.step = 0
        self.copy()

    @classmethod
    def of(cls, count: int, elements: int) -> State:
        torch.manual_seed(0)
        return cls({f"t{n}": torch.randn(elements, device="cpu") for n in range(count)})

    def change(self) -> None:
        torch._foreach_mul_(list(self.tensors.values()), 1.0001)
        self.step += 1

    def copy(self) -> float:
        """Return the seconds of a copy by torch."""
        return timed(lambda: torch._foreach_copy_(self._copies, list(self.tensors.values())))

    def write(self) -> float:
        """Return the seconds that it takes to write the bytes to a new file, and to sync
        it and its directory.
        """

        def write(place: Path) -> None:
            with (place / "file").open("wb", buffering=0) as file:
                for tensor in self._copies:
                    file.write(tensor.view(torch.uint8).numpy().data)
                os.fsync(file.fileno())
            directory = os.open(place, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

        with tempfile.TemporaryDirectory(prefix="ckptd-perf-") as place:
            return timed(lambda: write(Path(place)))

    def dcp(self, *, zstandard: bool = False, to: Path | None = None) -> float:
        """Return the seconds of `dcp.save` to a new directory. It syncs its files."""
        from torch.distributed.checkpoint._extension import ZStandard
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        extensions = [ZStandard()] if zstandard else []
        with tempfile.TemporaryDirectory(prefix="ckptd-perf-") as place:
            writer = FileSystemWriter(to or place, thread_count=2, _extensions=extensions)
            return timed(lambda: save(self.tensors, storage_writer=writer, no_dist=True))

    def load(self, path: Path) -> float:
        """Return the seconds of `dcp.load`."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(path)
        return timed(lambda: load(self.tensors, storage_reader=reader, no_dist=True))


class Trained(State):
    """Weights and both moments of AdamW, in fp32. Every word changes a little at a step.

    The gradients are random, and each weight has a scale of its own for them, so that
    exponents are spread as in a training.
    """

    LAYERS, RATE, BETAS = 8, 1e-4, (0.9, 0.999)

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        count = megabytes * 1_000_000 // 12 // self.LAYERS
        tensors: Tensors = {}
        self._scales = []
        for layer in range(self.LAYERS):
            scale = (2 * torch.randn(count, device="cpu") - 12).exp_()
            tensors[f"{layer}.weight"] = torch.randn(count, device="cpu") * 0.02
            tensors[f"{layer}.exp_avg"] = torch.randn(count, device="cpu") * scale * 0.23
            tensors[f"{layer}.exp_avg_sq"] = scale.square()
            self._scales.append(scale)
        super().__init__(tensors)

    def change(self) -> None:
        for layer, scale in enumerate(self._scales):
            weight, first, second = (
                self.tensors[f"{layer}.{name}"] for name in ("weight", "exp_avg", "exp_avg_sq")
            )
            gradient = torch.randn_like(scale).mul_(scale)
            first.lerp_(gradient, 1 - self.BETAS[0])
            second.mul_(self.BETAS[1]).addcmul_(gradient, gradient, value=1 - self.BETAS[1])
            weight.addcdiv_(first, second.sqrt().add_(1e-12), value=-self.RATE)
        self.step += 1


class Tuned(State):
    """Weights in bf16. At each step, 1 % of the words change by a bit."""

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        weights = torch.randn(megabytes * 500_000, device="cpu") * 0.02
        super().__init__({"weights": weights.bfloat16()})

    def change(self) -> None:
        words = self.tensors["weights"].view(torch.int16)
        words[torch.randint(len(words), (len(words) // 100,), device="cpu")] ^= 1
        self.step += 1


def snapshots(
    of: State, to: Any, peer: Callable[[], float], *, persist: bool, calls: int = CALLS
) -> Pairs:
    """Return the seconds of calls of `snapshot`, or until they are durable, and those of
    the peer.
    """
    found = []
    for _ in range(calls):
        of.change()
        synced(persist)
        beside = peer()
        synced(persist)
        found.append((timed(lambda: saved(of, to, persist=persist)), beside))
        time.sleep(0.1)  # the daemon looks at a sealed slot, and deletes what is not kept
    return found


def synced(on_storage: bool) -> None:
    """Have the disk discard what has been deleted: the next sync would wait for it."""
    if on_storage:
        os.sync()


def saved(of: State, to: Any, *, persist: bool) -> None:
    pending = to.snapshot(of.tensors, step=of.step, persist=persist)
    if persist:
        pending.wait("durable")


def lost(of: State, to: Any) -> float:
    """Return the seconds by which a snapshot delays a training: in the call, and by
    slower steps until it is durable.

    A step multiplies matrices. Quiet steps right before say how long a step takes.
    """
    factor, found = torch.full((512, 512), 1e-3, device="cpu"), []

    def step() -> None:
        for _ in range(4):
            factor @ factor

    for _ in range(3):
        of.change()
        quiet = statistics.median(timed(step) for _ in range(8))
        begun, steps = time.perf_counter(), 0
        pending = to.snapshot(of.tensors, step=of.step)
        while not pending.done:
            step()
            steps += 1
        found.append(time.perf_counter() - begun - steps * quiet)
        pending.wait("durable")
    return statistics.median(found[1:])


def held(of: State, to: Any, row: Row) -> Figure:
    """Measure snapshots to memory, and recoveries from it."""
    from_memory: Pairs = []
    to.prepare(of.tensors)
    # As long as a training trains before its first snapshot, at least.
    time.sleep(0.3 + of.nbytes / 150e6)
    found = snapshots(of, to, of.copy, persist=False, calls=CALLS + 1)
    for _ in range(CALLS):
        of.change()
        saved(of, to, persist=False)
        time.sleep(0.1)
        beside = of.copy()
        from_memory.append((timed(lambda: to.recover(of.tensors)), beside))
        time.sleep(0.1)
    row.figures["held"] = Figure(found[1:], "plain copy", of.nbytes, "slot warm")
    row.figures["recover"] = Figure(from_memory, "plain copy", of.nbytes, "slot warm")
    return Figure(found[:1], "plain copy", of.nbytes, "slot faulted in")


def memory(count: int, elements: int) -> Row:
    """Measure a state of large tensors in memory: also the first snapshot, and a reader
    on the node.
    """
    from ckptd.agent import Checkpoint

    of, row, read = State.of(count, elements), Row(), []
    module = torch.nn.ParameterDict({k: torch.zeros_like(t) for k, t in of.tensors.items()})
    with agent() as (to, place):
        row.figures["first snapshot"] = held(of, to, row)
        for _ in range(CALLS):
            of.change()
            to.snapshot({"model": of.tensors}, step=of.step, persist=False).wait("sealed")
            time.sleep(0.1)
            beside = of.copy()
            with Checkpoint.newest_in_memory("perf", socket=place / "s") as found:
                read.append((timed(partial(found.load_into, module, staged=False)), beside))
        row.figures["reader on the node"] = Figure(read[1:], "plain copy", of.nbytes, "warm")
        row.lost = lost(of, to)
    return row


def small() -> Row:
    """Measure a state of one tensor, where all that is not a copy counts."""
    of, row = State.of(1, 1000), Row()
    with agent("--codec", "raw", keep=0) as (to, place):
        held(of, to, row)
        before = (place / SYNCS).stat().st_size
        found = snapshots(of, to, of.write, persist=True, calls=2 * CALLS)
        syncs = (place / SYNCS).stat().st_size - before
        row.figures["durable"] = Figure(found[1:], "plain write")
        row.figures["syncs of a save"] = Figure([(syncs / len(found), 1.0)], "one sync")
        row.lost = lost(of, to)
    return row


def answered(work: Callable[[], object]) -> float:
    """Return the seconds from the end of a snapshot until its seal is answered."""
    from ckptd.agent.handover.slot_reports import Seals

    hears, event = Seals._answered, threading.Event()

    def heard(*arguments: Any) -> None:
        hears(*arguments)
        event.set()

    setattr(Seals, "_answered", heard)  # noqa: B010  # no public call tells of it
    work()
    taken = timed(lambda: event.wait(60))
    setattr(Seals, "_answered", hears)  # noqa: B010
    return taken


def many(count: int, elements: int) -> Row:
    """Measure a state of many small tensors, whose number counts, and not their bytes."""
    of, row = State.of(count, elements), Row()
    with agent(keep=0) as (to, place):
        held(of, to, row)
        of.tensors["new"] = torch.zeros(1, device="cpu")
        of.step += 1
        seal = answered(lambda: saved(of, to, persist=False))
        for name in ("t0", "t1"):
            of.tensors[name].add_(1)
            of.step += 1
            durable = timed(lambda: saved(of, to, persist=True))
        job, beside = place / "root" / "perf", place / "dcp"
        saving = of.dcp(to=beside)
        row.figures["seal of a new structure"] = Figure([(seal, saving)], "dcp.save")
        row.figures["durable"] = Figure([(durable, saving)], "dcp.save")
        two = place / "a.pt", place / "b.pt"
        for file in two:
            torch.save(of.tensors, file)

        def compare() -> None:
            one, other = (torch.load(file, weights_only=True) for file in two)
            assert all(torch.equal(one[name], other[name]) for name in one)

        diff = [*CLI, "diff", f"{job}/{of.step - 1}", f"{job}/{of.step}"]
        comparing = timed(compare)
        taken = timed(lambda: subprocess.run(diff, stdout=subprocess.DEVNULL, check=False))
        row.figures["ckptd diff"] = Figure([(taken, comparing)], "torch.load, torch.equal")
        to.close()
        loading = of.load(beside)
        taken = timed(lambda: recovered(of, place))
        row.figures["recover from storage"] = Figure([(taken, loading)], "dcp.load", 0, "cached")
    return row


def recovered(of: State, place: Path) -> None:
    from ckptd.agent import Agent

    to = Agent("perf", socket=place / "s")
    assert to.recover(of.tensors) is not None
    to.close()


def storage(megabytes: int) -> Row:
    """Measure the time until a snapshot is durable, with each codec, and restores."""
    of, row = Trained(megabytes), Row()
    with (
        agent("--codec", "raw") as (raw, at_raw),
        agent("--codec", "planes") as (planes, at_planes),
        agent("--codec", "auto") as (auto, _),
    ):
        for to in (raw, planes, auto):
            to.prepare(of.tensors)
        time.sleep(1)
        seconds = defaultdict[str, list[float]](list)
        ways: dict[str, Callable[[], float]] = {
            "write": of.write, "raw": lambda: timed(lambda: saved(of, raw, persist=True)),
            "dcp": of.dcp, "planes": lambda: timed(lambda: saved(of, planes, persist=True)),
            "zstd": lambda: of.dcp(zstandard=True),
            "auto": lambda: timed(lambda: saved(of, auto, persist=True)),
        }  # fmt: skip
        for number in range(CALLS - 1):
            of.change()
            for name, way in ways.items():
                time.sleep(0.1)
                synced(True)
                taken = way()
                if number:  # from the second checkpoint on, chunks may be deltas
                    seconds[name].append(taken)
        better = min(("raw", "planes"), key=lambda name: statistics.median(seconds[name]))

        def against(name: str, peer: str, text: str) -> Figure:
            return Figure(
                list(zip(seconds[name], seconds[peer], strict=True)), text, of.nbytes, "slot warm"
            )

        row.figures = {
            "durable, raw": against("raw", "write", "plain write"),
            "durable, raw / dcp.save": against("raw", "dcp", "dcp.save"),
            "durable, planes": against("planes", "zstd", "dcp.save, ZStandard"),
            "durable, auto": against("auto", better, "better of raw and planes"),
        }
        row.lost = lost(of, raw)
        of.dcp(to=at_raw / "dcp")
        pairs = []
        for _ in range(3):
            beside = of.load(at_raw / "dcp")
            pairs.append((timed(lambda: recovered_from(at_raw)), beside))
        row.figures["restore, raw"] = Figure(pairs, "dcp.load", of.nbytes, "cached")
        before = bytes_read()
        recovered_from(at_planes)
        share = bytes_read() - before, of.nbytes
        row.figures["bytes a restore reads, planes"] = Figure([share], "bytes of the state")
    return row


def recovered_from(place: Path, which: str | int = "newest") -> None:
    """Load a checkpoint from storage."""
    from ckptd.agent import Checkpoint

    with Checkpoint.open(place / "root" / "perf", which) as found:
        found.load()


def bytes_read() -> int:
    """Return the bytes that this process has read by system calls, from any file."""
    return int(Path("/proc/self/io").read_text().split()[1])


def new_bytes(place: Path, known: set[int]) -> int:
    """Return the bytes of the parts on the disk that are not in `known`, and add them."""
    files = [path.stat() for path in (place / "root").rglob("*.ckpt")]
    found = {one.st_ino: one.st_size for one in files if one.st_ino not in known}
    known.update(found)
    return sum(found.values())


def chains(megabytes: int) -> Row:
    """Measure checkpoints that are stored as deltas: how soon, and how they are read."""
    of, row, known, sizes = Tuned(megabytes), Row(), set[int](), list[int]()
    with agent("--codec", "planes", keep=0) as (to, place):
        for _ in range(DELTAS):
            saved(of, to, persist=True)
            sizes.append(new_bytes(place, known))
            of.change()
        delta = [size < of.nbytes / 3 for size in sizes]
        whole = delta.index(True) if any(delta) else len(delta)
        end = next((n for n in range(whole, len(delta)) if not delta[n]), len(delta)) - 1
        row.figures["whole before the first delta"] = Figure([(whole, 1)], "1")
        pairs = []
        for _ in range(3):
            beside = timed(lambda: recovered_from(place, 0))
            before = bytes_read()
            taken = timed(lambda: recovered_from(place, end))
            pairs.append((taken, beside))
        text = "restore of a whole checkpoint"
        row.figures["restore of the longest chain"] = Figure(pairs, text, of.nbytes, "cached")
        share = float(bytes_read() - before), float(of.nbytes)
        row.figures["bytes a restore reads"] = Figure([share], "bytes of the state")
    return row


def encoders(megabytes: int) -> Row:
    """Measure how fast one thread encodes deltas, beside copies of the same words."""
    from benchmarks.deltas import Ours, Pair

    torch.set_num_threads(1)
    row = Row()
    for state, kinds in (
        (Tuned(megabytes), ("weights",)),
        (Trained(3 * megabytes), (".weight", ".exp_avg", ".exp_avg_sq")),
    ):
        base = {name: tensor.clone() for name, tensor in state.tensors.items()}
        state.change()
        for kind in kinds:
            new = {name: t for name, t in state.tensors.items() if name.endswith(kind)}
            way, pairs = Ours(pair := Pair.of(new, base)), []
            place = np.zeros(pair.new.nbytes, np.uint8)
            for _ in range(4):
                way.ready()
                beside = timed(partial(np.copyto, place, pair.new.view(np.uint8)))
                pairs.append((timed(way.encode), beside))
            name = "bf16, 1 % changes" if kind == "weights" else f"fp32, {kind[1:]}"
            row.figures[f"encode {name}"] = Figure(pairs[1:], "memcpy", pair.new.nbytes)
    return row


def frozen(megabytes: int) -> Row:
    """Measure saves of a state that has changed as a whole, and of one that has changed by 1 %."""
    of, row, known = State.of(100, megabytes * 2500), Row(), set[int]()
    with agent("--codec", "raw", keep=2) as (to, place):
        to.prepare(of.tensors)
        time.sleep(0.5)
        found = snapshots(of, to, of.write, persist=True)
        row.figures["durable"] = Figure(found[1:], "plain write", of.nbytes, "slot warm")
        pairs, sizes = [], []
        for _ in range(CALLS):
            of.tensors["t0"].mul_(1.0001)
            of.step += 1
            synced(True)
            beside = of.write()
            new_bytes(place, known)
            pairs.append((timed(lambda: saved(of, to, persist=True)), beside))
            sizes.append((float(new_bytes(place, known)), float(of.nbytes)))
        row.figures["durable, 99 % the same"] = Figure(pairs[1:], "plain write", of.nbytes)
        row.figures["bytes written, 99 % the same"] = Figure(sizes[1:], "bytes of the state")
        row.lost = lost(of, to)
    return row


def one_tensor(megabytes: int) -> Row:
    """Measure reads of one tensor, and of sixteen rows of it, out of a checkpoint."""
    from ckptd.agent import Checkpoint

    torch.manual_seed(0)
    of = State({f"t{n}": torch.randn(megabytes * 50, 1000) for n in range(5)})
    row, wanted = Row(), {"t3": of.tensors["t3"]}
    with agent("--codec", "raw") as (to, place):
        saved(of, to, persist=True)
        of.dcp(to=place / "dcp")
        single, slices = State(wanted), (slice(1000, 1016),)

        def read(**options: Any) -> float:
            def call() -> None:
                with Checkpoint.open(place / "root" / "perf") as found:
                    found.tensor("t3", **options)

            return timed(call)

        pairs: dict[str, Pairs] = {"one tensor": [], "16 rows": []}
        for _ in range(CALLS + 1):
            beside = single.load(place / "dcp")
            pairs["one tensor"].append((read(), beside))
            pairs["16 rows"].append((read(slices=slices), beside))
        for name, found in pairs.items():
            row.figures[name] = Figure(found[1:], "dcp.load", single.nbytes, "cached")
    return row


def from_peer(megabytes: int) -> Row:
    """Measure recoveries of a replaced node from the memory of its peer, beside the same
    kind of connection alone.
    """
    from benchmarks.peers import recoveries

    pairs, share = recoveries(megabytes, CALLS)
    pages = f"slot warm, {share:.0%} in huge pages"
    return Row({"recover": Figure(pairs, "transport", megabytes << 20, pages)})


def floats(count: int) -> Row:
    """Measure the snapshot of a long list of numbers, beside its encoding by msgspec."""
    import msgspec

    values = [number / 7 for number in range(count)]
    pairs = []
    with agent() as (to, _):
        for step in range(CALLS + 1):
            values[0] = float(step)
            beside = timed(lambda: msgspec.msgpack.encode(values))
            snapshot = partial(to.snapshot, {"list": values}, step=step, persist=False)
            pairs.append((timed(snapshot), beside))
            time.sleep(0.2)
    return Row({"held": Figure(pairs[1:], "msgspec", 9 * count)})


def steps() -> Row:
    """Measure four steps of a training with a snapshot in the first, beside four without."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="cpu") for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(128, 1024, device="cpu")

    def train() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

    train()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    found = []
    with agent() as (to, _):
        to.prepare(state)
        for step in range(CALLS + 1):
            quiet = timed(train)
            begun = time.perf_counter()
            pending = to.snapshot(state, step=step)
            train()
            found.append((time.perf_counter() - begun, quiet))
            pending.wait("durable")
    pairs = found[1:]
    lost = statistics.median(mine - quiet for mine, quiet in pairs)
    return Row({"4 steps with a snapshot": Figure(pairs, "4 steps without")}, lost)


def start() -> Row:
    """Measure `import ckptd`, beside a Python that imports nothing."""

    def python(code: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    pairs = [(python("import ckptd"), python("")) for _ in range(2 * CALLS)]
    return Row({"import": Figure(pairs, "python -c ''", pages="cached")})


def idle() -> Row:
    """Measure an idle daemon, beside a Python that imports nothing: its memory in GB, and
    the seconds until it is ready.
    """

    def own(pid: int) -> float:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e6

    ready = []
    for _ in range(CALLS):
        beside = timed(lambda: subprocess.run([sys.executable, "-c", ""], check=True))
        with tempfile.TemporaryDirectory(prefix="ckptd-perf-") as place:
            places = ["--root", f"{place}/root", "--socket", f"{place}/s", "--state-dir", place]
            begun = time.perf_counter()
            daemon = subprocess.Popen([*CLI, "run", *places], stderr=subprocess.DEVNULL)
            while not Path(place, "s").exists():
                time.sleep(0.001)
            ready.append((time.perf_counter() - begun, beside))
            time.sleep(0.2)
            memory = own(daemon.pid)
            daemon.terminate()
            daemon.wait()
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as python:
        time.sleep(0.5)
        beside = own(python.pid)
        python.kill()
    return Row({
        "idle memory": Figure([(memory, beside)], "python"),
        "ready": Figure(ready, "python -c ''"),
    })  # fmt: skip


ROWS: dict[str, Callable[[], Row]] = {
    "15 tensors of 40 MB": lambda: memory(15, 10_000_000),
    "1 tensor of 4 kB": small,
    "5,000 tensors of 256 B": lambda: many(5_000, 64),
    "300 MB, all words change": lambda: storage(300),
    "64 MB of bf16, 1 % changes": lambda: chains(64),
    "deltas, one thread": lambda: encoders(32),
    "100 tensors of 2 MB": lambda: frozen(200),
    "a checkpoint of 200 MB": lambda: one_tensor(200),
    "a list of 1,000,000 floats": lambda: floats(1_000_000),
    "512 MB from a peer": lambda: from_peer(512),
    "a training of 150 MB": steps,
    "a process": start,
    "a daemon": idle,
}
"""The states, by name, with the function that measures their figures."""
SELDOM: dict[str, Callable[[], Row]] = {
    "100,000 tensors of 64 B": lambda: many(100_000, 16),
    "1.2 GB, all words change": lambda: storage(1200),
}
"""States that only the long form measures, and not in each round."""


def main() -> None:
    warnings.simplefilter("ignore")
    row = (ROWS | SELDOM)[sys.argv[1]]()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    said = asdict(row) | {
        "threads": torch.get_num_threads(),
        "cpu": sum(one.ru_utime + one.ru_stime for one in used),
        "peak": sum(one.ru_maxrss for one in used) * 1024,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
