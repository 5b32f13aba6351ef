"""Tests that calls which succeed and are probably not meant are warned of, once each."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.advice import Advice, Restart
from ckptd.shared.errors import InvalidRequest
from tests.support.daemons import Daemon
from tests.support.trainers import vanish

STATE = {"w": torch.ones(3)}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "ckptd.agent" and record.levelname == "WARNING"
    ]
    caplog.clear()
    return found


def test_a_loop_that_repeats_steps_after_a_recovery_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    advice = Advice()
    advice.recovered(9)
    advice.before_snapshot(STATE, 4, 2)
    assert warned(caplog) == [
        "step 4 does not come after step 9, which was recovered: begin the loop at recovered.step "
        "+ 1"
    ]
    advice.before_snapshot(STATE, 9, 2)
    advice.recovered(9)
    advice.before_snapshot(STATE, 10, 3)
    assert warned(caplog) == []


def test_silent_advice_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    advice = Advice()
    advice.silent = True
    advice.before_snapshot(STATE, 0, 2)
    assert warned(caplog) == []


def test_a_job_that_ran_before_and_is_not_recovered_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    advice = Advice()
    advice.before_snapshot(STATE, 0, 1)
    assert warned(caplog) == []
    advice = Advice()
    advice.before_snapshot(STATE, 0, 2)
    assert warned(caplog)[0].startswith(
        "this is attempt 2 of the job, and recover() was not called: the run does not continue"
    )
    advice = Advice()
    advice.recovered(None)
    advice.before_snapshot(STATE, 0, 2)
    assert warned(caplog) == []


def test_the_state_dict_of_an_optimizer_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    advice, model = Advice(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for attempt in (1, 2):
        advice.recovered(None)
        advice.before_snapshot({"train": {"optim": optimizer.state_dict()}}, 0, attempt)
    (told,) = warned(caplog)
    assert told.startswith(
        "train.optim is the state_dict() of an optimizer: pass the optimizer itself"
    )
    advice.before_snapshot(
        {
            "optim": optimizer,
            "named": {"state": {}, "param_groups": [{"params": ["weight"]}]},
            "x": [1],
        },
        1,
        3,
    )
    assert warned(caplog) == []


@pytest.mark.parametrize("state", [None, {}, []])
def test_nothing_cannot_be_saved(daemon: Daemon, state: object) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    with pytest.raises(InvalidRequest, match="^the state is .*: pass what is to be saved"):
        agent.snapshot(state, step=1)
    agent.snapshot(STATE, step=1).wait(timeout=60)
    agent.close()
    assert Checkpoint.open(daemon.home.root / "gpt").step == 1


def test_an_agent_gives_the_advice(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Agent("gpt", socket=daemon.home.socket)) as agent:
        agent.snapshot(STATE, step=5)
    with closing(Agent("gpt", socket=daemon.home.socket)) as agent:
        assert agent.recover(STATE) is not None
        agent.snapshot(STATE, step=5)
    assert [told for told in warned(caplog) if "step 5 does not come after step 5" in told]


OLDER = "go back to an older one: recover(state, step=69)"


def again(place: str, attempts: str, remedy: str) -> str:
    return (
        f"{place} is recovered again: attempts {attempts} have left no newer snapshot. If they "
        f"had nothing left to do, all is well; if this snapshot makes each run fail, {remedy}"
    )


def test_the_third_run_from_one_snapshot_is_told_of_an_older_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told(attempt: int, restart: Restart, *, before: bool = False) -> list[str]:
        advice = Advice()
        if before:
            advice.recovered(None)
        advice.warn_of_repeated_recovery(restart, attempt)
        return warned(caplog)

    seventy_nine = Restart("step 79 of attempt 1", 1, "recover(state, step=69)")
    assert told(2, seventy_nine) == told(3, seventy_nine) == []
    assert told(4, seventy_nine) == [again("step 79 of attempt 1", "2 and 3", OLDER)]
    assert told(9, seventy_nine) == [again("step 79 of attempt 1", "2 to 8", OLDER)]
    assert told(9, seventy_nine, before=True) == []
    assert told(9, Restart("checkpoint best.a0001", 6, "")) == [
        again("checkpoint best.a0001", "7 and 8", "no older step is left to go back to")
    ]
    # Attempt 6 has left a snapshot, which is damaged.
    assert told(8, Restart("step 79 of attempt 1", 6, "recover(state, step=69)")) == []


def test_a_snapshot_from_which_no_run_gets_on_is_told(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*steps: int, asked: int | None = None) -> list[str]:
        agent = Agent("gpt", socket=daemon.home.socket)
        agent.recover(STATE, step=asked)
        for step in steps:
            agent.snapshot(STATE, step=step).wait("durable", timeout=60)
        vanish(agent)  # it dies
        return [told for told in warned(caplog) if "is recovered again" in told]

    assert run(69, 79) == []
    assert run() == run() == []
    assert run() == [again("step 79 of attempt 1", "2 and 3", OLDER)]
    assert run() == [again("step 79 of attempt 1", "2 to 4", OLDER)]
    assert run(74, asked=69) == []  # with the remedy
    assert run(75) == run(76) == run(77) == run(78) == []  # each run gets on


def test_recoveries_within_a_process_are_no_runs(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    agent.snapshot(STATE, step=69).wait("durable", timeout=60)
    for step in range(70, 75):
        agent._link.handovers.last_step = step  # a snapshot that failed after it was taken
        recovered = agent.recover(STATE)
        assert recovered is not None
        assert recovered.step == 69
    assert agent.attempt == 6
    vanish(agent)
    assert not [told for told in warned(caplog) if "is recovered again" in told]
