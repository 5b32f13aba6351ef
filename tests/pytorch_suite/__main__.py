"""Runs PyTorch's own checkpoint tests with ckptd's reader and writer instead of
PyTorch's.

`python -m tests.pytorch_suite DIR [FILE...] [--only EXPRESSION] [--store]`. DIR is
`test/distributed/checkpoint` in a checkout of PyTorch, of the installed version. Its
files are copied to a temporary directory, moved to the CPU where they ask for GPUs, and
run by pytest. They need `expecttest` and the other packages of PyTorch's tests. With
`--store`, every path that a test saves to becomes a prefix in a bucket of SeaweedFS.
The exit code is 1 if a test fails that is not in `EXCLUDED`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.support import stores

HERE = Path(__file__).parent
FILES = (
    "test_file_system_checkpoint_cpu.py", "test_save_load_api.py", "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py", "test_tp_checkpoint.py", "test_compatibility.py",
    "e2e/test_e2e_save_and_load.py", "e2e/test_fine_tuning.py", "e2e/test_pipeline.py",
)  # fmt: skip
EXCLUDED: dict[str, str] = {
    "zoc_True": "DCP's DefaultStager copies without blocking, for which it wants an accelerator",
    "test_dtype_mismatch_casting": "it is newer than torch 2.13, whose DefaultLoadPlanner has no "
    "allow_unsafe_types",
}
"""Names of tests that are not run, each with the reason."""
EXCLUDED_IN_STORE = {
    "test_storage_meta": "it compares the id of a checkpoint with its path, which stands for a URL "
    "here"
}
ON_CPU = (
    (r"\.cuda\((?:[^()]|\([^()]*\))*\)", ""),
    (r"@skip_if_lt_x_gpu\(\d+\)", ""),
    (r"torch\.cuda\.device_count\(\)", "4"),
    (r"cpu:gloo,(cuda:nccl|\{[^}]*\}:\{[^}]*\})", "gloo"),
    (r'(f?)"gloo"', '"gloo"'),
    (r"([\"'])cuda(:0)?\1", r"\1cpu\1"),
)


def on_cpu(text: str) -> str:
    for pattern, by in ON_CPU:
        text = re.sub(pattern, by, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", default=FILES)
    parser.add_argument("--only", default="", help="of their tests, as pytest's -k says it")
    parser.add_argument("--store", action="store_true", help="save to an object store")
    options = parser.parse_args()
    with ExitStack() as held:
        place = held.enter_context(tempfile.TemporaryDirectory(prefix="ckptd-pytorch-suite-"))
        for name in options.names:
            copy = Path(place) / Path(name).name
            copy.write_text(on_cpu((options.directory / name).read_text()))
        variables = {
            **os.environ,
            "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if options.store:
            servers = held.enter_context(
                stores.Servers(Path(held.enter_context(tempfile.TemporaryDirectory())))
            )
            variables |= {**servers.get("seaweed").environ, "SUITE_ROOT": "s3://bucket/suite"}
        excluded = EXCLUDED | (EXCLUDED_IN_STORE if options.store else {})
        chosen = " and ".join(
            [
                *(f"not {name}" for name in excluded),
                *([f"({options.only})"] if options.only else []),
            ]
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-rs",
            "-c",
            os.devnull,
            place,
        ]
        code = subprocess.run(
            [*command, "-k", chosen], env=variables, cwd=place, check=False
        ).returncode
    for name, why in excluded.items():
        print(f"not run: {name}: {why}")
    sys.exit(code)


if __name__ == "__main__":
    main()
