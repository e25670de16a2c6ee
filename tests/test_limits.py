from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster import hardware, metrics
from pytest_gpucluster.errors import MeasurementError, ThresholdsError
from pytest_gpucluster.limits import Condition, Limit, Thresholds, condition, facts, peak_of

BUSBW = "nccl.all_reduce.busbw"


def ranks(low: float, high: float) -> Condition:
    return Condition(key="world_size", text=f"{low:g} to {high:g}", dimension="number", low=low, high=high)


LARGE = Condition(key="size", text="1 GB or more", dimension="amount of data", low=1e9)


def limit(source: str, *when: Condition, minimum: float = 100.0, layer: int = 0) -> Limit:
    return Limit(
        metric=BUSBW,
        sku="H100 SXM",
        unit="GB/s",
        min=minimum,
        max=None,
        source=source,
        origin="",
        when=when,
        layer=layer,
    )


def decides(limits: list[Limit], world_size: int, nnodes: int, labels: dict[str, str]) -> str | None:
    """The source of the entry that decides, wherever it stands among the others."""
    found = {
        chosen and chosen.source
        for order in (limits, limits[::-1])
        for chosen in [
            Thresholds(skus=hardware.SKUS, limits=tuple(order)).limit(
                BUSBW, sku="H100 SXM", world_size=world_size, nnodes=nnodes, labels=labels
            )
        ]
    }
    [source] = found
    return source


# Conditions ------------------------------------------------------------------------------------------------------

RANGES = st.builds(
    lambda key, form, a, b: Condition(
        key=key,
        text=f"{form} {a} {b}",
        dimension="number",
        low={"exact": a, "least": a, "below": -float("inf"), "range": min(a, b)}[form],
        high={"exact": a, "least": float("inf"), "below": a, "range": max(a, b)}[form],
        high_open=form == "below",
    ),
    st.sampled_from(["world_size", "nnodes"]),
    st.sampled_from(["exact", "least", "below", "range"]),
    st.integers(1, 9),
    st.integers(1, 9),
)


@given(RANGES, RANGES)
def test_conditions_overlap_if_and_only_if_some_fact_satisfies_both(a: Condition, b: Condition) -> None:
    # Half numbers too: the ranges are real intervals.
    facts = [str(n / 2) for n in range(-2, 24)]
    both = any(a.holds(fact) and b.holds(fact) for fact in facts)
    assert a.overlaps(b) == b.overlaps(a) == both


@given(
    st.sampled_from(["world_size", "nnodes", "size", "dtype", "bucket"]),
    st.text() | st.text(alphabet="0123456789.eE GMB/s", min_size=1).map(lambda text: f"{text} or more"),
)
def test_any_text_is_a_condition_or_an_error_that_says_what_is_allowed(key: str, text: str) -> None:
    try:
        found = condition(key, text)
    except ThresholdsError as error:
        refused = str(error)
    else:
        refused = ""
        assert (found.key, found.text) == (key, text)
        assert found.low <= found.high
    assert refused == "" or refused.startswith(f"{key} is {text!r}; ")


@pytest.mark.parametrize("text", ["1e999", "1e999 or more", "2 to 1e999"])
def test_a_count_beyond_all_numbers_is_refused(text: str) -> None:
    with pytest.raises(ThresholdsError, match="it counts in whole numbers from 1"):
        condition("world_size", text)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_range_that_is_written_holds_for_what_lies_in_it(first: int, last: int, fact: int) -> None:
    low, high = sorted((first, last))
    assert condition("world_size", f"{low} to {high}").holds(str(fact)) == (low <= fact <= high)
    assert condition("world_size", f"{low} or more").holds(str(fact)) == (fact >= low)
    assert condition("world_size", f"below {low}").holds(str(fact)) == (fact < low)
    assert condition("size", f"{low} kB").holds(f"{low * 1000} B")


def test_the_json_form_has_what_was_demanded() -> None:
    one = replace(limit("us"), min_ratio_to_median=0.75, expect_transport=("NET/IB",))
    assert one.to_json() == {
        "min": 100.0,
        "max": None,
        "min_ratio_to_median": 0.75,
        "expect_transport": ["NET/IB"],
        "source": "us",
        "origin": "",
    }


# Choosing --------------------------------------------------------------------------------------------------------


def test_the_entry_with_the_most_conditions_decides_then_the_more_exact_one() -> None:
    limits = [
        limit("any"),
        limit("some", ranks(2, float("inf"))),
        limit("exact", ranks(8, 8)),
        limit("large", ranks(8, 8), LARGE),
    ]
    assert decides(limits, 1, 1, {}) == "any"
    assert decides(limits, 4, 1, {}) == "some"
    assert decides(limits, 8, 1, {}) == "exact"
    assert decides(limits, 8, 1, {"size": "2 GB"}) == "large"


def test_an_entry_of_a_later_file_decides_however_few_conditions_it_has() -> None:
    limits = [limit("shipped", ranks(8, 8), LARGE), limit("mine", layer=1)]
    assert decides(limits, 8, 1, {"size": "1 GB"}) == "mine"


def test_where_no_entry_applies_there_is_no_limit() -> None:
    assert decides([limit("eight", ranks(8, 8))], 16, 2, {}) is None


def test_labels_that_describe_a_subgroup_win_over_the_topology_of_the_run() -> None:
    limits = [limit("inside", ranks(8, 8)), limit("across", ranks(16, 16))]
    assert decides(limits, 16, 2, {}) == "across"
    assert decides(limits, 16, 2, {"world_size": "8", "nnodes": "1"}) == "inside"


def test_ranks_per_node_are_known_only_where_they_divide_evenly() -> None:
    assert facts(world_size=16, nnodes=2, labels={})["local_world_size"] == "8"
    assert "local_world_size" not in facts(world_size=15, nnodes=2, labels={})


# Hardware --------------------------------------------------------------------------------------------------------


def test_a_gpu_claimed_by_two_skus_is_an_error() -> None:
    mine = hardware.Sku(name="mine", nvml_names=("NVIDIA H200.*",))
    limits = Thresholds(skus={**hardware.SKUS, "mine": mine}, limits=())
    assert limits.sku_for("NVIDIA H200 NVL") == "mine"
    with pytest.raises(ThresholdsError, match="'NVIDIA H200' is claimed by 'H200' and 'mine'"):
        limits.sku_for("NVIDIA H200")


def test_a_site_metric_naming_a_peak_that_does_not_exist_is_refused() -> None:
    metric = metrics.Metric(name="x", unit="GB/s", better="higher", peak="lnik", doc="x")
    with pytest.raises(MeasurementError, match="names the peak 'lnik'"):
        peak_of(metric, hardware.SKUS["H200"])


def test_judging_imports_no_yaml() -> None:
    code = "import sys, pytest_gpucluster.judge; assert not {'yaml', 'torch', 'pynvml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
