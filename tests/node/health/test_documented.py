"""The page for operators lists every finding, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_gpucluster.node.health.checks import FINDINGS

PAGE = Path(__file__).parents[3] / "docs" / "single-node.md"


def test_every_finding_is_documented_with_its_kind_and_none_is_invented() -> None:
    _, _, table = PAGE.read_text(encoding="utf-8").partition("| finding | kind | raised when |")
    rows = [line.split("|")[1:3] for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    documented = {code: kinds for names, kinds in rows for code in re.findall(r"`(\w+)`", names)}
    assert set(documented) == set(FINDINGS)
    for code, (kind, _, _) in FINDINGS.items():
        assert kind in documented[code], code
