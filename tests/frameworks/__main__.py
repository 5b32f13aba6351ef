"""Runs the tests and the example of each framework with kills, each in a new virtual
environment, because their pins conflict.

`python -m tests.frameworks [NAME...] [--kills 5]`. Needs only Python and pip. An
environment takes up to 4 GB under TMPDIR, and is removed after its run. Exit code 1 unless
all tests have passed and no loss differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Framework:
    """An environment: what is installed, the tests, and the examples that are killed."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    examples: tuple[str, ...]


FRAMEWORKS = {
    "plain": Framework((), ("tests/agent/test_training_run.py",), ("plain",)),
    "transformers": Framework(
        ("transformers==5.24.0", "accelerate==1.15.0", "trl==1.16.0", "peft==0.21.2"),
        ("tests/agent/integrations/test_transformers.py",),
        ("transformers_trainer",),
    ),
    "accelerate": Framework(
        ("accelerate==1.15.0",),
        ("tests/agent/integrations/test_accelerate.py",),
        ("accelerate_loop",),
    ),
    "lightning": Framework(
        ("lightning==2.6.6", "pytorch-lightning==2.6.6", "torchdata==0.11.0"),
        ("tests/agent/integrations/test_lightning.py",),
        ("train_lightning",),
    ),
    "deepspeed": Framework(
        ("deepspeed==0.19.8",),
        ("tests/agent/integrations/test_deepspeed.py",),
        ("train_deepspeed",),
    ),
    "torchtitan": Framework(
        # Its Trainer imports triton on the CPU, too.
        ("torchtitan==0.3.0", "triton"),
        ("tests/agent/integrations/test_torchtitan.py",),
        ("train_torchtitan",),
    ),
    "torch_checkpointing": Framework(
        ("torch_checkpointing==0.1.1",),
        ("tests/agent/integrations/test_torch_checkpointing.py",),
        ("train_torch_checkpointing",),
    ),
    "ray": Framework(
        ("ray[train]==2.60.0",), ("tests/agent/integrations/test_ray.py",), ("train_ray",)
    ),
}


def run(name: str, framework: Framework, kills: int) -> str:
    """Test one framework. Return the problem, or "" if there is none."""
    with tempfile.TemporaryDirectory(prefix="ckptd-frameworks-") as place:
        python, packages = f"{place}/venv/bin/python", (f"{ROOT}[torch,dev]", *framework.packages)
        commands = (
            [sys.executable, "-m", "venv", f"{place}/venv"],
            [python, "-m", "pip", "install", "--quiet", "--editable", *packages],
            [python, "-m", "pytest", "-q", *framework.tests],
            [python, "-m", "tests.frameworks.kills", *framework.examples, f"--kills={kills}"],
        )
        for command in commands:
            print("+", *command, flush=True)
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                return f"{name}: {' '.join(command[1:])} has failed"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(FRAMEWORKS))
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - FRAMEWORKS.keys()):
        parser.error(f"there is no framework {unknown[0]!r}: choose from {', '.join(FRAMEWORKS)}")
    problems = [run(name, FRAMEWORKS[name], options.kills) for name in options.names]
    print("\n".join(filter(None, problems)) or "all tests have passed, and no loss differs")
    sys.exit(1 if any(problems) else 0)


if __name__ == "__main__":
    main()
