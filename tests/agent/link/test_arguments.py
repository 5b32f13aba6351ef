"""What the caller and the environment give is taken or refused by name."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from ckptd.agent.link.arguments import job_name, launch_id, make_request, may_take_over, ranks_of
from ckptd.agent.link.rounds import Alone, Exchange
from ckptd.agent.link.script import script_job
from ckptd.shared.errors import InvalidName, InvalidRequest
from ckptd.shared.formats.snapshot_request import MAX_REQUEST
from ckptd.shared.retention import LatestN
from ckptd.shared.system import machine
from tests.support.cases import each_case


def test_the_name_of_a_job_is_the_argument_or_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CKPTD_JOB", raising=False)
    assert (job_name("gpt", private=False), job_name(None, private=True)) == ("gpt", script_job())
    with pytest.raises(
        InvalidRequest,
        match="^this daemon serves several jobs: name this job with CKPTD_JOB or Agent",
    ):
        job_name(None, private=False)
    monkeypatch.setenv("CKPTD_JOB", "bert")
    assert (
        job_name(None, private=False),
        job_name(None, private=True),
        job_name("gpt", private=True),
    ) == ("bert", "bert", "gpt")
    with pytest.raises(InvalidName):
        job_name("../gpt", private=False)


@each_case(
    ("argument", "setting", "may"),
    [
        (None, None, False),
        (None, "", False),
        (None, "0", False),
        (None, "1", True),
        (False, "1", False),
        (True, "0", True),
    ],
)
def test_a_run_takes_over_if_the_argument_or_else_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, argument: bool | None, setting: str | None, may: bool
) -> None:
    monkeypatch.delenv("CKPTD_TAKEOVER", raising=False)
    if setting is not None:
        monkeypatch.setenv("CKPTD_TAKEOVER", setting)
    assert may_take_over(argument) is may


def test_a_wrong_setting_for_taking_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_TAKEOVER", "yes")
    with pytest.raises(InvalidRequest, match="^CKPTD_TAKEOVER is 'yes'; expected 0 or 1$"):
        may_take_over(None)
    assert may_take_over(True)


@each_case(
    ("run", "launch"),
    [
        (None, ""),
        ("", ""),
        ("gpt-7", "gpt-7"),
        ("none", f"none/{machine.host()}/{os.getppid()}"),
        ("x" * 999, "x" * 256),
    ],
)
def test_a_launch_is_the_run_of_torchrun_or_torchrun_itself(
    monkeypatch: pytest.MonkeyPatch, run: str | None, launch: str
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    assert launch_id() == launch


def test_without_a_process_group_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(ranks_of(None), Alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        InvalidRequest,
        match=r"^this job has 2 ranks: call torch.distributed.init_process_group\(\) before ckptd$",
    ):
        ranks_of(None)


def test_the_ranks_are_those_of_the_process_group() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=1, world_size=3)
    try:
        found = ranks_of(None)
        assert isinstance(found, Exchange)
        assert (found.rank, found.world_size) == (1, 3)
        assert isinstance(ranks_of(dist.new_group([1])), Alone)
        others = dist.new_group([0, 2])
        with pytest.raises(
            InvalidRequest, match="^this rank is not in the process group that the agent was given$"
        ):
            ranks_of(others)
    finally:
        dist.destroy_process_group()


def request(**changes: Any) -> Any:
    given = {
        "step": 5,
        "tag": None,
        "persist": True,
        "on_busy": "wait",
        "metrics": None,
        "user_content": None,
        **changes,
    }
    return make_request(**given)


def test_a_request_has_what_was_asked_for() -> None:
    found = request(
        tag="best",
        persist=False,
        metrics={"loss": 1, 2: True},
        user_content={"a": [1, None]},
        retention=[LatestN(3)],
    )
    assert (found.tag, found.persist, found.metrics, msgspec.json.decode(found.user_content),
        found.retention) == (
        "best", False, {"loss": 1.0, "2": 1.0}, {"a": [1, None]}, ["LatestN(n=3)"],
    )  # fmt: skip
    plain = request()
    assert (plain.tag, plain.metrics, plain.user_content, plain.retention) == (
        None,
        {},
        "null",
        None,
    )


@each_case("step", [-1, True, 1.0, "1", None, 10**18])
def test_a_step_that_cannot_be_is_refused(step: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^step is .*; expected an integer from 0 to 10\*\*18 - 1$"
    ):
        request(step=step)
    assert request(step=10**18 - 1) is not None


class Unprintable(dict[str, int]):
    def items(self) -> Any:
        raise TypeError("no")


def cyclic() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@each_case(
    ("changes", "words"),
    [
        ({"on_busy": "never"}, "on_busy is 'never'; expected 'wait' or 'skip'"),
        ({"metrics": {"x": "high"}}, "metric 'x' is 'high'; expected a number"),
        ({"metrics": {"x": None}}, "metric 'x' is None; expected a number"),
        (
            {"metrics": {"x": 10**400}},
            "metric 'x' is an integer too large for a float; expected a number",
        ),
        (
            {"metrics": {"\ud800": 1}},
            r"metric '\ud800' has half of a surrogate pair in its name, which UTF-8 cannot encode",
        ),
        (
            {"user_content": float("nan")},
            "user_content cannot be written as JSON: Out of range float values are not JSON "
            "compliant",
        ),
        (
            {"user_content": {1, 2}},
            "user_content cannot be written as JSON: Object of type set is not JSON serializable",
        ),
        (
            {"user_content": "\ud800"},
            "user_content has half of a surrogate pair in a text, which UTF-8 cannot encode; "
            "leave it out",
        ),
        (
            {"user_content": cyclic()},
            "user_content cannot be written as JSON: Circular reference detected",
        ),
        (
            {"user_content": "x" * (MAX_REQUEST // 2)},
            "metrics and user_content together exceed 524288 bytes; save large values",
        ),
    ],
)
def test_an_option_that_cannot_be_saved_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**changes)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("levels", [101, 100_000])
def test_content_that_is_nested_too_deep_is_refused(levels: int) -> None:
    deep: Any = 1
    for _ in range(levels):
        deep = [deep]
    with pytest.raises(
        InvalidRequest, match=r"^metrics is 0\.5; expected numbers by name, like \{'loss': 0\.5\}$"
    ):
        request(metrics=0.5)
    with pytest.raises(
        InvalidRequest,
        match="^user_content is nested more than 100 levels deep; nest it less, or save it in the "
        "state$",
    ):
        request(user_content=deep)


def test_a_tag_that_is_no_name_is_refused() -> None:
    for tag in ("step-5", "a/b", ""):
        with pytest.raises(InvalidName):
            request(tag=tag)
