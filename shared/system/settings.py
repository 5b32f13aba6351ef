"""The names of the `CKPTD_*` variables: the settings of a daemon, and those that only a
training process reads.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

PREFIX = "CKPTD_"
SETTINGS = frozenset({
    "root", "stage", "socket", "state_dir", "codec", "slots", "replicas",
    "replica_bandwidth", "domain", "shm_dir", "shm_quota", "overflow",
    "memory_ttl", "keep_last", "make_room", "root_quota", "keep", "stall_budget", "storage_timeout",
    "rank_timeout", "node_timeout", "threads", "cpus", "memory_budget", "chunk_size",
    "files_per_rank", "bytes_per_file", "link_unchanged", "deltas", "foreign_memory",
    "max_connections", "strict_journal", "private", "idle_timeout", "log_file", "log_level",
    "log_format", "history", "on_event", "http", "metrics_file",
})  # fmt: skip
"""The settings of a daemon."""
FOREIGN_MEMORY = "foreign_memory"
FOREIGN_MEMORY_CHOICES = ("refuse", "adopt", "drop")
"""The values of a daemon's setting for snapshots in memory that were saved for another
root.

A training process may override the setting.
"""
NOT_OF_THE_DAEMON = frozenset(
    {"job", "takeover", "compare_replicas", "failpoints", "python", "config", "page_token"}
)
"""The other variables, which the training process, the tests and the command line read."""


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set something of a daemon, except its place and
    `foreign_memory`.

    The place consists of the root, the socket and the state directory. A training
    process sends `foreign_memory` itself when it begins.
    """
    names = SETTINGS - {"root", "socket", "state_dir", "private", FOREIGN_MEMORY}
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() in names
    }


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name that is spelled most like the given one, or "" if none is alike."""
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)), "")


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the `CKPTD_*` variables that mean nothing, each with the variable that is
    spelled most like it, or "".
    """
    known = SETTINGS | NOT_OF_THE_DAEMON
    found = {}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in known:
            near = nearest(name, known)
            found[variable] = near and f"{PREFIX}{near.upper()}"
    return found
