"""The survey of a shared file system: mounts, visibility, renames, and the rate of small files.

One rank of each node inspects the folder: what it is mounted from, whether the host's network file systems answer at
all, and how fast many small files are made, found and removed, as by an import or a data set of single files.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from pytest_gpucluster import files
from pytest_gpucluster.benchmarks.storage import checkpoint, consistency
from pytest_gpucluster.benchmarks.storage.checkpoint import first, make_own, together, wait_for
from pytest_gpucluster.benchmarks.storage.consistency import Reads, Seen
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.files import Mount
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

ANSWER_SECONDS = 10.0
"""So long a file system may take to tell its size."""
_GONE = {errno.ESTALE: "stale file handle", errno.EIO: "input/output error", errno.ENOTCONN: "not connected"}
"""What the kernel says of a network file system that is mounted and gone; other errors are about rights."""
T = TypeVar("T")


def make_folder(folder: Path) -> None:
    """Make a folder where it is missing. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, kw_only=True)
class MountOperations:
    """What is asked of the host. A test puts one that is broken in the place of another."""

    mounts: Callable[[], tuple[Mount, ...]] = files.read_mounts
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    make: Callable[[Path], None] = make_folder


MOUNT_OPERATIONS = MountOperations()


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """A folder as one host sees it.

    Attributes:
        host: its name.
        mount: what it is mounted from; None if the kernel does not tell.
        free_ratio: free space, of all space.
        free_inodes_ratio: free inodes, of all of them; None where the file system has no fixed number of them.
        broken: each network file system of the host that does not answer, and how it fails.
    """

    host: str
    mount: Mount | None
    free_ratio: float
    free_inodes_ratio: float | None
    broken: tuple[str, ...] = field(default=())


def inspect_mount(
    folder: Path, host: str, *, answer_seconds: float = ANSWER_SECONDS, pieces: MountOperations | None = None
) -> Mounted:
    """Look at a folder, which is made where it is missing, and at every network file system of this host.

    Raises: EnvironmentBroken if the folder itself cannot be looked at, or its file system does not answer.
    """
    ask = pieces or MOUNT_OPERATIONS
    try:
        _within(answer_seconds, lambda: ask.make(folder))
        real = _within(answer_seconds, lambda: folder.resolve(strict=True))
        told = _within(answer_seconds, lambda: ask.statvfs(str(real)))
    except (OSError, TimeoutError) as error:
        raise EnvironmentBroken(
            f"{host}: {folder} cannot be looked at: {_why(error, answer_seconds)}. Mount it again, and look at its "
            "server"
        ) from error
    try:
        found = ask.mounts()
    except OSError as error:
        print(f"{host}: what is mounted is not known: {error}")
        found = ()
    network = [mount for mount in found if mount.is_network]
    asked = [_begin(lambda mount=mount: ask.statvfs(mount.point)) for mount in network]  # type: ignore[misc]  # bound now
    # All at once: a server that is gone may have many of them.
    until = time.monotonic() + answer_seconds
    broken = []
    for mount, answer in zip(network, asked, strict=True):
        try:
            answer(max(0.0, until - time.monotonic()))
        except (OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or error.errno in _GONE:
                broken.append(f"{mount}: {_why(error, answer_seconds)}")
    return Mounted(
        host=host,
        mount=files.mount_of(real, found),
        free_ratio=told.f_bavail / told.f_blocks if told.f_blocks else 0.0,
        free_inodes_ratio=told.f_favail / told.f_files if told.f_files else None,
        broken=tuple(broken),
    )


def require_alike(folder: Path, seen: Sequence[Mounted]) -> None:
    """Make sure that a folder is on the same kind of file system on all hosts, and can be written to on each; and that
    no host has a network file system that does not answer.

    Different sources or options are printed: a server may have several addresses. What its files show, decides.

    Raises: EnvironmentBroken naming the few hosts that differ from the others, or where something is broken.
    """
    told = [f"- {one.host}: {what}" for one in seen for what in one.broken]
    texts = {
        "the type of file system": [one.mount.kind if one.mount else "unknown" for one in seen],
        "what may be done": ["read only" if one.mount and one.mount.read_only else "read and write" for one in seen],
    }
    for what, values in texts.items():
        told += [f"- {what} of {folder}: {text}" for text in _deviants(seen, values)]
    told += [
        f"- {folder} is mounted read only on {one.host}"
        for one in seen
        if one.mount and one.mount.read_only and all(other.mount and other.mount.read_only for other in seen)
    ]
    sources = [str(one.mount) for one in seen]
    for text in _deviants(seen, sources):
        print(f"{folder} is mounted differently: {text}")
    if told:
        raise EnvironmentBroken(
            "\n".join(
                [
                    "file systems differ between the nodes, or do not answer:",
                    *told,
                    "what to do: compare `findmnt` on the named hosts with the others, and mount again what is gone "
                    "(`umount -f -l`, then `mount`)",
                ]
            )
        )


def not_shared(seen: Sequence[Mounted]) -> str:
    """Return what an operator should hear where a folder is not the same one on all hosts."""
    lines = []
    for one in seen:
        local = one.mount is not None and not one.mount.is_network
        lines.append(f"- {one.host}: {one.mount or 'unknown'}{', which is no network file system' if local else ''}")
    return "\n".join(
        [
            "what it is mounted from:",
            *lines,
            "what to do: pass a folder on a file system that all nodes share (--gpucluster-scratch FOLDER; without it "
            "the run's own folder is used). A cluster that has none does not meet this criterion; to judge all the "
            "rest of it, leave the file out (--deselect acceptance/test_shared_filesystem.py), and the verdict is that "
            "of a selection",
        ]
    )


def _deviants(seen: Sequence[Mounted], values: Sequence[str]) -> list[str]:
    """Return "value on hosts" for each value but the commonest one. Of two equally common ones the first counts."""
    counted = Counter(values)
    [(usual, number)] = counted.most_common(1)
    found = []
    for value in dict.fromkeys(values):
        if value != usual:
            hosts = ", ".join(one.host for one, its in zip(seen, values, strict=True) if its == value)
            found.append(f"{value} on {hosts}, where {number} of {len(seen)} hosts have {usual}")
    return found


def _why(error: BaseException, answer_seconds: float) -> str:
    if isinstance(error, TimeoutError) and getattr(error, "errno", None) is None:
        return f"no answer within {answer_seconds:g} s"
    known = _GONE.get(getattr(error, "errno", None) or 0, "")
    return f"{known} ({error})" if known else str(error)


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Ask the kernel something, and wait so long for the answer.

    Raises: TimeoutError without an errno, or the OSError that the kernel gave.
    """
    return _begin(ask)(seconds)


def _begin(ask: Callable[[], T]) -> Callable[[float], T]:
    """Ask the kernel something in a thread: a file system whose server is gone never answers, nor can it be stopped.

    Returns: what waits so long for the answer, as :func:`_within`.
    """
    came: list[T] = []
    failed: list[OSError] = []

    def run() -> None:
        try:
            came.append(ask())
        except OSError as error:  # raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="gpucluster-statvfs", daemon=True)
    thread.start()

    def wait(seconds: float) -> T:
        thread.join(seconds)
        if failed:
            raise failed[0]
        if not came:
            raise TimeoutError
        return came[0]

    return wait


FILE_BYTES = 4096


def make_file(path: Path, content: bytes) -> None:
    """Make a file. Raises: OSError."""
    path.write_bytes(content)


@dataclass(frozen=True, kw_only=True)
class FileOperations:
    """What is done to the files. A test puts one that is broken in the place of another."""

    make: Callable[[Path, bytes], None] = make_file
    read: Callable[[Path], bytes] = Path.read_bytes


FILE_OPERATIONS = FileOperations()


def small_files_per_second(folder: Path, count: int, *, pieces: FileOperations | None = None) -> float:
    """Make files of 4 KiB in a folder, list them, read each and remove all of them; return files a second.

    Args:
        folder: a new one is made here, and removed at the end.
        count: of the files.
        pieces: by default ``FILE_OPERATIONS`` of this module.

    Raises:
        WrongResult: a file is not as it was written, or the list is not complete.
        OSError: the file system fails.
    """
    do = pieces or FILE_OPERATIONS
    folder.mkdir()
    begin = time.perf_counter()
    names = [f"{index:06d}" for index in range(count)]
    for name in names:
        do.make(folder / name, _content(name))
    listed = sorted(path.name for path in folder.iterdir())
    if listed != names:
        lost = sorted(set(names) ^ set(listed))
        raise WrongResult(f"{folder}: {len(lost)} of {count} files are listed wrongly, the first of them is {lost[0]}")
    for name in names:
        if do.read(folder / name) != _content(name):
            raise WrongResult(f"{folder / name} is not as it was written")
    for name in names:
        (folder / name).unlink()
    seconds = time.perf_counter() - begin
    folder.rmdir()
    return count / seconds


def _content(name: str) -> bytes:
    return name.encode() * (FILE_BYTES // len(name)) + bytes(FILE_BYTES % len(name))


_RENAMED = "renamed.bin"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a node has found, and all have agreed on.

    Attributes:
        mounted: the folder as this node sees it.
        seen: of the other nodes' files.
        reads: while a file was replaced.
        small_files_per_second: while all nodes made theirs.
        path: of the file that was replaced.
        renames: how often.
    """

    mounted: Mounted
    seen: Seen
    reads: Reads
    small_files_per_second: float
    path: Path
    renames: int

    def require_sound(self, host: str) -> None:
        """Make sure that this node has seen everything as it was written.

        Raises: WrongResult: a file was torn, missing for a moment, old, or had other bytes.
        """
        self.seen.require_right(host)
        self.reads.require_whole(host, self.path, self.renames)


def survey(
    group: dist.ProcessGroup,
    folder: Path,
    *,
    nodes: Sequence[int],
    hosts: Sequence[str],
    file_bytes: int,
    replaced: int,
    small: int,
) -> Found | None:
    """Let one rank of each node look at a folder: what it is mounted from, the files of the other nodes, a file that
    the first node replaces by renames, and many small files.

    Collective: every rank of the group must call this, with the same arguments.

    Args:
        group: all ranks.
        folder: which all nodes share. The files lie in a folder of their own there, which is removed at the end; after
            an error it stays.
        nodes: the node of each rank; the first rank of a node looks for it.
        hosts: the host of each rank.
        file_bytes: what each node writes for the others, twice.
        replaced: how often a file is replaced.
        small: files of 4 KiB that each node makes.

    Returns: what the node has found; None on the ranks that do not look.

    Raises: EnvironmentBroken on all ranks: the folder is not there on a node, differs between nodes, or fails.
    """
    try:
        with counted(MEASURING):
            return _Survey(group, folder, list(nodes), list(hosts)).run(file_bytes, replaced, small)
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group


def longest_seconds(replaced: int, small: int) -> float:
    """Return how long :func:`survey` can wait for a file system."""
    return 5 * checkpoint.SEEN_SECONDS + consistency.longest_seconds(replaced) + 0.2 * small


class _Survey:
    def __init__(self, group: dist.ProcessGroup, folder: Path, nodes: list[int], hosts: list[str]) -> None:
        self._group, self._folder = group, folder
        rank = dist.get_rank(group)
        self._host, self._count = hosts[rank], len(set(nodes))
        self._node = sorted(set(nodes)).index(nodes[rank])
        self._looks = nodes.index(nodes[rank]) == rank
        self._hosts = {sorted(set(nodes)).index(node): host for node, host in zip(nodes, hosts, strict=True)}

    def run(self, file_bytes: int, replaced: int, small: int) -> Found | None:
        seen_mounts = [one for one in together(self._group, self._look) if one is not None]
        first(self._group, lambda: require_alike(self._folder, seen_mounts))
        folder = Path(first(self._group, lambda: str(make_own(self._folder))))
        together(self._group, lambda: self._find(folder, seen_mounts))
        seen = Seen(files=0, right=0, slowest_seconds=0.0)
        for turn in range(len(consistency.ROUNDS)):
            # All have read before anybody writes over it.
            together(self._group, lambda turn=turn: self._write(folder, turn, file_bytes))  # type: ignore[misc]
            found = together(self._group, lambda turn=turn: self._read(folder, turn, file_bytes))  # type: ignore[misc]
            seen += found[dist.get_rank(self._group)] or seen
        path = folder / _RENAMED
        first(self._group, lambda: consistency.put_version(path, 0))
        together(self._group, lambda: wait_for(path) if self._looks else None)
        reads = together(self._group, lambda: self._replace(path, replaced))[dist.get_rank(self._group)]
        rates = together(self._group, lambda: self._small(folder, small))
        first(self._group, lambda: shutil.rmtree(folder))
        if not self._looks or reads is None:
            return None
        return Found(
            mounted=next(one for one in seen_mounts if one.host == self._host),
            seen=seen,
            reads=reads,
            small_files_per_second=rates[dist.get_rank(self._group)] or 0.0,
            path=path,
            renames=replaced,
        )

    def _look(self) -> Mounted | None:
        if not self._looks:
            return None
        return inspect_mount(self._folder, self._host)

    def _find(self, folder: Path, mounts: list[Mounted]) -> None:
        """Wait for the folder that the first rank has made; where it does not come, say what is mounted where."""
        if not self._looks:
            return
        try:
            wait_for(folder)
        except EnvironmentBroken as error:
            raise EnvironmentBroken(f"{self._host}: {error}\n{not_shared(mounts)}") from None

    def _write(self, folder: Path, turn: int, file_bytes: int) -> None:
        if self._looks:
            content = consistency.turn_content(self._node, turn, file_bytes)
            consistency.VISIBILITY_OPERATIONS.write(consistency.path_of(folder, self._node), content)

    def _read(self, folder: Path, turn: int, file_bytes: int) -> Seen | None:
        if not self._looks:
            return None
        others = consistency.others_of(self._node, self._count)
        return consistency.look_for(folder, others, turn=turn, size_bytes=file_bytes, hosts=self._hosts)

    def _replace(self, path: Path, replaced: int) -> Reads | None:
        if not self._looks:
            return None
        return consistency.replace_and_read(path, replaced, writes=self._node == 0)

    def _small(self, folder: Path, small: int) -> float | None:
        return small_files_per_second(folder / f"small-{self._node:05d}", small) if self._looks else None
