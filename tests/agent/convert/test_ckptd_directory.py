"""Tests the contents of a ckptd checkpoint, and how such a checkpoint is made of
leaves. `test_importing.py` reads whole checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent, Checkpoint, per_rank
from ckptd.agent.convert import ckptd_directory
from ckptd.agent.convert.ckptd_directory import PlannedPart, contents_of, write_directory
from ckptd.agent.convert.contents import Contents, Leaf, flat, leaf_of, replaced
from ckptd.agent.dcp import standalone
from ckptd.agent.read.checkpoint import opened_of
from ckptd.shared.errors import IntegrityError, UnsavableValue
from ckptd.shared.formats.plan import Plan
from tests.agent.convert.saved import assert_same, bits, loaded, shared
from tests.support.daemons import Daemon


def leaves(found: Contents) -> dict[str, Leaf]:
    return {name: value for name, value in flat(found.tree) if isinstance(value, Leaf)}


def test_leaves_tell_which_tensors_are_tied(daemon: Daemon) -> None:
    weight, agent = torch.arange(12.0).reshape(3, 4), Agent("job", socket=daemon.home.socket)
    state = {
        "a": weight,
        "b": weight,
        "rows": weight[1:],
        "t": weight.t(),
        "other": weight.clone(),
        "own": per_rank({"x": torch.ones(2)}),
    }
    agent.snapshot(state, step=1)
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        found = leaves(contents_of(opened_of(checkpoint)))
    assert found["a"].is_tied_to(found["b"])
    assert not any(found["a"].is_tied_to(found[name]) for name in ("rows", "t", "other"))
    assert {found[name].storage for name in ("a", "b", "rows", "t")} == {found["a"].storage}
    assert (found["rows"].shape, found["rows"].offset, found["t"].stride) == ((2, 4), 16, (1, 4))
    assert found["own.x"].nbytes == 8


def test_modules_are_found_by_their_place(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot(
        {
            "nets": {"g": torch.nn.Linear(1, 1), "d": torch.nn.Linear(1, 1)},
            "plain": torch.nn.Linear(1, 1).state_dict(),
        },
        step=1,
    )
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert contents_of(opened_of(checkpoint)).modules == ["nets.g", "nets.d"]


def test_a_plan_has_the_items_and_aliases_of_a_snapshot(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"model": shared()}, step=1)
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        [source] = opened_of(checkpoint).sources
        planned = PlannedPart(contents_of(opened_of(checkpoint)).tree, None)
        assert planned.layout.plan.items == source.plan.items
        assert planned.layout.plan.aliases == source.plan.aliases
        assert Plan.decode(planned.layout.document).metadata == source.plan.metadata


def leaf(name: str, storage: str = "", *, shape: tuple[int, ...] = (3,)) -> Leaf:
    return Leaf(
        name,
        torch.float32,
        torch.float32,
        shape,
        torch.empty(shape, device="meta").stride(),
        0,
        storage or name,
    )


def test_planning_takes_no_memory() -> None:
    tree = {f"x{number}": leaf(f"x{number}", shape=(1 << 40,)) for number in range(4)}
    assert PlannedPart(tree, None).layout.plan.data_length == 16 << 40


def test_user_content_that_is_too_large_is_refused() -> None:
    with pytest.raises(
        UnsavableValue,
        match="^user_content: more than 1,048,576 bytes; leave out the largest of its members$",
    ):
        PlannedPart({"x": leaf("x")}, {"config": "x" * (1 << 20)})


def test_bytes_that_change_on_the_disk_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.arange(3000.0)}
    contents = Contents(replaced(state, torch.Tensor, leaf_of), lambda leaves: {})
    right = standalone.commit

    def damaging(checkpoint: object, *arguments: object, **options: object) -> None:
        part = next(tmp_path.glob("*.ckpt"))
        data = bytearray(part.read_bytes())
        data[4096] ^= 1  # the first byte of the first chunk
        part.write_bytes(data)
        right(checkpoint, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ckptd_directory, "commit", damaging)
    with pytest.raises(IntegrityError):
        write_directory(
            tmp_path, PlannedPart(contents.tree, None), contents, "raw", lambda length: None
        )


def test_leaves_in_memory_and_in_files_are_written_alike(tmp_path: Path) -> None:
    state = shared()
    in_memory = replaced(state, torch.Tensor, leaf_of)
    in_files = {name: Leaf(f"file "
        f"{name}", *(getattr(one, field) for field in ("saved", "dtype", "shape", "stride",
        "offset", "storage")))
                for name, one in in_memory.items()}  # fmt: skip
    contents = Contents(
        in_files, lambda leaves: {one.name: state[one.name.removeprefix("file ")] for one in leaves}
    )
    write_directory(tmp_path, PlannedPart(in_files, None), contents, "auto", lambda length: None)
    assert_same(loaded(tmp_path), state)
    assert bits(loaded(tmp_path)["rows"]) == bits(state["rows"])
