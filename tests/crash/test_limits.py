"""Tests one shortage of each kind."""

from __future__ import annotations

from tests.crash import limits


def test_after_a_shortage_the_daemon_serves_and_nothing_is_lost() -> None:
    done, problems = limits.run(7, number=20)
    assert problems == []
    tried = {kind for kind in done if not kind.startswith(("  ", "not tried"))}
    absent = [kind for kind in done if kind.startswith("not tried")]
    assert len(tried) + len(absent) == 7
    assert done["files while it works"] == done["files from the start"] == 1
