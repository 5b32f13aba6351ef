"""Tests which values a file of torch.save may have. `test_export.py` reads whole files."""

from __future__ import annotations

import decimal
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Checkpoint
from ckptd.agent.convert import torch_file
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.torch_file import check_values, write_file
from ckptd.agent.read.checkpoint import opened_of
from ckptd.shared.errors import IntegrityError, UnsavableValue
from tests.agent.convert.saved import save
from tests.support.cases import each_case


@each_case(
    "value",
    [
        None,
        True,
        3,
        1.5,
        "x",
        b"x",
        [1],
        (1, "a"),
        {"a": 1},
        OrderedDict(a=1),
        Counter("aab"),
        {1, 2},
        1 << 90,
        2j,
    ],
)
def test_plain_values_are_accepted(value: Any) -> None:
    check_values({"x": [value]})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (decimal.Decimal(1), "decimal.Decimal"),
        (slice(1), "builtins.slice"),
        (Path, "builtins.type"),
    ],
)
def test_other_values_are_refused_by_their_names(value: Any, kind: str) -> None:
    with pytest.raises(
        UnsavableValue,
        match=rf"^run\.1\.x: a {kind} cannot be loaded with torch.load\(weights_only=True\)",
    ):
        check_values({"model": {}, "run": [3, {"x": value}]})


def test_a_storage_that_torch_has_not_written_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch_file._places
    monkeypatch.setattr(torch_file, "_places", lambda tree, path: list(right(tree, path))[1:])
    with Checkpoint.open(
        save({"x": torch.ones(2), "y": torch.ones(3)}, tmp_path / "checkpoint")
    ) as checkpoint:
        contents = contents_of(opened_of(checkpoint))
        with pytest.raises(IntegrityError, match="^torch wrote 1 of 2 storages into out$"):
            write_file(tmp_path / "out", contents.tree, contents, lambda length: None)
