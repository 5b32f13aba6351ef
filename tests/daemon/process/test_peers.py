"""Tests that a peer is the process at the other end of a socket, and that its
descriptors are closed.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from ckptd.daemon.process import peers
from ckptd.daemon.process.peers import Peer, is_stopped
from tests.support.daemons import holds

CHILD = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    "sys.stdin.read()"
)


@pytest.mark.usefixtures("processes")
def test_a_peer_is_the_process_that_connected_and_its_pidfd_tells_of_its_death(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        begun = time.time()
        command = [sys.executable, "-c", CHILD, str(tmp_path / "socket")]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            connection, _ = listener.accept()
            with connection:
                peer = Peer(connection)
                assert (peer.pid, peer.uid, str(peer), peer.lacks_descriptor) == (
                    child.pid,
                    os.geteuid(),
                    f"pid {child.pid}",
                    False,
                )
                assert abs(peer.started() - begun) < 60
                watch = peer.watch()
                peer.close()
                peer.close()
                assert select.select([watch], [], [], 0) == ([], [], [])
                child.kill()
                child.wait()
                assert select.select([watch], [], [], 60)[0] == [watch]
                os.close(watch)
                assert peer.started() == 0.0  # it is dead


def test_a_peer_without_a_pidfd_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(socket.socket):
        def getsockopt(self, level: int, name: int, size: int = 0) -> bytes:  # type: ignore[override]
            if name == peers.SO_PEERPIDFD:
                raise OSError(92, "Protocol not available")
            return super().getsockopt(level, name, size)

    left, right = socket.socketpair()
    with Deaf(fileno=left.detach()) as deaf, right:
        for number, lacks in ((errno.ESRCH, False), (errno.EMFILE, True)):
            monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=OSError(number, "no")))
            peer = Peer(deaf)
            assert (peer.watch(), peer.lacks_descriptor) == (-1, lacks)
            peer.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", [None, signal.SIGSTOP])
def test_a_process_is_known_to_be_stopped(number: signal.Signals | None) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            if number is not None:
                process.send_signal(number)
            assert holds(lambda: is_stopped(process.pid) == (number is not None), 60)
        finally:
            process.kill()
    assert not is_stopped(process.pid)
