"""docs/reference.md says what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from pytest_gpucluster import fixtures, metrics, options, plugin, verdict

DOCS = Path(__file__).parent.parent / "docs"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpucluster_reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


def section(title: str) -> list[str]:
    """The rows of the first table under a heading, without its header."""
    body = GENERATOR.page().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line for line in body.splitlines() if line.startswith("|")][2:]


def names(title: str) -> list[str]:
    """What stands in backticks at the beginning of each row."""
    return [match[1] for row in section(title) if (match := re.match(r"\| `([^` (]+)", row))]


def test_the_page_is_what_the_code_says() -> None:
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == GENERATOR.page(), (
        "docs/reference.md is stale; make it again: .venv/bin/python docs/reference.py"
    )


def test_every_option_is_on_the_page() -> None:
    assert names("Options") == [option.flag for option in options.OPTIONS]


def test_every_timeout_is_on_the_page_with_its_meaning() -> None:
    assert names("Timeouts") == list(options.Timeouts.__dataclass_fields__)
    assert all(row.split("|")[3].strip() for row in section("Timeouts"))


def test_every_exit_code_is_on_the_page() -> None:
    assert [int(row.split("|")[1]) for row in section("Exit codes")] == list(verdict.EXIT_CODES)


def test_every_marker_is_on_the_page() -> None:
    assert names("Markers") == [re.split(r"[(:]", marker)[0] for marker in plugin._MARKERS]


def test_every_fixture_is_on_the_page() -> None:
    public = [
        name
        for name, value in vars(fixtures).items()
        if hasattr(value, "_pytestfixturefunction") or "FixtureFunctionDefinition" in type(value).__name__
    ]
    assert names("Fixtures") == public


def test_every_metric_is_on_the_page() -> None:
    assert names("Metrics") == list(metrics.METRICS)


@pytest.mark.parametrize("title", ["Options", "Exit codes", "Markers", "Fixtures", "Metrics", "Units"])
def test_no_row_has_another_number_of_cells_than_its_header(title: str) -> None:
    header = GENERATOR.page().partition(f"## {title}\n")[2].partition("\n|")[2].partition("\n")[0]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in section(title)} == {header.count("|") + 1}
