"""Formats what `ckptd status` says about a stage: how much waits for its upload, and
why.
"""

from __future__ import annotations

from typing import Any

from ckptd.shared.units import count_text, size_text, span_text


def stage_lines(stage: dict[str, Any], free: str) -> list[str]:
    """Return the lines about a stage. `free`: the room there, as text."""
    wait = "everything is uploaded"
    if stage["waiting"]:
        age = stage["oldest_age_seconds"]
        since = "" if age is None else f", the oldest for {span_text(age)}"
        wait = (
            f"{count_text(stage['waiting'], 'checkpoint')} "
            f"({size_text(stage['waiting_bytes'])}) "
            f"not uploaded yet{since}"
        )
    elif not stage["root_known"]:
        wait = "the root has not answered yet"
    lines = [f"  stage          {stage['directory']}{free}: {wait}"]
    if one := stage["uploading"]:
        lines.append(
            f"  UPLOADING      {one['job']}/{one['tag']}: "
            f"{100 * one['done_bytes'] // max(one['total_bytes'], 1)} %"
        )
    if stage["problem"]:
        lines.append(f"  NO UPLOAD      {stage['problem']}")
    return [*lines, *(f"  NOT UPLOADED   {name}: {why}" for name, why in stage["refused"].items())]
