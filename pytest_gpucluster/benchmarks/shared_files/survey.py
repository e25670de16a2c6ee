"""All nodes look at one shared folder together."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pytest_gpucluster.benchmarks.checkpoint import shared_folder
from pytest_gpucluster.benchmarks.checkpoint.shared_folder import make_own, wait_for
from pytest_gpucluster.benchmarks.checkpoint.together import first, together
from pytest_gpucluster.benchmarks.shared_files import mounted, renames, small_files, visibility
from pytest_gpucluster.benchmarks.shared_files.mounted import Mounted
from pytest_gpucluster.benchmarks.shared_files.renames import Reads
from pytest_gpucluster.benchmarks.shared_files.visibility import Seen
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

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
    return 5 * shared_folder.SEEN_SECONDS + renames.longest_seconds(replaced) + 0.2 * small


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
        first(self._group, lambda: mounted.require_alike(self._folder, seen_mounts))
        folder = Path(first(self._group, lambda: str(make_own(self._folder))))
        together(self._group, lambda: self._find(folder, seen_mounts))
        seen = Seen(files=0, right=0, slowest_seconds=0.0)
        for turn in range(len(visibility.ROUNDS)):
            # All have read before anybody writes over it.
            together(self._group, lambda turn=turn: self._write(folder, turn, file_bytes))  # type: ignore[misc]
            found = together(self._group, lambda turn=turn: self._read(folder, turn, file_bytes))  # type: ignore[misc]
            seen += found[dist.get_rank(self._group)] or seen
        path = folder / _RENAMED
        first(self._group, lambda: renames.put(path, 0))
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
        return mounted.look(self._folder, self._host)

    def _find(self, folder: Path, mounts: list[Mounted]) -> None:
        """Wait for the folder that the first rank has made; where it does not come, say what is mounted where."""
        if not self._looks:
            return
        try:
            wait_for(folder)
        except EnvironmentBroken as error:
            raise EnvironmentBroken(f"{self._host}: {error}\n{mounted.not_shared(mounts)}") from None

    def _write(self, folder: Path, turn: int, file_bytes: int) -> None:
        if self._looks:
            content = visibility.content_of(self._node, turn, file_bytes)
            visibility.PIECES.write(visibility.path_of(folder, self._node), content)

    def _read(self, folder: Path, turn: int, file_bytes: int) -> Seen | None:
        if not self._looks:
            return None
        others = visibility.others_of(self._node, self._count)
        return visibility.look_for(folder, others, turn=turn, size_bytes=file_bytes, hosts=self._hosts)

    def _replace(self, path: Path, replaced: int) -> Reads | None:
        if not self._looks:
            return None
        return renames.replace_and_read(path, replaced, writes=self._node == 0)

    def _small(self, folder: Path, small: int) -> float | None:
        return small_files.rate(folder / f"small-{self._node:05d}", small) if self._looks else None
