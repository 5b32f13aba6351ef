"""Tests `ckptd page`: whom it serves, and what it says when it cannot."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.page_command import page
from ckptd.daemon.page.access import MAX_TOKEN
from ckptd.daemon.page.document import document
from tests.support.daemons import Daemon, Home

TOKEN = "0123456789abcdef"


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command. Yields its process and the line that it prints."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd.daemon", "page", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def tried(*arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit code and the output of a command that cannot serve."""
    known = {"CKPTD_ROOT": "", "CKPTD_SOCKET": "", "CKPTD_PAGE_TOKEN": "", **environment}
    done: Result = CliRunner(env=known).invoke(page, arguments)
    return done.exit_code, done.output


def test_the_page_of_a_daemon_is_served_until_the_command_is_ended(daemon: Daemon) -> None:
    with serving("--socket", str(daemon.home.socket), "--http", "127.0.0.1:0") as (process, line):
        assert line.startswith(f"the page of {daemon.home.root} is at http://127.0.0.1:")
        url = line.removesuffix("; Ctrl-C ends it\n").rpartition(" ")[2]
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read() == document()
        assert ended(process, signal.SIGTERM) == (0, "")


@pytest.mark.usefixtures("processes")
def test_without_a_daemon_a_root_is_shown_at_a_unix_socket(place: Home) -> None:
    (place.root / ".ckptd").mkdir(parents=True)
    path = place.path / "page"
    with serving("--root", str(place.root), "--http", f"unix:{path}") as (process, line):
        assert line == f"the page of {place.root} is at unix:{path}; Ctrl-C ends it\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        assert ended(process, signal.SIGINT) == (0, "")
    assert not path.exists()


def test_a_busy_port_is_named(place: Home) -> None:
    (place.root / ".ckptd").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert tried("--root", str(place.root), "--http", f"127.0.0.1:{port}") == (
            11,
            f"ckptd: another process listens at 127.0.0.1:{port}: name another port with --http, "
            f"or stop it first\n",
        )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert blocked & {signal.SIGINT, signal.SIGTERM} == set(), "later daemons would have its mask"


def test_no_daemon_and_no_root(place: Home) -> None:
    code, said = tried("--socket", str(place.socket))
    assert (code, str(place.socket) in said, said.count("\n")) == (14, True, 1)
    code, said = tried("--root", str(place.path / "nothing"))
    assert (code, said.count("\n")) == (10, 1)
    assert f"{place.path / 'nothing'} is not a root of ckptd, and no daemon serves it" in said


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0"])
def test_another_address_needs_a_token(place: Home, address: str) -> None:
    code, said = tried("--root", str(place.root), "--http", address)
    assert (code, said) == (
        2,
        f"ckptd: {address} can be reached from other machines, so readers need a token: pass "
        f"--token-file FILE, or serve at 127.0.0.1\n",
    )


@pytest.mark.parametrize("address", ["evil.org:80", "80", "127.0.0.1", "unix:", "127.0.0.1:99999"])
def test_an_address_that_is_none(place: Home, address: str) -> None:
    code, said = tried("--root", str(place.root), "--http", address)
    assert (code, said[:30]) == (2, f"ckptd: --http is {address!r}; expected "[:30])


def test_a_token_file_must_be_secret_and_hold_a_token(place: Home) -> None:
    file = place.path / "token"
    arguments = ("--root", str(place.root), "--token-file", str(file))
    code, said = tried(*arguments)
    assert (code, said) == (
        2, f"ckptd: --token-file {file} cannot be read: No such file or directory\n",
    )  # fmt: skip
    file.write_text(TOKEN)
    file.chmod(0o640)
    code, said = tried(*arguments)
    assert (code, said) == (
        2,
        f"ckptd: --token-file {file} has mode 640, so other users can read it: run `chmod 600 "
        f"{file}`, and use a new token\n",
    )
    file.chmod(0o600)
    for text in ("", "short", "with spaces in the text", "umlaut-\u00e4-in-it", "0" * 513, *(
        f"0123456789{sign}abcdef" for sign in "+#&%=/"
    )):  # fmt: skip
        file.write_text(text)
        code, said = tried(*arguments)
        assert (code, said[: len(f"ckptd: {file} holds no token")]) == (
            2, f"ckptd: {file} holds no token",
        )  # fmt: skip
    for wrong in ("short", "0" * 513):
        assert tried("--root", "/", CKPTD_PAGE_TOKEN=wrong)[1] == (
            "ckptd: CKPTD_PAGE_TOKEN holds no token; expected 16 to 512 of the characters A-Z a-z "
            "0-9 - . _ ~, which an address can hold, as `openssl rand -hex 16` prints them\n"
        )


@pytest.mark.usefixtures("processes")
def test_with_a_token_other_machines_may_read(place: Home) -> None:
    (place.root / ".ckptd").mkdir(parents=True)
    file: Path = place.path / "token"
    token = TOKEN + "-" * (MAX_TOKEN - len(TOKEN))
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    arguments = ("--root", str(place.root), "--token-file", str(file), "--http", "0.0.0.0:0")
    with serving(*arguments) as (_, line):
        assert line.endswith("/, with ?token=TOKEN at the first time; Ctrl-C ends it\n")
        port = int(line.split("http://0.0.0.0:")[1].partition("/")[0])
        url = f"http://127.0.0.1:{port}/api/jobs"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read() == b"[]"
        entry = f"http://127.0.0.1:{port}/?token={token}"
        with urllib.request.urlopen(entry, timeout=60) as answer:
            assert answer.headers["Set-Cookie"].startswith(f"ckptd-page-{port}=")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=60)


def test_the_verb_is_there() -> None:
    assert main.commands["page"] is page
