"""Saves and resumes partial checkpoints with SageMaker's calls, on one rank and on
several.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.agent import Checkpoint, smp
from ckptd.shared.errors import (
    InvalidConfig,
    InvalidName,
    InvalidRequest,
    NotFound,
    SnapshotFailed,
    StructureMismatch,
    UnsavableValue,
)
from tests.agent.smp.pairs import pair, plain
from tests.support import sharded
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Ranks


@pytest.mark.usefixtures("processes")
def test_the_newest_partial_checkpoint_is_resumed(root: Path) -> None:
    model, optimizer = pair(1)
    for number in range(1, 4):
        wanted = plain(*(pair_now := pair(number, steps=number)))
        model, optimizer = pair_now
        smp.save_checkpoint(
            root,
            f"total_steps{10 * number}",
            model=model,
            optimizer=optimizer,
            user_content={"epoch": number, "seen": (1, 2)},
        )
    smp.close()  # as at the end of a process
    model, optimizer = pair(9)
    assert smp.resume_from_checkpoint(root, model=model, optimizer=optimizer) == {
        "epoch": 3,
        "seen": (1, 2),
    }
    assert plain(model, optimizer) == wanted


@pytest.mark.usefixtures("processes")
def test_a_tag_is_resumed(root: Path) -> None:
    wanted = plain(*(saved := pair(1, steps=1)))
    smp.save_checkpoint(root, "first", model=saved[0], optimizer=saved[1], user_content=1).wait(
        "durable", timeout=60
    )
    other = pair(2, steps=1)
    smp.save_checkpoint(root, "second", model=other[0], optimizer=other[1], user_content=2).wait(
        "durable", timeout=60
    )
    model, optimizer = pair(9)
    assert smp.resume_from_checkpoint(root, tag="first", model=model, optimizer=optimizer) == 1
    assert plain(model, optimizer) == wanted
    with pytest.raises(
        NotFound, match="no partial checkpoint 'third' in .*; there are first, second$"
    ):
        smp.resume_from_checkpoint(root, tag="third", model=model)


def steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:13]) for path in root.glob("partial/*/manifest.json"))


@pytest.mark.usefixtures("processes")
def test_the_number_in_a_tag_is_the_step_unless_it_is_taken(root: Path) -> None:
    model, _ = pair(1)
    for tag in ("epoch_100", "final", "steps7", "steps300"):
        smp.save_checkpoint(root, tag, model=model)
    smp.close()
    smp.save_checkpoint(root, "steps200", model=model).wait("durable", timeout=60)
    assert steps(root) == [100, 101, 102, 300, 301]


@pytest.mark.usefixtures("processes")
def test_old_partial_checkpoints_are_dropped(root: Path) -> None:
    model, _ = pair(1)
    for number in range(1, 6):
        smp.save_checkpoint(root, f"s{number}", model=model, num_kept_partial_checkpoints=2).wait(
            "durable", timeout=60
        )
    until = time.monotonic() + 60
    while steps(root) != [4, 5]:  # a deletion follows the commit
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.usefixtures("processes")
def test_model_only_and_into_the_meta_device(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, optimizer = pair(1, steps=2)
    smp.save_checkpoint(root, "s1", model=saved, optimizer=optimizer).wait("durable", timeout=60)
    other, untouched = pair(2, steps=1)
    before = plain(nn.Module(), untouched)
    smp.resume_from_checkpoint(root, model=other, optimizer=untouched, load_optimizer=False)
    assert plain(other, untouched) == plain(saved, untouched)
    assert plain(nn.Module(), untouched) == before
    with torch.device("meta"):
        late, _ = pair(3)
    late.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    assert smp.resume_from_checkpoint(root, model=late, load_optimizer=False) is None
    assert "still on the meta device, and without values: table" in caplog.text
    assert {name: sharded.plain(tensor) for name, tensor in late.state_dict().items()} == plain(
        saved, pair(0)[1]
    )


@pytest.mark.usefixtures("processes")
def test_keys_that_differ(root: Path) -> None:
    saved, _ = pair(1)
    smp.save_checkpoint(root, "s1", model=saved).wait("durable", timeout=60)
    larger = nn.Sequential(saved[0], saved[1], nn.Linear(2, 2))  # type: ignore[index]
    with pytest.raises(StructureMismatch, match=r"model\.2\.weight"):
        smp.resume_from_checkpoint(root, model=larger)
    smp.resume_from_checkpoint(root, model=larger, strict=False)


@pytest.mark.usefixtures("processes")
def test_bad_input_is_refused(root: Path) -> None:
    model, optimizer = pair(1)
    for tag in ("a/b", "", "../x", "x" * 129):
        with pytest.raises(InvalidName):
            smp.save_checkpoint(root, tag, model=model)
    with pytest.raises(InvalidRequest, match="pass at least one"):
        smp.save_checkpoint(root, "x")
    for kept in (0, -1, 1.5, True):
        with pytest.raises(
            InvalidRequest,
            match="num_kept_partial_checkpoints is .*; expected a number from 1 up, or None for "
            "all",
        ):
            smp.save_checkpoint(root, "x", model=model, num_kept_partial_checkpoints=kept)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no partial checkpoint in "):
        smp.resume_from_checkpoint(root, model=model)
    with pytest.raises(InvalidRequest, match="^same_partition_load: only for partial=True"):
        smp.resume_from_checkpoint(root, partial=False, model=model, same_partition_load=True)
    with pytest.raises(NotFound, match="no full checkpoint in "):
        smp.resume_from_checkpoint(root, partial=False, model=model)
    with pytest.raises(InvalidRequest, match="^a full checkpoint is loaded into a model: pass it"):
        smp.resume_from_checkpoint(root, partial=False, optimizer=optimizer)
    torch.save({"w": torch.ones(1)}, root / "other.pt")
    with pytest.raises(
        NotFound,
        match="other.pt is no full checkpoint of save_checkpoint with a model: load it with "
        "load_model",
    ):
        smp.resume_from_checkpoint(root, tag="other", partial=False, model=model)
    smp.save_checkpoint(root, "without", partial=False, model=model)
    with pytest.raises(NotFound, match="without.pt has no optimizer: pass load_optimizer=False"):
        smp.resume_from_checkpoint(
            root, tag="without", partial=False, model=model, optimizer=optimizer
        )


@pytest.mark.usefixtures("processes")
def test_a_tag_stays_its_own_after_a_rewind(root: Path) -> None:
    model, optimizer = pair(1)
    for tag in ("start0", "epoch_x12"):
        smp.save_checkpoint(root, tag, model=model, optimizer=optimizer, user_content=tag).wait(
            "durable", timeout=60
        )
    smp.resume_from_checkpoint(root, "start0", model=model, optimizer=optimizer)
    smp.save_checkpoint(
        root, "other12", model=model, optimizer=optimizer, user_content="other12"
    ).wait("durable", timeout=60)
    assert (
        smp.resume_from_checkpoint(root, "epoch_x12", model=model, optimizer=optimizer)
        == "epoch_x12"
    )
    assert steps(root) == [0, 12, 13]


@pytest.mark.usefixtures("processes")
def test_a_tag_is_known_before_it_is_durable(root: Path) -> None:
    model, _ = pair(1)
    smp.save_checkpoint(root, "t1", model=model, user_content=1)
    assert smp.resume_from_checkpoint(root, "t1", model=model) == 1


@pytest.mark.usefixtures("processes")
def test_a_link_to_the_directory_is_the_directory(root: Path, tmp_path: Path) -> None:
    model, _ = pair(1)
    (tmp_path / "link").symlink_to(root)
    smp.save_checkpoint(root, "t1", model=model, user_content=1)
    assert smp.resume_from_checkpoint(tmp_path / "link", model=model) == 1


@pytest.mark.usefixtures("processes")
def test_a_failed_resume_leaves_a_model_on_the_meta_device(root: Path) -> None:
    saved, optimizer = pair(1)
    smp.save_checkpoint(root, "t1", model=saved, optimizer=optimizer).wait("durable", timeout=60)
    with torch.device("meta"):
        late = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 9))
    with pytest.raises(StructureMismatch):
        smp.resume_from_checkpoint(root, model=late, load_optimizer=False)
    assert all(parameter.is_meta for parameter in late.parameters())
    with pytest.raises(InvalidRequest, match="^a model on the meta device needs strict=True"):
        smp.resume_from_checkpoint(root, model=late, load_optimizer=False, strict=False)


def test_a_path_that_is_wrong_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no partial checkpoint in "):
        smp.resume_from_checkpoint(tmp_path / "wrong", model=pair(1)[0])
    assert not (tmp_path / "wrong").exists()


@pytest.mark.usefixtures("processes")
def test_a_module_in_the_user_content_is_refused(root: Path) -> None:
    model, _ = pair(1)
    with pytest.raises(
        InvalidRequest, match="^user_content has a module or an optimizer: save its state_dict"
    ):
        smp.save_checkpoint(root, "t1", model=model, user_content={"ema": [pair(2)[0]]})


@pytest.mark.usefixtures("processes")
def test_an_error_of_one_agent_does_not_keep_the_others_open(root: Path) -> None:
    model, _ = pair(1)
    smp.save_checkpoint(root, "t1", model=model)
    with pytest.raises(UnsavableValue):
        smp.save({"f": print}, root / "x")
    with pytest.raises(SnapshotFailed, match="^nothing of this run was saved"):
        smp.close()
    assert steps(root) == [1]
    smp.close()


# -- several ranks


def save_on_rank(socket: Path, place: Path, partial: bool) -> None:
    os.environ["CKPTD_SOCKET"] = str(socket)
    rank = torch.distributed.get_rank()
    tag = "partial" if partial else "full"
    smp.save_checkpoint(
        place,
        tag,
        partial=partial,
        model=HERE["model"],
        optimizer=HERE["optimizer"],
        user_content={"of": rank},
    )
    smp.close()


def resume_on_rank(socket: Path, place: Path, partial: bool) -> Any:
    os.environ["CKPTD_SOCKET"] = str(socket)
    content = smp.resume_from_checkpoint(
        place, partial=partial, model=HERE["model"], optimizer=HERE["optimizer"]
    )
    HERE["count"] = 2
    smp.close()
    return content


def resume_alike(socket: Path, place: Path) -> Any:
    os.environ["CKPTD_SOCKET"] = str(socket)
    try:
        return smp.resume_from_checkpoint(
            place, model=HERE["model"], optimizer=HERE["optimizer"], same_partition_load=True
        )
    except StructureMismatch as error:
        return str(error)
    finally:
        HERE["count"] = 2
        smp.close()


def test_the_same_partition_is_resumed_and_another_one_is_refused(daemon: Daemon) -> None:
    where = daemon.home.socket, daemon.home.root
    with Ranks(4) as ranks:
        ranks.call(sharded.build, "fsdp2", 1)
        ranks.call(sharded.train, 2)
        ranks.call(save_on_rank, *where, True)
        wanted = sharded.together(ranks.call(sharded.whole))
    with Ranks(4) as ranks:
        ranks.call(sharded.build, "fsdp2", 5)
        assert ranks.call(resume_alike, *where) == [{"of": rank} for rank in range(4)]
        assert sharded.differing(sharded.together(ranks.call(sharded.whole)), wanted) == []
    with Ranks(2) as ranks:
        ranks.call(sharded.build, "fsdp2", 5)
        assert all(
            "it was saved on 4 ranks, and this job has 2" in error
            for error in ranks.call(resume_alike, *where)
        )


@pytest.mark.parametrize("partial", [True, False])
def test_four_ranks_save_and_two_resume(daemon: Daemon, partial: bool) -> None:
    where = daemon.home.socket, daemon.home.root, partial
    with Ranks(4) as ranks:
        ranks.call(sharded.build, "fsdp2", 1)
        ranks.call(sharded.train, 2)
        ranks.call(save_on_rank, *where)
        wanted = sharded.together(ranks.call(sharded.whole))
    with Ranks(2) as ranks:
        ranks.call(sharded.build, "fsdp2", 5)
        assert ranks.call(resume_on_rank, *where) == [{"of": 0}, {"of": 1}]
        assert sharded.differing(sharded.together(ranks.call(sharded.whole)), wanted) == []


def test_more_ranks_than_saved_get_the_content_of_another(daemon: Daemon) -> None:
    where = daemon.home.socket, daemon.home.root, True
    with Ranks(2) as ranks:
        ranks.call(sharded.build, "ddp", 1)
        ranks.call(save_on_rank, *where)
    with Checkpoint.open(daemon.home.root / "partial") as checkpoint:
        assert sum(part.items for part in checkpoint.manifest.parts) == len(checkpoint.keys()), (
            "replicas are written once"
        )
    with Ranks(3) as ranks:
        ranks.call(sharded.build, "ddp", 5)
        assert ranks.call(resume_on_rank, *where) == [{"of": 0}, {"of": 1}, {"of": 0}]


@pytest.mark.parametrize(
    "call",
    [
        lambda url: smp.save_checkpoint(url, tag="t", partial=True, model=torch.nn.Linear(2, 2)),
        lambda url: smp.resume_from_checkpoint(url),
        lambda url: smp.save({"a": 1}, f"{url}/name"),
        lambda url: smp.load(f"{url}/name"),
    ],
    ids=["save_checkpoint", "resume_from_checkpoint", "save", "load"],
)
def test_a_url_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[str], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InvalidConfig, match="^path is the URL 's3://bucket/x'; expected a path on this machine$"
    ):
        call("s3://bucket/x")
    assert list(tmp_path.iterdir()) == []
