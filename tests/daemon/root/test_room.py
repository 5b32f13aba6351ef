"""The warning that few more checkpoints fit."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from unittest import mock

import pytest

from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.root.room import Room
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared.storage.locate import open_root


def test_each_smaller_number_of_checkpoints_that_fit_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository, calls = open_root(tmp_path), StorageCalls(60.0)
    room = Room(Config(root=tmp_path, socket=tmp_path / "s"), repository, calls)
    job = Job("gpt")
    job.commit(StoredCheckpoint("gpt", "step-00000001.a0001", 1, 1, 1, 100, (), user_tag=False))
    with caplog.at_level(logging.WARNING):
        for free in (1000, 350, 340, 250, 1000, 350):
            with mock.patch.object(repository.storage, "free", return_value=free):
                asyncio.run(room.warn(job))
    calls.close()
    told = [record.getMessage().split(" of its")[0] for record in caplog.records]
    assert told == [f"job gpt: the root has room for {count} more" for count in (3, 2, 3)]


def test_the_remark_says_what_to_do(tmp_path: Path) -> None:
    job = Job("gpt")
    for make_room, advice in (
        (False, "delete some (`ckptd forget`)"),
        (True, "the oldest ones are then deleted early"),
    ):
        room = Room(
            Config(root=tmp_path, socket=tmp_path / "s", make_room=make_room),
            mock.Mock(),
            mock.Mock(),
        )
        assert advice in room.remark(job, 2, 250)
        assert room.remark(job, 5, 1000) == ""
