"""The acceptance suite as pytest collects it: paths, words that -k and -m can select by, criteria."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from doc_pages import ROOT

_COLLECT_SECONDS = 240
_PLUGIN = """\
import json, os
from _pytest.mark import KeywordMatcher

def pytest_collection_modifyitems(items):
    told = [
        {
            "id": item.nodeid,
            "words": sorted(KeywordMatcher.from_item(item)._names),
            "markers": sorted({mark.name for mark in item.iter_markers()}),
            "criteria": [str(mark.args[0]) for mark in item.iter_markers("criterion")],
        }
        for item in items
    ]
    with open(os.environ["DOCS_TOLD"], "w", encoding="utf-8") as file:
        json.dump(told, file)
"""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One test of the suite."""

    id: str
    words: tuple[str, ...]
    markers: tuple[str, ...]
    criteria: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file that it is in."""
        return self.id.partition("::")[0]

    @property
    def function(self) -> str:
        """The function that it is of."""
        return self.id.rpartition("::")[2].partition("[")[0]


def collect() -> tuple[Item, ...]:
    """Collect the suite in a process of its own, as for a rehearsal."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH", "SLURM_", "OMPI_", "PMIX_", "GPUCLUSTER_", "PYTEST_"))
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "docs_told.py").write_text(_PLUGIN, encoding="utf-8")
        told = Path(folder, "told.json")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "acceptance/", "--collect-only", "-q", "-p", "docs_told"),
                *("-p", "no:cacheprovider", "--gpucluster-device=cpu", f"--gpucluster-report-dir={folder}/report"),
            ],
            cwd=ROOT,
            env={**kept, "PYTHONPATH": folder, "DOCS_TOLD": str(told), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_COLLECT_SECONDS,
            check=False,
        )
        assert told.exists(), done.stdout + done.stderr
        items = json.loads(told.read_text(encoding="utf-8"))
    return tuple(
        Item(
            id=item["id"],
            words=tuple(item["words"]),
            markers=tuple(item["markers"]),
            criteria=tuple(item["criteria"]),
        )
        for item in items
    )


def within(items: Sequence[Item], paths: Sequence[str]) -> list[Item]:
    """The tests of these paths and ids; all of them, if none is named."""
    if not paths:
        return list(items)
    return [item for item in items if any(_is_within(item, path.rstrip("/")) for path in paths)]


def _is_within(item: Item, path: str) -> bool:
    return item.id == path or item.id.startswith((f"{path}::", f"{path}/", f"{path}["))
