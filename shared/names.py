"""Every path and file name that ckptd writes, built and parsed here and nowhere else (FORMAT.md, section 1).

Sweeping is: list, parse, keep what is live. What does not parse is not ours and is never touched.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import secrets
import socket
from pathlib import Path

from ckptd.shared.errors import InvalidName
from ckptd.shared.owners import is_usable_for_sockets, own_directories, own_directory

MANIFEST = "manifest.json"
NEWEST = "newest"
CONTROL = ".ckptd"
LOCK = "lock"
JOURNAL = "journal"
JOURNAL_SPARE = "spare"
"""In the journal's directory: an allocated file that holds nothing, to become the next journal file when the disk is full."""
ATTEMPTS = "attempts"
PINS = "pins"
TMP_SUFFIX = ".tmp"

_MOST_OF_A_SOCKET = 96
"""Bytes of a path: a socket's address holds 107, unix(7), and a little is put behind it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG_DIRECTORY = re.compile(r"(?P<tag>[A-Za-z0-9][A-Za-z0-9._-]{0,127})\.a(?P<attempt>[0-9]{4,9})")
_STEP_TAG = re.compile(r"step-(?P<step>[0-9]{8,19})")
_PART = re.compile(r"rank-(?P<rank>[0-9]{5,9})\.(?P<nonce>[0-9a-f]{32})(?:\.(?P<number>[0-9]{4,9}))?\.ckpt")
_UNDER_WAY = re.compile(r"manifest\.json\.[0-9a-f]{32}\.tmp")
_ATTEMPT = re.compile(r"a(?P<attempt>[0-9]{4,9})")
_SEGMENT = re.compile(r"[0-9a-f]{32}\.seg")
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/")
_JOURNAL_FILE = re.compile(r"(?P<number>[0-9a-f]{16})\.log")


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may become a file name. Raises InvalidName in one sentence otherwise; `kind` is "job" or "tag"."""
    if not isinstance(name, str) or not is_name(name):
        shown = repr(name if not isinstance(name, str) or len(name) <= 60 else name[:60] + "…")
        raise InvalidName(
            f"{kind} {shown} cannot be a name: use 1 to 128 of the letters A-Z a-z 0-9 . _ -, beginning with a letter or digit"
        )
    return name


def check_user_tag(tag: str) -> str:
    """Like `check_name`, and not one of ckptd's own `step-...`."""
    check_name("tag", tag)
    if tag.startswith("step-"):
        raise InvalidName(f"tag {tag!r} cannot be used: names beginning with 'step-' are made by ckptd; leave tag= out or choose another")
    return tag


def tag_directory(step: int | None, tag: str | None, attempt: int) -> str:
    """`step-00001000.a0002`, or `<tag>.a0002` for the user's own tag."""
    stem = tag if tag is not None else f"step-{step:08d}"
    return f"{stem}.a{attempt:04d}"


def parse_tag_directory(name: str) -> tuple[str, int | None, int] | None:
    """(tag, step or None for a user's tag, attempt), or None if the name is not ours."""
    match = _TAG_DIRECTORY.fullmatch(name)
    if match is None:
        return None
    tag, attempt = match["tag"], int(match["attempt"])
    found = _STEP_TAG.fullmatch(tag)
    step = int(found["step"]) if found else None
    if tag.startswith("step-") and step is None:
        return None
    return (tag, step, attempt) if tag_directory(step, tag if step is None else None, attempt) == name else None


def part_file(rank: int, nonce: bytes, number: int = 0) -> str:
    """A part; or, from 1 on, its data file of that number."""
    data = f".{number:04d}" if number else ""
    return f"rank-{rank:05d}.{nonce.hex()}{data}.ckpt"


def parse_part_file(name: str) -> tuple[int, bytes] | None:
    """Rank and nonce; None also for a data file."""
    parsed = _parse_part_file(name)
    return parsed[:2] if parsed is not None and not parsed[2] else None


def _parse_part_file(name: str) -> tuple[int, bytes, int] | None:
    match = _PART.fullmatch(name)
    if match is None:
        return None
    parsed = int(match["rank"]), bytes.fromhex(match["nonce"]), int(match["number"] or 0)
    return parsed if part_file(*parsed) == name else None


def part_of(name: str) -> str | None:
    """The part that a file belongs to: itself, or the one whose data file it is."""
    parsed = _parse_part_file(name)
    return None if parsed is None else part_file(*parsed[:2])


def is_standalone_file(name: str) -> bool:
    """Whether ckptd may have left it in a directory that is a checkpoint by itself: a file of a part, or a manifest under publication."""
    return part_of(name) is not None or _UNDER_WAY.fullmatch(name) is not None


def attempt_file(attempt: int) -> str:
    return f"a{attempt:04d}"


def parse_attempt_file(name: str) -> int | None:
    match = _ATTEMPT.fullmatch(name)
    attempt = int(match["attempt"]) if match else None
    return attempt if attempt is not None and attempt_file(attempt) == name else None


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


def host() -> str:
    """This host's name, made fit for a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()).lstrip("._-")[:128] or "localhost"


def root_digest(root: Path) -> str:
    return hashlib.sha256(os.fsencode(root)).hexdigest()[:16]


def segment_directory(root: Path) -> str:
    """Return the name of this user's and root's directory in the tmpfs. Where another user has taken it, `.` and 16 hex digits follow."""
    return f"ckptd-{os.getuid()}-{root_digest(root)}"


def private_socket(root: Path) -> Path:
    """Return the path where a private daemon of `root` is to listen: short, so that it fits a socket address, and not under the root.

    The path is in $XDG_RUNTIME_DIR if that is a directory of this user, else in a directory of this user in /tmp, which may not exist yet.
    """
    name = f"ckptd-{root_digest(root)}.sock"
    runtime = _runtime_directory()
    if runtime is not None and len(os.fsencode(runtime)) + len(name) < _MOST_OF_A_SOCKET:
        return runtime / name
    return own_directory(_plain_socket_directory()) / name


def private_sockets(root: Path) -> list[Path]:
    """Return every path where a private daemon of `root` may listen, best first: its environment may have been another one."""
    first = private_socket(root)
    others = [directory / first.name for directory in own_directories(_plain_socket_directory())]
    return [first, *(path for path in others if path != first)]


def default_sockets() -> list[Path]:
    """Return the paths where an agent looks when no socket is named: the system's daemon of this user, then the user's own."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run with uids that have no name
        user = str(os.getuid())
    places = [Path("/run/ckptd") / f"{user}.sock"]
    if (runtime := _runtime_directory()) is not None:
        places.append(runtime / "ckptd.sock")
    return places


def _plain_socket_directory() -> Path:
    return Path(f"/tmp/ckptd-{os.getuid()}")


def _runtime_directory() -> Path | None:
    """Return $XDG_RUNTIME_DIR, unless it is missing, stale or another user's, as after `su`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) if runtime and os.path.isabs(runtime) and is_usable_for_sockets(Path(runtime)) else None


def url_scheme(root: str | os.PathLike[str]) -> str:
    """Return the scheme of a root that is a URL, such as "s3", or "" for a path. A `Path` made from a URL has lost one of its slashes."""
    match = _SCHEME.match(os.fspath(root))
    return match["scheme"] if match else ""
