"""The survey of a shared file system: mounts, visibility, renames, and the rate of small files.

One rank of each node inspects the folder: what it is mounted from, whether the host's network file systems respond,
and how fast many small files are created, listed and removed, as by an import or a data set of single files.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from pytest_gpucluster import files
from pytest_gpucluster.benchmarks.group import on_all_ranks, on_first_rank
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.storage import checkpoint, consistency
from pytest_gpucluster.benchmarks.storage.checkpoint import make_unique_folder, wait_for
from pytest_gpucluster.benchmarks.storage.consistency import ReadCounts, Visibility
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.files import Mount
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

ANSWER_SECONDS = 10.0
"""How long a file system may take to report its size."""
_GONE = {errno.ESTALE: "stale file handle", errno.EIO: "input/output error", errno.ENOTCONN: "not connected"}
"""The kernel's errors for a mounted network file system whose server is gone; other errors are about permissions."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MountInfo:
    """A folder as one host sees it.

    Attributes:
        host: its name.
        mount: what it is mounted from; None if the kernel does not report it.
        free_ratio: free space, of all space.
        free_inodes_ratio: free inodes, of all of them; None where the file system has no fixed number of them.
        broken: each network file system of the host that does not respond, and how it fails.
    """

    host: str
    mount: Mount | None
    free_ratio: float
    free_inodes_ratio: float | None
    broken: tuple[str, ...] = ()


def inspect_mount(folder: Path, host: str) -> MountInfo:
    """Inspect a folder, which is created where it is missing, and every network file system of this host.

    Raises: EnvironmentBroken if the folder itself cannot be inspected, or its file system does not respond.
    """

    def inspect() -> tuple[Path, os.statvfs_result]:
        folder.mkdir(parents=True, exist_ok=True)
        real = folder.resolve(strict=True)
        return real, consistency.statvfs(str(real))

    try:
        real, sizes = start_call(inspect)(ANSWER_SECONDS)
    except (OSError, TimeoutError) as error:
        raise EnvironmentBroken(
            f"{host}: {folder} cannot be inspected: {_reason(error)}. Mount it again, and check its server"
        ) from error
    try:
        found = files.read_mounts()
    except OSError as error:
        print(f"{host}: the mounts are unknown: {error}")
        found = ()
    network = [mount for mount in found if mount.is_network]
    calls = [start_call(lambda mount=mount: consistency.statvfs(mount.point)) for mount in network]  # type: ignore[misc]  # bound now
    # All at once: a server that is gone may have many of them.
    until = time.monotonic() + ANSWER_SECONDS
    broken = []
    for mount, result_within in zip(network, calls, strict=True):
        try:
            result_within(max(0.0, until - time.monotonic()))
        except (OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or error.errno in _GONE:
                broken.append(f"{mount}: {_reason(error)}")
    return MountInfo(
        host=host,
        mount=files.mount_of(real, found),
        free_ratio=sizes.f_bavail / sizes.f_blocks if sizes.f_blocks else 0.0,
        free_inodes_ratio=sizes.f_favail / sizes.f_files if sizes.f_files else None,
        broken=tuple(broken),
    )


def require_same_mounts(folder: Path, mounts: Sequence[MountInfo]) -> None:
    """Check that a folder is on the same kind of file system on all hosts, and is writable on each; and that every
    network file system of the hosts responds. A server may have several addresses: sources and options may differ.

    Raises: EnvironmentBroken naming the few hosts that differ from the others, or where something is broken.
    """
    problems = [f"- {one.host}: {what}" for one in mounts for what in one.broken]
    kinds = [one.mount.kind if one.mount else "unknown" for one in mounts]
    access = ["read only" if one.mount and one.mount.read_only else "read and write" for one in mounts]
    for what, values in (("the type of file system", kinds), ("the access", access)):
        problems += [f"- {what} of {folder}: {text}" for text in _deviants(mounts, values)]
    if set(access) == {"read only"}:
        problems += [f"- {folder} is mounted read only on {one.host}" for one in mounts]
    if problems:
        listed = "\n".join(problems)
        raise EnvironmentBroken(
            f"file systems differ between the nodes, or do not respond:\n{listed}\nwhat to do: compare `findmnt` on "
            "the named hosts with the others, and mount again what is gone (`umount -f -l`, then `mount`)"
        )


def not_shared_message(mounts: Sequence[MountInfo]) -> str:
    """Return the operator's message where a folder is not the same one on all hosts."""
    local = {one.host: one.mount is not None and not one.mount.is_network for one in mounts}
    lines = "\n".join(
        f"- {one.host}: {one.mount or 'unknown'}{', which is no network file system' * local[one.host]}"
        for one in mounts
    )
    return (
        f"what it is mounted from:\n{lines}\nwhat to do: pass a folder on a file system that all nodes share "
        "(--gpucluster-scratch FOLDER; without it the run's own folder is used). A cluster that has none does not meet "
        "this criterion; to judge all the rest of it, leave the file out "
        "(--deselect acceptance/test_shared_filesystem.py), and the verdict is that of a selection"
    )


def _deviants(mounts: Sequence[MountInfo], values: Sequence[str]) -> list[str]:
    """Return "value on hosts" for each value but the most frequent one; of two equally frequent ones the first."""
    counted = Counter(values)
    [(most_frequent, number)] = counted.most_common(1)
    found = []
    for value in dict.fromkeys(values):
        if value != most_frequent:
            hosts = ", ".join(one.host for one, its in zip(mounts, values, strict=True) if its == value)
            found.append(f"{value} on {hosts}, where {number} of {len(mounts)} hosts have {most_frequent}")
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and getattr(error, "errno", None) is None:
        return f"no answer within {ANSWER_SECONDS:g} s"
    known = _GONE.get(getattr(error, "errno", None) or 0, "")
    return f"{known} ({error})" if known else str(error)


def start_call(call: Callable[[], T]) -> Callable[[float | None], T]:
    """Make a call in a thread: to a server that is gone it may never return, and cannot be stopped.

    Returns: a function that waits up to a limit for the result. It raises what the call has raised, and TimeoutError,
        without an errno, at the limit.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:  # raised again in the thread that waits
            outcome.set_exception(error)

    def wait(seconds: float | None) -> T:
        done, _ = futures_wait([outcome], seconds)
        if not done:
            raise TimeoutError(f"not over after {seconds:g} s")
        return outcome.result()

    # A daemon: a call that never ends must not keep the process alive, as a thread of an executor would.
    threading.Thread(target=run, name="gpucluster-call", daemon=True).start()
    return wait


FILE_BYTES = 4096


def small_files_per_second(folder: Path, count: int) -> float:
    """Create files of 4 KiB in a folder, list them, read each and remove all of them; return files a second.

    Args:
        folder: created here, and removed at the end.
        count: of the files.

    Raises:
        WrongResult: a file has another content, or the list is not complete.
        OSError: the file system fails.
    """
    folder.mkdir()
    begin = time.perf_counter()
    names = [f"{index:06d}" for index in range(count)]
    for name in names:
        consistency.write_small(folder / name, _content(name))
    listed = sorted(path.name for path in folder.iterdir())
    if listed != names:
        different = sorted(set(names) ^ set(listed))
        raise WrongResult(
            f"{folder}: {len(different)} of {count} files are listed wrongly, the first of them is {different[0]}"
        )
    for name in names:
        if consistency.read_small(folder / name) != _content(name):
            raise WrongResult(f"{folder / name} has another content than was written")
    for name in names:
        (folder / name).unlink()
    seconds = time.perf_counter() - begin
    folder.rmdir()
    return count / seconds


def _content(name: str) -> bytes:
    return name.encode() * (FILE_BYTES // len(name)) + bytes(FILE_BYTES % len(name))


_RENAMED = "renamed.bin"

Survey = tuple[MountInfo, Visibility, ReadCounts, float]
"""A node's result: the folder as it sees it, what it has read of the other nodes' files, its reads while a file was
replaced, and small files a second while all nodes made theirs."""


@releases_memory()
def survey(
    group: dist.ProcessGroup,
    folder: Path,
    *,
    nodes: Sequence[int],
    hosts: Sequence[str],
    file_bytes: int,
    replaced: int,
    small: int,
) -> Survey | None:
    """Inspect a folder from one rank of each node: its mount, the files of the other nodes, a file that the first node
    replaces by renames, and many small files.

    Collective: every rank of the group must call this, with the same arguments.

    Args:
        group: all ranks.
        folder: shared by all nodes. The files lie in a new folder there, which is removed at the end; after an error it
            stays.
        nodes: the node of each rank; the first rank of a node inspects for it.
        hosts: the host of each rank.
        file_bytes: what each node writes for the others, twice.
        replaced: how often a file is replaced.
        small: number of files of 4 KiB that each node creates.

    Returns: the node's result; None on the ranks that do not inspect.

    Raises: EnvironmentBroken on all ranks: the folder is missing on a node, differs between nodes, or fails.
    """
    with counted(MEASURING):
        return _Survey(group, folder, nodes, hosts).run(file_bytes, replaced, small)


def longest_seconds(replaced: int, small: int) -> float:
    """Return how long :func:`survey` can wait for a file system."""
    return 5 * checkpoint.VISIBILITY_SECONDS + consistency.longest_seconds(replaced) + 0.2 * small


class _Survey:
    def __init__(self, group: dist.ProcessGroup, folder: Path, nodes: Sequence[int], hosts: Sequence[str]) -> None:
        self._group, self._folder, self._rank, numbers = group, folder, dist.get_rank(group), sorted(set(nodes))
        self._host, self._count, self._node = hosts[self._rank], len(numbers), numbers.index(nodes[self._rank])
        self._host_of = {numbers.index(node): host for node, host in zip(nodes, hosts, strict=True)}
        self._is_leader = nodes.index(nodes[self._rank]) == self._rank

    def run(self, file_bytes: int, replaced: int, small: int) -> Survey | None:
        mounts = [one for one in self._on_nodes(lambda: inspect_mount(self._folder, self._host)) if one is not None]
        on_first_rank(self._group, lambda: require_same_mounts(self._folder, mounts))
        folder = Path(on_first_rank(self._group, lambda: str(make_unique_folder(self._folder))))
        self._on_nodes(lambda: self._find(folder, mounts))
        visibility = Visibility()
        for turn in range(len(consistency.ROUNDS)):
            self._exchange(visibility, folder, turn, file_bytes)
        path = folder / _RENAMED
        on_first_rank(self._group, lambda: consistency.put_version(path, 0))
        self._on_nodes(lambda: wait_for(path))
        reads = self._on_nodes(lambda: consistency.replace_and_read(path, replaced, writes=self._node == 0))[self._rank]
        rates = self._on_nodes(lambda: small_files_per_second(folder / f"small-{self._node:05d}", small))
        on_first_rank(self._group, lambda: shutil.rmtree(folder))
        rate = rates[self._rank]
        if reads is None or rate is None:
            return None
        return next(one for one in mounts if one.host == self._host), visibility, reads, rate

    def _on_nodes(self, act: Callable[[], T]) -> list[T | None]:
        """Run an action on one rank of each node; return the results in the order of the ranks, None for the others."""
        return on_all_ranks(self._group, lambda: act() if self._is_leader else None)

    def _find(self, folder: Path, mounts: list[MountInfo]) -> None:
        """Wait for the folder that the first rank has created; where it does not appear, report all mounts."""
        try:
            wait_for(folder)
        except EnvironmentBroken as error:
            raise EnvironmentBroken(f"{self._host}: {error}\n{not_shared_message(mounts)}") from None

    def _exchange(self, seen: Visibility, folder: Path, turn: int, file_bytes: int) -> None:
        """Write this node's file, and read those of other nodes. All have read before a node overwrites."""
        content = consistency.turn_content(self._node, turn, file_bytes)
        path, others = consistency.path_of(folder, self._node), consistency.nodes_to_read(self._node, self._count)
        self._on_nodes(lambda: consistency.write_probe(path, content))
        self._on_nodes(
            lambda: consistency.read_until_visible(
                seen, folder, others, turn=turn, size_bytes=file_bytes, hosts=self._host_of
            )
        )
