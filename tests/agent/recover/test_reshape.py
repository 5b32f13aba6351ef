from __future__ import annotations

import torch

from ckptd.agent import per_rank
from ckptd.agent.recover.reshape import put_into
from tests.agent.test_resharding import Cursor


def test_values_are_changed_in_place_where_possible() -> None:
    tensor, cursor, inner, items = torch.zeros(3), Cursor(0), Cursor(0), [Cursor(0), 5]
    place = {
        "tensor": tensor,
        "cursor": cursor,
        "deep": {"inner": inner},
        "items": items,
        "gone": 1,
        "n": 1,
    }
    made = {
        "tensor": torch.ones(3),
        "cursor": {"position": 1},
        "deep": {"inner": {"position": 2}, "new": 3},
        "n": 2,
    }
    made["items"] = [{"position": 3}, 6]
    assert put_into(per_rank(place), made) is place
    assert place == {
        "tensor": tensor,
        "cursor": cursor,
        "deep": {"inner": inner, "new": 3},
        "items": items,
        "n": 2,
    }
    assert torch.equal(tensor, torch.ones(3))
    assert [cursor.position, inner.position, items[0].position, items[1]] == [1, 2, 3, 6]  # type: ignore[attr-defined]


def test_values_that_cannot_be_changed_in_place_are_replaced() -> None:
    larger = torch.ones(4)
    assert put_into(torch.zeros(3), larger) is larger
    assert put_into({"a": 1}, [1]) == [1]
    assert put_into([1], [1, 2]) == [1, 2]
    assert put_into(1, "x") == "x"
    assert put_into(None, {"a": 1}) == {"a": 1}
