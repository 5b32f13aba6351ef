"""Reports which nodes of a job have delivered their parts of its last steps, from
storage alone, for `ckptd status --job`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from ckptd.daemon.commands.report import as_table
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, NotFound, StorageError, storage_errors
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.receipt import DELETED, Abandonment, Receipt
from ckptd.shared.location import Location, located
from ckptd.shared.storage.locate import existing_root, tags_of
from ckptd.shared.storage.repository import Repository
from ckptd.shared.units import printable, ranges_text


def job_report(root: Location, job: str) -> dict[str, Any]:
    """Return what storage tells about a job: its newest checkpoint, and the saves that
    began after it. Needs no daemon.

    `ckptd status --job` prints this with `--json` (docs/reference/command-line.md).
    Raises NotFound if the root has no such job, StorageError if storage cannot be read.
    """
    root = located(root)
    repository = existing_root(root)
    with storage_errors(f"read job {job} in {root}"):
        if job not in repository.jobs():
            near = difflib.get_close_matches(job, repository.jobs(), n=1)
            raise NotFound(
                f"there is no job {job!r} in {root}; `ckptd ls {root}` lists the jobs"
                + (f": did you mean {near[0]!r}?" if near else "")
            )
        tries = sorted(
            (
                found
                for tag in tags_of(repository, job)
                if (found := _Try.read(repository, job, tag)) is not None
            ),
            key=_order,
        )
        newest = max(
            (found for found in tries if found.seq), key=lambda found: found.seq, default=None
        )
        shown = [
            found
            for found in tries
            if newest is None
            or found is newest
            or (not found.seq and _order(found) > _order(newest))
        ]
        for found in shown:
            found.read_receipts(repository, job)
        attempt = repository.newest_attempt(job)
    hosts = {
        rank: receipt.host
        for found in shown
        for receipt in found.receipts
        for rank in receipt.node.ranks
    }
    return {
        "job": job, "root": str(root), "attempt": attempt,
        "newest": None if newest is None else newest.tag,
        "saves": [found.row(hosts) for found in sorted(shown, key=_order)],
    }  # fmt: skip


class _Try:
    """A directory of a job: a checkpoint, or a save that is under way, abandoned or
    damaged.

    outcome: the error if it cannot be read. receipts: filled by `read_receipts`.
    problem: why a receipt cannot be read, or "".
    """

    def __init__(self, tag: str, outcome: Manifest | Abandonment | CkptdError | None) -> None:
        self.tag, self.outcome = tag, outcome
        self.receipts: list[Receipt] = []
        self.problem = ""

    @classmethod
    def read(cls, repository: Repository, job: str, tag: str) -> _Try | None:
        """Return the save in a directory.

        Return None if the directory is empty or belongs to a deleted checkpoint. If the
        directory cannot be read because it is damaged, the error becomes the outcome of
        the save. Raises OSError if it cannot be read for another reason, such as an
        object store that does not serve.
        """
        try:
            outcome = repository.outcome(job, tag)
            deleted = isinstance(outcome, Abandonment) and outcome.code == DELETED
            return (
                None
                if deleted or (outcome is None and not repository.files(job, tag))
                else cls(tag, outcome)
            )
        except IntegrityError as error:
            return cls(tag, error)
        except OSError as error:
            failed = StorageError.of(f"read {job}/{tag}", error)
            if failed.is_no_damage:
                raise
            return cls(tag, failed)

    def read_receipts(self, repository: Repository, job: str) -> None:
        """Read the receipts of the save. Raises OSError."""
        for file in repository.files(job, self.tag):
            try:
                if (
                    names.parse_receipt_file(file) is not None
                    and (receipt := repository.receipt(job, self.tag, file)) is not None
                ):
                    self.receipts.append(receipt)
            except IntegrityError as error:
                self.problem = str(error)

    @property
    def seq(self) -> int:
        """The place of the checkpoint in the order of the job's commits, from 1, or 0
        if this is no checkpoint.
        """
        return self.outcome.seq if isinstance(self.outcome, Manifest) else 0

    def row(self, hosts: Mapping[int, str]) -> dict[str, Any]:
        """Return the save as JSON. `hosts` has the last known node of each rank."""
        match self.outcome:
            case None:
                state, reason = "undecided", self.problem
            case Manifest():
                state, reason = "committed", self.problem
            case Abandonment(reason=reason):
                state = "abandoned"
            case error:
                state, reason = "damaged", str(error)
        nodes: list[dict[str, Any]] = []
        here: set[int] = set()
        for receipt in self.receipts:
            here.update(receipt.node.ranks)
            did = "failed" if receipt.code else "delivered"
            nodes.append(
                {
                    "node": receipt.host,
                    "ranks": receipt.node.ranks,
                    "state": did,
                    "reason": receipt.reason,
                }
            )
            reason = reason or receipt.reason
        missing: dict[str | None, list[int]] = {}
        for rank in range(
            self.receipts[0].world_size if state == "undecided" and self.receipts else 0
        ):
            if rank not in here:
                missing.setdefault(hosts.get(rank), []).append(rank)
        nodes += [
            {"node": host, "ranks": ranks, "state": "missing", "reason": ""}
            for host, ranks in missing.items()
        ]
        return {"tag": self.tag, "state": state, "reason": reason, "nodes": nodes}


def _order(found: _Try) -> tuple[int, float, str]:
    parsed = names.parse_tag_directory(found.tag)
    assert parsed is not None  # `Repository.tags` returns only names that parse
    step = parsed.step
    document = (
        found.outcome
        if isinstance(found.outcome, Manifest | Abandonment)
        else next(iter(found.receipts), None)
    )
    if step is None and document is not None:
        step = document.step
    # A save whose step is not known yet is a new one.
    return parsed.attempt, math.inf if step is None else step, found.tag


_WORDS = {"delivered": "delivered", "failed": "could not save", "missing": "has not delivered"}


def job_text(report: Mapping[str, Any], columns: int | None = None) -> str:
    """Return a report as text for people.

    columns: those of the window, which the table then does not exceed, or None.
    """
    title = (
        f"job {report['job']} in {report['root']}, attempt {report['attempt']}: newest checkpoint "
        f"{report['newest'] or 'none'}"
    )
    rows = [("SAVE", "STATE", "NODE", "RANKS", "")]
    for save in report["saves"]:
        told = [
            (node["node"] or "not known", ranges_text(node["ranks"]), _WORDS[node["state"]])
            for node in save["nodes"]
        ]
        for number, cells in enumerate(
            told
            or [("-", "-", "no node has delivered yet" if save["state"] == "undecided" else "")]
        ):
            rows.append(((save["tag"], save["state"]) if number == 0 else ("", "")) + cells)
    reasons = [
        printable(f"{save['tag']} is {save['state']}: {save['reason']}")
        for save in report["saves"]
        if save["reason"]
    ]
    return "\n".join(
        [printable(title), *(as_table(rows, columns) if len(rows) > 1 else []), *reasons]
    )
