"""Measures the CPU time of each test, with everything that the test starts, and prints
it by room and by what the tests start: `make cost`.

The worker that runs a test moves into a control group of its own, which its daemons,
ranks and interpreters inherit. `wait4` would miss those that are forked from a server
or outlive the test. Needs a writable cgroup hierarchy (version 1 with `cpuacct`, or
version 2), which usually means root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import astuple, dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

_DIRECTORY = "COST_DIRECTORY"  # tests/conftest.py removes each CKPTD_*
_KINDS = ("in process", "daemon", "interpreter", "ranks")
"""The kinds of tests by the processes that they start, the most expensive last."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one test. seconds: CPU time of all its processes. wall: elapsed time.

    tier: the first of `make test`, `make test-all` and `make crashes` that runs the test.
    """

    test: str
    tier: str
    kind: str
    seconds: float
    wall: float

    @property
    def room(self) -> str:
        """The directory of the test below `tests`, at most two levels."""
        parts = Path(self.test.partition("::")[0]).parts[1:]
        return "/".join(parts[:2] if len(parts) > 2 else parts[:1])


class Group:
    """A control group that this process has moved into."""

    def __init__(self) -> None:
        v1 = Path("/sys/fs/cgroup/cpuacct")
        own = dict(
            line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
        )
        if v1.is_dir():
            self._usage, top, unit = "cpuacct.usage", v1 / own["cpuacct"].strip("/"), 1e9
        else:
            self._usage, top, unit = "cpu.stat", Path("/sys/fs/cgroup") / own[""].strip("/"), 1e6
        self._path, self._unit = top / f"ckptd-cost-{os.getpid()}", unit
        self._path.mkdir()
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        """Return the CPU seconds that the processes of this group have used so far."""
        words = (self._path / self._usage).read_text().split()
        return int(words[0] if len(words) == 1 else words[words.index("usage_usec") + 1]) / (
            self._unit
        )


class Meter:
    """A pytest plugin that appends the cost of each test to a file."""

    def __init__(self, directory: Path) -> None:
        self._group, self._started = Group(), set[str]()
        self._file = (directory / f"{os.getpid()}.jsonl").open("a")
        sys.addaudithook(self._audit)
        BaseProcess.start = self._noted(BaseProcess.start)  # type: ignore[method-assign,assignment]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self._started.add("interpreter")

    def _noted(self, start: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(start)
        def noted(process: Any) -> None:
            target = getattr(process._target, "__module__", "")
            self._started.add("ranks" if target == "tests.support.ranks" else "daemon")
            start(process)

        return noted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._started.clear()
        used, begun = self._group.seconds(), time.monotonic()
        result = yield
        kind = max(self._started, key=_KINDS.index, default=_KINDS[0])
        spent = self._group.seconds() - used, time.monotonic() - begun
        print(json.dumps([item.nodeid, _tier(item), kind, *spent]), file=self._file, flush=True)
        return result


def _tier(item: pytest.Item) -> str:
    if item.get_closest_marker("promise") or not item.get_closest_marker("processes"):
        return "test"
    return "crashes" if item.get_closest_marker("crash") else "test-all"


def pytest_configure(config: pytest.Config) -> None:
    """Meter this process, unless it only distributes the tests to workers."""
    directory = os.environ.get(_DIRECTORY)
    if directory and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Meter(Path(directory)))


def costs(directory: Path) -> list[Cost]:
    """Return what the workers have measured."""
    lines = (line for file in directory.glob("*.jsonl") for line in file.read_text().splitlines())
    return [Cost(*json.loads(line)) for line in lines]


def table(measured: Iterable[Cost]) -> str:
    """Return CPU seconds and numbers of tests, by tier and room and by what they start."""
    cells: dict[str, dict[str, tuple[int, float]]] = {}
    for cost in measured:
        for room in (cost.room, f"make {cost.tier}", "all"):
            number, seconds = cells.setdefault(room, {}).get(cost.kind, (0, 0.0))
            cells[room][cost.kind] = (number + 1, seconds + cost.seconds)
    lines = [f"{'CPU seconds (tests)':<28}" + "".join(f"{kind:>18}" for kind in (*_KINDS, "all"))]
    for room, row in sorted(
        cells.items(), key=lambda entry: -sum(seconds for _, seconds in entry[1].values())
    ):
        row["all"] = (sum(n for n, _ in row.values()), sum(s for _, s in row.values()))
        shown = (
            f"{row[kind][1]:.1f} ({row[kind][0]})" if kind in row else "-"
            for kind in (*_KINDS, "all")
        )
        lines.append(f"{room:<28}" + "".join(f"{cell:>18}" for cell in shown))
    return "\n".join(lines)


def main() -> int:
    """Run pytest with the given arguments, and print the table and the costliest tests."""
    with tempfile.TemporaryDirectory() as directory:
        begun, group = time.monotonic(), Group()
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.support.cost", *sys.argv[1:]],
            env={**os.environ, _DIRECTORY: directory},
        ).returncode
        measured = costs(Path(directory))
        wall, own = time.monotonic() - begun, group.seconds()
        if keep := os.environ.get("CKPTD_COSTS"):
            Path(keep).write_text(json.dumps([astuple(cost) for cost in measured]))
    print(table(measured))
    print(
        f"\n{len(measured)} tests: {sum(cost.seconds for cost in measured) / 60:.1f} CPU minutes, "
        f"{own / 60:.1f} with their collection; {wall / 60:.1f} minutes of the clock"
    )
    for cost in sorted(measured, key=lambda cost: -cost.seconds)[:30]:
        print(f"{cost.seconds:7.1f} s  {cost.kind:<12} {cost.test}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
