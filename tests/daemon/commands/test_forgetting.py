"""Tests `ckptd forget` and `ckptd pin`, retention as the job or the settings choose it,
and readers that keep a checkpoint from being deleted.
"""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, BestN, Checkpoint, EveryNSteps, LatestN, PreserveAll
from ckptd.daemon.commands import forgetting
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound, StorageError
from ckptd.shared.formats.segment import read_header
from ckptd.shared.storage import locks
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from tests.shared.samples import write_checkpoint
from tests.support import forks
from tests.support.commands import ckptd
from tests.support.daemons import Daemon, Home, running, until
from tests.support.ranks import HERE, Ranks
from tests.support.strangers import KINDS, NOBODY, holding, is_another_user
from tests.support.trainers import vanish

pytestmark = pytest.mark.usefixtures("processes")


def train(place: Home, steps: Sequence[int], **options: Any) -> None:
    agent = Agent("gpt", socket=place.socket, **options)
    for step in steps:
        metrics = {"loss": abs(step - 4.0)}
        agent.snapshot({"w": torch.arange(100.0) + step}, step=step, metrics=metrics).wait(
            "durable", timeout=60
        )
    agent.close()


def steps(place: Home) -> list[int]:
    return sorted(
        storage(place).read_manifest("gpt", tag).step or 0 for tag in storage(place).tags("gpt")
    )


def storage(place: Home) -> Repository:
    return open_root(place.root)


def settled(place: Home, wanted: list[int]) -> None:
    """Wait until only these steps are left. Retention runs after the answer."""
    until(
        lambda: (
            sorted(path.name for path in (place.root / "gpt").glob("*.a*"))
            == [tag(step) for step in wanted]
        ),
        "retention",
    )


def rows(run: Any) -> list[tuple[str, bool, str | None]]:
    return [(row["tag"], row["deleted"], row["error"]) for row in json.loads(run.stdout)]


def tag(step: int, attempt: int = 1) -> str:
    return names.tag_directory(step, None, attempt)


@pytest.fixture(params=["daemon", "none"])
def socket(processes: None, request: pytest.FixtureRequest, place: Home) -> Any:
    """Make six checkpoints.

    Return the options that name the daemon of their root, which runs or has ended.
    """
    if request.param == "none":
        with running(place, forked=True):
            train(place, range(1, 7))
        yield []
        assert not machine.private_socket(place.root).exists()
    else:
        with running(place, forked=True):
            train(place, range(1, 7))
            yield ["--socket", place.socket]


def test_forget_deletes_one_checkpoint(place: Home, socket: list[Any]) -> None:
    path = place.root / "gpt" / "step-00000003"
    assert rows(ckptd("forget", path, "--dry-run", "--json", *socket)) == [(tag(3), False, None)]
    assert (
        "step-00000003.a0001: would be deleted ("
        in ckptd("forget", path, "--dry-run", *socket).stdout
    )
    assert steps(place) == [1, 2, 3, 4, 5, 6]
    run = ckptd("forget", path, *socket)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("gpt/step-00000003.a0001: deleted (")
    assert steps(place) == [1, 2, 4, 5, 6]
    assert not (place.root / "gpt" / tag(3)).exists()
    gone = ckptd("forget", path, *socket)
    assert (gone.returncode, gone.stdout) == (10, "")
    assert "no checkpoint 'step-00000003' of job 'gpt'" in gone.stderr


def test_forget_deletes_what_no_policy_keeps(place: Home, socket: list[Any]) -> None:
    keep = ["--keep", "LatestN(1)", "--keep", "BestN('loss', 1)", "--keep", "EveryNSteps(3)"]
    job = place.root / "gpt"
    assert rows(ckptd("forget", job, *keep, "--dry-run", "--json", *socket)) == [
        (tag(1), False, None),
        (tag(2), False, None),
        (tag(5), False, None),
    ]
    assert rows(ckptd("forget", job, *keep, "--json", *socket)) == [
        (tag(1), True, None),
        (tag(2), True, None),
        (tag(5), True, None),
    ]
    assert steps(place) == [3, 4, 6]
    assert ckptd("forget", job, *keep, *socket).stdout == "nothing to delete\n"


def test_the_newest_is_forgotten_and_newest_names_the_one_before(
    place: Home, socket: list[Any]
) -> None:
    for step in (6, 5, 4, 3, 2):
        assert ckptd("forget", place.root / "gpt" / tag(step), *socket).returncode == 0
        assert storage(place).read_newest("gpt") == tag(step - 1)
    assert ckptd("forget", place.root / "gpt" / tag(1), "--yes", *socket).returncode == 0
    assert sorted(os.listdir(place.root / "gpt")) == []
    with pytest.raises(NotFound):
        Checkpoint.open(place.root / "gpt")


def test_a_pinned_checkpoint_is_never_deleted(place: Home, socket: list[Any]) -> None:
    path = place.root / "gpt" / tag(2)
    assert ckptd("pin", path).stdout == "gpt/step-00000002.a0001: pinned\n"
    assert ckptd("pin", path).returncode == 0
    assert [
        line.endswith("pinned") for line in ckptd("ls", place.root).stdout.splitlines()[1:]
    ] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    why = "checkpoint gpt/step-00000002.a0001 is pinned"
    run = ckptd("forget", path, *socket)
    assert (run.returncode, run.stdout) == (11, f"gpt/step-00000002.a0001: not deleted: {why}\n")
    assert rows(ckptd("forget", path, "--dry-run", "--json", *socket)) == [(tag(2), False, why)]
    job = ckptd("forget", place.root / "gpt", "--keep", "LatestN(4)", "--json", *socket)
    assert rows(job) == [(tag(1), True, None), (tag(2), False, why)]
    assert steps(place) == [2, 3, 4, 5, 6]
    assert ckptd("pin", path, "--remove").stdout == "gpt/step-00000002.a0001: no longer pinned\n"
    again = ckptd("pin", path, "--remove")
    assert (again.returncode, again.stdout) == (0, "gpt/step-00000002.a0001: was not pinned\n")
    assert ckptd("forget", path, *socket).returncode == 0
    assert steps(place) == [3, 4, 5, 6]


def test_a_checkpoint_that_is_being_read_is_never_deleted(place: Home, socket: list[Any]) -> None:
    path = place.root / "gpt" / tag(2)
    with Checkpoint.open(path) as checkpoint:
        run = ckptd("forget", path, *socket)
        why = (
            f"checkpoint gpt/step-00000002.a0001 is being read, or deleted, by pid {os.getpid()} ("
        )
        assert run.returncode == 11
        assert run.stdout.startswith(f"gpt/step-00000002.a0001: not deleted: {why}")
        assert run.stdout.endswith(f", uid {os.getuid()})\n")
        assert torch.equal(checkpoint.tensor("w"), torch.arange(100.0) + 2)
    assert ckptd("forget", path, *socket).returncode == 0


def test_a_root_that_cannot_be_written_is_told_with_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, step=1, attempt=1, job="gpt")
    tag = "step-00000001.a0001"

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "pins")

    for method in ("readers", "pin", "unpin"):
        monkeypatch.setattr(Repository, method, refuse)
    place = tmp_path / "gpt" / tag
    why = f"gpt/{tag}: Read-only file system (mounted read-only"
    with pytest.raises(StorageError, match=re.escape(f"cannot delete {why}")):
        forgetting.planned(place, ())
    with pytest.raises(StorageError, match=re.escape(f"cannot pin {why}")):
        forgetting.pin(place, remove=False)
    with pytest.raises(StorageError, match=re.escape(f"cannot unpin {why}")):
        forgetting.pin(place, remove=True)


@pytest.mark.parametrize("kind", KINDS)
def test_forget_names_the_process_that_keeps_a_checkpoint(
    place: Home, socket: list[Any], kind: str
) -> None:
    place.path.chmod(0o755)
    path = place.root / "gpt" / tag(2)
    with holding(kind, path / "manifest.json") as pid:
        for options in (["--dry-run"], []):
            run = ckptd("forget", path, *options, *socket)
            assert run.returncode == 11
            assert (
                f"gpt/step-00000002.a0001: not deleted: checkpoint gpt/step-00000002.a0001 is "
                f"being read, or deleted, by pid {pid} (" in run.stdout
            )
            assert run.stdout.endswith(f", uid {NOBODY if is_another_user() else os.getuid()})\n")
    assert ckptd("forget", path, *socket).returncode == 0


def test_verify_does_not_call_a_checkpoint_damaged_that_a_deleter_has_locked(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place, forked=True):
        train(place, [1])
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    with storage(place).exclude("gpt", tag(1)):
        run = ckptd("verify", place.root / "gpt")
    assert (run.returncode, "DAMAGED" in run.stdout) == (11, False)
    assert f"checkpoint gpt/{tag(1)} in {place.root} cannot be read now" in run.stderr
    assert ckptd("verify", place.root / "gpt").returncode == 0


def test_a_damaged_checkpoint_can_be_forgotten(place: Home, socket: list[Any]) -> None:
    manifest = place.root / "gpt" / tag(2) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert (
        ckptd("forget", place.root / "gpt" / tag(2), *socket).stdout
        == "gpt/step-00000002.a0001: deleted\n"
    )
    assert not manifest.parent.exists()


def test_no_checkpoint_is_deleted_in_favour_of_one_whose_file_is_missing(tmp_path: Path) -> None:
    """The manifest is intact, and this checkpoint would be the only one that is left."""
    for step in (1, 2):
        write_checkpoint(tmp_path, step=step)
    (gone,) = (tmp_path / "gpt" / tag(2, 2)).glob("rank-*")
    gone.unlink()
    with pytest.raises(
        IntegrityError,
        match=f"nothing was deleted, because gpt/{tag(2, 2)}, which would be kept, lacks its file "
        f"{gone.name}: .* `ckptd forget {tmp_path}/gpt/{tag(2, 2)}`",
    ):
        forgetting.planned(tmp_path / "gpt", [LatestN(1)])
    assert forgetting.planned(tmp_path / "gpt", [LatestN(2)]).rows == []


def test_forget_leaves_files_of_other_programs(place: Home, socket: list[Any]) -> None:
    mine = place.root / "gpt" / tag(2) / "notes.txt"
    mine.write_text("mine")
    assert ckptd("forget", mine.parent, *socket).returncode == 0
    assert os.listdir(mine.parent) == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["gpt"],
            2,
            "is a job: say which of its checkpoints to keep, like --keep 'LatestN(5)', or name one",
        ),
        (
            ["gpt/step-00000001", "--keep", "LatestN(1)"],
            2,
            "is one checkpoint, and --keep needs a job",
        ),
        (
            ["gpt", "--keep", "LatestM(1)"],
            2,
            "--keep: there is no retention policy 'LatestM'; did you mean 'LatestN'?",
        ),
        (["gpt/step-00000009"], 10, "no checkpoint 'step-00000009' of job 'gpt'"),
    ],
)
def test_each_wrong_argument_gives_one_sentence(
    place: Home, arguments: list[str], code: int, words: str
) -> None:
    with running(place, forked=True) as daemon:
        train(place, [1, 2])
        run = ckptd(
            "forget", place.root / arguments[0], *arguments[1:], "--socket", daemon.home.socket
        )
        assert (run.returncode, run.stdout) == (code, "")
        assert words in run.stderr
        assert run.stderr.count("\n") == 1
        assert steps(place) == [1, 2]


def test_forget_finds_a_daemon_at_another_socket_by_the_lock_of_its_root(place: Home) -> None:
    with running(place, forked=True):
        train(place, [1, 2])
        run = ckptd("forget", place.root / "gpt" / tag(1), "--yes")
        assert (run.returncode, steps(place)) == (0, [2]), run.stderr
        (hint,) = place.root.glob(".ckptd/*/lock")
        os.truncate(hint, 0)  # as of a daemon of an earlier version
        run = ckptd("forget", place.root / "gpt" / tag(2), "--yes")
        assert run.returncode == 14
        assert "a daemon that has not told its socket" in run.stderr
        assert steps(place) == [2]


def test_a_named_socket_of_another_root_is_refused(place: Home, tmp_path: Path) -> None:
    with running(place, forked=True) as daemon:
        (tmp_path / "gpt").mkdir()
        train(place, [1])
        os.rename(place.root / "gpt" / tag(1), tmp_path / "gpt" / tag(1))
        run = ckptd("forget", tmp_path / "gpt" / tag(1), "--yes", "--socket", daemon.home.socket)
        assert run.returncode == 2
        assert f"serves {place.root}, not {tmp_path}" in run.stderr


def test_forget_without_a_daemon_deletes_nothing_else(place: Home) -> None:
    """Whatever the settings of the root's daemon are, more checkpoints stay than the
    ten of the default.
    """
    with running(place, "--keep-last", "0", forked=True):
        train(place, range(1, 13))
    assert ckptd("forget", place.root / "gpt" / tag(5)).returncode == 0
    assert len(steps(place)) == 11


def test_forget_without_a_daemon_also_saves_what_was_owed(place: Home) -> None:
    with running(place, forked=True):
        train(place, [1, 2])
    with running(place, failpoints="seal.journaled=kill@1", forked=True) as daemon:
        agent = Agent("gpt", socket=place.socket)
        agent.snapshot({"w": torch.full((10,), 7.0)}, step=7)
        daemon.died()
    vanish(agent)
    run = ckptd("forget", place.root / "gpt" / tag(1))
    assert (run.returncode, run.stderr) == (0, "")
    assert steps(place) == [2, 7]
    assert storage(place).read_newest("gpt") == tag(7, 2)
    assert torch.equal(Checkpoint.open(place.root / "gpt").load()["w"], torch.full((10,), 7.0))


def test_a_checkpoint_in_the_memory_of_a_running_trainer_is_not_deleted(place: Home) -> None:
    with running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        path = place.root / "gpt" / tag(2)

        def save(*numbers: int) -> None:
            for step in numbers:
                agent.snapshot({"w": torch.full((10,), float(step))}, step=step).wait(
                    "durable", timeout=60
                )

        save(1, 2)
        why = (
            "checkpoint gpt/step-00000002.a0001 is still in the memory of a running trainer; "
            "try again after its next snapshot, or after it has ended"
        )
        run = ckptd("forget", path, "--socket", place.socket)
        assert (run.returncode, run.stdout) == (
            11,
            f"gpt/step-00000002.a0001: not deleted: {why}\n",
        )
        save(3, 4)
        assert ckptd("forget", path, "--socket", place.socket).returncode == 0
        assert steps(place) == [1, 3, 4]
        agent.close()
        assert (
            ckptd("forget", place.root / "gpt" / tag(4), "--socket", place.socket).returncode == 0
        )


def leave(steps: Sequence[int], socket: Path) -> None:
    agent = Agent("gpt", socket=socket)
    for step in steps:
        agent.snapshot({"w": torch.full((10,), float(step))}, step=step).wait("durable", timeout=60)
    os._exit(0)


@pytest.mark.parametrize("by", ["its daemon", "the next daemon", "none"])
def test_a_forgotten_checkpoint_is_not_saved_again_from_memory(place: Home, by: str) -> None:
    named = ["--socket", place.socket]
    with running(place, forked=True) as daemon:
        process = forks.context().Process(target=leave, args=((1, 2), place.socket))
        process.start()
        process.join()
        if by == "its daemon":
            assert ckptd("forget", place.root / "gpt" / tag(2), *named).returncode == 0
        else:
            daemon.kill()
    if by == "none":
        assert ckptd("forget", place.root / "gpt" / tag(2)).returncode == 0
    with running(place, forked=True):
        if by == "the next daemon":
            assert ckptd("forget", place.root / "gpt" / tag(2), *named).returncode == 0
        agent = Agent("gpt", socket=place.socket)
        state = {"w": torch.zeros(10)}
        recovered = agent.recover(state)
        assert recovered is not None
        assert recovered.step == 1
        assert torch.equal(state["w"], torch.ones(10))
        agent.close()
        assert steps(place) == [1]


def test_a_step_that_one_dead_rank_alone_had_sealed_can_be_forgotten(place: Home) -> None:
    """Of two ranks, killed with their daemon, one still has step 1 in its slot.

    The other has filled its slots with later steps.
    """
    with running(place, "--slots", "2", forked=True) as daemon, Ranks(2) as ranks:
        ranks.call(work, place.socket)
        daemon.kill()
        for slot in place.segment_files():
            header = read_header(os.open(slot, os.O_RDONLY))
            if header.rank == 1 and header.step == 1:
                slot.unlink()
        for rank in range(2):
            ranks.kill(rank)
    assert ckptd("forget", place.root / "gpt" / tag(1), "--yes").returncode == 0
    assert steps(place) == []


def work(socket: Path) -> None:
    HERE["agent"] = Agent("gpt", socket=socket)
    HERE["agent"].snapshot({"w": torch.ones(10)}, step=1).wait("durable", timeout=60)


def test_a_damaged_segment_does_not_keep_a_checkpoint_from_being_deleted(place: Home) -> None:
    with running(place, forked=True) as daemon:
        train(place, [1, 2])
        agent = Agent("other", socket=place.socket)
        agent.snapshot({"w": torch.ones(10)}, step=1).wait("durable", timeout=60)
        for slot in place.segment_files():
            with slot.open("r+b") as file:
                file.write(b"x" * 8192)
        assert (
            ckptd("forget", place.root / "gpt" / tag(1), "--socket", daemon.home.socket).returncode
            == 0
        )
        vanish(agent)


def test_the_pin_of_a_damaged_checkpoint_can_be_removed(place: Home) -> None:
    with running(place, forked=True):
        train(place, [1, 2])
    path = place.root / "gpt" / tag(1)
    assert ckptd("pin", path).returncode == 0
    (path / "manifest.json").write_bytes(b"{}")
    assert "is pinned" in ckptd("forget", path).stdout
    assert ckptd("pin", path, "--remove").returncode == 0
    assert ckptd("forget", path).returncode == 0
    assert steps(place) == [2]


def test_forget_looks_through_the_shared_memory_that_the_environment_names(
    place: Home, tmp_path: Path
) -> None:
    """`CKPTD_SHM_DIR` may name another directory than the default."""
    environment = {"CKPTD_SHM_DIR": str(tmp_path / "gone"), "CKPTD_OVERFLOW": "false"}
    refused = ckptd("forget", saved_once(place), "--yes", environment=environment).stderr
    assert (
        refused
        == f"ckptd: there is no directory {tmp_path}/gone: mount a tmpfs there, or set shm_dir "
        f"to another one\n"
    )
    assert steps(place) == [1]


def saved_once(place: Home) -> Path:
    with running(place, forked=True):
        train(place, [1])
    return place.root / "gpt" / tag(1)


# -- a small mistake deletes nothing


@pytest.mark.parametrize(
    "more",
    [[], ["--keep", "LatestN(1)"], ["--dry-run"], ["--yes"]],
    ids=["alone", "two", "dry run", "yes"],
)
def test_a_policy_over_a_metric_that_no_checkpoint_has_is_an_error(
    place: Home, socket: list[Any], more: list[str]
) -> None:
    run = ckptd("forget", place.root / "gpt", "--keep", "BestN('los', 2)", *more, *socket)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "ckptd: no checkpoint of job 'gpt' was deleted, because BestN('los', 2) cannot choose: "
        "no checkpoint has the metric 'los' (their metrics are 'loss'); did you mean 'loss'?\n"
    )
    assert steps(place) == [1, 2, 3, 4, 5, 6]


def test_most_checkpoints_of_a_job_are_deleted_only_if_somebody_has_confirmed_it(
    place: Home, socket: list[Any]
) -> None:
    job = place.root / "gpt"
    run = ckptd("forget", job, "--keep", "LatestN(2)", *socket)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "ckptd: nothing was deleted, because this would delete 4 of the 6 checkpoints of job gpt: "
        "pass --yes to delete that all the same, or --dry-run to list them\n"
    )
    run = ckptd("forget", job, "--keep", "LatestN(2)", "--json", *socket)
    assert (run.returncode, json.loads(run.stdout)["exit"]) == (2, 2)
    assert steps(place) == [1, 2, 3, 4, 5, 6]
    assert (
        len(rows(ckptd("forget", job, "--keep", "LatestN(2)", "--dry-run", "--json", *socket))) == 4
    )
    assert ckptd("forget", job, "--keep", "LatestN(3)", *socket).returncode == 0  # half of them
    assert steps(place) == [4, 5, 6]
    assert rows(ckptd("forget", job, "--keep", "LatestN(1)", "--yes", "--json", *socket)) == [
        (tag(4), True, None),
        (tag(5), True, None),
    ]
    assert (
        "this would delete the only checkpoint of job gpt: pass --yes"
        in ckptd("forget", job / tag(6), *socket).stderr
    )
    assert steps(place) == [6]


def test_checkpoints_that_stay_do_not_count_as_deleted(place: Home, socket: list[Any]) -> None:
    assert ckptd("pin", place.root / "gpt" / tag(2)).returncode == 0
    run = ckptd("forget", place.root / "gpt", "--keep", "LatestN(2)", *socket)
    assert (run.returncode, steps(place)) == (11, [2, 5, 6])


def test_damaged_checkpoints_do_not_hide_that_most_of_the_intact_ones_would_be_deleted(
    place: Home, socket: list[Any]
) -> None:
    for step in (1, 2, 3):
        (place.root / "gpt" / tag(step) / "manifest.json").write_bytes(b"{}")
    run = ckptd("forget", place.root / "gpt", "--keep", "LatestN(1)", *socket)
    assert (
        run.returncode,
        "this would delete 2 of the 3 checkpoints of job gpt" in run.stderr,
    ) == (2, True)
    for step in (1, 2, 3):  # nothing is lost with a damaged one
        assert ckptd("forget", place.root / "gpt" / tag(step), *socket).returncode == 0
    assert steps(place) == [4, 5, 6]


@pytest.mark.parametrize(
    ("answer", "left", "code"),
    [("y", [6], 0), ("", [1, 2, 3, 4, 5, 6], 1), ("n", [1, 2, 3, 4, 5, 6], 1)],
)
def test_on_a_terminal_the_command_lists_and_asks(
    place: Home, answer: str, left: list[int], code: int
) -> None:
    """This case runs on a pseudo-terminal, as a user does it."""
    with running(place, forked=True):
        train(place, range(1, 7))
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "ckptd.daemon",
        "forget",
        str(place.root / "gpt"),
        "--keep",
        "LatestN(1)",
    ]
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CKPTD_", "XDG_RUNTIME"))
    }
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=clean
    ) as run:
        os.close(theirs)
        said = b""
        while not said.endswith(b"[y/N]: "):
            said += os.read(ours, 1000)
        os.write(ours, answer.encode() + b"\n")
        assert run.stdout is not None
        deleted = run.stdout.read().decode()
    os.close(ours)
    for step in range(1, 6):
        assert f"gpt/{tag(step)}: would be deleted (".encode() in said
    assert b"Delete 5 of the 6 checkpoints of job gpt? [y/N]: " in said
    assert (run.returncode, deleted.count(": deleted ("), steps(place)) == (
        code,
        6 - len(left),
        left,
    )


# -- the job's own policy


def test_a_policy_of_a_job_over_a_metric_that_no_checkpoint_has_deletes_nothing(
    place: Home,
) -> None:
    with running(place, "--keep-last", "1", forked=True) as daemon:
        train(place, range(1, 9), retention=[BestN("los", 2), LatestN(1)])
        until(lambda: daemon.status()["jobs"][0]["announced"] != "", "retention")
        said = daemon.status()["jobs"][0]["announced"]
        assert said.startswith(
            "nothing is deleted, because BestN('los', 2) cannot choose: no checkpoint has the "
            "metric 'los' (their metrics"
        )
        assert (
            "RETENTION      gpt: nothing is deleted, because BestN('los', 2)"
            in ckptd("status", "--socket", place.socket).stdout
        )
    assert steps(place) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert place.log_text().count("cannot choose") == 1


def test_a_job_is_kept_by_its_own_policies(place: Home) -> None:
    with running(place, "--keep-last", "1", forked=True):
        train(place, range(1, 8), retention=[LatestN(2), BestN("loss", 1), EveryNSteps(3)])
        settled(place, [3, 4, 6, 7])
        assert "LatestN(n=2), BestN(metric='loss', n=1" in ckptd("show", place.root / "gpt").stdout


def test_the_policies_of_a_job_hold_across_restarts_until_newer_ones_come(place: Home) -> None:
    with running(place, "--keep-last", "1", forked=True):
        train(place, range(1, 4), retention=PreserveAll())
    for _ in range(2):
        with running(place, "--keep-last", "1", forked=True):
            assert steps(place) == [1, 2, 3]
    with running(place, "--keep-last", "1", forked=True):
        train(place, [4])
        assert steps(place) == [1, 2, 3, 4]
        train(place, [5, 6], retention=LatestN(1))
        until(
            lambda: [path.name for path in (place.root / "gpt").glob("*.a*")] == [tag(6, 3)],
            "retention",
        )


def test_a_job_without_policies_is_kept_by_the_settings(place: Home) -> None:
    with running(
        place,
        "--keep-last",
        "1",
        "--keep",
        "EveryNSteps(4)",
        "--keep",
        "BestN('loss', 1)",
        forked=True,
    ):
        train(place, range(1, 8))
        settled(place, [4, 7])


def test_retention_skips_a_pinned_or_read_checkpoint_and_retries_later(place: Home) -> None:
    with running(place, "--keep-last", "1", forked=True):
        agent = Agent("gpt", socket=place.socket)

        def save(step: int) -> None:
            agent.snapshot({"w": torch.ones(3)}, step=step).wait("durable", timeout=60)

        save(1)
        assert ckptd("pin", place.root / "gpt").returncode == 0
        save(2)
        held = storage(place).lease("gpt", tag(2))
        save(3)
        save(4)
        settled(place, [1, 2, 4])
        held.close()
        save(5)
        settled(place, [1, 5])
        agent.close()


def test_a_pin_set_after_the_death_of_the_daemon_stops_its_deletion(place: Home) -> None:
    """The daemon had already journaled that it would delete this checkpoint."""
    with running(
        place, "--keep-last", "1", failpoints="retire.intended=kill@1", forked=True
    ) as daemon:
        agent = Agent("gpt", socket=place.socket)
        for step in (1, 2):
            agent.snapshot({"w": torch.ones(3)}, step=step)
        daemon.died()
    vanish(agent)
    assert ckptd("pin", place.root / "gpt" / tag(1)).returncode == 0
    with running(place, "--keep-last", "1", forked=True):
        assert steps(place) == [1, 2]
        assert ckptd("pin", place.root / "gpt" / tag(1), "--remove").returncode == 0
        # Two checkpoints are beyond the policy; the daemon does not delete several at
        # its first commit.
        train(place, [3, 4], takeover=True)
        until(lambda: not (place.root / "gpt" / tag(1)).exists(), "retention")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "retention has 0 policies"),
        ("LatestN(5)", "retention has 'LatestN"),
        (5, "'int' object is not iterable"),
    ],
)
def test_an_invalid_policy_is_refused(place: Home, given: Any, words: str) -> None:
    with running(place, forked=True) as daemon, pytest.raises(InvalidRequest, match=words):
        Agent("gpt", socket=daemon.home.socket, retention=given)


def test_a_newer_policy_keeps_everything(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket, retention=LatestN(1))
    agent.retention = ("LatestMoon",)  # type: ignore[assignment]
    for step in range(1, 4):
        agent.snapshot({"w": torch.ones(3)}, step=step).wait("durable", timeout=60)
    agent.close()
    assert steps(daemon.home) == [1, 2, 3]


def test_every_refusal_of_the_daemon_is_told_however_many_tags_there_are(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is asked in several messages."""
    tags = [tag(step) for step in range(250)]
    wanted = {tags[3]: "it is pinned", tags[120]: "it is read"}
    asked: list[m.Forget] = []

    def receive() -> list[m.Forgotten]:
        refused = {tag: why for tag, why in wanted.items() if tag in asked[-1].tags}
        return [m.Forgotten(re=asked[-1].id, refused=refused)]

    channel = SimpleNamespace(
        send=asked.append, receive=receive, new_id=lambda: len(asked) + 1, close=lambda: None
    )
    monkeypatch.setattr(forgetting, "_daemon_of", lambda root, socket: channel)
    assert forgetting._delete(place.root, "gpt", tags, None) == wanted
    assert [tag for message in asked for tag in message.tags] == tags
