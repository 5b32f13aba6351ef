"""Makes one fault after another beside a training, and prints what an operator sees of
it: `python -m tests.crash.operators_hour [--only NAME ...] [--seconds S] [--list]`,
as root.

Each fault has a daemon, a root on a small ext4 of its own in a private mount namespace,
and a trainer of one or two ranks. All places at which an operator may look are watched:
the log, `status`, `status --check`, `history`, `logs`, `on_event`, `/metrics`,
`/healthz`, and what the trainers print. Then the fault is undone. The table says what
was seen first, where, and how many seconds after the fault; whether saving went on by
itself; and which snapshot came back bit for bit after the trainers were killed. The
exit code is 1 if nothing came back, or came back different.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.lookouts import Lookouts, Seen, Tail, command, event_sentence, log_sentence
from tests.support.daemons import Daemon, Home, home

JOB = "gpt"
DISK_MB = 48
WATCHED = 45.0
"""Seconds for which a fault is watched, unless it says more: less than the minute within
which an operator should know."""
AFTER = 90.0
"""The most seconds that saving may take to go on after the fault."""
_INSIDE = "HOUR_INSIDE"
_AFTERWARDS = ", afterwards"
"""Stands behind the places of what was seen once the fault was undone."""


class CannotMake(Exception):
    """Raised when a fault cannot be made on this machine. The text says why."""


@dataclass(slots=True)
class Report:
    """What was seen of one fault. `wrong`: why it counts as a failure of ckptd, or ""."""

    fault: str
    seen: list[Seen] = field(default_factory=list)
    wrong: str = ""

    def add(self, place: str, sentence: str, seconds: float) -> None:
        self.seen.append(Seen(place, sentence, seconds))


class Hour:
    """One root with its disk, its daemon and its trainers."""

    def __init__(self, place: Home, report: Report, watched: float = WATCHED) -> None:
        """watched: the seconds for which a fault is watched, unless it says more."""
        self.place, self.report, self.watched = place, report, watched
        self.disk = place.path / "disk"
        self.diary = place.path / "diary"
        self._notes = Tail(self.diary)
        self._digests: dict[tuple[str, str], str] = {}
        self._recovered: list[list[str]] = []
        self.trainers: list[subprocess.Popen[bytes]] = []
        self._runs = 0
        self.settings: list[str] = []
        self._port = 0
        self.lookouts = Lookouts(place.root, lambda: self._port)
        self.lookouts.follow("log", place.log, log_sentence)
        self.lookouts.follow("on_event", place.path / "events", event_sentence)

    # The disk

    def mount(self) -> None:
        self.place.root.mkdir(exist_ok=True)
        if not self.disk.exists():
            with self.disk.open("wb") as file:
                file.truncate(DISK_MB << 20)
            _call("mkfs.ext4", "-q", "-F", "-m", "0", str(self.disk))
        how = "loop,errors=remount-ro"
        _call("mount", "-o", how, str(self.disk), str(self.place.root))

    @property
    def device(self) -> str:
        """The device of the mounted root."""
        lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        return next(words[0] for words in lines if words[1] == str(self.place.root))

    def fill(self) -> None:
        with (self.place.root / "hog").open("wb", buffering=0) as hog:
            for size in (1 << 20, 1 << 12):
                try:
                    while hog.write(bytes(size)):
                        pass
                except OSError:
                    pass

    # The daemon

    def start_daemon(self, *, under: tuple[str, ...] = ()) -> Daemon:
        events = self.place.path / "events"
        self.daemon = Daemon(
            self.place, "--http", "127.0.0.1:0", "--log-format", "json",
            "--metrics-file", str(self.place.path / "ckptd.prom"),
            "--on-event", f"cat >> {events}", "--log-file", str(self.place.log),
            "--keep-last", "4", *self.settings, under=under,
            environment={"CKPTD_STALL_BUDGET": "10"},
        )  # fmt: skip
        self.daemon.reached_ready()
        for line in self.place.log_text().splitlines():
            if "metrics and probes at http://" in line:
                self._port = int(line.rpartition("at http://127.0.0.1:")[2].partition('"')[0])
        return self.daemon

    # The trainers

    def start_trainers(self, world: int = 1, *more: str) -> None:
        self._runs += 1
        run = f"{self._runs}"
        for rank in range(world):
            said = self.place.path / f"trainer-{run}-{rank}"
            name = "trainer" if world == 1 else f"trainer, rank {rank}"
            self.lookouts.follow(name, said, _said)
            with said.open("wb") as file:
                self.trainers.append(
                    subprocess.Popen(
                        [
                            sys.executable, "-m", "tests.crash.hour_trainer", "--job", JOB,
                            "--diary", str(self.diary), "--rank", str(rank), "--world",
                            str(world), "--store", str(self.place.path / f"store-{run}"), *more,
                        ],
                        stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                        env={**os.environ, "CKPTD_SOCKET": str(self.place.socket)},
                    )
                )  # fmt: skip

    def kill_trainers(self) -> None:
        for trainer in self.trainers:
            trainer.kill()
            trainer.wait()
        self.trainers.clear()

    def read_diary(self) -> None:
        for line in self._notes.more():
            match line.split():
                case ["asked", attempt, step, digest]:
                    self._digests[attempt, step] = digest
                case ["recovered", *found]:
                    self._recovered.append(found)

    def durable(self) -> int:
        """Return the newest step that a manifest names on storage, or -1."""
        found = (self.place.root / JOB).glob("step-*/manifest.json")
        return max((int(path.parent.name.split(".")[0][5:]) for path in found), default=-1)

    # What every fault does

    def begin(self, world: int = 1) -> None:
        """Start all, and wait until four checkpoints are durable and all is quiet."""
        self.mount()
        self.start_daemon()
        self.start_trainers(world)
        if not self.lookouts.watch(120, lambda: self.durable() >= 19):
            raise CannotMake(f"the training did not begin: {self.place.log_text()[-2000:]}")
        self.lookouts.settle()

    def fault(self, seconds: float = 0.0) -> None:
        """Watch what is seen from now on of the fault that has just been made.

        seconds: the least time that it takes until something can be seen.
        """
        self.lookouts.watch(max(seconds, self.watched))

    def goes_on(self) -> None:
        """Note whether saving goes on by itself, now that the fault is undone."""
        self.report.seen += self.lookouts.take()
        before, begun = self.durable(), time.monotonic()
        went_on = self.lookouts.watch(AFTER, lambda: self.durable() > max(before, 0))
        took = time.monotonic() - begun
        self.report.add(
            "(undone)",
            f"saving went on by itself {took:.0f} s after the fault was undone"
            if went_on
            else f"saving did not go on within {AFTER:.0f} s after the fault was undone",
            took,
        )
        self.lookouts.watch(3)
        for seen in self.lookouts.take():
            self.report.add(f"{seen.place}{_AFTERWARDS}", seen.sentence, seen.seconds)
        if not went_on:
            self.report.wrong = "saving did not go on"

    def comes_back(self) -> None:
        """Kill the trainers, let another process recover, and compare the bits."""
        self.kill_trainers()
        self.start_trainers(1, "--recover")
        try:
            self.trainers[0].wait(120)
        except subprocess.TimeoutExpired:
            self.kill_trainers()
        self.read_diary()
        if not self._recovered or self._recovered[-1] == ["checked"]:
            self.report.wrong = "nothing came back"
            self.report.add("recover", "nothing came back", 0.0)
            return
        attempt, step, digest, source = self._recovered[-1]
        saved = self._digests.get((attempt, step), "never saved")
        same = saved == digest
        self.report.add(
            "recover",
            f"step {step} of attempt {attempt} came back from {source}, "
            f"{'bit for bit' if same else f'DIFFERENT: {digest}, and not {saved}'}",
            0.0,
        )
        self._recovered.append(["checked"])
        if not same:
            self.report.wrong = "other bits came back"

    def close(self) -> None:
        self.kill_trainers()
        if hasattr(self, "daemon"):
            self.daemon.close()
        subprocess.run(["umount", "-l", str(self.place.root)], check=False, capture_output=True)


def _said(line: str) -> str:
    """Return what a trainer prints, without the frames of tracebacks."""
    quiet = re.match(r"(\[rank\d\]: *)?( |Traceback|$)", line)
    return "" if quiet else line


def _call(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotMake(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def disk_filled(hour: Hour) -> None:
    """The disk of the root is filled by another program, and freed again."""
    hour.begin()
    hour.lookouts.fault()
    hour.fill()
    hour.fault()
    (hour.place.root / "hog").unlink()
    hour.goes_on()
    hour.comes_back()


def daemon_killed(hour: Hour) -> None:
    """The daemon is killed, and started again after 45 s."""
    hour.begin()
    hour.lookouts.fault()
    hour.daemon.kill()
    hour.fault()
    hour.start_daemon()
    hour.goes_on()
    hour.comes_back()


def daemon_frozen(hour: Hour) -> None:
    """The daemon is stopped by SIGSTOP, as by a debugger or a frozen cgroup."""
    hour.begin()
    hour.lookouts.fault()
    os.kill(hour.daemon.process.pid, signal.SIGSTOP)
    try:
        hour.fault()
    finally:
        os.kill(hour.daemon.process.pid, signal.SIGCONT)
    hour.goes_on()
    hour.comes_back()


def root_unmounted(hour: Hour) -> None:
    """The disk of the root is unmounted, which leaves an empty directory there; the
    daemon is started by a supervisor every few seconds; then the disk is mounted again.
    """
    hour.begin()
    hour.lookouts.fault()
    _call("umount", "-l", str(hour.place.root))
    for _ in range(4):
        hour.lookouts.watch(hour.watched / 4)
        if hour.daemon.process.poll() is not None:
            hour.daemon.close()
            hour.start_daemon()
    hour.daemon.stop()
    hour.mount()
    hour.start_daemon()
    hour.goes_on()
    hour.comes_back()


def root_read_only(hour: Hour) -> None:
    """The file system of the root finds an error, and becomes read-only. It is checked
    and mounted again, while the daemon is stopped.
    """
    hour.begin()
    device = Path(hour.device).name
    hour.lookouts.fault()
    try:
        Path("/sys/fs/ext4", device, "trigger_fs_error").write_text("made by a test")
    except OSError as error:
        raise CannotMake(f"this kernel cannot be told to find an error: {error}") from None
    hour.fault()
    hour.daemon.stop()
    _call("umount", str(hour.place.root))
    subprocess.run(["e2fsck", "-y", "-f", str(hour.disk)], check=False, capture_output=True)
    hour.mount()
    hour.start_daemon()
    hour.goes_on()
    hour.comes_back()


def rank_hung(hour: Hour) -> None:
    """One of two ranks is stopped by SIGSTOP, and continued after 75 s."""
    hour.begin(world=2)
    hour.lookouts.fault()
    os.kill(hour.trainers[1].pid, signal.SIGSTOP)
    hour.fault(75)
    os.kill(hour.trainers[1].pid, signal.SIGCONT)
    hour.goes_on()
    hour.comes_back()


def rank_killed(hour: Hour) -> None:
    """One of two ranks is killed. Then both are started again."""
    hour.begin(world=2)
    hour.lookouts.fault()
    hour.trainers[1].kill()
    hour.fault()
    hour.kill_trainers()
    hour.start_trainers(2)
    hour.goes_on()
    hour.comes_back()


def part_damaged(hour: Hour) -> None:
    """One bit of the newest checkpoint is flipped. `ckptd verify` and `recover` look."""
    _damaged(hour, "*.ckpt", _flip)


def manifest_cut(hour: Hour) -> None:
    """The manifest of the newest checkpoint is cut in half."""
    _damaged(hour, "manifest.json", lambda path: os.truncate(path, path.stat().st_size // 2))


def _damaged(hour: Hour, name: str, damage: Callable[[Path], None]) -> None:
    hour.begin()
    hour.daemon.stop()  # so that nothing newer is saved, and the memory is not asked
    hour.kill_trainers()
    subprocess.run(["rm", "-rf", str(hour.place.segments)], check=True)
    hour.lookouts.watch(3)
    hour.lookouts.fault()
    newest = max((hour.place.root / JOB).glob("step-*/manifest.json")).parent
    damage(max(newest.glob(name), key=lambda path: path.stat().st_size))
    hour.start_daemon()
    hour.lookouts.watch(5)
    for line in command("verify", str(hour.place.root / JOB)):
        if ": sound" not in line:
            hour.lookouts.note("verify", line)
    hour.start_trainers(1)
    hour.fault()
    hour.report.seen += hour.lookouts.take()
    hour.comes_back()


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def dies_again(hour: Hour) -> None:
    """The trainer is killed at the same step again and again, and each time started."""
    hour.begin()
    hour.kill_trainers()
    step = hour.durable() + 3
    hour.lookouts.fault()
    for _ in range(4):
        hour.start_trainers(1, "--die-at", str(step))
        hour.lookouts.watch(40, lambda: hour.trainers[-1].poll() is not None)
        hour.trainers.clear()
    hour.start_trainers(1)
    hour.goes_on()
    hour.comes_back()


def trains_unsaved(hour: Hour) -> None:
    """The trainer goes on training, and takes no snapshots any more."""
    hour.begin()
    hour.lookouts.fault()
    hour.trainers[0].send_signal(signal.SIGUSR2)
    hour.fault(80)
    hour.trainers[0].send_signal(signal.SIGUSR2)
    hour.goes_on()
    hour.comes_back()


def memory_too_small(hour: Hour) -> None:
    """The shared memory has room for one slot of the rank, and not for two. Then it gets
    more, and daemon and trainer are started again.
    """
    hour.settings = ["--shm-quota", "1200k", "--no-overflow"]
    hour.mount()
    hour.start_daemon()
    hour.lookouts.settle()
    hour.lookouts.fault()
    hour.start_trainers(1)
    hour.fault()
    hour.daemon.stop()
    hour.settings = []
    hour.start_daemon()
    hour.kill_trainers()
    hour.start_trainers(1)
    hour.goes_on()
    hour.comes_back()


def root_forbidden(hour: Hour) -> None:
    """The mode of the root becomes 0, for a daemon without the rights of root."""
    hour.mount()
    without = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    _call(*without, "true")
    hour.start_daemon(under=without)
    hour.start_trainers(1)
    hour.lookouts.watch(120, lambda: hour.durable() >= 19)
    hour.lookouts.settle()
    hour.lookouts.fault()
    hour.place.root.chmod(0)
    hour.fault()
    hour.place.root.chmod(0o755)
    hour.goes_on()
    hour.comes_back()


def loss_is_nan(hour: Hour) -> None:
    """The loss becomes NaN, and so do all weights. The newest finite snapshot is asked
    for afterwards.
    """
    hour.begin()
    hour.lookouts.fault()
    hour.trainers[0].send_signal(signal.SIGUSR1)
    hour.fault()
    hour.report.seen += hour.lookouts.take()
    hour.comes_back()


def clock_jumps(hour: Hour) -> None:
    """The clock of the machine jumps by a day."""
    raise CannotMake("a clock can be set for the whole machine only, with its other programs")


FAULTS: dict[str, Callable[[Hour], None]] = {
    "disk filled": disk_filled,
    "daemon killed": daemon_killed,
    "daemon frozen": daemon_frozen,
    "root unmounted": root_unmounted,
    "root read-only": root_read_only,
    "root forbidden": root_forbidden,
    "rank hung": rank_hung,
    "rank killed": rank_killed,
    "part damaged": part_damaged,
    "manifest cut": manifest_cut,
    "dies again": dies_again,
    "memory too small": memory_too_small,
    "loss is NaN": loss_is_nan,
    "clock jumps": clock_jumps,
    "trains unsaved": trains_unsaved,
}


@contextmanager
def _hour(report: Report, watched: float) -> Iterator[Hour]:
    with home() as place:
        os.environ["CKPTD_STATE_DIR"] = str(place.state)
        hour = Hour(place, report, watched)
        try:
            with hour.lookouts:
                yield hour
        finally:
            hour.close()


def run(name: str, watched: float = WATCHED) -> Report:
    """Make one fault, and return what was seen."""
    report = Report(name)
    with _hour(report, watched) as hour:
        try:
            FAULTS[name](hour)
        except CannotMake as error:
            report.add("-", f"not made: {error}", 0.0)
    return report


HEAD = "| fault | place | what was seen | seconds |\n|---|---|---|---:|"


def rows_text(report: Report) -> str:
    """Return what was seen as rows of a table in Markdown. A sentence that was seen at
    several places is one row. The temporary places are named as those of a usual daemon.
    """
    sentences: dict[tuple[str, bool], list[Seen]] = {}
    for seen in report.seen:
        sentences.setdefault((seen.sentence, _AFTERWARDS in seen.place), []).append(seen)
    lines = []
    for (sentence, afterwards), found in sentences.items():
        told = re.sub(r"/tmp/ckptd-test-\w+/root", "/ckpts", sentence)
        told = re.sub(r"/tmp/ckptd-test-\w+", "/run/ckptd", told).replace("|", "\\|")
        places = ", ".join(dict.fromkeys(seen.place.removesuffix(_AFTERWARDS) for seen in found))
        places += _AFTERWARDS if afterwards else ""
        times = dict.fromkeys(f"{seen.seconds:.0f}" for seen in (found[0], found[-1]))
        lines.append(f"| {report.fault} | {places} | {told} | {' to '.join(times)} |")
    return "\n".join(lines)


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.operators_hour")
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), help="make these faults only")
    parser.add_argument("--seconds", type=float, default=WATCHED, help="how long each is watched")
    parser.add_argument("--list", action="store_true", help="list the faults")
    options = parser.parse_args(arguments)
    if options.list:
        for name, fault in FAULTS.items():
            print(f"{name}: {' '.join((fault.__doc__ or '').split())}")
        return 0
    if not os.environ.get(_INSIDE):
        # Nothing that is mounted or started here is seen elsewhere or stays, and the
        # commands find no other daemons.
        apart = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork"]
        this = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", [*apart, "--mount-proc", "--kill-child", *this])
    names = options.only or list(FAULTS)
    reports = []
    print(HEAD)
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        reports.append(run(name, options.seconds))
        print(rows_text(reports[-1]), flush=True)
    wrong = [f"{report.fault}: {report.wrong}" for report in reports if report.wrong]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
