"""Calls a webhook with a report. Only a daemon that has a webhook imports this module,
because the library for HTTP takes some MB.
"""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from typing import Any

_SHOWN = 100


class _Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the POST would become a GET without the report."""

    def redirect_request(self, *_: Any) -> None:
        return None


def call(url: str, body: bytes, seconds: float) -> None:
    """Send `body`, a document of JSON, as a POST.

    Raises OSError if the webhook refuses it, answers with a redirect or with something
    other than HTTP, cannot be reached, or has not answered after so many seconds. A
    call that takes too long goes on in its thread, where a slow server can hold it, and
    its outcome is ignored.
    """
    outcome = Future[None]()

    def run() -> None:
        try:
            _call(url, body, 2 * seconds)
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="ckptd-webhook", daemon=True).start()
    try:
        outcome.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def _call(url: str, body: bytes, seconds: float) -> None:
    """Do it on this thread. seconds: the longest time between two bytes."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.build_opener(_Straight).open(request, timeout=seconds):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        if place := error.headers.get("Location"):
            raise OSError(
                f"it answers {error.code} and names {place[:_SHOWN]!r}: set on_event to the URL "
                f"that takes the report"
            ) from None
        raise
    except OSError:
        raise
    except http.client.HTTPException as error:  # except RemoteDisconnected, an OSError
        raise OSError(f"its answer is not HTTP: {repr(error)[:_SHOWN]}") from None
