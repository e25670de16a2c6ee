"""What a sweep leaves on disk: ``sweep.json``, ``sweep.txt`` and ``exclude.txt`` in its own folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from pytest_gpucluster.isolation.finding import node_sections
from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.sweep.outcome import Outcome
from pytest_gpucluster.sweep.table import table, verdict_line
from pytest_gpucluster.text import one_line

SCHEMA_VERSION = 1


class Evidence:
    """The folder of one sweep. ``sweep.json`` is true at every moment, also if the sweep ends right then."""

    def __init__(self, directory: Path, *, scheduler: str, command: Sequence[str], nodes: Sequence[str]) -> None:
        self.directory = directory
        self._head = {"scheduler": scheduler, "command": list(command), "nodes": list(nodes)}
        self._nodes = tuple(nodes)

    def keep(
        self,
        verdict: Verdict,
        alone: Sequence[Outcome],
        together: Outcome | None,
        *,
        why_not_together: str = "",
        finished: bool = False,
    ) -> None:
        """Replace the files by what is known now.

        Raises:
            OSError: they cannot be written.
        """
        content = {
            "schema_version": SCHEMA_VERSION,
            **self._head,
            "finished": finished,
            "verdict": verdict.word,
            "exit": verdict.exit,
            "reason": verdict.reason,
            "alone": [outcome.to_json() for outcome in alone],
            "together": together.to_json() if together else None,
            "why_not_together": why_not_together,
        }
        text = f"{table(self._nodes, alone, together, why_not_together)}\n\n{verdict_line(verdict)}\n"
        excluded = exclude_text([outcome for outcome in alone if not outcome.survived])
        _replace(self.directory / "sweep.json", json.dumps(content, indent=1) + "\n")
        _replace(self.directory / "sweep.txt", text)
        if excluded:
            _replace(self.directory / "exclude.txt", excluded)


def exclude_text(failed: Sequence[Outcome]) -> str:
    """Return exclude.txt of the nodes that did not get through alone, each with why; an empty text where all did."""
    if not failed:
        return ""
    lines = ["# Nodes to leave out of the next jobs. Each did not pass alone, so no other node can be the cause."]
    lines += [f"# {outcome.node}: {one_line(f'{outcome.verdict}: {outcome.failure}', 200)}" for outcome in failed]
    return "\n".join([*lines, *node_sections([outcome.node for outcome in failed])]) + "\n"


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it is there only if it could not take the other's place
            beside.unlink(missing_ok=True)
