"""Imports the checkpoint of another tool: writes it, whole or in part, as a directory
that is one checkpoint of ckptd by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckptd.agent.convert.ckptd_directory import PlannedPart, write_directory
from ckptd.agent.convert.contents import Contents, Leaf, flat
from ckptd.agent.convert.formats import format_of, one_sentence, open_contents
from ckptd.agent.convert.output import OnProgress, check_place, published
from ckptd.agent.convert.selection import Selection
from ckptd.shared.codecs import codec as codecs
from ckptd.shared.errors import InvalidRequest, storage_errors
from ckptd.shared.location import local


@dataclass(frozen=True, slots=True)
class Imported:
    """The summary of an import that was made, or would be.

    out: the directory. format: a key of `FORMATS`. tensors, nbytes: the number of
    tensors and their bytes. left_out: names of files beside the tensors that are too
    large for `user_content`.
    """

    out: Path
    format: str
    tensors: int
    nbytes: int
    left_out: list[str] = field(default_factory=list)


def import_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "",
    only: str = "",
    under: str | None = None,
    dtype: torch.dtype | None = None,
    rename: Sequence[tuple[str, str]] = (),
    names: Mapping[str, str] | None = None,
    codec: str = "auto",
    dry_run: bool = False,
    progress: OnProgress = lambda length: None,
    begin: Callable[[int], None] = lambda nbytes: None,
) -> Imported:
    """Write the checkpoint of another tool as one of ckptd, and return what was
    written. The source is not changed.

    path: a file or directory in one of the `FORMATS`. format: a key of `FORMATS`, or ""
    to look which it is. out: the new directory. It appears only when it is whole,
    synced and read back. `Checkpoint.open(out)`, `StorageReader(out)` and `export` read
    it. only: the dotted name of a part of the state, such as "model", which then
    becomes the whole. under: a key that the state is put under. Without it, "hf" is put
    under "model", and other formats under no key. dtype, rename, names: as for
    `export`. codec: a codec of ckptd. dry_run: check everything, and write nothing.
    begin, progress: called with all bytes that will be written, and with those that
    were.

    A model in the Hugging Face layout becomes {"model": tensors}, with its
    configuration and tokenizer in `user_content` as far as there is room. Nothing in
    the source is run: pickles are read with `weights_only=True`, and DCP's `.metadata`
    with an allow-list.

    At any size, this takes the memory of the largest storage and 512 MB. Only a file of
    torch before 1.6, or one with sparse tensors, is read whole.

    Raises NotFound; AlreadyExists if `out` exists; InvalidRequest for wrong arguments;
    InvalidConfig for an unknown codec; IntegrityError if the source is damaged or not
    complete; StorageError; UnsavableValue, naming the value, if only pickled code could
    bring it back or if ckptd cannot save it.
    """
    codecs.encoder(codec)
    source, place = local(path, "path"), local(out, "out")
    if place.is_relative_to(source):
        raise InvalidRequest(
            f"{place} is inside {source}, which an import does not change: choose another place"
        )
    with storage_errors(f"import {path} to {out}"), one_sentence(source):
        format = format_of(source, format)
        contents, left_out = open_contents(source, format)
        planned, tensors = plan(
            contents,
            Selection(only, dtype, tuple(rename), names or {}),
            under_of(format, under),
        )
        found = Imported(place, format, tensors, planned.layout.plan.data_length, left_out)
        check_place(place, found.nbytes)
        if not dry_run:
            begin(found.nbytes)
            with published(place, directory=True) as beside:
                write_directory(beside, planned, contents, codec, progress)
        return found


def under_of(format: str, under: str | None) -> str:
    """Return the key that a state of this format is put under, or "" for none.

    `under`: the key that the caller wants, or None.
    """
    return ("model" if format == "hf" else "") if under is None else under


def plan(contents: Contents, selection: Selection, under: str) -> tuple[PlannedPart, int]:
    """Return the selected contents as a planned part, put under a key unless that is
    "", and the number of their tensors.

    Raises InvalidRequest for the selection, UnsavableValue.
    """
    tree = selection.of(contents.tree)
    tree = {under: tree} if under else tree
    return PlannedPart(tree, contents.user_content), len(
        {leaf.name for _, leaf in flat(tree) if isinstance(leaf, Leaf)}
    )
