"""Tests settings: their precedence, how sizes are written, and every bound."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.daemon.config import FIELDS, Config, load
from ckptd.shared.errors import InvalidConfig
from ckptd.shared.formats.plan import DEFAULT_CHUNK
from ckptd.shared.location import Url
from ckptd.shared.retention import BestN, EveryNSteps
from ckptd.shared.system.machine import default_state_dir
from ckptd.shared.wire import messages as m
from tests.support.cases import each_case

ROOT = {"root": "/ckpts", "socket": "/run/ckptd/s"}


OWN_CPU = str(min(os.sched_getaffinity(0)))


def make(**changes: Any) -> Config:
    return Config(**{"root": Path("/ckpts"), "socket": Path("/run/ckptd/s"), **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ckptd.toml"


# -- precedence


def test_defaults() -> None:
    config = load(ROOT, {}, None)
    assert dataclasses.asdict(config) | {"threads": 0} == {
        "root": Path("/ckpts"), "stage": None, "socket": Path("/run/ckptd/s"),
        "state_dir": default_state_dir(), "codec": "auto", "slots": 2, "replicas": 0,
        "replica_bandwidth": 0, "domain": "", "shm_dir": Path("/dev/shm"),
        "shm_quota": 0, "overflow": True, "memory_ttl": 900.0, "keep_last": 10, "make_room": False,
        "root_quota": 0, "keep": (), "stall_budget": 10.0, "storage_timeout": 30.0,
        "rank_timeout": 60.0, "node_timeout": 600.0,
        "threads": 0, "cpus": "", "memory_budget": 128 << 20, "chunk_size": 8 << 20,
        "files_per_rank": 1, "bytes_per_file": 0, "link_unchanged": True, "deltas": "auto",
        "foreign_memory": "refuse", "max_connections": 256, "strict_journal": False,
        "private": False, "idle_timeout": 10.0, "log_file": None, "log_level": "info",
        "log_format": "text", "history": True, "on_event": "",
        "http": "", "metrics_file": None,
    }  # fmt: skip


def test_threads_follow_the_cpus_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, threads in ((1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=cpus: set(range(n)))
        assert make().threads == threads
    assert make(threads=20).threads == 20
    assert make(cpus="1,3-5").threads == 4
    with pytest.raises(
        InvalidConfig, match=r"^cpus is '64'; expected some of the CPUs 0-63, written like 0-3,8$"
    ):
        make(cpus="64")


def test_flags_beat_the_environment_and_that_beats_the_file(file: Path) -> None:
    file.write_text('keep_last = 1\nslots = 3\ncodec = "raw"\nmemory_ttl = 5\n')
    environment = {"CKPTD_KEEP_LAST": "2", "CKPTD_SLOTS": "4", "PATH": "/bin", "ckptd_codec": "x"}
    config = load({**ROOT, "keep_last": 3}, environment, file)
    assert (config.keep_last, config.slots, config.codec, config.memory_ttl) == (3, 4, "raw", 5.0)
    config = load(ROOT, environment, file)
    assert (config.keep_last, config.slots, config.codec) == (2, 4, "raw")
    config = load(ROOT, {}, file)
    assert (config.keep_last, config.slots, config.codec) == (1, 3, "raw")
    assert load({**ROOT, "keep_last": 0}, environment, file).keep_last == 0


SAMPLES: dict[str, tuple[str, str, Any]] = {
    "root": ('"/elsewhere"', "/elsewhere", Path("/elsewhere")),
    "state_dir": ('"/elsewhere/state"', "/elsewhere/state", Path("/elsewhere/state")),
    "socket": ('"/elsewhere/s"', "/elsewhere/s", Path("/elsewhere/s")),
    "codec": ('"zstd:5"', "zstd:5", "zstd:5"),
    "slots": ("5", "5", 5),
    "replicas": ("1", "1", 1),
    "replica_bandwidth": ('"2G"', "2G", 2 * 10**9),
    "domain": ('"rack7"', "rack7", "rack7"),
    "shm_dir": ('"/mnt/shm"', "/mnt/shm", Path("/mnt/shm")),
    "shm_quota": ('"24G"', "24G", 24 * 10**9),
    "make_room": ("true", "1", True),
    "root_quota": ('"2TB"', "2TB", 2 * 10**12),
    "overflow": ("false", "0", False),
    "memory_ttl": ("2.5", "2.5", 2.5),
    "keep_last": ("7", "7", 7),
    "keep": (
        '["EveryNSteps(100)", "BestN(\'loss\', 3)"]',
        "EveryNSteps(100); BestN('loss', 3)",
        (EveryNSteps(100), BestN("loss", 3)),
    ),
    "stall_budget": ("3", "3", 3.0),
    "storage_timeout": ("7", "7", 7.0),
    "rank_timeout": ("7", "7", 7.0),
    "node_timeout": ("7", "7", 7.0),
    "threads": ("9", "9", 9),
    "cpus": (f'"{OWN_CPU}"', OWN_CPU, OWN_CPU),
    "memory_budget": ('"1Gi"', "1Gi", 1 << 30),
    "chunk_size": ("65536", "64Ki", 65536),
    "files_per_rank": ("4", "4", 4),
    "bytes_per_file": ('"4G"', "4G", 4 * 10**9),
    "link_unchanged": ("false", "0", False),
    "deltas": ('"small"', "small", "small"),
    "foreign_memory": ('"drop"', "drop", "drop"),
    "max_connections": ("5", "5", 5),
    "strict_journal": ("true", "true", True),
    "private": ("true", "1", True),
    "idle_timeout": ("1.5", "1.5", 1.5),
    "log_file": ('"/var/log/ckptd.log"', "/var/log/ckptd.log", Path("/var/log/ckptd.log")),
    "log_level": ('"debug"', "debug", "debug"),
    "log_format": ('"json"', "json", "json"),
    "history": ("false", "0", False),
    "on_event": ('"mail ops"', "mail ops", "mail ops"),
    "stage": ('"/nvme/stage"', "/nvme/stage", Path("/nvme/stage")),
    "http": ('"127.0.0.1:9419"', "127.0.0.1:9419", "127.0.0.1:9419"),
    "metrics_file": ('"/var/lib/n/c.prom"', "/var/lib/n/c.prom", Path("/var/lib/n/c.prom")),
}


@each_case("name", FIELDS)
def test_every_setting_may_stand_in_the_file_and_in_the_environment(name: str, file: Path) -> None:
    toml, text, value = SAMPLES[name]
    file.write_text(f"{name} = {toml}\n")
    given = {key: value for key, value in ROOT.items() if key != name}
    assert getattr(load(given, {}, file), name) == value
    assert getattr(load(given, {f"CKPTD_{name.upper()}": text}, None), name) == value
    assert getattr(load({**given, name: text}, {}, None), name) == value
    assert type(getattr(load(given, {}, file), name)) is type(value)


@pytest.mark.parametrize(
    ("root", "stage", "words"),
    [
        ("/ckpts", "/ckpts", "neither lies in the root /ckpts nor holds it"),
        ("/ckpts", "/ckpts/stage", "neither lies in the root /ckpts nor holds it"),
        (
            "/nvme/stage/root",
            "/nvme/stage",
            "neither lies in the root /nvme/stage/root nor holds it",
        ),
        (
            "/ckpts",
            "s3://bucket/stage",
            "stage is the URL 's3:/bucket/stage'; expected a path on this machine",
        ),
    ],
)
def test_a_stage_is_a_directory_apart_from_the_root(root: str, stage: str, words: str) -> None:
    for given in ({"stage": stage}, {}):
        with pytest.raises(InvalidConfig, match=re.escape(words)):
            load({**ROOT, "root": root, **given}, {} if given else {"CKPTD_STAGE": stage}, None)
    assert load(
        {**ROOT, "root": "s3://bucket/runs", "stage": "/nvme/stage"}, {}, None
    ).stage == Path("/nvme/stage")
    assert load({**ROOT, "root": "/ckpts", "stage": "/ckpts2"}, {}, None).stage == Path("/ckpts2")


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    config = load(
        {"root": "sub/../ckpts", "socket": "s", "state_dir": "state", "log_file": "log"}, {}, None
    )
    assert (config.root, config.socket) == (tmp_path / "ckpts", tmp_path / "s")
    assert (config.state_dir, config.log_file) == (tmp_path / "state", tmp_path / "log")
    assert load({"root": "~/ckpts", "socket": "/s"}, {}, None).root == Path("/home/ada/ckpts")


@pytest.mark.parametrize(
    ("missing", "words"),
    [("root", "no root: .*--root DIR"), ("socket", "no socket: .*--socket PATH")],
)
def test_root_and_socket_must_be_set(missing: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        load({key: value for key, value in ROOT.items() if key != missing}, {}, None)


@each_case(
    "variable", ["CKPTD_JOB", "CKPTD_FAILPOINTS", "CKPTD_PYTHON", "CKPTD_TAKEOVER", "CKPTD_CONFIG"]
)
def test_variables_of_the_agent_are_not_settings(variable: str) -> None:
    assert load(ROOT, {variable: "whatever"}, None) == load(ROOT, {}, None)


# -- typos


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("keep_lst", "keep_last"),
        ("slot", "slots"),
        ("shm_quotta", "shm_quota"),
        ("log-level", "log_level"),
    ],
)
def test_an_unknown_setting_names_the_nearest(typo: str, meant: str, file: Path) -> None:
    file.write_text(f'"{typo}" = 1\n')
    with pytest.raises(
        InvalidConfig, match=rf"^{file}: there is no setting '{typo}'; did you mean '{meant}'\?$"
    ):
        load(ROOT, {}, file)
    with pytest.raises(InvalidConfig, match=rf"^CKPTD_{typo.upper()}: .*did you mean '{meant}'"):
        load(ROOT, {f"CKPTD_{typo.upper()}": "1"}, None)
    with pytest.raises(
        InvalidConfig, match=rf"^--{typo.replace('_', '-')}: .*did you mean '{meant}'"
    ):
        load({**ROOT, typo: "1"}, {}, None)


def test_an_unknown_setting_that_resembles_none_lists_all() -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"there is no setting 'zzzzzzzz'; the settings are bytes_per_file, chunk_size, "
        r"codec, "
        r".*, threads$",
    ):
        load({**ROOT, "zzzzzzzz": 1}, {}, None)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"cannot read the config file .*No such file"):
        load(ROOT, {}, tmp_path / "gone.toml")
    with pytest.raises(InvalidConfig, match=r"cannot read the config file .*Is a directory"):
        load(ROOT, {}, tmp_path)


@pytest.mark.parametrize("text", [b"slots = ", b"slots 3", b"\xff\xfe", b"slots = 1\nslots = 2\n"])
def test_a_file_that_is_not_toml(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    with pytest.raises(InvalidConfig, match="is not TOML"):
        load(ROOT, {}, file)


def test_a_root_may_be_a_url(tmp_path: Path) -> None:
    """It was once taken for a directory `s3:` below the current one."""
    file = tmp_path / "ckptd.toml"
    file.write_text('root = "gs://bucket/runs"')
    socket = {"socket": "/s"}
    assert load({"root": "s3://bucket/x", **socket}, {}, None).root == Url("s3", "bucket", ("x",))
    with pytest.raises(
        InvalidConfig,
        match=r"^CKPTD_ROOT: root: 'file:///ckpts' is a URL that ckptd cannot save to",
    ):
        load(socket, {"CKPTD_ROOT": "file:///ckpts"}, None)
    assert load(socket, {}, file).root == Url("gs", "bucket", ("runs",))
    assert load({"root": "./s3:/x", **socket}, {}, None).root.name == "x"


# -- values of the wrong kind


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (("Dayly(7)",), "there is no retention policy 'Dayly'; did you mean 'Daily'?"),
        (("MaxBytes('lots')",), "MaxBytes: nbytes is 'lots'; expected a number of bytes, or text"),
        ("MaxAge('30')", "MaxAge: seconds is '30'; expected a number of seconds, or text like"),
    ],
)
def test_a_policy_that_makes_no_sense_is_named(value: Any, words: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load({**ROOT, "keep": value}, {}, None)
    assert str(refused.value).startswith(f"--keep: {words}")


@each_case(
    ("name", "value", "words"),
    [
        ("slots", "two", "expected a number"),
        ("slots", "", "expected a number"),
        ("slots", "-2", "expected a number"),
        ("slots", 2.0, "expected a number"),
        ("slots", True, "expected a number"),
        ("slots", [2], "expected a number"),
        ("slots", None, "expected a number"),
        ("memory_ttl", "soon", "expected a number of seconds"),
        ("memory_ttl", [], "expected a number of seconds"),
        ("strict_journal", "yes", "expected true or false"),
        ("strict_journal", 1, "expected true or false"),
        ("strict_journal", "", "expected true or false"),
        ("codec", 3, "expected text"),
        ("root", 3, "expected text"),
        ("shm_quota", "5i", "expected a number"),
        ("shm_quota", "5X", "expected a number"),
        ("shm_quota", "1e9", "expected a number"),
    ],
)
def test_values_of_the_wrong_kind_are_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"^--{name.replace('_', '-')}: {name} is .*; {words}"):
        load({**ROOT, name: value}, {}, None)


@each_case(
    ("text", "value"),
    [("true", True), ("TRUE", True), ("1", True), ("false", False), ("False", False), ("0", False)],
)
def test_booleans_in_the_environment(text: str, value: bool) -> None:
    assert load(ROOT, {"CKPTD_STRICT_JOURNAL": text}, None).strict_journal is value


# -- bounds


@each_case(
    ("name", "good", "bad"),
    [
        ("root", [Path("/"), Path("/a")], [Path("a"), Path()]),
        (
            "socket",
            [Path("/" + "x" * 106)],
            [Path("s"), Path("/" + "x" * 107), Path("/" + "é" * 54)],
        ),
        ("shm_dir", [Path("/mnt")], [Path("mnt")]),
        ("codec", ["raw", "zstd", "zstd:1", "zstd:19"], ["lz4", "zstd:0", "zstd:20", ""]),
        ("slots", [2, 8], [0, 1, 9, -1]),
        ("keep_last", [0, 1, 10**6], [-1]),
        (
            "chunk_size",
            [64 << 10, 68 << 10, 16 << 20],
            [
                0,
                (64 << 10) - 1,
                60 << 10,
                (16 << 20) + 1,
                20 << 20,
                (64 << 10) + 1,
                (64 << 10) + 2048,
            ],
        ),
        ("memory_budget", [32 << 20, 1 << 40], [0, (32 << 20) - 1]),
        ("threads", [1, 256], [-1, 257]),
        ("cpus", ["", OWN_CPU], ["x", "-", "100000", ",", "0-99999999999", "3-1"]),
        ("log_level", ["debug", "info", "warning", "error"], ["", "trace", "INFO", "critical"]),
        ("http", ["", "localhost:0", "[::1]:1", "unix:/m"], ["1", "0.0.0.0:1", "unix:", "[::]:1"]),
        ("metrics_file", [None, Path("/m.prom")], [Path("/m.txt"), Path("m.prom"), Path("/m")]),
        ("shm_quota", [0, 1 << 50], [-1]),
        ("root_quota", [0, 1 << 50], [-1]),
        ("memory_ttl", [0.0, 1e9], [-0.1, float("nan")]),
        ("stall_budget", [0.0, 60.0], [-1.0, float("nan")]),
        ("storage_timeout", [0.1, 60.0], [0.0, -1.0, float("nan")]),
        ("rank_timeout", [0.1, 60.0], [0.0, -1.0, float("nan")]),
        ("files_per_rank", [1, 64], [0, 65, -1]),
        ("bytes_per_file", [0, 2 * DEFAULT_CHUNK], [-1, 1, 2 * DEFAULT_CHUNK - 1]),
        ("max_connections", [1, 10**6], [-1]),
        ("idle_timeout", [0.0, 0.1], [-1.0, float("nan")]),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert getattr(make(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidConfig) as caught:
            make(**{name: value})
        text = str(caught.value)
        assert name in text or (name == "codec" and "codec" in text)
        assert "\n" not in text


def test_the_memory_budget_holds_four_chunks() -> None:
    assert make(chunk_size=64 << 10, memory_budget=256 << 10).memory_budget == 256 << 10
    with pytest.raises(
        InvalidConfig, match="memory_budget is '262143'; expected at least four chunks"
    ):
        make(chunk_size=64 << 10, memory_budget=(256 << 10) - 1)


@pytest.mark.parametrize("name", [name for name, one in FIELDS.items() if one.type == "int"])
def test_a_number_has_64_bits(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{name} is '{1 << 63}'; expected less than 2.63"):
        make(**{name: 1 << 63})


def test_the_longest_stall_fits_into_the_messages_that_carry_it() -> None:
    longest = make(stall_budget=3600.0)
    request = m.Begin(id=1, job="gpt", rank=0, world_size=1, wait=longest.stall_budget)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=m.Begin) == request
    with pytest.raises(InvalidConfig, match="stall_budget is 'inf'; expected at most 3600 seconds"):
        make(stall_budget=math.inf)


@pytest.mark.parametrize("name", ["socket", "state_dir", "shm_dir", "log_file", "metrics_file"])
def test_an_empty_path_is_not_the_working_directory(name: str) -> None:
    """An unset variable would put the journal where nobody looks for it."""
    with pytest.raises(InvalidConfig, match=rf"^CKPTD_{name.upper()}: {name}: an empty text names"):
        load({"root": "/ckpts"}, {f"CKPTD_{name.upper()}": ""}, None)


def test_a_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().slots = 3  # type: ignore[misc]


def test_copies_in_peers_need_a_third_slot() -> None:
    assert (make(replicas=1).slots, make(replicas=1, slots=5).slots, make().slots) == (3, 5, 2)
    assert (make(replicas=1).segments, make(slots=4).segments) == (5, 4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("replicas", 2, "replicas is '2'; expected 0 or 1"),
        ("replica_bandwidth", -1, "replica_bandwidth is '-1'; expected 0, or at least 1M"),
        ("replica_bandwidth", 999_999, "a slower peer counts as lost"),
        ("domain", "x" * 129, "expected at most 128 characters"),
    ],
)
def test_settings_of_copies_that_are_not_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make(**{name: value})
