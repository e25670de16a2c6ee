"""The tests that an acceptance needs: the file ``criteria.txt`` in their folder, or in a folder above.

It has one test a line, as pytest names it relative to the file's folder; empty lines and lines with ``#`` are comments.

    test_hbm.py::test_hbm[copy]

A suite without the file can be run, and accepts nothing: a test that pytest never collected, by a skip of a
whole module, by a conftest or by a deleted file, would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.config.workload_loader import find
from pytest_gpucluster.errors import ThresholdsError

FILE_NAME = "criteria.txt"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The tests that an acceptance needs, by node id, and the files that list them, relative to pytest's root."""

    node_ids: tuple[str, ...]
    files: tuple[str, ...]

    def absent(self, collected: Iterable[str]) -> list[str]:
        """Return the node ids that are not among those that were collected."""
        known = set(collected)
        return [nodeid for nodeid in self.node_ids if nodeid not in known]


def read_manifest(collected: Sequence[str], root: Path) -> Manifest | None:
    """Return what an acceptance by these tests needs, or None if no folder of theirs, or above it, has such a file.

    Args:
        collected: node ids of the collected tests.
        root: pytest's root directory, to which they are relative.

    Raises:
        ThresholdsError: a file cannot be read, or has a line that names no test, or one twice; lists all such lines.
    """
    folders = sorted({(root / nodeid.partition("::")[0]).parent for nodeid in collected})
    files = list(dict.fromkeys(path for folder in folders if (path := find(folder, root, FILE_NAME)) is not None))
    if not files:
        return None
    node_ids = [nodeid for path in files for nodeid in _tests_of(path, root)]
    return Manifest(node_ids=tuple(node_ids), files=tuple(_relative(path, root) for path in files))


def _tests_of(path: Path, root: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ThresholdsError(f"{path}: cannot be read: {error}") from None
    folder, found, complaints = _relative(path.parent, root), list[str](), []
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        nodeid = name if folder == "." else f"{folder}/{name}"
        if not name.partition("::")[2]:
            complaints.append(f"{path}:{number}: {name!r} is no test; write one as 'test_hbm.py::test_hbm[copy]'")
        elif nodeid in found:
            complaints.append(f"{path}:{number}: {name!r} is named twice; leave it out here")
        found.append(nodeid)
    if not found:
        complaints.append(f"{path}: names no test; write one a line, as 'test_hbm.py::test_hbm[copy]'")
    if complaints:
        raise ThresholdsError("\n".join(complaints))
    return found


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
