"""Makes a timeline of snapshots out of the events of a history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptd.daemon.telemetry.background import LoggedEvent

NAMES = ("save.done", "save.failed", "checkpoint.deleted")
"""The events that are about one snapshot."""
_TAKEN = (
    "bytes", "written_bytes", "held_seconds", "durable_seconds", "save_seconds", "chunks",
    "delta_chunks", "chain",
)  # fmt: skip


def snapshots(events: Iterable[LoggedEvent]) -> list[dict[str, Any]]:
    """Return the snapshots that the events tell about, in the order of their first one.

    Each has `job`, `tag`, `step` and `attempt`, and as far as they are known: the Unix
    times `sealed`, `durable`, `failed` and `deleted`, and the facts of its save. One that
    failed and was saved later has both times. A tag that was deleted and then saved once
    more is another snapshot.
    """
    found = list[dict[str, Any]]()
    last = dict[tuple[str, str], dict[str, Any]]()
    for event in events:
        facts = event.facts
        if event.name not in NAMES or "tag" not in facts:
            continue
        key = (event.job, str(facts["tag"]))
        one = last.get(key)
        if one is None or (event.name != "checkpoint.deleted" and "deleted" in one):
            one = last[key] = {"job": key[0], "tag": key[1]}
            found.append(one)
        _add(one, event.name, event.time, facts)
    return found


def _add(one: dict[str, Any], name: str, time: float, facts: Mapping[str, Any]) -> None:
    one |= {key: facts[key] for key in ("step", "attempt", *_TAKEN) if key in facts}
    if name == "save.done":
        one["durable"] = time
        if isinstance(took := facts.get("durable_seconds"), int | float):
            one["sealed"] = time - took
    elif name == "save.failed":
        one["failed"] = time
        one["reason"] = str(facts.get("reason", ""))[:500]
    else:
        one["deleted"] = time
