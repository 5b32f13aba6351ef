"""Object stores for tests: one in the memory of the process, and real servers of the S3
protocol.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.shared import names
from ckptd.shared.location import Url
from tests.support import tiers
from tests.support.daemons import Home, home
from tests.support.ports import free_ports

KEY, SECRET, REGION = "AKTEST", "SKTEST", "us-east-1"
_SECONDS = 60


def program(name: str) -> str | None:
    """Return the path of a server that is installed beside this Python or on PATH, or
    None.
    """
    return shutil.which(
        name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    )


@dataclass(frozen=True)
class Server:
    """A running server. Its buckets are made with `make_bucket`."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which ckptd and the AWS tools find the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION,
        }  # fmt: skip


@contextmanager
def seaweed(place: Path) -> Iterator[Server]:
    """Run SeaweedFS with its data below `place`."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "s3.json").write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": "test",
                        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                    }
                ]
            }
        )
    )
    servers = ("s3", "filer", "master", "volume")
    ports = dict(
        zip(
            [f"{name}.port{kind}" for name in servers for kind in ("", ".grpc")],
            free_ports(8),
            strict=True,
        )
    )
    weed = program("weed")
    assert weed is not None
    arguments = [
        weed, "-logtostderr=false", f"-logdir={place}",
        "mini", f"-dir={place}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false",
        "-webdav=false", "-master.telemetry=false",
        f"-s3.config={place / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    try:
        with _running(arguments, place, ports["s3.port"]) as server:
            yield server
    finally:
        # The servers of one process talk through sockets there, and do not remove them.
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@contextmanager
def rclone(place: Path, remote: str = "") -> Iterator[Server]:
    """Run `rclone serve s3`, which ignores preconditions and answers ranges in its own
    way.

    Its buckets are in `remote`, or else directories of `place`.
    """
    place.mkdir(parents=True, exist_ok=True)
    (port,), found = free_ports(1), program("rclone")
    assert found is not None
    keys = ["--auth-key", f"{KEY},{SECRET}"]
    arguments = [
        found,
        "serve",
        "s3",
        remote or str(place),
        "--addr",
        f"127.0.0.1:{port}",
        "--vfs-cache-mode",
        "off",
        *keys,
    ]
    with _running(arguments, place, port) as server:
        yield server


def memory(place: Path) -> AbstractContextManager[Server]:
    """Run `rclone serve s3` with all objects in its memory."""
    return rclone(place, ":memory:")


@contextmanager
def in_environment(server: Server) -> Iterator[None]:
    """Context manager.

    Puts the variables by which ckptd finds the server into the environment of this
    process.
    """
    before = {name: os.environ.get(name) for name in server.environ}
    os.environ.update(server.environ)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def home_in(server: Server) -> Iterator[Home]:
    """Context manager.

    Yields a home whose root is a new prefix in the bucket of the server.
    """
    with home() as place, in_environment(server):
        place.root = Url("s3", "bucket", (names.new_nonce().hex(),))  # type: ignore[assignment]
        place.environ = server.environ
        yield place


@contextmanager
def _running(arguments: list[str], place: Path, port: int) -> Iterator[Server]:
    log = place.parent / f"{place.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=output, cwd=place, start_new_session=True
        )
    server = Server(port, process)
    try:
        until = time.monotonic() + _SECONDS
        while not _answers(server):
            alive = process.poll() is None and time.monotonic() < until
            assert alive, log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(server: Server) -> bool:
    try:
        _request(server, "GET", "/")
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True


def make_bucket(server: Server, name: str) -> None:
    until = time.monotonic() + _SECONDS
    while True:
        try:
            _request(server, "PUT", f"/{name}")
            return
        except urllib.error.HTTPError as error:
            if error.code < 500 or time.monotonic() > until:
                raise
            time.sleep(0.2)


def _request(server: Server, method: str, path: str) -> bytes:
    """Make a signed request of the S3 protocol, as "Signature Version 4" of the AWS
    documentation says.
    """
    host, now = f"127.0.0.1:{server.port}", datetime.datetime.now(datetime.UTC)
    stamp, day, empty = (
        now.strftime("%Y%m%dT%H%M%SZ"),
        now.strftime("%Y%m%d"),
        hashlib.sha256(b"").hexdigest(),
    )
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": stamp}
    signed, scope = ";".join(headers), f"{day}/{REGION}/s3/aws4_request"
    request = "\n".join(
        [
            method,
            path,
            "",
            *(f"{name}:{value}" for name, value in headers.items()),
            "",
            signed,
            empty,
        ]
    )
    text = "\n".join(
        ["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()]
    )
    key = f"AWS4{SECRET}".encode()
    for part in (day, REGION, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={signed}, Signature={signature}"
    )
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{host}{path}", method=method, headers=headers), timeout=10
    ) as answer:
        body: bytes = answer.read()
        return body


KINDS: dict[str, tuple[Callable[[Path], AbstractContextManager[Server]], str]] = {
    "seaweed": (seaweed, "weed"),
    "rclone": (rclone, "rclone"),
    "memory": (memory, "rclone"),
}
"""The kinds of servers: the function that runs one, and the program that must be
installed.
"""


class Servers:
    """The servers that tests have asked for, each with the bucket "bucket".

    A test is skipped if its server is not installed.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._running: dict[str, Server] = {}
        self._held = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def get(self, kind: str) -> Server:
        """Return the running server of a kind, one of `KINDS`."""
        if kind not in self._running:
            start, needs = KINDS[kind]
            if program(needs) is None:
                pytest.skip(f"{needs} is not installed")
            with tiers.shared():
                self._running[kind] = self._held.enter_context(start(self._place / kind))
            make_bucket(self._running[kind], "bucket")
        return self._running[kind]
