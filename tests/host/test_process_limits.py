"""Limits of a process, unlimited ones, and the capability that takes one of them away."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import limits, plant, status

from pytest_gpucluster.host import process_limits
from pytest_gpucluster.host.process_limits import IPC_LOCK, Limit
from pytest_gpucluster.host.tree import Tree


def test_soft_and_hard_limits_are_read(tmp_path: Path) -> None:
    tree = plant(tmp_path, {"/proc/self/limits": limits(nofile=1024, memlock=65536, nproc=4096)})
    found = process_limits.read(tree)
    assert found is not None
    assert (found.nofile, found.memlock) == (Limit(soft=1024, hard=1048576), Limit(soft=65536, hard=65536))
    assert (found.nproc.soft, found.files_at_most, found.tasks_at_most) == (4096, 1048576, 4194304)


def test_unlimited_is_none(tmp_path: Path) -> None:
    found = process_limits.read(plant(tmp_path, {"/proc/self/limits": limits(nofile="unlimited")}))
    assert found is not None
    assert (found.nofile.soft, found.memlock.soft) == (None, None)


@pytest.mark.parametrize(
    "text", [None, "", "Max open files            1024                 4096                 files\n"]
)
def test_limits_that_the_kernel_does_not_tell_are_none(tmp_path: Path, text: str | None) -> None:
    assert process_limits.read(plant(tmp_path, {"/proc/self/limits": text})) is None


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "may"),
    [
        (1 << IPC_LOCK, "0 0 4294967295", True),
        (1 << IPC_LOCK, None, True),
        (~(1 << IPC_LOCK) & 2**41 - 1, "0 0 4294967295", False),
        (1 << IPC_LOCK, "0 100000 65536", False),
    ],
    ids=["root", "no user namespaces", "all but this one", "rootless container"],
)
def test_memory_may_be_locked_without_limit_by_a_capability_that_holds_on_the_host(
    tmp_path: Path, capabilities: int, uid_map: str | None, may: bool
) -> None:
    files = {"/proc/self/status": status(capabilities), "/proc/self/uid_map": uid_map}
    found = process_limits.read(plant(tmp_path, files))
    assert found is not None
    assert found.may_lock_all is may


def test_this_process_has_limits() -> None:
    assert process_limits.read(Tree()) is not None
