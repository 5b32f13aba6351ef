"""Adopts checkpoints of every format into jobs, with real daemons, and recovers them
bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.convert import command
from ckptd.agent.convert.adoption import adopt
from ckptd.agent.convert.contents import replaced
from ckptd.agent.handover.rank_link import RankLink
from ckptd.shared.errors import (
    CkptdError,
    IntegrityError,
    InvalidName,
    InvalidRequest,
    JobRunning,
    NotFound,
    StorageError,
)
from tests.agent.convert.saved import STATES, assert_same, one_process, save, shared
from tests.support.daemons import Daemon
from tests.support.shared_daemon import LentDaemon


@pytest.fixture
def job(shared_daemon: LentDaemon, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a job."""
    monkeypatch.setenv("CKPTD_SOCKET", str(shared_daemon.home.socket))
    return shared_daemon.directory


def recovered(state: Any, job: Path) -> int:
    agent = Agent(job.name)
    try:
        found = agent.recover(state)
        assert found is not None
        return found.step
    finally:
        agent.close()


def blank(state: Any) -> Any:
    return replaced(state, torch.Tensor, torch.zeros_like)


@pytest.mark.parametrize("name", STATES)
def test_every_content_is_recovered(tmp_path: Path, job: Path, name: str) -> None:
    state = {"model": STATES[name], "epoch": 1}
    torch.save(state, tmp_path / "source")
    found = adopt(tmp_path / "source", job.parent, job.name, step=7)
    assert (found.step, found.tag, found.format) == (7, "step-00000007.a0001", "torch")
    with Checkpoint.open(job) as checkpoint:
        assert checkpoint.verify()
        assert_same(checkpoint.load(), state)
    mine = {"model": blank(STATES[name]), "epoch": 0}
    assert recovered(mine, job) == 7
    assert_same(mine, state)


def as_dcp(state: Any, path: Path) -> Path:
    with one_process():
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def as_safetensors(state: Any, path: Path) -> Path:
    save_file(state["model"], path)
    return path


def as_job(state: Any, path: Path) -> Path:
    agent = Agent("other")
    agent.snapshot(state, step=1).wait("durable", timeout=60)
    agent.close()
    return Path(agent.root) / "other"


@pytest.mark.parametrize("written", [as_dcp, as_safetensors, as_job, save])
def test_every_format_is_adopted(
    tmp_path: Path, job: Path, written: Callable[[Any, Path], Path]
) -> None:
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5)}}
    source = written(state, tmp_path / "source")
    adopt(source, job.parent, job.name, under="model" if written is as_safetensors else None)
    mine = blank(state)
    assert recovered(mine, job) == 0
    assert_same(mine, state)


def test_the_adopted_checkpoint_is_the_newest_whatever_its_step(tmp_path: Path, job: Path) -> None:
    agent = Agent(job.name)
    agent.snapshot({"w": torch.zeros(3)}, step=1000).wait("durable", timeout=60)
    agent.close()
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    found = adopt(tmp_path / "source", job.parent, job.name, step=3, tag="base")
    assert found.tag == "base.a0002"
    mine = {"w": torch.zeros(3)}
    assert recovered(mine, job) == 3
    assert mine["w"].tolist() == [1.0] * 3


def test_part_names_dtype_and_user_content(tmp_path: Path, job: Path) -> None:
    save_file(
        {"net.w": torch.ones(3)}, tmp_path / "source", metadata={"format": "pt", "author": "me"}
    )
    adopt(
        tmp_path / "source",
        job.parent,
        job.name,
        under="model",
        rename=[(r"^net\.", "")],
        dtype=torch.bfloat16,
    )
    with Checkpoint.open(job) as checkpoint:
        assert checkpoint.load()["model"]["w"].dtype is torch.bfloat16
        assert checkpoint.manifest.user_content == {"author": "me"}


def test_storages_that_are_shared_are_saved_once(tmp_path: Path, job: Path) -> None:
    state = shared()
    torch.save(state, tmp_path / "source")
    adopt(tmp_path / "source", job.parent, job.name)
    with Checkpoint.open(job) as checkpoint:
        found = checkpoint.load()
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_one_slot_is_made(tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    right = RankLink.wait_durable

    def count(link: Any, pending: Any) -> None:
        made.extend(link.handovers.slots.names)
        right(link, pending)

    monkeypatch.setattr(RankLink, "wait_durable", count)
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    adopt(tmp_path / "source", job.parent, job.name)
    assert len(made) == 1


def test_a_dry_run_begins_no_attempt(tmp_path: Path, job: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    found = adopt(tmp_path / "source", job.parent, job.name, dry_run=True)
    assert (found.tag, found.tensors, found.nbytes) == ("", 1, 12)
    assert not job.exists()


def test_progress_reaches_all_bytes(tmp_path: Path, job: Path) -> None:
    torch.save({"w": torch.ones(3000), "x": torch.ones(5, dtype=torch.int8)}, tmp_path / "source")
    all_of_it: list[int] = []
    copied: list[int] = []
    adopt(tmp_path / "source", job.parent, job.name, begin=all_of_it.append, progress=copied.append)
    assert sum(copied) == 12_005
    assert all_of_it[0] >= 12_005


def test_a_job_that_runs_is_left_alone(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.agent.link.attempt.WAIT_SECONDS", 0.1)
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    agent = Agent(job.name)
    if (child := os.fork()) == 0:
        try:
            adopt(tmp_path / "source", job.parent, job.name)
        except JobRunning:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    agent.snapshot({"w": torch.zeros(3)}, step=1).wait("durable", timeout=60)
    agent.close()


def test_an_agent_of_this_process_is_not_fenced(tmp_path: Path, job: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    agent = Agent(job.name)
    with pytest.raises(
        JobRunning,
        match=f"^this process has an agent of job '{job.name}', which would no longer be able to "
        "save: close it first$",
    ):
        adopt(tmp_path / "source", job.parent, job.name)
    agent.snapshot({"w": torch.zeros(3)}, step=1).wait("durable", timeout=60)
    adopt(tmp_path / "source", job.parent, f"{job.name}-other")
    agent.close()
    assert adopt(tmp_path / "source", job.parent, job.name).tag == "step-00000000.a0002"


def test_a_place_that_is_no_job_is_refused(tmp_path: Path, job: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    with pytest.raises(
        InvalidRequest, match="root is a root, which holds jobs: name a job in it, like .*root/gpt$"
    ):
        adopt(tmp_path / "source", job.parent.parent, job.parent.name)
    with pytest.raises(
        InvalidRequest,
        match=r"job-[0-9]+ lies in the root .*root: did you mean the root .*root, with "
        r"'job-[0-9]+' as the job, and its tag with `tag`\?$",
    ):
        adopt(tmp_path / "source", job, "base")
    assert not job.exists()


def test_a_state_that_cannot_be_saved_yet_is_said_to_be_in_memory(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", str(daemon.home.socket))

    def fail(link: Any, pending: Any) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(RankLink, "wait_durable", fail)
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    with pytest.raises(
        StorageError,
        match="^no space left; the state is in memory, and the daemon saves it when it can",
    ):
        adopt(tmp_path / "source", daemon.home.root, "gpt")


def test_several_ranks_are_refused(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    with pytest.raises(InvalidRequest):
        adopt(tmp_path / "source", job.parent, job.name)


def test_damage_that_is_found_late_leaves_no_checkpoint(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save({"a": torch.ones(3), "b": torch.arange(50_000)}, tmp_path / "source")
    [part] = source.glob("*.ckpt")
    data = bytearray(part.read_bytes())
    used = [at for at in range(4096, len(data) - 8192) if data[at]]
    data[used[len(used) // 2]] ^= 1
    part.write_bytes(data)
    with pytest.raises(IntegrityError, match="does not match its checksum"):
        adopt(source, job.parent, job.name)
    with pytest.raises(NotFound):
        Checkpoint.open(job)
    torch.save({"w": torch.ones(3)}, tmp_path / "sound")
    assert adopt(tmp_path / "sound", job.parent, job.name).tag == "step-00000000.a0002"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"step": -1}, InvalidRequest, "step is -1; expected an integer from 0"),
        ({"tag": "a/b"}, InvalidName, "tag 'a/b'"),
        ({"tag": "step-1"}, InvalidName, "names beginning with 'step-' are made by ckptd"),
        ({"tag": "newest"}, InvalidName, "it means the newest checkpoint of a job"),
        ({"job": "a b"}, InvalidName, "job 'a b'"),
        (
            {"format": "zip"},
            InvalidRequest,
            "format: there is no 'zip'; there are dcp, hf, safetensors, torch",
        ),
        ({"only": "none"}, CkptdError, "none"),
        ({"path": "nothing"}, NotFound, "nothing"),
    ],
)
def test_mistakes_are_one_sentence_and_begin_no_attempt(
    tmp_path: Path, job: Path, options: dict[str, Any], error: type[CkptdError], said: str
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    path = tmp_path / options.pop("path", "source")
    with pytest.raises(error, match=said):
        adopt(path, job.parent, options.pop("job", job.name), **options)
    assert not job.exists()


def test_the_verb(tmp_path: Path, job: Path) -> None:
    source = tmp_path / "source"
    torch.save({"net": {"w": torch.ones(3)}}, source)
    done = CliRunner().invoke(
        command.adopt, [str(source), str(job), "--step", "4", "--only", "net", "--json"]
    )
    assert json.loads(done.stdout) == {
        "root": str(job.parent), "job": job.name, "step": 4, "tag": "step-00000004.a0001",
        "format": "torch", "tensors": 1, "nbytes": 12, "left_out": [],
    }  # fmt: skip
    done = CliRunner().invoke(command.adopt, [str(source), str(job), "--tag", "base", "--dry-run"])
    assert done.stdout == f"would adopt {source} as step 0 of {job}: 1 tensors, 12 B\n"
    done = CliRunner().invoke(command.adopt, [str(source), str(job), "--tag", "base"])
    assert done.stdout == f"adopted {source} as {job / 'base.a0002'}: 1 tensors, 12 B\n"
