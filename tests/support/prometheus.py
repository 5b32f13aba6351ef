"""Runs a real Prometheus for tests, which Debian's package `prometheus` has, and asks it
queries.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.daemons import until
from tests.support.ports import free_ports

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


class Prometheus:
    """A Prometheus that answers at this address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series of an instant query."""
        found = self._get("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def label_values(self, label: str, series: str) -> list[str]:
        """Return the values that a label has in the series of a selector."""
        return [str(value) for value in self._get(f"label/{label}/values", **{"match[]": series})]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=10):
                return True
        except OSError:
            return False

    def _get(self, page: str, **arguments: str) -> Any:
        asked = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(
                f"http://{self._address}/api/v1/{page}?{asked}", timeout=60
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from None


@contextmanager
def prometheus(directory: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """Context manager.

    Run a Prometheus with this configuration, and its data in a directory.
    """
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={file}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        found = Prometheus(address)
        until(found.is_ready, "Prometheus")
        yield found
    finally:
        process.kill()
        process.wait()
