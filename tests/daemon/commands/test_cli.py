"""Tests the `ckptd` command as a user types it: real processes, exit codes, and one
sentence for each mistake.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.shell_completion import BashComplete
from click.testing import CliRunner

from ckptd.agent import Agent, Checkpoint, StorageWriter
from ckptd.daemon.commands import cli, neighbours, report
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from tests.support.cases import each_case
from tests.support.commands import ckptd, forked, started
from tests.support.daemons import Daemon, Home, home, running, until
from tests.support.forged import forge
from tests.support.trainers import vanish


@pytest.fixture
def full(daemon: Daemon) -> Daemon:
    """A daemon with two checkpoints of job `gpt`."""
    train(daemon)
    return daemon


@pytest.fixture(scope="module")
def trained() -> Iterator[Daemon]:
    """The same, for all tests that change nothing in it."""
    with home() as place, running(place, forked=True) as daemon:
        train(daemon)
        yield daemon


def train(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    for step in (1, 2):
        agent.snapshot(
            {"w": torch.arange(1000.0) * step}, step=step, metrics={"loss": 1 / step}
        ).wait("durable", timeout=60)
    agent.close()
    newest = daemon.home.root / "gpt" / "newest"
    until(lambda: newest.read_text() == "step-00000002.a0001\n", "the newest checkpoint")


@pytest.mark.usefixtures("processes")
def test_status_passes_over_the_socket_of_a_dead_daemon(place: Home) -> None:
    """The private socket of a root is tried first, then the user's own socket."""
    runtime = place.path / "run"
    environment = {"CKPTD_ROOT": str(place.root), "XDG_RUNTIME_DIR": str(runtime)}
    runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        private, usual = machine.private_socket(place.root), machine.default_sockets()[-1]
    for path in (private, usual):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(private))
    place.socket = usual
    with running(place, forked=True):
        assert "is ready" in ckptd("status", environment=environment).stdout


def test_the_environment_names_the_root_of_status_and_of_ls(full: Daemon, tmp_path: Path) -> None:
    """A daemon of another root at a usual socket does not answer for it."""
    root = full.home.root
    runtime = full.home.path / "run"
    runtime.mkdir(mode=0o700)
    environment = {"CKPTD_ROOT": str(root), "XDG_RUNTIME_DIR": str(runtime)}
    with home() as other:
        other.socket = runtime / "ckptd.sock"
        with running(other, forked=True):
            rows = json.loads(ckptd("ls", "--json", environment=environment).stdout)
            assert [row["tag"] for row in rows] == ["step-00000001.a0001", "step-00000002.a0001"]
            # A daemon at a socket that is not a usual one is found by the lock of its root.
            found = json.loads(ckptd("status", "--json", environment=environment).stdout)
            assert found["socket"] == str(full.home.socket)
            copy = tmp_path / "copy"
            shutil.copytree(root, copy)
            missing = ckptd("status", environment={**environment, "CKPTD_ROOT": str(copy)})
            assert missing.returncode == 14
            assert "gpt  2            step-00000002.a0001  " in missing.stdout
            only = {"XDG_RUNTIME_DIR": str(runtime)}
            assert json.loads(ckptd("status", "--json", environment=only).stdout)["root"] == str(
                other.root
            )
            (told,) = json.loads(
                ckptd("status", "--job", "gpt", "--json", environment=environment).stdout
            )["saves"]
            assert told["tag"] == "step-00000002.a0001"
    assert ckptd("ls", "--step", 1, environment=environment).returncode == 2


@pytest.mark.parametrize("command", ["status", "ls"])
def test_without_a_path_the_daemons_that_run_are_named(
    trained: Daemon, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in ("CKPTD_ROOT", "CKPTD_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    there = [neighbours.Neighbour(7, "/s", trained.status()), neighbours.Neighbour(8, "/t", None)]
    monkeypatch.setattr(neighbours, "find_all", lambda: there)
    told, root = CliRunner().invoke(cli.main, [command]), trained.home.root
    assert told.exit_code == 14
    assert told.output.endswith(
        f"; `ckptd ps` lists daemons of {root}: type `ckptd {command} {root}`, or set CKPTD_ROOT\n"
    )
    there.clear()
    assert "ckptd ps" not in CliRunner().invoke(cli.main, [command]).output


def test_status_reports_jobs_memory_and_counters(full: Daemon) -> None:
    text = ckptd("status", "--socket", full.home.socket)
    assert text.returncode == 0
    assert "ckptd 0.1.0 is ready" in text.stdout
    assert "2 sealed, 2 saved, 0 skipped, 0 failed" in text.stdout
    found = json.loads(ckptd("status", "--socket", full.home.socket, "--json").stdout)
    assert {"ready", "version", "root", "jobs", "shared_memory", "counters"} <= set(found)
    (job,) = found["jobs"]
    assert job["job"] == "gpt"
    assert job["attempt"] == 1
    assert 0 <= job["last_durable"].pop("age_seconds") < 3600
    durable = job["last_durable"]
    assert 0 < durable.pop("new_bytes") <= durable.pop("bytes") == durable.pop("restored_bytes")
    assert durable == {"attempt": 1, "step": 2, "tag": "step-00000002.a0001", "chain": 0}
    assert job["last_error"] is None
    assert job["pending"] == []
    assert found["cpu_seconds"] > 0


@pytest.mark.usefixtures("processes")
def test_status_tells_how_far_a_save_has_come(place: Home) -> None:
    with running(
        place, "--codec", "zstd:19", environment={"CKPTD_CHUNK_SIZE": "256Ki"}, forked=True
    ) as daemon:
        agent = Agent("gpt", socket=place.socket)
        agent.snapshot({"w": torch.randn(10 << 20)}, step=1)
        until(
            lambda: (daemon.status()["jobs"][0]["saving"] or [{"done_bytes": 0}])[0]["done_bytes"],
            "the first chunk",
        )
        text = ckptd("status", "--socket", place.socket).stdout
        (job,) = daemon.status()["jobs"]
        vanish(agent)
    (saving,), (rank,) = job["saving"], job["ranks"]
    assert (rank["rank"], rank["pid"], rank["connected"]) == (0, os.getpid(), True)
    assert {"state": "writing", "step": 1} in [
        {key: slot[key] for key in ("state", "step")} for slot in rank["slots"]
    ]
    assert re.search(
        r"  step-00000001\.a0001 \(\d+\.\d of 4\d\.\d MB at \d+\.\d [kM]B/s, \d+ (min|s) left\)",
        text,
    ), text
    assert (saving["attempt"], saving["step"], saving["tag"]) == (1, 1, "step-00000001.a0001")
    assert saving["age_seconds"] > 0
    assert 0 < saving["done_bytes"] < saving["total_bytes"] == pytest.approx(40 << 20, rel=0.01)


@pytest.mark.usefixtures("processes")
def test_the_log_says_when_attempts_begin_and_what_is_deleted(place: Home) -> None:
    with running(place, "--keep-last", "1", forked=True) as daemon:
        train(daemon)
        until(
            lambda: "checkpoint gpt/step-00000001.a0001: deleted" in place.log_text(), "retention"
        )
    assert "job gpt: attempt 1 begins with 1 rank, 1 here\n" in place.log_text()


def test_ls_and_show_list_and_describe_checkpoints(full: Daemon) -> None:
    root = full.home.root
    rows = json.loads(ckptd("ls", root, "--json").stdout)
    assert [(row["job"], row["step"], row["newest"], row["damaged"]) for row in rows] == [
        ("gpt", 1, False, None),
        ("gpt", 2, True, None),
    ]
    assert json.loads(ckptd("ls", root / "gpt", "--json").stdout) == rows
    assert json.loads(ckptd("ls", "--socket", full.home.socket, "--json").stdout) == rows
    assert "step-00000002.a0001" in ckptd("ls", root).stdout
    shown = json.loads(ckptd("show", root / "gpt", "--json").stdout)
    assert (shown["step"], shown["seq"], shown["metrics"]) == (2, 2, {"loss": 0.5})
    assert shown["metadata"]["state_dict_metadata"]["w"] == {
        "dtype": "float32",
        "size": [1000],
        "chunks": [[[0], [1000]]],
    }
    assert json.loads(ckptd("show", root / "gpt" / "step-00000001", "--json").stdout)["step"] == 1
    text = ckptd("show", root / "gpt" / "step-00000001.a0001", "--keys").stdout
    assert "w       [1000]  float32" in text


@pytest.mark.usefixtures("processes")
def test_a_checkpoint_of_several_files_is_shown_and_verified(place: Home) -> None:
    with running(
        place,
        "--files-per-rank",
        "3",
        "--bytes-per-file",
        "1M",
        "--codec",
        "raw",
        environment={"CKPTD_CHUNK_SIZE": "256Ki"},
        forked=True,
    ):
        agent = Agent("gpt", socket=place.socket)
        state = {"w": torch.arange(1 << 20)}  # 8 MiB
        agent.snapshot(state, step=1).wait("durable", timeout=60)
        agent.close()
        tag = place.root / "gpt" / "step-00000001.a0001"
        lengths = [path.stat().st_size for path in tag.glob("rank-*.ckpt")]
        assert len(lengths) >= 11  # 32 chunks, three in each file
        assert max(lengths) <= 10**6
        assert f"in {len(lengths)} files" in ckptd("show", place.root / "gpt").stdout
        assert ckptd("verify", place.root / "gpt").returncode == 0
        with Checkpoint.open(place.root / "gpt") as checkpoint:
            assert torch.equal(checkpoint.tensor("w"), state["w"])
        next(tag.glob("rank-*.0007.ckpt")).unlink()
        assert ".0007.ckpt is missing" in ckptd("verify", place.root / "gpt").stdout
        assert ckptd("forget", tag, "--yes", "--socket", place.socket).returncode == 0
        assert not tag.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_commands_accept_a_directory_that_is_one_checkpoint(full: Daemon, tmp_path: Path) -> None:
    """The directory was made outside every root, or copied out of one."""
    alone, copy = tmp_path / "alone", tmp_path / "copy"
    dcp.save({"w": torch.arange(1000.0)}, storage_writer=StorageWriter(alone, codec="raw"))
    shutil.copytree(full.home.root / "gpt" / "step-00000002.a0001", copy)
    for path, job, step in ((alone, "standalone", None), (copy, "gpt", 2)):
        assert ckptd("verify", path).stdout.startswith(f"{path}: sound, ")
        assert ckptd("show", path, "--keys").stdout.startswith(f"{path}\n")
        shown = json.loads(ckptd("show", path, "--json").stdout)
        assert (shown["job"], shown["step"], list(shown["metadata"]["state_dict_metadata"])) == (
            job,
            step,
            ["w"],
        )
        (row,) = json.loads(ckptd("ls", path, "--json").stdout)
        assert (row["tag"], row["step"], row["newest"], row["damaged"]) == (
            path.name,
            step,
            False,
            None,
        )
        for verb in ("forget", "pin"):
            refused = ckptd(verb, path)
            assert refused.returncode == 2
            assert "is a checkpoint outside every root" in refused.stderr
    part = next(alone.glob("rank-*.ckpt"))
    part.write_bytes(part.read_bytes()[:5000] + b"?" + part.read_bytes()[5001:])
    damaged = ckptd("verify", alone)
    assert damaged.returncode == 13
    assert damaged.stdout.startswith(f"{alone}: DAMAGED: ")
    (alone / "manifest.json").write_text("{}")
    (row,) = json.loads(ckptd("ls", alone, "--json").stdout)
    assert "cut short" in row["damaged"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_copy_of_any_name_is_a_checkpoint(full: Daemon, tmp_path: Path) -> None:
    one = full.home.root / "gpt" / "step-00000002.a0001"
    made = tmp_path / "job" / "made.a0001"
    dcp.save({"w": torch.arange(1000.0)}, storage_writer=StorageWriter(made))
    for copy in (
        made,
        tmp_path / "best.a0001",
        tmp_path / "gpt" / "step-00005000.a0002",
        tmp_path / "gpt" / one.name,
    ):
        if not copy.exists():
            shutil.copytree(one, copy)
        verified = ckptd("verify", copy)
        assert verified.returncode == 0, verified.stdout
    misplaced = full.home.root / "gpt" / "step-00005000.a0002"
    shutil.copytree(one, misplaced)
    # In a root the name would stand for that step.
    assert "DAMAGED: " in ckptd("verify", misplaced).stdout


def test_every_command_takes_a_step_the_newest_and_the_best(full: Daemon, tmp_path: Path) -> None:
    root = full.home.root
    first, second = "gpt/step-00000001.a0001", "gpt/step-00000002.a0001"
    for typed, name in (
        ([root / "gpt" / "1"], first),
        ([root / "gpt", "--step", 1], first),
        ([f"{root}/gpt/newest"], second),
        ([f"{root}/gpt/best:loss"], second),
        ([f"{root}/gpt/best:loss:max"], first),
    ):
        assert ckptd("show", *typed).stdout.startswith(f"{name}\n"), typed
        assert ckptd("verify", *typed).stdout.startswith(f"{name}: sound, "), typed
        assert ckptd("pin", *typed).stdout == f"{name}: pinned\n", typed
        assert ckptd("unpin", *typed).stdout == f"{name}: no longer pinned\n", typed
        (row,) = json.loads(ckptd("ls", *typed, "--json").stdout)
        assert f"gpt/{row['tag']}" == name, typed
        (row,) = json.loads(ckptd("forget", *typed, "--dry-run", "--json").stdout)
        assert f"gpt/{row['tag']}" == name, typed
        copied = ckptd("copy", typed[0], tmp_path / "other", *typed[1:])
        assert copied.stdout.startswith(f"{name}: "), copied.stderr
    shown = ckptd("show", "gpt/1", environment={"CKPTD_ROOT": str(root)})
    assert shown.stdout.startswith(f"{first}\n")
    assert json.loads(ckptd("pin", f"{root}/gpt/1", "--json").stdout)["pinned"]
    done = ckptd("unpin", f"{root}/gpt/1", "--json")
    assert json.loads(done.stdout) == {"job": "gpt", "tag": first[4:], "pinned": False}
    wrong = ckptd("show", root / "gpt" / "7")
    assert (wrong.returncode, "of step 7: did you mean 2?" in wrong.stderr) == (10, True)


def test_a_damaged_checkpoint_is_not_the_newest(full: Daemon) -> None:
    job = full.home.root / "gpt"
    (job / "step-00000002.a0001" / "manifest.json").write_text("{}")
    shown = ckptd("show", f"{job}/newest")
    assert shown.stdout.startswith("gpt/step-00000001.a0001\n")
    assert shown.stderr.startswith("ckptd: skipped: ")
    assert shown.stderr.count("\n") == 1
    assert ckptd("verify", f"{job}/2").returncode == 13


def test_a_file_called_manifest_hides_no_checkpoint(full: Daemon) -> None:
    root = full.home.root
    for directory in (root, root / "gpt"):
        (directory / "manifest.json").write_text("{}")
        assert len(json.loads(ckptd("ls", directory, "--json").stdout)) == 2
        (directory / "manifest.json").unlink()
    (root / "gpt" / "manifest.json").write_text("{}")
    assert ckptd("verify", root / "gpt").stdout.count(": sound") == 2
    assert ckptd("show", root / "gpt").stdout.startswith("gpt/step-00000002.a0001\n")
    assert ckptd("pin", root / "gpt").stdout == "gpt/step-00000002.a0001: pinned\n"


def test_the_manifest_says_how_many_files_there_are(full: Daemon) -> None:
    path = full.home.root / "gpt" / "step-00000002.a0001" / "manifest.json"
    manifest = Manifest.decode(path.read_bytes())
    (part,) = manifest.parts
    changed = msgspec.structs.replace(
        manifest, features=["files"], parts=[msgspec.structs.replace(part, files=3)]
    )
    path.write_bytes(changed.encode())
    assert (
        "does not have the sizes and counts that the manifest says"
        in ckptd("verify", path.parent).stdout
    )
    with pytest.raises(IntegrityError, match="is not the part that the manifest describes"):
        Checkpoint.open(path.parent)


def test_a_checkpoint_deleted_during_a_listing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr(
        report, "find_job_or_checkpoint", lambda path: (open_root(path.parent), path.name, None)
    )
    with pytest.raises(NotFound, match="no longer holds a checkpoint"):
        report.listing(tmp_path)


def test_ls_lists_one_checkpoint(full: Daemon) -> None:
    (row,) = json.loads(
        ckptd("ls", full.home.root / "gpt" / "step-00000002.a0001", "--json").stdout
    )
    assert (row["job"], row["tag"], row["newest"]) == ("gpt", "step-00000002.a0001", True)


def test_verify_finds_a_flipped_byte(full: Daemon) -> None:
    job = full.home.root / "gpt"
    sound = ckptd("verify", job)
    assert sound.returncode == 0
    assert sound.stdout.count(": sound, ") == 2
    parts = {path: path.stat().st_nlink for path in job.glob("*/rank-*.ckpt")}
    alone = next(path for path, links in parts.items() if links == 1)
    assert alone.parent.name == "step-00000002.a0001"
    flip(alone)
    damaged = ckptd("verify", job, "--json")
    assert damaged.returncode == 13
    assert [(result["tag"], result["ok"]) for result in json.loads(damaged.stdout)] == [
        ("step-00000001.a0001", True),
        ("step-00000002.a0001", False),
    ]
    assert "does not match its checksum" in ckptd("verify", job / "step-00000002").stdout
    manifest = job / "step-00000001.a0001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 3'))
    assert "manifest does not match its digest" in ckptd("verify", job).stdout
    assert "DAMAGED" in ckptd("ls", full.home.root).stdout
    assert ckptd("show", job / "step-00000001").returncode == 13


def test_verify_finds_a_flipped_byte_in_each_checkpoint_that_links_the_file(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    frozen = torch.rand(100_000)
    for step in (1, 2):
        agent.snapshot({"frozen": frozen, "w": torch.full((10,), step)}, step=step).wait(
            "durable", timeout=60
        )
    agent.close()
    job = daemon.home.root / "gpt"
    parts = {path: path.stat().st_nlink for path in job.glob("*/rank-*.ckpt")}
    flip(next(path for path, links in parts.items() if links == 2), 200_000)
    damaged = ckptd("verify", job, "--json")
    assert damaged.returncode == 13
    assert [result["ok"] for result in json.loads(damaged.stdout)] == [False, False]


def test_every_verb_of_another_package_is_listed() -> None:
    assert {found.name for found in entry_points(group="ckptd.verbs")} == set(cli._VERBS)
    assert {
        name: verb.load().short_help
        for name, verb in cli.main.commands.items()
        if isinstance(verb, cli.Verb)
    } == cli._VERBS


def test_no_name_that_is_answered_with_another_is_a_command() -> None:
    answered = {other for others in cli._MEANT.values() for other in others}
    assert cli._MEANT.keys() <= cli.main.commands.keys()
    assert len(answered) == sum(map(len, cli._MEANT.values()))
    assert answered & cli.main.commands.keys() == set()


def flip(part: Path, offset: int = ALIGN) -> None:
    """Change a byte of a part. The default is the first byte of its first chunk."""
    data = bytearray(part.read_bytes())
    data[offset] ^= 1
    part.write_bytes(data)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "{root}/gpt/nope"], 10, "no checkpoint 'nope' of job 'gpt'"),
        (["show", "{root}/nope/nope"], 10, "no checkpoint"),
        (["ls", "{root}/nope"], 10, "does not exist, or is not a directory"),
        (["verify", "{root}/nope"], 10, "no checkpoint"),
        (["status", "--socket", "{root}/nobody"], 14, "no daemon listens at"),
        (["status", "--socket", "{root}/nobody", "--job", "gpt"], 14, "without a daemon, name the "
            "root: `ckptd status ROOT --job gpt`"),
        (["ls", "--socket", "{root}/nobody"], 14, "without a daemon, name the root: `ckptd ls "
            "ROOT`"),
        (["stop", "--socket", "{root}/nobody"], 14, "no daemon listens at"),
        (["status"], 14, "start one with `ckptd run --root DIR`"),
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["rm", "{root}/gpt/1"], 2, "No such command 'rm'. Did you mean 'forget'?"),
        (["list"], 2, "No such command 'list'. Did you mean 'ls'?"),
        (["ls", "{root}/gtp"], 10, ": did you mean {root}/gpt?"),
        (["show", "{root}/gtp/1"], 10, "which has no such job: did you mean {root}/gpt?"),
        (["verify", "{root}/gpt/step-00000011"], 10, ": did you mean {root}/gpt/step-00000001?"),
        (["status", "{root}", "--job", "gtp"], 10, ": did you mean 'gpt'?"),
    ],
)  # fmt: skip
def test_each_mistake_gives_one_sentence_and_its_exit_code(
    trained: Daemon, arguments: list[str], code: int, words: str
) -> None:
    check_mistake(trained, ckptd, arguments, code, words)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "--root", "{root}", "--socket", "{root}/s2"], 11, "another ckptd already serves"),
        (["run", "--root", "{root}2", "--socket", "{socket}"], 11, "another ckptd listens at"),
        (["run", "--socket", "{root}/s2"], 2, "no root: say where checkpoints go with --root DIR"),
        (["run", "--root", "/proc/nope", "--socket", "{root}/s2"], 1, "cannot use /proc/nope as "
            "the root for checkpoints"),
        (["run", "--root", "{root}", "--socket", "{root}/s2", "--codec", "lz5"], 2, "codec 'lz5' "
            "is not known"),
        (["run", "--root", "{root}", "--socket", "{root}/s2", "--config", "{root}/none.toml"], 2,
        "cannot "
            "read the config file"),
        (["run", "--root", "{root}", "--socket", "/" + "x" * 200], 2, "an absolute path of at most "
            "107 bytes"),
    ],
)  # fmt: skip
def test_each_mistake_of_a_start_gives_one_sentence_and_its_exit_code(
    trained: Daemon, arguments: list[str], code: int, words: str
) -> None:
    check_mistake(trained, forked, arguments, code, words)


def check_mistake(
    trained: Daemon,
    run: Callable[..., subprocess.CompletedProcess[str]],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    names = {"root": trained.home.root, "socket": trained.home.socket}
    result = run(*(argument.format(**names) for argument in arguments))
    assert (result.returncode, words.format(**names) in result.stderr) == (code, True), (
        result.stderr
    )
    assert "Traceback" not in result.stderr
    assert trained.status()["ready"]


def test_errors_are_printed_as_json_on_request(full: Daemon) -> None:
    result = ckptd("show", full.home.root / "gpt" / "nope", "--json")
    found = json.loads(result.stdout)
    assert (found["error"]["code"], found["exit"], result.returncode) == ("not-found", 10, 10)


@pytest.mark.usefixtures("processes")
def test_help_shows_the_first_commands_of_a_newcomer() -> None:
    result = started("--help")
    assert result.returncode == 0
    for verb in ("run", "status", "ls", "show", "verify"):
        assert f"  {verb} " in result.stdout
        assert ckptd(verb, "--help").returncode == 0


@each_case(
    ("typed", "offered"),
    [
        (["ls", ""], "file,"),
        (["verify", "/t"], "file,/t"),
        (["copy", "a", ""], "file,"),
        (["adopt", "a", ""], "file,"),
        (["run", "--root", ""], "file,"),
        (["doctor", "--root", ""], "file,"),
        (["run", "--codec", "r"], "plain,raw"),
        (["export", "x", "--to", "h"], "plain,hf"),
        (["ver"], "plain,verify"),
        (["show", "{root}/gpt/n"], "file,{root}/gpt/n\nplain,{root}/gpt/newest"),
        (["pin", "{root}/gpt/b"], "file,{root}/gpt/b\nplain,{root}/gpt/best:loss"),
        (
            ["copy", "{root}/gpt/step-00000001"],
            "file,{root}/gpt/step-00000001\nplain,{root}/gpt/step-00000001.a0001",
        ),
    ],
)
def test_the_shell_is_offered_paths_and_words(
    trained: Daemon, typed: list[str], offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a path, bash would not even complete the names of files after `ckptd ls`."""
    assert completed(typed, trained.home.root, monkeypatch) == offered.format(
        root=trained.home.root
    )


def completed(typed: list[str], root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    words = " ".join(["ckptd", *typed]).format(root=root)
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(typed)))
    return BashComplete(cli.main, {}, "ckptd", "_CKPTD_COMPLETE").complete()


def test_the_shell_is_offered_the_jobs_of_the_configured_root(
    trained: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained.home.root
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTD_ROOT", str(root))
    assert completed(["show", "g"], root, monkeypatch) == "file,g\nplain,gpt"
    assert completed(["show", "gpt/n"], root, monkeypatch) == "file,gpt/n\nplain,gpt/newest"
    for variable in ("s3://bucket/runs", "ftp://nowhere", str(root.parent)):
        monkeypatch.setenv("CKPTD_ROOT", variable)
        assert completed(["show", "g"], root, monkeypatch) == "file,g", variable


@pytest.mark.parametrize(
    "typed",
    [
        ["stop"],
        ["forget", "{root}/gpt"],
        ["copy", "{root}", "{root}"],
        ["copy", "{root}", "{root}/gpt"],
        ["export", "{root}/gpt", "--to", "torch", "--out", "{root}/x", "--dtype", "nope"],
        ["export", "{root}/gpt", "--to", "torch", "--out", "{root}/x", "--rename", "nope"],
        ["adopt", "{root}/gpt", "{root}"],
        ["ls", ""],
        ["verify", ""],
        ["stop", ""],
        ["doctor", "--root", ""],
        ["run", "--root", ""],
    ],
)
def test_every_mistake_of_usage_has_the_exit_code_2(trained: Daemon, typed: list[str]) -> None:
    told = ckptd(*[each.format(root=trained.home.root) for each in typed])
    assert (told.returncode, told.stdout, "Traceback" in told.stderr) == (2, "", False)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("place", ["gpt", "gpt/step-00000001.a0001", "sub", "sub/deeper"])
def test_a_path_one_level_off_is_answered_with_the_root_that_is_meant(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every verb and variable that would make a root there."""
    root = Path(os.path.realpath(tmp_path)) / "root"
    forge(root, (1,), [[((0,), (1,))]])
    (root / ".ckptd").mkdir()
    forge(tmp_path / "other", (1,), [[((0,), (1,))]], step=2)
    off, other = root / place, tmp_path / "other" / "gpt"
    before = sorted(root.rglob("*"))
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path), "CKPTD_STATE_DIR": str(tmp_path / "state")}
    runs = {
        "run --root": forked("run", "--root", off, environment=runtime),
        "run with CKPTD_ROOT": forked("run", environment={**runtime, "CKPTD_ROOT": str(off)}),
        "copy": ckptd("copy", other, off),
        "copy of the root": ckptd("copy", root, off),
        "adopt": ckptd("adopt", other, off / "new", environment=runtime),
    }
    told = {name: done.stderr for name, done in runs.items()}
    assert {name: done.returncode for name, done in runs.items()} == dict.fromkeys(runs, 2), told
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for variable, argument in ((None, off), (off, None)):
        if variable is not None:
            monkeypatch.setenv("CKPTD_ROOT", str(variable))
        with pytest.raises(InvalidRequest) as caught:
            Agent("new", root=argument)
        told[f"Agent with {'root=' if argument else 'CKPTD_ROOT'}"] = str(caught.value)
    meant = f"did you mean the root {root}"
    assert {name: meant in text for name, text in told.items()} == dict.fromkeys(told, True), told
    assert sorted(root.rglob("*")) == before
    assert ckptd("ls", root / "gpt").returncode == 0, "readers always read"
