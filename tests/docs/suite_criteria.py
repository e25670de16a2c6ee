"""The criteria of acceptance/, read from its source: known before anything is collected."""

from __future__ import annotations

import ast
from pathlib import Path

SUITE_FOLDER = Path(__file__).parent.parent.parent / "acceptance"


def read() -> dict[str, dict[str, str]]:
    """File -> test -> its criterion."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(SUITE_FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.criterion":
                        found.setdefault(f"acceptance/{path.name}", {})[node.name] = ast.literal_eval(mark.args[0])
    return found


SUITE = read()
CRITERIA = sorted({criterion for tests in SUITE.values() for criterion in tests.values()})
