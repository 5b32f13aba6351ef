"""Tests how tensors are shared out over files, and which files are carried over. `test_export.py` reads whole directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent.convert.contents import Leaf
from ckptd.agent.convert.huggingface import carried_files, is_carried, shards_of
from ckptd.shared.errors import InvalidRequest, NotFound

OTHERS = ("tokenizer\0.json", "../config.json", "dir/config.json", "model.safetensors", "pytorch_model.bin", "train.py", "")
CONFIGS: tuple[Any, ...] = (({}, {"dtype": "bfloat16"}), ({"torch_dtype": "float32", "n": 1}, {"torch_dtype": "bfloat16", "n": 1}))
NESTED = ({"text_config": {"dtype": "float32"}, "x": {}}, {"text_config": {"dtype": "bfloat16"}, "x": {}, "dtype": "bfloat16"})
"""The configuration of a model with parts, before and after a change of dtype."""


def leaves(*sizes: int) -> dict[str, Leaf]:
    return {f"x{n}": Leaf(f"x{n}", torch.uint8, torch.uint8, (size,), (1,), 0, f"x{n}") for n, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), [[]]),
        ((5, 5), [["x0", "x1"]]),
        ((5, 6), [["x0"], ["x1"]]),
        ((50, 1, 50), [["x0"], ["x1"], ["x2"]]),
        ((0, 10, 0, 1), [["x0", "x1", "x2"], ["x3"]]),
    ],
)
def test_no_file_is_longer_than_the_limit_unless_it_has_one_tensor(sizes: tuple[int, ...], expected: list[list[str]]) -> None:
    found = shards_of(leaves(*sizes), 10)
    assert [list(shard) for shard in found.values()] == expected
    if len(expected) == 1:
        assert list(found) == ["model.safetensors"]
    else:
        assert next(iter(found)) == f"model-00001-of-{len(expected):05d}.safetensors"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"])
def test_files_of_a_model(name: str) -> None:
    assert is_carried(name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_not_carried(name: str) -> None:
    assert not is_carried(name)
    assert carried_files(None, {name: "text"}, None) == {}


def test_the_dtype_goes_into_the_configuration(tmp_path: Path) -> None:
    for config, expected in (*CONFIGS, NESTED):
        found = carried_files(None, {"config.json": config}, torch.bfloat16)
        assert json.loads(found["config.json"]) == expected
    assert json.loads(carried_files(None, {"config.json": '{"dtype": "float32"}'}, None)["config.json"]) == {"dtype": "float32"}


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="has none of the files of a model, such as config.json or tokenizer.json$"):
        carried_files(tmp_path, None, None)
    with pytest.raises(InvalidRequest, match="^config.json cannot be read: "):
        carried_files(None, {"config.json": "{"}, torch.float16)
    with pytest.raises(InvalidRequest, match="^config.json is no JSON object$"):
        carried_files(None, {"config.json": "[]"}, None)
    with pytest.raises(InvalidRequest, match="^user_content: merges.txt is a list; expected text or a JSON object$"):
        carried_files(None, {"merges.txt": ["a b"]}, None)
