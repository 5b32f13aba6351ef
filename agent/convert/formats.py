"""Lists the formats of other tools, tells which one a path has, and opens a checkpoint
in any of them, or one of ckptd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.agent.convert import dcp_directory, huggingface, safetensors_file, torch_file
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.contents import Contents
from ckptd.agent.convert.dcp_metadata import METADATA
from ckptd.agent.read.checkpoint import Checkpoint, opened_of
from ckptd.shared.errors import CkptdError, IntegrityError, InvalidRequest, NotFound
from ckptd.shared.location import Location
from ckptd.shared.names import MANIFEST
from ckptd.shared.storage.locate import open_standalone
from ckptd.shared.storage.marker import is_marked

FORMATS = {
    "dcp": "a directory that torch.distributed.checkpoint reads",
    "hf": "a model directory in the Hugging Face layout: safetensors files and their index",
    "safetensors": "one safetensors file",
    "torch": "one file that torch.load reads",
}
"""The formats of exports and imports, each with its description."""


def is_of_another_tool(path: Path) -> bool:
    """Return True if a path is a file, or a directory that a tool other than ckptd has
    written.
    """
    return path.is_file() or _is_of_dcp(path) or huggingface.is_model(path)


def _is_of_dcp(path: Path) -> bool:
    return (path / METADATA).is_file() and not is_marked(open_standalone(path).storage)


def format_of(path: Path, wanted: str = "") -> str:
    """Return the format of a file or directory, a key of `FORMATS`.

    `wanted`: the format that the caller says it has, or "" to detect it.

    Raises NotFound if there is nothing in this format, or in any; InvalidRequest for a
    checkpoint of ckptd, or if there is no format `wanted`; OSError.
    """
    if wanted and wanted not in FORMATS:
        raise InvalidRequest(f"format: there is no {wanted!r}; there are {', '.join(FORMATS)}")
    if not path.exists():
        raise NotFound(f"{path} is not there")
    if not path.is_dir() and not path.is_file():
        raise NotFound(f"{path} is neither a file nor a directory")
    if wanted:
        if (wanted in ("dcp", "hf")) != path.is_dir():
            raise NotFound(
                f"{path} is a {'directory' if path.is_dir() else 'file'}; expected "
                f"{FORMATS[wanted]}"
            )
        if wanted == "dcp" and is_marked(open_standalone(path).storage):
            raise InvalidRequest(
                f"{path} is a checkpoint of ckptd already; its {METADATA} is a marker of ckptd"
            )
        return wanted
    if path.is_file():
        with path.open("rb") as file:
            return "safetensors" if file.read(9)[8:] == b"{" else "torch"
    if _is_of_dcp(path):
        return "dcp"
    if huggingface.is_model(path):
        return "hf"
    if (path / MANIFEST).is_file():
        raise InvalidRequest(f"{path} is a checkpoint of ckptd already")
    raise NotFound(
        f"{path} is in no format that can be imported: it has neither {METADATA}, as a DCP "
        f"checkpoint, nor model.safetensors "
        "or its index, as a model in the Hugging Face layout; name one of its files to import that"
    )


@contextmanager
def one_sentence(path: Location) -> Iterator[None]:
    """Context manager.

    Turns the errors of torch, which have many types, into IntegrityError while a
    foreign source is read.
    """
    try:
        yield
    except (CkptdError, OSError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise IntegrityError(
            f"{path} cannot be read; it is damaged, or holds what torch cannot handle: {said}"
        ) from error


def open_contents(path: Path, format: str) -> tuple[Contents, list[str]]:
    """Return the contents of a file or directory in this format, and the names of the
    files in it that are left out.

    Raises NotFound, UnsavableValue, IntegrityError, OSError.
    """
    if format == "hf":
        return huggingface.read_directory(path)
    read = {
        "dcp": dcp_directory.read_directory,
        "safetensors": safetensors_file.read_file,
        "torch": torch_file.read_file,
    }[format]
    return read(path), []


@contextmanager
def opened(
    path: Location, which: str | int = "newest", format: str = ""
) -> Iterator[tuple[str, Contents, list[str]]]:
    """Context manager.

    Opens a checkpoint in any format. Yields its format, its contents, and the names of
    the files that are left out.

    which: for a job of ckptd, as for `Checkpoint.open`. format: a key of `FORMATS`, or
    "" to detect it. The format of a checkpoint of ckptd is "ckptd", and that of a URL
    too. Raises as `format_of`, `open_contents` and `Checkpoint.open`.
    """
    if isinstance(path, Path) and (format or is_of_another_tool(path)):
        with one_sentence(path):
            format = format_of(path, format)
            contents, left_out = open_contents(path, format)
        yield format, contents, left_out
        return
    with Checkpoint.open(path, which) as checkpoint:
        yield "ckptd", contents_of(opened_of(checkpoint)), []
