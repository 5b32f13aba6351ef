"""Runs `ckptd bench` as a user does, with a small state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptd.agent.bench.budget import CHECKSUMS, LIMITS, REST, STEPS, WHOLE, Budgeted, Cost
from ckptd.agent.bench.command import bench, text_of
from ckptd.agent.bench.measure import Figures, Report
from ckptd.daemon.commands.cli import main
from tests.support.commands import forked

WAYS = ["ckptd", "torch.save", "dcp.save", "dcp.async_save", "limit: plain copy"]


@pytest.mark.usefixtures("processes")
def test_the_report_has_every_way_and_nothing_is_left(tmp_path: Path) -> None:
    size = ("--megabytes", 13, "--rounds", 1)
    raw = {"CKPTD_CODEC": "raw"}
    done = forked("bench", "--root", tmp_path, *size, "--json", environment=raw)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [name for name in report["saves"] if name != "limit: O_DIRECT write"] == WAYS
    assert all(found["held"] > 0 and found["durable"] > 0 for found in report["saves"].values())
    nbytes = report["nbytes"]
    assert 12e6 < nbytes < 14e6
    assert nbytes < report["saves"]["ckptd"]["stored"] < 1.05 * nbytes, (
        "CKPTD_CODEC=raw sets up the daemon"
    )
    assert nbytes <= report["saves"]["dcp.save"]["stored"] < 1.05 * nbytes
    assert report["restores"].keys() == {
        "ckptd recover, from memory",
        "ckptd StorageReader",
        "dcp.load",
    }
    assert report["first"] > 0
    assert report["step"] > 0
    assert report["daemon_peak"] > 10e6
    assert report["budget"].keys() == {*STEPS, REST, WHOLE, CHECKSUMS}
    for name, found in report["budget"].items():
        assert sum(found["cost"].values()) > 0, name
        assert (found["limit"] is not None) == (name in LIMITS), name
    assert list(tmp_path.iterdir()) == []


def test_a_root_without_room_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(bench, ["--root", str(tmp_path), "--megabytes", str(10**9)])
    assert found.exit_code == 2
    assert "are needed for a state of" in found.output
    assert "choose a smaller --megabytes or another --root" in found.output


def test_the_table() -> None:
    report = Report(
        machine={"ckptd": "1", "torch": "2", "cpus": 2, "load": 0.5, "accelerator": "H100"},
        nbytes=1000, tensors=3, rounds=5, saves={"ckptd": Figures(0.1, 0.5, 800),
        "torch.save": Figures(2.0, 2.0, 1000), "limit: "
            "plain "
            "copy": Figures(0.2, 0.2, None)},
        restores={"dcp.load": 0.25}, first=0.3, lost=0.4, step=0.6, daemon_peak=123_000_000,
        budget={
            "copy and checksums": Budgeted(Cost(1e-4, 2e-7, 60e-6), Cost(5e-6, 4e-7, 75e-6)),
            "the whole call": Budgeted(Cost(2e-3, 1e-6, 61e-6), None),
        },
    )  # fmt: skip
    assert text_of(report).splitlines() == [
        "ckptd 1, torch 2, 2 CPUs, load 0.5",
        "1.0 kB of fp32 weights and moments in 3 tensors on H100; medians of 5",
        "",
        "saving                      training held   then durable   stored",
        "ckptd                             0.100 s        0.500 s      80%",
        "torch.save                        2.000 s                    100%",
        "limit: plain copy                 0.200 s                        ",
        "",
        "first snapshot after prepare        0.300 s",
        "training time lost by a snapshot    0.400 s, the call included; a step takes 0.600 s",
        "memory of the daemon, most          123.0 MB",
        "",
        "dcp.load                            0.250 s",
        "",
        "a snapshot, in µs for each    call  tensor      MB  at least: call  tensor      MB",
        "copy and checksums             100   0.200   60.00               5   0.400   75.00  "
        "plain copy by torch",
        "the whole call                2000   1.000   61.00",
    ]


# -- the command line, which does not import this package


@pytest.mark.usefixtures("processes")
def test_the_help_of_the_command_line_names_the_verb_and_loads_no_torch() -> None:
    code = (
        "import sys\nfrom ckptd.daemon.commands.cli import main\nmain(['--help'], "
        "standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\n  bench +Measure ckptd and its peers on this machine\.\n", done.stdout)


def test_the_verb_has_its_own_help() -> None:
    found = CliRunner().invoke(main, ["bench", "--help"])
    assert found.exit_code == 0
    assert "--megabytes" in found.output


@pytest.mark.usefixtures("processes")
def test_the_verb_without_torch_says_how_to_install_it() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom ckptd.daemon.commands.cli import "
        "main\nmain(['bench', '--root', '/x'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "Error: ckptd.agent needs torch 2.8 or newer, and there is none: install it with pip "
        "install 'torch>=2.8'\n"
    )


def test_a_verb_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.daemon.commands.cli.entry_points", lambda **_: [])
    found = CliRunner().invoke(main, ["bench", "--root", "/x"])
    assert (found.exit_code, found.output) == (
        1,
        "Error: this installation of ckptd has no verb bench: install it again\n",
    )
