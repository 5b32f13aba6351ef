"""Tests which checkpoint of a job a step, `newest` and `best:METRIC` choose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptd.shared.errors import InvalidConfig, InvalidRequest, NotFound
from ckptd.shared.location import Url
from ckptd.shared.storage import locate
from ckptd.shared.storage.choice import Chosen, Named, choose, offered
from ckptd.shared.storage.locate import find_job_or_checkpoint
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.system.storage_seam import Entry
from tests.support.cases import each_case
from tests.support.forged import forge

LOSSES = {(1, 100): 0.5, (1, 200): 0.25, (2, 150): 0.125, (2, 200): 0.75}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose second attempt went back to step 150, with losses."""
    root = tmp_path / "root"
    for (attempt, step), loss in LOSSES.items():
        metrics = {"val/loss": loss, "accuracy": 1 - loss}
        forge(root, (1,), [[((0,), (1,))]], step=step, attempt=attempt, metrics=metrics)
    (root / ".ckptd").mkdir()
    return root / "gpt"


def tag(step: int, attempt: int) -> str:
    return f"step-{step:08d}.a{attempt:04d}"


@each_case(
    ("typed", "step", "attempt"),
    [
        ("100", 100, 1),
        ("00000100", 100, 1),
        ("step-100", 100, 1),
        ("200", 200, 2),
        ("newest", 200, 2),
        ("best:val/loss", 150, 2),
        ("best:val/loss:min", 150, 2),
        ("best:val/loss:max", 200, 2),
        ("best:accuracy:max", 150, 2),
    ],
)
def test_a_choice_is_the_place_of_one_checkpoint(
    job: Path, typed: str, step: int, attempt: int
) -> None:
    found = choose(Named.parse(f"{job}/{typed}"))
    assert found == Chosen(job / tag(step, attempt))
    assert find_job_or_checkpoint(found.place)[1:] == ("gpt", tag(step, attempt))


def test_the_option_chooses_as_the_last_component_does(job: Path) -> None:
    assert choose(Named.parse(str(job)), 100) == choose(Named.parse(f"{job}/100"))
    for typed in (f"{job}/newest", f"{job}/best:accuracy", f"{job.parent}", f"{job}/{tag(100, 1)}"):
        with pytest.raises(InvalidRequest, match=rf"^--step 100 .*{typed} is not a job; expected"):
            choose(Named.parse(typed), 100)


@each_case(
    "typed",
    [
        "",
        "gpt",
        "gpt/step-00000100",
        "gpt/step-0000100",
        f"gpt/{tag(100, 1)}",
        "gtp/100",
        "other",
        "9",
    ],
)
def test_a_place_without_a_choice_stays_as_it_is(job: Path, typed: str) -> None:
    place = job.parent / typed
    assert choose(Named.parse(str(place))) == Chosen(place)


def test_a_tag_that_exists_comes_before_a_choice(job: Path) -> None:
    (job / tag(200, 2)).rename(job / "100.a0001")
    assert choose(Named.parse(f"{job}/100")) == Chosen(job / "100")
    (job / "100.a0001").rename(job / tag(200, 2))
    assert choose(Named.parse(f"{job}/100")) != Chosen(job / "100")


def test_newest_is_the_newest_also_if_a_checkpoint_has_that_tag(job: Path) -> None:
    """Earlier versions accepted the tag. Its directory names the checkpoint."""
    (job / tag(100, 1)).rename(job / "newest.a0001")
    assert choose(Named.parse(f"{job}/newest")).place == job / tag(200, 2)
    assert choose(Named.parse(f"{job}/newest.a0001")) == Chosen(job / "newest.a0001")


def test_a_job_whose_name_is_a_number_is_a_job(job: Path) -> None:
    forge(job.parent, (1,), [[((0,), (1,))]], step=3)
    (job / tag(3, 1)).rename(job.parent / "there")
    (job.parent / "199").mkdir()
    (job.parent / "there").rename(job.parent / "199" / tag(3, 1))
    assert choose(Named.parse(f"{job.parent}/199")) == Chosen(job.parent / "199")


def test_a_directory_with_a_colon_in_its_name_is_not_a_choice(tmp_path: Path) -> None:
    place = tmp_path / "x" / "best:of"
    place.mkdir(parents=True)
    assert choose(Named.parse(str(place))) == Chosen(place)


def test_a_user_tag_is_found_by_its_step(job: Path) -> None:
    (job / tag(100, 1)).rename(job / "good.a0001")
    manifest = job / "good.a0001" / "manifest.json"
    assert choose(Named.parse(f"{job}/newest")) == Chosen(job / tag(200, 2), ())
    # The manifest names another tag, so it is damaged, and its step is not known.
    with pytest.raises(NotFound, match="has no checkpoint of step 100: did you mean 150\\?$"):
        choose(Named.parse(f"{job}/100"))
    assert manifest.exists()


def test_damaged_checkpoints_are_skipped_and_named(job: Path) -> None:
    for broken in (tag(200, 2), tag(100, 1)):
        (job / broken / "manifest.json").write_text("{}")
    newest = choose(Named.parse(f"{job}/newest"))
    assert newest.place == job / tag(150, 2)
    (why,) = newest.skipped
    assert "manifest" in why
    best = choose(Named.parse(f"{job}/best:accuracy"))
    assert (best.place, len(best.skipped)) == (job / tag(200, 1), 2)
    assert choose(Named.parse(f"{job}/200")) == Chosen(job / tag(200, 2)), (
        "a step that is named is not replaced by another"
    )
    for broken in (tag(200, 1), tag(150, 2)):
        (job / broken / "manifest.json").write_text("{}")
    for typed in ("newest", "best:accuracy"):
        with pytest.raises(NotFound, match="gpt holds no checkpoint$"):
            choose(Named.parse(f"{job}/{typed}"))


@each_case(
    ("typed", "words"),
    [
        ("120", "job 'gpt' in .*root has no checkpoint of step 120: did you mean 100 or 150?"),
        ("7", "did you mean 100?"),
        ("999", "did you mean 200?"),
        ("best:val/los", "no checkpoint has the metric 'val/los' (their metrics are 'accuracy', "
            "'val/loss'); did you mean 'val/loss'?"),
        ("best:x:y", "no checkpoint has the metric 'x:y'"),
    ],
)  # fmt: skip
def test_a_choice_that_is_not_there_is_answered_with_what_is_near(
    job: Path, typed: str, words: str
) -> None:
    with pytest.raises(NotFound, match=re.escape(words).replace(r"\.\*", ".*")):
        choose(Named.parse(f"{job}/{typed}"))


def test_the_best_of_a_place_that_is_not_a_job_is_refused(job: Path) -> None:
    with pytest.raises(NotFound, match=rf"gtp is not a job that has .*did you mean {job}\?$"):
        choose(Named.parse(f"{job.parent}/gtp/best:accuracy"))


def test_a_metric_whose_name_ends_like_a_mode_comes_first(tmp_path: Path) -> None:
    for step, value in ((1, 2.0), (2, 1.0)):
        forge(tmp_path, (1,), [[((0,), (1,))]], step=step, metrics={"score:max": value})
    for typed, best in (("score:max", 2), ("score:max:max", 1)):
        chosen = choose(Named.parse(f"{tmp_path}/gpt/best:{typed}"))
        assert chosen == Chosen(tmp_path / "gpt" / tag(best, 1))


def test_a_text_is_parsed_without_a_look_at_the_job() -> None:
    assert Named.parse("s3://bucket/runs/gpt/best:val/loss:max") == Named(
        "s3://bucket/runs/gpt/best:val/loss:max",
        Url("s3", "bucket", ("runs", "gpt")),
        "val/loss:max",
    )
    assert Named.parse("/x/gpt/best:").metric == ""
    with pytest.raises(InvalidConfig, match="empty"):
        Named.parse("")


def test_a_relative_text_is_looked_for_in_a_root(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = job.parent
    monkeypatch.chdir(root.parent)
    for typed, place in (
        ("gpt", job),
        ("gpt/100", job / tag(100, 1)),
        ("gpt/best:val/loss", job / tag(150, 2)),
        ("gtp", root / "gtp"),
        ("root/gpt", job),
        ("./gpt", root.parent / "gpt"),
        ("nothing/alike", root.parent / "nothing" / "alike"),
    ):
        assert choose(Named.parse(typed).in_root(root)).place == place, typed
    (root.parent / "gpt").mkdir()
    assert Named.parse("gpt").in_root(root).place == root.parent / "gpt"
    assert Named.parse("gpt/x").in_root(root / "none").place == root.parent / "gpt" / "x"


def test_a_checkpoint_in_an_object_store_is_chosen_as_well(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store(PosixStorage):
        def children(self, prefix: str) -> list[Entry]:
            try:
                return super().children(prefix)
            except FileNotFoundError:
                return []  # an object store has no directories that could be missing

    monkeypatch.setattr(
        locate, "object_storage", lambda url: Store(job.parents[1].joinpath(*url.parts))
    )
    url = Url("s3", "bucket", ("root", "gpt"))
    assert choose(Named.parse(f"{url}/100")).place == url / tag(100, 1)
    assert choose(Named.parse(f"{url}/newest")).place == url / tag(200, 2)
    assert choose(Named.parse(f"{url}/best:val/loss")).place == url / tag(150, 2)
    assert choose(Named.parse(str(url)), 100).place == url / tag(100, 1)
    assert choose(Named.parse(f"{url.parent}/gtp/100")).place == url.parent / "gtp" / "100"


def test_a_shell_is_offered_jobs_and_what_chooses_a_checkpoint(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = sorted(tag(step, attempt) for attempt, step in LOSSES)
    (job / "newest").write_text(f"{tag(200, 2)}\n")
    (job / "step-00000300.a0002").mkdir()  # not committed
    behind = ["newest", "best:accuracy", "best:val/loss", *tags]
    root = job.parent
    assert offered(f"{job}/", None) == [f"{job}/{name}" for name in behind]
    assert offered(f"{job}/be", None) == [f"{job}/{name}" for name in behind[1:3]]
    assert offered(f"{job}/step-00000150", None) == [f"{job}/{tag(150, 2)}"]
    for typed in (
        f"{root}/",
        f"{job}/{tag(150, 2)}/",
        f"{root}/gtp/",
        "s3://bucket/gpt/",
        "/",
        "g",
    ):
        assert offered(typed, None) == [], typed
    monkeypatch.chdir(root.parent)
    assert offered("g", root) == offered("", root) == ["gpt"]
    assert offered("gpt/n", root) == ["gpt/newest"]
    assert offered("", root.parent) == offered("", Url("s3", "bucket")) == [], "they are no roots"


def test_a_shell_is_offered_no_metric_of_a_damaged_checkpoint(job: Path) -> None:
    (job / "newest").write_text(f"{tag(200, 2)}\n")
    (job / tag(200, 2) / "manifest.json").write_text("{}")
    assert offered(f"{job}/n", None) == [f"{job}/newest"]
    assert offered(f"{job}/b", None) == []
