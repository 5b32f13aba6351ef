"""Shows that a job on two nodes loses nothing when a node dies: `python -m
examples.two_nodes`, which is also the third act of the demo.

One rank trains on each node (nodes.py), started by torchrun as on two machines. In the
middle of a step everything on the second node is killed, and its memory and its disk
are gone. An empty node takes its place, and the job must continue from storage. Every
loss and every value of the last checkpoint are compared with those of a run on one node
that was not interrupted.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from pathlib import Path

from ckptd.shared.location import Location, located
from examples.nodes import NodesRun, refusal
from examples.runs import Run, compare, judged, parser, running, say, train_alone

UNDELIVERED = re.compile(r"step-0*(\d+)\S*: rank 1 did not deliver")
STEPS, ARGUMENTS = 24, "--every 4 --batch 2 --context 64 --layers 2 --width 256"


def on_one_node(out: Path, name: str, restarts: int = 0) -> Run:
    return Run(out, name, STEPS, ARGUMENTS, ranks=2, restarts=restarts)


def on_two_nodes(out: Path, name: str, root: Location | None = None) -> NodesRun:
    return NodesRun(out, name, 2, STEPS, ARGUMENTS, root=root)


def lose_second_node(reference: Run, interrupted: NodesRun, chance: random.Random) -> None:
    """Train on two nodes, lose the second one, go on with an empty one, and compare."""
    train_alone(reference)
    interrupted.start_nodes()
    first, second = interrupted.nodes
    say("Training the same on two nodes, each with a daemon of its own, and one root.")
    interrupted.start()
    interrupted.wait_for(chance.randrange(STEPS // 3, STEPS * 2 // 3))
    interrupted.wait_until(lambda: first.last_durable() > 0, "a checkpoint was in storage")
    time.sleep(chance.uniform(0, 0.1))
    known = first.last_durable()
    at = interrupted.lose(1)
    interrupted.end_ranks()
    say(
        f"Killed everything on node1 in the middle of step {at}. Its memory and its disk are gone. "
        f"An empty node takes its place."
    )
    second.start()
    interrupted.start()
    kill = interrupted.recovery("node 1 of 2", at, "storage", known)
    if partial := UNDELIVERED.search(interrupted.printed()):
        say(
            f"Step {partial[1]} is lost: node1 had not saved its part of it yet. The recovery has "
            f"waited in vain for that part."
        )
    compare(reference, interrupted, kill)


def main() -> None:
    options = parser(
        "Train on two nodes, lose one of them, and compare with a run that was not interrupted."
    )
    options.add_argument(
        "--root",
        help="a directory or a URL for the run on two nodes; default: a directory in --out",
    )
    args = options.parse_args()
    if why := refusal():
        sys.exit(f"two nodes cannot be shown: {why}")
    place = located(os.path.expanduser(args.root)) if args.root else None
    reference, interrupted = (
        on_one_node(args.out, "nodes-reference"),
        on_two_nodes(args.out, "nodes-interrupted", place),
    )
    say(f"The loss is at a random moment; the same again with --seed {args.seed}.")
    with judged(), running(args.out, reference, interrupted):
        lose_second_node(reference, interrupted, random.Random(args.seed))


if __name__ == "__main__":
    main()
