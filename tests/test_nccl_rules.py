from __future__ import annotations

import re
from pathlib import Path

from pytest_gpucluster.nccl_rules import RULES


def test_every_rule_says_what_it_is_about_and_has_a_source() -> None:
    for name, rule in RULES.items():
        assert (rule.name, bool(rule.does), bool(rule.source), bool(rule.remedy)) == (name, True, True, True)


def test_the_page_for_operators_has_every_rule_in_its_words() -> None:
    page = (Path(__file__).parent.parent / "docs" / "fabric.md").read_text(encoding="utf-8")
    rows = {name: row for row in page.splitlines() if (name := re.match(r"\| `([A-Z0-9_]+)` \|", row))}
    documented = {name[1]: row for name, row in rows.items()}
    assert set(documented) == set(RULES)
    for name, rule in RULES.items():
        assert rule.does in documented[name], name
