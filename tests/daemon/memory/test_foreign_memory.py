"""Tests that memory saved for one root never gets into another root unasked: real
daemons whose roots are deleted, replaced or moved.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link.launch import start_private
from ckptd.daemon.commands.doctor import check_memory
from ckptd.daemon.commands.neighbours import daemon_status
from ckptd.daemon.commands.report import status_text
from ckptd.daemon.memory.foreign_memory import (
    ForeignMemoryKeeper,
    HeldSnapshot,
    described,
    read_held,
)
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, ForeignMemory
from ckptd.shared.formats.segment import (
    RootMark,
    SegmentHeader,
    SlotState,
    read_header,
    read_root_mark,
    write_header,
)
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem
from tests.support import stores
from tests.support.daemons import Daemon, Home, running, until
from tests.support.replaced_roots import (
    LAST,
    REPLACEMENTS,
    SENTENCE,
    SIZE,
    choice,
    contents,
    goes_on,
    recovered_by,
    refused,
    take_away,
    train_and_die,
)
from tests.support.scripts import python
from tests.support.trainers import blank, expected, vanish

# -- a daemon of the node


def replace_the_root(place: Home, killed: bool, replaced: str) -> None:
    """Train, and replace the root under its daemon, or after the daemon was killed."""
    with running(place, forked=True) as daemon:
        train_and_die(place)
        if killed:
            daemon.kill()
        take_away(place)
        REPLACEMENTS[replaced](place)
        assert daemon.died() == (-signal.SIGKILL if killed else 1)


def refuses_the_memory(place: Home, daemon: Daemon) -> None:
    """Check that a new daemon refuses the job, and shows whose memory it holds."""
    refused(place)
    (held,) = daemon.status()["foreign_memory"]
    assert (held["job"], held["attempt"], held["step"], held["root"]) == (
        "job",
        1,
        LAST,
        str(place.root),
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("way", ["drop", "adopt"])
@pytest.mark.parametrize("replaced", REPLACEMENTS)
@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
def test_memory_of_a_root_that_is_gone_is_refused_until_a_person_decides(
    place: Home, killed: bool, replaced: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_the_root(place, killed, replaced)
    with running(place, forked=True) as daemon:
        refuses_the_memory(place, daemon)
        with choice(monkeypatch, way):
            agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) == (None if way == "drop" else (LAST, "memory"))
        assert daemon.status()["foreign_memory"] == []
        goes_on(agent, place, LAST + 1)
        tags = [path.name for path in sorted((place.root / "job").glob("step-*"))]
        if way == "drop":
            assert tags == ["step-00000004.a0001"]
        else:  # step 2 may have been in memory, too
            assert tags[-2:] == ["step-00000003.a0001", "step-00000004.a0002"]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("replaced", REPLACEMENTS)
@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
def test_memory_of_a_root_that_is_gone_is_recovered_once_the_root_is_back(
    place: Home, killed: bool, replaced: str
) -> None:
    replace_the_root(place, killed, replaced)
    with running(place, forked=True) as daemon:
        refuses_the_memory(place, daemon)
        shutil.rmtree(place.root)
        (place.path / "gone").rename(place.root)
        daemon.died()
    with running(place, forked=True) as daemon:
        assert daemon.status()["foreign_memory"] == []
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) == (LAST, "memory")
        goes_on(agent, place, LAST + 1)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("setting", ["refuse", "drop", "adopt"])
def test_a_daemon_can_be_told_for_all_jobs(place: Home, setting: str) -> None:
    json = ("--log-format", "json")
    with running(place, *json, forked=True) as daemon:
        train_and_die(place)
        until(lambda: place.events("trainer.gone"), "end of the trainer")
        daemon.kill()
    take_away(place)
    with running(place, "--foreign-memory", setting, *json, forked=True) as daemon:
        assert len(daemon.status()["foreign_memory"]) == (setting == "refuse")
        assert [(told["job"], told["step"]) for told in place.events("memory.foreign")] == (
            [("job", LAST)] if setting == "refuse" else []
        )
        if setting == "refuse":
            refused(place)
        else:
            agent = Agent("job", socket=place.socket)
            assert recovered_by(agent) == (None if setting == "drop" else (LAST, "memory"))
            goes_on(agent, place, LAST + 1)


@pytest.mark.usefixtures("processes")
def test_a_run_may_overrule_the_daemon(place: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(place, forked=True) as daemon:
        train_and_die(place)
        daemon.kill()
    take_away(place)
    with running(place, forked=True):
        with choice(monkeypatch, "refuse"), pytest.raises(ForeignMemory, match=SENTENCE):
            Agent("job", socket=place.socket)
        with (
            choice(monkeypatch, "adapt"),
            pytest.raises(
                CkptdError, match="CKPTD_FOREIGN_MEMORY is 'adapt'; expected refuse, adopt or drop"
            ),
        ):
            Agent("job", socket=place.socket)
        refused(place)


@pytest.mark.usefixtures("processes")
def test_the_stop_of_a_daemon_neither_saves_nor_frees_the_memory_of_another_root(
    place: Home,
) -> None:
    with running(place, "--memory-ttl", "0", forked=True) as daemon:
        train_and_die(place, 1)
        until(lambda: not place.segment_files(), "end of memory_ttl")
        daemon.kill()
    with running(place, forked=True) as daemon:
        train_and_die(place)
        daemon.kill()
    take_away(place)
    with running(place, "--memory-ttl", "0", forked=True) as daemon:
        before = place.segment_files()
        assert daemon.stop() == 0
    assert place.segment_files() == before != []
    assert contents(place.root) == []


@pytest.mark.usefixtures("processes")
def test_other_jobs_of_the_new_root_are_not_asked(place: Home) -> None:
    with running(place, forked=True) as daemon:
        train_and_die(place)
        daemon.kill()
    take_away(place)
    with running(place, forked=True):
        agent = Agent("other", socket=place.socket)
        assert recovered_by(agent) is None
        agent.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
        agent.close()
        with pytest.raises(ForeignMemory, match=SENTENCE):
            Agent("job", socket=place.socket)


@pytest.mark.usefixtures("processes")
def test_what_was_adopted_is_the_new_roots_for_every_later_daemon(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place, forked=True) as daemon:
        train_and_die(place)
        daemon.kill()
    take_away(place)
    with running(place, forked=True) as daemon:
        with choice(monkeypatch, "adopt"):
            agent = Agent("job", socket=place.socket)
        daemon.kill()
    identity = open_root(place.root).known_identity()
    segments = place.segment_files()
    assert len(segments) > 0
    for path in segments:
        with path.open("rb") as file:
            mark = read_root_mark(file.fileno(), read_header(file.fileno()))
            assert mark is not None
            assert (mark.identity, mark.place) == (identity, str(place.root))
    with running(place, forked=True) as daemon:
        assert daemon.status()["foreign_memory"] == []
        assert recovered_by(agent) == (LAST, "memory")
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_run_that_is_alive_cannot_save_into_another_root(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        for step in range(1, LAST + 1):
            agent.snapshot(expected(step, SIZE), step=step).wait("durable", timeout=60)
        take_away(place)
        assert daemon.died() == 1
    with running(place, forked=True):
        pending = agent.snapshot(expected(LAST + 1, SIZE), step=LAST + 1)
        with pytest.raises(ForeignMemory, match=SENTENCE):
            pending.wait("durable", timeout=60)
        for _ in range(2):
            with pytest.raises(ForeignMemory, match=SENTENCE):
                agent.recover(blank(SIZE))
        assert contents(place.root) == []
        with (
            choice(monkeypatch, "drop"),
            pytest.raises(ForeignMemory, match="that is still running: end that trainer first"),
        ):
            Agent("job", socket=place.socket)
        with pytest.raises(ForeignMemory, match=SENTENCE):
            agent.close()
        with choice(monkeypatch, "drop"):
            new = Agent("job", socket=place.socket)
        assert recovered_by(new) is None
        goes_on(new, place, 1)


@pytest.mark.usefixtures("processes")
def test_a_first_run_and_a_run_after_a_clean_end_are_asked_nothing(place: Home) -> None:
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) is None
        goes_on(agent, place, 1)  # closes the agent, which leaves nothing in memory
    take_away(place)
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) is None
        goes_on(agent, place, 1)


@pytest.mark.usefixtures("processes")
def test_slots_in_which_nothing_is_sealed_raise_no_question(place: Home) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.prepare(expected(1, SIZE))
        until(place.segment_files, "slots")
        daemon.kill()
    vanish(agent)
    take_away(place)
    with running(place, forked=True):
        assert place.segment_files() == []
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) is None
        goes_on(agent, place, 1)


# -- where memory is from


@pytest.mark.usefixtures("processes")
def test_memory_of_a_version_without_root_marks_is_recovered_as_before(place: Home) -> None:
    with running(place, forked=True) as daemon:
        train_and_die(place)
        daemon.kill()
    for path in place.segment_files():
        with path.open("r+b") as file:
            # That is all that this version adds.
            file.truncate(read_header(file.fileno()).file_length)
    (place.root / names.CONTROL / names.IDENTITY).unlink()  # the root is older still
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) == (LAST, "memory")
        assert daemon.status()["identity"] == open_root(place.root).known_identity()
        goes_on(agent, place, LAST + 1)


# -- object stores, and several nodes


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_nodes_that_give_a_root_its_identity_at_the_same_time_agree(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "host", lambda: threading.current_thread().name)
    count, found = 16, set[str]()
    with ExitStack() as held:
        root: Any = tmp_path / "root"
        if kind == "object store":
            if stores.program("weed") is None:
                pytest.skip("SeaweedFS is not installed")
            root = held.enter_context(
                stores.home_in(held.enter_context(stores.seaweed(tmp_path / "store")))
            ).root
        roots = [open_root(root) for _ in range(count)]
        for number, each in enumerate(roots):
            held.callback(each.storage.serve(f"node{number}").close)
        together = threading.Barrier(count)

        def start(number: int) -> None:
            together.wait()
            found.add(roots[number].identity())

        threads = [
            threading.Thread(target=start, args=[number], name=f"node{number}")
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {open_root(root).known_identity()}


def test_an_adoption_that_a_daemon_did_not_finish_is_asked_about_again(tmp_path: Path) -> None:
    def opened(identity: str) -> Slots:
        slots = Slots(PosixFileSystem(), tmp_path, "ckptd-test", 1 << 30)
        slots.mark = RootMark(identity, "/ckpts")
        return slots

    async def none(slots: list[Slot]) -> None:
        raise AssertionError

    slots = opened("ab" * 16)
    for rank in range(3):
        header = SegmentHeader(
            job="job", attempt=1, rank=rank, world_size=3, slot=0, capacity=100, chunk_size=65536
        )
        made = slots.create(header)
        write_header(made.fd, header.next(SlotState.SEALED, step=7))
        made.descriptor.close()
    slots.close()
    slots = opened("cd" * 16)
    slots.adopt()
    slots.admit([each.slot for each in slots.foreign.values() if each.slot.header.rank == 1])
    slots.close()  # as if the daemon had died before it came to the others
    for setting, foreign in (("refuse", 3), ("refuse", 3), ("adopt", 0), ("refuse", 0)):
        slots = opened("cd" * 16)
        slots.adopt()
        keeper = ForeignMemoryKeeper(slots, "/ckpts", setting, none)
        keeper.start()
        assert (len(slots.foreign), len(slots.slots)) == (foreign, 3 - foreign)
        assert [(held.job, held.step) for held in keeper.held()] == (
            [("job", 7)] if foreign else []
        )
        assert slots.used == sum(
            path.stat().st_size for path in (tmp_path / "ckptd-test").iterdir()
        )
        slots.close()


async def test_an_adoption_that_fails_leaves_all_of_it_foreign_and_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[int]] = []

    async def take(slots: list[Slot]) -> None:
        taken.append(sorted(slot.header.rank for slot in slots))

    slots = Slots(PosixFileSystem(), tmp_path, "ckptd-test", 1 << 30)
    slots.mark = RootMark("ab" * 16, "/ckpts")
    for rank in range(3):
        header = SegmentHeader(
            job="job", attempt=1, rank=rank, world_size=3, slot=0, capacity=100, chunk_size=65536
        )
        made = slots.create(header)
        write_header(made.fd, header.next(SlotState.SEALED, step=7))
        made.descriptor.close()
    slots.mark = RootMark("cd" * 16, "/ckpts")
    slots.adopt()
    keeper = ForeignMemoryKeeper(slots, "/ckpts", "refuse", take)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail_once_in_three(os.pwrite))
        with pytest.raises(OSError, match="No space left"):
            await keeper.apply_choice("job", "adopt")
    assert (len(slots.foreign), len(slots.slots), taken) == (3, 0, [])
    await keeper.apply_choice("job", "adopt")
    assert (len(slots.foreign), len(slots.slots), taken) == (0, 3, [[0, 1, 2]])
    await keeper.apply_choice("job")
    slots.close()


def fail_once_in_three(write: Callable[..., int]) -> Callable[..., int]:
    calls = iter(range(1000))

    def fails(*arguments: Any) -> int:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    return fails


# -- what a person sees


def test_the_sentence_says_where_the_root_was_and_what_is_there() -> None:
    held = HeldSnapshot("gpt", 2, 89, RootMark("ab" * 16, "/old"), 4096)
    said = described(held, "/ckpts", "cd" * 16)
    assert said.startswith(
        "the memory of this node holds step 89 of attempt 2 of job 'gpt', saved for root "
        "abababab, which was at /old, but "
        "/ckpts has another root now, cdcdcdcd: "
    )
    assert "but there is no root at /ckpts now: " in described(held, "/ckpts", None)
    assert "which was at" not in described(held, "/old", None)


def test_a_directory_that_is_missing_or_holds_other_files_holds_nothing(tmp_path: Path) -> None:
    assert list(read_held(tmp_path / "missing")) == []
    (tmp_path / f"{'0' * 32}.seg").write_bytes(b"no segment")
    (tmp_path / "other").write_bytes(b"")
    assert list(read_held(tmp_path)) == []


@pytest.mark.usefixtures("processes")
def test_status_and_doctor_show_the_identity_and_the_foreign_memory(place: Home) -> None:
    with running(place, forked=True) as daemon:
        train_and_die(place)
        was = open_root(place.root).known_identity()
        assert daemon.status()["identity"] == was
        assert f"identity       {was}" in status_text(daemon.status())
        daemon.kill()
    assert was is not None
    good = check_memory(place.root, Path("/dev/shm"))
    assert (good.level, good.values["identity"], good.values["foreign"]) == ("ok", was, [])
    take_away(place)
    none = check_memory(place.root, Path("/dev/shm"))
    assert none.level == "warning"
    assert f"step 3 of attempt 1 of job 'job', saved for root {was[:8]}" in none.message
    with running(place, forked=True) as daemon:
        identity = daemon.status()["identity"]
        assert identity != was
        text = status_text(daemon.status())
        assert re.search(
            rf"job step 3 \(attempt 1\), saved for root {was[:8]}: .*CKPTD_FOREIGN_MEMORY", text
        ), text
        found = check_memory(place.root, Path("/dev/shm"))
        assert (found.level, found.values["identity"]) == ("warning", identity)


# -- private daemons


@pytest.fixture
def private(place: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    for key in [key for key in os.environ if key.startswith("CKPTD_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.path))
    monkeypatch.setenv("CKPTD_ROOT", str(place.root))
    monkeypatch.setenv("CKPTD_STATE_DIR", str(place.state))
    yield place
    for process in psutil.process_iter(["cmdline"]):
        if str(place.root) in (process.info["cmdline"] or []):
            process.kill()


SCRIPT = """
import sys, torch
from ckptd import agent as ckptd
state = {"x": torch.zeros(4)}
recovered = ckptd.recover(state)
print("recovered", recovered and recovered.step, state["x"].tolist(), flush=True)
first, last = map(int, sys.argv[1:])
for step in range(first, last + 1):
    ckptd.snapshot({"x": torch.full((4,), float(step))}, step=step).wait("durable", timeout=120)
import os
os.kill(os.getpid(), 9) if last != 9 else ckptd.close()
"""


def script(home: Home, first: int, last: int, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script. It kills itself at its end, unless its last step is 9."""
    path = home.path / "train.py"
    path.write_text(SCRIPT)
    return python(path, first, last, environment={**os.environ, **environ}, timeout=300)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("way", ["drop", "adopt"])
@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
def test_rm_rf_between_two_runs_of_a_private_daemon(private: Home, killed: bool, way: str) -> None:
    ended = script(private, 1, 3)
    assert ended.stdout == "recovered None [0.0, 0.0, 0.0, 0.0]\n", ended.stderr
    if killed:
        psutil.Process(daemon_status(machine.private_socket(private.root))["pid"]).kill()
    shutil.rmtree(private.root)
    ended = script(private, 1, 9)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.search(SENTENCE.replace("'job'", "'train'"), ended.stderr), ended.stderr
    assert not private.root.exists() or contents(private.root) == []
    ended = script(private, 4, 9, CKPTD_FOREIGN_MEMORY=way)
    if "this daemon is about to end" in ended.stderr:
        ended = script(private, 4, 9, CKPTD_FOREIGN_MEMORY=way)
    assert ended.stdout == (
        "recovered None [0.0, 0.0, 0.0, 0.0]\n"
        if way == "drop"
        else "recovered 3 [3.0, 3.0, 3.0, 3.0]\n"
    ), ended.stderr
    assert ended.returncode == 0
    tags = sorted(path.name for path in (private.root / "train").glob("step-*"))
    assert tags[-1] == ("step-00000009.a0001" if way == "drop" else "step-00000009.a0002")
    assert ("step-00000003.a0001" in tags) == (way == "adopt")


@pytest.mark.usefixtures("processes")
def test_a_private_daemon_does_not_keep_the_choice_of_one_run(
    private: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_FOREIGN_MEMORY", "drop")
    given: list[dict[str, Any]] = []
    popen = subprocess.Popen

    def spy(*arguments: Any, **options: Any) -> Any:
        given.append(options["env"])
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    assert start_private(private.root) == ""
    (environ,) = given
    assert "CKPTD_FOREIGN_MEMORY" not in environ
    assert "CKPTD_STATE_DIR" in environ
