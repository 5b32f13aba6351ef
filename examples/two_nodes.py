"""Shows that a job on two nodes loses nothing when a node dies: `python -m
examples.two_nodes`, which is also the third act of the demo.

One rank trains on each node (nodes.py), started by torchrun as on two machines. In the
middle of a step everything on the second node is killed, and its memory and its disk
are gone. An empty node takes its place, and the job must continue from storage. Every
loss and every value of the last checkpoint are compared with those of a run on one node
that was not interrupted.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import sys
import time
from pathlib import Path

from ckptd.shared.location import Location, located
from examples.nodes import NodesRun, refusal
from examples.runs import (
    RECOVERED,
    Act,
    DemoFailed,
    Run,
    check_checkpoints,
    check_losses,
    print_table,
    say,
    wipe,
)

STEPS, ARGUMENTS = 24, "--every 4 --batch 2 --context 96 --layers 3 --width 256"


def on_two_nodes(out: Path, name: str, root: Location | None = None) -> NodesRun:
    return NodesRun(out, name, 2, STEPS, ARGUMENTS, root=root)


def third_act(reference: Run, interrupted: NodesRun, chance: random.Random, seconds: float) -> None:
    """Train on two nodes, lose the second one, go on with an empty one, and compare.

    `seconds`: how long a step takes.
    """
    interrupted.start_nodes()
    say("Now on two nodes, each with a daemon of its own, and one root. One node will be lost.")
    interrupted.start()
    interrupted.wait_for(chance.randrange(STEPS // 2, STEPS - 3))
    time.sleep(chance.uniform(0.1, 0.9) * seconds)
    before, known = (
        len(RECOVERED.findall(interrupted.printed())),
        interrupted.nodes[0].last_durable(),
    )
    at = interrupted.lose(1)
    interrupted.end_ranks()
    say(
        f"Killed everything on node1 in the middle of step {at}; its memory and its disk are "
        f"gone. An empty node takes its place."
    )
    interrupted.nodes[1].start()
    interrupted.start()
    interrupted.wait_until(
        lambda: len(RECOVERED.findall(interrupted.printed())) >= before + 2,
        "both ranks had recovered",
    )
    found = RECOVERED.findall(interrupted.printed())[before:]
    if len({each[:3] for each in found}) != 1:
        raise DemoFailed(f"the ranks have recovered different things: {found}")
    step, attempt, source, took = found[0]
    act = Act(
        killed="node 1 of 2",
        at=at,
        step=int(step),
        attempt=int(attempt),
        source=source,
        seconds=float(took),
    )
    say(
        f"Both ranks have recovered step {act.step} of attempt {act.attempt} from {act.source} in "
        f"{act.seconds:.2f} s."
    )
    if act.source != "storage" or act.step < known["step"]:
        raise DemoFailed(f"{known} was durable before")
    interrupted.wait_for_end()
    say("It has come to its end. Comparing.")
    print_table([act.row()])
    computed = check_losses(reference, interrupted)
    print(
        f"{computed} losses computed for {reference.steps} steps: 0 differ from the reference, "
        f"which was on one node."
    )
    print(
        f"{check_checkpoints(reference, interrupted)} tensors and values in the last checkpoint: "
        f"0 differ."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on two nodes, lose one of them, and compare with a run that was not "
        "interrupted."
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument(
        "--root",
        help="a directory or a URL for the run on two nodes; default: a directory in --out",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10_000),
        help="of the moment of the loss; default: by chance",
    )
    args = parser.parse_args()
    if why := refusal():
        sys.exit(f"two nodes cannot be shown: {why}")
    out = Path(os.path.abspath(args.out))
    place = located(os.path.expanduser(args.root)) if args.root else None
    reference, interrupted = (
        Run(out, "nodes-reference", STEPS, ARGUMENTS, ranks=2),
        on_two_nodes(out, "nodes-interrupted", place),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(f"The loss is at a random moment; the same again with --seed {args.seed}.")
    try:
        wipe(out, reference)
        say(f"Training {STEPS} steps on one node without interruption, as the reference.")
        reference.start()
        reference.wait_for_end()
        third_act(reference, interrupted, random.Random(args.seed), 0.3)
    except DemoFailed as failure:
        sys.exit(f"FAILED: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        reference.end()
        interrupted.end()
    say("Everything came back as it was.")


if __name__ == "__main__":
    main()
