"""A shared file system that is right passes; what is missing, torn, old or lost is found, and the node named."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from each import of_each

from pytest_gpucluster import files
from pytest_gpucluster.benchmarks.storage import checkpoint, consistency, shared_filesystem
from pytest_gpucluster.benchmarks.storage.consistency import (
    FILE_BYTES,
    ReadCounts,
    Visibility,
    nodes_to_read,
    path_of,
    turn_content,
    version_content,
    version_of,
    write_probe,
)
from pytest_gpucluster.benchmarks.storage.shared_filesystem import (
    MountInfo,
    inspect_mount,
    not_shared_message,
    require_same_mounts,
    small_files_per_second,
)
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.files import Mount


@contextlib.contextmanager
def operations(**faults: Any) -> Iterator[None]:
    """Put these system calls in place of the real ones."""
    mounts = faults.pop("mounts", files.read_mounts)
    with patch.dict(vars(consistency), faults), patch.object(files, "read_mounts", mounts):
        yield


# ---- small files


def test_all_are_made_read_and_removed(tmp_path: Path) -> None:
    sizes = []

    def read(path: Path) -> bytes:
        content = path.read_bytes()
        sizes.append(len(content))
        return content

    with operations(read_small=read):
        assert small_files_per_second(tmp_path / "small", 20) > 0
    assert sizes == [4096] * 20
    assert list(tmp_path.iterdir()) == []


def test_a_lost_or_changed_file_and_a_file_system_that_fails_are_noticed(tmp_path: Path) -> None:
    def lose(path: Path, content: bytes) -> None:
        if path.name != "000003":
            path.write_bytes(content)

    with operations(write_small=lose), pytest.raises(WrongResult, match=r"1 of 5 .*listed wrongly.* 000003"):
        small_files_per_second(tmp_path / "lost", 5)
    cut = operations(read_small=lambda path: path.read_bytes()[:-1])
    with cut, pytest.raises(WrongResult, match=r"000000 .*was written"):
        small_files_per_second(tmp_path / "changed", 5)
    with pytest.raises(FileNotFoundError):
        small_files_per_second(tmp_path / "none" / "small", 1)


# ---- renames


TIMES = 40


def run(folder: Path, **faults: Any) -> ReadCounts:
    consistency.put_version(folder / "file", 0)
    with operations(**faults):
        return consistency.replace_and_read(folder / "file", TIMES, writes=True)


def check(found: ReadCounts) -> None:
    found.require_whole("node-b")


def test_a_version_is_known_by_its_whole_content_only() -> None:
    content = version_content(123456)
    assert (version_of(content), len(content)) == (123456, FILE_BYTES)
    assert version_of(content[:4096] + version_content(5)[4096:]) is None
    assert version_of(content[:-1]) is None
    assert version_of(b"") is None


def test_this_host_s_file_system_replaces_at_once(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found.broken, found.whole_ratio, found.last) == ({}, 1.0, TIMES)
    check(found)


def test_a_file_that_is_missing_for_a_moment_is_noticed(tmp_path: Path) -> None:
    reads = itertools.count(1)

    def read(path: Path) -> bytes:
        if next(reads) % 10 == 0:
            raise FileNotFoundError(path)
        return path.read_bytes()

    found = run(tmp_path, read_renamed=read)
    assert found.broken["missing"] > 0
    assert found.whole_ratio < 1
    with pytest.raises(WrongResult, match=r"node-b .*/file missing \d+ times in"):
        check(found)


def test_a_file_that_is_written_in_place_is_seen_in_parts(tmp_path: Path) -> None:
    reads = itertools.count(1)

    def read(path: Path) -> bytes:
        content = path.read_bytes()
        return content[:4096] if next(reads) % 7 == 0 else content

    found = run(tmp_path, read_renamed=read)
    with pytest.raises(WrongResult, match=r"/file with 4096 .*version \d+ times in"):
        check(found)


def test_a_reader_that_is_shown_an_old_version_for_ever_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.1)
    monkeypatch.setattr(consistency, "_MOST_SECONDS_EACH", 0.005)
    old = version_content(3)
    found = run(tmp_path, read_renamed=lambda path: old)
    assert (found.last, found.whole_ratio) == (3, 1.0)
    with pytest.raises(WrongResult, match=r"node-b saw version 3 of .* .*and version 40 was there"):
        check(found)


def test_a_reader_that_sees_nothing_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "_MOST_SECONDS_EACH", 0.0)
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.0)
    found = run(tmp_path)
    assert (found.whole, found.last, found.whole_ratio) == (0, -1, 0.0)
    with pytest.raises(WrongResult, match=r"node-.*saw none"):
        check(found)


def test_stale_handles_and_older_versions_are_no_failure(tmp_path: Path) -> None:
    reads = itertools.count(1)

    def read(path: Path) -> bytes:
        number = next(reads)
        if number % 5 == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return version_content(0) if number == 31 else path.read_bytes()

    found = run(tmp_path, read_renamed=read)
    assert next(reads) > found.counted + 1, "some were stale"
    check(found)


def test_a_writer_that_fails_ends_the_reading_at_once_and_another_error_of_the_reader_is_raised(tmp_path: Path) -> None:
    def rename(new: Path, path: Path) -> None:
        if version_of(new.read_bytes()) == 5:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        new.replace(path)

    def read(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(OSError, match="Disk quota exceeded"):
        run(tmp_path, rename=rename)
    with pytest.raises(PermissionError):
        run(tmp_path, read_renamed=read)


# ---- files of other nodes


HOSTS = {0: "node-a", 1: "node-b", 2: "node-c"}
SIZE = 5000


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.2)


def looked(folder: Path, *turns: int, **faults: Any) -> Visibility:
    seen = Visibility()
    with operations(**faults):
        for turn in turns or (0,):
            put(folder, *((turn,) if turns[1:] else ()))
            consistency.read_until_visible(seen, folder, (1, 2), turn=turn, size_bytes=SIZE, hosts=HOSTS)
    return seen


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


def test_files_as_they_were_written_are_right(tmp_path: Path, short: None) -> None:
    both = looked(tmp_path, 0, 1)
    assert (both.files, both.right, both.wrong, both.missing) == (4, 4, [], [])
    both.require_content("node-a")
    both.require_visible("node-a")


def test_a_file_that_comes_late_is_waited_for_and_timed(tmp_path: Path, short: None) -> None:
    write_probe(path_of(tmp_path, 1), turn_content(1, 0, SIZE))
    threading.Timer(0.1, lambda: write_probe(path_of(tmp_path, 2), turn_content(2, 0, SIZE))).start()
    seen = looked(tmp_path)
    assert seen.right == 2
    assert seen.slowest_seconds > 0.02


def test_a_file_that_does_not_come_is_no_fault_of_the_hardware(tmp_path: Path, short: None) -> None:
    write_probe(path_of(tmp_path, 1), turn_content(1, 0, SIZE))
    seen = looked(tmp_path)
    assert (seen.files, seen.right) == (2, 1)
    seen.require_content("node-a")
    with pytest.raises(EnvironmentBroken, match=r"(?s)node-00002\.bin, .*node-c.*missing.*--gpucluster-scratch"):
        seen.require_visible("node-a")


def test_old_contents_are_reported_as_such(tmp_path: Path, short: None) -> None:
    put(tmp_path, 0)
    seen = looked(tmp_path, 1)
    assert seen.right == 0
    with pytest.raises(
        WrongResult, match=r"(?s)node-.*reads something.*node-00001\..*node-b.*before, expected the 5000"
    ):
        seen.require_content("node-a")


@of_each("spoil", [lambda content: content[:-1], lambda content: content[:99] + b"?" + content[100:]])
def test_other_bytes_are_wrong(tmp_path: Path, short: None, spoil: Callable[[bytes], bytes]) -> None:
    put(tmp_path, 0)
    seen = looked(tmp_path, read_probe=lambda path: spoil(path.read_bytes()))
    assert len(seen.wrong) == 2
    with pytest.raises(WrongResult, match=r"found .* other bytes, expected the 5000 bytes"):
        seen.require_content("node-a")


# ---- mounts


NFS = Mount(point="/data", kind="nfs4", source="server:/export", root="/", options=("rw", "vers=4.2"))
LOCAL = Mount(point="/", kind="ext4", source="/dev/vda1", root="/", options=("rw",))
FOLDER = Path("/data/run")
HERE = MountInfo(host="node-a", mount=NFS, free_ratio=0.5, free_inodes_ratio=None)


def sizes(blocks: int = 100, free: int = 40, files: int = 0, free_files: int = 0) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, blocks, free, free, files, free_files, free_files, 0, 255))


def test_a_folder_s_mount_and_free_space_are_reported(tmp_path: Path) -> None:
    with operations(mounts=lambda: (LOCAL,), statvfs=lambda path: sizes(files=1000, free_files=250)):
        seen = inspect_mount(tmp_path, "node-a")
    assert seen == MountInfo(host="node-a", mount=LOCAL, free_ratio=0.4, free_inodes_ratio=0.25)
    with operations(statvfs=lambda path: sizes()):
        assert inspect_mount(tmp_path, "node-a").free_inodes_ratio is None


def test_this_host_s_own_folders_can_be_looked_at_and_what_is_mounted_may_be_unknown(tmp_path, capsys):
    def mounts() -> tuple[Mount, ...]:
        raise OSError("no /proc")

    seen = inspect_mount(tmp_path / "a" / "b", "node-a")
    assert (tmp_path / "a" / "b").is_dir()
    assert seen.mount is not None
    assert 0 <= seen.free_ratio <= 1
    with operations(mounts=mounts):
        assert inspect_mount(tmp_path, "node-a").mount is None
    assert re.search(r"mounts are.* /proc", capsys.readouterr().out)


@of_each(
    "case",
    [
        (errno.ESTALE, ["nfs4 server:/export on /data: stale file handle ([Errno 116]"]),
        (errno.ENOTCONN, ["nfs4 server:/export on /data: not connected ([Errno 107]"]),
        (errno.EACCES, []),
    ],
)
def test_a_network_file_system_that_is_gone_is_reported_and_one_that_is_closed_to_us_is_not(tmp_path, case):
    def statvfs(path: str) -> os.statvfs_result:
        if path == "/data":
            raise OSError(case[0], os.strerror(case[0]))
        return sizes()

    with operations(mounts=lambda: (LOCAL, NFS), statvfs=statvfs):
        broken = inspect_mount(tmp_path, "node-a").broken
    assert [message.partition("]")[0] + "]" for message in broken] == case[1]


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_server_that_never_answers_is_given_up(tmp_path, never, monkeypatch):
    monkeypatch.setattr(shared_filesystem, "ANSWER_SECONDS", 0.1)

    def statvfs(path: str) -> os.statvfs_result:
        if path == "/data":
            never.wait(30)
        return sizes()

    with operations(mounts=lambda: (LOCAL, NFS), statvfs=statvfs):
        seen = inspect_mount(tmp_path, "node-a")
    assert seen.broken == ("nfs4 server:/export on /data: no answer within 0.1 s",)
    stuck = operations(statvfs=lambda path: never.wait(30))
    with stuck, pytest.raises(EnvironmentBroken, match=r"node-a: .*answer within 0\.1 s"):
        inspect_mount(tmp_path, "node-a")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentBroken, match=r"node-a: .*below cannot.*: .*Not a directory"):
        inspect_mount(tmp_path / "file" / "below", "node-a")


def test_many_mounts_of_one_server_that_is_gone_are_waited_for_at_once(tmp_path, never, monkeypatch):
    monkeypatch.setattr(shared_filesystem, "ANSWER_SECONDS", 0.5)

    def statvfs(path: str) -> os.statvfs_result:
        if path.startswith("/data"):
            never.wait(60)
        return sizes()

    many = tuple(replace(NFS, point=f"/data/{index}") for index in range(40))
    begin = time.monotonic()
    with operations(mounts=lambda: many, statvfs=statvfs):
        seen = inspect_mount(tmp_path, "node-a")
    assert len(seen.broken) == 40
    assert time.monotonic() - begin < 15, "one after the other they take 20 s"


def test_a_folder_that_is_not_shared_is_reported_with_what_it_is_and_what_to_do() -> None:
    text = not_shared_message([HERE, replace(HERE, host="node-b", mount=LOCAL)])
    assert "- node-a: nfs4 server:/export on /data\n" in text
    assert "- node-b: ext4 /dev/vda1 on /" in text
    assert "--gpucluster-scratch FOLDER" in text


def on(*mounts: Mount | None) -> list[MountInfo]:
    return [replace(HERE, host=f"node-{'abcd'[index]}", mount=mount) for index, mount in enumerate(mounts)]


def test_the_same_everywhere_passes_and_another_address_of_the_server_too() -> None:
    require_same_mounts(FOLDER, on(NFS, NFS, NFS))
    require_same_mounts(FOLDER, on(NFS, NFS, replace(NFS, source="10.0.0.2:/export")))


READ_ONLY = replace(NFS, options=("ro",))


@of_each(
    "case",
    [
        (on(NFS, LOCAL, NFS), "/data/run: ext4 on node-b, where 2 of 3 hosts have nfs4"),
        (on(NFS, NFS, None), "/data/run: unknown on node-c, where 2 of 3 hosts have nfs4"),
        (on(NFS, READ_ONLY, NFS), "/data/run: read only on node-b, where 2 of 3"),
        (on(READ_ONLY), "/data/run is mounted read only on node-a"),
        ([HERE, replace(HERE, host="node-b", broken=("nfs4 x:/y on /z: stale",))], "- node-b: nfs4 x:/y on /z: stale"),
    ],
)
def test_a_node_that_differs_is_named(case: tuple[list[MountInfo], str]) -> None:
    with pytest.raises(EnvironmentBroken, match=r"systems differ") as raised:
        require_same_mounts(FOLDER, case[0])
    assert case[1] in str(raised.value)
