"""Adopts a checkpoint: saves the state of a checkpoint of another tool, or of another
job, as the newest checkpoint of a job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import torch

from ckptd.agent.convert.ckptd_directory import PlannedPart
from ckptd.agent.convert.formats import one_sentence, opened
from ckptd.agent.convert.importing import plan, under_of
from ckptd.agent.convert.output import OnProgress
from ckptd.agent.convert.selection import Selection
from ckptd.agent.copy.mapped_slot import Documents
from ckptd.agent.handover.rank_link import SAVE_SECONDS, RankLink, links
from ckptd.agent.link.arguments import as_step, ranks_of
from ckptd.agent.link.rounds import Alone
from ckptd.shared.errors import (
    CkptdError,
    InternalError,
    InvalidRequest,
    JobRunning,
    storage_errors,
)
from ckptd.shared.location import Location, Url, is_same, located
from ckptd.shared.names import check_name, check_new_tag, tag_directory
from ckptd.shared.storage.locate import check_new_root, is_root


@dataclass(frozen=True, slots=True)
class Adopted:
    """The result of an adoption, or of its dry run.

    root, job, step: the place of the new checkpoint. tag: the name of its directory, or
    "" if none was made. format: a key of `FORMATS`, or "ckptd". tensors, nbytes: the
    number of tensors and their bytes. left_out: names of files beside the tensors that
    are too large for `user_content`.
    """

    root: Location
    job: str
    step: int
    tag: str
    format: str
    tensors: int
    nbytes: int
    left_out: list[str] = field(default_factory=list)


def adopt(
    path: str | os.PathLike[str] | Url,
    root: str | os.PathLike[str] | Url,
    job: str,
    *,
    step: int = 0,
    tag: str | None = None,
    which: str | int = "newest",
    format: str = "",
    only: str = "",
    under: str | None = None,
    dtype: torch.dtype | None = None,
    rename: Sequence[tuple[str, str]] = (),
    names: Mapping[str, str] | None = None,
    dry_run: bool = False,
    progress: OnProgress = lambda length: None,
    begin: Callable[[int], None] = lambda nbytes: None,
) -> Adopted:
    """Save a checkpoint of another tool, or of another job, as the newest checkpoint of
    a job, which `recover()` then loads.

    Call this in one process, while no run of the job is alive.

    path: a file or directory in one of the `FORMATS`, a directory that is one
    checkpoint of ckptd, or a job of ckptd. which: for a job, as for `Checkpoint.open`.
    format: a key of `FORMATS`, or "" to detect it. root, job: the job that gets the
    checkpoint. If no daemon serves the root, a private one is started. step, tag: those
    of the checkpoint, as for `Agent.snapshot`. It is the newest of the job whatever its
    step, because adopting begins an attempt. only, under, dtype, rename, names: as for
    `import_checkpoint`. dry_run: check the source and the options, and write nothing;
    the root and the job are not looked at. begin, progress: called with all bytes that
    will be copied, and with those that were.

    The state is copied into a slot, which takes as much shared memory as the state has
    bytes, or a file on the local disk if there is less. The daemon saves it from there
    like any snapshot, with checksums. This also needs as much other memory as an
    import. The source is not changed, and shares no file with the checkpoint. Metrics
    and random generators of a checkpoint of ckptd are not taken over. A `per_rank`
    value becomes the list of the values of all ranks.

    Returns once the checkpoint is durable. Raises as `import_checkpoint` and `Agent`
    do, JobRunning if a run of the job is alive, and the error of the snapshot. Raises
    InvalidRequest on several ranks.
    """
    if as_step(step) < 0:
        raise InvalidRequest(f"step is {step!r}; expected an integer from 0 to 10**18 - 1")
    check_name("job", job)
    with storage_errors(f"adopt {path}"):
        _check_job(located(root), job)
    if tag is not None:
        check_new_tag(tag)
    if ranks_of(None).world_size > 1:
        raise InvalidRequest(
            "adopt is called in one process, and this is one of several ranks: call it before "
            "they start"
        )
    source = located(path)
    with (
        storage_errors(f"adopt {path}"),
        opened(source, which, format) as (found, contents, left_out),
    ):
        with one_sentence(source):
            planned, tensors = plan(
                contents,
                Selection(only, dtype, tuple(rename), names or {}),
                under_of(found, under),
            )
        nbytes, place = planned.layout.plan.data_length, located(root)
        made = ""
        if not dry_run:
            _check_idle(job, place)
            begin(nbytes)
            with _linked(job, place) as link:
                made = _hand_over(
                    link,
                    planned,
                    _counted(planned.tensors(contents), source, progress),
                    as_step(step),
                    tag,
                )
        return Adopted(place, job, step, made, found, tensors, nbytes, left_out)


def _check_job(root: Location, job: str) -> None:
    """Raise InvalidRequest if root/job is a root itself, or if the root would be made
    in another one.
    """
    if is_root(root / job):
        raise InvalidRequest(
            f"{root / job} is a root, which holds jobs: name a job in it, like {root / job / 'gpt'}"
        )
    if is_root(root.parent) and not is_root(root):
        raise InvalidRequest(
            f"{root} lies in the root {root.parent}: did you mean the root {root.parent}, with "
            f"{root.name!r} as the job, and its tag with `tag`?"
        )
    check_new_root(root)


def _check_idle(job: str, root: Location) -> None:
    """Raise JobRunning if this process itself has an agent of the job.

    The daemon looks for other processes.
    """
    if any(link.job == job and is_same(located(link.root), root) for link in links()):
        raise JobRunning(
            f"this process has an agent of job {job!r}, which would no longer be able to save: "
            f"close it first"
        )


@contextmanager
def _linked(job: str, root: Location) -> Iterator[RankLink]:
    link = RankLink(Alone(), job, root=str(root), takeover=False)
    try:
        yield link
    except BaseException:
        link.let_go()
        raise
    link.close()


def _hand_over(
    link: RankLink,
    planned: PlannedPart,
    tensors: Iterator[torch.Tensor],
    step: int,
    tag: str | None,
) -> str:
    """Hand a planned state over as a snapshot, and wait until it is durable.

    Return the name of the checkpoint's directory.
    """
    layout, handovers = planned.layout, link.handovers
    documents = Documents(
        planned.values, msgspec.structs.replace(planned.request, tag=tag).encode()
    )
    handovers.slots.count = 1
    with link.calls("adopt"):
        handover = link.open_step(step, tag)
        try:
            handover.reserve(documents.offsets(layout)[-1], time.monotonic() + SAVE_SECONDS)
            handover.acquire()
            handover.fill(layout, lambda number: next(tensors), singly=True)
            handover.seal_after(None, layout, documents)
        except Exception as error:
            handovers.fail(
                handover.pending,
                error if isinstance(error, CkptdError) else InternalError(repr(error)),
            )
            raise
        finally:
            handovers.end(handover)
    try:
        link.wait_durable(handover.pending)
    except CkptdError as error:
        said = (
            f"{error}; the state is in memory, and the daemon saves it when it can: look at "
            f"`ckptd status`"
        )
        raise type(error)(said) from None
    return tag_directory(step, tag, link.attempt)


def _counted(
    tensors: Iterator[torch.Tensor], source: Location, progress: OnProgress
) -> Iterator[torch.Tensor]:
    with one_sentence(source):
        for tensor in tensors:
            progress(tensor.numel() * tensor.itemsize)
            yield tensor
