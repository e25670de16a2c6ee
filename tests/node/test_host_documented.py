"""docs/discovery.md lists every finding and figure of a host, and no other."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.node import host_checks

PAGE = (Path(__file__).parents[2] / "docs" / "discovery.md").read_text(encoding="utf-8")


def first_cells(header: str) -> set[str]:
    """The names in the first column of the table whose header begins so."""
    rows = PAGE[PAGE.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}


def test_every_finding_is_documented() -> None:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(host_checks))) if isinstance(node, ast.Call)]
    named = {call: getattr(call.func, "id", "") for call in calls}
    kinds = ("finding", "note", "environment")
    codes = {call.args[name == "finding"].value for call, name in named.items() if name in kinds}
    assert len(codes) >= 6
    assert first_cells("host finding") | {"affinity"} == codes


def test_every_figure_is_documented() -> None:
    assert first_cells("metric") == {name for name in measurement.METRICS if name.startswith("host.")}
