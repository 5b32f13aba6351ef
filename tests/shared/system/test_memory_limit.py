"""Tests how much memory the limits of control groups leave for slots, on trees of files
as the kernel shows them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.shared.system.memory_limit import MemoryLimit, tightest
from tests.support.control_groups import UNLIMITED, System, v1, v2

MB = 1_000_000


def test_the_group_of_version_1_counts_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    system = System(tmp_path, v1="/job")
    v1(system.v1 / "job", limit=700 * MB, used=600 * MB, cache=141 * MB)
    found = tightest(tmp_path)
    assert found == MemoryLimit(system.v1 / "job", 700 * MB, 459 * MB)
    assert found.free == 171 * MB, "a tenth is reserved"


def test_the_group_of_version_2_counts_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    system = System(tmp_path, v2="/a.slice/job.service")
    v2(system.v2 / "a.slice/job.service", limit=700 * MB, used=600 * MB, cache=141 * MB)
    assert tightest(tmp_path) == MemoryLimit(system.v2 / "a.slice/job.service", 700 * MB, 459 * MB)


@pytest.mark.parametrize("version", [v1, v2])
def test_the_smallest_of_nested_limits_counts(tmp_path: Path, version: object) -> None:
    write = v1 if version is v1 else v2
    system = System(tmp_path, v1="/a/b/c") if write is v1 else System(tmp_path, v2="/a/b/c")
    top = system.v1 if write is v1 else system.v2
    write(top / "a", limit=2000 * MB, used=1900 * MB)
    write(top / "a/b", limit=None, used=1000 * MB)
    write(top / "a/b/c", limit=700 * MB, used=100 * MB)
    found = tightest(tmp_path)
    assert found == MemoryLimit(top / "a", 2000 * MB, 1900 * MB)
    assert found.free == 0
    write(top / "a", limit=2000 * MB, used=300 * MB)
    assert tightest(tmp_path) == MemoryLimit(top / "a/b/c", 700 * MB, 100 * MB)


def test_groups_without_a_limit_limit_nothing(tmp_path: Path) -> None:
    assert tightest(tmp_path) is None, "there is no /proc"
    system = System(tmp_path, v1="/job", v2="/")
    assert tightest(tmp_path) is None, "the files cannot be read"
    v1(system.v1, limit=None, used=5 * MB)
    v1(system.v1 / "job", limit=None, used=5 * MB)
    assert int((system.v1 / "job/memory.limit_in_bytes").read_text()) == UNLIMITED
    v2(system.v2, limit=None, used=5 * MB)
    assert tightest(tmp_path) is None


def test_a_group_that_is_slowed_down_counts_like_one_that_is_killed(tmp_path: Path) -> None:
    system = System(tmp_path, v2="/job")
    v2(system.v2 / "job", limit=900 * MB, used=100 * MB)
    (system.v2 / "job/memory.high").write_text(f"{500 * MB}\n")
    assert tightest(tmp_path) == MemoryLimit(system.v2 / "job", 500 * MB, 100 * MB)


def test_a_container_sees_its_own_group_only(tmp_path: Path) -> None:
    """The path of the group is that of the host, which is not mounted, or `/`, or leads
    out of the container's name space.
    """
    for number, (root, path) in enumerate(
        [("/docker/1f", "/docker/1f"), ("/", "/"), ("/", "/../other"), ("/x", "/docker/1f")]
    ):
        place = tmp_path / str(number)
        system = System(place, v1=path, root=root)
        v1(system.v1, limit=700 * MB, used=100 * MB)
        assert tightest(place) == MemoryLimit(system.v1, 700 * MB, 100 * MB), (root, path)


def test_other_controllers_and_names_with_spaces(tmp_path: Path) -> None:
    system = System(tmp_path, v1="/my job", mounted="/sys/fs/c group/memory")
    v1(system.v1 / "my job", limit=700 * MB, used=100 * MB)
    assert tightest(tmp_path) == MemoryLimit(system.v1 / "my job", 700 * MB, 100 * MB)


def test_of_a_large_limit_a_fixed_size_is_reserved() -> None:
    assert MemoryLimit(Path("/g"), 100 << 30, 60 << 30).free == 39 << 30
    assert MemoryLimit(Path("/g"), 100 << 30, 101 << 30).free == 0
