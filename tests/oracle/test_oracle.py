"""Tests that the oracle finds each kind of fault, with recoveries that are broken on
purpose, and runs fifty pairs of the rig.

The broken recoveries need no daemon: they load the state as the oracle expects it, and
then do one thing wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Checkpoint
from ckptd.agent.read import module_loader
from ckptd.shared.errors import RecoveryFailed, StructureMismatch
from tests.oracle import grammar, judge, spread, spread_judge
from tests.oracle.build import Run, build
from tests.oracle.judge import End, Verdict
from tests.oracle.prints import differences, print_of, text
from tests.oracle.program import (
    Block,
    Call,
    Extra,
    Model,
    Optimizer,
    Pair,
    Program,
    from_json,
    to_json,
)
from tests.oracle.references import Facts, dump, facts_of, load_by_name
from tests.oracle.runner import Child, judging, judging_spread, results, serve
from tests.oracle.shrink import shrink
from tests.oracle.worker import Ended, Jobs, Task
from tests.support.cases import each_case
from tests.support.daemons import Daemon

BLOCKS = (Block("a", "linear"), Block("b", "batchnorm"), Block("c", "buffers"), Block("d", "extra"))
PROGRAM = Program(
    (Model("model", BLOCKS),),
    (Extra("sched", "cosine", "optim"), Extra("note", "float"), Extra("kept", "namedtuple")),
    (Optimizer("optim", "adam", ("model",), grouping="decay"),),
)
PAIR = Pair(
    PROGRAM,
    replace(
        PROGRAM,
        seed=1,
        steps=1,
        extras=(
            PROGRAM.extras[0],
            Extra("note", "float", variant=1),
            Extra("kept", "namedtuple", variant=1),
        ),
    ),
)


class Fake:
    """Recovers without ckptd: as the oracle expects, followed by `spoil`."""

    def __init__(self, spoil: Callable[[dict[str, Any]], None] = lambda state: None) -> None:
        self._spoil = spoil
        self._data, self._facts = b"", Facts()

    def judge(self, pair: Pair) -> Verdict:
        self._pair = pair
        return judge.judge(pair, self._save, self._restore)

    def _save(self, state: dict[str, Any], number: int) -> None:
        self._data = dump(state)
        saving = build(self._pair.before)
        for _ in range(self._pair.before.steps * (number + 1)):
            saving.step()
        self._facts = facts_of(saving)

    def _restore(self, state: dict[str, Any], call: Call) -> None:
        load_by_name(_run_of(self._pair, state), self._data, call, self._facts)
        self._spoil(state)


def _run_of(pair: Pair, state: dict[str, Any]) -> Run:
    """Return a run with these objects, so that a reference can load into them."""
    made = build(pair.after)
    names = {}
    for key, value in made.objects.items():
        if isinstance(value, torch.nn.Module):
            for (_, mine), (_, theirs) in zip(
                value.named_parameters(), state[key].named_parameters(), strict=True
            ):
                names[id(theirs)] = made.names[id(mine)]
        elif isinstance(value, torch.nn.Parameter):
            names[id(state[key])] = made.names[id(value)]
    return replace(
        made, state=state, optimizers={key: state[key] for key in made.optimizers}, names=names
    )


def test_a_sound_recovery_agrees() -> None:
    assert Fake().judge(PAIR) == Verdict(judge.AGREED)


def _first(state: dict[str, Any], name: str) -> Any:
    return next(entry for entry in state["optim"].state.values())[name]


@torch.no_grad()
def _swap(state: dict[str, Any]) -> None:
    mean, var = state["model"].b.weight, state["model"].b.bias
    mean.copy_(var.clone()), var.copy_(mean.clone() + 1)


def _drop_moments(state: dict[str, Any]) -> None:
    state["optim"].state.pop(state["model"].a.weight)


def _swap_moments(state: dict[str, Any]) -> None:
    held = state["optim"].state
    one, other = state["model"].b.weight, state["model"].b.bias
    held[one], held[other] = held[other], held[one]


def _change_dtype(state: dict[str, Any]) -> None:
    entry = state["optim"].state[state["model"].a.weight]
    entry["exp_avg"] = entry["exp_avg"].double()


def _flip_a_bit(state: dict[str, Any]) -> None:
    state["model"].a.weight.detach().view(torch.int32)[0, 0] ^= 1


def _leave_a_buffer(state: dict[str, Any]) -> None:
    state["model"].b.running_mean.zero_()


def _write_what_is_not_saved(state: dict[str, Any]) -> None:
    state["model"].c.cache.zero_()


def _lose_extra_state(state: dict[str, Any]) -> None:
    state["model"].d.seen = 0


def _freeze(state: dict[str, Any]) -> None:
    state["model"].a.weight.requires_grad_(False)


def _tie(state: dict[str, Any]) -> None:
    state["model"].b.weight.data = state["model"].b.bias.data


def _new_parameter(state: dict[str, Any]) -> None:
    state["model"].a.weight = torch.nn.Parameter(state["model"].a.weight.detach().clone())


def _other_lr(state: dict[str, Any]) -> None:
    state["optim"].param_groups[1]["lr"] *= 2


def _swap_groups(state: dict[str, Any]) -> None:
    one, other = state["optim"].param_groups
    one["params"], other["params"] = other["params"], one["params"]


def _forget_the_scheduler(state: dict[str, Any]) -> None:
    state["sched"].last_epoch = 0


def _other_type(state: dict[str, Any]) -> None:
    state["note"] = str(state["note"])


def _leave_a_value(state: dict[str, Any]) -> None:
    state["kept"] = state["kept"]._replace(x=0)


@each_case(
    ("spoil", "kind"),
    [
        (_swap, "a parameter differs"),
        (_drop_moments, "an optimizer's state differs"),
        (_swap_moments, "an optimizer's state differs"),
        (_change_dtype, "the next step raises"),
        (_flip_a_bit, "a parameter differs"),
        (_leave_a_buffer, "a buffer differs"),
        (_write_what_is_not_saved, "a buffer differs"),
        (_lose_extra_state, "extra state differs"),
        (_freeze, "a parameter differs"),
        (_tie, "shared memory differs"),
        (_other_lr, "a param group differs"),
        (_swap_groups, "a param group differs"),
        (_forget_the_scheduler, "a value differs"),
        (_other_type, "a value differs"),
        (_leave_a_value, "a value differs"),
    ],
)
def test_a_broken_recovery_is_found(spoil: Callable[[dict[str, Any]], None], kind: str) -> None:
    assert Fake(spoil).judge(PAIR).kind == kind


def test_a_parameter_that_is_another_object_is_found() -> None:
    """The optimizer would train the old one."""
    assert Fake(_new_parameter).judge(PAIR).kind != judge.AGREED


def test_a_step_that_raises_is_found() -> None:
    def spoil(state: dict[str, Any]) -> None:
        state["optim"].state[state["model"].a.weight]["exp_avg"] = torch.zeros(3)

    assert Fake(spoil).judge(PAIR).kind == "the next step raises"


def _raising(
    error: Exception, first: Callable[[dict[str, Any]], None] = lambda state: None
) -> Callable[[dict[str, Any]], None]:
    def spoil(state: dict[str, Any]) -> None:
        first(state)
        raise error

    return spoil


def test_a_broken_recovery_in_another_process_is_found() -> None:
    """`judge` compares how the other process ended, and does not recover itself."""
    fake = Fake(_leave_a_buffer)

    def unused(state: dict[str, Any], call: Call) -> None:
        raise AssertionError

    fake.judge(PAIR)
    verdict = judge.judge(PAIR, fake._save, unused, lambda: judge.recovered(PAIR, fake._restore))
    assert verdict.kind == "a buffer differs"


def test_an_optimizer_that_would_read_foreign_memory_raises_at_its_step() -> None:
    """torch's fused kernels do not compare shapes, and a holder gives its optimizer the
    moments by position.
    """
    models = (Model("model", (Block("a", "linear"),)),)
    plan = Optimizer("optim", "adam-fused", ("model",), wrapped=True)
    pair = Pair(
        Program(models, (), (plan,)),
        Program(models, (), (replace(plan, reverse=True),), steps=0, seed=1),
    )
    assert Fake().judge(pair).sound
    run = build(pair.after)
    run.step()
    run.optimizers["optim"].state[run.state["model"].a.weight]["exp_avg"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"exp_avg has shape \[1\], and its parameter \[4, 4\]"):
        run.step()


class Refusing(Fake):
    """Refuses, without having changed anything but what `spoil` changes."""

    def _restore(self, state: dict[str, Any], call: Call) -> None:
        self._spoil(state)


OTHER_SHAPE = replace(
    PAIR,
    after=replace(PAIR.after, models=(Model("model", (Block("a", "linear", 8), *BLOCKS[1:])),)),
    changes=("grown",),
)


@each_case(
    ("pair", "error", "first", "kind"),
    [
        (
            OTHER_SHAPE,
            StructureMismatch("model.a.weight has another shape"),
            lambda state: None,
            judge.REFUSED,
        ),
        (OTHER_SHAPE, StructureMismatch("no"), lambda state: None, "the refusal names no key"),
        (
            OTHER_SHAPE,
            StructureMismatch("model.a.weight"),
            _leave_a_buffer,
            "refused, and the state has changed",
        ),
        (
            OTHER_SHAPE,
            StructureMismatch("model.a.weight"),
            lambda state: torch.rand(1),
            "refused, and the state has changed",
        ),
        (
            OTHER_SHAPE,
            StructureMismatch("model.a.weight"),
            _new_parameter,
            "refused, and the state has changed",
        ),
        (
            OTHER_SHAPE,
            RuntimeError("model.a.weight"),
            lambda state: None,
            "recover raised another error",
        ),
        (
            OTHER_SHAPE,
            RecoveryFailed("model", overwritten=True),
            _leave_a_buffer,
            "refused after the state was partly overwritten",
        ),
        (
            PAIR,
            StructureMismatch("model.a.weight"),
            lambda state: None,
            "refused what must come back",
        ),
    ],
)
def test_refusals_are_judged(
    pair: Pair, error: Exception, first: Callable[[dict[str, Any]], None], kind: str
) -> None:
    if kind == "refused after the state was partly overwritten":
        pair = PAIR
    assert Refusing(_raising(error, first)).judge(pair).kind == kind


@pytest.mark.parametrize(
    ("before", "after", "call", "reason"),
    [
        (Model("model", (Block("c", "complex"),)), Model("model", (Block("c", "complex"),),
        dtype="float32"), Call(), "complex "
            "into real"),
        (Model("model", (Block("s", "scaled"),)), Model("model", (Block("s", "scaled"),),
        dtype="float16"), Call(), "finite "
            "into infinite"),
        (
            Model("model", (Block("a", "linear"), Block("b", "linear"))),
            Model("model", (Block("a", "linear"), Block("b", "linear", tied_to="a"))),
            Call(strict=False),
            "two tensors into one memory",
        ),
        (
            Model("model", (Block("a", "linear", 2),)),
            Model("model", (Block("a", "linear", 4),)),
            Call(only=("optim",)),
            "the state of a parameter of another shape",
        ),
    ],
)  # fmt: skip
def test_losses_must_be_refused(before: Model, after: Model, call: Call, reason: str) -> None:
    optimizer = (Optimizer("optim", "adam", ("model",)),)
    pair = Pair(Program((before,), (), optimizer), Program((after,), (), optimizer, steps=0), call)

    class Careless(Fake):
        def _restore(self, state: dict[str, Any], call: Call) -> None:
            pass

    assert Careless().judge(pair).kind == f"not refused: {reason}"


def test_prints_tell_values_apart() -> None:
    values: list[Any] = [
        0,
        0.0,
        -0.0,
        False,
        "0",
        b"0",
        None,
        (0,),
        [0],
        {0},
        {0: 0},
        torch.tensor(0),
        torch.tensor(0.0),
        torch.tensor([0]),
    ]
    assert len(set(map(text, values))) == len(values)
    assert text(float("nan")) == text(float("nan"))
    assert text(torch.zeros(6)) != text(torch.zeros(5))
    assert text(torch.tensor([0.0])) != text(torch.tensor([-0.0]))


def test_a_seed_always_makes_the_same_pair_and_the_same_objects() -> None:
    for seed in range(30):
        pair = grammar.make(seed)
        assert pair == grammar.make(seed)
        assert from_json(to_json(pair)) == pair
    assert differences(print_of(build(PROGRAM)), print_of(build(PROGRAM))) == []


def test_a_pair_that_fails_is_made_small() -> None:
    """The fault is in the buffer of one block; everything else is taken out of the
    program.
    """

    def spoil(state: dict[str, Any]) -> None:
        if hasattr(state["model"], "b"):
            _leave_a_buffer(state)

    first = Fake(spoil).judge(PAIR)
    small, verdict = shrink(PAIR, first, lambda pair: Fake(spoil).judge(pair))
    assert verdict.kind == "a buffer differs"
    assert [block.name for block in small.before.models[0].blocks] == ["b"]
    assert (small.before.optimizers, small.before.extras) == ((), ())


@pytest.fixture(scope="module")
def judged() -> Iterator[Callable[[Pair], Verdict]]:
    """Judges pairs in other processes, which are started once for this file."""
    with judging() as made:
        yield made


@pytest.mark.usefixtures("processes")
def test_recoveries_from_storage_and_in_fresh_processes_agree(
    judged: Callable[[Pair], Verdict],
) -> None:
    """The worker checks where the snapshot came from, so that a recovery from elsewhere
    would differ.
    """
    calls = [
        Call(source=source, fresh=fresh, snapshots=2)
        for source in ("memory", "storage")
        for fresh in (False, True)
    ]
    found = [judged(replace(PAIR, call=call)) for call in calls]
    assert found == [Verdict(judge.AGREED)] * 4


@pytest.mark.usefixtures("processes")
def test_a_process_that_dies_is_told_and_replaced() -> None:
    child = Child("forkserver", serve, Path())
    try:
        for _ in range(2):
            with pytest.raises(Ended) as caught:
                child.ask("this is no pair")
            assert (caught.value.how, caught.value.details) == ("died", "exit code 1")
    finally:
        child.close()


def test_the_grammar_makes_some_pairs_of_each_source() -> None:
    calls = Counter(
        (call.source, call.fresh) for call in (grammar.make(seed).call for seed in range(1600))
    )
    assert 150 < calls["storage", False] + calls["storage", True] < 250
    assert 70 < calls["memory", True] + calls["storage", True] < 130
    assert calls["storage", True]


@pytest.mark.usefixtures("processes")
def test_fifty_pairs_agree(judged: Callable[[Pair], Verdict]) -> None:
    """Each pair goes through the public API and a real daemon.

    `make trust` and `make oracle` try thousands.
    """
    found = list(results(grammar.make, iter(range(50)), float("inf"), judged))
    assert {pair.seed: verdict for pair, verdict in found if not verdict.sound} == {}
    kinds = Counter(verdict.kind for _, verdict in found)
    assert kinds[judge.NOTHING] < len(found) / 10, kinds
    assert kinds[judge.AGREED] + kinds[judge.BETTER] > len(found) / 4, kinds


@pytest.mark.parametrize("how", ["parameter", "moment"])
def test_a_broken_recovery_on_ranks_is_found(daemon: Daemon, how: str) -> None:
    pools = spread_judge.Pools(daemon.home, after=how)
    try:
        plan = spread.Spread("fsdp2", 2)
        verdict = pools.judge(
            spread.SpreadPair(plan, replace(plan, kind="replicated", world=1, seed=1))
        )
    finally:
        pools.close()
    assert verdict.kind == "tensors differ from the saved ones"


def _dropped(checkpoint: Checkpoint) -> Any:
    tree = LOAD(checkpoint)
    tree["note"] += 1.0
    return tree


LOAD, TENSOR = Checkpoint.load, Checkpoint.tensor
BROKEN_READERS: dict[str, tuple[Any, str, Any, str]] = {
    "nothing is loaded": (module_loader, "load", lambda *_: 0, "model by load_into, a.weight: "),
    "a value of the tree": (Checkpoint, "load", _dropped, "note: reader float"),
    "one bit": (
        Checkpoint,
        "tensor",
        lambda self, name: TENSOR(self, name).nextafter(torch.tensor(9.0)),
        "model.a.weight: alone",
    ),
    "a name": (Checkpoint, "keys", lambda self: [], "model.a.weight is not among the keys"),
    "a dtype": (
        Checkpoint,
        "metadata",
        lambda self, name: (torch.float16, torch.Size([4, 4])),
        "model.a.weight: (torch.float16",
    ),
}


@pytest.mark.parametrize("how", ["", *BROKEN_READERS])
def test_a_broken_reader_is_found(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how:
        place, name, broken, _ = BROKEN_READERS[how]
        monkeypatch.setattr(place, name, broken)
    blocks = BLOCKS[:1]  # one bit more is in no buffer of integers
    before = replace(PROGRAM, models=(Model("model", blocks),))
    pair = replace(PAIR, before=before, after=replace(before, seed=1), seed=0)
    verdict = Jobs(daemon.home.socket, _no_process).judge(pair)
    assert verdict.kind == ("a reader differs" if how else "agreed")
    assert verdict.details.startswith(BROKEN_READERS[how][3] if how else "")


def _no_process(task: Task) -> End:
    raise AssertionError(f"{task} needs no fresh process")


@pytest.mark.usefixtures("processes")
def test_programs_on_two_ranks_agree() -> None:
    with judging_spread() as judged:
        found = list(results(spread.make, iter(range(12)), float("inf"), judged))
    assert {pair.seed: verdict for pair, verdict in found if not verdict.sound} == {}
