"""Defines the verbs `ckptd export`, `ckptd import` and `ckptd adopt`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from ckptd.agent.convert.adoption import adopt as adopt_checkpoint
from ckptd.agent.convert.export import SHARD, Exported
from ckptd.agent.convert.export import export as export_checkpoint
from ckptd.agent.convert.formats import FORMATS
from ckptd.agent.convert.importing import import_checkpoint
from ckptd.agent.state.dtypes import torch_dtype
from ckptd.shared.command import (
    CHECKPOINT,
    PLACE,
    chosen,
    json_option,
    progress_bar,
    speaks,
    step_option,
)
from ckptd.shared.errors import InvalidRequest, NotFound
from ckptd.shared.location import Location
from ckptd.shared.storage.choice import Named
from ckptd.shared.units import size_text, some_text

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select a part of a state, and its names and dtype."""
    for option in reversed((
        click.option("--only", default="", metavar="NAME", help='Part of the state, like "model".'),
        click.option("--dtype", metavar="DTYPE", help="Dtype of floating-point tensors, like bf16 "
            "or float32. Default: as saved."),
        click.option("--rename", multiple=True, metavar="REGEX=NEW", help="Rename tensors, as "
            "re.sub does. Repeatable."),
        click.option("--map", "names", type=_FILE, metavar="FILE", help="JSON object with new "
            "names by old ones."),
        click.option("--dry-run", is_flag=True, help="Check everything, and write nothing."),
    )):  # fmt: skip
        command = option(command)
    return command


@click.command(short_help="Write a checkpoint in the format of another tool.")
@click.argument("path", type=CHECKPOINT)
@click.option(
    "--to",
    type=click.Choice(list(FORMATS)),
    required=True,
    help="Format: dcp and hf are directories, the others one file.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="The new file or directory. It must not exist.",
)
@step_option
@_selecting
@click.option(
    "--files",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="For hf: directory with config.json and tokenizer files.",
)
@click.option(
    "--max-shard-size",
    default=SHARD,
    show_default=True,
    help="For hf: most bytes of a file with several tensors.",
)
@json_option
@speaks
def export(
    path: Named,
    to: str,
    out: Path,
    step: int | None,
    only: str,
    dtype: str | None,
    rename: tuple[str, ...],
    names: Path | None,
    dry_run: bool,
    files: Path | None,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write a checkpoint, or a part of it, in the format of another tool.

    PATH is DIR/JOB for the newest checkpoint of a job, DIR/JOB/TAG, or a directory that
    is one checkpoint by itself. --out appears only when it is whole, synced and
    compared with what was read. The checkpoint is not changed. If the command is
    interrupted, the same command continues dcp and hf with the first file that was not
    finished, if PATH still means the same checkpoint. For hf, the default of --only is
    the part "model" of the state, or its only module.
    """
    with progress_bar(out, as_json) as (begin, progress):
        found = export_checkpoint(
            chosen(path, step),
            to,
            out,
            **_selected(only, dtype, rename, names),
            files=files,
            max_shard_size=max_shard_size,
            dry_run=dry_run,
            begin=begin,
            progress=progress,
        )
    click.echo(
        json.dumps(asdict(found) | {"out": str(found.out)}, indent=1)
        if as_json
        else text_of(found, dry_run=dry_run)
    )


@click.command("import", short_help="Make a checkpoint of one that another tool wrote.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="The new directory. It must not exist.",
)
@click.option(
    "--from",
    "format",
    type=click.Choice(list(FORMATS)),
    help="Format of PATH. Default: looked up in PATH.",
)
@_selecting
@click.option(
    "--under",
    metavar="KEY",
    help='Key to put the state under. Default: "model" for hf, none otherwise.',
)
@click.option(
    "--codec",
    default="auto",
    show_default=True,
    metavar="CODEC",
    help="Codec of the new checkpoint.",
)
@json_option
@speaks
def import_(
    path: Path,
    out: Path,
    format: str | None,
    only: str,
    dtype: str | None,
    rename: tuple[str, ...],
    names: Path | None,
    dry_run: bool,
    under: str | None,
    codec: str,
    as_json: bool,
) -> None:
    """Make a checkpoint of ckptd from one that another tool wrote, or from a part of
    it.

    PATH is a file of torch.save, a safetensors file, a model directory in the Hugging
    Face layout, or a directory of torch.distributed.checkpoint. --out appears only when
    it is whole, synced and read back. PATH is not changed, and nothing in it is run.
    """
    with progress_bar(out, as_json) as (begin, progress):
        found = import_checkpoint(
            path,
            out,
            format=format or "",
            under=under,
            **_selected(only, dtype, rename, names),
            codec=codec,
            dry_run=dry_run,
            begin=begin,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(asdict(found) | {"out": str(found.out)}, indent=1))
        return
    did = "would write" if dry_run else "wrote"
    click.echo(
        f"{did} {found.out} from {found.format}: {found.tensors:,d} tensors, "
        f"{size_text(found.nbytes)}"
    )
    _say_left_out(found.left_out)


def _say_left_out(files: list[str]) -> None:
    if files:
        click.echo(f"left out, because it is too large for user_content: {some_text(files)}")


@click.command(short_help="Start a job from a checkpoint that was saved elsewhere.")
@click.argument("path", type=CHECKPOINT)
@click.argument("job", metavar="DIR/JOB", type=PLACE)
@click.option(
    "--step", default=0, show_default=True, metavar="STEP", help="Step of the new checkpoint."
)
@click.option(
    "--tag",
    metavar="TAG",
    help="Tag of the new checkpoint, which retention then keeps. Default: none.",
)
@click.option(
    "--from",
    "format",
    type=click.Choice(list(FORMATS)),
    help="Format of PATH. Default: looked up in PATH.",
)
@_selecting
@click.option(
    "--under",
    metavar="KEY",
    help='Key to put the state under. Default: "model" for hf, none otherwise.',
)
@json_option
@speaks
def adopt(
    path: Named,
    job: Location,
    step: int,
    tag: str | None,
    format: str | None,
    only: str,
    dtype: str | None,
    rename: tuple[str, ...],
    names: Path | None,
    dry_run: bool,
    under: str | None,
    as_json: bool,
) -> None:
    """Save a checkpoint of another tool, or of another job, as the newest checkpoint of
    a job.

    PATH is a checkpoint in one of the formats of `ckptd import`, a directory that is
    one checkpoint of ckptd, or a job of ckptd. The job's next recover() loads the new
    checkpoint, which the daemon saves as it saves snapshots. PATH is not changed, and
    nothing in it is run. No run of the job may be alive.
    """
    source = chosen(path)
    with progress_bar(job, as_json) as (begin, progress):
        found = adopt_checkpoint(
            source,
            job.parent,
            job.name,
            step=step,
            tag=tag,
            format=format or "",
            under=under,
            **_selected(only, dtype, rename, names),
            dry_run=dry_run,
            begin=begin,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(asdict(found) | {"root": str(found.root)}, indent=1))
        return
    made = (
        f"would adopt {source} as step {step} of {job}"
        if dry_run
        else f"adopted {source} as {job / found.tag}"
    )
    click.echo(f"{made}: {found.tensors:,d} tensors, {size_text(found.nbytes)}")
    _say_left_out(found.left_out)


def text_of(found: Exported, *, dry_run: bool = False) -> str:
    """Return what was exported as text for people."""
    lines = [
        f"{'would write' if dry_run else 'wrote'} {found.out}: {found.tensors:,d} tensors, "
        f"{size_text(found.nbytes)}"
    ]
    if found.files:
        lines.append(f"files: {some_text(found.files)}")
    if found.tied:
        lines.append(
            f"stored once: "
            f"{some_text([f'{name} is {first}' for name, first in found.tied.items()])}"
        )
    if found.left_out:
        lines.append(
            f"left out, because the format holds tensors only: {some_text(found.left_out)}"
        )
    return "\n".join(lines)


def _selected(
    only: str, dtype: str | None, rename: tuple[str, ...], names: Path | None
) -> dict[str, Any]:
    """Return the values of the options of `_selecting` as the functions of this package
    take them. Raises InvalidRequest.
    """
    return {
        "only": only,
        "dtype": _dtype(dtype),
        "rename": [_renaming(one) for one in rename],
        "names": _map(names),
    }


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    try:
        return torch_dtype(_SHORT.get(name, name))
    except NotFound:
        raise InvalidRequest(
            f"--dtype {name}: torch has no such dtype; expected one like bf16, fp16, fp32 or "
            f"float8_e4m3fn"
        ) from None


def _renaming(text: str) -> tuple[str, str]:
    pattern, _, new = text.rpartition("=")
    if not pattern:
        raise InvalidRequest(f"--rename {text}: expected REGEX=NEW")
    return pattern, new


def _map(file: Path | None) -> dict[str, str] | None:
    if file is None:
        return None
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"--map {file}: not JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(new, str) for new in found.values()):
        raise InvalidRequest(f"--map {file}: expected a JSON object with new names by old ones")
    return found
