"""Checks that each guard is tested: removes one guard at a time, and expects a test to
fail.

`python -m tests.crash.guards [--only TEXT] [--jobs N]`. The guards are found in the
source: every sync of a file or directory, every rename or publication that must not
replace, every condition that raises IntegrityError, and a few that are listed below.
The rig copies the tree without the guard, and runs the checks of its module there, one
after the other, until one fails. A guard is untested if all its checks pass.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
SYNCS = frozenset({"sync", "sync_data", "sync_directory"})
TREES = ("agent", "daemon", "shared", "tests", "docs")
SECONDS = 300

STATES = "tests.crash.states --states 2500 --seed 1 --most 1"
DAMAGE = "tests.crash.damage --seed 1"
STORAGE = "pytest tests/shared/storage/test_conformance.py tests/shared/storage/test_repository.py"
CHECKS: dict[str, tuple[str, ...]] = {
    "daemon/journal/journal.py": ("pytest tests/daemon/journal/test_journal.py", STATES),
    "daemon/journal/directory.py": ("pytest tests/daemon/journal/test_journal.py", STATES),
    "daemon/journal/file.py": ("pytest tests/daemon/journal/test_file.py", DAMAGE),
    "daemon/chunks/pipeline.py": ("pytest tests/daemon/chunks/test_pipeline.py", STATES),
    "daemon/saving/committer.py": ("pytest tests/daemon/saving/test_committer.py", STATES),
    "daemon/saving/joint.py": ("pytest tests/daemon/saving/test_joint.py",),
    "daemon/saving/part_saver.py": (
        "pytest tests/daemon/saving/test_part_saver.py tests/daemon/saving/test_saver.py",
        STATES,
    ),
    "daemon/saving/saver.py": ("pytest tests/daemon/saving/test_saver.py", STATES),
    "daemon/chunks/seal_check.py": (
        "pytest tests/daemon/chunks/test_seal_check.py tests/daemon/saving/test_saver.py",
    ),
    "shared/system/fs.py": (
        "pytest tests/shared/system/test_fs.py tests/crash/test_disk.py",
        STATES,
    ),
    "shared/formats/manifest.py": ("pytest tests/shared/formats/test_manifest.py", DAMAGE),
    "shared/formats/binary.py": (
        "pytest tests/shared/formats/test_binary.py tests/shared/formats/test_part.py "
        "tests/shared/formats/test_segment.py",
    ),
    "shared/formats/part.py": (
        "pytest tests/shared/formats/test_part.py tests/shared/formats/test_part_writer.py "
        "tests/shared/formats/test_linked_files.py",
        DAMAGE,
    ),
    "shared/formats/part_writer.py": ("pytest tests/shared/formats/test_part_writer.py", STATES),
    "shared/formats/receipt.py": ("pytest tests/shared/formats/test_receipt.py",),
    "shared/formats/sealed_json.py": ("pytest tests/shared/formats/test_sealed_json.py",),
    "shared/formats/segment.py": ("pytest tests/shared/formats/test_segment.py",),
    "shared/storage/posix.py": (
        f"{STORAGE} tests/shared/storage/test_posix.py tests/crash/test_disk.py",
        STATES,
    ),
    "shared/storage/posix_streams.py": ("pytest tests/shared/formats/test_part_writer.py", STATES),
    "shared/storage/repository.py": (f"{STORAGE} tests/daemon/saving/test_joint.py", STATES),
}
NAMED = {
    "daemon/journal/file.py": (
        "        or crc32c(data[position + 4 : end], crc32c(salt)) != crc\n",
        "        if before != crc or (sequence is not None and record.sequence != sequence + "
        "1):\n            break\n",
        "        or any(data[end : position + _aligned(RECORD_SIZE + length)])\n",
    ),
    "shared/storage/posix.py": (" or path not in self._durable",),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module without one of its guards.

    `text` is the changed source, `line` is where the guard was, and `what` describes
    it.
    """

    module: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.what}"


def mutants() -> Iterator[Mutant]:
    for module in CHECKS:
        source = (ROOT / module).read_text()
        yield from _of(module, source)
        for named in NAMED.get(module, ()):
            assert source.count(named) == 1, f"{module} has {source.count(named)} times {named!r}"
            yield Mutant(
                module,
                source[: source.index(named)].count("\n") + 1,
                " ".join(named.split()),
                source.replace(named, ""),
            )


def _of(module: str, source: str) -> Iterator[Mutant]:
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if (
                isinstance(function, ast.Attribute)
                and function.attr in SYNCS
                and "fs" in ast.unparse(function.value)
            ):
                yield Mutant(module, node.lineno, ast.unparse(node), _replaced(lines, node, "pass"))
        if (
            isinstance(node, ast.keyword)
            and node.arg == "replace"
            and isinstance(node.value, ast.Constant)
            and node.value.value is False
        ):
            yield Mutant(
                module, node.value.lineno, "replace=False", _replaced(lines, node.value, "True")
            )
        if (
            isinstance(node, ast.If)
            and isinstance(node.body[0], ast.Raise)
            and "IntegrityError" in ast.unparse(node.body[0])
        ):
            yield Mutant(
                module,
                node.lineno,
                f"if {ast.unparse(node.test)}",
                _replaced(lines, node.test, "False"),
            )


def _replaced(lines: list[str], node: ast.stmt | ast.expr, by: str) -> str:
    assert node.end_lineno is not None
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    first, last = (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + (node.end_col_offset or 0),
    )
    whole = "".join(lines)
    return whole[:first] + by + whole[last:]


def red(mutant: Mutant) -> str:
    """Return the check that failed without the guard, or "" if all passed."""
    return _red(CHECKS[mutant.module], mutant)


def _red(checks: tuple[str, ...], mutant: Mutant | None) -> str:
    with tempfile.TemporaryDirectory(prefix="ckptd-guards-") as name:
        place = Path(name)
        for tree in TREES:
            shutil.copytree(ROOT / tree, place / tree, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)
        (place / "ckptd").mkdir()
        for tree in TREES[:3]:
            (place / "ckptd" / tree).symlink_to(place / tree)
        if mutant is not None:
            (place / mutant.module).write_text(mutant.text)
        for check in checks:
            tool, *arguments = check.split()
            command = [
                sys.executable,
                "-m",
                tool,
                *arguments,
                *(["-x", "-q", "-p", "no:cacheprovider"] if tool == "pytest" else []),
            ]
            environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
            try:
                subprocess.run(
                    command,
                    cwd=place,
                    env=environment,
                    check=True,
                    capture_output=True,
                    timeout=SECONDS,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                return check
    return ""


def run(
    only: str = "",
    jobs: int = 2,
    part: tuple[int, int] = (0, 1),
    seconds: float = float("inf"),
    seed: int = 0,
) -> tuple[int, list[str]]:
    """Return the number of guards that were removed, and those that no check missed.

    Raises AssertionError if a check that failed without a guard also fails with every
    guard in place.

    only: text that the description of the guard contains. part: number of this share,
    and the number of equal shares. seconds: time limit; with one, the seed decides
    which guards come first.
    """
    chosen = [mutant for mutant in mutants() if only in str(mutant)][part[0] :: part[1]]
    if seconds < float("inf"):
        Random(seed).shuffle(chosen)
    end, sound, found = time.monotonic() + seconds, set[str](), dict[Mutant, str]()
    with ThreadPoolExecutor(jobs) as pool:
        while len(found) < len(chosen) and (not found or time.monotonic() < end):
            some = chosen[len(found) :] if seconds == float("inf") else chosen[len(found) :][:jobs]
            found |= dict(zip(some, pool.map(red, some), strict=True))
            checks = sorted({check for check in found.values() if check} - sound)
            wrong = [
                check for check in pool.map(lambda check: _red((check,), None), checks) if check
            ]
            assert not wrong, (
                f"red with every guard in its place, or longer than {SECONDS} s: {wrong}"
            )
            sound |= set(checks)
    return len(found), [f"nobody missed {mutant}" for mutant, check in found.items() if not check]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="guards whose description holds this")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    count, missed = run(options.only, options.jobs)
    print(*missed, f"{count} guards taken out, {len(missed)} missed by nobody", sep="\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
