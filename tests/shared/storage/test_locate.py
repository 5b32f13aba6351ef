"""Tests what a path names: the highest attempt of a tag, a directory that is one
checkpoint, or nothing, with the reason.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ckptd.shared.errors import InvalidRequest, NotFound
from ckptd.shared.location import Url
from ckptd.shared.storage import locate
from ckptd.shared.storage.locate import (
    attempts_of,
    check_new_root,
    find_checkpoint,
    find_job_or_checkpoint,
    job_and_tag,
    meant,
)
from ckptd.shared.storage.marker import MARKER
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.standalone import StandaloneDirectory
from tests.shared.samples import TAG, write_checkpoint
from tests.support.cases import each_case
from tests.support.forged import forge


@each_case(
    ("place", "control", "meant_root"),
    [
        ("{root}/gpt", True, "{root}, with the job 'gpt'"),
        ("{root}/gpt", False, "{root}, with the job 'gpt'"),
        ("{root}/gpt/step-00000001.a0001", True, "{root}, with the job 'gpt'"),
        ("{root}/gpt/step-00000001.a0001", False, "{root}, with the job 'gpt'"),
        ("{root}/sub", True, "{root}"),
        ("{root}/sub/deeper", True, "{root}"),
        ("{link}/sub", True, "{root}"),
        ("{root}/sub", False, ""),
        ("{root}", True, ""),
        ("{root}-2", True, ""),
    ],
)
def test_a_root_is_not_made_in_a_root(
    place: str, control: bool, meant_root: str, tmp_path: Path
) -> None:
    root, link = Path(os.path.realpath(tmp_path)) / "root", tmp_path / "link"
    forge(root, (1,), [[((0,), (1,))]])
    link.symlink_to(root)
    if control:
        (root / ".ckptd").mkdir()
    there = Path(place.format(root=root, link=link))
    wanted = f"did you mean the root {meant_root.format(root=root)}?" if meant_root else ""
    with pytest.raises(InvalidRequest) if meant_root else nullcontext() as caught:
        check_new_root(there)
    assert (str(caught.value) if caught else "").endswith(wanted)
    (there / ".ckptd").mkdir(parents=True, exist_ok=True)
    told = check_new_root(there)
    assert told.endswith(wanted), "one that exists is only told of"
    assert bool(told) is bool(wanted)


def test_a_prefix_of_a_bucket_may_not_lie_in_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Url("s3", "bucket", ("ckpts",))
    monkeypatch.setattr(locate, "is_root", lambda place: place == root)
    monkeypatch.setattr(locate, "open_root", lambda place: place)
    monkeypatch.setattr(locate, "tags_of", lambda place, job: ["step"] if job == "gpt" else [])
    with pytest.raises(InvalidRequest, match=r"did you mean the root s3://bucket/ckpts, with the"):
        check_new_root(root / "gpt")

    def refused(place: Url) -> bool:
        raise PermissionError(13, "no access to the rest of the bucket")

    monkeypatch.setattr(locate, "is_root", refused)
    assert check_new_root(root / "gpt") == ""


def test_a_path_names_the_highest_attempt_of_its_tag(tmp_path: Path) -> None:
    for attempt in (1, 3, 2):
        forge(tmp_path, (1,), [[((0,), (1,))]], step=7, attempt=attempt)
    forge(tmp_path, (1,), [[((0,), (1,))]], step=70, attempt=9)
    for name in ("step-7", "step-00000007"):
        assert attempts_of(tmp_path / "gpt" / name) == {
            n: f"step-00000007.a000{n}" for n in (1, 2, 3)
        }
        _, job, tag = find_checkpoint(tmp_path / "gpt" / name)
        assert (job, tag) == ("gpt", "step-00000007.a0003")
    assert attempts_of(tmp_path / "gpt" / "best") == attempts_of(tmp_path / "none" / "best") == {}


def test_a_directory_that_is_one_checkpoint_is_found(tmp_path: Path) -> None:
    where = forge(tmp_path, (1,), [[((0,), (1,))]])
    found, _, _ = find_checkpoint(where)
    assert isinstance(found, StandaloneDirectory)


@each_case(
    ("make", "words"),
    [
        (lambda path: None, "^no checkpoint at .*, which is not a directory$"),
        (lambda path: path.mkdir(), "^no checkpoint at .*x$"),
        (
            lambda path: (path.mkdir(), (path / ".metadata").touch()),
            r"is a checkpoint of torch.distributed.checkpoint itself \(\.metadata\): make one .* "
            r"`ckptd import .*/x --out DIR`$",
        ),
        (
            lambda path: (path.mkdir(), (path / "model.safetensors").touch()),
            r"is a checkpoint of Hugging Face \(model\.safetensors\): make one of ckptd from it "
            r"with `ckptd import .*/x --out DIR`$",
        ),
        (
            lambda path: (path.mkdir(), (path / "pytorch_model.bin").touch()),
            r"is a checkpoint of Hugging Face .* `ckptd import .*/x/pytorch_model\.bin --out DIR`$",
        ),
        (
            lambda path: (path.mkdir(), (path / "_CHECKPOINT_METADATA").touch()),
            r"is a checkpoint of Orbax .*: `ckptd import` cannot read it$",
        ),
        (
            lambda path: (path.mkdir(), (path / ".metadata").write_bytes(MARKER)),
            "^no checkpoint at .*x$",
        ),
    ],
)
def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    path = tmp_path / "job" / "x"
    path.parent.mkdir()
    make(path)
    with pytest.raises(NotFound, match=words):
        find_checkpoint(path)


def test_a_path_that_names_two_checkpoints_is_refused(tmp_path: Path) -> None:
    made = forge(tmp_path, (1,), [[((0,), (1,))]], step=7)
    shutil.copytree(made, tmp_path / "gpt" / "step-7")
    with pytest.raises(
        NotFound,
        match=r"^both .*step-7 and .*step-00000007\.a0001 are checkpoints: name the one that you "
        r"mean",
    ):
        find_checkpoint(tmp_path / "gpt" / "step-7")


@each_case(
    ("path", "named"),
    [
        ("root/gpt/best", ("gpt", "best")),
        ("root/gpt", None),
        ("root/gpt/best/deeper", None),
        ("root/.ckptd/pins", None),
        ("elsewhere/gpt/best", None),
        ("root", None),
    ],
)
def test_job_and_tag_of_a_path_in_a_root(
    tmp_path: Path, path: str, named: tuple[str, str] | None
) -> None:
    assert job_and_tag(tmp_path / path, tmp_path / "root") == named


def test_the_command_line_finds_jobs_and_checkpoints_with_and_without_the_attempt(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path / "root")
    job = tmp_path / "root" / "gpt"
    for path, tag in ((job, None), (job / TAG, TAG), (job / "step-00001000", TAG)):
        repository, found, its_tag = find_job_or_checkpoint(path)
        assert (repository.where(), found, its_tag) == (str(tmp_path / "root"), "gpt", tag)
    shutil.copytree(job / TAG, tmp_path / "copy")
    repository, _, _ = find_job_or_checkpoint(tmp_path / "copy")
    assert isinstance(repository, StandaloneDirectory)
    with pytest.raises(NotFound, match="no checkpoint 'step-00009999' of job 'gpt'"):
        find_job_or_checkpoint(job / "step-00009999")


def test_a_path_near_to_checkpoints_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    root = tmp_path / "ckpts"
    write_checkpoint(root)
    (root / ".ckptd").mkdir(exist_ok=True)
    tag = root / "gpt" / TAG
    for path, near in (
        (root, root / "gpt"),
        (tmp_path, root),
        (tag / "part.ckpt", tag),
        (root / "gtp", root / "gpt"),
        (tmp_path / "ckpt", root),
        (tmp_path / "ckpst" / "gpt", root),
    ):
        assert meant(path) == f": did you mean {near}?", path
    (tmp_path / "empty").mkdir()
    assert meant(tmp_path / "empty" / "nothing") == ""
    with pytest.raises(
        NotFound, match=f"^job 'gtp' has no checkpoints in {root}: did you mean {root}/gpt\\?$"
    ):
        find_job_or_checkpoint(root / "gtp")
    with pytest.raises(
        NotFound,
        match=f"^{root} is a root, which holds jobs, and not a job: did you mean {root}/gpt\\?$",
    ):
        find_job_or_checkpoint(root)


def test_a_tag_that_is_misspelt_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    job = tmp_path / "gpt"
    write_checkpoint(tmp_path)
    (job / TAG).rename(job / "best.a0001")
    for typed, near in (("bset", "best"), ("best.a0002", "best.a0001")):
        with pytest.raises(NotFound, match=f"^no .*{typed}'.*: did you mean {job}/{near}\\?$"):
            find_job_or_checkpoint(job / typed)
    with pytest.raises(NotFound, match="lists the checkpoints there$"):
        find_job_or_checkpoint(job / "unlike")


def test_a_job_that_is_misspelt_in_a_url_is_answered_with_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        locate, "object_storage", lambda url: PosixStorage(tmp_path.joinpath(*url.parts))
    )
    write_checkpoint(tmp_path / "runs")
    (tmp_path / "runs" / ".ckptd").mkdir(exist_ok=True)
    (tmp_path / "runs" / ".ckptd" / "id").touch()
    root = Url("s3", "bucket", ("runs",))
    assert meant(root) == meant(root / "gtp") == f": did you mean {root}/gpt?"
    assert meant(root / "unlike") == meant(root / "gpt" / "x") == ""


def test_the_checkpoint_of_another_tool_is_what_a_path_may_mean(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert meant(tmp_path) == (
        f"; it is a checkpoint of Hugging Face (model.safetensors): make one of ckptd from it "
        f"with `ckptd import {tmp_path} --out DIR`"
    )
