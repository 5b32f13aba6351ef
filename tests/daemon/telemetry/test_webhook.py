"""Tests what a webhook may answer, and for how long it can hold a report."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from ckptd.daemon.telemetry import webhook


@contextmanager
def playing(play: Callable[[socket.socket], None]) -> Iterator[str]:
    """Context manager. Yields the URL of a server that plays each connection so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client, suppress(OSError):
                        client.recv(1 << 16)
                        play(client)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_webhook_that_answers_line_by_line_is_given_up_in_time() -> None:
    over = threading.Event()

    def drip(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\n")
        while not over.wait(0.05):
            client.sendall(b"X-Wait: longer\r\n")

    with playing(drip) as url:
        with pytest.raises(TimeoutError, match=r"^no answer within 0.3 s$"):
            webhook.call(url, b"{}", 0.3)
        over.set()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "its answer is not HTTP: BadStatusLine('SSH-2.0-OpenSSH_9.2"),
        (b"", "Remote end closed connection without response"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/login\r\n\r\n",
            "it answers 302 and names 'http://127.0.0.1:1/login': set on_event to the URL that "
            "takes the report",
        ),
    ],
)
def test_an_answer_that_does_not_take_the_report_is_an_error(answer: bytes, words: str) -> None:
    with (
        playing(lambda client: client.sendall(answer)) as url,
        pytest.raises(OSError, match=f"^{re.escape(words)}"),
    ):
        webhook.call(url, b"{}", 60.0)
