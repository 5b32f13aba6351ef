"""Tests names: which are allowed, how each is built, and that nothing else parses."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared import names
from ckptd.shared.errors import InvalidName
from tests.shared.samples import steady
from tests.support.cases import each_case

NAME = string.ascii_letters + string.digits + "._-"
NONCE = bytes(range(16))
HEX = "000102030405060708090a0b0c0d0e0f"
GOOD = ["a", "0", "gpt", "GPT-2_final.v1", "a" * 128, "7.", "x--", "newest", "manifest.json"]
BAD = [
    "", ".", "..", ".hidden", "-x", "_x", "../x", "a/b", "/abs", "a\\b", "a "
        "b", "a\0", "gpt\n", "\ngpt", "%2e%2e", "é", "e\u0301",
    "a" * 129, "\u202egpt", "gpt\u200b", "\uff11\uff12", "a:b", "lost+found", "a\t", "~x", "CON:",
    "x" * 300,
]  # fmt: skip


@each_case("name", GOOD)
def test_check_name_returns_what_may_be_a_name(name: str) -> None:
    assert names.check_name("job", name) == name
    assert names.check_user_tag(name) == name


@each_case("name", BAD, ids=ascii)
@each_case("kind", ["job", "tag"])
def test_check_name_refuses_in_one_sentence(kind: str, name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        names.check_name(kind, name)
    text = str(caught.value)
    assert text.startswith(f"{kind} ")
    assert "\n" not in text
    assert "\0" not in text
    assert len(text) < 250


@each_case("name", [None, 3, b"gpt", Path("gpt"), ["gpt"]], ids=repr)
def test_check_name_refuses_other_types(name: object) -> None:
    with pytest.raises(InvalidName, match="cannot be a name"):
        names.check_name("job", name)  # type: ignore[arg-type]


def test_invalid_names_are_also_value_errors() -> None:
    with pytest.raises(ValueError):
        names.check_name("job", "..")


@steady
@given(st.text(NAME, min_size=1, max_size=128))
def test_a_name_of_letters_and_digits_is_one_component_of_a_path(name: str) -> None:
    if name[0] in "._-":
        with pytest.raises(InvalidName):
            names.check_name("job", name)
    else:
        assert names.check_name("job", name) == name
        assert Path("/root", name).parts == ("/", "root", name)


@steady
@given(
    st.text(NAME, max_size=20),
    st.sampled_from(string.punctuation.translate(str.maketrans("", "", "._-")) + " \n")
    | st.characters(exclude_characters=NAME),
    st.text(NAME, max_size=20),
)
def test_a_name_with_any_other_character_is_refused(
    before: str, character: str, behind: str
) -> None:
    with pytest.raises(InvalidName):
        names.check_name("job", f"a{before}{character}{behind}")


@pytest.mark.parametrize("tag", ["step-1", "step-00001000", "step-", "step-best"])
def test_user_tags_may_not_look_like_those_of_ckptd(tag: str) -> None:
    with pytest.raises(InvalidName, match="made by ckptd"):
        names.check_user_tag(tag)
    assert names.check_name("job", tag) == tag


def test_a_new_tag_may_not_be_newest_and_an_old_one_may() -> None:
    with pytest.raises(InvalidName, match="^tag 'newest' cannot be used: it means the newest"):
        names.check_new_tag("newest")
    with pytest.raises(InvalidName, match="made by ckptd"):
        names.check_new_tag("step-1")
    assert names.check_new_tag("newest-1") == "newest-1"
    assert names.check_user_tag("newest") == "newest"


@each_case(
    ("step", "tag", "attempt", "directory", "stem"),
    [
        (1000, None, 2, "step-00001000.a0002", "step-00001000"),
        (0, None, 1, "step-00000000.a0001", "step-00000000"),
        (123456789, None, 12345, "step-123456789.a12345", "step-123456789"),
        (
            10**18 - 1,
            None,
            10**9 - 1,
            "step-999999999999999999.a999999999",
            "step-999999999999999999",
        ),
        (5, "best", 3, "best.a0003", "best"),
        (None, "best.a0001", 2, "best.a0001.a0002", "best.a0001"),
    ],
)
def test_tag_directories(
    step: int | None, tag: str | None, attempt: int, directory: str, stem: str
) -> None:
    assert names.tag_directory(step, tag, attempt) == directory
    assert names.parse_tag_directory(directory) == names.TagName(
        stem, None if tag is not None else step, attempt
    )


@steady
@given(st.integers(0, 10**18 - 1), st.integers(0, 10**9 - 1))
def test_tag_directories_of_steps_round_trip(step: int, attempt: int) -> None:
    built = names.tag_directory(step, None, attempt)
    assert names.parse_tag_directory(built) == names.TagName(f"step-{step:08d}", step, attempt)


@steady
@given(
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z").filter(
        lambda t: not t.startswith("step-")
    ),
    st.integers(0, 10**9 - 1),
)
def test_tag_directories_of_users_round_trip(tag: str, attempt: int) -> None:
    assert names.parse_tag_directory(names.tag_directory(None, tag, attempt)) == (
        names.TagName(tag, None, attempt)
    )


@each_case(
    "name",
    [
        "", "gpt", "step-00001000", "step-00001000.a1", "step-00001000.a0002.tmp",
        "step-00001000.a0002\n", ".a0001", "-x.a0001", "step-00001000.A0002",
        "step-00001000.a1234567890", "lost+found", "a/b.a0001", "x" * 129 + ".a0001", "newest",
        "newest.tmp", "best.a\u0661\u0662\u0663\u0664", "best.a\uff11\uff12\uff13\uff14",
    ],
    ids=ascii,
)  # fmt: skip
def test_other_names_do_not_parse_as_a_tag_directory(name: str) -> None:
    assert names.parse_tag_directory(name) is None


@each_case(
    "name",
    [
        "best.a00002",
        "step-00001000.a000000002",
        "step-000001000.a0002",
        "step-1.a0002",
        "step-.a0002",
        "step-x.a0002",
    ],
)
def test_a_tag_directory_that_would_not_be_built_does_not_parse(name: str) -> None:
    """The first would be second names of one checkpoint, and the others user tags that
    `check_user_tag` refuses.
    """
    assert names.parse_tag_directory(name) is None


def test_part_files() -> None:
    assert names.part_file(0, NONCE) == f"rank-00000.{HEX}.ckpt"
    assert names.part_file(123456, NONCE) == f"rank-123456.{HEX}.ckpt"
    assert names.parse_part_file(f"rank-00007.{HEX}.ckpt") == (7, NONCE)


def test_data_files_belong_to_their_part() -> None:
    data = names.part_file(7, NONCE, 12)
    assert data == f"rank-00007.{HEX}.0012.ckpt"
    assert names.part_file(7, NONCE, 12345) == f"rank-00007.{HEX}.12345.ckpt"
    assert names.parse_part_file(data) is None
    assert (
        names.part_of(data) == names.part_of(names.part_file(7, NONCE)) == names.part_file(7, NONCE)
    )
    assert names.is_standalone_file(data)


@each_case("number", ["0000", "1", "012", "00012", "-001", "1234567890", "000x", ""])
def test_other_names_do_not_parse_as_a_data_file(number: str) -> None:
    assert names.part_of(f"rank-00007.{HEX}.{number}.ckpt") is None
    assert not names.is_standalone_file(f"rank-00007.{HEX}.{number}.ckpt")


def test_a_manifest_or_marker_under_publication_names_its_part() -> None:
    for name, nonce in (
        (f"manifest.json.{HEX}.tmp", HEX),
        (f".metadata.{HEX}.tmp", HEX),
        (f"notes.{HEX}.tmp", None),
        (".metadata", None),
    ):
        assert names.publisher_of(name) == nonce
        assert names.is_standalone_file(name) == (nonce is not None)


@steady
@given(st.integers(0, (1 << 24) - 1), st.binary(min_size=16, max_size=16))
def test_part_files_round_trip(rank: int, nonce: bytes) -> None:
    assert names.parse_part_file(names.part_file(rank, nonce)) == (rank, nonce)


@each_case(
    "name",
    [
        "rank-0.ckpt", f"rank-0000.{HEX}.ckpt", f"rank-00000.{HEX.upper()}.ckpt",
        f"rank-00000.{HEX[:-1]}.ckpt", f"rank-00000.{HEX}.ckpt.tmp", f"rank-00000.{HEX}.ckpt\n",
        f"../rank-00000.{HEX}.ckpt", f"rank--0001.{HEX}.ckpt",
        f"rank-\u0661\u0661\u0661\u0661\u0661.{HEX}.ckpt", f"rank-000001.{HEX}.ckpt",
    ],
    ids=ascii,
)  # fmt: skip
def test_other_names_do_not_parse_as_a_part_file(name: str) -> None:
    assert names.parse_part_file(name) is None


def test_attempt_files() -> None:
    assert names.attempt_file(2) == "a0002"
    assert names.attempt_file(123456) == "a123456"
    for attempt in (0, 1, 9999, 10000, 10**9 - 1):
        assert names.parse_attempt_file(names.attempt_file(attempt)) == attempt


@each_case(
    "name",
    [
        "",
        "a",
        "a1",
        "a001",
        "0001",
        "a0001.tmp",
        "a1234567890",
        "a-001",
        "a0001\n",
        "a\u0661\u0661\u0661\u0661",
        "a00001",
    ],
    ids=ascii,
)
def test_other_names_do_not_parse_as_an_attempt_file(name: str) -> None:
    assert names.parse_attempt_file(name) is None


def test_journal_files() -> None:
    assert names.journal_file(1) == "0000000000000001.log"
    assert names.journal_file((1 << 64) - 1) == "ffffffffffffffff.log"
    assert names.parse_journal_file("00000000000000ff.log") == 255
    for name in (
        "1.log",
        "0000000000000001.log.tmp",
        "0000000000000001.torn",
        "000000000000000G.log",
        "00000000000000FF.log",
        "x0000000000000001.log",
    ):
        assert names.parse_journal_file(name) is None


def test_segment_files() -> None:
    name = names.new_segment_file()
    assert names.is_segment_file(name)
    assert len(name) == 36
    assert name != names.new_segment_file()
    for other in ("x.seg", name + ".tmp", name.upper(), name[1:], f"a{name}", name + "\n"):
        assert not names.is_segment_file(other)


def test_nonces_are_128_random_bits() -> None:
    found = {names.new_nonce() for _ in range(100)}
    assert len(found) == 100
    assert {len(nonce) for nonce in found} == {16}
