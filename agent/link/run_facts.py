"""Tells what a run is, for the documents of its checkpoints: the commit that is checked
out, the command line without its secrets, and the runs of experiment trackers.

Nothing here may fail or take long: a fact that is not known is left out.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

HIDDEN = "***"
"""Stands for a secret."""
_SECRET_NAME = re.compile(
    r"token|secret|passw|api.?key|access.?key|private.?key|auth|credential|cookie|signature",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# Keys are long, and mix letters and digits; names of files, models and dates have marks.
_KEY_LIKE = re.compile(r"(?=[^=]*\d)(?=[^=]*[A-Za-z])[A-Za-z0-9_+-]{20,}={0,2}")
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_OPTION = re.compile(r"-(?!-?$)(?![A-Za-z]*[cm]$).*|-[WX].+")
"""An option of the interpreter, other than -c and -m."""
_MOST = 1024
"""Characters of a fact, as in the documents of a checkpoint."""


def run_facts(script: str) -> dict[str, str]:
    """Return what is known of this run: `commit`, `command`, `wandb` and `mlflow`.

    script: the path of the main script, or "".
    """
    facts = {
        "commit": commit_of(Path(script)) if script else "",
        "command": own_command(),
        "wandb": _wandb_run(),
        "mlflow": _mlflow_run(),
    }
    return {name: _stored(text) for name, text in facts.items() if text}


def commit_of(place: Path) -> str:
    """Return the commit that is checked out where `place` lies in a Git repository, or
    "".

    It does not tell of changes that are not committed. The layout of the files is that
    of gitrepository-layout(5).
    """
    with suppress(OSError, ValueError):
        for parent in (place, *place.parents):
            git = parent / ".git"
            if git.is_file():  # of a worktree or a submodule
                git = parent / git.read_text().removeprefix("gitdir:").strip()
            if (git / "HEAD").is_file():
                return _commit_in(git)
    return ""


def _commit_in(git: Path) -> str:
    head = (git / "HEAD").read_text().strip()
    name = head.removeprefix("ref:").strip()
    if name == head:
        return head if _HASH.fullmatch(head) else ""
    shared = git / "commondir"
    common = git / shared.read_text().strip() if shared.is_file() else git
    if (common / name).is_file():
        found = (common / name).read_text().strip()
        return found if _HASH.fullmatch(found) else ""
    for line in (common / "packed-refs").read_text().splitlines():
        found, _, packed = line.partition(" ")
        if packed == name and _HASH.fullmatch(found):
            return found
    return ""


def own_command() -> str:
    """Return the command line of this run, as `command_of` writes it.

    A child of multiprocessing has the command line of its parent, because its own has
    numbers that differ at each start.
    """
    words = sys.orig_argv
    if any(word.startswith("from multiprocessing.") for word in words):
        words = [sys.executable, *sys.argv]
    return _stored(command_of(words))


def arguments_in(command: str) -> list[str]:
    """Return the words after the script or the module in a command line of Python. Of
    `python -c` these are the program and its words.

    The interpreter, its options and the way to the script may differ between two starts
    of one run.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # it was cut inside quotes
        words = command.split()
    position = 1
    while position < len(words):
        word = words[position]
        if _OPTION.fullmatch(word):
            position += 2 if word in ("-W", "-X", "--check-hash-based-pycs") else 1
            continue
        # `-m MODULE`, possibly behind other flags as in `-um`, or `-c PROGRAM`
        return words[position + (2 if word.startswith("-") and word.endswith("m") else 1) :]
    return []


def command_of(words: Sequence[str]) -> str:
    """Return a command line as a shell would take it, with `HIDDEN` in place of values
    that may be secret: those of options and variables whose names say so, passwords in
    URLs, and words that look like keys.
    """
    return " ".join(map(_quoted, _without_secrets(words)))


def _quoted(word: str) -> str:
    plain = word.replace(HIDDEN, "x")  # the asterisks alone need no quotes
    return word if shlex.quote(plain) == plain else shlex.quote(word)


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = bool(_SECRET_NAME.search(name)) and (bool(equals) or word.startswith("-"))
        if hide and not word.startswith("-"):
            yield HIDDEN
        elif secret and equals:
            yield f"{name}={HIDDEN}"
        else:
            yield "=".join(
                HIDDEN if _KEY_LIKE.fullmatch(part) else part
                for part in _CREDENTIALS.sub(HIDDEN, word).split("=")
            )
        hide = secret and not equals


def _wandb_run() -> str:
    """Return the address of the run of wandb that is active, or its id while offline."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    with suppress(Exception):  # it is another program's, and may change
        return str(run.url or run.id) if run is not None else ""
    return ""


def _mlflow_run() -> str:
    """Return the id of the run of MLflow that is active on this thread."""
    active = getattr(sys.modules.get("mlflow"), "active_run", None)
    with suppress(Exception):
        run = active() if active is not None else None
        return "" if run is None else str(run.info.run_id)
    return ""


def _stored(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()[:_MOST]
