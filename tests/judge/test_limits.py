import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import MeasurementError, ThresholdsError
from pytest_gpucluster.judge.limits import Condition, Limit, Thresholds, condition, peak_of
from pytest_gpucluster.metrics import catalogue, datasheets

BUSBW = "nccl.all_reduce.busbw"


def ranks(low, high):
    return Condition(key="world_size", text=f"{low:g} to {high:g}", dimension="number", low=low, high=high)


LARGE = Condition(key="size", text="1 GB or more", dimension="amount of data", low=1e9)


def limit(source, *when, minimum=100.0, layer=0):
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


def decides(limits, world_size, nnodes, labels):
    """The source of the entry that decides, wherever it stands among the others."""
    found = {
        chosen and chosen.source
        for order in (limits, limits[::-1])
        for chosen in [
            Thresholds(skus=datasheets.SKUS, limits=tuple(order)).limit(
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
def test_conditions_overlap_if_and_only_if_some_fact_satisfies_both(a, b):
    # Half numbers too: the ranges are real intervals.
    facts = [str(n / 2) for n in range(-2, 24)]
    both = any(a.holds(fact) and b.holds(fact) for fact in facts)
    assert a.overlaps(b) == b.overlaps(a) == both


def test_a_count_beyond_all_numbers_is_refused():
    for text in ("1e999", "1e999 or more", "2 to 1e999"):
        with pytest.raises(ThresholdsError, match=r"world_size .* whole numbers from 1"):
            condition("world_size", text)


# Choosing --------------------------------------------------------------------------------------------------------


def test_the_entry_with_the_most_conditions_decides_then_the_more_exact_one():
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
    limits = [limit("shipped", ranks(8, 8), LARGE), limit("mine", layer=1)]
    assert decides(limits, 8, 1, {"size": "1 GB"}) == "mine", "one of a later file, however few conditions it has"
    assert decides([limit("eight", ranks(8, 8))], 16, 2, {}) is None


def test_labels_that_describe_a_subgroup_win_over_the_topology_of_the_run():
    limits = [limit("inside", ranks(8, 8)), limit("across", ranks(16, 16))]
    assert decides(limits, 16, 2, {}) == "across"
    assert decides(limits, 16, 2, {"world_size": "8", "nnodes": "1"}) == "inside"


# Hardware --------------------------------------------------------------------------------------------------------


def test_a_gpu_claimed_by_two_skus_is_an_error():
    mine = datasheets.Sku(name="mine", nvml_names=("NVIDIA H200.*",))
    limits = Thresholds(skus={**datasheets.SKUS, "mine": mine}, limits=())
    assert limits.sku_for("NVIDIA H200 NVL") == "mine"
    with pytest.raises(ThresholdsError, match="'NVIDIA H200' is claimed by 'H200' and 'mine'"):
        limits.sku_for("NVIDIA H200")


def test_a_site_metric_naming_a_peak_that_does_not_exist_is_refused():
    metric = catalogue.Metric(name="x", unit="GB/s", better="higher", peak="lnik", doc="x")
    with pytest.raises(MeasurementError, match="names the peak 'lnik'"):
        peak_of(metric, datasheets.SKUS["H200"])
