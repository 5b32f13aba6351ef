"""Shows that a job on three nodes loses no step that two nodes had in memory, when a node
dies: `python -m examples.lose_a_node`, which is also the fourth act of the demo.

One rank of elastic.py trains on each node (nodes.py). It takes a snapshot of every step
to memory, and with `replicas = 1` each node also holds a copy of another node's part.
Nothing goes to storage before the end. At a random moment everything on one node is
killed, and its memory is gone. An empty node takes its place, torchrun starts the ranks
again, and they must continue after a step that is no older than the last one that was
copied. Node 0 is never killed, because torchrun's store is there. Every loss and every
value of the last checkpoint are compared with those of a run that was not interrupted.
"""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path

from examples.nodes import ElasticRun, refusal
from examples.runs import DemoFailed, Run, compare, judged, parser, running, say, train_alone

NODES, STEPS, WAIT_EVERY = 3, 32, 4
TRAINER = Path(__file__).with_name("elastic.py")
COPIED = re.compile(r"step (\d+) is in the memory of two nodes")
ENVIRON = {"CKPTD_REPLICAS": "1"}
BACK = re.compile(r"rank (\d+) of \d+ on (\S+): (step (\d+) came back.*)")


def runs(out: Path) -> tuple[Run, ElasticRun]:
    """Return the reference, which is not interrupted and makes no copies, and the run on
    three nodes.
    """
    alone = Run(
        out,
        "elastic-reference",
        STEPS,
        f"--persist-every {STEPS} --wait-every 0",
        ranks=NODES,
        trainer=TRAINER,
    )
    on_nodes = ElasticRun(
        out,
        "elastic-on-nodes",
        NODES,
        STEPS,
        f"--persist-every {STEPS} --wait-every {WAIT_EVERY}",
        trainer=TRAINER,
        environ=ENVIRON,
    )
    return alone, on_nodes


def last_copied(run: Run) -> int:
    """Return the last step that the training has reported as copied."""
    return max((int(step) for step in COPIED.findall(run.printed())), default=0)


def lose_a_node(reference: Run, run: ElasticRun, chance: random.Random) -> None:
    """Train on three nodes, lose one of them, though not node 0, and compare."""
    train_alone(reference)
    say(f"Training the same on {NODES} nodes. Snapshots stay in memory, each on two nodes.")
    run.start_nodes()
    run.start()
    wanted = chance.randrange(STEPS // 4, STEPS // 2)
    run.wait_until(lambda: last_copied(run) >= wanted, f"a copy of step {wanted}")
    time.sleep(chance.uniform(0, 0.2))
    lost = chance.randrange(1, NODES)
    at = run.lose(lost)
    copied = last_copied(run)
    say(
        f"Killed everything on node{lost} in the middle of step {at}. Its memory is gone. Step "
        f"{copied} had been copied, and nothing was in storage. An empty node takes its place."
    )
    run.nodes[lost].start()
    run.join(lost)
    run.wait_until(lambda: len(BACK.findall(run.printed())) >= NODES, "all ranks had recovered")
    found = sorted(BACK.findall(run.printed()))
    steps = {int(step) for *_, step in found}
    if len(steps) != 1 or min(steps) < copied:
        raise DemoFailed(f"step {copied} had been copied, and {found} came back")
    (step,) = steps
    say(f"The other nodes have saved step {step}, with their copy of the part of node{lost}.")
    for rank, node, said, _ in found:
        say(f"Rank {rank} on {node}: {said}.")
    run.wait_for_end()
    say(
        f"No step that had been copied was lost. Newer steps that were computed again: "
        f"{at - 1 - step}."
    )
    compare(reference, run)


def main() -> None:
    options = parser(
        "Train on three nodes, lose one with its memory, and compare with a run that was not "
        "interrupted."
    )
    args = options.parse_args()
    if why := refusal():
        sys.exit(f"nodes cannot be simulated on this machine: {why}")
    reference, on_nodes = runs(args.out)
    say(f"The loss is at a random moment; the same again with --seed {args.seed}.")
    with judged(), running(args.out, reference, on_nodes):
        lose_a_node(reference, on_nodes, random.Random(args.seed))


if __name__ == "__main__":
    main()
