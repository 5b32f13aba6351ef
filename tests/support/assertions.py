"""Finds assertions of tests that may never run, by reading the source.

A test that returns early, or that asserts only where a value of the run has some kind,
or only in a loop over what may be empty, passes without having looked.
`python -m tests.support.assertions` lists the places.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.rooms import ROOT, tree

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TESTS = ROOT / "tests"
_FIRST = {"enumerate", "sorted", "reversed", "list", "tuple", "set", "permutations", "pairwise"}
"""Calls whose result is empty only if their first argument is."""
_OF_CASES = {"parametrize", "each_case"}
_PURE = {"len", "isinstance", "str", "bool", "startswith", "endswith"}


@dataclass
class Weak:
    """The places of a file where an assertion may never run, as "file::test: source"."""

    returns: list[str] = field(default_factory=list)
    """Tests that end before their last statement."""
    ifs: list[str] = field(default_factory=list)
    """An `if` where only one side asserts, and the condition is found at run time."""
    loops: list[str] = field(default_factory=list)
    """Loops that assert, over what may be empty and is nowhere else asserted about."""


def own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node, except the bodies of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield from own(child)


def _asserts(nodes: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, (ast.With, ast.AsyncWith)) and _expects_an_error(node))
        for statement in nodes
        for node in (statement, *own(statement))
    )


def _expects_an_error(node: ast.With | ast.AsyncWith) -> bool:
    return any(
        re.match(r"pytest\.(raises|warns)\b", ast.unparse(item.context_expr)) for item in node.items
    )


def _calls_a_helper(nodes: list[ast.stmt], helpers: set[str]) -> bool:
    return any(
        isinstance(node, ast.Call) and _last(node.func) in helpers
        for statement in nodes
        for node in (statement, *own(statement))
    )


def _last(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


@cache
def _helpers() -> set[str]:
    """Return the names of the functions of tests that assert something themselves."""
    return {
        node.name
        for path in TESTS.rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, Function) and _asserts(node.body)
    }


@cache
def _filled_names(path: Path) -> frozenset[str]:
    """Return the constants that are not empty in a module and in those it imports from."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            other = ROOT / f"{node.module.removeprefix('ckptd.').replace('.', '/')}.py"
            known = _filled_names(other) if other.exists() else frozenset()
            found |= {alias.asname or alias.name for alias in node.names if alias.name in known}
        _add_filled(node, found)
    return frozenset(found)


def _add_filled(node: ast.AST, known: set[str]) -> None:
    """Add the name that a statement assigns a value to which is not empty."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    for target in targets:
        pairs = [(target, node.value)]  # type: ignore[attr-defined]
        if isinstance(target, ast.Tuple) and isinstance(pairs[0][1], ast.Tuple):
            pairs = list(zip(target.elts, pairs[0][1].elts, strict=False))
        known |= {
            name.id
            for name, value in pairs
            if isinstance(name, ast.Name) and value is not None and _filled(value, known)
        }


def _filled(value: ast.expr, known: set[str]) -> bool:
    """Return True if an expression surely gives more than nothing."""
    match value:
        case ast.Tuple() | ast.List() | ast.Set():
            return any(
                not isinstance(each, ast.Starred) or _filled(each.value, known)
                for each in value.elts
            )
        case ast.Constant():
            return bool(value.value)
        case ast.Dict():
            return bool(value.keys)
        case ast.JoinedStr():
            return True
        case ast.Name():
            return value.id in known
        case ast.BinOp():
            return _filled(value.left, known) or _filled(value.right, known)
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
            return all(_filled(each.iter, known) and not each.ifs for each in value.generators)
        case ast.Call():
            return _filled_call(value, known)
    return False


def _filled_call(call: ast.Call, known: set[str]) -> bool:
    filled = [_filled(argument, known) for argument in call.args]
    match _last(call.func):
        case "range":
            return len(call.args) > 1 or filled[0]
        case "zip":
            strict = any(keyword.arg == "strict" for keyword in call.keywords)
            return any(filled) if strict else all(filled)
        case "product":
            return all(filled)
        case "map" | "sample":
            return filled[1:2] == [True]
        case "items" | "keys" | "values" if isinstance(call.func, ast.Attribute):
            return _filled(call.func.value, known)
        case "call" | "results" | "count" | "split":  # of ranks: one answer of each
            return True
        case name:
            return name in _FIRST and filled[:1] == [True]


def _parameters(test: Function) -> set[str]:
    """Return the arguments whose values a decorator of the test lists or generates."""
    found: set[str] = set()
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and _last(decorator.func) in _OF_CASES:
            found |= set(re.findall(r"\w+", ast.unparse(decorator.args[0])))
        if isinstance(decorator, ast.Call) and _last(decorator.func) == "given":
            found |= {argument.arg for argument in test.args.args}
    return found


def _is_known(condition: ast.expr, known: set[str]) -> bool:
    """Return True if a condition depends only on what stands in the source."""
    return {node.id for node in ast.walk(condition) if isinstance(node, ast.Name)} <= (
        known | _PURE
    ) and all(
        _last(node.func) in _PURE for node in ast.walk(condition) if isinstance(node, ast.Call)
    )


def _is_asserted(iterable: ast.expr, asserted: str) -> bool:
    """Return True if an assertion outside the loop names the iterable, or what it is
    made of.
    """
    texts = {ast.unparse(iterable)}
    if isinstance(iterable, ast.Call):
        texts |= {ast.unparse(argument) for argument in iterable.args}
        if isinstance(iterable.func, ast.Attribute):
            texts.add(ast.unparse(iterable.func.value))
    return any(re.search(rf"(?<![\w.]){re.escape(text)}(?![\w(])", asserted) for text in texts)


def look(path: Path, found: Weak) -> None:
    """Add the places of a file where an assertion may never run."""
    place = path.relative_to(TESTS) if path.is_relative_to(TESTS) else path.name
    constants = set(_filled_names(path))
    module = tree(path)
    top = {
        node.name
        for node in module.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    for test in ast.walk(module):
        if isinstance(test, Function) and test.name.startswith("test_"):
            _look_at(test, f"{place}::{test.name}", constants, top, found)


def _look_at(test: Function, name: str, constants: set[str], top: set[str], found: Weak) -> None:
    nodes, parameters = list(own(test)), _parameters(test)
    filled = constants | parameters
    for node in nodes:
        _add_filled(node, filled)
    loops = [node for node in nodes if isinstance(node, (ast.For, ast.AsyncFor))]
    turns = {
        name.id
        for loop in loops
        if _filled(loop.iter, filled)
        for name in ast.walk(loop.target)
        if isinstance(name, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Return):
            found.returns.append(name)
        elif isinstance(node, ast.If) and _asserts(node.body) != _asserts(node.orelse):
            other = node.orelse if _asserts(node.body) else node.body
            if not _calls_a_helper(other, _helpers()) and not _is_known(
                node.test, constants | parameters | top | turns
            ):
                found.ifs.append(f"{name}: if {ast.unparse(node.test)}")
    for loop in loops:
        if _filled(loop.iter, filled) or not _asserts(loop.body):
            continue
        inside = set(map(id, own(loop)))
        asserted = "\n".join(
            ast.unparse(node.test)
            for node in nodes
            if isinstance(node, ast.Assert) and id(node) not in inside
        )
        if not _is_asserted(loop.iter, asserted):
            found.loops.append(
                f"{name}: for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
            )


if __name__ == "__main__":
    total = Weak()
    for file in sorted(TESTS.rglob("test_*.py")):
        look(file, total)
    for kind, places in vars(total).items():
        print(f"{kind}: {len(places)}", *places, sep="\n  ")
