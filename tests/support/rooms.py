"""Prints how each package is built: its rooms, floors, imports and statements.

`python -m tests.support.rooms [CHECKOUT]`. A room is an entry at the top level of a package: a
module, or a package of modules. An import counts once for each pair of rooms. The floor of a
room is one more than the highest floor that it imports. Statements are logical lines: the
statements of the syntax tree without docstrings.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "daemon", "shared")
ORDER = {
    "shared": (
        "errors", "units", "interval", "location", "names", "retention", "codecs", "system",
        "formats", "wire", "array_checkpoint", "array_diff",
        "array_statistics", "storage", "native_code", "command",
    ),
    "daemon": (
        "log_events", "tasks", "http_address", "config", "job", "journal", "memory", "root",
        "chunks", "runs", "saving", "engine", "recovery", "stage", "composition", "telemetry",
        "process", "page", "top", "commands", "__main__",
    ),
    "agent": (
        "torch_support", "threads", "pending", "step_times", "advice", "state",
        "link", "plan", "copy", "read", "peers", "handover", "dcp", "recover", "agent", "default",
        "schedule", "batches", "training_run", "follow", "bench", "convert", "smp",
        "integrations", "face",
    ),
}  # fmt: skip
"""The rooms of each package, lowest first: a room imports only rooms that stand before it.

`agent/__init__.py` is above all rooms of `agent/`, because it exports from them.
"""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def _import_statements(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(path: Path, nodes: Iterable[ast.AST] | None = None) -> Iterator[str]:
    """Yield the full names that a file imports: modules, and the names taken out of them.

    nodes: the nodes to look at; all nodes of the file if None. Raises AssertionError for a
    relative import.
    """
    for node in _import_statements(path) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FACE = "agent/face/__init__.py"
"""The file of the package `ckptd` itself."""
INTEGRATIONS = "agent/integrations"
"""The folder of the package `ckptd.integrations`."""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the modules of all packages below a checkout, by full name."""
    files = (path for package in PACKAGES for path in sorted((root / package).glob("**/*.py")))
    return {_name(path.relative_to(root)): path for path in files}


def _name(path: Path) -> str:
    if path == Path(FACE):
        return "ckptd"
    parts = path.with_suffix("").parts[path.is_relative_to(INTEGRATIONS) :]
    return ".".join(("ckptd", *parts)).removesuffix(".__init__")


def room_of(name: str) -> str:
    """Return the room of a module: "job" for "ckptd.daemon.job.catalog"."""
    if name == "ckptd" or name.startswith("ckptd.integrations"):
        return name.split(".")[1] if "." in name else "face"
    return [*name.split("."), "__init__"][2]


@dataclass(slots=True)
class Package:
    """The rooms of one package.

    imports: the rooms that each room imports. modules: the number of modules, without the
    `__init__.py` files. statements: their logical lines.
    """

    imports: dict[str, set[str]] = field(default_factory=dict)
    modules: int = 0
    statements: int = 0

    def floors(self) -> dict[str, int]:
        """Return the floor of each room, from 1 up. Raises ValueError for a cycle."""
        found: dict[str, int] = {}

        def floor(room: str, above: tuple[str, ...]) -> int:
            if room in above:
                raise ValueError(" > ".join([*above[above.index(room) :], room]))
            if room not in found:
                below = (floor(other, (*above, room)) for other in sorted(self.imports[room]))
                found[room] = 1 + max(below, default=0)
            return found[room]

        for room in self.imports:
            floor(room, ())
        return found


def rooms_of(name: str, root: Path = ROOT) -> Package:
    """Return the rooms of the package `name` in a checkout."""
    found, known = Package(), modules(root)
    for module, path in known.items():
        if path.relative_to(root).parts[0] != name or path == root / name / "__init__.py":
            continue
        room = room_of(module)
        below = found.imports.setdefault(room, set())
        for imported in imports(path):
            target = imported if imported in known else imported.rpartition(".")[0]
            if target in known and target.startswith(f"ckptd.{name}.") and room_of(target) != room:
                below.add(room_of(target))
        found.modules += path.name != "__init__.py"
        found.statements += statements(path)
    return found


def statements(path: Path) -> int:
    """Return the number of statements in a file, without docstrings and other bare strings."""
    return sum(
        isinstance(node, ast.stmt)
        and not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        for node in ast.walk(tree(path))
    )


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    head = ("package", "rooms", "floors", "imports", "modules", "statements")
    print(f"{head[0]:<10}" + "".join(f"{title:>12}" for title in head[1:]))
    total, cycles = [0, 0], list[str]()
    for name in PACKAGES:
        found = rooms_of(name, root)
        rooms, arrows = len(found.imports), sum(map(len, found.imports.values()))
        try:
            floors = str(max(found.floors().values()))
        except ValueError as error:
            floors = "in a cycle"
            cycles.append(f"{name}: {error}")
        print(
            f"{name:<10}{rooms:>12}{floors:>12}{arrows:>12}{found.modules:>12,}"
            f"{found.statements:>12,}"
        )
        total[0] += found.modules
        total[1] += found.statements
    print(f"{'all':<10}{'':>36}{total[0]:>12,}{total[1]:>12,}")
    for cycle in cycles:
        print(f"cycle in {cycle}")


if __name__ == "__main__":
    main()
