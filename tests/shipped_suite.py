"""The acceptance suite as pytest collects it: its tests, and what options select of them. One process for all of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sessions

ROOT = Path(__file__).parent.parent
OPTIONS = (
    "",
    "-k lora",
    "-k scaling",
    "-k ddp",
    "-k fsdp",
    "-k checkpoint",
    "-k vision",
    "-k nccl",
    "-m nccl",
    "-m single_gpu",
)
_COLLECT = """
import json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        self.items = [
            {"id": item.nodeid, "file": item.nodeid.partition("::")[0], "name": item.name,
             "markers": sorted({mark.name for mark in item.iter_markers()}),
             "criteria": [str(mark.args[0]) for mark in item.iter_markers("criterion")]} for item in session.items
        ]

found = {}
for options in sys.argv[1:]:
    collected = Collected()
    given = ["acceptance", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    pytest.main([*given, *options.split()], plugins=[collected])
    found[options] = collected.items
print("\\n" + json.dumps(found))
"""


@functools.cache
def _collected() -> dict[str, list[dict[str, Any]]]:
    """Collect with each of the options; torch is loaded once for all of them."""
    done = subprocess.run(
        [sys.executable, "-c", _COLLECT, *OPTIONS],
        cwd=ROOT,
        env=sessions.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def shipped_tests() -> list[SimpleNamespace]:
    """Return every test in the order of a run: its id, file, name, markers and criteria."""
    return [SimpleNamespace(**told) for told in _collected()[""]]


def selected() -> dict[str, dict[str, None]]:
    """Return what each option selects, in the order of the run and without the folder; of "" the whole suite."""
    return {
        options: dict.fromkeys(told["id"].removeprefix("acceptance/") for told in tests)
        for options, tests in _collected().items()
    }
