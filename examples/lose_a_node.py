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

import argparse
import os
import random
import re
import secrets
import signal
import sys
import time
from pathlib import Path

from examples.nodes import ElasticRun, refusal
from examples.runs import DemoFailed, Run, check_checkpoints, check_losses, say, wipe

NODES, STEPS, WAIT_EVERY = 3, 60, 5
TRAINER = Path(__file__).with_name("elastic.py")
COPIED = re.compile(r"step (\d+) is in the memory of two nodes")
ENVIRON = {
    "CKPTD_REPLICAS": "1",
    # A new node cannot join while torchrun shares its store with the ranks.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
BACK = re.compile(r"rank (\d+) of \d+ on (\S+): (step (\d+) came back from .*)")


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


def act(reference: Run, run: ElasticRun, chance: random.Random) -> None:
    """Train on three nodes, lose one of them, though not node 0, and compare."""
    say(f"Training {STEPS} steps on one node without interruption, as the reference.")
    reference.start()
    reference.wait_for_end()
    say(f"Now on {NODES} nodes. Snapshots stay in memory, each on two nodes.")
    run.start_nodes()
    run.start()
    wanted = chance.randrange(STEPS // 3, STEPS // 2)
    run.wait_until(lambda: last_copied(run) >= wanted, f"a copy of step {wanted}")
    time.sleep(chance.uniform(0, 0.2))
    lost = chance.randrange(1, NODES)
    at = run.lose(lost)
    copied = last_copied(run)
    say(
        f"Killed everything on node{lost} in the middle of step {at}; its memory is gone. Step "
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
        f"The training has ended. No step that had been copied was lost. Newer steps that were "
        f"computed again: {at - 1 - step}."
    )
    computed = check_losses(reference, run)
    print(f"{computed} losses computed for {STEPS} steps: 0 differ from the reference.")
    count = check_checkpoints(reference, run)
    print(f"{count} tensors and values in the last checkpoint: 0 differ.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on three nodes, lose one with its memory, and compare with a run that "
        "was not interrupted."
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10_000),
        help="seed of the choice of the node and of the moment; default: random",
    )
    args = parser.parse_args()
    if why := refusal():
        sys.exit(f"nodes cannot be simulated on this machine: {why}")
    reference, on_nodes = runs(Path(os.path.abspath(args.out)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(f"The loss is at a random moment; the same again with --seed {args.seed}.")
    try:
        wipe(Path(os.path.abspath(args.out)), reference, on_nodes)
        act(reference, on_nodes, random.Random(args.seed))
    except DemoFailed as failure:
        sys.exit(f"FAILED: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        reference.end()
        on_nodes.end()
    say("Everything came back as it was.")


if __name__ == "__main__":
    main()
