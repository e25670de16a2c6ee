"""docs/thresholds.md says what the reader of limits does."""

from __future__ import annotations

import re
from pathlib import Path

import doc_pages
import pytest

from pytest_gpucluster import limits, thresholds

PAGE = doc_pages.page_named("docs/thresholds.md")
EXAMPLE, NEW_SKU = PAGE.blocks_of("yaml")


@pytest.fixture
def loaded(tmp_path: Path) -> limits.Thresholds:
    file = tmp_path / EXAMPLE.file
    file.write_text(EXAMPLE.text, encoding="utf-8")
    return thresholds.load(thresholds.shipped_path(), file)


def test_every_key_of_an_entry_has_a_row():
    table = PAGE.text.partition("| key | meaning |")[2].partition("\n\n")[0]
    told = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted(thresholds.ENTRY_KEYS)


def test_every_condition_is_named():
    paragraph = PAGE.text.partition("**Conditions**")[2].partition("\n\n")[0]
    told = set(re.findall(r"`(\w+)`", paragraph)) - {"when"}
    assert told == {*limits.TOPOLOGY, *limits.KNOWN_LABELS}


@pytest.mark.parametrize(
    ("metric", "facts", "expected"),
    [
        ("clock.skew", {"world_size": 16, "nnodes": 2}, 20.0),
        ("matmul.bf16.tflops", {"world_size": 1, "nnodes": 1}, 720.0),
        ("nccl.all_reduce.busbw", {"world_size": 8, "nnodes": 1, "labels": {"size": "1 GB"}}, 430.0),
        ("nccl.all_reduce.busbw", {"world_size": 16, "nnodes": 2, "labels": {"size": "2 GB"}}, 380.0),
        # where the file has no entry that applies, the shipped one stands
        ("nccl.all_reduce.busbw", {"world_size": 4, "nnodes": 1, "labels": {"size": "1 GB"}}, 315.0),
    ],
)
def test_the_example_decides_as_it_says(loaded, metric, facts, expected):
    found = loaded.limit(metric, sku="H100 SXM", labels=facts.pop("labels", {}), **facts)
    assert found is not None
    assert expected in (found.min, found.max)


RULES = {
    "a later file before the shipped one, also for every SKU": (
        "every_sku: {limits: {hbm.copy.bandwidth: {min: 1 TB/s, source: x}}}",
        None,  # a metric with a peak stands by SKU: refused
    ),
    "the SKU's own before every SKU": (
        "every_sku: {limits: {clock.skew: {when: {nnodes: 2, world_size: 16}, max: 1 ms, source: x}}}\n"
        "skus: {H100 SXM: {limits: {clock.skew: {max: 2 ms, source: x}}}}",
        2.0,
    ),
    "more conditions first": (
        "every_sku: {limits: {clock.skew: [{when: {nnodes: 2}, max: 1 ms, source: x},"
        " {when: {nnodes: 2, world_size: 16}, max: 3 ms, source: x}]}}",
        3.0,
    ),
    "more exact ones first": (
        "every_sku: {limits: {clock.skew: [{when: {nnodes: 2 or more}, max: 1 ms, source: x},"
        " {when: {nnodes: 2}, max: 4 ms, source: x}]}}",
        4.0,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_order_in_which_entries_decide_is_the_page_s(rule, tmp_path):
    text, expected = RULES[rule]
    file = tmp_path / "mine.yaml"
    file.write_text(f"schema_version: 1\n{text}\n", encoding="utf-8")
    if expected is None:
        with pytest.raises(thresholds.ThresholdsError, match="its limits stand under skus, by SKU"):
            thresholds.load(thresholds.shipped_path(), file)
        return
    loaded = thresholds.load(thresholds.shipped_path(), file)
    found = loaded.limit("clock.skew", sku="H100 SXM", world_size=16, nnodes=2, labels={})
    assert found is not None
    assert found.max == expected


def test_two_entries_that_could_both_decide_are_a_fault(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "schema_version: 1\nevery_sku: {limits: {clock.skew: [{when: {nnodes: 2}, max: 1 ms, source: x},"
        " {when: {world_size: 16}, max: 3 ms, source: x}]}}\n"
    )
    with pytest.raises(thresholds.ThresholdsError, match="can both apply"):
        thresholds.load(thresholds.shipped_path(), file)


def test_the_kinds_of_sources_are_those_of_the_shipped_file():
    shipped = thresholds.shipped_path().read_text(encoding="utf-8")
    for beginning in ("derived: 0.70 of peak", "0.90 of ", "acceptance of ", "this suite's rule"):
        assert f"`{beginning}" in PAGE.text
        assert beginning in shipped
