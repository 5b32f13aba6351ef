"""Runs `ckptd export` as a user does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from ckptd.agent.convert.command import adopt, export, import_, text_of
from ckptd.agent.convert.export import Exported
from tests.agent.convert.saved import assert_same, loaded, save
from tests.support.cases import each_case
from tests.support.commands import forked
from tests.support.forged import forge

STATE: dict[str, Any] = {"model": {"a.w": torch.arange(6.0), "a.b": torch.ones(2)}, "epoch": 3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(STATE, tmp_path / "checkpoint")


def run(checkpoint: Path, *options: str) -> Result:
    return CliRunner().invoke(export, [str(checkpoint), *options])


@pytest.mark.usefixtures("processes")
def test_the_verb_is_found_by_the_command_line(tmp_path: Path, checkpoint: Path) -> None:
    done = forked("export", checkpoint, "--to", "safetensors", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == f"wrote {tmp_path / 'out'}: 2 tensors, 32 B\nleft out, because the format holds "
        f"tensors only: epoch\n"
    )
    assert_same(
        dict(sorted(load_file(tmp_path / "out").items())),
        {f"model.{name}": STATE["model"][name] for name in ("a.b", "a.w")},
    )


def test_every_option(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "map.json").write_text('{"a.w": "weight"}')
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    out = tmp_path / "out"
    names = ("--rename", "^a.=", "--rename", "^b$=bias", "--map", str(tmp_path / "map.json"))
    options = ("--to", "hf", "--out", str(out), "--only", "model", "--dtype", "bf16", *names)
    done = run(
        checkpoint, *options, "--files", str(tmp_path / "files"), "--max-shard-size", "8", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["files"] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert (found["tensors"], found["nbytes"], found["out"]) == (2, 16, str(out))
    assert load_file(out / found["files"][1])["weight"].tolist() == list(range(6))
    assert load_file(out / found["files"][2])["bias"].dtype is torch.bfloat16
    assert json.loads((out / "config.json").read_text()) == {"dtype": "bfloat16"}


def test_a_checkpoint_of_a_job_is_chosen_by_step_and_by_metric(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.25), (3, 1.0)):
        root, metrics = tmp_path / "root", {"loss": loss}
        forge(root, (step,), [[((0,), (step,))]], step=step, metrics=metrics)
    job = f"{tmp_path}/root/gpt"
    for number, (typed, step) in enumerate((
        ([f"{job}/1"], 1),
        ([job, "--step", "1"], 1),
        ([f"{job}/best:loss"], 2),
        ([f"{job}/newest"], 3),
        ([job], 3),
    )):  # fmt: skip
        out = tmp_path / str(number)
        done = CliRunner().invoke(export, [*typed, "--to", "safetensors", "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert load_file(out)["w"].tolist() == [1.0] * step
    done = CliRunner().invoke(adopt, [f"{job}/best:loss", f"{tmp_path}/new/gpt", "--dry-run"])
    assert f"would adopt {job}/step-00000002.a0001 as step 0 of" in done.output


def test_a_dry_run_says_what_it_would_write(tmp_path: Path, checkpoint: Path) -> None:
    done = run(checkpoint, "--to", "torch", "--out", str(tmp_path / "out"), "--dry-run")
    assert (done.exit_code, done.stdout) == (
        0,
        f"would write {tmp_path / 'out'}: 2 tensors, 32 B\n",
    )
    assert not (tmp_path / "out").exists()


@each_case(
    ("options", "code", "said"),
    [
        (("--only", "nothing"), 10, "the checkpoint has no 'nothing'; at its top are model, epoch"),
        (
            ("--dtype", "float7"),
            2,
            "--dtype float7: torch has no such dtype; expected one like bf16, fp16, fp32 or "
            "float8_e4m3fn",
        ),
        (("--map", "nowhere.json"), 2, "Usage: "),
        (("--rename", "a"), 2, "--rename a: expected REGEX=NEW"),
        (("--step", "9"), 2, "--step 9 chooses a checkpoint of a job, and "),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, checkpoint: Path, options: tuple[str, ...], code: int, said: str
) -> None:
    done = run(checkpoint, "--to", "torch", "--out", str(tmp_path / "out"), *options)
    assert done.exit_code == code
    if "nowhere.json" in options:
        assert "'nowhere.json' does not exist" in done.stderr
    else:
        assert done.stderr.startswith(f"ckptd: {said}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON: "),
        ("[]", "expected a JSON object with new names by old ones"),
        ('{"a": 1}', "expected"),
    ],
)
def test_a_bad_map_is_refused(tmp_path: Path, checkpoint: Path, text: str, said: str) -> None:
    (tmp_path / "map.json").write_text(text)
    done = run(
        checkpoint,
        "--to",
        "torch",
        "--out",
        str(tmp_path / "out"),
        "--map",
        str(tmp_path / "map.json"),
    )
    assert done.exit_code == 2
    assert said in done.stderr


def test_long_lists_are_cut() -> None:
    text = text_of(
        Exported(
            Path("out"), 10, 100, left_out=[str(number) for number in range(20)], tied={"b": "a"}
        )
    )
    assert text.splitlines()[1:] == [
        "stored once: b is a",
        "left out, because the format holds tensors only: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more",
    ]


@pytest.mark.usefixtures("processes")
def test_an_import_by_the_command_line(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "source")
    command = ("import", tmp_path / "source", "--out", tmp_path / "out")
    done = forked(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {tmp_path / 'out'} from torch: 2 tensors, 32 B\n"
    assert_same(loaded(tmp_path / "out"), STATE)
    done = forked(*command)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"ckptd: {tmp_path / 'out'} exists already: choose another name, or remove it first\n"
    )


def test_every_option_of_an_import(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "source")
    (tmp_path / "map.json").write_text('{"a.w": "weight"}')
    names = (
        "--rename",
        "^a.=",
        "--map",
        str(tmp_path / "map.json"),
        "--only",
        "model",
        "--under",
        "net",
        "--dtype",
        "bf16",
    )
    options = [
        str(tmp_path / "source"),
        "--out",
        str(tmp_path / "out"),
        "--from",
        "torch",
        "--codec",
        "raw",
        *names,
    ]
    done = CliRunner().invoke(import_, [*options, "--dry-run"])
    assert (done.exit_code, done.stdout) == (
        0,
        f"would write {tmp_path / 'out'} from torch: 2 tensors, 16 B\n",
    )
    done = CliRunner().invoke(import_, [*options, "--json"])
    expected = {
        "out": str(tmp_path / "out"),
        "format": "torch",
        "tensors": 2,
        "nbytes": 16,
        "left_out": [],
    }
    assert (done.exit_code, json.loads(done.stdout)) == (0, expected)
    assert_same(
        loaded(tmp_path / "out"),
        {"net": {"weight": torch.arange(6.0).bfloat16(), "b": torch.ones(2).bfloat16()}},
    )


def test_files_that_an_import_leaves_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "tokenizer.json").write_text("x" * (1 << 20))
    done = CliRunner().invoke(import_, [str(tmp_path / "hf"), "--out", str(tmp_path / "out")])
    assert done.stdout.endswith(
        "1 tensors, 4 B\nleft out, because it is too large for user_content: tokenizer.json\n"
    )
