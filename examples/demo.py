"""Shows that training under ckptd continues bit for bit after a kill.

`make demo` runs all acts in about two minutes; `make demo ACTS="1 3"` runs only these:

1. The same training runs twice, side by side, in one process each. One run is left
   alone, as the reference. The other is killed at two random moments. First only the
   trainer is killed, and must recover from memory. Then trainer, daemon and everything
   in shared memory are lost, and it must recover from storage.
2. It trains on two ranks with FSDP. One is killed, and both must recover.
3. It trains on two nodes, and one is lost with all that is on it (two_nodes.py). The
   root is in an object store if SeaweedFS is installed, and otherwise in a directory.
4. It trains on three nodes, and one is lost while all snapshots are only in memory, each
   on two nodes (lose_a_node.py).

Every loss that was ever computed and every value in the last checkpoint are compared
with those of the uninterrupted runs. The exit code is 0 only if nothing differs and each
recovery came from the expected place. The script leaves roots, logs and losses.png in
--out, and deletes what an earlier demo left there.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptd.shared.location import Url
from examples import lose_a_node
from examples.nodes import refusal
from examples.runs import (
    Kill,
    Run,
    compare,
    end_process,
    judged,
    newest,
    parser,
    place,
    running,
    say,
    train_alone,
)
from examples.two_nodes import STEPS as STEPS_ON_NODES
from examples.two_nodes import lose_second_node, on_one_node, on_two_nodes

# A step takes a tenth of a second on two idle cores.
STEPS, ARGUMENTS = 40, "--every 8 --batch 4 --context 64 --layers 4 --width 256"


def kill_trainer(run: Run, step: int, delay: float) -> Kill:
    """Kill the trainer `delay` seconds after `step` has begun.

    The daemon continues to run, and still has the last snapshot in memory.
    """
    run.wait_for(step - 1)
    run.wait_until(lambda: newest(run.status(), "last_sealed") > 0, "a snapshot was in memory")
    time.sleep(delay)
    at = run.kill()
    say(f"Killed the trainer in the middle of step {at}. Starting it again.")
    known = newest(run.status(), "last_sealed")
    run.start()
    return run.recovery("trainer", at, "memory", known)


def kill_everything(run: Run, step: int, delay: float) -> Kill:
    """Kill and remove what the loss of a node would take along: trainer, daemon and
    shared memory. Storage stays.
    """
    run.wait_for(step - 1)
    run.wait_until(lambda: newest(run.status(), "last_durable") > 0, "a checkpoint was in storage")
    time.sleep(delay)
    status = run.status()
    # So that it cannot notice the death of the trainer: both end at the same moment.
    os.kill(status["pid"], signal.SIGSTOP)
    at = run.kill()
    end_process(status["pid"], signal.SIGKILL)
    freed = sum(file.stat().st_size for file in run.slots.iterdir())
    shutil.rmtree(run.slots)
    say(
        f"Killed trainer and daemon in the middle of step {at}, and removed {freed / 1e6:.0f} MB "
        f"from shared memory. Starting again."
    )
    run.start()
    return run.recovery("trainer and daemon", at, "storage", newest(status, "last_durable"))


def plot(file: Path, reference: Run, interrupted: Run, kills: list[Kill]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    expected, found = reference.result(), interrupted.result()
    axes.plot(
        list(expected),
        list(expected.values()),
        color="#9ecae1",
        linewidth=7,
        solid_capstyle="round",
        label="never interrupted",
    )
    axes.plot(
        list(found),
        list(found.values()),
        color="#08306b",
        linewidth=1.6,
        linestyle="--",
        label="killed twice",
    )
    for kill, side, height in zip(kills, ("left", "right"), (0.97, 0.75), strict=True):
        axes.axvspan(kill.step, kill.at, color="#d62728", alpha=0.08, linewidth=0)
        axes.axvline(kill.at, color="#d62728", linewidth=1.2)
        text = (
            f"killed {kill.killed}\nback to step {kill.step}\nfrom {kill.source} in "
            f"{kill.seconds:.2f} s"
        )
        beside = (6 if side == "left" else -6, 0)
        where: dict[str, Any] = {
            "xycoords": ("data", "axes fraction"),
            "xytext": beside,
            "textcoords": "offset points",
            "ha": side,
            "va": "top",
        }
        axes.annotate(
            text,
            (kill.at, height),
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            **where,
        )
    axes.set(
        xlabel="step",
        ylabel="training loss",
        title="Two runs, bit for bit the same",
        xlim=(0, reference.steps + 1),
    )
    axes.legend(loc="upper right")
    figure.savefig(file, dpi=120)


class Demo:
    """The acts, and what they share: a directory, random moments, and the run on two ranks
    that is not interrupted.
    """

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.chance = out, random.Random(seed)
        self.on_two_ranks = on_one_node(out, "ranks-reference")

    def one_process(self) -> None:
        alone, killed = (
            Run(self.out, name, STEPS, ARGUMENTS) for name in ("reference", "interrupted")
        )
        with running(self.out, alone, killed):
            say(
                f"Training {STEPS} steps twice, side by side. One run is the reference, the other "
                f"one will be killed twice."
            )
            alone.start()
            killed.start()
            kills = [
                kill_trainer(
                    killed,
                    self.chance.randrange(STEPS // 3, STEPS // 2),
                    self.chance.uniform(0, 0.1),
                ),
                kill_everything(
                    killed,
                    self.chance.randrange(STEPS * 2 // 3, STEPS * 4 // 5),
                    self.chance.uniform(0, 0.1),
                ),
            ]
            compare(alone, killed, *kills)
        if find_spec("matplotlib"):
            plot(self.out / "losses.png", alone, killed, kills)
            print(f"The losses of both runs: {place(self.out / 'losses.png')}")
        command = place(Path(sys.executable).with_name("ckptd"))
        print(f"What was saved: {command} ls {place(killed.root)}")
        print(f"How they differ: {command} diff {place(alone.job)} {place(killed.job)}")

    def two_ranks(self) -> None:
        killed = on_one_node(self.out, "ranks-interrupted", restarts=1)
        with running(self.out, killed):
            train_alone(self.on_two_ranks)
            say("Training the same in another root. One rank will be killed.")
            killed.start()
            step = self.chance.randrange(STEPS_ON_NODES // 3, STEPS_ON_NODES * 2 // 3)
            rank = self.chance.randrange(killed.ranks)
            killed.wait_for(step - 1)
            killed.wait_until(
                lambda: newest(killed.status(), "last_sealed") > 0, "a snapshot was in memory"
            )
            time.sleep(self.chance.uniform(0, 0.1))
            at = killed.kill_rank(rank)
            say(f"Killed rank {rank} in the middle of step {at}. torchrun starts both ranks again.")
            known = newest(killed.status(), "last_sealed")
            compare(
                self.on_two_ranks, killed, killed.recovery(f"rank {rank} of 2", at, "memory", known)
            )

    def two_nodes(self) -> None:
        with object_store() as root:
            if root is not None:
                say("The root is in an object store: SeaweedFS, on this machine.")
            killed = on_two_nodes(self.out, "nodes", root)
            with running(self.out, killed):
                lose_second_node(self.on_two_ranks, killed, self.chance)

    def three_nodes(self) -> None:
        alone, killed = lose_a_node.runs(self.out)
        with running(self.out, alone, killed):
            lose_a_node.lose_a_node(alone, killed, self.chance)


ACTS: dict[int, tuple[str, Callable[[Demo], None]]] = {
    1: ("one process, killed twice", Demo.one_process),
    2: ("two ranks with FSDP, of which one is killed", Demo.two_ranks),
    3: ("two nodes, of which one is lost", Demo.two_nodes),
    4: ("three nodes, of which one is lost while nothing is in storage", Demo.three_nodes),
}
ON_NODES = {3, 4}


def chosen(text: str | None) -> list[int]:
    """Return the acts that the variable ACTS names, or all if it is None.

    Exits with a sentence if the text is empty or names something else.
    """
    if text is None:
        return list(ACTS)
    words = text.replace(",", " ").split()
    wrong = [word for word in words if word not in map(str, ACTS)]
    if wrong or not words:
        sys.exit(
            f"ACTS {f'names {wrong[0]!r}' if wrong else 'is empty'}, but the acts are "
            f'{", ".join(map(str, ACTS))}: name some of them, as in ACTS=1 or ACTS="1 3", or leave '
            f"ACTS out to run all."
        )
    return sorted(set(map(int, words)))


@contextmanager
def object_store() -> Iterator[Url | None]:
    """Context manager.

    Run SeaweedFS, if it and the packages of the tests are installed, and give the URL
    of a root in it, or else None.
    """
    try:
        from tests.support import stores  # the demo borrows the server of the tests
    except ImportError:
        stores = None  # type: ignore[assignment]
    if stores is None or stores.program("weed") is None:
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-demo-") as place,
        stores.Servers(Path(place)) as servers,
    ):
        os.environ.update(servers.get("seaweed").environ)
        yield Url("s3", "bucket", ("demo",))


def main() -> None:
    args = parser(
        "Kill training runs and compare them with runs that were not killed. The variable ACTS "
        "selects the acts; default: all."
    ).parse_args()
    acts = chosen(os.environ.get("ACTS"))
    repeat = f"{place(Path(sys.executable))} -m examples.demo --seed {args.seed}"
    say(f"Kills come at random moments. The same ones again: {repeat}")
    if not ON_NODES.isdisjoint(acts) and (why := refusal()):
        say(f"Acts 3 and 4 are left out: {why}.")
        acts = [act for act in acts if act not in ON_NODES]
        if not acts:
            sys.exit("FAILED: no act is left")
    demo = Demo(args.out, args.seed)
    with judged(), running(args.out, demo.on_two_ranks):
        for act in acts:
            title, show = ACTS[act]
            print(f"\nAct {act}: {title}")
            show(demo)
        print()


if __name__ == "__main__":
    main()
