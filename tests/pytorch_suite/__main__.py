"""Runs PyTorch's own checkpoint tests with ckptd's reader and writer instead of
PyTorch's, and compares the outcomes.

`python -m tests.pytorch_suite DIR [FILE...] [--only EXPRESSION] [--ways WAY,...]`. DIR
is `test/distributed/checkpoint` in a checkout of PyTorch of any version. Its files are
copied to a temporary directory, moved to the CPU where they ask for GPUs, and run by
pytest once for each way of `WAYS`. The tests need `expecttest`. The exit code is 1 if a
test passes with PyTorch's classes and fails with ckptd's, unless `DIFFERENCES` names
it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.etree import ElementTree

from tests.support import daemons, stores

HERE = Path(__file__).parent
FILES = (
    "test_file_system_checkpoint_cpu.py", "test_file_system_checkpoint.py", "test_save_load_api.py",
    "test_dtensor_checkpoint.py", "test_dtensor_resharding.py", "test_tp_checkpoint.py",
    "test_fsdp_model_state.py", "test_fsdp_optim_state.py", "test_fsdp_tp_checkpoint_conversion.py",
    "test_hsdp_checkpoint.py", "test_format_utils.py", "test_planner.py", "test_compatibility.py",
    "e2e/test_e2e_save_and_load.py", "e2e/test_fine_tuning.py", "e2e/test_pipeline.py",
)  # fmt: skip
"""The files whose tests save with DCP's `FileSystemWriter`. A version of PyTorch that
lacks one of them is tested without it.
"""
WAYS = {
    "stock": "PyTorch's reader and writer",
    "alone": "ckptd's, without a daemon",
    "daemon": "ckptd's, below the root of a daemon",
    "store": "ckptd's; every path stands for a prefix in a bucket of SeaweedFS",
}
DIFFERENCES: dict[tuple[str, str], str] = {
    (
        "store",
        "test_storage_meta",
    ): "it compares the id of a checkpoint with its path, which stands for a URL here",
}
"""Tests that pass with PyTorch's classes and not in one way, by the way and the name,
each with the reason.
"""
OPTIONS = (
    "-p",
    "no:cacheprovider",
    "-p",
    "no:asyncio",
    "--disable-warnings",
    "--tb=short",
    "-rs",
    "-c",
    os.devnull,
)
ENVIRONMENT = {
    "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # Seconds; torch.compile takes minutes on a busy machine.
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "900",
}
ON_CPU = (
    (r"\.cuda\((?:[^()]|\([^()]*\))*\)", ""),
    (r"\.to\((self\.rank|dist\.get_rank\(\))\)", ""),
    (r"device=(self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
    (r"@skip_if_lt_x_gpu\([^()]*\)", ""),
    (r"@requires_(nccl|accelerator_dist_backend)\([^()]*\)", ""),
    (r"torch\.(cuda|accelerator)\.device_count\(\)", "4"),
    (r"cpu:gloo,(cuda:nccl|\{[^}]*\}:\{[^}]*\})", "gloo"),
    (r'(f?)"gloo"', '"gloo"'),
    (r"with_comms\(init_rpc=False\)", 'with_comms(init_rpc=False, backend="gloo")'),
    (r"(rank:\d)/(cuda|\{device_type\}):\d", r"\1/cpu"),
    (r"([\"'])cuda(:0)?\1", r"\1cpu\1"),
)


def on_cpu(text: str) -> str:
    for pattern, by in ON_CPU:
        text = re.sub(pattern, by, text)
    return text


@contextmanager
def prepared(way: str) -> Iterator[dict[str, str]]:
    """Yield the variables of the tests for one way, while the daemon or the store that
    it needs is running.
    """
    with ExitStack() as held:
        if way == "daemon":
            home = held.enter_context(daemons.home())
            held.enter_context(daemons.running(home))
            job = home.root / "suite"
            job.mkdir(parents=True, exist_ok=True)
            # A temporary directory of a test is `<root>/<job>/<tag>`.
            yield {"CKPTD_SOCKET": str(home.socket), "TMPDIR": str(job)}
            print(
                f"the daemon holds {len(list(job.glob('*.a[0-9]*')))} checkpoints of these tests",
                flush=True,
            )
        elif way == "store":
            servers = held.enter_context(
                stores.Servers(Path(held.enter_context(tempfile.TemporaryDirectory())))
            )
            yield {**servers.get("seaweed").environ, "SUITE_ROOT": "s3://bucket/suite"}
        else:
            yield {"SUITE_STOCK": "1"} if way == "stock" else {}


def outcomes(way: str, place: str, only: str, without: Sequence[str]) -> dict[str, str]:
    """Run the tests in `place` in one way, except `without`.

    Return for each test "passed", "skipped" or "failed".
    """
    with tempfile.TemporaryDirectory() as scratch, prepared(way) as variables:
        report = Path(scratch) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            *OPTIONS,
            f"--rootdir={place}",
            f"--junitxml={report}",
            place,
        ]
        command += [f"--deselect={test}" for test in without] + (["-k", only] if only else [])
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "TORCHINDUCTOR_CACHE_DIR": f"{place}/compiled",
            **variables,
        }
        subprocess.run(command, env=environment, cwd=place, check=False)
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = (
                "failed"
                if kinds & {"failure", "error"}
                else "skipped"
                if "skipped" in kinds
                else "passed"
            )
            file, _, name = str(case.get("classname")).rpartition(".")
            found[f"{file}.py::{name}::{case.get('name')}"] = outcome
        return found


def differences(stock: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the tests that pass with PyTorch's classes and do not pass in the other
    way.
    """
    return sorted(
        test
        for test, outcome in stock.items()
        if outcome == "passed" and other.get(test) != "passed"
    )


def reason(way: str, test: str) -> str | None:
    return next(
        (why for (of, name), why in DIFFERENCES.items() if of == way and name in test), None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", default=FILES)
    parser.add_argument("--only", default="", help="of their tests, as pytest's -k says it")
    parser.add_argument(
        "--ways",
        default="stock,alone,daemon",
        help=f"of {', '.join(WAYS)}, with a comma between two",
    )
    options = parser.parse_args()
    asked = set(options.ways.split(","))
    ways = [way for way in WAYS if way in asked]
    if unknown := asked - set(WAYS):
        parser.error(
            f"--ways names {', '.join(sorted(unknown))}; expected some of {', '.join(WAYS)}"
        )
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="ckptd-pytorch-suite-") as place:
        for name in options.names:
            if (options.directory / name).exists():
                (Path(place) / Path(name).name).write_text(
                    on_cpu((options.directory / name).read_text())
                )
            else:
                print(f"not there: {options.directory / name}")
        for way in ways:
            print(f"{way}: {WAYS[way]}", flush=True)
            failed = [
                test for test, outcome in found.get("stock", {}).items() if outcome != "passed"
            ]
            found[way] = outcomes(way, place, options.only, failed)
    if "passed" not in found[ways[0]].values():
        sys.exit(
            f"no test passes in the way {ways[0]!r}: the tests may need another version of torch"
        )
    unexplained = 0
    for way in ways:
        counts = Counter(found[way].values())
        print(
            f"{way}: "
            + ", ".join(
                f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")
            )
        )
    for way in ways[1:] if "stock" in found else []:
        for test in differences(found["stock"], found[way]):
            why = reason(way, test)
            unexplained += why is None
            print(
                f"{way} differs from stock: {test} {found[way].get(test, 'missing')}: "
                f"{why or 'NOT EXPLAINED'}"
            )
    sys.exit(unexplained > 0)


if __name__ == "__main__":
    main()
