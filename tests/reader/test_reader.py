"""Runs a reader that was written from FORMAT.md, in another language and without code
of ckptd, on golden and fresh checkpoints.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.agent import Agent, per_rank
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.formats.manifest import Manifest
from tests.golden import make_ranks
from tests.support import sharded
from tests.support.daemons import Home, running
from tests.support.ranks import Ranks
from tests.vectors import deltas, refused, sound

READER = Path(__file__).parent / "reader.js"

pytestmark = [
    pytest.mark.usefixtures("processes"),
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed"),
]


def answers(*directories: Path) -> list[dict[str, Any]]:
    """Return the reader's answer for each directory. One process reads all of them."""
    done = subprocess.run(
        ["node", str(READER), *map(str, directories)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line, parse_int=number) for line in done.stdout.rstrip("\n").split("\n")]
    assert len(found) == len(directories)
    return found


def read(directory: Path) -> Any:
    [answer] = answers(directory)
    assert answer.keys() == {"state"}, answer
    return answer["state"]


def number(digits: str) -> int | float:
    """Return a number that JavaScript has written without a fraction.

    The reader writes large integers as text, so that a large number is a float.
    """
    return int(digits) if abs(int(digits)) < 1 << 53 else float(digits)


def plain(value: Any) -> Any:
    """Return a value as the reader prints it."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, complex):
        return plain([value.real, value.imag])
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no number for it
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def expected(directory: Path) -> Any:
    with ArrayCheckpoint.open(directory) as checkpoint:
        return plain(checkpoint.load())


def test_the_golden_checkpoint() -> None:
    assert read(make_ranks.PLACE) == plain(make_ranks.LOADED)


def test_a_fresh_checkpoint(place: Home) -> None:
    weight, model = torch.arange(12.0).reshape(3, 4), torch.nn.Linear(3, 2)
    state = {
        "model": model,
        "optim": torch.optim.AdamW(model.parameters()),
        "tied": {"a": weight, "b": weight, "rows": weight[1:], "turned": weight.t()},
        "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "own": per_rank({"position": 7}),
        "plain": [1, -5, 2**40, 0.1, "ünï", None, True, (1, 2)],
    }
    with running(place, "--codec", "raw", "--files-per-rank", "3", forked=True) as daemon:
        agent = Agent("job", socket=daemon.home.socket)
        agent.snapshot(state, step=1, rng=False).wait("durable", timeout=60)
        agent.close()
        directory = next((place.root / "job").glob("step-*"))
        found = read(directory)
    assert found == expected(directory)
    assert found["tied"]["turned"] == weight.t().tolist()


def test_fresh_checkpoints_with_deltas(place: Home) -> None:
    """Each checkpoint is read by itself, by its own files."""
    chance = torch.Generator().manual_seed(1)
    count = 10_000
    state: dict[str, torch.Tensor] = {
        "bytes": torch.randint(-100, 100, (count,), dtype=torch.int8, generator=chance),
        "counts": torch.arange(count),
        "doubles": torch.randn(count, dtype=torch.float64, generator=chance),
        "frozen": torch.randn(count, generator=chance),
        "halves": torch.randn(count, generator=chance).bfloat16(),
        "singles": torch.randn(count // 8, 8, generator=chance),
    }
    saved: list[tuple[int, Path, dict[str, Any]]] = []
    with running(place, "--codec", "planes", "--deltas", "small", forked=True) as daemon:
        agent = Agent("job", socket=daemon.home.socket)
        for step in range(12):
            agent.snapshot(state, step=step, rng=False).wait("durable", timeout=60)
            [directory] = (place.root / "job").glob(f"step-{step:08d}.a*")
            manifest = Manifest.decode((directory / "manifest.json").read_bytes())
            tensors = {name: value.tolist() for name, value in state.items()}
            saved.append((manifest.parts[0].chain, directory, tensors))
            if manifest.parts[0].chain == 2:
                break
            moved = torch.rand(count, generator=chance)
            state["bytes"] += (moved < 0.02).to(torch.int8)
            state["counts"] -= (moved < 0.001).long()
            state["doubles"] += 1e-13 * moved
            state["halves"] = (state["halves"].float() * (1 + (moved < 0.2) * 0.005)).bfloat16()
            state["singles"] += (moved.reshape(-1, 8) < 0.01) * 1e-6
        agent.close()
    chains = [chain for chain, _, _ in saved]
    assert (chains[0], chains[-1]) == (0, 2), "no chain of two deltas was saved"
    assert answers(*(directory for _, directory, _ in saved)) == [
        {"state": tensors} for *_, tensors in saved
    ]


def test_a_fresh_checkpoint_of_three_ranks(place: Home) -> None:
    with running(place, "--codec", "raw", forked=True) as daemon, Ranks(3) as ranks:
        ranks.call(sharded.build, "fsdp2", 1)
        ranks.call(sharded.train, 1)
        ranks.call(sharded.save, daemon.home.socket, 1)
        directory = next((place.root / "job").glob("step-*"))
        assert read(directory) == expected(directory)


def test_damage_is_found(tmp_path: Path) -> None:
    chance, copies = random.Random(1), dict[Path, str]()
    for number in range(12):
        copy = tmp_path / str(number)
        shutil.copytree(make_ranks.PLACE, copy)
        file = sorted(copy.iterdir())[number % 5]
        data = bytearray(file.read_bytes())
        used = [at for at, byte in enumerate(data) if byte]
        data[chance.choice(used)] ^= 1
        file.write_bytes(data)
        copies[copy] = file.name
    found = zip(copies.values(), answers(*copies), strict=True)
    assert [name for name, answer in found if answer.keys() != {"refused"}] == []


# -- vectors


def answers_to(vectors: dict[str, dict[str, bytes]], place: Path) -> dict[str, dict[str, Any]]:
    """Return the reader's answers by the names of test vectors, whose files are given."""
    for name, files in vectors.items():
        (place / name).mkdir()
        for file, data in files.items():
            (place / name / file).write_bytes(data)
    return dict(zip(vectors, answers(*(place / name for name in vectors)), strict=True))


UNDERSTOOD = (
    "shapes",
    "later-members",
    "own-tag",
    "two-ranks",
    "two-ranks-without-ranks",
    "planes",
    "small-planes",
    "zstd",
    "libzstd",
    "zstd-dictionary",
    "linked-files",
    "deltas",
    "deltas-forms",
    "deltas-unchanged",
    "deltas-longest-chain",
    "deltas-without-feature",
)
"""Sound vectors that need only what this reader knows: a manifest of version 1, and the
usual dtypes and values.
"""


def test_sound_vectors(tmp_path: Path) -> None:
    made = {name: (sound.SOUND | deltas.SOUND)[name]().checkpoint.built() for name in UNDERSTOOD}
    found = answers_to(made, tmp_path)
    wrong = {
        name: answer
        for name, answer in found.items()
        if answer != {"state": expected(tmp_path / name)}
    }
    assert wrong == {}


CHECKED = (
    "manifest-tail",
    "manifest-digest",
    "index-digest",
    "part-identity",
    "linked-files",
    "deltas",
    "codec",
    "chunk-stored-crc",
    "chunk-padding",
    "chunk-raw-crc",
)
"""Checks that this reader makes; it leaves out most of the others."""
REFUSED = refused.REFUSED | deltas.REFUSED


def test_vectors_that_must_be_refused(tmp_path: Path) -> None:
    vectors = {name: each for name, each in REFUSED.items() if each.check in CHECKED}
    assert {each.check for each in vectors.values()} == set(CHECKED)
    found = answers_to({name: each.files for name, each in vectors.items()}, tmp_path)
    wrong = {
        name: answer
        for name, answer in found.items()
        if answer.keys() != {"refused"} or ("newer" in answer["refused"]) != vectors[name].newer
    }
    assert wrong == {}
