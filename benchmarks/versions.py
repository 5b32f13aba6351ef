"""Measures this version beside another one, in turn: what a snapshot holds, and how
long a recovery takes, for a model and its optimizer.

`python -m benchmarks.versions --other /path/to/python [--rounds N]`, where
`/path/to/python` belongs to an environment that has the other version. Each round runs
both versions one after the other in processes of their own, with private daemons and
roots of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from statistics import median

from benchmarks.rows import Row, keep, settled

_RUN = """
import json, os, statistics, sys, time
import torch
from ckptd.agent import Agent
torch.manual_seed(0)
layers, width, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.randn_like(parameter)
optimizer.step()
state = {"model": model, "optim": optimizer}
agent = Agent("job", root=root)
agent.prepare(state)
time.sleep(1)
held = []
for step in range(25):
    begun = time.perf_counter()
    pending = agent.snapshot(state, step=step)
    held.append(time.perf_counter() - begun)
    pending.wait("durable")
recovered = []
for _ in range(5):
    begun = time.perf_counter()
    assert agent.recover(state).step == 24
    recovered.append(time.perf_counter() - begun)
agent.close()
print(json.dumps({"held": statistics.median(held[5:]), "recover": statistics.median(recovered)}))
"""
_STATES = {"4,000 parameters of 8 x 8": (2000, 8), "100 parameters of 1,024 x 1,024": (50, 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--other", required=True, help="the Python of an environment that has the other version"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    times = defaultdict[tuple[str, str, str], list[float]](list)
    for number in range(options.rounds):
        versions = [("this", sys.executable), ("other", options.other)]
        for version, python in versions if number % 2 else reversed(versions):
            for name, (layers, width) in _STATES.items():
                settled()
                with tempfile.TemporaryDirectory() as root:
                    run = [python, "-W", "ignore", "-c", _RUN, str(layers), str(width), root]
                    said = subprocess.run(
                        run, check=True, capture_output=True, text=True, cwd=root
                    ).stdout
                for what, seconds in json.loads(said.splitlines()[-1]).items():
                    times[name, what, version].append(seconds)
    rows = []
    for name in _STATES:
        for what in ("held", "recover"):
            this, other = (median(times[name, what, version]) for version in ("this", "other"))
            rows.append(
                Row(name=f"{name}: {what}", value=this, unit="s", beside={"other version": other})
            )
    keep(rows, "versions")


if __name__ == "__main__":
    main()
