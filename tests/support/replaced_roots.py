"""Roots that are deleted, replaced or moved while snapshots for them are in memory, and
what a new run then does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.agent import Agent, Checkpoint
from ckptd.shared import names
from ckptd.shared.errors import ForeignMemory
from tests.support import trainers
from tests.support.daemons import Home, until
from tests.support.trainers import Diary, assert_equal, blank, expected

SIZE = 2_000
LAST = 3
"""The newest step in memory. It is durable in the root before."""
SENTENCE = (
    r"the memory of this node holds step 3 of attempt 1 of job 'job', saved for root [0-9a-f]{8}, "
    r"but (there is no root at .* now|.* has "
    r"another root now, [0-9a-f]{8}): the root was deleted or replaced, or another disk is "
    r"mounted there\. Nothing was recovered, and "
    r"nothing was written\. Either mount or restore the right root at .* and start again, or set "
    r"CKPTD_FOREIGN_MEMORY for one run: "
    r"`adopt` .*, and `drop` "
)
REPLACEMENTS: dict[str, Callable[[Home], None]] = {
    "deleted": lambda home: None,
    "an empty directory": lambda home: home.root.mkdir(),
    "another root": lambda home: _other_root(home.root),
}


def _other_root(path: Path) -> None:
    path.mkdir()
    (path / names.CONTROL).mkdir()
    (path / names.CONTROL / names.IDENTITY).write_text("ab" * 16 + "\n")


def take_away(home: Home) -> None:
    """Take the root away in one step: a deletion file by file could meet a file that
    the daemon is making.
    """
    home.root.rename(home.path / "gone")


def train_and_die(home: Home, last: int = LAST) -> None:
    """Run a trainer that is killed once its last step is durable.

    Its newest snapshot stays in memory.
    """
    diary = Diary(home.path / f"diary-{os.urandom(4).hex()}")
    trainer = trainers.start(home.socket, diary, 1, last, size=SIZE, wait_every=1)
    until(lambda: diary.count("finished"), "end of the training")
    trainer.kill()
    trainer.join()


def contents(root: Path) -> list[str]:
    """Return the names of everything in a root that a run could have made: its job, its
    claims.
    """
    found = [path.name for path in root.iterdir() if path.name != names.CONTROL]
    claims = root / names.CONTROL / names.ATTEMPTS
    return sorted([*found, *(path.name for path in claims.iterdir())] if claims.exists() else found)


@contextmanager
def choice(monkeypatch: pytest.MonkeyPatch, value: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("CKPTD_FOREIGN_MEMORY", value)
        yield


def refused(home: Home) -> None:
    """Assert that a new run is refused with the sentence, twice, and that neither root
    nor memory changes.
    """
    before = home.segment_files()
    for _ in range(2):
        with pytest.raises(ForeignMemory, match=SENTENCE):
            Agent("job", socket=home.socket)
    assert home.segment_files() == before != []
    assert contents(home.root) == []


def recovered_by(agent: Agent) -> tuple[int, str] | None:
    state = blank(SIZE)
    found = agent.recover(state)
    if found is None:
        return None
    assert_equal(state, found.step or 0, SIZE)
    return found.step or 0, found.source


def goes_on(agent: Agent, home: Home, step: int) -> None:
    """Assert that a run saves into the root that is there."""
    agent.snapshot(expected(step, SIZE), step=step).wait("durable", timeout=60)
    agent.close()
    with Checkpoint.open(home.root / "job") as checkpoint:
        assert checkpoint.step == step
        assert_equal(checkpoint.load(), step, SIZE)
