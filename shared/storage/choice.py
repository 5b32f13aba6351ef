"""Chooses one of a job's checkpoints, as a user names it on the command line: by its
step, the newest, or the best by a metric.

`DIR/JOB/199`, `DIR/JOB/newest` and `DIR/JOB/best:METRIC` become the place of one
checkpoint here. What is there under the very name that was typed comes first.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, InvalidRequest, NotFound
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location, located, url_scheme
from ckptd.shared.retention import BestN
from ckptd.shared.storage.locate import (
    has_checkpoint,
    is_prefix,
    is_root,
    manifests,
    meant,
    open_root,
    tags_of,
)

NEWEST = "newest"
BEST = "best:"
_BEST = re.compile(rf"(?P<job>.+)/{BEST}(?P<metric>[^/].*)", re.DOTALL)
_STEP = re.compile(r"(?P<step>[0-9]{1,19})|step-(?P<short>0|[1-9][0-9]{0,6})")
"""A step. `step-` with leading zeros is a tag, or a tag with a digit missing."""
_MODES = (":min", ":max")


@dataclass(frozen=True, slots=True)
class Named:
    """A root, a job or a checkpoint as a user has typed it.

    text: all that was typed. place: the place that it names, which is that of the job
    if the text ends with `best:METRIC`. metric: the text after `best:`, or "".
    """

    text: str
    place: Location
    metric: str = ""

    @classmethod
    def parse(cls, text: str) -> Named:
        """Return what a text names. Looks for a directory that has a `best:` in its own
        name, and at nothing else.

        Raises InvalidConfig if the text names no place.
        """
        match = _BEST.fullmatch(text)
        if match is None or (not url_scheme(text) and os.path.lexists(text)):
            return cls(text, located(text))
        return cls(text, located(match["job"]), match["metric"])

    def in_root(self, root: Location) -> Named:
        """Return what the text names if it is relative to a root.

        The text stays as it is if it is an absolute path, a URL, or begins with the
        name of a file or directory that is there, and also if the root has no job of
        nearly this name.
        """
        first = self.text.split("/")[0]
        if url_scheme(self.text) or first in ("", ".", "..") or os.path.lexists(first):
            return self
        jobs = open_root(root).jobs() if is_prefix(root) else []
        return self._below(root) if difflib.get_close_matches(first, jobs, n=1) else self

    def _below(self, root: Location) -> Named:
        match = _BEST.fullmatch(self.text)
        place = root
        for part in (self.text if match is None else match["job"]).split("/"):
            place = place / part if part else place
        return Named(self.text, place, "" if match is None else match["metric"])


@dataclass(frozen=True, slots=True)
class Chosen:
    """The place that a user means: a root, a job or one checkpoint.

    skipped: the errors of damaged checkpoints that may have been meant instead.
    """

    place: Location
    skipped: tuple[str, ...] = ()


def choose(named: Named, step: int | None = None) -> Chosen:
    """Return the place that a user means.

    A text that names no choice is the place itself, whether anything is there or not.
    So is one whose last component is the name of a directory or of a tag.

    step: the step of a checkpoint of the job that `named` is. The highest attempt that
    has it counts. "newest" is the newest checkpoint whose manifest is intact. Of
    `best:METRIC` and `best:METRIC:min`, the least value of the metric is the best, and
    of `best:METRIC:max` the greatest.

    Raises NotFound if the job has no such checkpoint, InvalidRequest if a `step` is
    given for anything but a job, StorageError.
    """
    place = named.place
    if step is not None:
        if named.metric or is_root(place) or not (job := _Job.at(place)):
            raise InvalidRequest(
                f"--step {step} chooses a checkpoint of a job, and {named.text} is not a job; "
                f"expected DIR/JOB{meant(place)}"
            )
        return job.of_step(step)
    if named.metric:
        if job := _Job.at(place):
            return job.best(named.metric)
        raise NotFound(f"{place} is not a job that has checkpoints{meant(place)}")
    wanted = _STEP.fullmatch(place.name)
    if (wanted is None and place.name != NEWEST) or place == place.parent:
        return Chosen(place)
    if is_prefix(place) or not (job := _Job.at(place.parent)):
        return Chosen(place)
    if wanted is not None and job.has_tag(place.name):
        return Chosen(place)
    return job.newest() if wanted is None else job.of_step(int(wanted["step"] or wanted["short"]))


def offered(text: str, root: Location | None) -> list[str]:
    """Return what a shell can offer for the beginning of a text: behind a job, what
    chooses one of its checkpoints, and without a path the jobs of the configured `root`.

    Directories are left to the shell, and URLs to the user: a key must not wait for a
    network. What cannot be read is not offered.
    """
    if url_scheme(text):
        return []
    above, slash, begun = text.rpartition("/")
    try:
        if slash:
            named = Named.parse(above or slash)
            place = (named if root is None else named.in_root(root)).place
            found = _behind(place)
        else:
            found = open_root(root).jobs() if isinstance(root, Path) and is_root(root) else []
    except (CkptdError, OSError):
        return []
    return [f"{above}{slash}{name}" for name in found if name.startswith(begun)]


def _behind(place: Location) -> list[str]:
    """Return what can stand behind a job: `newest`, `best:METRIC` for the metrics of its
    newest checkpoint, and its tag directories. Return [] if the place is not a job.
    """
    repository, job = open_root(place.parent), place.name
    tags = [tag for tag in tags_of(repository, job) if repository.has_manifest(job, tag)]
    if has_checkpoint(place) or not tags:
        return []
    metrics = list[str]()
    with suppress(CkptdError, OSError):
        if newest := repository.read_newest(job):
            metrics = sorted(repository.read_manifest(job, newest).metrics)
    return [NEWEST, *(f"{BEST}{name}" for name in metrics), *sorted(tags)]


class _Job:
    """A job that has checkpoints, and their manifests or errors by tag directory."""

    def __init__(self, place: Location, found: dict[str, Manifest | IntegrityError]) -> None:
        self._place, self._found = place, found
        intact = (one for one in found.values() if isinstance(one, Manifest))
        self._intact = sorted(intact, key=lambda manifest: manifest.order)

    @classmethod
    def at(cls, place: Location) -> _Job | None:
        """Return the job of a place, or None if no job with checkpoints is there."""
        repository = open_root(place.parent)
        if place == place.parent or has_checkpoint(place) or not tags_of(repository, place.name):
            return None
        return cls(place, dict(manifests(repository, place.name)))

    def has_tag(self, name: str) -> bool:
        """Return True if a checkpoint has this tag, or this tag directory."""
        return any(
            name in (tag, parsed.tag)
            for tag in self._found
            if (parsed := names.parse_tag_directory(tag))
        )

    def newest(self) -> Chosen:
        """Return the newest checkpoint whose manifest is intact."""
        if not self._intact:
            raise NotFound(f"{self._place} holds no checkpoint")
        newest = self._intact[-1]
        return Chosen(self._place / newest.tag, self._damaged(newest.order[:2]))

    def of_step(self, step: int) -> Chosen:
        """Return the checkpoint of a step, which may be damaged."""
        steps: dict[int, list[tuple[int, str]]] = {}
        for tag, found in self._found.items():
            name = names.parse_tag_directory(tag)
            if name is None:
                continue
            known = found.step if isinstance(found, Manifest) else name.step
            if known is not None:
                steps.setdefault(known, []).append((name.attempt, tag))
        if step in steps:
            return Chosen(self._place / max(steps[step])[1])
        below = max((one for one in steps if one < step), default=None)
        above = min((one for one in steps if one > step), default=None)
        near = " or ".join(str(one) for one in (below, above) if one is not None)
        raise NotFound(
            f"job {self._place.name!r} in {self._place.parent} has no checkpoint of step {step}"
            + (f": did you mean {near}?" if near else "")
        )

    def best(self, text: str) -> Chosen:
        """Return the best checkpoint by a metric.

        text: the name of the metric, with or without the mode. A metric of exactly this
        name comes first.
        """
        known = {name for manifest in self._intact for name in manifest.metrics}
        whole = text in known or not text.endswith(_MODES)
        metric, mode = (text, "min") if whole else (text[:-4], text[-3:])
        policy = BestN(metric, 1, mode)
        ranked = [_Ranked(manifest) for manifest in self._intact]
        if not ranked or (problem := policy.problem(ranked)):
            raise NotFound(
                f"{self._place} holds no checkpoint"
                if not ranked
                else f"{self._place} has no best checkpoint: {problem}"
            )
        (best,) = policy.keeps(ranked)
        return Chosen(self._place / ranked[best].tag, self._damaged((0, 0)))

    def _damaged(self, newer_than: tuple[int, int]) -> tuple[str, ...]:
        return tuple(
            str(error)
            for tag, error in self._found.items()
            if isinstance(error, IntegrityError)
            and (parsed := names.parse_tag_directory(tag))
            and parsed.order > newer_than
        )


class _Ranked:
    """A checkpoint, as far as a policy that ranks it must know it."""

    def __init__(self, manifest: Manifest) -> None:
        self.tag, self.metrics = manifest.tag, manifest.numbers
        self.attempt, self.step = manifest.attempt, manifest.step
        self.created, self.nbytes = manifest.created_at, manifest.nbytes
        self.non_finite = manifest.non_finite
