"""Tests what the page reads of checkpoints, damaged and deleted ones too."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.page import checkpoints as module
from ckptd.daemon.page.checkpoints import Checkpoints
from ckptd.shared.errors import InvalidName, NotFound
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.names import MANIFEST
from ckptd.shared.storage.locate import open_root
from tests.support.cases import each_case
from tests.support.daemons import home, running, until

TAG = "step-{:08d}.a0001".format


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A root with a job of four checkpoints, one of them damaged and one pinned."""
    with home() as place:
        with running(place, forked=True):
            agent = Agent("gpt", socket=place.socket)
            for step in (1, 2, 3, 4):
                model = torch.nn.Linear(3, 2, bias=False)
                model.weight.data = torch.arange(6.0).reshape(2, 3) * step
                model.weight.data[0, 0] = math.nan if step == 4 else 0.0
                state = {"m": model, "n": 3, "s": {"b": 1}}
                metrics = {"loss": 1 / step, "odd": float("nan")}
                agent.snapshot(state, step=step, metrics=metrics).wait("durable", timeout=60)
            agent.close()
            repository = open_root(place.root)
            until(lambda: repository.read_newest("gpt") == TAG(4), "hint of the newest")
        repository.pin("gpt", TAG(1))
        (place.root / "gpt" / TAG(2) / MANIFEST).write_bytes(b"{}")
        yield place.root


@pytest.fixture
def root(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the root, whose lists are made again for each call."""
    monkeypatch.setattr(module, "FRESH_SECONDS", -1.0)
    return Path(shutil.copytree(made, tmp_path / "root"))


def test_checkpoints_are_listed_newest_first(root: Path) -> None:
    found = Checkpoints(root)
    assert found.jobs() == ["gpt"]
    listed = found.listing("gpt")
    rows = listed["checkpoints"]
    assert (listed["job"], listed["more"]) == ("gpt", 0)
    assert [row["tag"] for row in rows] == [TAG(step) for step in (4, 3, 2, 1)]
    assert [(row["newest"], row["pinned"]) for row in rows] == [
        (True, False), (False, False), (False, False), (False, True),
    ]  # fmt: skip
    assert (rows[0]["step"], rows[0]["metrics"]) == (4, {"loss": 0.25, "odd": "nan"})
    assert [row.get("non_finite") for row in rows] == [1, 0, None, 0]
    assert "manifest" in rows[2]["damaged"]
    assert found.listing("gpt") == listed


def test_what_is_deleted_is_no_longer_listed_and_what_is_new_is(root: Path) -> None:
    found = Checkpoints(root)
    before = found.listing("gpt")["checkpoints"]
    shutil.rmtree(root / "gpt" / TAG(3))
    assert found.listing("gpt")["checkpoints"] == [before[0], before[2], before[3]]
    with pytest.raises(NotFound, match=f"no checkpoint gpt/{TAG(3)} in "):
        found.details("gpt", TAG(3))


def test_a_manifest_is_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, read, row = Checkpoints(root), list[str](), module._row

    def counted(tag: str, manifest: Manifest) -> dict[str, Any]:
        read.append(tag)
        return row(tag, manifest)

    monkeypatch.setattr(module, "_row", counted)
    for _ in range(3):
        found.listing("gpt")
    assert sorted(read) == [TAG(1), TAG(3), TAG(4)]


def test_readers_who_come_together_get_one_list(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH_SECONDS", 600.0)
    found = Checkpoints(root)
    before = found.listing("gpt")
    shutil.rmtree(root / "gpt" / TAG(3))
    assert found.listing("gpt") is before
    monkeypatch.setattr(module, "FRESH_SECONDS", -1.0)
    assert len(found.listing("gpt")["checkpoints"]) == 3


def test_long_lists_are_cut(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LISTED", 1)
    found = Checkpoints(root)
    listed = found.listing("gpt")
    assert ([row["step"] for row in listed["checkpoints"]], listed["more"]) == ([4], 3)
    details = found.details("gpt", TAG(4))
    assert (len(details["tensors"]), details["tensors_in_all"]) == (1, 1)


def test_a_checkpoint_is_described_with_its_tensors(root: Path) -> None:
    found = Checkpoints(root).details("gpt", TAG(3))
    assert found["tensors"] == [
        {"name": "m.weight", "shape": [2, 3], "dtype": "float32", "bytes": 24}
    ]
    assert (found["job"], found["step"], found["bytes"] > 24) == ("gpt", 3, True)
    assert found["manifest"]["job"] == "gpt"
    assert "metadata" not in found["manifest"]
    whole = json.loads(Checkpoints(root).manifest("gpt", TAG(3)))
    assert "m.weight" in whole["metadata"]["state_dict_metadata"]


@pytest.mark.usefixtures("processes")
def test_a_checkpoint_with_its_metadata_in_an_object_is_described_in_the_same_form() -> None:
    with home() as place, running(place, forked=True):
        agent = Agent("big", socket=place.socket)
        state = {f"t{at}": torch.ones(1) for at in range(20_000)}
        agent.snapshot(state, step=1).wait("durable", timeout=60)
        agent.close()
        found = Checkpoints(place.root).details("big", TAG(1))
        stored = json.loads(Checkpoints(place.root).manifest("big", TAG(1)))
    assert (stored["version"], type(stored["parts"])) == (2, dict)
    assert (found["tensors_in_all"], len(found["tensors"])) == (20_000, module.MOST_LISTED)
    (part,) = found["manifest"]["parts"]
    assert (part["rank"], part["bytes"], found["parts_not_shown"]) == (0, found["bytes"], 0)


def test_a_tensor_is_measured(root: Path) -> None:
    found = Checkpoints(root).statistics("gpt", TAG(3), "m.weight", lambda: False)
    assert (found["name"], found["shape"], found["dtype"]) == ("m.weight", [2, 3], "float32")
    assert (found["minimum"], found["maximum"], found["non_finite"]) == (0.0, 15.0, 0)
    with pytest.raises(NotFound, match="no tensor 'x'; the checkpoint has 1, such as m.weight"):
        Checkpoints(root).statistics("gpt", TAG(3), "x", lambda: False)


@each_case("job", ["..", "../root", ".ckptd", "/etc", "a/b", "", "g\0"])
def test_a_job_cannot_lead_out_of_the_root(root: Path, job: str) -> None:
    found = Checkpoints(root)
    for call in (found.listing, lambda job: found.details(job, TAG(3))):
        with pytest.raises(InvalidName, match="cannot be a name"):
            call(job)


@each_case("tag", ["..", "../gpt", f"../gpt/{TAG(3)}", "", "x" * 9000])
def test_a_tag_cannot_lead_out_of_the_job(root: Path, tag: str) -> None:
    found = Checkpoints(root)
    for call in (found.details, found.manifest):
        with pytest.raises(NotFound, match="is not the tag of a checkpoint; expected one like"):
            call("gpt", tag)


def test_a_job_that_is_not_there(root: Path) -> None:
    with pytest.raises(NotFound, match="there is no job gtp in "):
        Checkpoints(root).listing("gtp")
