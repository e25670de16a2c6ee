"""Memory, /dev/shm and huge pages, as the kernel tells them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import MOUNTS, plant, space

from pytest_gpucluster.host import memory
from pytest_gpucluster.host.memory import SharedMemory
from pytest_gpucluster.host.tree import Tree


def test_memory_is_read_in_bytes(tmp_path: Path) -> None:
    found = memory.read(plant(tmp_path, {}), space(64, 60))
    assert found.total_bytes == 2113568112 * 1024
    assert found.shm == SharedMemory(kind="tmpfs", total_bytes=64, free_bytes=60)
    assert (found.transparent, found.reserved_pages) == ("madvise", 0)


def test_what_is_not_told_is_none(tmp_path: Path) -> None:
    def refuse(path: Path) -> tuple[int, int]:
        raise FileNotFoundError(path)

    found = memory.read(plant(tmp_path, {}, healthy=False), refuse)
    assert (found.total_bytes, found.shm, found.transparent, found.reserved_pages) == (None, None, None, None)


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [("", None), (MOUNTS + "31 1 0:9 / /dev/shm rw - ext4 /dev/sda rw\n", "ext4")],
    ids=["no mount", "mounted over"],
)
def test_what_lies_at_dev_shm_is_the_last_mount_there(tmp_path: Path, mounts: str, kind: str | None) -> None:
    found = memory.read(plant(tmp_path, {"/proc/self/mountinfo": mounts}), space())
    assert found.shm is not None
    assert found.shm.kind == kind


def test_this_machine_has_memory(tmp_path: Path) -> None:
    found = memory.read(Tree())
    assert found.total_bytes is not None
    total, free = memory.space(tmp_path)
    assert 0 <= free <= total
