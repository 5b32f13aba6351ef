"""Builds and parses the names of all files and directories below a root (FORMAT.md,
section 1), and the names of the files of a journal and of segments.

Other modules only add suffixes, such as `.tmp`. A sweep lists a directory, parses each
name and keeps the files that are in use. A file whose name does not parse does not
belong to ckptd and is never touched.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from ckptd.shared.errors import InvalidName

MANIFEST = "manifest.json"
MARKER = ".metadata"
"""The name of a marker beside the manifest, outside every root. DCP's own checkpoints
have their metadata, a pickle, under this name.
"""
NEWEST = "newest"
IDENTITY = "id"
CONTROL = ".ckptd"
LOCK = "lock"
JOURNAL = "journal"
JOURNAL_SPARE = "spare"
"""The name of an allocated file in the journal's directory. Its content means nothing;
it becomes the next journal file on a full disk.
"""
ATTEMPTS = "attempts"
PINS = "pins"
RUNS = "runs"
LEASES = "leases"
RETIRING = "retiring"
CAPABILITIES = "capabilities.json"
STAGE = "stage.json"
TMP_SUFFIX = ".tmp"

_IDENTITY = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG_DIRECTORY = re.compile(
    r"(?P<tag>[A-Za-z0-9][A-Za-z0-9._-]{0,127})\.a(?P<attempt>[0-9]{4,9})(?:\.t(?P<try>[0-9]{1,4}))?"
)
_STEP_TAG = re.compile(r"step-(?P<step>[0-9]{8,19})")
_PART = re.compile(
    r"rank-(?P<rank>[0-9]{5,9})\.(?P<nonce>[0-9a-f]{32})(?:\.(?P<number>[0-9]{4,9}))?\.ckpt"
)
_UNDER_WAY = re.compile(r"(?:manifest\.json|\.metadata)\.(?P<nonce>[0-9a-f]{32})\.tmp")
_RECEIPT = re.compile(r"receipt-(?P<rank>[0-9]{5,9})\.json")
_METADATA = re.compile(r"metadata\.[0-9a-f]{32}\.ckpt")
_ATTEMPT = re.compile(r"a(?P<attempt>[0-9]{4,9})")
_CLAIM = re.compile(r"(?P<name>.+)\.[0-9a-f]{32}")
_SEGMENT = re.compile(r"[0-9a-f]{32}\.seg")
_JOURNAL_FILE = re.compile(r"(?P<number>[0-9a-f]{16})\.log")


@dataclass(frozen=True, slots=True)
class TagName:
    """The meaning of the name of a checkpoint's directory.

    `tag`: `best`, or `step-00001000`. `step`: None if the user chose the tag, because
    then only the manifest knows the step.
    """

    tag: str
    step: int | None
    attempt: int

    @property
    def by_user(self) -> bool:
        return self.step is None

    @property
    def order(self) -> tuple[int, int]:
        """The attempt and the step, with -1 for a step that the name does not tell."""
        return (self.attempt, -1 if self.step is None else self.step)


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be a file name.

    `kind` is the word for it in the error text: "job" or "tag".

    Raises InvalidName otherwise, with one sentence that says which names are allowed.
    """
    if not isinstance(name, str) or not is_name(name):
        shown = repr(name if not isinstance(name, str) or len(name) <= 60 else name[:60] + "…")
        raise InvalidName(
            f"{kind} {shown} cannot be a name: use 1 to 128 of the letters A-Z a-z 0-9 . _ -, "
            f"beginning with a letter or digit"
        )
    return name


def check_user_tag(tag: str) -> str:
    """Return `tag` if it can be a user's tag of a checkpoint.

    Raises InvalidName otherwise, also for `step-...`, which ckptd itself uses.
    """
    check_name("tag", tag)
    if tag.startswith("step-"):
        raise InvalidName(
            f"tag {tag!r} cannot be used: names beginning with 'step-' are made by ckptd; leave "
            f"tag= out or choose another"
        )
    return tag


def check_new_tag(tag: str) -> str:
    """Return `tag` if a user may give it to a new checkpoint.

    Raises InvalidName otherwise, also for `newest`, which chooses a checkpoint. Earlier
    versions of ckptd accepted that tag, so a checkpoint may have it.
    """
    if tag == NEWEST:
        raise InvalidName(
            f"tag {tag!r} cannot be used: it means the newest checkpoint of a job; leave tag= out "
            f"or choose another"
        )
    return check_user_tag(tag)


def tag_directory(step: int | None, tag: str | None, attempt: int) -> str:
    """Return the name of a checkpoint's directory.

    In attempt 2 it is `<tag>.a0002`, or `step-00001000.a0002` if `tag` is None.
    """
    stem = tag if tag is not None else f"step-{step:08d}"
    return f"{stem}.a{attempt:04d}"


def try_directory(directory: str, number: int) -> str:
    """Return the name of the directory for a try of a step of several nodes: that of
    the checkpoint for try 1, `<name>.t2` for try 2.
    """
    return directory if number == 1 else f"{directory}.t{number}"


def parse_tag_directory(name: str) -> TagName | None:
    """Return the meaning of the name of a checkpoint's directory, or None if ckptd does
    not make directories of this name.
    """
    match = _TAG_DIRECTORY.fullmatch(name)
    if match is None:
        return None
    tag, attempt = match["tag"], int(match["attempt"])
    found = _STEP_TAG.fullmatch(tag)
    step = int(found["step"]) if found else None
    if tag.startswith("step-") and step is None:
        return None
    directory = tag_directory(step, tag if step is None else None, attempt)
    number = int(match["try"] or 1)
    exact = try_directory(directory, number) == name and (match["try"] is None or number > 1)
    return TagName(tag, step, attempt) if exact else None


def part_file(rank: int, nonce: bytes, number: int = 0) -> str:
    """Return the name of a part file, if `number` is 0, or of the data file of that
    part with this number.
    """
    data = f".{number:04d}" if number else ""
    return f"rank-{rank:05d}.{nonce.hex()}{data}.ckpt"


def parse_part_file(name: str) -> tuple[int, bytes] | None:
    """Return the rank and the nonce in the name of a part file, or None for any other
    name, that of a data file included.
    """
    parsed = _parse_part_file(name)
    return parsed[:2] if parsed is not None and not parsed[2] else None


def _parse_part_file(name: str) -> tuple[int, bytes, int] | None:
    match = _PART.fullmatch(name)
    if match is None:
        return None
    parsed = int(match["rank"]), bytes.fromhex(match["nonce"]), int(match["number"] or 0)
    return parsed if part_file(*parsed) == name else None


def part_of(name: str) -> str | None:
    """Return the name of the part file that a part file or data file belongs to, or
    None for other names. A part file belongs to itself.
    """
    parsed = _parse_part_file(name)
    return None if parsed is None else part_file(*parsed[:2])


def metadata_file(sha256: str) -> str:
    """Return the name of the metadata object whose bytes have this sha256, in
    hexadecimal digits.
    """
    return f"metadata.{sha256[:32]}.ckpt"


def is_metadata_file(name: str) -> bool:
    """Return True if this is the name of a metadata object."""
    return _METADATA.fullmatch(name) is not None


def receipt_file(first_rank: int) -> str:
    """Return the name of the receipt of the node whose lowest rank is `first_rank`."""
    return f"receipt-{first_rank:05d}.json"


def parse_receipt_file(name: str) -> int | None:
    """Return the lowest rank of the node whose receipt has this name, or None for
    another name.
    """
    match = _RECEIPT.fullmatch(name)
    rank = int(match["rank"]) if match else None
    return rank if rank is not None and receipt_file(rank) == name else None


def is_checkpoint_file(name: str) -> bool:
    """Return True if ckptd may have made a file of this name in the directory of a
    checkpoint.
    """
    stem = name.removesuffix(TMP_SUFFIX)
    if stem != name:
        stem = claimed(stem)
    return (
        stem == MANIFEST
        or parse_receipt_file(stem) is not None
        or is_metadata_file(stem)
        or part_of(name) is not None
    )


def is_standalone_file(name: str) -> bool:
    """Return True if ckptd may have left a file of this name in a directory that holds
    one checkpoint by itself, outside every root.

    Such a file is a part file, a data file, a metadata object, or a manifest or a
    marker under publication.
    """
    return part_of(name) is not None or is_metadata_file(name) or publisher_of(name) is not None


def publisher_of(name: str) -> str | None:
    """Return the nonce of the part whose saver publishes a file of this name, a
    manifest or a marker outside every root, or None.
    """
    match = _UNDER_WAY.fullmatch(name)
    return match["nonce"] if match else None


def is_identity(text: str) -> bool:
    """Return True if `text` is the identity of a root: 32 hexadecimal digits."""
    return _IDENTITY.fullmatch(text) is not None


def attempt_file(attempt: int) -> str:
    return f"a{attempt:04d}"


def parse_attempt_file(name: str) -> int | None:
    """Return the attempt that a claim is for, or None for another name."""
    name = claimed(name)
    match = _ATTEMPT.fullmatch(name)
    attempt = int(match["attempt"]) if match else None
    return attempt if attempt is not None and attempt_file(attempt) == name else None


def claimed(name: str) -> str:
    """Return the name that a claim is for: some stores need a nonce behind it
    (FORMAT.md, section 6).
    """
    match = _CLAIM.fullmatch(name)
    return match["name"] if match else name


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def new_segment_file() -> str:
    return f"{secrets.token_hex(16)}.seg"


def is_segment_file(name: str) -> bool:
    return _SEGMENT.fullmatch(name) is not None


def journal_file(number: int) -> str:
    return f"{number:016x}.log"


def parse_journal_file(name: str) -> int | None:
    match = _JOURNAL_FILE.fullmatch(name)
    return int(match["number"], 16) if match else None


def control(host: str) -> str:
    """Return the prefix of the objects below a root that belong to the daemon of this
    host.
    """
    return f"{CONTROL}/{host}"


def attempts(job: str) -> str:
    """Return the prefix of the claims of a job's attempts."""
    return f"{CONTROL}/{ATTEMPTS}/{job}"


def pins(job: str) -> str:
    """Return the prefix of the pins of a job."""
    return f"{CONTROL}/{PINS}/{job}"


def runs(job: str) -> str:
    """Return the prefix of the heartbeats of a job.

    The heartbeat of an attempt has the name of its claim: `attempt_file`.
    """
    return f"{CONTROL}/{RUNS}/{job}"
