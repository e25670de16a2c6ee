"""What is explained is what decides: the explanation and the limits in force never differ."""

import pytest
from complaints import in_order
from each import of_each
from hypothesis import given, settings
from hypothesis import strategies as st
from verdicts import SHIPPED

from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.limits import explain, facts, looser

BUSBW = "nccl.all_reduce.busbw"


def effects(limits, metric=BUSBW, sku="H100 SXM", **known):
    return [(entry.effect, entry.why) for entry in explain(limits, metric, sku=sku, known=known)]


def load(folder, text):
    path = folder / "mine.yaml"
    path.write_text("schema_version: 1\nskus:\n  H100 SXM:\n    limits:\n" + text)
    return loader.load(loader.shipped_path(), path)


@settings(max_examples=60, deadline=None)
@given(
    metric=st.sampled_from(sorted({limit.metric for limit in SHIPPED.limits})),
    sku=st.sampled_from(sorted(SHIPPED.skus)),
    nnodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    labels=st.dictionaries(
        st.sampled_from(["size", "model", "precision", "mode", "recompute", "data"]),
        st.sampled_from(["1 GB", "1 MB", "8 GB", "large", "contract", "fp32", "bf16", "alone", "both", "on", "off"]),
    ),
)
def test_the_entry_that_is_explained_to_decide_is_the_one_that_decides(metric, sku, nnodes, per_node, labels):
    world = nnodes * per_node
    known = facts(world_size=world, nnodes=nnodes, labels=labels)
    found = [entry for entry in explain(SHIPPED, metric, sku=sku, known=known) if entry.effect == "decides"]
    expected = SHIPPED.limit(metric, sku=sku, world_size=world, nnodes=nnodes, labels=labels)
    assert [entry.limit for entry in found] == ([] if expected is None else [expected])


def test_what_is_not_known_is_left_open():
    found = effects(SHIPPED, world_size="16", nnodes="2")
    assert ("decides where", "size is 1 GB or more") in found
    assert ("decides where", "size is below 1 GB") in found
    assert ("does not apply", "world_size is 16, nnodes is 2") in found
    assert not [entry for entry in found if entry[0] == "decides"]


def test_within_a_file_the_sku_and_more_conditions_come_first():
    found = effects(SHIPPED, "lora.tokens_per_second", model="qwen2-7b")
    assert found[0] == ("decides", "")
    assert [why for effect, why in found if effect == "is overruled" and "has more conditions" in why]
    ports = effects(SHIPPED, "fabric.active_ports", world_size="16", nnodes="2")
    assert ports[0] == ("decides", "")
    assert [why for says, why in ports if says == "is overruled" and "is the SKU's own" in why]


@pytest.mark.parametrize("metric", ["lora.mfu", BUSBW], ids=["over every SKU", "over the SKU's own"])
def test_an_entry_that_is_overruled_names_what_overrules_it(tmp_path, metric):
    floor = "30 %" if metric == "lora.mfu" else "300 GB/s"
    mine = load(tmp_path, f"      {metric}: {{min: {floor}, source: mine}}\n")
    first, *others = effects(mine, metric, model="qwen2-7b", recompute="off")
    reasons = [why for says, why in others if says != "does not apply"]
    assert first == ("decides", "")
    assert reasons
    assert all("later file" in why for why in reasons)


ACROSS = "{when: {world_size: 16, nnodes: 2, size: 1 GB or more}, min: 415 GB/s, %ssource: a}"


@of_each(
    "case",
    [
        ("matmul.bf16.tflops", "{min: 640 TFLOPS, min_ratio_to_median: 92.9 %, source: a}", ""),
        ("matmul.bf16.tflops", "{min: 650 TFLOPS, min_ratio_to_median: 95 %, source: a}", ""),
        ("matmul.bf16.tflops", "{min: 650 TFLOPS, source: a}", ""),  # the ratio stays
        ("matmul.bf16.tflops", "{min: 600 TFLOPS, source: a}", "600 640 TFLOPS"),
        (
            "matmul.bf16.tflops",
            "{min: 600 TFLOPS, min_ratio_to_median: none, source: a}",
            "600 640 TFLOPS min_ratio_to_median 92.9 %",
        ),
        ("matmul.bf16.tflops", "{record_only: why}", "640 TFLOPS 92.9 %"),
        ("ddp.loss_error", "{max: 1 ratio, source: a}", "max 1 0.00001 ratio"),
        (BUSBW, ACROSS % "expect_transport: NET/IB, ", ""),
        (BUSBW, ACROSS % "expect_transport: [NET/IB, NET/Socket], ", "other"),
        (BUSBW, ACROSS % "", "any"),
    ],
)
def test_what_demands_less_than_before_is_reported(case, tmp_path):
    metric, text, less = case
    labels = {"size": "1 GB"} if metric == BUSBW else {}
    new, old = (
        limits.limit(metric, sku="H100 SXM", world_size=16, nnodes=2, labels=labels)
        for limits in (load(tmp_path, f"      {metric}: {text}\n"), SHIPPED)
    )
    assert bool(looser(new, old, new.unit)) == bool(less)
    assert in_order(looser(new, old, new.unit), less)
