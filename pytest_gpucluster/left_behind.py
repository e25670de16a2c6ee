"""What local workers had measured in tests that Ctrl-C cut short: a file each, for no report comes from them then."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.agreement.exchange import RankOutcome

NAME = "interrupted.json"
"""In the folder of this worker's artifacts. A worker is interrupted in one test at most."""


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """How far one worker came in the test that it was in. ``properties`` are of pytest's ``record_property``."""

    nodeid: str
    outcome: RankOutcome
    properties: Sequence[tuple[str, Any]] = ()

    def write(self, folder: Path) -> None:
        """Put it there, whole or not at all. Raises: OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        told = {
            "nodeid": self.nodeid,
            "rank": self.outcome.rank,
            "outcome": self.outcome.to_json(),
            # A property may be anything.
            "properties": [[name, str(value)] for name, value in self.properties],
        }
        path = folder / f".{NAME}"
        path.write_text(json.dumps(told), encoding="utf-8")
        os.replace(path, folder / NAME)


def found(artifacts: Path) -> list[LeftBehind]:
    """Return what is below the folder of all workers' artifacts, by rank. A file that cannot be read is not there: then
    nothing is known of that worker, which is no pass."""
    left = []
    for path in artifacts.glob(f"rank-*/{NAME}"):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            left.append(
                LeftBehind(
                    nodeid=told["nodeid"],
                    outcome=RankOutcome.from_json(told["rank"], told["outcome"]),
                    properties=[(name, value) for name, value in told["properties"]],
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(left, key=lambda one: one.outcome.rank)
