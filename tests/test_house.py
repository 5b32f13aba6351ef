"""Tests the layers and the rules of this repository, by reading the source."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ckptd.shared.system import failpoints
from ckptd.shared.system.collector import paused_collector
from tests.support import code_map
from tests.support.assertions import Weak, look
from tests.support.cases import each_case
from tests.support.rooms import FACE, ORDER, PACKAGES, ROOT, imports, modules, rooms_of, tree

FILES = sorted(modules().values())
MODULES = modules()


@pytest.fixture(scope="module", autouse=True)
def _collector_is_paused() -> Iterator[None]:
    """Pause the collector, which would go over the trees of 900 files again and again.

    Drop them at the end: they are a million objects, and later tests run in this process.
    """
    with paused_collector():
        yield
    for kept in (tree, _calls, has_test):
        kept.cache_clear()


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def in_package(package: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(ROOT).parts[0] == package]


def test_the_packages_have_modules() -> None:
    assert {package: bool(in_package(package)) for package in PACKAGES} == dict.fromkeys(
        PACKAGES, True
    )
    assert "ckptd.shared.names" in MODULES
    assert "ckptd.agent" in MODULES
    assert "ckptd.shared.errors.IntegrityError" in set(
        imports(ROOT / "shared" / "formats" / "part.py")
    )


def test_a_wheel_holds_every_package() -> None:
    """An editable install finds a package that this list lacks; a wheel does not
    contain it.
    """
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    folders = {path.parent for path in FILES} - {(ROOT / FACE).parent}
    names = {f"ckptd.{folder.relative_to(ROOT).as_posix().replace('/', '.')}" for folder in folders}
    names = {name.replace("ckptd.agent.integrations", "ckptd.integrations") for name in names}
    assert packages == sorted({"ckptd", *names})


# -- layers

ARRAYS = ("array_checkpoint", "array_diff", "array_statistics", "plain_values")
"""The modules of the reader without torch. Nothing else imports them, except a command
while it runs.
"""


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("daemon", ("torch", "numpy", "ckptd.agent")),
        ("shared", ("torch", "numpy", "asyncio", "uvloop", "ckptd.agent", "ckptd.daemon")),
        ("agent", ("asyncio", "uvloop", "ckptd.daemon")),
    ],
)
def test_layers(package: str, forbidden: tuple[str, ...]) -> None:
    broken = [
        (path.name, name)
        for path in in_package(package)
        for name in imports(path)
        for other in forbidden
        if under(name, other)
    ]
    compiled = {(name, "numpy") for name in ("planes_numpy.py", "delta_numpy.py", "non_finite.py")}
    arrays = {*compiled, *((f"{name}.py", "numpy") for name in ARRAYS)}
    assert set(broken) == (arrays if package == "shared" else set()), (
        "NumPy stands in for compiled loops, and holds the arrays of a reader"
    )


def loaded_after(statement: str) -> set[str]:
    """Return the entries of `sys.modules` that a fresh interpreter has after a
    statement.
    """
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("daemon", ("torch", "numpy", "ckptd.agent")),
        ("shared", ("torch", "numpy", "asyncio", "uvloop", "ckptd.agent", "ckptd.daemon")),
    ],
)
def test_layers_when_every_module_is_imported(package: str, forbidden: tuple[str, ...]) -> None:
    left_out = {"__main__", *ARRAYS}
    modules = [
        name
        for name in MODULES
        if under(name, f"ckptd.{package}") and name.rpartition(".")[2] not in left_out
    ]
    found = loaded_after(f"import {', '.join(modules)}")
    assert set(modules) <= found
    assert {name for name in found if any(under(name, other) for other in forbidden)} == set()


# -- cycles


def edges(package: str) -> dict[str, set[str]]:
    """Return the imports between the modules of a package.

    Imports inside functions count, except those of the command line.
    """
    found: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if under(name, f"ckptd.{package}"):
            nodes = (
                _outside_functions(tree(path))
                if path.name in ("cli.py", "run_command.py")
                else None
            )
            wanted = {
                what if what in MODULES else what.rpartition(".")[0]
                for what in imports(path, nodes)
            }
            found[name] = {
                other for other in wanted if other in MODULES and under(other, f"ckptd.{package}")
            } - {name}
    return found


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _outside_functions(child)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a cycle of imports, or an empty list if there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for other in sorted(graph[node]):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_the_search_finds_a_cycle() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert edges("shared")["ckptd.shared.formats.part"] >= {
        "ckptd.shared.codecs.codec",
        "ckptd.shared.errors",
        "ckptd.shared.formats.plan",
    }
    assert edges("daemon")["ckptd.daemon.commands.cli"] == {
        "ckptd.daemon.memory.unsaved",
        *(
            f"ckptd.daemon.commands.{name}"
            for name in (
                "copying",
                "diff_command",
                "drain_command",
                "history_command",
                "interval_command",
                "logs_command",
                "neighbours",
                "page_command",
                "report",
                "run_command",
                "status_command",
                "top_command",
            )
        ),
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycle(package: str) -> None:
    assert cycle(edges(package)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_room_imports_lower_rooms_only(package: str) -> None:
    """A reader knows where the calls of a room go, and no two rooms import each other."""
    order, found = ORDER[package], rooms_of(package).imports
    assert set(found) == set(order)
    wrong = [
        f"{room} imports {other}"
        for room in order
        for other in found[room]
        if order.index(other) > order.index(room)
    ]
    assert wrong == []


def test_the_rooms_of_a_package_are_few() -> None:
    assert {package: len(order) <= 25 for package, order in ORDER.items()} == dict.fromkeys(
        PACKAGES, True
    )


def test_nothing_imports_the_command_line() -> None:
    """Its imports inside functions are not checked above.

    They cannot close a cycle if no module imports the command line.
    """
    importers = [
        path.name
        for path in FILES
        if any(under(name, "ckptd.daemon.commands.cli") for name in imports(path))
    ]
    assert importers == ["__main__.py"]


def test_an_assignment_sets_at_most_two_attributes() -> None:
    """A reader finds the place where an attribute is set, and what it is set to."""
    packed = [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple)
        and sum(isinstance(each, ast.Attribute) for each in target.elts) > 2
    ]
    assert packed == []


# -- the storage seam

FILE_CALLS = {
    "os.open", "os.listdir", "os.scandir", "os.stat", "os.lstat", "os.mkdir", "os.makedirs",
    "os.unlink", "os.rename", "os.link", "os.rmdir", "os.statvfs", "fcntl.flock", "fcntl.fcntl",
    "shutil.rmtree", "opened_directory", "make_directories", "publish",
}  # fmt: skip
FILE_METHODS = {
    "open_directory",
    "directory",
    "iterdir",
    "glob",
    "rglob",
    "mkdir",
    "unlink",
    "rmdir",
    "touch",
    "read_bytes",
    "write_bytes",
}
TOUCH_FILES = {
    "agent/bench/measure.py": "a directory of its own",
    "agent/bench/ways.py": "files that are compared with those of ckptd",
    "agent/convert/command.py": "the names for --map",
    "agent/convert/huggingface.py": "the files of a model, outside every root",
    "agent/convert/output.py": "the file or directory of an export, outside every root",
    "agent/convert/stored.py": "files that are imported, outside every root",
    "agent/copy/mapped_slot.py": "locks the segment that it maps",
    "agent/integrations/accelerate_states.py": "directories of the user, outside every root",
    "agent/link/launch.py": "the log of a private daemon",
    "agent/smp/full.py": "the files of full checkpoints, beside the jobs",
    "agent/smp/runs.py": "the directory of full checkpoints, beside the jobs or outside every root",
    "daemon/process/app.py": "removes its socket",
    "daemon/memory/foreign_memory.py": "reads segments in shared memory",
    "daemon/journal/directory.py": "the journal, on the local disk",
    "daemon/journal/place.py": "the directory of the journal, on the local disk",
    "daemon/commands/doctor.py": "the configuration of systemd-logind",
    "daemon/commands/leftovers.py": "segments and sockets that dead daemons have left",
    "daemon/commands/page_command.py": "removes its socket",
    "daemon/process/limits.py": "/proc",
    "daemon/telemetry/history.py": "the history, on the local disk",
    "daemon/process/listener.py": "the socket",
    "daemon/process/rotating_log.py": "the log",
    "daemon/memory/moved_root.py": "moves segments in shared memory, or on the local disk",
    "daemon/memory/segment_directory.py": "the directories of segments",
    "daemon/memory/slots.py": "segments in shared memory, or on the local disk",
    "daemon/memory/unsaved.py": "segments that a daemon has left",
    "daemon/telemetry/metrics_file.py": "the file for the node exporter",
    "shared/array_checkpoint.py": "a checkpoint, also where there is no POSIX file system",
    "shared/system/fs.py": "is the seam to the operating system",
    "shared/system/local_lock.py": "a file in this user's directory in /tmp",
    "shared/system/numa.py": "/sys",
    "shared/system/root_lock.py": "the lock file that names the daemon",
    "shared/system/owners.py": "checks owners of any path, and opens the log of a daemon",
}
"""The modules outside `shared/storage/` that use files, and which files. None of these
files is part of a checkpoint.
"""


def test_only_the_storage_package_uses_the_files_of_a_root() -> None:
    found, outside = (
        set(),
        [path for path in FILES if "storage" not in path.relative_to(ROOT).parts],
    )
    for path in outside:
        for name, call in _calls(path):
            if name in FILE_CALLS or (
                isinstance(call.func, ast.Attribute) and call.func.attr in FILE_METHODS
            ):
                found.add(place(path))
    assert found == set(TOUCH_FILES)
    paths_of_the_root = [
        f"{path}: {ast.unparse(node)}"
        for path in outside
        for node in ast.walk(tree(path))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and ast.unparse(node.left).endswith("config.root")
    ]
    assert paths_of_the_root == []


def test_only_the_storage_package_knows_its_implementations() -> None:
    known = {
        place(path)
        for path in FILES
        for name in imports(path)
        if name.startswith("ckptd.shared.storage.posix")
    }
    # They probe a directory.
    assert {name for name in known if not name.startswith("shared/storage/")} == {
        "daemon/commands/doctor.py",
        "daemon/commands/doctor_costs.py",
    }


# -- the code map


def test_the_tables_of_the_code_map_are_those_of_the_source() -> None:
    shown = code_map.PAGE.read_text()
    assert shown == code_map.page(), "run `python -m tests.support.code_map --write`"
    listed = [name for name in OWN_FILES if f"| `{name}` | " in shown]
    assert listed == list(OWN_FILES)


def test_the_code_map_names_files_that_exist() -> None:
    named = set(
        re.findall(r"`((?:agent|daemon|shared)/[\w/]+(?:\.py|/))`", code_map.PAGE.read_text())
    )
    assert len(named) > len(FILES) / 2
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


# -- tests mirror modules

WITHOUT_A_TEST = {
    "daemon/__main__.py": "has one statement, which every daemon that a test starts as a process "
    "executes",
    "daemon/process/app.py": "is the life of a daemon: tests/daemon/commands/test_run_command.py "
    "starts, signals and ends them",
    "daemon/composition.py": "puts the parts together: tests/daemon/test_recovery.py starts them "
    "in its own process",
    "daemon/journal/directory.py": "tests/daemon/journal/test_journal.py uses it under a file "
    "system that fails",
    "shared/storage/posix_probe.py": "tests/daemon/commands/test_doctor.py shows its results",
    "shared/storage/posix_streams.py": "tests/shared/storage/test_conformance.py runs over it",
    "shared/system/storage_seam.py": "is what tests/shared/storage/test_conformance.py demands",
}
"""Modules that need no test of their own, each with the reason. An `__init__.py` needs
none, because it only exports or describes.
"""

FROM_OUTSIDE = {
    "agent/dcp/planner_rounds.py": "its test snapshots and recovers with an agent that has the "
    "caller's planners",
    "agent/read/saved.py": "its test reads forged checkpoints on every way out of them",
    "agent/recover/loading.py": "its test recovers on real ranks",
    "agent/recover/optimizer_binding.py": "its test binds optimizers as parts of a state",
    "agent/smp/checkpoints.py": "its test saves and resumes with `ckptd.agent.smp`",
    "agent/smp/full.py": "its test saves and resumes with `ckptd.agent.smp`",
    "daemon/saving/deleter.py": "its test takes the deleter out of the saver that owns it",
    "daemon/commands/run_command.py": "its test starts daemons as processes",
    "shared/storage/posix_root.py": "its test serves roots as a daemon does",
}
"""Modules whose tests do not import them, each with the reason."""
"""Modules whose tests are being written. This list is to be empty."""


def namesake(path: Path) -> Path:
    """Return the test file of a module."""
    return ROOT / "tests" / path.relative_to(ROOT).with_name(f"test_{path.name}")


def reached(test: Path) -> set[str]:
    """Return the full names of what a test file imports, directly, through `ckptd` or
    `ckptd.agent`, or through a file of tests/support.
    """
    exported = {name.rpartition(".")[2]: name for name in imports(ROOT / "agent" / "__init__.py")}
    found = set(imports(test))
    for name in tuple(found):
        package, _, last = name.rpartition(".")
        support = ROOT / f"{package.replace('.', '/')}.py"
        if package in ("ckptd", "ckptd.agent") and last in exported:
            found.add(exported[last])
        elif under(name, "tests.support") and support.exists():
            found.update(imports(support))
    return found


@cache
def has_test(path: Path) -> bool:
    """Return True if the module's namesake exists and has a test."""
    test = namesake(path)
    if not test.exists():
        return False
    functions = (
        node
        for node in ast.walk(tree(test))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return any(node.name.startswith("test_") for node in functions)


def is_reached(path: Path) -> bool:
    """Return True if the module's namesake imports the module, or something out of it."""
    (name,) = (name for name, known in MODULES.items() if known == path)
    return any(under(imported, name) for imported in reached(namesake(path)))


OWN_FILES = {place(path): path for path in FILES if path.name != "__init__.py"}


def test_every_module_has_a_test_of_its_name() -> None:
    excused = WITHOUT_A_TEST.keys()
    assert excused <= OWN_FILES.keys()
    assert [
        name for name, path in OWN_FILES.items() if name not in excused and not has_test(path)
    ] == []
    assert [name for name in WITHOUT_A_TEST if has_test(ROOT / name)] == [], (
        "these have a test, and need no excuse"
    )


def test_the_test_of_a_module_imports_it() -> None:
    tested = {name: path for name, path in OWN_FILES.items() if has_test(path)}
    assert {name for name, path in tested.items() if not is_reached(path)} == FROM_OUTSIDE.keys()


# -- names


def types_in(path: Path) -> Iterator[str]:
    """Yield the names of the public classes and type aliases of a module.

    An alias is a name in CamelCase that the module assigns.
    """
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef):
            named = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            named = []
        yield from (name for name in named if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z]\w*", name))


def test_aliases_are_found() -> None:
    assert {"Box", "Shape"} <= set(types_in(ROOT / "shared" / "formats" / "sharding.py"))


def test_no_two_classes_or_aliases_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for found in types_in(path):
            places.setdefault(found, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# -- files


def test_each_file_says_what_it_owns() -> None:
    assert [place(path) for path in FILES if not ast.get_docstring(tree(path))] == []


# -- memory

AGENT_FILES = [path for path in FILES if "agent" in path.relative_to(ROOT).parts]
_FACTORIES = re.compile(
    r"torch\.(nested\.nested_tensor|sparse_\w+_tensor|empty|empty_strided|zeros|ones|full|tensor|as_tensor|scalar_tensor|arange|eye|rand\w*)"
)


def test_every_allocation_names_its_device_and_dtype() -> None:
    # A caller may have set another default device, on which the memory that this
    # process writes would not exist.
    allocations = [
        (f"{place(path)}:{call.lineno}", {keyword.arg for keyword in call.keywords})
        for path in AGENT_FILES
        for name, call in _calls(path)
        if _FACTORIES.fullmatch(name)
    ]
    assert [
        line
        for line, given in allocations
        if None not in given and not {"device", "dtype"} <= given
    ] == []


# -- waits


def test_no_wait_of_the_agent_can_be_broken_by_ctrl_c() -> None:
    # These take a lock in Python code. `agent/threads/flag.py` has what to take
    # instead.
    waits = {
        f"threading.{name}"
        for name in ("Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier")
    }
    assert [
        f"{place(path)}:{call.lineno}"
        for path in AGENT_FILES
        for name, call in _calls(path)
        if name in waits
    ] == []


# -- pickle


@cache
def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    return [
        (ast.unparse(node.func), node)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
    ]


def _may_unpickle(name: str, call: ast.Call) -> bool:
    """Return True if a call runs code, or does not forbid pickles where it could."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        name in ("eval", "exec", "compile")
        or (name == "torch.load" and given.get("weights_only") != "True")
        or (
            name.endswith(("read_array", "write_array", "np.load", "np.save"))
            and given.get("allow_pickle") != "False"
        )
        or given.get("weights_only") == "False"
        or given.get("allow_pickle") == "True"
    )


def test_calls_that_may_unpickle_are_seen() -> None:
    calls = {
        "torch.load(f)": True,
        "torch.load(f, weights_only=False)": True,
        "torch.load(f, weights_only=True)": False,
        "np.load(f)": True,
        "numpy.lib.format.read_array(f, allow_pickle=False)": False,
        "any_other(f, allow_pickle=True)": True,
        "eval(text)": True,
        "json.loads(text)": False,
    }
    found = {}
    for text in calls:
        call = ast.parse(text, mode="eval").body
        found[text] = isinstance(call, ast.Call) and _may_unpickle(ast.unparse(call.func), call)
    assert found == calls


def test_nothing_is_unpickled() -> None:
    pickles = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}
    importers = {
        (place(path), module)
        for path in FILES
        for name in imports(path)
        if (module := name.split(".")[0]) in pickles
    }
    # Its unpickler finds no class and no function that a pickle names.
    assert importers == {("agent/convert/dcp_metadata.py", "pickle")}
    assert [
        f"{place(path)}: {ast.unparse(call)}"
        for path in FILES
        for name, call in _calls(path)
        if name.startswith("pickle.") or _may_unpickle(name, call)
    ] == []


# -- decoders


def test_every_decoder_is_made_at_the_import() -> None:
    """msgspec may crash the process if two threads decode a type for the first time at
    once.
    """
    decodes = ("msgspec.msgpack.decode", "msgspec.json.decode", "msgspec.convert")
    decoders = ("msgspec.msgpack.Decoder", "msgspec.json.Decoder")
    assert [
        f"{place(path)}: {ast.unparse(call)}"
        for path in FILES
        for name, call in _calls(path)
        if (name in decodes and "type" in {keyword.arg for keyword in call.keywords})
        or (name in decoders and not _is_at_the_import(path, call))
    ] == []


def _is_at_the_import(path: Path, call: ast.Call) -> bool:
    return not any(
        isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and call in ast.walk(function)
        for function in ast.walk(tree(path))
    )


# -- failpoints


def _passed() -> dict[str, list[str]]:
    """Return, by failpoint, the files that pass it: by its name, or by the prefix that
    `fs.publish` takes.
    """
    found: dict[str, list[str]] = {}
    suffixes = re.findall(
        r'failpoint\(f"\{points\}(\.\w+)"\)', (ROOT / "shared" / "system" / "fs.py").read_text()
    )
    assert suffixes == [".written", ".synced", ".renamed"]
    for path in FILES:
        for name, call in _calls(path):
            if name.endswith("failpoint") and call.args and isinstance(call.args[0], ast.Constant):
                found.setdefault(str(call.args[0].value), []).append(place(path))
            for keyword in call.keywords:
                if (
                    keyword.arg == "points"
                    and isinstance(keyword.value, ast.Constant)
                    and isinstance(keyword.value.value, str)
                ):
                    for suffix in suffixes:
                        found.setdefault(keyword.value.value + suffix, []).append(place(path))
    return found


def test_every_failpoint_is_passed_and_every_one_passed_is_registered() -> None:
    assert set(_passed()) == failpoints.NAMES


def test_every_failpoint_is_passed_in_one_place() -> None:
    assert {name: places for name, places in _passed().items() if len(places) > 1} == {}


def test_agent_and_daemon_pass_only_their_own_failpoints() -> None:
    passed = _passed()
    assert len(passed) > 20
    for name, places in passed.items():
        assert name.startswith("agent.") == places[0].startswith("agent/"), name


# -- tests


def test_no_test_passes_without_its_assertions() -> None:
    """No test returns early: `pytest.skip` says why it ends.

    Where only one side of an `if` asserts, its condition depends on the parameters of the
    test alone. A loop that asserts is over what stands in the source, or the test asserts
    something about what it is over, such as its length.
    """
    found = Weak()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        look(path, found)
    assert found == Weak()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("returns", "    if found():\n        return\n    assert True\n"),
        ("ifs", "    if found() is not None:\n        assert True\n"),
        ("loops", "    for each in found():\n        assert each\n"),
        (
            "loops",
            "    for each in sorted(found()):\n        with pytest.raises(E):\n            f()\n",
        ),
    ],
)
def test_weak_assertions_are_seen(tmp_path: Path, kind: str, body: str) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(f"def test_x():\n{body}")
    look(path, found := Weak())
    (place,) = getattr(found, kind)
    assert place.startswith("test_x.py::test_x")


@pytest.mark.parametrize(
    "body",
    [
        "    if found():\n        assert one()\n    else:\n        assert two()\n",
        "    for each in (1, 2):\n        if each == 1:\n            assert found()\n",
        "    made = found()\n    assert made\n    for each in made:\n        assert each\n",
        "    def inner():\n        return found()\n    assert inner()\n",
    ],
)
def test_assertions_that_always_run_are_not_weak(tmp_path: Path, body: str) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(f"def test_x():\n{body}")
    look(path, found := Weak())
    assert found == Weak()


def test_every_case_that_fails_is_named(tmp_path: Path) -> None:
    @each_case("left", [1, 2], ids=["one", "two"])
    @each_case("right", range(4))
    def differs(left: int, right: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "made once").mkdir()
        monkeypatch.setenv("CKPTD_CASE", os.environ.get("CKPTD_CASE", "") + "x")
        assert os.environ["CKPTD_CASE"] == "x"
        if (left, right) == (2, 3):
            pytest.skip("a case may not")
        assert left != right

    with pytest.raises(pytest.fail.Exception) as caught:
        differs(tmp_path=tmp_path, monkeypatch=None)
    assert re.findall(r"^.*\d of \d cases: .*|^case .*:", str(caught.value), re.MULTILINE) == [
        "2 of 2 cases: one; two",
        "case one:",
        "Failed: 1 of 4 cases: 1: right=1",
        "case 1: right=1:",
        "case two:",
        "Failed: 2 of 4 cases: 2: right=2; 3: right=3",
        "case 2: right=2:",
        "case 3: right=3:",
    ]
