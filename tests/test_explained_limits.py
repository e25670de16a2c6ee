"""What is explained is what decides: the explanation and the limits in force never differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster import thresholds
from pytest_gpucluster.explained_limits import demand, explain, looser
from pytest_gpucluster.limits import Thresholds, facts

LIMITS = thresholds.load()
BUSBW = "nccl.all_reduce.busbw"


def said(limits: Thresholds, metric: str = BUSBW, sku: str = "H100 SXM", **known: str) -> list[tuple[str, str]]:
    return [(entry.says, entry.why) for entry in explain(limits, metric, sku=sku, known=known)]


def load(folder: Path, text: str) -> Thresholds:
    path = folder / "mine.yaml"
    path.write_text("schema_version: 1\nskus:\n  H100 SXM:\n    limits:\n" + text)
    return thresholds.load(thresholds.shipped_path(), path)


@settings(max_examples=60, deadline=None)
@given(
    metric=st.sampled_from(sorted({limit.metric for limit in LIMITS.limits})),
    sku=st.sampled_from(sorted(LIMITS.skus)),
    nnodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    labels=st.dictionaries(
        st.sampled_from(["size", "model", "precision", "mode", "recompute", "data"]),
        st.sampled_from(["1 GB", "1 MB", "8 GB", "large", "contract", "fp32", "bf16", "alone", "both", "on", "off"]),
    ),
)
def test_the_entry_that_is_said_to_decide_is_the_one_that_decides(metric, sku, nnodes, per_node, labels):
    world = nnodes * per_node
    known = facts(world_size=world, nnodes=nnodes, labels=labels)
    found = [entry for entry in explain(LIMITS, metric, sku=sku, known=known, is_all=True) if entry.says == "decides"]
    expected = LIMITS.limit(metric, sku=sku, world_size=world, nnodes=nnodes, labels=labels)
    assert [entry.limit for entry in found] == ([] if expected is None else [expected])


def test_what_is_not_known_is_left_open():
    told = said(LIMITS, world_size="16", nnodes="2")
    assert ("decides where", "size is 1 GB or more") in told
    assert ("decides where", "size is below 1 GB") in told
    assert ("does not apply", "world_size is 16, nnodes is 2") in told
    assert not [entry for entry in told if entry[0] == "decides"]


def test_the_ranks_of_a_node_are_known_where_they_divide_evenly():
    told = said(LIMITS, world_size="24", nnodes="3", size="1 GB")
    assert [entry for entry in told if entry[0] == "decides"] == [("decides", "")]
    assert ("decides where", "local_world_size is 8") in said(LIMITS, world_size="25", nnodes="3", size="1 GB")


def test_a_measurement_without_a_label_does_not_meet_a_condition_on_it():
    entries = explain(LIMITS, BUSBW, sku="H100 SXM", known={"world_size": "16", "nnodes": "2"}, is_all=True)
    assert {entry.says for entry in entries} == {"does not apply"}
    assert any(entry.why == "there is no size" for entry in entries)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("      lora.mfu: {min: 30 %, source: mine}\n", "is in a later file"),
        (f"      {BUSBW}: {{min: 300 GB/s, source: a}}\n", "is in a later file"),
    ],
    ids=["over every SKU", "over the SKU's own"],
)
def test_an_entry_that_is_overruled_is_told_by_what(tmp_path, text, why):
    metric = text.split(":")[0].strip()
    told = said(load(tmp_path, text), metric, model="qwen2-7b", recompute="off")
    assert told[0] == ("decides", "")
    assert all(says == "is overruled" and why in reason for says, reason in told[1:] if says != "does not apply")
    assert len(told) > 1


def test_within_a_file_the_sku_and_more_conditions_come_first():
    told = said(LIMITS, "lora.tokens_per_second", model="qwen2-7b")
    assert told[0] == ("decides", "")
    assert [why for says, why in told if says == "is overruled" and "has more conditions" in why]
    ports = said(LIMITS, "fabric.active_ports", world_size="16", nnodes="2")
    assert ports[0] == ("decides", "")
    assert [why for says, why in ports if says == "is overruled" and "is the SKU's own" in why]


def test_what_is_demanded_is_told_whole():
    [limit] = [entry.limit for entry in explain(LIMITS, "matmul.tf32.tflops", sku="H100 SXM", known={})]
    assert demand(limit) == "at least 346.1 TFLOPS, each rank at least 75 % of the others' median"
    told = [demand(entry.limit) for entry in explain(LIMITS, BUSBW, sku="H100 SXM", known={})]
    assert "at least 350 GB/s, over NET/IB" in told
    assert "recorded only" in told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{min: 640 TFLOPS, min_ratio_to_median: 92.9 %, source: a}", ""),
        ("{min: 650 TFLOPS, min_ratio_to_median: 95 %, source: a}", ""),
        (
            "{min: 600 TFLOPS, source: a}",
            "min is 600 TFLOPS, not 640 TFLOPS; min_ratio_to_median is none, not 92.9 %",
        ),
        (
            "{record_only: why}",
            "it judges no more, where at least 640 TFLOPS, each rank at least 92.9 % of the others' median"
            " was demanded",
        ),
    ],
    ids=["the same", "more", "less", "nothing"],
)
def test_what_demands_less_than_before_is_said_to(tmp_path, text, expected):
    [new, old] = [
        entry.limit
        for limits in (load(tmp_path, f"      matmul.bf16.tflops: {text}\n"), LIMITS)
        for entry in explain(limits, "matmul.bf16.tflops", sku="H100 SXM", known={})
        if entry.says == "decides"
    ]
    assert looser(new, old) == expected


@pytest.mark.parametrize(("transport", "less"), [("NET/IB", ""), ("[NET/IB, NET/Socket]", "other"), ("", "any")])
def test_more_transports_or_a_higher_maximum_demand_less(tmp_path, transport, less):
    expect = f", expect_transport: {transport}" if transport else ""
    when = "{world_size: 16, nnodes: 2, size: 1 GB or more}"
    mine = load(tmp_path, f"      {BUSBW}: {{when: {when}, min: 350 GB/s{expect}, source: a}}\n")
    new, old = (
        limits.limit(BUSBW, sku="H100 SXM", world_size=16, nnodes=2, labels={"size": "1 GB"})
        for limits in (mine, LIMITS)
    )
    assert new is not None
    assert old is not None
    assert (less in looser(new, old)) if less else looser(new, old) == ""
    higher = load(tmp_path, "      ddp.loss_error: {max: 1 ratio, source: a}\n")
    new, old = (
        limits.limit("ddp.loss_error", sku="H100 SXM", world_size=1, nnodes=1, labels={}) for limits in (higher, LIMITS)
    )
    assert new is not None
    assert old is not None
    assert looser(new, old) == "max is 1 ratio, not 0.00001 ratio"
