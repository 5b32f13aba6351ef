"""Finds the checkpoint, the job or the root that a path or a URL names.

Every place that a user gives is resolved here.

A place may be a root, the prefix `<root>/<job>` of a job, a checkpoint
`<root>/<job>/<tag>` with or without its attempt, or a prefix anywhere that holds one
checkpoint by itself. A prefix is a directory, or the URL of a prefix in an object
store.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.shared import names
from ckptd.shared.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidConfig,
    InvalidRequest,
    NotFound,
    RemoteError,
    StorageError,
)
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location, Url, located
from ckptd.shared.storage.marker import other_tool
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import (
    StandaloneCheckpoint,
    StandaloneDirectory,
    StandaloneObjects,
)
from ckptd.shared.system import machine
from ckptd.shared.system.fs import FileSystem

if TYPE_CHECKING:  # obstore is imported only for a URL
    from ckptd.shared.storage.object_store import ObjectStorage


def open_root(root: str | os.PathLike[str] | Url, fs: FileSystem | None = None) -> Repository:
    """Return the checkpoints below a root, which need not exist yet.

    `fs` replaces the operating system's file system.

    Raises InvalidConfig if the root is a URL that cannot be used.
    """
    place = located(root)
    return Repository(PosixStorage(place, fs) if isinstance(place, Path) else object_storage(place))


@functools.lru_cache(maxsize=64)
def object_storage(url: Url) -> ObjectStorage:
    """Return the objects below a URL.

    Raises InvalidConfig if obstore is missing, or cannot use the settings in the
    environment.
    """
    try:
        from ckptd.shared.storage.bucket import open_bucket
        from ckptd.shared.storage.object_store import ObjectStorage
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "obstore":
            raise
        raise InvalidConfig(
            f"{url} needs the package obstore: install it with pip install obstore"
        ) from None
    return ObjectStorage(open_bucket(url), machine.root_digest(url))


def open_standalone(place: Location) -> StandaloneCheckpoint:
    """Return the checkpoint that a directory or a prefix outside every root holds by
    itself, or may hold one day.
    """
    return (
        StandaloneDirectory(place)
        if isinstance(place, Path)
        else StandaloneObjects(object_storage(place))
    )


def is_root(place: Location) -> bool:
    """Return True if a daemon has used the place as a root."""
    if isinstance(place, Path):
        return (place / names.CONTROL).is_dir()
    return object_storage(place).exists(f"{names.CONTROL}/{names.IDENTITY}")


def check_new_root(place: Location) -> str:
    """Raise InvalidRequest, with the root that was probably meant, if a root cannot be
    made at a place because it lies in another root, a job or a checkpoint.

    Return that sentence, or "", if the place is a root already. A root in a root hides
    the checkpoints of the outer one: a job in it finds nothing to recover.
    """
    place = place.resolve()
    try:
        meant_root, job = _root_around(place)
    except (OSError, StorageError):  # it may not be read, as a part of a bucket
        return ""
    if meant_root is None:
        return ""
    sentence = (
        f"{place} lies in {f'job {job!r} of ' if job else ''}the root {meant_root}, and a root in "
        f"a root would not have its checkpoints: did you mean the root {meant_root}"
        f"{f', with the job {job!r}' if job else ''}?"
    )
    if not is_root(place):
        raise InvalidRequest(sentence)
    return sentence


def _root_around(place: Location) -> tuple[Location | None, str]:
    """Return the root that a place lies in, and the job there or "".

    A copy of a root may have jobs, and nothing that says that it is a root.
    """
    for above in place.parents:
        if is_root(above):
            job = place.parts[len(above.parts)]
            return above, job if tags_of(open_root(above), job) else ""
    if holds(place, names.MANIFEST) and names.parse_tag_directory(place.name):
        return place.parent.parent, place.parent.name
    repository = open_root(place.parent)
    if is_prefix(place) and any(
        repository.has_manifest(place.name, tag) for tag in tags_of(repository, place.name)
    ):
        return place.parent, place.name
    return None, ""


def is_prefix(place: Location) -> bool:
    """Return True if the place is a directory, or a prefix that has objects."""
    return place.is_dir() if isinstance(place, Path) else bool(object_storage(place).children(""))


def holds(place: Location, name: str) -> bool:
    """Return True if there is a file, a link or an object of this name directly below
    the place.
    """
    return (
        os.path.lexists(place / name)
        if isinstance(place, Path)
        else object_storage(place).exists(name)
    )


def job_and_tag(place: Location, root: Location) -> tuple[str, str] | None:
    """Return the last two components of `<root>/<job>/<tag>`, or None if the place is
    not of this form.
    """
    job = place.parent
    if job.parent != root.resolve() or job == job.parent or job.name.startswith("."):
        return None
    return job.name, place.name


# -- for readers, which open committed checkpoints only


def find_checkpoint(path: Location) -> tuple[Repository, str, str]:
    """Return the repository, the job and the tag directory of the committed checkpoint
    that `path` names.

    `path` is a directory that holds a checkpoint, or `<root>/<job>/<tag>`, which means
    the highest attempt of that tag. Raises NotFound if there is no checkpoint or if
    `path` names two; OSError.
    """
    standalone, found = open_standalone(path), attempts_of(path)
    if standalone.has_manifest():
        if found:
            raise NotFound(
                f"both {path} and {path.parent / found[max(found)]} are checkpoints: name the one "
                f"that you mean, or move one away"
            )
        return standalone, standalone.job, standalone.tag
    if found:
        return open_root(path.parent.parent), path.parent.name, found[max(found)]
    if other := _of_another_tool(path):
        raise NotFound(f"{path} {other}")
    raise NotFound(
        f"no checkpoint at {path}"
        + ("" if isinstance(path, Url) or path.is_dir() else ", which is not a directory")
    )


def _of_another_tool(path: Location) -> str:
    """Return "is a checkpoint of TOOL", with advice, or "" if there is no checkpoint of
    another tool directly in this place.
    """
    other = other_tool(open_standalone(path).storage)
    if other is None:
        return ""
    advice = "`ckptd import` cannot read it"
    if other.importable is not None:
        advice = (
            f"make one of ckptd from it with `ckptd import "
            f"{path / other.importable if other.importable else path} --out DIR`"
        )
    return f"is a checkpoint of {other.tool} ({other.file}): {advice}"


def check_no_other_tool(path: Location, advice: str) -> None:
    """Raise AlreadyExists, with advice, if there is a checkpoint of another tool
    directly in this place. Raises OSError.
    """
    other = other_tool(open_standalone(path).storage)
    if other is not None:
        raise AlreadyExists(
            f"{path} holds a checkpoint of {other.tool} ({other.file}), and nothing was saved "
            f"there: {advice}"
        )


def attempts_of(path: Location) -> dict[int, str]:
    """Return the committed directories of the tag that `path` names
    (`<root>/<job>/<tag>`), by attempt.

    The tag is one of the user's own, or `step-<number>` with any number of digits. The
    dict is empty if a directory cannot be listed. Raises RemoteError if an object store
    cannot be listed.
    """
    repository, job, name = open_root(path.parent.parent), path.parent.name, path.name
    wanted = name
    if (digits := name.removeprefix("step-")) != name and digits.isascii() and digits.isdigit():
        wanted = f"step-{int(digits):08d}"
    found = {}
    try:
        tags = repository.tags(job)
    except RemoteError:
        raise
    except OSError:
        return {}
    for tag in tags:
        parsed = names.parse_tag_directory(tag)
        if parsed is not None and parsed.tag == wanted and repository.is_committed(job, tag):
            found[parsed.attempt] = tag
    return found


# -- for the command line, which also shows jobs and damaged checkpoints


def find_job_or_checkpoint(path: Location) -> tuple[Repository, str, str | None]:
    """Return the repository, the job and the tag of DIR/JOB or DIR/JOB/TAG, or of a
    directory that is one checkpoint by itself.

    The tag is None for DIR/JOB. A tag may be given without its attempt: then the
    highest attempt is meant. Raises NotFound, StorageError.
    """
    path = located(path)
    if has_checkpoint(path):
        if _lies_in_a_root(path):
            return existing_root(path.parent.parent), path.parent.name, path.name
        return open_standalone(path), StandaloneCheckpoint.job, StandaloneCheckpoint.tag
    if is_root(path):
        raise NotFound(f"{path} is a root, which holds jobs, and not a job{meant(path)}")
    if is_prefix(path):
        return existing_root(path.parent), path.name, None
    if is_root(path.parent):
        raise NotFound(f"job {path.name!r} has no checkpoints in {path.parent}{meant(path)}")
    repository, job = existing_root(path.parent.parent), path.parent.name
    known = {tag: p for tag in tags_of(repository, job) if (p := names.parse_tag_directory(tag))}
    same = [p for tag, p in known.items() if path.name in (p.tag, tag)]
    if not same and not known:
        raise NotFound(
            f"no checkpoint {path.name!r} of job {job!r} in {repository.where()}, which has no "
            f"such job{meant(path.parent)}"
        )
    if not same:
        tags = dict.fromkeys([*(p.tag for p in known.values()), *known])
        near = difflib.get_close_matches(path.name, tags, n=1)
        raise NotFound(
            f"no checkpoint {path.name!r} of job {job!r} in {repository.where()}; `ckptd ls "
            f"{path.parent}` lists the checkpoints there"
            + (f": did you mean {path.parent / near[0]}?" if near else "")
        )
    newest = max(same, key=lambda p: p.attempt)
    return repository, job, names.tag_directory(None, newest.tag, newest.attempt)


def existing_root(root: Location) -> Repository:
    """Return the checkpoints below a root.

    Raises NotFound if the root is a path that is no directory, or a URL with nothing
    below it.
    """
    if not is_prefix(root):
        if isinstance(root, Url):
            raise NotFound(f"there is nothing at {root}")
        raise NotFound(f"{root} does not exist, or is not a directory{meant(root)}")
    return open_root(root)


def meant(path: Location) -> str:
    """Return what to add to an error about a path without checkpoints: the hint that
    another tool has written it, or a path near it.

    Return "" if there is neither. Of a URL, only the jobs of a root are near.
    """
    found: Location | None
    try:
        if isinstance(path, Url):
            found = next(_near_url(path), None)
        elif other := _of_another_tool(path):
            return f"; it {other}"
        else:
            found = next(_near(Path(os.path.abspath(path))), None)
    except OSError:
        found = None
    return "" if found is None else f": did you mean {found}?"


def _near(path: Path) -> Iterator[Path]:
    """Yield jobs in a root, roots in a directory, names spelled alike, and the
    checkpoint, job or root that a path leads out of.
    """
    if is_root(path):
        repository = open_root(path)
        yield from (path / job for job in repository.jobs() if tags_of(repository, job))
    if path.is_dir():
        yield from (path / name for name in sorted(os.listdir(path)) if is_root(path / name))
    there = next(above for above in path.parents if above.is_dir())
    wanted = path.relative_to(there).parts[0]
    for name in difflib.get_close_matches(wanted, os.listdir(there)):
        if name != wanted and (is_root(there / name) or is_root(there)):
            yield there / name
    yield from (
        above
        for above in path.parents
        if has_checkpoint(above) or is_root(above.parent) or is_root(above)
    )


def _near_url(path: Url) -> Iterator[Url]:
    """Yield the jobs in a root, or those of the root around `path` whose names are
    spelled alike.
    """
    if is_root(path):
        yield from (path / job for job in open_root(path).jobs())
    elif is_root(path.parent):
        jobs = open_root(path.parent).jobs()
        yield from (path.parent / job for job in difflib.get_close_matches(path.name, jobs))


def tags_of(repository: Repository, job: str) -> list[str]:
    """Return the tag directories of a job, committed or not. Raises StorageError."""
    try:
        return repository.tags(job)
    except NotADirectoryError:
        return []  # a file or a link is no job
    except OSError as error:
        raise StorageError.of(f"list {repository.where(job)}", error) from None


def manifests(repository: Repository, job: str) -> Iterator[tuple[str, Manifest | IntegrityError]]:
    """Yield each tag of the job that has a manifest, with the manifest, or with the
    error if it is damaged.
    """
    for tag in tags_of(repository, job):
        try:
            yield tag, repository.read_manifest(job, tag)
        except NotFound:
            continue  # no manifest: no checkpoint
        except IntegrityError as error:
            yield tag, error


def has_checkpoint(path: Location) -> bool:
    """Return True if the prefix has a manifest, and is neither a root nor that of a
    job.
    """
    return (
        holds(path, names.MANIFEST)
        and not is_root(path)
        and not tags_of(open_root(path.parent), path.name)
    )


def _lies_in_a_root(path: Location) -> bool:
    """Return True if the path of a checkpoint is DIR/JOB/TAG, and False if it is a
    checkpoint by itself.

    In a root the name alone decides. Elsewhere, as in a copy of a root, the manifest
    must be that of this job and tag.
    """
    if names.parse_tag_directory(path.name) is None:
        return False
    if is_root(path.parent.parent):
        return True
    try:
        open_root(path.parent.parent).read_manifest(path.parent.name, path.name)
    except IntegrityError:
        return False
    except (NotFound, OSError):
        pass
    return True
