"""A headless Chromium for tests, driven through chromedriver over its HTTP interface."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "there is no Chromium: apt-get install chromium chromium-driver"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
_WAIT_SECONDS = 60.0


class Browser:
    """One window of a browser."""

    def __init__(self, driver: str, session: str) -> None:
        self._base = f"{driver}/session/{session}"

    def call(self, method: str, path: str, **given: Any) -> Any:
        """Return the value that chromedriver answers. Raises AssertionError."""
        return _call(method, f"{self._base}{path}", given)

    def open(self, url: str) -> None:
        self.call("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what the body of a JavaScript function returns."""
        return self.call("POST", "/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element, or "" if there is none."""
        found = self.run("return (document.querySelector(arguments[0]) || {}).innerText", selector)
        return found or ""

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        actions = [
            {"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")
        ]  # fmt: skip
        self.call("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip

    def prefer(self, **features: str) -> None:
        """Set media features, such as `prefers_color_scheme="dark"`."""
        found = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.devtools("Emulation.setEmulatedMedia", features=found)

    def shot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def console(self) -> list[str]:
        """Return the errors and warnings of the page since the last call."""
        return [line["message"] for line in self.call("POST", "/se/log", type="browser")]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until the condition holds, for a minute at most."""
        end = time.monotonic() + _WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"no {what}; the page shows:\n{self.text()[:3000]}"
            time.sleep(0.05)


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a headless Chromium with an empty profile."""
    assert DRIVER is not None
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert driver.stdout is not None
            line = next(line for line in driver.stdout if "successfully on port" in line)
            base = f"http://127.0.0.1:{line.strip().rstrip('.').rpartition(' ')[2]}"
            options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = _call("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
            window = Browser(base, made["sessionId"])
            try:
                yield window
            finally:
                window.call("DELETE", "")
        finally:
            driver.terminate()
            driver.communicate()


def _call(method: str, url: str, given: dict[str, Any]) -> Any:
    body = json.dumps(given).encode() if method == "POST" else None
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()[:2000]) from None
