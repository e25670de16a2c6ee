"""The page for operators lists every finding, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest_gpucluster.node.health

FOLDER = Path(pytest_gpucluster.node.health.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "single-node.md"


def codes() -> dict[str, set[str]]:
    """Return each code that a check raises, with the kinds that are documented for it."""
    found: dict[str, set[str]] = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name in ("hardware", "environment", "note", "finding"):
                kind, code = node.args[:2] if name == "finding" else (ast.Constant(name), node.args[0])
                if isinstance(code, ast.Name):
                    continue  # of a function that passes the code on
                text = code.value if isinstance(code, ast.Constant) else ast.unparse(code)
                kinds = {part.value for part in ast.walk(kind) if isinstance(part, ast.Constant)}
                found.setdefault(str(text), set()).update(str(one) for one in kinds)
    for query in ("pcie.generation", "pcie.width"):
        found[query.replace(".", "_")] = found["query.replace('.', '_')"]
    found["xid_N"] = found["sxid_N"] = found["f'{kind}_{code}'"]
    return {code: kinds for code, kinds in found.items() if re.fullmatch(r"\w+", code)}


def test_every_finding_is_documented_with_its_kind_and_none_is_invented() -> None:
    _, _, table = PAGE.read_text(encoding="utf-8").partition("| finding | kind | raised when |")
    lines = table.partition("\n\n")[0].splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    documented = {code: kinds for names, kinds in rows for code in re.findall(r"`(\w+)`", names)}
    raised = codes()
    assert len(raised) > 30
    assert set(documented) == set(raised)
    for code, kinds in raised.items():
        for kind in kinds & {"hardware", "environment"}:
            assert kind in documented[code], code
