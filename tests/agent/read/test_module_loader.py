"""Tests `load_into`: a module gets what was saved bit for bit, in place, or it is left as
it was and the error says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.read import module_loader
from ckptd.agent.read.loader import load
from ckptd.agent.read.module_loader import LoadedInto
from ckptd.agent.read.slot_source import SlotSource
from ckptd.shared.errors import (
    IntegrityError,
    InvalidRequest,
    NotFound,
    StorageError,
    StructureMismatch,
    VersionGone,
)
from ckptd.shared.formats.plan import MIN_CHUNK
from tests.support.daemons import Daemon, Home, running, until

SMALL = {"CKPTD_CHUNK_SIZE": str(MIN_CHUNK)}
WIDTH = 130
"""A layer of this width fills more than one of the smallest chunks."""


def made(seed: int, width: int = WIDTH, bias: bool = True) -> Any:
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width, bias=bias) for _ in range(3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(width))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


class Run:
    """A training of a module, and the snapshots that it takes."""

    def __init__(self, home: Home, model: Any) -> None:
        self.home, self.model, self.step = home, model, -1
        self.agent = Agent("gpt", socket=home.socket)

    def snapshot(self, **options: Any) -> int:
        """Take a snapshot, and wait until readers get it."""
        self.step += 1
        state = {"model": self.model, "step": self.step}
        self.pending = self.agent.snapshot(state, step=self.step, **options)

        def is_there() -> bool:
            try:
                with newest(self.home) as found:
                    return found.step == self.step
            except NotFound:
                return False

        until(is_there, f"step {self.step} in memory")
        return self.step

    def change(self, *names: str) -> None:
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                if name in names or not names:
                    tensor.add_(torch.randn_like(tensor))


def newest(home: Home) -> Checkpoint:
    return Checkpoint.newest_in_memory("gpt", socket=home.socket)


@pytest.fixture
def run(processes: None, place: Home) -> Iterator[Run]:
    with running(place, environment=SMALL, forked=True):
        trained = Run(place, made(0))
        yield trained
        trained.agent.close()


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("persist", [True, False])
def test_a_module_gets_what_was_sealed_and_what_was_saved(
    run: Run, staged: bool, persist: bool
) -> None:
    run.model[3].running_mean.fill_(3.0)
    run.snapshot(persist=persist, metrics={"loss": 0.5})
    other = made(1)
    addresses = [tensor.data_ptr() for tensor in other.state_dict().values()]
    with newest(run.home) as found:
        done = found.load_into(other, staged=staged)
        assert (found.step, found.attempt, found.metrics, found.in_memory) == (
            0, 1, {"loss": 0.5}, True,
        )  # fmt: skip
        held = found.digest
        assert found.load()["step"] == 0
        assert found.verify() > 0
        with pytest.raises(NotFound, match="^step-00000000.a0001 has no manifest: "):
            _ = found.manifest
    assert_same(run.model, other)
    assert addresses == [tensor.data_ptr() for tensor in other.state_dict().values()]
    assert sorted(done.loaded) == sorted(f"model.{name}" for name in other.state_dict())
    assert (done.unchanged, done.missing) == ([], [])
    if persist:
        run.agent.close()
        with Checkpoint.open(run.home.root / "gpt") as stored:
            assert (stored.in_memory, stored.digest) == (False, held)
            stored.load_into(again := made(2), staged=staged)
        assert_same(run.model, again)


def test_other_dtypes_tied_weights_and_a_prefix_of_a_part(run: Run) -> None:
    run.snapshot()
    half = made(1).bfloat16()
    tied = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
    tied["b"].weight = tied["a"].weight
    with newest(run.home) as found:
        found.load_into(half)
        found.load_into(layer := nn.Linear(WIDTH, WIDTH), prefix="model.1")
    assert_same(made(0).bfloat16(), half)
    assert_same(run.model[1], layer)
    compiled: Any = torch.compile(made(1), backend="eager")
    with newest(run.home) as found:
        found.load_into(compiled)
    assert_same(run.model, compiled._orig_mod)


def test_a_tensor_beside_the_module_with_a_name_of_its_tensor_is_left_out(run: Run) -> None:
    """A module is matched by its keys in the state, as by `load` and `recover`."""
    saved, stray = nn.Linear(4, 2), {"model.weight": torch.full((2, 4), 9.0)}
    model: dict[str, Any] = {"model": saved}
    other = {**stray, "model": saved.state_dict(), "model.more": torch.ones(2)}
    for step, state in enumerate(({**stray, **model}, {**model, **stray}, other)):
        run.agent.snapshot(state, step=step).wait("durable", timeout=60)
        with Checkpoint.open(run.home.root / "gpt", step) as stored:
            for strict in (True, False):
                stored.load_into(module := nn.Linear(4, 2), strict=strict)
                assert_same(saved, module)


def test_a_module_without_tensors_loads_nothing(run: Run) -> None:
    """Load nothing below a prefix that the checkpoint lacks, and miss nothing there."""
    run.snapshot()
    with newest(run.home) as found:
        done = found.load_into(nn.ReLU(), prefix="activation")
        with pytest.raises(NotFound, match="has no tensor below 'activation'"):
            found.load_into(nn.Linear(WIDTH, WIDTH), prefix="activation")
    assert (done.loaded, done.unchanged, done.missing, done.nbytes) == ([], [], [], 0)


def test_tensors_that_cannot_be_written_are_refused_by_name(run: Run) -> None:
    run.snapshot()
    lazy, freed, expanded = made(1), made(1), made(1)
    lazy[0] = nn.LazyLinear(WIDTH)
    freed[0].weight.untyped_storage().resize_(0)
    expanded[3].running_mean = torch.zeros(1).expand(WIDTH)
    for module, what in (
        (lazy, "0.weight has no memory yet: run one forward pass of the lazy module first"),
        (freed, "0.weight was freed, the tensor needs"),
        (expanded, "3.running_mean is expanded, so that its elements share memory: clone() it"),
    ):
        with newest(run.home) as found, pytest.raises(StructureMismatch) as error:
            found.load_into(module)
        assert what in str(error.value)
        assert not torch.equal(module[1].weight, run.model[1].weight)


def test_a_module_that_does_not_fit_is_left_as_it_was(run: Run) -> None:
    run.snapshot()
    integers = made(1)
    integers[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.int32), False)
    for module, what in (
        (made(1, WIDTH + 1), f"0.weight: the checkpoint has shape [{WIDTH}, {WIDTH}], the model "),
        (made(1, bias=False), "not in the module: 0.bias, 1.bias, 2.bias; pass strict=False"),
        (nn.Sequential(*made(1), nn.Linear(2, 2)), "not in the checkpoint: 4.weight, 4.bias; "),
        (integers, "the model torch.int32, which cannot hold its values"),
        (made(1).to("meta"), "0.weight is on the meta device: give the module memory"),
    ):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with newest(run.home) as found, pytest.raises(StructureMismatch) as error:
            found.load_into(module)
        assert what in str(error.value)
        after = module.state_dict()
        assert all(t.is_meta or torch.equal(t, after[name]) for name, t in before.items())
    longer = nn.Sequential(*made(1), nn.Linear(2, 2))
    with newest(run.home) as found:
        assert found.load_into(longer, strict=False).missing == ["4.weight", "4.bias"]
        with pytest.raises(NotFound, match="no tensor below 'net': .* the checkpoint has model$"):
            found.load_into(longer, prefix="net")
    assert_same(longer[:4], run.model)


def test_what_has_not_changed_for_two_versions_is_not_read(run: Run) -> None:
    other, done = made(1), list[LoadedInto]()
    for _ in range(4):
        run.snapshot()
        run.change("2.weight")
        with newest(run.home) as found:
            done.append(found.load_into(other))
    assert [len(each.unchanged) for each in done[:2]] == [0, 0]
    assert "model.0.weight" in done[2].unchanged
    assert "model.2.weight" in done[3].loaded
    assert done[3].nbytes < done[0].nbytes
    with torch.no_grad():
        other[0].weight.zero_()
    run.model[2].weight.data.copy_(other[2].weight)
    run.snapshot()
    with newest(run.home) as found:
        assert "model.0.weight" in found.load_into(other).loaded, "it was changed in place"
    assert_same(run.model, other)


@pytest.mark.parametrize("staged", [True, False])
def test_a_version_that_is_replaced_while_it_is_read_is_no_mix(
    run: Run, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.snapshot()
    with newest(run.home) as found:
        found.load_into(other := made(1))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    read, left = SlotSource.read_pieces, [3]

    def slowly(self: SlotSource, number: int, pieces: Any) -> bool:
        left[0] -= 1
        if left[0] == 0:
            for _ in range(3):
                run.change()
                run.snapshot()
        return read(self, number, pieces)

    run.change()
    run.snapshot()
    with newest(run.home) as found:
        found.keys()
        monkeypatch.setattr(SlotSource, "read_pieces", slowly)
        with pytest.raises(VersionGone, match="^step-00000001.a0001 is no longer in") as error:
            found.load_into(other, staged=staged)
        monkeypatch.undo()
        assert error.value.overwritten is not staged
        with pytest.raises(VersionGone):
            found.tensor("model.0.weight")
        with pytest.raises(VersionGone):
            found.load()
    same = [torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items()]
    assert all(same) if staged else not all(same)
    with newest(run.home) as found:
        done = found.load_into(other, staged=staged)
        assert (len(done.unchanged) == 0) or staged
    assert_same(run.model, other)


@pytest.mark.parametrize("staged", [True, False])
def test_a_version_that_is_replaced_once_the_module_is_written_is_loaded(
    run: Run, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look at the slots is before the first byte is written, or tells of them."""
    run.snapshot()
    gone = list[bool]()

    def loaded(saved: Any, destinations: Any) -> int:
        gone.append(True)
        return load(saved, destinations)

    with newest(run.home) as found:
        monkeypatch.setattr(module_loader, "load", loaded)
        monkeypatch.setattr(SlotSource, "is_gone", lambda slot: bool(gone))
        if staged:
            found.load_into(other := made(1))
            assert_same(run.model, other)
        else:
            with pytest.raises(VersionGone, match="half overwritten") as error:
                found.load_into(made(1), staged=False)
            assert error.value.overwritten
        with pytest.raises(VersionGone):
            found.tensor("model.0.weight")


@pytest.mark.parametrize("error", [IntegrityError("damaged"), OSError("cut short")])
def test_a_version_that_is_replaced_just_after_an_error_overwrites_nothing_in_silence(
    run: Run, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are looked at once for an error of a half written module."""
    run.snapshot()
    looks = 0

    def replaced_after_the_first_look(slot: SlotSource) -> bool:
        nonlocal looks
        looks += 1
        return looks > 1

    def failing(saved: Any, destinations: Any) -> int:
        monkeypatch.setattr(SlotSource, "is_gone", replaced_after_the_first_look)
        raise error

    with newest(run.home) as found:
        monkeypatch.setattr(module_loader, "load", failing)
        with pytest.raises((IntegrityError, StorageError)) as raised:
            found.load_into(made(1), staged=False)
    assert not isinstance(raised.value, VersionGone)


def test_damage_in_memory_is_no_replacement(run: Run) -> None:
    run.snapshot()
    run.pending.wait("durable", timeout=60)
    with newest(run.home) as found:
        for segment in run.home.segment_files():
            data = segment.read_bytes()
            place = data.find(run.model[0].weight.detach().numpy().tobytes()[:64])
            if place >= 0:
                with segment.open("r+b") as file:
                    file.seek(place)
                    file.write(b"\xff" * 8)
        other, before = made(1), made(1)
        with pytest.raises(IntegrityError, match="has changed in memory since it was sealed"):
            found.load_into(other)
    assert_same(other, before)


def test_nothing_in_memory_and_no_such_job_are_one_sentence(daemon: Daemon, tmp_path: Path) -> None:
    home = daemon.home
    with pytest.raises(NotFound) as error:
        newest(home)
    assert str(error.value) == (
        f"there is no snapshot of a job 'gpt' in {home.root}: it has no job yet"
    )
    agent = Agent("other", socket=home.socket)
    agent.snapshot({"a": torch.ones(3)}, step=1).wait("durable", timeout=60)
    agent.close()
    with pytest.raises(NotFound, match="^there is no snapshot of a job 'gpt' in .*: it has other$"):
        newest(home)
    with pytest.raises(NotFound, match="^nothing of job 'other' is in the memory of this node: "):
        Checkpoint.newest_in_memory("other", socket=home.socket)


def test_a_module_that_fsdp1_has_flattened_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.snapshot()
    monkeypatch.setattr(module_loader, "flattens", lambda module: True)
    with newest(run.home) as found, pytest.raises(InvalidRequest, match=re.escape("use FSDP2")):
        found.load_into(made(1))
