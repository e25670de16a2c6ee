"""The playbook has every criterion of the suite, with the figures in force, and quotes what the suite really says."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from page_tables import cells, rows
from said_messages import ELLIPSIS, is_said
from suite_criteria import CRITERIA, SUITE
from suite_names import Item

from pytest_gpucluster import thresholds, units
from pytest_gpucluster.metric_catalogue import CATALOGUE

ROOT = Path(__file__).parent.parent.parent
PHASES = ("discovery", "single-node", "fabric", "training", "scaling", "lora")
PAGES = {name: (ROOT / "docs" / "playbook" / f"{name}.md").read_text(encoding="utf-8") for name in PHASES}
OVERVIEW = (ROOT / "docs" / "playbook.md").read_text(encoding="utf-8")
HEADER = ["you see", "look at", "command", "what to do", "call"]
WHO = {"you", "systems", "network", "storage", "scheduler", "vendor", "ML"}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpucluster_expected", ROOT / "docs" / "expected.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EXPECTED = load_generator()
LIMITS = thresholds.load(thresholds.shipped_path())


def sections(page: str) -> dict[str, str]:
    """Criterion -> what a page says of it."""
    parts = re.split(r"^## `([^`]+)`$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SECTIONS: Mapping[str, str] = {name: text for page in PAGES.values() for name, text in sections(page).items()}


def selected(page: str) -> set[str]:
    """The criteria that the run of a page selects: of its first command that runs several files."""
    [block] = [one for one in re.findall(r"```console\n(.*?)```", page, re.DOTALL) if "gpucluster-expect" in one]
    found = set()
    for word in block.replace("\\\n", " ").split():
        file, _, test = word.partition("::")
        if file in SUITE:
            found |= {criterion for name, criterion in SUITE[file].items() if not test or name == test}
    return found


def test_the_criteria_are_those_that_pytest_collects(items: Sequence[Item]) -> None:
    assert sorted({name for item in items for name in item.criteria}) == CRITERIA


def test_every_criterion_has_a_section_and_no_other_one_has() -> None:
    told = [name for page in PAGES.values() for name in sections(page)]
    assert sorted(told) == CRITERIA, "docs/playbook/: a section for each criterion of acceptance/"


@pytest.mark.parametrize("phase", PHASES)
def test_the_command_of_a_phase_runs_the_criteria_of_its_page(phase: str) -> None:
    assert selected(PAGES[phase]) >= set(sections(PAGES[phase]))
    elsewhere = {name for other in PHASES if other != phase for name in sections(PAGES[other])}
    # A file can hold tests of two phases: these run once more, and are told where they belong.
    assert selected(PAGES[phase]) <= set(sections(PAGES[phase])) | elsewhere


@pytest.mark.parametrize("phase", PHASES)
def test_the_overview_lists_the_criteria_of_each_phase(phase: str) -> None:
    [row] = [line for line in OVERVIEW.splitlines() if f"(playbook/{phase}.md)" in line and line.startswith("| [")]
    assert re.findall(r"`([^`]+)`", cells(row)[2]) == list(sections(PAGES[phase]))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_section_names_the_tests_of_its_criterion(criterion: str) -> None:
    tests = {name for file in SUITE.values() for name, of in file.items() if of == criterion}
    told = set(re.findall(r"`(test_\w+)(?:\[\w+(?:-\w+)*\])?`", SECTIONS[criterion]))
    assert tests <= told


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_section_says_what_to_do_and_whom_to_call(criterion: str) -> None:
    told = list(rows(SECTIONS[criterion], HEADER))
    assert told, f"no table with the header | {' | '.join(HEADER)} |"
    for row in told:
        assert len(row) == len(HEADER), row
        assert row[0], row
        if row[-1]:
            assert set(row[-1].split(", ")) <= WHO, row
    assert any(row[-1] for row in told)


@pytest.mark.parametrize("page", PHASES)
def test_what_a_page_quotes_the_suite_says(page: str) -> None:
    quoted = [
        message
        for section in sections(PAGES[page]).values()
        for row in rows(section, HEADER)
        for message in re.findall(r"`([^`]*)`", row[0])
        if (ELLIPSIS in message or " " in message) and not message.startswith("--")
    ]
    assert quoted
    assert [message for message in quoted if not is_said(message)] == []


@pytest.mark.parametrize("page", PHASES)
def test_the_figures_are_those_in_force(page: str) -> None:
    assert EXPECTED.with_figures(PAGES[page], LIMITS) == PAGES[page], "run `python docs/expected.py`"


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_section_has_its_figures(criterion: str) -> None:
    assert f"<!-- expected figures of {criterion}: " in SECTIONS[criterion]


def test_every_metric_stands_with_a_criterion() -> None:
    assert sorted(EXPECTED.METRICS) == CRITERIA
    told = {metric.name for criterion in CRITERIA for metric in EXPECTED.metrics_of(criterion)}
    assert told == {metric.name for metric in CATALOGUE}


def test_no_pattern_of_metrics_is_without_one() -> None:
    for criterion, patterns in EXPECTED.METRICS.items():
        known = {metric.name for metric in EXPECTED.metrics_of(criterion)}
        for pattern in patterns:
            stem = pattern.rstrip("*")
            assert any(name == stem or (pattern != stem and name.startswith(stem)) for name in known), pattern


def test_a_limit_that_has_changed_is_seen() -> None:
    changed = [
        replace(one, min=701.0) if (one.metric, one.sku) == ("matmul.bf16.tflops", "H100 SXM") else one
        for one in LIMITS.limits
    ]
    page = PAGES["single-node"]
    other = EXPECTED.with_figures(page, replace(LIMITS, limits=tuple(changed)))
    assert ">= 701 of 989" in other
    assert other != page


def test_a_source_that_has_changed_is_seen() -> None:
    [limit] = [one for one in LIMITS.limits if one.metric == "scaling.busbw_retention" and one.sku != "cpu-rehearsal"]
    changed = tuple(replace(one, source="hearsay") if one is limit else one for one in LIMITS.limits)
    assert "hearsay" in EXPECTED.figures("scaling.busbw_retention", replace(LIMITS, limits=changed))


def test_every_figure_of_every_gpu_is_in_the_playbook() -> None:
    text = "".join(PAGES.values())
    told = set(re.findall(r"(?<=[<>]= )[\d.]+(?: [^|,( ]+)?|(?<=[<>]= )[\d.]+", text))
    told |= {figure.partition(" ")[0] for figure in told}
    for limit in LIMITS.limits:
        if limit.sku != "cpu-rehearsal" and limit.record_only is None:
            assert f"`{limit.metric}`" in text, limit.metric
            for bound in (limit.min, limit.max):
                assert bound is None or {f"{bound:.6g}", units.show(bound, limit.unit)} & told, limit


def test_figures_of_what_is_no_criterion_are_refused() -> None:
    page = "<!-- expected figures of matmull: written by docs/expected.py -->\n<!-- end of expected figures -->\n"
    with pytest.raises(ValueError, match="matmull"):
        EXPECTED.with_figures(page, LIMITS)


def test_figures_without_an_end_are_refused() -> None:
    with pytest.raises(ValueError, match="have no <!-- end"):
        EXPECTED.with_figures("<!-- expected figures of matmul: written by docs/expected.py -->\n", LIMITS)


def test_the_rehearsal_s_limits_are_no_figures_to_expect() -> None:
    assert "rehearsal floor" not in "".join(PAGES.values())
