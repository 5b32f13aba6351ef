"""Merges and checks the daemon's settings.

Flags win over `CKPTD_*` variables, variables over the TOML file, the file over
defaults.

Only the values are checked here. Paths and disks are checked where they are used.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.daemon.http_address import HttpAddress, parse_http_address
from ckptd.shared.codecs import codec
from ckptd.shared.errors import InvalidConfig
from ckptd.shared.formats.part_writer import Spread
from ckptd.shared.formats.plan import DEFAULT_CHUNK, MAX_CHUNK, MIN_CHUNK
from ckptd.shared.location import NO_PLACE, Location, Url, local, located
from ckptd.shared.retention import LatestN, Policy, PreserveAll, parse
from ckptd.shared.system.machine import default_state_dir
from ckptd.shared.system.numa import parse_cpus
from ckptd.shared.system.settings import FOREIGN_MEMORY_CHOICES, NOT_OF_THE_DAEMON, PREFIX, nearest
from ckptd.shared.units import parse_size

_SLOTS_WITH_REPLICAS = 3
_LEAST_BANDWIDTH = 10**6
_MOST_STALL = 3600.0  # the longest wait that a message of the protocol can ask for
_MOST_INT = (1 << 63) - 1  # numbers in messages, files and policies have 64 bits
REPLICA_SLOTS = 2
"""The segments for copies of one rank of another node: one that holds a whole copy, and
one that receives the next.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one daemon.

    Making an instance raises InvalidConfig if a value is not allowed.
    """

    root: Location
    """Place of the checkpoints of all jobs: an absolute path, or a URL like
    `s3://BUCKET/PREFIX`. A missing directory is created.
    """
    stage: Path | None = None
    """Directory on a local disk where checkpoints are committed first; they are
    uploaded to the root afterwards. None for no stage.
    """
    socket: Path
    """Unix socket that the daemon listens on, as an absolute path of at most 107 bytes."""
    state_dir: Path = dataclasses.field(default_factory=default_state_dir)
    """Directory on a local disk for the journals of all roots. It should outlive the
    daemon: keep it on a volume in a container.
    """
    codec: str = "auto"
    """Encoding of stored chunks: `auto`, `raw`, `zstd`, `zstd:LEVEL` or `planes`."""
    slots: int = 2
    """Slots for each rank, 2 to 8. Two are enough unless saves take longer than the
    time between snapshots. With `replicas`, there are three at least.
    """
    replicas: int = 0
    """Copies of each snapshot in the memory of other nodes, 0 or 1, for jobs of several
    nodes. The daemons of all nodes need the same number.
    """
    replica_bandwidth: int = 0
    """The most bytes a second that each rank sends to its peer; 0 means no limit."""
    domain: str = ""
    """Name of what this node fails with, like its rack or zone. A node has its copies
    on a node of another domain. Empty means that it fails alone.
    """
    shm_dir: Path = Path("/dev/shm")
    """Directory for the slots, in a tmpfs. A container with a small /dev/shm needs
    another one.
    """
    shm_quota: int = 0
    """Bytes that all slots together may take; 0 means nine tenths of the tmpfs."""
    overflow: bool = True
    """Put slots that do not fit into shm_dir into files in state_dir, on the local
    disk. A shm_quota that is set is never exceeded.
    """
    memory_ttl: float = 900.0
    """Seconds for which the snapshots of a dead trainer stay in memory once they are
    durable.
    """
    keep_last: int = 10
    """The number of a job's newest checkpoints that are kept; 0 keeps all.

    Retention neither counts nor deletes checkpoints with a user's own tag.
    """
    make_room: bool = False
    """Let a save on a full disk delete the job's oldest checkpoints early, never the
    newest, and try again.
    """
    root_quota: int = 0
    """Bytes that the checkpoints of all jobs may hold before the daemon warns; 0 means
    no limit. Nothing is deleted because of it.
    """
    keep: tuple[Policy, ...] = ()
    """More retention policies, like `EveryNSteps(1000)` or `BestN('loss', 3)`, for jobs
    that have none of their own.
    """
    stall_budget: float = 10.0
    """Seconds for which `snapshot(on_busy="wait")` may hold up the training."""
    storage_timeout: float = 30.0
    """Seconds that the root has to answer when it is listed or read. After that the
    request fails. Saves wait as long as it takes.
    """
    rank_timeout: float = 60.0
    """Seconds from the first rank's call for a step until the step is given up, if
    another rank has not sealed it.
    """
    node_timeout: float = 600.0
    """Seconds for which a step of several nodes waits for the parts of the other nodes
    before it is given up.
    """
    threads: int = 0
    """Threads that make checksums; twice as many compress and write. 0 means one for
    each CPU, 8 at most.
    """
    cpus: str = ""
    """CPUs on which these threads may run, like `0-3,8`; empty means all that the
    daemon may use.
    """
    memory_budget: int = 128 << 20
    """Bytes of buffers that saves may use, whatever the size of a snapshot; at least
    four chunks.
    """
    chunk_size: int = DEFAULT_CHUNK
    """Raw bytes of a chunk: 64 KiB to 16 MiB, a multiple of 4096."""
    files_per_rank: int = 1
    """Files that a rank's part of a checkpoint is spread over, 1 to 64. More than one
    pays where each file lies on one of many disks.
    """
    bytes_per_file: int = 0
    """The most bytes in one file of a checkpoint; a longer part is divided into more
    files. 0 means no limit.
    """
    link_unchanged: bool = True
    """Link the files of tensors that have not changed since the checkpoint before,
    instead of writing these tensors again.
    """
    deltas: str = "auto"
    """Storage of tensors that change little: `auto` stores chunks as deltas of the
    checkpoint before where they are durable as soon, `small` where they become smaller,
    `off` stores all chunks whole. Needs link_unchanged.
    """
    foreign_memory: str = "refuse"
    """The treatment of snapshots in memory that were saved for another root than this
    one.

    `refuse` refuses runs of their jobs, `adopt` adopts them into this root, and `drop`
    deletes them.
    """
    max_connections: int = 256
    """The most clients that may be connected at the same time."""
    strict_journal: bool = False
    """Refuse to start if the journal is corrupt, instead of rebuilding it from storage
    and memory.
    """
    private: bool = False
    """True if an agent has started the daemon for itself: the daemon ends when nothing
    is left to do.
    """
    idle_timeout: float = 10.0
    """Seconds without clients, slots and work after which a private daemon ends."""
    log_file: Path | None = None
    """File for the log, as an absolute path, or None for standard error. At 10 MiB it
    becomes `FILE.1`, and a new one begins.
    """
    log_level: str = "info"
    """Lowest level of the messages in the log: `debug`, `info`, `warning` or `error`."""
    log_format: str = "text"
    """Format of the log: `text`, or `json` with one object for each line."""
    history: bool = True
    """Keep a history of what the daemon did, in state_dir, for `ckptd history`."""
    on_event: str = ""
    """Command for /bin/sh, or http(s) URL, that is told of recoveries, and of events of
    level warning and above. Empty means none.
    """
    http: str = ""
    """Loopback address or Unix socket at which metrics and probes are served, like
    `127.0.0.1:9419` or `unix:PATH`; empty for none.
    """
    metrics_file: Path | None = None
    """File, as an absolute path that ends in `.prom`, into which the metrics are written
    for the node exporter; None for no file.
    """

    def __post_init__(self) -> None:
        for name in (name for name, field in FIELDS.items() if field.type == "int"):
            _require(getattr(self, name) <= _MOST_INT, name, getattr(self, name), "less than 2^63")
        codec.encoder(self.codec)
        _require(
            isinstance(self.root, Url) or self.root.is_absolute(),
            "root",
            self.root,
            "an absolute path or a URL",
        )
        _require(
            self.socket.is_absolute() and len(os.fsencode(self.socket)) < 108,
            "socket",
            self.socket,
            "an absolute path of at most 107 bytes",
        )
        if self.stage is not None:
            _require(self.stage.is_absolute(), "stage", self.stage, "an absolute path")
            apart = (
                self.root not in (self.stage, *self.stage.parents)
                and self.stage not in self.root.parents
            )
            _require(
                apart,
                "stage",
                self.stage,
                f"a directory that neither lies in the root {self.root} nor holds it",
            )
        _require(self.state_dir.is_absolute(), "state_dir", self.state_dir, "an absolute path")
        _require(self.shm_dir.is_absolute(), "shm_dir", self.shm_dir, "an absolute path")
        _require(2 <= self.slots <= 8, "slots", self.slots, "2 to 8")
        _require(self.replicas in (0, 1), "replicas", self.replicas, "0 or 1")
        if self.replicas:
            # The step that is in the peers keeps a slot until a later one is, too.
            object.__setattr__(self, "slots", max(self.slots, _SLOTS_WITH_REPLICAS))
        _require(
            self.replica_bandwidth == 0 or self.replica_bandwidth >= _LEAST_BANDWIDTH,
            "replica_bandwidth",
            self.replica_bandwidth,
            "0, or at least 1M: a slower peer counts as lost",
        )
        _require(len(self.domain) <= 128, "domain", self.domain, "at most 128 characters")
        _require(self.keep_last >= 0, "keep_last", self.keep_last, "0 (all) or more")
        _require(
            MIN_CHUNK <= self.chunk_size <= MAX_CHUNK,
            "chunk_size",
            self.chunk_size,
            f"{MIN_CHUNK} to {MAX_CHUNK} bytes",
        )
        _require(
            self.chunk_size % 4096 == 0, "chunk_size", self.chunk_size, "a multiple of 4096 bytes"
        )
        _require(
            self.memory_budget >= 4 * self.chunk_size,
            "memory_budget",
            self.memory_budget,
            "at least four chunks",
        )
        Spread.checked(self.files_per_rank, self.bytes_per_file, self.chunk_size)
        _require(0 <= self.threads <= 256, "threads", self.threads, "0 (automatic) to 256")
        _require(
            self.log_level in ("debug", "info", "warning", "error"),
            "log_level",
            self.log_level,
            "debug, info, warning or error",
        )
        _require(self.log_format in ("text", "json"), "log_format", self.log_format, "text or json")
        _require(
            self.deltas in ("auto", "small", "off"), "deltas", self.deltas, "auto, small or off"
        )
        _require(
            self.foreign_memory in FOREIGN_MEMORY_CHOICES,
            "foreign_memory",
            self.foreign_memory,
            "refuse, adopt or drop",
        )
        _ = self.http_address
        _require(
            self.metrics_file is None
            or (self.metrics_file.is_absolute() and self.metrics_file.suffix == ".prom"),
            "metrics_file",
            self.metrics_file,
            "a path that ends in .prom, because the node exporter reads no other files",
        )
        _require(self.max_connections >= 1, "max_connections", self.max_connections, "1 or more")
        for name in (
            "shm_quota",
            "root_quota",
            "memory_ttl",
            "stall_budget",
            "idle_timeout",
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(
            self.stall_budget <= _MOST_STALL,
            "stall_budget",
            self.stall_budget,
            "at most 3600 seconds",
        )
        _require(self.storage_timeout > 0, "storage_timeout", self.storage_timeout, "more than 0")
        _require(self.rank_timeout > 0, "rank_timeout", self.rank_timeout, "more than 0")
        _require(self.node_timeout > 0, "node_timeout", self.node_timeout, "more than 0")
        cpus = self.worker_cpus
        if self.threads == 0:
            object.__setattr__(self, "threads", min(8, len(cpus)))

    @property
    def segments(self) -> int:
        """The most segments for each rank of this node: its slots, and those for copies
        of a rank of another node.
        """
        return self.slots + (REPLICA_SLOTS if self.replicas else 0)

    @property
    def worker_cpus(self) -> set[int]:
        """The CPUs on which the worker threads may run.

        Raises InvalidConfig if `cpus` is not a list of CPUs that the daemon may use.
        """
        allowed = os.sched_getaffinity(0)
        try:
            wanted = parse_cpus(self.cpus) if self.cpus else allowed
        except ValueError:
            wanted = set()
        _require(
            bool(wanted) and wanted <= allowed,
            "cpus",
            self.cpus,
            f"some of the CPUs {_cpu_list(allowed)}, written like 0-3,8",
        )
        return wanted

    @property
    def http_address(self) -> HttpAddress | None:
        """The address at which metrics and probes are served, or None for none.

        Raises InvalidConfig if `http` is not an address of this machine.
        """
        try:
            return parse_http_address(self.http) if self.http else None
        except ValueError as error:
            raise InvalidConfig(str(error)) from None

    @property
    def spread(self) -> Spread:
        """The number and the largest size of the files that a rank's part is spread
        over.
        """
        return Spread.checked(self.files_per_rank, self.bytes_per_file, self.chunk_size)

    @property
    def open_files(self) -> int:
        """The most files that the save of a rank keeps open: unchanged tensors may get
        as many files of their own as the others.
        """
        return self.files_per_rank * (2 if self.link_unchanged else 1)

    @property
    def retention(self) -> tuple[Policy, ...]:
        """The retention policies for jobs that have none of their own."""
        return (LatestN(self.keep_last) if self.keep_last else PreserveAll(), *self.keep)


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Config:
    """Return the settings, merged from flags, environment and TOML file.

    Raises InvalidConfig.

    flags: only the flags that were given.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values |= {key: _convert(key, value, f"{file}: ") for key, value in read_file(file).items()}
    for variable, text in environ.items():
        key = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and key not in NOT_OF_THE_DAEMON:
            values[key] = _convert(key, text, f"{variable}: ")
    values |= {
        key: _convert(key, value, f"--{key.replace('_', '-')}: ") for key, value in flags.items()
    }
    if "root" not in values:
        raise InvalidConfig(
            "no root: say where checkpoints go with --root DIR, CKPTD_ROOT or root = in the "
            "config file"
        )
    if "socket" not in values:
        raise InvalidConfig(
            "no socket: name one with --socket PATH, CKPTD_SOCKET or socket = in the config file"
        )
    values["socket"] = Path(os.path.abspath(values["socket"]))
    if "stage" in values:
        values["stage"] = local(values["stage"], "stage")
    for key in {"state_dir", "log_file", "metrics_file"} & values.keys():
        values[key] = Path(os.path.abspath(values[key]))
    return Config(**values)


def read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidConfig(f"cannot read the config file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{file} is not TOML: {error}") from None


def _convert(key: str, value: Any, where: str) -> Any:
    field = FIELDS.get(key)
    if field is None:
        near = nearest(key, FIELDS)
        hint = (
            f"; did you mean {near!r}?"
            if near
            else f"; the settings are {', '.join(sorted(FIELDS))}"
        )
        raise InvalidConfig(f"{where}there is no setting {key!r}{hint}")
    if key == "root" and isinstance(value, (str, os.PathLike, Url)):
        return _root(value, where)
    try:
        if field.type in ("Path", "Path | None"):
            if not (text := _text(value)):
                raise InvalidConfig(f"{where}{key}: {NO_PLACE}")
            return Path(os.path.expanduser(text))
        if field.type == "bool":
            return (
                value
                if isinstance(value, bool)
                else {"true": True, "1": True, "false": False, "0": False}[_text(value).lower()]
            )
        if field.type == "int":
            return value if type(value) is int else parse_size(_text(value))
        if field.type == "float":
            return float(value)
        return _policies(value, where) if key == "keep" else _text(value)
    except InvalidConfig:
        raise  # it is a ValueError, and says what is wrong with a policy
    except (ValueError, KeyError, TypeError):
        kind = {
            "int": "a number (k, M, G, Ki, Mi, Gi allowed)",
            "bool": "true or false",
            "float": "a number of seconds",
        }
        raise InvalidConfig(
            f"{where}{key} is {value!r}; expected {kind.get(str(field.type), 'text')}"
        ) from None


def _root(value: Any, where: str) -> Location:
    try:
        return located(value if isinstance(value, Url) else os.path.expanduser(_text(value)))
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}root: {error}") from None


def _policies(value: Any, where: str) -> tuple[Policy, ...]:
    """Return the policies of a list of texts, or of one text with semicolons between
    them. Raises InvalidConfig.
    """
    texts = value.split(";") if isinstance(value, str) else list(value)
    try:
        return tuple(parse(_text(text)) for text in texts if _text(text).strip())
    except ValueError as error:
        raise InvalidConfig(f"{where}{error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError
    return str(os.fspath(value))


def _cpu_list(cpus: set[int]) -> str:
    """Return a list of CPUs in the kernel's form, like "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise InvalidConfig(f"{name} is {str(value)!r}; expected {expected}")
