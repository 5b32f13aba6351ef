"""Writes and reads a model as a directory in the Hugging Face layout: safetensors files
of bounded size, their index, and other files.

`transformers` reads it with `from_pretrained`, and other loaders read the index or the
single file `model.safetensors`. The layout is that of
https://huggingface.co/docs/transformers/main_classes/model#transformers.PreTrainedModel.save_pretrained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
import torch

from ckptd.agent.convert.contents import Contents, Leaf
from ckptd.agent.convert.output import CheckedFile, OnProgress, finish, result_of
from ckptd.agent.convert.safetensors_file import leaves_of, write_file
from ckptd.agent.convert.stored import StoredBytes, read_stored
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound
from ckptd.shared.formats.bounds import MAX_DEPTH, deeper_than

CARRIED = (
    "config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "*.tiktoken",
    "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.*", "preprocessor_config.json", "processor_config.json", "spiece.model",
)  # fmt: skip
"""The names of the files beside the tensors that a model directory may have."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_CARRIED = 512 << 10
"""The most bytes of the other files of a model that are read into the user's content,
together. Larger files are left out.
"""


def shards_of(leaves: Mapping[str, Leaf], most: int) -> dict[str, dict[str, Leaf]]:
    """Return the files to write, by name, each with its tensors: at most `most` bytes
    in each, unless it is a single tensor.
    """
    shards, size = list[dict[str, Leaf]](), 0
    for name, leaf in leaves.items():
        if not shards or (size + leaf.nbytes > most and shards[-1]):
            shards.append({})
            size = 0
        shards[-1][name] = leaf
        size += leaf.nbytes
    if len(shards) <= 1:
        return {_ONE_FILE: shards[0] if shards else {}}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def write_directory(
    directory: Path,
    shards: Mapping[str, Mapping[str, Leaf]],
    contents: Contents,
    files: Mapping[str, bytes],
    progress: OnProgress,
) -> None:
    """Write the files of a model into a directory of `continued`, the index last.

    Finished shards stay. Raises OSError, IntegrityError.
    """
    for name, data in files.items():
        _write_small(directory / name, data)
    for name, shard in shards.items():
        if result_of(directory / name):
            progress(sum(leaf.nbytes for leaf in shard.values()))
        else:
            finish(write_file(directory / name, shard, contents, {"format": "pt"}, progress), True)
    if len(shards) > 1:
        total = sum(leaf.nbytes for shard in shards.values() for leaf in shard.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, shard in shards.items() for name in shard},
        }
        _write_small(directory / _INDEX, json.dumps(index, indent=2).encode())


def _write_small(path: Path, data: bytes) -> None:
    with CheckedFile(path, lambda length: None) as file:
        file.write(data)


def carried_files(
    directory: Path | None, user_content: Any, dtype: torch.dtype | None
) -> dict[str, bytes]:
    """Return the files to write beside the tensors, by name: those of `directory`, and
    those that `user_content` holds.

    `user_content` may be a dict with names from `CARRIED` as keys, and text or a JSON
    object as values. The files of the directory come first. With `dtype`, config.json
    names it as the dtype of the model and of its parts.

    Raises NotFound if the directory has no such file or does not exist, InvalidRequest
    for a value of another type or if config.json is no JSON object, OSError.
    """
    found = dict[str, bytes]()
    if isinstance(user_content, dict):
        for name, value in user_content.items():
            if isinstance(name, str) and is_carried(name):
                if not isinstance(value, (str, dict)):
                    raise InvalidRequest(
                        f"user_content: {name} is a {type(value).__name__}; expected text or a "
                        f"JSON object"
                    )
                found[name] = (
                    value if isinstance(value, str) else json.dumps(value, indent=2)
                ).encode()
    if directory is not None:
        if not directory.is_dir():
            raise NotFound(f"files: {directory} is not a directory; expected one with config.json")
        names = [
            entry.name
            for entry in os.scandir(directory)
            if is_carried(entry.name) and entry.is_file()
        ]
        if not names:
            raise NotFound(
                f"files: {directory} has none of the files of a model, such as config.json or "
                f"tokenizer.json"
            )
        found.update({name: (directory / name).read_bytes() for name in sorted(names)})
    if "config.json" in found:
        config = _config(found["config.json"])
        if dtype is not None:
            key = {} if any(name in config for name in _DTYPE_KEYS) else {_DTYPE_KEYS[0]: ""}
            found["config.json"] = json.dumps(
                _with_dtype(config | key, str(dtype).removeprefix("torch.")), indent=2
            ).encode()
    return found


def is_carried(name: str) -> bool:
    """Return True for the name of a file that a model directory may have beside its
    tensors.
    """
    return (
        "/" not in name
        and name.isprintable()
        and any(fnmatch(name, pattern) for pattern in CARRIED)
    )


def _config(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise InvalidRequest(f"config.json cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("config.json is no JSON object")
    return found


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration in which this dtype is named wherever one was, also in the
    configurations of the parts of a model.
    """
    nested = {
        key: _with_dtype(value, dtype) for key, value in config.items() if isinstance(value, dict)
    }
    return config | nested | {key: dtype for key in _DTYPE_KEYS if key in config}


def is_model(directory: Path) -> bool:
    """Return True if a directory has the files of a model in this layout."""
    return any((directory / name).is_file() for name in (_ONE_FILE, _INDEX))


def read_directory(directory: Path) -> tuple[Contents, list[str]]:
    """Return the contents of a model, a dict of its tensors, and the names of the files
    beside the tensors that are left out.

    Tensors stay in the files until they are read. The user's content has the other
    files by name, JSON objects as such and other files as text, from the smallest on,
    as far as they have at most `MOST_CARRIED` bytes together.

    Raises NotFound if there is no model, IntegrityError if files are damaged or do not
    agree with the index, OSError.
    """
    if not is_model(directory):
        raise NotFound(
            f"{directory} has no {_ONE_FILE} and no {_INDEX}: no model in the Hugging Face layout"
        )
    leaves, places = dict[str, Leaf](), dict[str, StoredBytes]()
    for file, listed in _files(directory).items():
        found, _, of_file = leaves_of(directory / file)
        if missing := [name for name in listed if name not in found]:
            raise IntegrityError(
                f"{directory / file} lacks {missing[0]}, which the index says is there"
            )
        if twice := [name for name in found if name in leaves]:
            raise IntegrityError(f"{directory}: two files have a tensor with the name {twice[0]!r}")
        leaves |= found
        places |= of_file
    carried, left_out = _read_carried(directory)
    return Contents(
        leaves, lambda leaves: read_stored(leaves, places), user_content=carried or None
    ), left_out


def _files(directory: Path) -> dict[str, list[str]]:
    """Return the names of the files with tensors, each with the names of the tensors
    that the index says are in it.
    """
    if not (directory / _INDEX).is_file():
        return {_ONE_FILE: []}
    files: dict[str, list[str]] = {}
    try:
        for name, file in json.loads((directory / _INDEX).read_bytes())["weight_map"].items():
            files.setdefault(file, []).append(name)
        if not files:
            raise ValueError("it names no tensor")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{directory / _INDEX} cannot be read: {error!r}") from None
    for file in files:
        if not isinstance(file, str) or "/" in file or not file.endswith(".safetensors"):
            raise IntegrityError(
                f"{directory / _INDEX} names the file {file!r}; expected one beside it that ends "
                f"in .safetensors"
            )
        if not (directory / file).is_file():
            raise IntegrityError(
                f"{directory} lacks {file}, which its index names: the directory is not complete"
            )
    return files


def _read_carried(directory: Path) -> tuple[dict[str, Any], list[str]]:
    entries = sorted(
        (entry.stat().st_size, entry.name)
        for entry in os.scandir(directory)
        if is_carried(entry.name) and entry.is_file()
    )
    carried, left_out, room = dict[str, Any](), list[str](), MOST_CARRIED
    for size, name in entries:
        value = _text_or_object((directory / name).read_bytes()) if size <= room else None
        if value is None:
            left_out.append(name)
        else:
            carried[name], room = value, room - size
    return carried, left_out


def _text_or_object(data: bytes) -> Any:
    """Return a file as a JSON object or as text, or None if it is neither."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or deeper_than(found, MAX_DEPTH - 1):
            return text
        same = msgspec.json.decode(msgspec.json.encode(found)) == found
    except (ValueError, RecursionError):  # also for surrogates
        return text
    return found if same else text  # NaN, for example, is no JSON
