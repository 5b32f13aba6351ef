"""Exports a checkpoint into the format of another tool, whole or in part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckptd.agent.convert import dcp_directory, huggingface, safetensors_file, torch_file
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.contents import Contents, Leaf, flat, model_of
from ckptd.agent.convert.formats import FORMATS
from ckptd.agent.convert.output import OnProgress, check_place, continued, published
from ckptd.agent.convert.selection import Selection
from ckptd.agent.read.checkpoint import Checkpoint, opened_of
from ckptd.shared import __version__
from ckptd.shared.errors import InvalidRequest, storage_errors
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Url, local

SHARD = 5_000_000_000
"""The bytes after which an export to "hf" begins another file."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The files and tensors that an export has written, or would write.

    out: the file or directory. tensors, nbytes: the number of tensors and their bytes.
    left_out: the names of the parts without tensors that the format cannot hold, and
    that are therefore not in it. tied: second names of tensors that are stored once,
    each with the name that is stored. files: for "hf", the names of the files.
    """

    out: Path
    tensors: int
    nbytes: int
    left_out: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def export(
    path: str | os.PathLike[str] | Url,
    to: str,
    out: str | os.PathLike[str],
    *,
    which: str | int = "newest",
    only: str = "",
    dtype: torch.dtype | None = None,
    rename: Sequence[tuple[str, str]] = (),
    names: Mapping[str, str] | None = None,
    files: str | os.PathLike[str] | None = None,
    max_shard_size: int = SHARD,
    dry_run: bool = False,
    progress: OnProgress = lambda length: None,
    begin: Callable[[int], None] = lambda nbytes: None,
) -> Exported:
    """Write a checkpoint in the format of another tool, and return what was written.

    path, which: the checkpoint, as for `Checkpoint.open`. to: a key of `FORMATS`. out:
    the new file or directory. It appears only when it is whole, synced and compared
    with what was read. If this process is killed or interrupted, the same call
    continues a directory with the first file that was not finished, as long as `which`
    means the same checkpoint. only: the dotted name of a part of the state, such as
    "model". dtype: the dtype of all floating-point tensors in the export. rename: pairs
    of a regular expression and its replacement, applied to every name in turn. names:
    new names by old ones. files: for "hf", a directory with config.json, tokenizer
    files and the like, which are copied. Without it, those in the checkpoint's
    `user_content` are written. max_shard_size: for "hf", the most bytes of one file
    with several tensors. dry_run: check everything, and write nothing. begin, progress:
    called with all bytes that will be written, and with those that were.

    At any size, this takes the memory of the largest storage and 512 MB. Only a "torch"
    file with sparse tensors is made in memory. Tensors that share a storage share it in
    a "torch" file. Elsewhere tied tensors are stored once ("safetensors", "hf"), and
    others as copies.

    Raises NotFound; AlreadyExists if `out` exists; Busy if another export writes it;
    InvalidRequest for wrong arguments; UnsavableValue for a tensor or a value that the
    format cannot hold, by its name; IntegrityError if the checkpoint is damaged;
    StorageError.
    """
    if to not in FORMATS:
        raise InvalidRequest(f"to: there is no format {to!r}; there are {', '.join(FORMATS)}")
    if max_shard_size < 1:
        raise InvalidRequest(
            f"max_shard_size: {max_shard_size} is too small; expected the bytes of a file, such "
            f"as {SHARD}"
        )
    if files is not None and to != "hf":
        raise InvalidRequest(f"files: an export to {to!r} carries no files; only 'hf' does")
    with storage_errors(f"export {path} to {out}"), Checkpoint.open(path, which) as checkpoint:
        contents = contents_of(opened_of(checkpoint))
        selection = Selection(
            only or (_model_in(contents) if to == "hf" else ""),
            dtype,
            tuple(rename),
            names or {},
        )
        place = local(out, "out")
        checked = _checked(
            contents,
            selection,
            to,
            place,
            None if files is None else Path(files),
            max_shard_size,
        )
        key = (
            _key(checkpoint.manifest, to, selection, max_shard_size) if to in ("dcp", "hf") else ""
        )
        check_place(place, checked.summary.nbytes, key)
        if not dry_run:
            begin(checked.summary.nbytes)
            with continued(place, key) if key else published(place, directory=False) as beside:
                checked.write(beside, progress)
        return checked.summary


@dataclass(frozen=True, slots=True)
class _Checked:
    """An export that has been checked: its summary, and the function that writes it to
    a path.
    """

    summary: Exported
    write: Callable[[Path, OnProgress], object]


def _checked(
    contents: Contents,
    selection: Selection,
    to: str,
    out: Path,
    files: Path | None,
    max_shard_size: int,
) -> _Checked:
    """Check that the format can hold what is selected, and return the export.

    Raises as `export`.
    """
    if to in ("torch", "dcp"):
        tree = selection.of(contents.tree)
        leaves = [leaf for _, leaf in flat(tree) if isinstance(leaf, Leaf)]
        summary = Exported(out, len(leaves), sum(leaf.nbytes for leaf in leaves))
        if to == "torch":
            torch_file.check_values(tree)
            return _Checked(
                summary,
                lambda path, progress: torch_file.write_file(path, tree, contents, progress),
            )
        planned = dcp_directory.Planned(tree)
        return _Checked(
            summary,
            lambda path, progress: dcp_directory.write_directory(path, planned, contents, progress),
        )
    named, left_out = selection.flat(contents.tree)
    kept, tied = safetensors_file.without_ties(named)
    safetensors_file.check(kept)
    nbytes = sum(leaf.nbytes for leaf in kept.values())
    if to == "safetensors":
        metadata = {**tied, "format": "pt"}
        summary = Exported(out, len(kept), nbytes, left_out, tied)
        return _Checked(
            summary,
            lambda path, progress: safetensors_file.write_file(
                path, kept, contents, metadata, progress
            ),
        )
    shards, carried = (
        huggingface.shards_of(kept, max_shard_size),
        huggingface.carried_files(files, contents.user_content, selection.dtype),
    )
    summary = Exported(out, len(kept), nbytes, left_out, tied, [*carried, *shards])
    return _Checked(
        summary,
        lambda path, progress: huggingface.write_directory(
            path, shards, contents, carried, progress
        ),
    )


def _key(manifest: Manifest, *options: object) -> str:
    """Return a key for `continued`: the same options give the same files of the same
    checkpoint.
    """
    return hashlib.sha256(
        repr((manifest.encode(), options, torch.__version__, __version__)).encode()
    ).hexdigest()[:16]


def _model_in(contents: Contents) -> str:
    """Return the dotted name of the part of a state that is the model.

    Raises InvalidRequest if it is not clear which.
    """
    if found := model_of(contents):
        return found
    said = f"the modules {', '.join(contents.modules)}" if contents.modules else "no module"
    raise InvalidRequest(
        f"the state has {said}: choose the part that is the model with `only`, like only='model'"
    )
