"""Tests checkpoints that a newer ckptd wrote: they are not called damaged, and no older
checkpoint is used silently.
"""

from __future__ import annotations

import re
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ckptd.agent import Agent, Checkpoint, StorageReader
from ckptd.agent.recover import loading
from ckptd.agent.state.values import decode
from ckptd.shared.errors import CkptdError, IntegrityError, NewerFormat, NotFound
from tests.support.daemons import Daemon, Home, running
from tests.support.forged import Shards, forge
from tests.support.ranks import Ranks

WHOLE: list[Shards] = [[((0,), (8,))]]
NEWER: dict[str, dict[str, Any]] = {
    "plan": {"plan_version": 2},
    "value": {"extension": 99},
    "codec": {"codec": 7},
}
MANIFEST: dict[str, dict[str, Any]] = {
    "manifest": {"version": 3},
    "feature": {"features": ["holograms"]},
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", NEWER)
def test_recover_does_not_fall_back_behind_a_newer_format(place: Home, kind: str) -> None:
    forge(place.root, (8,), WHOLE, step=1)
    forge(place.root, (8,), WHOLE, step=2, **NEWER[kind])
    with (
        running(place, forked=True) as daemon,
        closing(Agent(job="gpt", socket=daemon.home.socket)) as agent,
    ):
        state = {"w": torch.full((8,), 5.0)}
        with pytest.raises(
            NewerFormat,
            match=r"^gpt/step-00000002\.a0001.*: upgrade this ckptd, or name an older checkpoint "
            r"with step=$",
        ):
            agent.recover(state)
        assert torch.equal(state["w"], torch.full((8,), 5.0))
        found = agent.recover(state, step=1)
        assert found is not None
        assert (found.step, found.passed_over) == (1, [])
        assert torch.equal(state["w"], torch.ones(8))


OF_A_NEWER_TORCH = (
    rf"^w has dtype novel32, which torch {re.escape(torch.__version__)} does not have: "
    r"install torch 2\.13\.0, which saved it, or a newer one$"
)


@pytest.mark.usefixtures("processes")
def test_recover_does_not_go_back_because_of_a_dtype(place: Home) -> None:
    forge(place.root, (8,), WHOLE, step=1)
    forge(place.root, (8,), WHOLE, step=2, dtype="novel32/4")
    with (
        running(place, forked=True) as daemon,
        closing(Agent(job="gpt", socket=daemon.home.socket)) as agent,
    ):
        state: dict[str, Any] = {"w": torch.full((8,), 5.0), "of the caller": 1}
        with (
            pytest.raises(NotFound, match=OF_A_NEWER_TORCH),
            mock.patch.object(loading, "load", side_effect=AssertionError),
        ):
            agent.recover(state, strict=False)
        assert torch.equal(state["w"], torch.full((8,), 5.0))
        with pytest.raises(NotFound, match=OF_A_NEWER_TORCH):
            agent.recover({"w": None})
        found = agent.recover(
            {"another": torch.zeros(8), "w": torch.zeros(8)}, strict=False, keep=["w"]
        )
        assert found is not None
        assert found.step == 2


def test_a_tensor_whose_dtype_torch_does_not_have_is_named(tmp_path: Path) -> None:
    place = forge(tmp_path, (8,), WHOLE, dtype="novel32/4")
    with Checkpoint.open(place) as checkpoint:
        assert checkpoint.keys() == ["w"]
        assert checkpoint.verify() > 32
        for read in (
            lambda: checkpoint.metadata("w"), lambda: checkpoint.tensor("w"),
            lambda: checkpoint.tensor("w", dtype=torch.int32), lambda: checkpoint.tensor("w",
            slices=(0,)), checkpoint.load,
        ):  # fmt: skip
            with pytest.raises(NotFound, match=OF_A_NEWER_TORCH):
                read()
    with closing(StorageReader(place)) as reader, pytest.raises(NotFound, match=OF_A_NEWER_TORCH):
        reader.read_metadata()


@pytest.mark.parametrize("kind", [*MANIFEST, "plan", "codec"])
def test_opening_the_newest_does_not_fall_back_behind_a_newer_format(
    tmp_path: Path, kind: str
) -> None:
    older = forge(tmp_path, (8,), WHOLE, step=1)
    newer = forge(tmp_path, (8,), WHOLE, step=2, **({**NEWER, **MANIFEST}[kind]))
    sentence = (
        r"^gpt/step-00000002\.a0001.*: upgrade this ckptd, or name an older checkpoint "
        r"with "
        r"Checkpoint\.open\(path, step or tag\)$"
    )
    with pytest.raises(NewerFormat, match=sentence):
        Checkpoint.open(tmp_path / "gpt")
    with pytest.raises(NewerFormat):
        Checkpoint.open(tmp_path / "gpt", 2)
    with pytest.raises(NewerFormat):
        Checkpoint.open(newer)
    for which in (1, older.name):
        with Checkpoint.open(tmp_path / "gpt", which) as checkpoint:
            assert checkpoint.step == 1
    forge(tmp_path, (8,), WHOLE, step=3)
    with Checkpoint.open(tmp_path / "gpt") as checkpoint:
        assert checkpoint.step == 3


def test_a_newer_checkpoint_with_a_user_tag_counts_as_the_latest(tmp_path: Path) -> None:
    forge(tmp_path, (8,), WHOLE, step=1)
    best = forge(tmp_path, (8,), WHOLE, step=2, version=3)
    best.rename(best.with_name("best.a0001"))
    with pytest.raises(NewerFormat, match=r"^gpt/best\.a0001: "):
        Checkpoint.open(tmp_path / "gpt")
    forge(tmp_path, (8,), WHOLE, step=1, attempt=2)
    with Checkpoint.open(tmp_path / "gpt") as checkpoint:
        assert checkpoint.attempt == 2


def test_damage_is_still_passed_over(tmp_path: Path) -> None:
    forge(tmp_path, (8,), WHOLE, step=1)
    damaged = forge(tmp_path, (8,), WHOLE, step=2)
    (damaged / "manifest.json").write_bytes(b"{}")
    with Checkpoint.open(tmp_path / "gpt") as checkpoint:
        assert checkpoint.step == 1


def test_a_value_of_unknown_type_counts_as_a_newer_format() -> None:
    with pytest.raises(NewerFormat, match="unknown type 99"):
        decode(b"\xd4\x63\x00")
    with pytest.raises(IntegrityError) as caught:
        decode(b"\xc1")
    assert not isinstance(caught.value, NewerFormat)


def recover_with_one_newer(socket: Path, rank: int) -> tuple[str, str, list[float]]:
    """Recover where only this rank finds a newer format.

    Return the error that `recover` raises here, and the state after it.
    """
    agent = Agent(job="gpt", socket=socket)
    state = {"w": torch.full((8,), 5.0)}
    refusing = mock.patch.object(
        loading, "open_checkpoint", side_effect=NewerFormat("part was written by a newer ckptd")
    )
    try:
        with refusing if agent.rank == rank else nullcontext():
            agent.recover(state)
    except CkptdError as error:
        return type(error).__name__, str(error), state["w"].tolist()
    finally:
        agent.close()
    return "nothing", "", state["w"].tolist()


def test_a_newer_format_found_by_one_rank_is_an_error_on_all(daemon: Daemon) -> None:
    forge(daemon.home.root, (8,), WHOLE, step=1)
    daemon.stop()
    with running(daemon.home, forked=True) as again, Ranks(2) as ranks:
        said = ranks.call(recover_with_one_newer, again.home.socket, 1)
    assert [kind for kind, _, _ in said] == ["NewerFormat", "NewerFormat"]
    assert all("or name an older checkpoint with step=" in sentence for _, sentence, _ in said)
    assert all(state == [5.0] * 8 for _, _, state in said)
