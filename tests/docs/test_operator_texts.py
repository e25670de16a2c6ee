"""Comparison, scope, tuning, DDP and FSDP2: what is said of this suite is so, what is said of others has a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_tables import rows
from suite_criteria import CRITERIA

ROOT = Path(__file__).parent.parent.parent
COMPARISON, SCOPE, TUNING, STRATEGIES = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("comparison", "scope", "tuning", "ddp-and-fsdp")
)
TOOLS = ("DCGM diag", "nccl-tests", "SuperBench", "ROCm/cvs", "cluster-health-scanner", "Azure NHC")
FEATURES = ["", "this suite", *TOOLS]
DISPLAYS = {
    *("MEMORY", "UTILIZATION", "ECC", "TEMPERATURE", "POWER", "CLOCK", "COMPUTE", "PIDS", "PERFORMANCE"),
    *("SUPPORTED_CLOCKS", "PAGE_RETIREMENT", "ACCOUNTING", "VOLTAGE", "ROW_REMAPPER", "RESET_STATUS"),
}
"""What nvidia-smi -d takes. Source: nvidia-smi(1), --display."""


def section(page: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, heading
    return found.group(1)


def named_criteria(text: str) -> set[str]:
    return {name for name in re.findall(r"`([a-z0-9_.]+)`", text) if name in CRITERIA}


@pytest.mark.parametrize("tool", TOOLS)
def test_each_tool_has_links_and_is_better_in_something(tool: str) -> None:
    text = section(COMPARISON, tool)
    assert re.search(r"\]\(https://[^)]+\)", text)
    better = text.partition("**Better there.**")[2].partition("**Different here.**")
    assert len(better[0].split()) > 10, "say where it is better"
    assert len(better[2].split()) > 10


def test_the_comparison_says_when_it_was_read() -> None:
    assert re.search(r"read\s+on 20\d\d-\d\d-\d\d", COMPARISON)


def test_every_feature_is_said_of_every_tool() -> None:
    told = list(rows(COMPARISON, FEATURES))
    assert len(told) > 12
    for row in told:
        assert len(row) == len(FEATURES), row
        assert all(row), row


def test_the_comparison_does_not_claim_what_this_suite_has_not() -> None:
    mine = {row[0]: row[1] for row in rows(COMPARISON, FEATURES)}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if "No GPU has been used" in readme:
        assert mine["has run on GPUs"] == "**no**"
    assert mine["inference"] == "**no**"
    assert sum("no" in said for said in mine.values()) >= 5


def test_the_page_changes_with_the_first_figure_of_a_gpu() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    measured = "Nothing has been measured on a GPU yet" not in results
    assert measured != ("no GPU has been used so far" in COMPARISON)


def test_everything_left_out_has_its_reason() -> None:
    told = list(rows(SCOPE, ["left out", "reason", "instead"]))
    assert len(told) > 10
    for row in told:
        name = re.search(r"\*\*(.+?)\*\*.*: (no|not yet)$", row[0])
        assert name, row[0]
        assert len(row[1].split()) > 3, row
    names = " ".join(row[0] for row in told)
    assert "Terraform" in names
    assert "DeepSpeed" in names


def test_tuning_leads_from_every_setting_to_a_criterion() -> None:
    told = list(rows(TUNING, ["what", "should be", "shown by", "set by"]))
    assert len(told) > 12
    for row in told:
        assert named_criteria(row[2]) or re.search(r"`(?:training\.parts|vision\.data_wait)`|^note `", row[2]), row
        anchor = re.search(r"\]\(#([\w-]+)\)", row[0])
        assert anchor, row
        headings = re.findall(r"^## (.*)$", TUNING, re.MULTILINE)
        assert anchor.group(1) in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}, row


@pytest.mark.parametrize(
    "subject", ["clocks", "power", "NUMA", "ACS", "IOMMU", "huge pages", "NCCL", "Storage", "governor", "/dev/shm"]
)
def test_tuning_has_what_an_operator_sets(subject: str) -> None:
    assert subject in TUNING


def test_the_criteria_of_strategies_are_those_of_the_suite() -> None:
    told = {row[0].strip("`") for row in rows(STRATEGIES, ["criterion", "compared", "finds"])}
    assert told == {"training.step", "ddp", "fsdp", "checkpoint"}
    assert told <= set(CRITERIA)


@pytest.mark.parametrize(
    "page", ["tuning", "troubleshooting", *(f"playbook/{name}" for name in ("single-node", "training"))]
)
def test_nvidia_smi_can_show_what_it_is_asked_for(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    asked = [name for found in re.findall(r"nvidia-smi -q -d ([A-Z_,]+)", text) for name in found.split(",")]
    assert asked
    assert set(asked) <= DISPLAYS
