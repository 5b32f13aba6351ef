"""Tests which directory holds the state of a daemon, by default and with
CKPTD_STATE_DIR.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.shared import names
from ckptd.shared.system.state_directory import (
    configured_state_dir,
    default_state_dir,
    state_directory,
)


def test_systemd_comes_first() -> None:
    assert default_state_dir(
        {"STATE_DIRECTORY": "/var/lib/ckptd/alice:/other", "HOME": "/home/alice"}
    ) == Path("/var/lib/ckptd/alice")


def test_root_uses_the_directory_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_state_dir({"HOME": "/root"}) == Path("/var/lib/ckptd")


def test_another_user_uses_a_directory_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert default_state_dir({"HOME": str(tmp_path)}) == tmp_path / ".local" / "state" / "ckptd"
    assert (
        default_state_dir({"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"})
        == tmp_path / ".local" / "state" / "ckptd"
    )
    assert (
        default_state_dir({"HOME": str(tmp_path), "XDG_STATE_HOME": f"{tmp_path}/xdg"})
        == tmp_path / "xdg" / "ckptd"
    )


@pytest.mark.parametrize("home", [{}, {"HOME": "/proc/nowhere"}, {"HOME": "relative"}])
def test_without_a_home_the_default_is_in_var_tmp(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(
        os, "access", lambda path, mode, **options: not str(path).startswith("/proc")
    )
    assert str(default_state_dir(home)).startswith("/var/tmp/ckptd-12345")


def test_a_home_that_this_user_cannot_see_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run as another user with the home of root."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    (tmp_path / "home").mkdir(mode=0o700)
    os.seteuid(12345)
    try:
        assert str(default_state_dir({"HOME": str(tmp_path / "home" / "inner")})).startswith(
            "/var/tmp/ckptd-12345"
        )
    finally:
        os.seteuid(0)


def test_the_environment_variable_names_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTD_STATE_DIR", "here")
    assert configured_state_dir() == tmp_path / "here"
    monkeypatch.delenv("CKPTD_STATE_DIR")
    assert configured_state_dir() == default_state_dir()


def test_a_root_has_a_directory_for_each_host_and_real_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    first = state_directory(tmp_path, tmp_path / "root")
    assert (
        first
        == state_directory(tmp_path, tmp_path / "link")
        != state_directory(tmp_path, tmp_path / "other")
    )
    monkeypatch.setattr(names, "host", lambda: "another-host")
    assert state_directory(tmp_path, tmp_path / "root") == tmp_path / "another-host" / first.name
