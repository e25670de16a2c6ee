"""Files below a root: what the kernel does not show is None."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpucluster.host.tree import Tree


def tree(root: Path, text: str) -> Tree:
    (root / "proc").mkdir()
    (root / "proc" / "it").write_text(text, encoding="utf-8")
    return Tree(root=root)


@pytest.mark.parametrize(("text", "number"), [("12\n", 12), ("-1", -1), ("max", None), ("", None), ("1 2", None)])
def test_a_number_is_a_whole_number_or_none(tmp_path: Path, text: str, number: int | None) -> None:
    assert tree(tmp_path, text).number("/proc/it") == number


@pytest.mark.parametrize(("text", "numbers"), [("0-2,8\n", {0, 1, 2, 8}), ("all", None), ("", set())])
def test_a_list_is_a_set_or_none(tmp_path: Path, text: str, numbers: set[int] | None) -> None:
    assert tree(tmp_path, text).numbers("/proc/it") == numbers


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    none = Tree(root=tmp_path)
    assert (none.text("/proc/it"), none.number("/proc/it"), none.numbers("/proc/it")) == (None, None, None)
    assert none.mounts() == ()


def test_what_is_mounted_is_read_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "37 35 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    (tmp_path / "proc/self/mountinfo").write_text(line)
    [mount] = Tree(root=tmp_path).mounts()
    assert (mount.point, mount.kind, mount.options) == ("/sys/fs/cgroup/cpu", "cgroup", ("rw", "cpu", "cpuacct"))


def test_this_machine_shows_its_mounts() -> None:
    assert "/proc" in {mount.point for mount in Tree().mounts()}
