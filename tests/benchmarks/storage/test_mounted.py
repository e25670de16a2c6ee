"""A folder that is mounted alike everywhere passes; a node that differs, or has a dead file system, is named."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.storage.shared_filesystem import (
    MountInfo,
    MountOperations,
    inspect_mount,
    not_shared_message,
    require_same_mounts,
)
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.files import Mount

NFS = Mount(point="/data", kind="nfs4", source="server:/export", root="/", options=("rw", "vers=4.2"))
LOCAL = Mount(point="/", kind="ext4", source="/dev/vda1", root="/", options=("rw",))
FOLDER = Path("/data/run")
HERE = MountInfo(host="node-a", mount=NFS, free_ratio=0.5, free_inodes_ratio=None)


def sizes(blocks: int = 100, free: int = 40, files: int = 0, free_files: int = 0) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, blocks, free, free, files, free_files, free_files, 0, 255))


def test_a_folder_s_mount_and_free_space_are_reported(tmp_path: Path) -> None:
    components = MountOperations(mounts=lambda: (LOCAL,), statvfs=lambda path: sizes(files=1000, free_files=250))
    seen = inspect_mount(tmp_path, "node-a", components=components)
    assert seen == MountInfo(host="node-a", mount=LOCAL, free_ratio=0.4, free_inodes_ratio=0.25)
    assert (
        inspect_mount(
            tmp_path, "node-a", components=replace(components, statvfs=lambda path: sizes())
        ).free_inodes_ratio
        is None
    )


def test_this_host_s_own_folders_can_be_looked_at_and_what_is_mounted_may_be_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def mounts() -> tuple[Mount, ...]:
        raise OSError("no /proc")

    seen = inspect_mount(tmp_path / "a" / "b", "node-a")
    assert (tmp_path / "a" / "b").is_dir()
    assert seen.mount is not None
    assert 0 <= seen.free_ratio <= 1
    assert inspect_mount(tmp_path, "node-a", components=MountOperations(mounts=mounts)).mount is None
    assert re.search(r"mounts are.* /proc", capsys.readouterr().out)


@of_each(
    "case",
    [
        (errno.ESTALE, ["nfs4 server:/export on /data: stale file handle ([Errno 116]"]),
        (errno.ENOTCONN, ["nfs4 server:/export on /data: not connected ([Errno 107]"]),
        (errno.EACCES, []),
    ],
)
def test_a_network_file_system_that_is_gone_is_reported_and_one_that_is_closed_to_us_is_not(
    tmp_path: Path, case: tuple[int, list[str]]
) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        if path == "/data":
            raise OSError(case[0], os.strerror(case[0]))
        return sizes()

    broken = inspect_mount(
        tmp_path, "node-a", components=MountOperations(mounts=lambda: (LOCAL, NFS), statvfs=statvfs)
    ).broken
    assert [message.partition("]")[0] + "]" for message in broken] == case[1]


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, never: threading.Event) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        if path == "/data":
            never.wait(30)
        return sizes()

    components = MountOperations(mounts=lambda: (LOCAL, NFS), statvfs=statvfs)
    seen = inspect_mount(tmp_path, "node-a", answer_seconds=0.1, components=components)
    assert seen.broken == ("nfs4 server:/export on /data: no answer within 0.1 s",)

    def hang(path: str | Path) -> Any:
        never.wait(30)

    for stuck in (replace(components, statvfs=hang), MountOperations(make=hang)):
        with pytest.raises(EnvironmentBroken, match=r"node-a: .*answer within 0\.1 s"):
            inspect_mount(tmp_path, "node-a", answer_seconds=0.1, components=stuck)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match=r"node-a: .*none cannot.*: .*No such file"):
        inspect_mount(tmp_path / "none", "node-a", components=MountOperations(make=lambda folder: None))
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentBroken, match=r"node-a: .*below cannot.*: .*Not a directory"):
        inspect_mount(tmp_path / "file" / "below", "node-a")


def test_many_mounts_of_one_server_that_is_gone_are_waited_for_at_once(tmp_path: Path, never: threading.Event) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        if path.startswith("/data"):
            never.wait(60)
        return sizes()

    many = tuple(replace(NFS, point=f"/data/{index}") for index in range(40))
    begin = time.monotonic()
    seen = inspect_mount(
        tmp_path, "node-a", answer_seconds=0.5, components=MountOperations(mounts=lambda: many, statvfs=statvfs)
    )
    assert len(seen.broken) == 40
    assert time.monotonic() - begin < 15, "one after the other they take 20 s"


def test_a_folder_that_is_not_shared_is_reported_with_what_it_is_and_what_to_do() -> None:
    text = not_shared_message([HERE, replace(HERE, host="node-b", mount=LOCAL)])
    assert "- node-a: nfs4 server:/export on /data\n" in text
    assert "- node-b: ext4 /dev/vda1 on /" in text
    assert "--gpucluster-scratch FOLDER" in text


def on(*mounts: Mount | None) -> list[MountInfo]:
    return [replace(HERE, host=f"node-{'abcd'[index]}", mount=mount) for index, mount in enumerate(mounts)]


def test_the_same_everywhere_passes_and_another_address_of_the_server_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    require_same_mounts(FOLDER, on(NFS, NFS, NFS))
    assert capsys.readouterr().out == ""
    require_same_mounts(FOLDER, on(NFS, NFS, replace(NFS, source="10.0.0.2:/export")))
    assert "10.0.0.2:/export on /data on node-c, where 2 of 3 hosts have nfs4 server:/export" in capsys.readouterr().out


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
