"""What tests of the documentation share: the acceptance suite, collected once in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sessions
from pages import ROOT

_PLUGIN = """\
import json, os

def pytest_collection_modifyitems(items):
    told = [{"id": item.nodeid, "file": item.nodeid.partition("::")[0], "name": item.name,
             "markers": sorted({mark.name for mark in item.iter_markers()}),
             "criteria": [str(mark.args[0]) for mark in item.iter_markers("criterion")]} for item in items]
    json.dump(told, open(os.environ["DOCS_TOLD"], "w", encoding="utf-8"))
"""


@pytest.fixture(scope="session")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[SimpleNamespace]:
    """Every test of the suite: its id, file, name, markers and criteria."""
    folder = tmp_path_factory.mktemp("collected")
    (folder / "docs_told.py").write_text(_PLUGIN, encoding="utf-8")
    environ = sessions.environment({"PYTHONPATH": str(folder), "DOCS_TOLD": str(folder / "told.json")})
    command = [sys.executable, "-m", "pytest", "acceptance/", "--collect-only", "-q", "-p", "docs_told", sessions.CPU]
    command += ["-p", "no:cacheprovider", f"--gpucluster-report-dir={folder}/report"]
    subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=sessions.DEADLINE_SECONDS, check=True)
    return [SimpleNamespace(**told) for told in json.loads((folder / "told.json").read_text("utf-8"))]
