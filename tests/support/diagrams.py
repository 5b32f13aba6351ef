"""Draws the life cycles of a snapshot and of a session from the tables that the code
runs. `python -m tests.support.diagrams --write`
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from ckptd.shared.wire import lifecycle, session

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "life-cycles.md"


def snapshot_diagram() -> str:
    lines = ["stateDiagram-v2", "    [*] --> new"]
    for (state, event), after in lifecycle.TRANSITIONS.items():
        lines.append(f"    {state.value} --> {after.value}: {event.value}")
    ends = set(lifecycle.SnapshotState) - {state for state, _ in lifecycle.TRANSITIONS}
    return "\n".join(
        [*lines, *(f"    {state.value} --> [*]" for state in sorted(ends, key=lambda s: s.value))]
    )


def session_diagram() -> str:
    steps: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, request), after in session.REQUESTS.items():
        steps[state.value, after.value].append(request.__name__)
    for (state, good), after in session.ANSWERED.items():
        steps[state.value, after.value].append("its reply" if good else "Error")
    lines = ["stateDiagram-v2", "    [*] --> new"]
    lines += [
        f"    {state} --> {after}: {', '.join(names)}" for (state, after), names in steps.items()
    ]
    return "\n".join([*lines, "    closed --> [*]"])


def page() -> str:
    return f"""# Life cycles

These diagrams are drawn from the tables in `shared/wire/lifecycle.py` and `shared/wire/session.py` by `python -m tests.support.diagrams --write`. A
test fails when they differ.

## A snapshot

`Pending.state` shows *new*, *filling* and *staged* as "staged"; only the daemon knows *writing* and *written*. A snapshot that *failed* to
be saved stays in memory: if no newer snapshot follows, it is tried again.

```mermaid
{snapshot_diagram()}
```

## A session

One connection between agent and daemon. While a request that changes the state is under way, the session is in between: *greeting*,
*beginning*, *leaving*. An `Error` with `re` = 0 closes the session in any state.

```mermaid
{session_diagram()}
```
"""  # noqa: E501


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
