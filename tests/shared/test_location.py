"""Tests where a root, a job or a checkpoint is: paths and URLs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.shared.errors import InvalidConfig
from ckptd.shared.location import Url, is_place, is_same, local, located, url_scheme
from tests.support.cases import each_case

BUCKET = Url("s3", "bucket")


@each_case(
    ("root", "scheme"),
    [
        ("s3://bucket/x", "s3"), ("gs://b", "gs"), ("file:///ckpts", "file"), ("S3://B", "S3"),
        (Path("s3://bucket/x"), "s3"), ("/ckpts", ""), ("ckpts", ""), ("./s3://bucket", ""),
        ("/mnt/s3:/x", ""), ("a:b", ""), ("", ""), ("C:/x", ""),
    ],
)  # fmt: skip
def test_url_scheme(root: str | Path, scheme: str) -> None:
    assert url_scheme(root) == scheme


@each_case(
    ("text", "url", "shown"),
    [
        ("s3://bucket", BUCKET, "s3://bucket"),
        ("s3://bucket/", BUCKET, "s3://bucket"),
        (Path("s3://bucket/a/b"), BUCKET / "a" / "b", "s3://bucket/a/b"),
        ("s3a://bucket//a/", BUCKET / "a", "s3://bucket/a"),
        ("GS://b-1.x/a=1/b+c", Url("gs", "b-1.x", ("a=1", "b+c")), "gs://b-1.x/a=1/b+c"),
        ("az://container/ckpts", Url("az", "container", ("ckpts",)), "az://container/ckpts"),
    ],
)
def test_a_url_is_taken_apart_and_written_again(text: str | Path, url: Url, shown: str) -> None:
    assert located(text) == url
    assert (str(url), located(str(url)), located(url), is_place(text)) == (shown, url, url, True)


def test_any_other_text_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert located("ckpts/../x") == tmp_path / "x"
    assert located(tmp_path) == tmp_path
    assert local("x", "out") == Path(os.getcwd()) / "x"


def test_two_paths_to_one_place_are_the_same(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("real")
    assert is_same(link / "root", tmp_path / "real" / "root")
    (tmp_path / "real" / "root").mkdir(parents=True)
    assert is_same(link / "root", tmp_path / "real" / "root")
    assert not is_same(link / "root", tmp_path / "real" / "other")
    assert is_same(BUCKET / "a", BUCKET / "a")
    assert not is_same(BUCKET, tmp_path)


def test_a_url_has_parents_like_a_path() -> None:
    url = BUCKET / "a" / "b"
    assert (url.name, url.key, url.parent, url.parent.parent, BUCKET.parent) == (
        "b",
        "a/b",
        BUCKET / "a",
        BUCKET,
        BUCKET,
    )
    assert url.parents == [BUCKET / "a", BUCKET]
    assert BUCKET.parents == []
    assert (BUCKET.name, url.resolve()) == ("", url)


@each_case(
    ("text", "why"),
    [
        ("hdfs://host/x", "cannot save to; expected a directory, or s3://"),
        ("file:///ckpts", "cannot save to"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://b\x00", "names no bucket"),
        ("s3://bucket/a/../b", r"'\.\.' in 's3://bucket/a/\.\./b' cannot be part of a prefix"),
        ("s3://bucket/a b", "'a b' in"),
        ("s3://bucket/a%2fb", "'a%2fb' in"),
    ],
)
def test_a_url_that_names_no_place_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        located(text)
    assert not is_place(text)


@each_case(
    "text",
    [
        "s3://KEY:SECRET@bucket/x",
        "s3://user:p@SECRET@bucket/x",
        "s3://bucket/x?sig=abc@SECRET",
        "az://container/x?sig=SECRET",
        "s3://bucket/x#SECRET",
        "hdfs://u:SECRET@h/x",
    ],
)
def test_credentials_in_a_url_are_refused_and_never_shown(text: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        located(text)
    assert "SECRET" not in str(caught.value)
    with pytest.raises(InvalidConfig, match="expected a path on this machine") as caught:
        local(text, "out")
    assert "SECRET" not in str(caught.value)
