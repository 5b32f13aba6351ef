"""Reports events to some targets of each kind: commands, servers, and many events."""

from __future__ import annotations

import pytest

from tests.crash import notifications


@pytest.mark.usefixtures("processes")
def test_each_event_is_told_or_named_as_untold() -> None:
    assert notifications.run(14, number=5)[1] == []
    for kind in ("answers", "hangs"):
        assert notifications.many(kind) == []
