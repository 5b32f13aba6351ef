"""Shows that training under ckptd continues bit for bit after a kill.

`make demo` runs this script in about two minutes.

First act: it trains train_gpt.py once without interruption, and once with two deaths at
random moments. First only the trainer is killed, and must recover from memory. Then
trainer, daemon and everything in shared memory are lost, and it must recover from
storage. Second act: the same script on two ranks. One of them is killed, and both must
recover. Third act: the same on two nodes, and one node is lost with all that is on it
(two_nodes.py), with a root in a directory and, if SeaweedFS is installed, with one in
an object store. Fourth act: a node of three is lost while all snapshots are only in
memory, each on two nodes (lose_a_node.py). Every loss that was ever computed and every
value in the last checkpoint are compared with those of the uninterrupted runs.

The exit code is 0 only if nothing differs and both recoveries came from the expected
place. The script leaves roots, logs and losses.png in --out, and deletes what an
earlier demo left there.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptd.shared.location import Url
from examples import lose_a_node
from examples.nodes import refusal
from examples.runs import (
    RECOVERED,
    Act,
    DemoFailed,
    Run,
    check_checkpoints,
    check_losses,
    end_process,
    print_table,
    say,
    wipe,
)
from examples.two_nodes import ARGUMENTS as ARGUMENTS_ON_NODES
from examples.two_nodes import STEPS as STEPS_ON_NODES
from examples.two_nodes import on_two_nodes, third_act

# A third of a second a step on two idle cores.
STEPS, ARGUMENTS = 40, "--every 8 --batch 4 --context 96"


def train_without_kills(run: Run) -> float:
    """Train the reference run without interruption.

    Return the seconds that a step takes.
    """
    say(f"Training {run.steps} steps without interruption, as the reference.")
    run.start()
    run.wait_for(1)
    begun = time.monotonic()
    run.wait_for(run.steps)
    took = time.monotonic() - begun
    run.wait_for_end()
    return took / (run.steps - 1)


def kill_trainer(run: Run, step: int, delay: float) -> Act:
    """Kill the trainer `delay` seconds after `step` has begun.

    The daemon continues to run, and still has the last snapshot in memory.
    """
    run.wait_for(step - 1)
    time.sleep(delay)
    at = run.kill()
    say(f"Killed the trainer in the middle of step {at}. Starting it again.")
    return start_again(run, "trainer", at, "memory", daemon_says(run)["jobs"][0]["last_sealed"])


def kill_everything(run: Run, step: int, delay: float) -> Act:
    """Kill and remove what the loss of a node would take along: trainer, daemon and
    shared memory. Storage stays.
    """
    run.wait_for(step - 4)
    said = daemon_says(run)
    run.wait_for(step - 1)
    time.sleep(delay)
    # So that it cannot notice the death of the trainer: both end at the same moment.
    os.kill(said["pid"], signal.SIGSTOP)
    at = run.kill()
    end_process(said["pid"], signal.SIGKILL)
    freed = sum(file.stat().st_size for file in run.slots.iterdir())
    shutil.rmtree(run.slots)
    say(
        f"Killed trainer and daemon in the middle of step {at}, and removed {freed / 1e6:.0f} MB "
        f"from shared memory. Starting again."
    )
    return start_again(run, "trainer and daemon", at, "storage", said["jobs"][0]["last_durable"])


def kill_one_rank(run: Run, rank: int, step: int, delay: float) -> Act:
    """Kill a rank `delay` seconds after `step` has begun. torchrun ends the other rank.

    Then both are started again.
    """
    run.wait_for(step - 1)
    time.sleep(delay)
    at = run.kill_rank(rank)
    say(f"Killed rank {rank} of {run.ranks} in the middle of step {at}. Starting both again.")
    return start_again(
        run, f"rank {rank} of {run.ranks}", at, "memory", daemon_says(run)["jobs"][0]["last_sealed"]
    )


def daemon_says(run: Run) -> dict[str, Any]:
    status = run.status()
    if status is None or not status["jobs"]:
        raise DemoFailed(f"the daemon of {run.root} does not answer")
    return status


def start_again(run: Run, killed: str, at: int, source: str, known: dict[str, Any] | None) -> Act:
    """Start the trainer again.

    Raises DemoFailed unless it recovers from `source`, and no older step than the
    daemon reported.
    """
    before = len(RECOVERED.findall(run.printed()))
    run.start()
    run.wait_until(
        lambda: len(RECOVERED.findall(run.printed())) >= before + run.ranks,
        "every rank had recovered",
    )
    found = RECOVERED.findall(run.printed())[before:]
    if len({(step, attempt, tier) for step, attempt, tier, _ in found}) != 1:
        raise DemoFailed(f"the ranks have recovered different things: {found}")
    step, attempt, tier, seconds = found[0]
    act = Act(
        killed=killed,
        at=at,
        step=int(step),
        attempt=int(attempt),
        source=tier,
        seconds=float(seconds),
    )
    say(
        f"It has recovered step {act.step} of attempt {act.attempt} from {act.source} in "
        f"{act.seconds:.2f} s."
    )
    if act.source != source:
        raise DemoFailed(f"it should have come from {source}")
    if known is None or act.step < known["step"]:
        raise DemoFailed(f"the daemon had {known} before")
    return act


def plot(file: Path, reference: Run, interrupted: Run, acts: list[Act]) -> None:
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
    for act, side, height in zip(acts, ("left", "right"), (0.97, 0.75), strict=True):
        axes.axvspan(act.step, act.at, color="#d62728", alpha=0.08, linewidth=0)
        axes.axvline(act.at, color="#d62728", linewidth=1.2)
        text = (
            f"killed {act.killed}\nback to step {act.step}\nfrom {act.source} in "
            f"{act.seconds:.2f} s"
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
            (act.at, height),
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


def first_act(out: Path, reference: Run, interrupted: Run, chance: random.Random) -> None:
    seconds = train_without_kills(reference)
    say(f"Training the same in another root, to be killed. A step takes {seconds:.2f} s.")
    interrupted.start()
    acts = [
        kill_trainer(
            interrupted,
            chance.randrange(STEPS // 3, STEPS // 2),
            chance.uniform(0.1, 0.9) * seconds,
        ),
        kill_everything(
            interrupted,
            chance.randrange(STEPS * 2 // 3, STEPS - 4),
            chance.uniform(0.1, 0.9) * seconds,
        ),
    ]
    compare(reference, interrupted, acts)
    if find_spec("matplotlib"):
        plot(out / "losses.png", reference, interrupted, acts)
        print(f"The losses of both runs: {out / 'losses.png'}")
    print(f"What was saved: ckptd ls {interrupted.root}")


def second_act(reference: Run, interrupted: Run, chance: random.Random) -> float:
    print()
    say(f"Now on {reference.ranks} ranks, with FSDP.")
    seconds = train_without_kills(reference)
    say(
        f"Training the same in another root; one rank will be killed. A step takes {seconds:.2f} s."
    )
    interrupted.start()
    step, rank = (
        chance.randrange(STEPS_ON_NODES // 2, STEPS_ON_NODES - 3),
        chance.randrange(reference.ranks),
    )
    compare(
        reference,
        interrupted,
        [kill_one_rank(interrupted, rank, step, chance.uniform(0.1, 0.9) * seconds)],
    )
    return seconds


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


def compare(reference: Run, interrupted: Run, acts: list[Act]) -> None:
    interrupted.wait_for_end()
    say("It has come to its end. Comparing.")
    print_table([act.row() for act in acts])
    computed = check_losses(reference, interrupted)
    print(f"{computed} losses computed for {reference.steps} steps: 0 differ from the reference.")
    print(
        f"{check_checkpoints(reference, interrupted)} tensors and values in the last checkpoint: "
        f"0 differ."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill a training run twice and compare it with one that was not killed."
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10_000),
        help="of the moments of the kills; default: by chance",
    )
    args = parser.parse_args()
    out = Path(os.path.abspath(args.out))
    runs = [Run(out, name, STEPS, ARGUMENTS) for name in ("reference", "interrupted")]
    runs += [
        Run(out, f"ranks-{name}", STEPS_ON_NODES, ARGUMENTS_ON_NODES, ranks=2)
        for name in ("reference", "interrupted")
    ]
    runs.append(nodes := on_two_nodes(out, "nodes"))
    runs += (lost := lose_a_node.runs(out))
    chance = random.Random(args.seed)
    # So that no process is left running after an error either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(f"Kills are at random moments; the same again with --seed {args.seed}.")
    try:
        wipe(out, *runs)
        first_act(out, runs[0], runs[1], chance)
        seconds = second_act(runs[2], runs[3], chance)
        if why := refusal():
            say(f"The acts on several nodes are left out: {why}.")
        else:
            print()
            third_act(runs[2], nodes, chance, seconds)
            with object_store() as root:
                if root is not None:
                    print()
                    say("The same again with a root in an object store, SeaweedFS on this machine.")
                    runs.append(in_store := on_two_nodes(out, "nodes-in-store", root))
                    third_act(runs[2], in_store, chance, seconds)
            print()
            lose_a_node.act(*lost, chance)
    except DemoFailed as failure:
        sys.exit(f"FAILED: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for run in runs:
            run.end()
    say("Everything came back as it was.")


if __name__ == "__main__":
    main()
