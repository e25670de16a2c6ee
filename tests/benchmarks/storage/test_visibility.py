"""Files of other nodes that are as they were written pass; old, wrong and missing ones are named with their writer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.storage import checkpoint, consistency
from pytest_gpucluster.benchmarks.storage.consistency import (
    Visibility,
    VisibilityOperations,
    nodes_to_read,
    path_of,
    turn_content,
    write_probe,
)
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

HOSTS = {0: "node-a", 1: "node-b", 2: "node-c"}
SIZE = 5000


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.2)


def looked(folder: Path, turn: int = 0, read: Callable[[Path], bytes] = consistency.read_probe) -> Visibility:
    return consistency.read_until_visible(
        folder,
        (1, 2),
        turn=turn,
        size_bytes=SIZE,
        hosts=HOSTS,
        components=VisibilityOperations(write=write_probe, read=read),
    )


def put(folder: Path, *turns: int) -> None:
    for turn in turns:
        for node in (1, 2):
            write_probe(path_of(folder, node), turn_content(node, turn, SIZE))


def test_what_each_node_writes_is_its_own_and_known_on_every_host() -> None:
    contents = {turn_content(node, turn, SIZE) for node in range(3) for turn in range(2)}
    assert len(contents) == 6
    assert {len(content) for content in contents} == {SIZE}
    assert turn_content(1, 0, SIZE) == turn_content(1, 0, SIZE)


@of_each("count", [2, 3, 16, 129])
def test_every_file_is_read_on_another_node_in_both_directions_with_the_first(count: int) -> None:
    reads = {node: nodes_to_read(node, count) for node in range(count)}
    assert all(node not in others for node, others in reads.items())
    assert all(0 in others for node, others in reads.items() if node)
    assert set(reads[0]) == set(range(1, count))
    assert sum(map(len, reads.values())) <= 3 * count


def test_files_as_they_were_written_are_right(tmp_path: Path) -> None:
    put(tmp_path, 0)
    first = looked(tmp_path)
    put(tmp_path, 1)
    both = first + looked(tmp_path, 1)
    assert (both.files, both.right, both.wrong, both.missing) == (4, 4, (), ())
    both.require_content("node-a")
    both.require_visible("node-a")


def test_a_file_that_comes_late_is_waited_for_and_timed(tmp_path: Path) -> None:
    write_probe(path_of(tmp_path, 1), turn_content(1, 0, SIZE))
    threading.Timer(0.1, lambda: write_probe(path_of(tmp_path, 2), turn_content(2, 0, SIZE))).start()
    seen = looked(tmp_path)
    assert seen.right == 2
    assert seen.slowest_seconds > 0.02


def test_a_file_that_does_not_come_is_no_fault_of_the_hardware(tmp_path: Path) -> None:
    write_probe(path_of(tmp_path, 1), turn_content(1, 0, SIZE))
    seen = looked(tmp_path)
    assert (seen.files, seen.right) == (2, 1)
    seen.require_content("node-a")
    with pytest.raises(EnvironmentBroken, match=r"(?s)node-00002\.bin, .*node-c.*missing.*--gpucluster-scratch"):
        seen.require_visible("node-a")


def test_old_contents_are_reported_as_such(tmp_path: Path) -> None:
    put(tmp_path, 0)
    seen = looked(tmp_path, 1)
    assert seen.right == 0
    with pytest.raises(WrongResult, match=r"(?s)node-.*reads something.*node-00001\..*node-b.*before, expected 5000"):
        seen.require_content("node-a")


@of_each("spoil", [lambda content: content[:-1], lambda content: content[:99] + b"?" + content[100:]])
def test_other_bytes_are_wrong(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    put(tmp_path, 0)
    seen = looked(tmp_path, read=lambda path: spoil(path.read_bytes()))
    assert len(seen.wrong) == 2
    with pytest.raises(WrongResult, match=r"found .* sha256 .*, expected 5000 bytes with sha256"):
        seen.require_content("node-a")
