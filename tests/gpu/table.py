"""The table of the acceptance script: a line for each thing that a check has found, and
the register of the checks.

A check is a function that yields lines. It runs in a process of its own, so that a
device that hangs, or an error that spoils the process, ends that check only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from ckptd.shared.system.numa import nodes
from tests.support.daemons import Home, home, running
from tests.support.forks import context

if TYPE_CHECKING:
    from tests.gpu.rig import Rig

NO_DEVICE = "needs a GPU"
ONE_DEVICE = "needs two GPUs"
ONE_NODE = "needs two GPUs and two NUMA nodes"
CONDITIONS: dict[str, Callable[[], bool]] = {
    NO_DEVICE: lambda: not torch.accelerator.is_available(),
    ONE_DEVICE: lambda: torch.accelerator.device_count() < 2,
    ONE_NODE: lambda: torch.accelerator.device_count() < 2 or len(nodes()) < 2,
}
"""The reasons for which a line may say SKIP, and when they are true."""
SECONDS = 90.0
"""The time in which a check must print its next line. It bounds a check that hangs."""
Plant = Callable[["Rig"], object]
"""Plants a fault in the process of a check (`faults.py`)."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: the result of a check for one thing.

    figure: what was measured. bar: what it must be. expected: an absolute figure of an
    H100 with PCIe Gen5 x16, which is not asserted.
    """

    what: str
    verdict: str
    figure: str = ""
    bar: str = ""
    expected: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:4}  {self.what:34}  {self.figure:60}  {self.bar:34}  {self.expected}"


def passes(what: str, right: bool, figure: str = "", bar: str = "", expected: str = "") -> Line:
    """Return a line that says PASS or FAIL."""
    return Line(what, "PASS" if right else "FAIL", figure, bar, expected)


def skipped(what: str, condition: str) -> Line:
    """Return a line that says SKIP, because of one of the conditions of this module."""
    assert condition in CONDITIONS
    return Line(what, "SKIP", condition)


Check = Callable[["Rig"], Iterator[Line]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under the name of its function."""
    CHECKS[function.__name__] = function
    return function


def run(
    name: str, settings: dict[str, Any], seconds: float = SECONDS, plants: Sequence[Plant] = ()
) -> Generator[Line]:
    """Run a check in a process of its own, beside a daemon, and yield its lines.

    plants: plant faults in that process. Raises FaultNotPlanted if that fails.
    """
    # A forked daemon costs a fifth of the CPU time, and needs no device.
    with home() as place, running(place, "--codec", "raw", forked=settings["simulated"]):
        mine, its = context().Pipe(duplex=False)
        everything = (its, name, CHECKS[name], settings, place, plants)
        process = context().Process(target=_work, args=everything)
        process.start()
        its.close()
        try:
            while mine.poll(seconds):
                line = mine.recv()
                if line is None:
                    return
                if isinstance(line, FaultNotPlanted):
                    raise line
                yield _named(line)
            yield Line(name, "FAIL", f"no answer for {seconds:.0f} s")
        except EOFError:
            process.join(10)
            yield Line(name, "FAIL", f"its process ended with {process.exitcode}")
        finally:
            process.kill()
            process.join()


class FaultNotPlanted(Exception):
    """Raised if the code that a fault changes is no longer there."""


def _named(line: Line) -> Line:
    """Return the line, or one that says FAIL if it was skipped for a condition that does
    not hold here.
    """
    if line.verdict != "SKIP" or CONDITIONS[line.figure]():
        return line
    return Line(line.what, "FAIL", f"was skipped: {line.figure}, which is not so here")


def _work(
    tell: Connection,
    name: str,
    check: Check,
    settings: dict[str, Any],
    place: Home,
    plants: Sequence[Plant],
) -> None:
    # Imported here, because its modules register their checks in this one.
    from tests.gpu.rig import Rig

    try:
        rig = Rig(place, **settings)
        for plant in plants:
            try:
                plant(rig)
            except Exception as error:
                tell.send(FaultNotPlanted(f"{name}: {error!r}"))
                return
        for line in check(rig):
            tell.send(line)
    except BaseException as error:
        traceback.print_exc()
        tell.send(Line(name, "FAIL", f"{type(error).__name__}: {error}"[:200]))
    tell.send(None)


def as_json(part: str, line: Line) -> dict[str, str]:
    return {"part": part, **asdict(line)}
