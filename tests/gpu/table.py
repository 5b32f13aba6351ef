"""The table of the acceptance script: a line for each thing that a check has found, and
the register of the checks.

A check is a function that yields lines. It runs in a process of its own, so that a
device that hangs, or an error that spoils the process, ends that check only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from tests.support.daemons import Home, home, running
from tests.support.forks import context

if TYPE_CHECKING:
    from tests.gpu.rig import Rig

NO_DEVICE = "needs a GPU"
ONE_DEVICE = "needs two GPUs"
SECONDS = 90.0
"""The time in which a check must print its next line. It bounds a check that hangs."""


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
    assert condition in (NO_DEVICE, ONE_DEVICE)
    return Line(what, "SKIP", condition)


Check = Callable[["Rig"], Iterator[Line]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under the name of its function."""
    CHECKS[function.__name__] = function
    return function


def run(name: str, settings: dict[str, Any], seconds: float = SECONDS) -> Iterator[Line]:
    """Run a check in a process of its own, beside a daemon, and yield its lines."""
    with home() as place, running(place, "--codec", "raw"):
        mine, its = context().Pipe(duplex=False)
        process = context().Process(target=_work, args=(its, name, CHECKS[name], settings, place))
        process.start()
        its.close()
        try:
            while mine.poll(seconds):
                line = mine.recv()
                if line is None:
                    return
                yield line
            yield Line(name, "FAIL", f"no answer for {seconds:.0f} s")
        except EOFError:
            process.join(10)
            yield Line(name, "FAIL", f"its process ended with {process.exitcode}")
        finally:
            process.kill()
            process.join()


def _work(tell: Connection, name: str, check: Check, settings: dict[str, Any], place: Home) -> None:
    # Imported here, because its modules register their checks in this one.
    from tests.gpu.rig import Rig

    try:
        for line in check(Rig(place, **settings)):
            tell.send(line)
    except BaseException as error:
        traceback.print_exc()
        tell.send(Line(name, "FAIL", f"{type(error).__name__}: {error}"[:200]))
    tell.send(None)


def as_json(part: str, line: Line) -> dict[str, str]:
    return {"part": part, **asdict(line)}
