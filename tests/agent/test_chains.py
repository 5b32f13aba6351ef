"""Tests that everything that reads checkpoints reads those with chains of deltas, and
what is left of a chain when older checkpoints are gone.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from ckptd.agent import Agent, Checkpoint, per_rank
from ckptd.agent.convert.adoption import adopt
from ckptd.agent.convert.export import export
from ckptd.agent.convert.importing import import_checkpoint
from ckptd.agent.dcp.storage_reader import StorageReader
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.report import verification
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.errors import IntegrityError, RemoteError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.storage import locate
from ckptd.shared.storage.bucket import Bucket
from tests.support import chains, stores
from tests.support.cases import each_case
from tests.support.chains import CHAINS, STEPS, assert_state, state_of, tag
from tests.support.daemons import Home, home, running
from tests.support.ranks import HERE, Ranks

State = dict[str, torch.Tensor]
LAST = STEPS[-1]


@pytest.fixture(scope="module")
def job() -> Iterator[Path]:
    """The directory of a job whose checkpoints have chains."""
    with home() as place:
        chains.save_job(place)
        yield place.root / "job"


def manifest(job: Path, step: int) -> Manifest:
    return locate.open_root(job.parent).read_manifest(job.name, tag(step))


def ran(*typed: object) -> Any:
    done = CliRunner().invoke(main, [*map(str, typed)], catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout) if "--json" in typed else done.stdout


def blank() -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}


def _state(checkpoint: Checkpoint) -> State:
    found: State = checkpoint.load()
    return found


def loaded(job: Path, step: int, out: Path) -> State:
    with Checkpoint.open(job, tag(step)) as checkpoint:
        return _state(checkpoint)


def by_tensor(job: Path, step: int, out: Path) -> State:
    with Checkpoint.open(job, tag(step)) as checkpoint:
        return {name: checkpoint.tensor(name) for name in state_of(0)}


def through_numpy(job: Path, step: int, out: Path) -> State:
    found = blank()
    with ArrayCheckpoint.open(job, tag(step)) as checkpoint:
        assert checkpoint.verify() > 0
        for name, tensor in found.items():
            array = np.ascontiguousarray(checkpoint.array(name))
            read = torch.from_numpy(array.view(np.uint8).reshape(-1))
            tensor.reshape(-1).view(torch.uint8)[:] = read
    return found


def through_dcp(job: Path, step: int, out: Path) -> State:
    found = blank()
    dcp.load(found, storage_reader=StorageReader(job / tag(step)))
    return found


def exported_to_dcp(job: Path, step: int, out: Path) -> State:
    export(job / tag(step), "dcp", out)
    found = blank()
    dcp.load(found, checkpoint_id=out)
    return found


def exported_to_torch(job: Path, step: int, out: Path) -> State:
    export(job / tag(step), "torch", out)
    found: State = torch.load(out)
    return found


def imported_again(job: Path, step: int, out: Path) -> State:
    export(job / tag(step), "dcp", out.with_name("dcp"))
    import_checkpoint(out.with_name("dcp"), out)
    with Checkpoint.open(out) as checkpoint:
        assert checkpoint.manifest.chain == 0
        return _state(checkpoint)


def from_a_copied_directory(job: Path, step: int, out: Path) -> State:
    shutil.copytree(job / tag(step), out)
    with Checkpoint.open(out) as checkpoint:
        return _state(checkpoint)


READERS: list[Callable[[Path, int, Path], State]] = [
    loaded, by_tensor, through_numpy, through_dcp, exported_to_dcp, exported_to_torch,
    imported_again, from_a_copied_directory,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@each_case("step", [4, LAST])
@each_case("read", READERS)
def test_every_reader_reads_a_chain(
    job: Path, tmp_path: Path, read: Callable[[Path, int, Path], State], step: int
) -> None:
    assert manifest(job, step).chain == step - 2
    assert_state(read(job, step, tmp_path / "out"), step)


def test_the_commands_read_chains(job: Path) -> None:
    assert [result["error"] for result in verification(job)] == [None] * len(STEPS)
    rows = ran("ls", job, "--json")
    assert tuple(row["chain"] for row in rows) == CHAINS
    assert [row["new_bytes"] < row["bytes"] / 4 for row in rows] == list(map(bool, CHAINS))
    assert all(row["restored_bytes"] <= 1.5 * rows[0]["bytes"] for row in rows)
    assert "chains of at most 4" in ran("show", job / tag(LAST))
    difference = ran("diff", job / tag(1), job / tag(LAST), "--json")
    assert {one["name"] for one in difference["tensors"]} == set(state_of(0))
    assert ran("diff", job / tag(LAST), job / tag(LAST), "--json")["equal"]


@pytest.mark.usefixtures("processes")
def test_a_job_is_adopted_from_a_chain(
    job: Path, place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", str(place.socket))
    with running(place, *chains.OPTIONS, environment=chains.SMALL_CHUNKS, forked=True):
        adopt(job / tag(LAST), place.root, "next")
        agent, state = Agent("next", socket=place.socket), blank()
        assert agent.recover(state) is not None
        assert_state(state, LAST)
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_recovery_reads_a_chain_and_the_next_attempt_begins_whole(place: Home) -> None:
    chains.save_job(place)
    options = (*chains.OPTIONS, "--log-format", "json")
    with running(place, *options, environment=chains.SMALL_CHUNKS, forked=True):
        agent, state = Agent("job", socket=place.socket), blank()
        found = agent.recover(state)
        assert found is not None
        assert (found.step, found.source) == (LAST, "storage")
        assert_state(state, LAST)
        chains.save(agent, LAST + 1, LAST + 2)
        agent.close()
    root = locate.open_root(place.root)
    chain = [root.read_manifest("job", name).chain for name in sorted(root.tags("job"))]
    assert chain == [*CHAINS, 0, 1]
    (recovered,) = place.events("job.recovered")
    assert recovered["restored_bytes"] == manifest(place.root / "job", LAST).restored_bytes


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("gone", [(3,), (1, 2, 3, 4, 5), (4, 5)])
def test_a_chain_outlives_the_checkpoints_that_wrote_it(place: Home, gone: tuple[int, ...]) -> None:
    chains.save_job(place)
    for step in gone:
        ran("forget", place.root / "job" / tag(step), "--yes", "--json")
    left = [step for step in STEPS if step not in gone]
    assert sorted(locate.open_root(place.root).tags("job")) == [tag(step) for step in left]
    for step in left:
        assert_state(loaded(place.root / "job", step, place.root), step)


def test_a_damaged_base_damages_every_checkpoint_that_links_it(job: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(job.parent, root, copy_function=_link)
    files = (root / "job" / tag(3)).glob("rank-*")
    target = max(files, key=lambda path: path.stat().st_size)
    damaged = bytearray(target.read_bytes())
    damaged[8192:8200] = bytes(byte ^ 255 for byte in damaged[8192:8200])
    inode = target.stat().st_ino
    for path in (root / "job").glob("*/rank-*"):
        if path.stat().st_ino == inode:
            path.unlink()
            path.write_bytes(damaged)
    sound = [result["ok"] for result in verification(root / "job")]
    assert sound == [True, False, False, False, False, False]
    with (
        Checkpoint.open(root / "job", tag(LAST)) as checkpoint,
        pytest.raises(IntegrityError, match="does not match its checksum"),
    ):
        checkpoint.load()


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Server]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as servers:
        yield servers.get("seaweed")


def refuse_copies() -> None:
    def copy(self: Bucket, name: str, new: str) -> None:
        raise RemoteError(errno.EOPNOTSUPP, "the store answered 501 Not Implemented", name)

    Bucket.copy = copy  # type: ignore[method-assign]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("copies", [True, False])
def test_a_store_has_chains_if_it_can_copy(server: stores.Server, copies: bool) -> None:
    with stores.home_in(server) as place:
        chains.save_job(place, forked=True if copies else refuse_copies)
        root = place.root
        found = [manifest(root / "job", step) for step in STEPS]
        assert tuple(one.chain for one in found) == (CHAINS if copies else (0,) * len(STEPS))
        assert [one.new_bytes < one.nbytes for one in found] == [
            copies and chain > 0 for chain in CHAINS
        ]
        for step in STEPS:
            assert_state(loaded(root / "job", step, Path()), step)


def save_as_rank(socket: Path, *steps: int) -> None:
    """Save on one rank of two, each with a tensor of its own. Runs on ranks."""
    if "agent" not in HERE:
        HERE["agent"] = Agent("job", socket=socket)
    for step in steps:
        own = per_rank(state_of(step)["weights"] + HERE["agent"].rank)
        HERE["agent"].snapshot({**state_of(step), "own": own}, step=step).wait(
            "durable", timeout=60
        )


def recovered_as_rank(socket: Path) -> tuple[int, State]:
    """Return the step that a recovery has brought back, and the state. Runs on ranks."""
    agent, state = Agent("job", socket=socket), blank()
    own = per_rank(torch.zeros_like(state["weights"]))
    whole: dict[str, Any] = {**state, "own": own}
    found = agent.recover(whole)
    assert found is not None
    return found.step, {**whole, "own": whole["own"].value}


@pytest.mark.usefixtures("processes")
def test_ranks_store_and_load_chains_of_their_own(place: Home) -> None:
    options = {"environment": chains.SMALL_CHUNKS}
    with running(place, *chains.OPTIONS, **options), Ranks(2) as ranks:  # type: ignore[arg-type]
        ranks.call(save_as_rank, place.socket, *STEPS)
    parts = manifest(place.root / "job", LAST).parts
    assert [part.chain for part in parts] == [CHAINS[-1]] * 2
    with running(place, *chains.OPTIONS, **options), Ranks(2) as ranks:  # type: ignore[arg-type]
        for rank, (step, state) in enumerate(ranks.call(recovered_as_rank, place.socket)):
            assert step == LAST
            assert torch.equal(state.pop("own"), state_of(LAST)["weights"] + rank)
            assert_state(state, LAST)
    with Checkpoint.open(place.root / "job", tag(LAST)) as checkpoint:
        assert torch.equal(checkpoint.tensor("own@1"), state_of(LAST)["weights"] + 1)
