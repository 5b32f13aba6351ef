"""Tests the examples as a newcomer runs them, on a tiny model.

A killed and restarted run must equal an uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.shared import names
from ckptd.shared.location import located
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from tests.support import stores
from tests.support.daemons import until

pytestmark = pytest.mark.usefixtures("processes")

TRAINER = Path(__file__).parents[1] / "examples" / "train_gpt.py"
TINY = [
    "--layers",
    "1",
    "--width",
    "64",
    "--context",
    "32",
    "--batch",
    "2",
    "--steps",
    "12",
    "--every",
    "4",
]


def environment(home: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    return {
        **clean,
        "XDG_RUNTIME_DIR": str(home),
        "CKPTD_IDLE_TIMEOUT": "1",
        "CKPTD_STALL_BUDGET": "60",  # on a busy machine a step would be skipped
        "OMP_NUM_THREADS": "1",
    }


def command(home: Path) -> list[str]:
    return [
        sys.executable,
        str(TRAINER),
        *TINY,
        "--root",
        str(home / "root"),
        "--losses",
        str(home / "losses.json"),
    ]


def test_a_killed_run_gives_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for home in (whole, killed):
        home.mkdir()
    subprocess.run(
        command(whole), env=environment(whole), check=True, timeout=200, capture_output=True
    )
    with subprocess.Popen(
        command(killed),
        env=environment(killed),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        said: list[str] = []
        while not said or not said[-1].startswith("step 8/12"):
            said.append(trainer.stdout.readline())
            assert said[-1], f"it has ended: {said}"
        trainer.send_signal(signal.SIGKILL)
    again = subprocess.run(
        command(killed),
        env=environment(killed),
        check=True,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert (
        "recovered step 8 of attempt 1 from memory" in again.stdout
        or "recovered step 12" in again.stdout
    )
    assert json.loads((killed / "losses.json").read_text()) == json.loads(
        (whole / "losses.json").read_text()
    )


def test_a_run_in_an_object_store_outlives_its_node(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The trainer and its daemon are killed, and shared memory and the local disk are
    lost with them: only the bucket is left.
    """
    whole = tmp_path / "whole"
    whole.mkdir()
    subprocess.run(
        command(whole), env=environment(whole), check=True, timeout=200, capture_output=True
    )
    with stores.Servers(tmp_path_factory.mktemp("stores")) as servers:
        server = servers.get("seaweed")
        environ = environment(tmp_path) | server.environ
        root, lost, new = (
            f"s3://bucket/{names.new_nonce().hex()}",
            tmp_path / "lost",
            tmp_path / "new",
        )
        again = [*command(tmp_path)[:-4], "--root", root, "--losses", str(tmp_path / "losses.json")]
        with subprocess.Popen(
            again,
            # The daemon outlives a trainer that is faster than this test.
            env=environ | {"CKPTD_STATE_DIR": str(lost), "CKPTD_IDLE_TIMEOUT": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as trainer:
            assert trainer.stdout is not None
            while not (line := trainer.stdout.readline()).startswith("step 8/12"):
                assert line
            with stores.in_environment(server):
                repository = open_root(located(root))
                until(
                    lambda: (repository.read_newest("train_gpt") or "") >= "step-00000008",
                    "step 8 in the bucket",
                )
            for row in json.loads(ckptd(environ, "ps", "--json")):
                if row["root"] == root:
                    os.kill(row["pid"], signal.SIGKILL)
                    break
            else:
                pytest.fail("`ckptd ps` does not show the daemon")
            trainer.kill()
        for path in (lost, Path("/dev/shm") / machine.segment_directory(located(root))):
            # The daemon of a run that has ended leaves no memory behind.
            shutil.rmtree(path, ignore_errors=True)
        done = subprocess.run(
            again,
            env=environ | {"CKPTD_STATE_DIR": str(new)},
            check=True,
            timeout=200,
            capture_output=True,
            text=True,
        )
    assert re.search("recovered step (8|12) of attempt 1 from storage", done.stdout), done.stdout
    assert json.loads((tmp_path / "losses.json").read_text()) == json.loads(
        (whole / "losses.json").read_text()
    )


def ckptd(environ: dict[str, str], *arguments: str) -> bytes:
    return subprocess.run(
        [sys.executable, "-m", "ckptd.daemon", *arguments],
        env=environ,
        capture_output=True,
        check=False,
    ).stdout


@pytest.mark.parametrize("where", ["directory", "daemon"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_planners_example_runs_on_one_and_two_ranks(
    where: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    torchrun = (
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
        if ranks > 1
        else [sys.executable, "-m"]
    )
    base, variables = tmp_path, environment(tmp_path)
    if where == "daemon":
        home = request.getfixturevalue("daemon").home
        base, variables["CKPTD_SOCKET"] = home.root / "job", str(home.socket)
    command = [*torchrun, "examples.planners", str(base)]
    place = TRAINER.parents[1]
    result = subprocess.run(
        command, env=variables, timeout=200, capture_output=True, text=True, check=False, cwd=place
    )
    assert result.returncode == 0, result.stderr
    # torch 2.8 prints lines of its own, and those of two ranks may run together
    lines = [
        line
        for line in result.stdout.splitlines()
        if "[Gloo]" not in line and "connected peer ranks" not in line
    ]
    said = [line.partition(":")[0] for line in lines]
    assert said == ["renamed", "half", "balanced", "notes", "one tensor", "meta"]
    written = {path.parent.name.partition(".")[0] for path in base.glob("*/manifest.json")}
    assert written == {"renamed", "half", "balanced", "notes"}


def test_the_policies_example_keeps_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.policies", str(tmp_path / "root")]
    result = subprocess.run(
        command,
        env=environment(tmp_path),
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
        cwd=TRAINER.parents[1],
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(
        "26 snapshots, 13 of them saved\nkept for-evaluation.a0001, in 2 files\n"
    )
    wanted = {
        "for-evaluation.a0001",
        *(f"step-00000{step}.a0001" for step in (100, 140, 200, 240, 260)),
    }
    until(  # the daemon still deletes the others
        lambda: {path.parent.name for path in tmp_path.glob("root/tiny/*/manifest.json")} == wanted,
        "end of the deletions",
    )
    assert len(list(tmp_path.glob("root/tiny/*/*.ckpt"))) == 12


def test_the_export_example_is_read_by_the_tools_of_every_format(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.export", str(tmp_path)]
    variables = environment(tmp_path) | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        command,
        env=variables,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
        cwd=TRAINER.parents[1],
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "Hugging Face: config.json, model.safetensors; lm_head.weight is transformer.wte.weight",
        "transformers, safetensors, torch.load and torch.distributed.checkpoint read the same "
        "model.",
    ]


def test_the_import_example_reads_what_other_tools_have_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.imports", str(tmp_path)]
    variables = environment(tmp_path) | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        command,
        env=variables,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
        cwd=TRAINER.parents[1],
    )
    assert result.returncode == 0, result.stderr
    found = [line.partition(",")[0] for line in result.stdout.splitlines()]
    assert found == [
        "from-dcp: 29 "
        "tensors", "from-hf: 28 tensors", "from-safetensors: 29 tensors", "from-torch: 29 tensors",
        f"the job gpt begins with the model in {tmp_path / 'hf'}",
    ]  # fmt: skip


def test_the_fine_tuning_example_writes_what_has_changed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.fine_tune", str(tmp_path)]
    variables = environment(tmp_path) | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        command,
        env=variables,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
        cwd=TRAINER.parents[1],
    )
    assert result.returncode == 0, result.stderr
    new, sizes = result.stdout.splitlines()
    assert new == (
        "new in the model: transformer.h.0.attn.c_attn.down.weight, "
        "transformer.h.0.attn.c_attn.up.weight and 6 more; unexpected: 0"
    )
    assert sizes.startswith("step 3: ")


def test_a_model_is_served_out_of_memory_while_it_trains_and_both_are_killed(
    tmp_path: Path,
) -> None:
    result = subprocess.run(
        [sys.executable, str(TRAINER.with_name("follow.py")), "--root", str(tmp_path / "root")],
        env=environment(tmp_path),
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"snapshots were served, in 2 attempts, and each was bit-equal", result.stdout)


def test_text_is_generated_with_the_newest_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = TRAINER.with_name("follow_transformers.py")
    result = subprocess.run(
        [sys.executable, str(script), "--root", str(tmp_path / "root"), "--versions", "3"],
        env=environment(tmp_path) | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r"^step \d+: 'the daemon ", result.stdout, re.MULTILINE)) == 3


def test_a_missing_root_is_reported_in_one_sentence(tmp_path: Path) -> None:
    clean = {key: value for key, value in environment(tmp_path).items() if key != "XDG_RUNTIME_DIR"}
    result = subprocess.run(
        [sys.executable, str(TRAINER), *TINY],
        env=clean,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    if Path("/run/ckptd").exists():
        # If this machine has a daemon of its own, the example finds it and needs
        # nothing else. The example then finds that daemon, and no error is printed.
        pytest.skip("a daemon of this machine may be found")
    assert result.returncode == 1
    assert result.stderr.startswith("ckptd: no daemon runs on this node and no root is known")
    assert "Traceback" not in result.stderr
