"""Errors of commands become one sentence, or one JSON object, and an exit code."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from ckptd.shared import command
from ckptd.shared import errors as e
from ckptd.shared.command import ask_before_deleting, json_option, speaks
from tests.support.cases import each_case


@each_case(
    ("error", "code"),
    [
        (e.InvalidName("x"), 2), (e.InvalidRequest("x"), 2), (e.InvalidConfig("x"), 2),
        (e.NotFound("x"), 10), (e.Busy("x"), 11), (e.IntegrityError("x"), 13), (e.NewerFormat("x"),
        13), (e.DaemonUnreachable("x"), 14), (e.StorageError("x"), 1),
    ],
)  # fmt: skip
def test_exit_codes(error: e.CkptdError, code: int) -> None:
    assert error.exit_code == code


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (e.NotFound("no such thing"), 10, "no such thing"),
        (PermissionError(13, "Permission denied", "/x"), 1, "Permission denied"),
    ],
)
def test_an_error_is_one_sentence_or_one_object(error: Exception, code: int, words: str) -> None:
    @click.command()
    @json_option
    @speaks
    def verb(as_json: bool) -> None:
        raise error

    text = CliRunner().invoke(verb, [])
    assert text.exit_code == code
    assert text.output.startswith("ckptd: ")
    assert words in text.output
    assert text.output.count("\n") == 1
    found = json.loads(CliRunner().invoke(verb, ["--json"]).output)
    assert (found["exit"], words in found["error"]["message"]) == (code, True)


def test_ctrl_c_has_the_exit_code_of_shells() -> None:
    @click.command()
    @speaks
    def verb() -> None:
        raise KeyboardInterrupt

    assert CliRunner().invoke(verb, []).exit_code == 130


def test_without_a_terminal_a_large_deletion_is_refused() -> None:
    @click.command()
    @json_option
    @speaks
    def verb(as_json: bool) -> None:
        ask_before_deleting("everything", ["a", "b"], "or nothing", never=as_json)
        click.echo("deleted")

    for options in ([], ["--json"]):
        found = CliRunner().invoke(verb, options, input="y\n")
        assert found.exit_code == 2
        assert (
            "nothing was deleted, because this would delete everything: pass --yes to delete that "
            "all the same, or nothing" in found.output
        )


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("n\n", 1), ("", 1)])
def test_on_a_terminal_the_answer_decides(
    monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr(command, "on_terminal", lambda: True)

    @click.command()
    @speaks
    def verb() -> None:
        ask_before_deleting("everything", ["a", "b"], "or nothing", never=False)
        click.echo("deleted")

    found = CliRunner().invoke(verb, [], input=answer)
    assert (found.exit_code, found.stdout) == (code, "" if code else "deleted\n")
    assert found.stderr.startswith("a\nb\nDelete everything? [y/N]: ")
