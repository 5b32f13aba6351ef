"""Gathers the data that the `ckptd` commands print, and formats it as text.

Reads storage, and changes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from ckptd.daemon.job.stored_checkpoint import LITTLE_ROOM
from ckptd.shared import names
from ckptd.shared.errors import (
    Busy,
    CkptdError,
    IntegrityError,
    NotFound,
    StorageError,
    damage_in,
    storage_errors,
)
from ckptd.shared.formats.coverage import Shards
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.metadata_object import stored_places
from ckptd.shared.formats.non_finite import MOST_NAMED, NonFinite
from ckptd.shared.formats.plan import BLOB, RUN_FACTS, Described
from ckptd.shared.formats.scatter import scatter, verify
from ckptd.shared.formats.sharding import Mesh
from ckptd.shared.formats.values_check import Checked, check_values
from ckptd.shared.location import Location, Url, located, url_scheme
from ckptd.shared.storage.locate import (
    existing_root,
    find_job_or_checkpoint,
    has_checkpoint,
    is_prefix,
    is_root,
    manifests,
    meant,
    tags_of,
)
from ckptd.shared.storage.metadata import metadata_objects, tensors
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from ckptd.shared.units import (
    count_text,
    printable,
    progress_text,
    rank_list,
    size_text,
    some_text,
    span_text,
)

SNAPSHOT_COUNTERS = {
    "sealed": "sealed",
    "persisted": "saved",
    "skipped": "skipped",
    "failed": "failed",
}


def status_text(status: dict[str, Any], columns: int | None = None) -> str:
    """Return a status as text for people.

    columns: those of the window, which a table then does not exceed, or None.
    """
    memory, counters, files = status["shared_memory"], status["counters"], status["descriptors"]
    ready = "is ready" if status["ready"] else "is NOT ready"
    snapshots = ", ".join(f"{counters[key]} {word}" for key, word in SNAPSHOT_COUNTERS.items())
    # An object store does not tell how much room it has.
    unknown = "" if url_scheme(status["root"]) else " (NOT AVAILABLE)"
    free = (
        unknown
        if status["disk_free_bytes"] is None
        else f" ({size_text(status['disk_free_bytes'])} free)"
    )
    stage = status.get("stage")
    clients = f"{count_text(files['clients'], 'client')} connected, {files['clients_fit']} fit"
    used = f"{size_text(memory['used_bytes'])} of {size_text(memory['quota_bytes'])}"
    on_disk = (
        f", and {size_text(memory['on_disk_bytes'])} on disk, because they do not fit"
        if memory.get("on_disk_bytes")
        else ""
    )
    copies = (
        f", copies of other nodes among them: {size_text(memory['replica_bytes'])}"
        if memory.get("replica_bytes")
        else ""
    )
    lines = [
        f"ckptd {status['version']} {ready} (pid {status['pid']}, up "
        f"{span_text(status['uptime_seconds'])})",
        f"  root           {status['root']}{'' if stage else free}",
        *([f"  identity       {status['identity']}"] if status.get("identity") else []),
        *(stage_lines(stage, free) if stage else []),
        f"  socket         {status['socket']}{' (private)' if status['private'] else ''}",
        *([f"  log            {status['log_file']}"] if status.get("log_file") else []),
        f"  shared memory  {used} in {count_text(memory['segments'], 'segment')}{on_disk}{copies}",
        f"  descriptors    {files['used']} of {files['limit']} open ({clients})",
        f"  snapshots      {snapshots}",
    ]
    if (quota := status.get("root_quota")) and quota["used_bytes"] > quota["quota_bytes"]:
        lines.append(
            f"  OVER QUOTA     the checkpoints hold {size_text(quota['used_bytes'])}, more than "
            f"the root_quota of {size_text(quota['quota_bytes'])}"
        )
    if files["accepting_paused"]:
        lines.append(f"  PAUSED         {files['accepting_paused']}")
    for held in status.get("foreign_memory", ()):
        lines.append(
            f"  OTHER ROOT     {held['job']} step {held['step']} (attempt {held['attempt']}), "
            f"saved for root {held['identity'][:8]}: "
            f"{size_text(held['bytes'])} in memory; runs of this job are refused, see "
            f"CKPTD_FOREIGN_MEMORY"
        )
    for one in status.get("refused", ()):
        lines.append(f"  REFUSED        {one['job']}{': ' if one['job'] else ''}{one['message']}")
    rows = [("JOB", "ATTEMPT", "IN MEMORY", "ON STORAGE", "SAVING", "RANKS")]
    for job in status["jobs"]:
        sealed = job["last_sealed"]
        rows.append((
            job["job"], str(job["attempt"]), f"step "
                f"{sealed['step']}" if sealed else "-", _stored(job, staged=stage is not None),
            _saving(job), _ranks(job),
        ))  # fmt: skip
        if job["room_for"] is not None and job["room_for"] < LITTLE_ROOM:
            lines.append(
                f"  LITTLE ROOM    {job['job']}: the root has room for {job['room_for']} more of "
                f"its checkpoints"
            )
        if job["announced"]:
            lines.append(f"  RETENTION      {job['job']}: {job['announced']}")
        lines += _replica_lines(job)
        if unlocked := job.get("unlocked_bytes"):
            lines.append(
                f"  NOT LOCKED     {job['job']}: {size_text(unlocked)} of its slots were not "
                f"page-locked for the last snapshot, so that copies from accelerators held the "
                f"training; the trainer's log says why, unless they were still being made"
            )
        if late := job.get("overdue"):
            lines.append(f"  OVERDUE        {job['job']}: {late['message']}")
        if cost := job.get("training_cost"):
            seconds = max(0.0, cost["seconds"])  # steps of a tiny model vary by more than that
            lines.append(
                f"  COST           {job['job']}: the snapshot of step {cost['step']} has delayed "
                f"the training by {seconds:.3f} s{_in_steps(seconds, cost['usual'])}"
            )
        if error := job["last_error"]:
            lines.append(
                f"  LAST ERROR     {job['job']}: "
                f"{_step(error['step'])}{span_text(error['age_seconds'])} ago: {error['reason']}"
            )
        lines += [
            f"  NEWER          {job['job']}/{tag}: {why}" for tag, why in job["newer"].items()
        ]
        lines += [
            f"  DENIED         {job['job']}/{tag}: {why}"
            for tag, why in job.get("denied", {}).items()
        ]
        if values := job.get("non_finite"):
            lines.append(
                f"  NOT FINITE     {job['job']}: {count_text(values, 'value')} of the newest "
                f"checkpoint, {job['last_durable']['tag']}"
            )
        lines += [
            f"  DAMAGED        {job['job']}/{tag}: {why}" for tag, why in job["damaged"].items()
        ]
    return (
        "\n".join([*lines, "", *as_table(rows, columns)])
        if len(rows) > 1
        else "\n".join([*lines, "  no jobs yet"])
    )


def _replica_lines(job: dict[str, Any]) -> Iterator[str]:
    """Yield a line about the copies of a job in the memory of other nodes, if it has any,
    and one if the nodes make no more of them.
    """
    step, held = job.get("replicated"), job.get("peer_replicas") or []
    if step is not None or held:
        newest = "no step is" if step is None else f"step {step} is"
        ranks = sorted({rank for copy in held for rank in copy["ranks"]})
        here = f"; copies of {rank_list(ranks)} are here" if ranks else ""
        yield f"  REPLICAS       {job['job']}: {newest} in the memory of other nodes{here}"
    if why := job.get("replicas_off"):
        yield f"  REPLICAS OFF   {job['job']}: {why}"


def stage_lines(stage: dict[str, Any], free: str) -> list[str]:
    """Return the lines about a stage. `free`: the room there, as text."""
    wait = "everything is uploaded"
    if stage["waiting"]:
        age = stage["oldest_age_seconds"]
        since = "" if age is None else f", the oldest for {span_text(age)}"
        wait = (
            f"{count_text(stage['waiting'], 'checkpoint')} ({size_text(stage['waiting_bytes'])}) "
            f"not uploaded yet{since}"
        )
    elif not stage["root_known"]:
        wait = "the root has not answered yet"
    lines = [f"  stage          {stage['directory']}{free}: {wait}"]
    if one := stage["uploading"]:
        lines.append(
            f"  UPLOADING      {one['job']}/{one['tag']}: "
            f"{100 * one['done_bytes'] // max(one['total_bytes'], 1)} %"
        )
    if stage["problem"]:
        lines.append(f"  NO UPLOAD      {stage['problem']}")
    return [*lines, *(f"  NOT UPLOADED   {name}: {why}" for name, why in stage["refused"].items())]


def _step(step: int | None) -> str:
    return "" if step is None else f"step {step}, "


def daemons_text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"no daemon of uid {os.geteuid()} runs on this node"
    table = [("PID", "ROOT", "KIND", "UP", "JOBS", "CLIENTS", "SOCKET")]
    for row in rows:
        if row["problem"]:
            table.append(
                (str(row["pid"]), "-", "-", "-", "-", "-", f"{row['socket']}: {row['problem']}")
            )
            continue
        table.append((
            str(row["pid"]), row["root"], "private" if row["private"] else "own",
            span_text(row["uptime_seconds"]), some_text(row["jobs"], 4) or "-", str(row["clients"]),
            row["socket"],
        ))  # fmt: skip
    return "\n".join(as_table(table))


def leftovers_text(rows: list[dict[str, Any]], *, delete: bool) -> str:
    if not rows:
        return "nothing is left of dead daemons"
    table = [("PATH", "OWNER", "SIZE", "SEALED IN IT", "")]
    for row in rows:
        size = "-" if row["bytes"] is None else size_text(row["bytes"])
        table.append(
            (
                row["path"],
                row["owner"],
                size,
                ", ".join(row["holds"]) or "-",
                "deleted" if row["deleted"] else "",
            )
        )
    own = sum(row["bytes"] or 0 for row in rows)
    return "\n".join(
        [*as_table(table), *([] if delete else [f"{size_text(own)} can be freed with --delete"])]
    )


def _in_steps(seconds: float, usual: float) -> str:
    """Return how much of a usual training step a time is, in words, or "" if that is not
    known.
    """
    if not usual:
        return ""
    steps = seconds / usual
    return f", {steps:.0%} of a training step" if steps < 2 else f", or {steps:.2g} training steps"


def _stored(job: dict[str, Any], *, staged: bool) -> str:
    """Return the newest durable checkpoint of a job, and with a stage the newest one
    that is in the root.
    """
    durable, uploaded = job["last_durable"], job.get("last_uploaded")
    if durable is None:
        return "-"
    if not staged:
        return _saved(durable)
    if uploaded is not None and uploaded["tag"] == durable["tag"]:
        return f"{_saved(durable)}, uploaded"
    there = "none" if uploaded is None else f"step {uploaded['step']}"
    return f"{_saved(durable)}, on the stage only ({there} uploaded)"


def _saved(durable: dict[str, Any]) -> str:
    age = durable["age_seconds"]
    chain = durable.get("chain")
    return (
        f"step {durable['step']}"
        + ("" if age is None else f", {span_text(age)} ago")
        + (f", chain {chain}" if chain else "")
    )


def _saving(job: dict[str, Any]) -> str:
    said = {
        saving["tag"]: progress_text(
            saving["done_bytes"], saving["total_bytes"],
            saving["bytes_per_second"], saving["seconds_left"],
        )
        for saving in job.get("saving", [])
    }  # fmt: skip
    said |= dict.fromkeys(job.get("delivered", []), "delivered, waits for other nodes")
    return (
        ", ".join(tag + (f" ({said[tag]})" if tag in said else "") for tag in job["pending"]) or "-"
    )


def _ranks(job: dict[str, Any]) -> str:
    """Return how many ranks of a job are connected.

    Of a job of several nodes, also say of how many on which node.
    """
    return str(job["ranks_connected"]) + (
        f" of {len(job['ranks_here'])} on {job['host']}" if job.get("ranks_here") else ""
    )


def title(repository: Repository, job: str, tag: str) -> str:
    """Return the name of a checkpoint in messages: JOB/TAG, or its path if it is a
    checkpoint by itself.
    """
    return repository.where() if isinstance(repository, StandaloneCheckpoint) else f"{job}/{tag}"


def listing(path: Location) -> list[dict[str, Any]]:
    """Return one row for each checkpoint at the path, which is a root, a job or one
    checkpoint. Raises NotFound, StorageError.

    The order is by job and (attempt, step). Damaged checkpoints come first in their
    job.
    """
    path = located(path)
    if has_checkpoint(path):
        repository, job, tag = find_job_or_checkpoint(path)
        if tag is None:
            raise NotFound(f"{path} no longer holds a checkpoint")
        manifest: Manifest | IntegrityError
        try:
            manifest = repository.read_manifest(job, tag)
        except IntegrityError as error:
            manifest = error
        except OSError as error:
            raise StorageError.of(f"read {path}", error) from None
        return [
            _row(
                job,
                path.name,
                manifest,
                newest=tag == repository.read_newest(job),
                pinned=tag in repository.pins(job),
            )
        ]
    whole = is_root(path)
    repository = existing_root(path if whole else path.parent)
    if not whole and not is_prefix(path):
        raise NotFound(
            f"there is nothing at {path}{meant(path)}"
            if isinstance(path, Url)
            else f"{path} does not exist, or is not a directory{meant(path)}"
        )
    jobs = repository.jobs() if whole else [path.name]
    rows = []
    for job in jobs:
        newest, pinned = repository.read_newest(job), repository.pins(job)
        rows += [
            _row(job, tag, manifest, newest=tag == newest, pinned=tag in pinned)
            for tag, manifest in sorted(
                manifests(repository, job),
                key=lambda f: f[1].order if isinstance(f[1], Manifest) else (-1, -1, -1),
            )
        ]
    if (
        not rows
        and not whole
        and repository.read_newest(jobs[0]) is None
        and not tags_of(repository, jobs[0])
    ):
        raise NotFound(f"{path} holds no checkpoints, and is not a root of ckptd{meant(path)}")
    return rows


def _row(
    job: str, tag: str, manifest: Manifest | IntegrityError, *, newest: bool, pinned: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"job": job, "tag": tag, "newest": newest, "pinned": pinned}
    if isinstance(manifest, IntegrityError):
        return row | {"damaged": str(manifest)}
    raw = sum(part.raw_bytes for part in manifest.parts)
    return row | {
        "attempt": manifest.attempt, "step": manifest.step, "seq": manifest.seq,
        "world_size": manifest.world_size, "bytes": manifest.nbytes, "raw_bytes": raw,
        "new_bytes": manifest.new_bytes, "chain": manifest.chain,
        "restored_bytes": manifest.restored_bytes,
        "created": manifest.created, "metrics": manifest.metrics,
        "non_finite": manifest.non_finite, "damaged": None,
    }  # fmt: skip


def listing_text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no checkpoints yet"
    deltas = has_deltas(rows)
    table = [(
        "JOB", "TAG", "STEP", "ATTEMPT", "RANKS", "SIZE", "OF RAW",
        *(("NEW", "CHAIN") if deltas else ()), "CREATED", "",
    )]  # fmt: skip
    for row in rows:
        if row["damaged"]:
            empty = [""] * (len(table[0]) - 3)
            table.append((row["job"], row["tag"], *empty, f"DAMAGED: {row['damaged']}"))
            continue
        table.append((
            row["job"], row["tag"], "-" if row["step"] is None else str(row["step"]),
            str(row["attempt"]), str(row["world_size"]), size_text(row["bytes"]),
            _ratio(row["bytes"], row["raw_bytes"]),
            *((size_text(row["new_bytes"]), chain_text(row["chain"])) if deltas else ()),
            row["created"], ", ".join(mark for mark in ("newest", "pinned") if row[mark]),
        ))  # fmt: skip
    return "\n".join(as_table(table))


def has_deltas(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a checkpoint of a listing has deltas, so that its new bytes and the
    length of its chain are worth a column.
    """
    return any(row.get("chain") for row in rows)


def chain_text(chain: int) -> str:
    """Return the length of a chain as text for people."""
    return str(chain) if chain else "whole"


def _deltas_text(manifest: Manifest) -> str:
    """Return in words whether a checkpoint is whole or has deltas."""
    new = f"{size_text(manifest.new_bytes)} new"
    if not manifest.chain:
        return f", {new}" if manifest.new_bytes < manifest.nbytes else ""
    return f", {new}, as deltas in chains of at most {manifest.chain}"


def manifest_at(path: Location) -> Manifest:
    """Return the manifest of DIR/JOB/TAG, or that of the newest checkpoint of DIR/JOB
    whose manifest is intact.

    Raises NotFound if there is no such manifest, IntegrityError if that of DIR/JOB/TAG
    is damaged, StorageError.
    """
    repository, job, tag = find_job_or_checkpoint(path)
    if tag is not None:
        with storage_errors(f"read {title(repository, job, tag)}"):
            return repository.read_manifest(job, tag)
    sound = [
        manifest for _, manifest in manifests(repository, job) if isinstance(manifest, Manifest)
    ]
    if not sound:
        raise NotFound(f"{path} holds no checkpoint{meant(path)}")
    return max(sound, key=lambda manifest: manifest.order)


def damaged_newer(path: Location, manifest: Manifest) -> list[str]:
    """Return the error of each damaged checkpoint of DIR/JOB that is newer than
    `manifest`. Return [] if the path names one checkpoint.
    """
    repository, job, tag = find_job_or_checkpoint(path)
    if tag is not None:
        return []
    return [
        printable(str(error))
        for name, error in manifests(repository, job)
        if isinstance(error, IntegrityError)
        and (parsed := names.parse_tag_directory(name))
        and parsed.order > manifest.order[:2]
    ]


def tensors_of(
    repository: Repository, job: str, manifest: Manifest
) -> tuple[dict[str, Described], Sequence[Mesh]]:
    """Return the entries of all tensors and blobs of a checkpoint, by name, and the
    meshes. Raises IntegrityError, StorageError.
    """
    with storage_errors(f"read {job}/{manifest.tag}"):
        return tensors(repository, job, manifest.tag, manifest)


def non_finite_lines(repository: Repository, job: str, manifest: Manifest) -> list[str]:
    """Return the lines of a description about values that are NaN or infinite: their
    number, and the tensors that have the most of them.

    A part names only some of its tensors, and at most MOST_NAMED parts are read. If they
    cannot be read, a line says why.
    """
    if manifest.non_finite is None:
        return []
    if not manifest.non_finite:
        return ["  non-finite     none of the values that were counted"]
    found, counts = Counter[str](), list[NonFinite]()
    parts = sorted(manifest.parts, key=lambda part: -(part.non_finite or 0))
    lines = [
        f"  non-finite     {count_text(manifest.non_finite, 'value')} of parameters and optimizer "
        f"state"
    ]
    try:
        with (
            storage_errors(f"read {job}/{manifest.tag}"),
            closing(repository.lease(job, manifest.tag)),
        ):
            for part in parts[:MOST_NAMED]:
                if not part.non_finite:
                    break
                with closing(
                    repository.open_part(job, manifest.tag, part.file, part.index_sha256)
                ) as reader:
                    if (counted := reader.index.non_finite) is not None:
                        counts.append(counted)
                        for name, values in counted.named(reader.plan):
                            found[name] += values
    except CkptdError as error:
        lines.append(f"                 the tensors cannot be read: {error}")
    named = found.most_common(MOST_NAMED)
    lines += [f"                 {name}: {values}" for name, values in named]
    all_read = len(counts) == sum(bool(part.non_finite) for part in parts)
    return lines + _more(counts, len(found), len(named), all_read=all_read)


def _more(counts: Sequence[NonFinite], known: int, named: int, *, all_read: bool) -> list[str]:
    """Return the line that says how many tensors with such values have no line, or
    nothing if none is known.

    counts: those of the parts that were read. known: how many tensors these name.
    named: how many tensors have a line.

    Parts that do not name all their tensors may have the same tensors or different
    ones. So of several parts only the least number is known.
    """
    more = max(known, *(count.tensors for count in counts), 0) - named
    complete = all(count.tensors == len(count.most) for count in counts)
    least = "" if all_read and (complete or len(counts) == 1) else "at least "
    return [f"                 and {least}{more} more"] if more > 0 else []


def manifest_json(
    manifest: Manifest, tensors: Mapping[str, Described] | None = None, meshes: Sequence[Mesh] = ()
) -> Any:
    """Return the manifest as it is stored, and with `tensors` and `meshes`, the
    metadata even if they are in an object of their own.
    """
    found = json.loads(manifest.encode())
    if tensors is not None:
        found.setdefault(
            "metadata",
            msgspec.to_builtins(
                {"state_dict_metadata": tensors, "planner_data": None, "meshes": list(meshes)}
            ),
        )
    return found


def manifest_text(
    manifest: Manifest,
    title: str,
    tensors: Mapping[str, Described] | None = None,
    non_finite: Sequence[str] = (),
    restore: str = "",
) -> str:
    """Return a description of a checkpoint.

    `tensors` are listed in it, if they are given. non_finite: as `non_finite_lines`
    returns them. restore: what a restore reads, and how long it takes, in words.
    """
    raw = sum(part.raw_bytes for part in manifest.parts)
    step = "-" if manifest.step is None else manifest.step
    writer = ", ".join(
        f"{name} {version}"
        for name, version in manifest.writer.items()
        if name not in ("script", "path", "host", "user", *RUN_FACTS)
    )
    by = [
        *([manifest.origin] if manifest.origin else []),
        count_text(manifest.world_size, "rank"),
        writer,
    ]
    lines = [
        title,
        f"  step           {step} of attempt {manifest.attempt} (the job's checkpoint number "
        f"{manifest.seq})",
        f"  created        {manifest.created}",
        f"  size           {size_text(manifest.nbytes)}, {_ratio(manifest.nbytes, raw)} of "
        f"{size_text(raw)}{_deltas_text(manifest)}",
        *([f"  restore        {restore}"] if restore else []),
        f"  saved by       {', '.join(by)}",
        *([f"  script         {path}"] if (path := manifest.writer.get("path")) else []),
        *(
            f"  {name:13}  {printable(fact)}"
            for name in RUN_FACTS
            if (fact := manifest.writer.get(name))
        ),
        f"  tensors        {manifest.tensors}",
        *non_finite,
    ]
    if manifest.metrics:
        lines.append(
            f"  metrics        {', '.join(f'{k} = {v}' for k, v in manifest.metrics.items())}"
        )
    if manifest.user_content is not None:
        lines.append(f"  user content   {json.dumps(manifest.user_content, ensure_ascii=False)}")
    if manifest.retention is not None:
        lines.append(f"  retention      {', '.join(manifest.retention)}")
    for part in manifest.parts:
        files = f" in {part.files} files" if part.files > 1 else ""
        files += f" ({size_text(part.linked_bytes)} linked)" if part.linked_bytes else ""
        files += f", chain {part.chain}" if part.chain else ""
        lines.append(
            f"  part           {part.file}  {size_text(part.bytes)}{files}, {part.items} items"
        )
    if tensors is not None:
        rows = [
            (name, str(found["size"]) if "size" in found else "-", found.get("dtype", "-"))
            for name, found in tensors.items()
        ]
        lines += ["", *as_table([("TENSOR", "SHAPE", "DTYPE"), *rows])]
    return "\n".join(map(printable, lines))


def verification(path: Location) -> Iterator[dict[str, Any]]:
    """Check all of each checkpoint at the path that can be checked without torch, every
    byte included, and yield one result for each.

    The member `unchecked` says what was not checked.

    Raises NotFound if there is no checkpoint, Busy if a checkpoint is being deleted.
    """
    if is_root(path):
        repository = existing_root(path)
        wanted = [
            (job, name) for job in repository.jobs() for name, _ in manifests(repository, job)
        ]
    else:
        repository, only, tag = find_job_or_checkpoint(path)
        wanted = (
            [(only, tag)]
            if tag is not None
            else [(only, name) for name, _ in manifests(repository, only)]
        )
    if not wanted:
        raise NotFound(f"{path} holds no checkpoint{meant(path)}")
    for job, name in wanted:
        begun = time.monotonic()
        called = title(repository, job, name)
        directory = (
            located(repository.where()).name
            if isinstance(repository, StandaloneCheckpoint)
            else name
        )
        result: dict[str, Any] = {
            "job": job,
            "tag": directory,
            "name": called,
            "ok": False,
            "bytes": 0,
            "error": None,
            "unchecked": [],
        }
        try:
            with closing(repository.lease(job, name)):
                # Of all parts together, since a tensor may lie in several.
                shards, values = Shards(), Checked()
                manifest = repository.read_manifest(job, name)
                for part in manifest.parts:
                    result["bytes"] += _verify_part(repository, job, name, part, shards, values)
                with damage_in(called):
                    shards.check()
                    shards.check_named(sorted(values.tensors))
                    if manifest.metadata_object is not None:
                        result["bytes"] += sum(
                            map(len, metadata_objects(repository, job, name, manifest).values())
                        )
                        entries, meshes = tensors(repository, job, name, manifest)
                        for fqn, entry in entries.items():
                            shards.check_described(fqn, stored_places(entry, meshes))
            result["ok"] = True
            result["unchecked"] = [
                *(
                    [f"{count_text(values.unjudged, 'value')} that only torch can decode"]
                    if values.unjudged
                    else []
                ),
                *(
                    [f"{count_text(values.newer, 'value')} of a newer version of ckptd"]
                    if values.newer
                    else []
                ),
            ]
        except NotFound:
            if len(wanted) == 1:
                raise
            continue  # deleted after it was listed
        except Busy:  # a deleter holds the lock, which is not damage
            raise
        except CkptdError as error:
            result["error"] = str(error)
        except OSError as error:
            result["error"] = str(StorageError.of(f"read {called}", error))
        result["seconds"] = round(time.monotonic() - begun, 3)
        yield result


def _verify_part(
    repository: Repository, job: str, tag: str, part: PartEntry, shards: Shards, values: Checked
) -> int:
    """Read every byte of a part, and check its values.

    Return the part's bytes on storage.

    Adds its shards to `shards`, and what its values name to `values`. Raises
    IntegrityError, OSError.
    """
    with closing(repository.open_part(job, tag, part.file, part.index_sha256)) as reader:
        found = (verify(reader), len(reader.plan.items), reader.nbytes, 1 + len(reader.index.files))
        if found != (part.raw_bytes, part.items, part.bytes, part.files):
            raise IntegrityError(
                f"{reader.name} does not have the sizes and counts that the manifest says"
            )
        with damage_in(reader.name):
            shards.add(reader.plan, part.rank)
            document = bytearray(reader.values[1])
            scatter(reader, [(reader.values[0], memoryview(document))])
            checked = check_values(bytes(document))
        values.tensors |= checked.tensors
        values.unjudged += checked.unjudged + sum(item.dtype == BLOB for item in reader.plan.items)
        values.newer += checked.newer
    return part.bytes


def verification_text(result: dict[str, Any]) -> str:
    where = result["name"]
    if result["ok"]:
        unchecked = (
            f"; not checked: {', '.join(result['unchecked'])}" if result["unchecked"] else ""
        )
        return (
            f"{where}: sound, {size_text(result['bytes'])} in {result['seconds']:.2f} s{unchecked}"
        )
    return printable(f"{where}: DAMAGED: {result['error']}")


def forgotten_text(row: dict[str, Any], *, dry_run: bool) -> str:
    size = f" ({size_text(row['bytes'])})" if row["bytes"] else ""
    if row["error"]:
        return f"{row['job']}/{row['tag']}: not deleted: {row['error']}"
    return f"{row['job']}/{row['tag']}: {'would be deleted' if dry_run else 'deleted'}{size}"


def as_table(rows: Sequence[Sequence[str]], columns: int | None = None) -> list[str]:
    """Return rows of cells as lines with aligned columns. The first row has the titles.

    columns: those of the window. If the table is wider, each row becomes several lines,
    with the title before each cell.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if columns is None or max(map(len, lines)) <= columns:
        return lines
    titles, *others = rows
    wide = max(map(len, titles))
    return [
        f"{title} {cell}" if number == 0 else f"  {title:<{wide}}  {cell}"
        for row in others
        for number, (title, cell) in enumerate(zip(titles, row, strict=True))
        if cell
    ]


def _ratio(stored: int, raw: int) -> str:
    return f"{stored / raw:.0%}" if raw else "-"
