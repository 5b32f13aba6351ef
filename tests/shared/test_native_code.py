"""Tests that an installation without native code says so: once in a process, and in the
version.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands import cli, doctor
from ckptd.daemon.commands.doctor_check import OK, WARNING
from ckptd.shared import __version__, native_code
from tests.support.daemons import Daemon, home


@pytest.fixture(autouse=True)
def _told_anew() -> Iterator[None]:
    native_code.warn_once.cache_clear()
    yield
    native_code.warn_once.cache_clear()


def _without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # the import of such a module fails


def test_an_installation_without_native_code_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _without(monkeypatch, *native_code._MODULES)
    for _ in range(2):
        native_code.warn_once(logging.getLogger("ckptd"))
    (line,) = caplog.messages
    assert line == native_code.problem()
    assert "without its native code (_planes, _delta, _huffman, _non_finite)" in line
    assert "install a C compiler" in line


def test_one_module_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "ckptd.shared.codecs._delta")
    assert native_code.missing() == ["_delta"]
    assert "(_delta)" in native_code.problem()


def test_doctor_and_the_version_show_that_native_code_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_code, "_MODULES", ())
    plain = CliRunner().invoke(cli.main, ["--version"])
    assert (plain.exit_code, plain.output) == (0, f"ckptd, version {__version__}\n")
    assert doctor.check_native_code().level == OK
    monkeypatch.setattr(native_code, "_MODULES", ("ckptd.shared.codecs._none",))
    told = CliRunner().invoke(cli.main, ["--version"])
    assert told.output == f"{plain.output}{native_code.problem()}\n"
    check = doctor.check_native_code()
    assert (check.level, check.values) == (WARNING, {"missing": ["_none"]})
    assert check.message == native_code.problem()


def test_with_native_code_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_code, "_MODULES", ("ckptd.shared.units",))
    native_code.warn_once(logging.getLogger("ckptd"))
    assert (native_code.missing(), caplog.messages) == ([], [])


@pytest.mark.usefixtures("processes")
def test_a_daemon_and_an_agent_without_native_code_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.modules.update(dict.fromkeys({native_code._MODULES}))"
    )
    monkeypatch.setattr(native_code, "_MODULES", ("ckptd.shared.codecs._none",))
    with home() as place:
        daemon = Daemon(place, environment={"PYTHONPATH": str(tmp_path)}).wait_ready()
        for job in ("one", "two"):
            Agent(job, socket=place.socket).close()
        daemon.close()
        assert place.log_text().count("native code (_planes, _delta, _huffman, _non_finite)") == 1
    assert [line for line in caplog.messages if "native code" in line] == [native_code.problem()]
