"""The shipped limits decide: every one of them passes what keeps it, fails what misses it, and cites its source."""

import math
import re
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
from complaints import in_order
from each import of_each
from verdicts import SHIPPED, world_of

from pytest_gpucluster.judge import evidence
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.judge.limits import EVERY_SKU, TOPOLOGY, facts, peak_of
from pytest_gpucluster.metrics import datasheets, units
from pytest_gpucluster.metrics import measurement as metrics
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.metrics.sampling import Series

BUSBW = "nccl.all_reduce.busbw"
ALL_SIZES, BOTH_SIZES = "4096, 8192, 16384", "4096, 8192"


class Run(NamedTuple):
    nnodes: int
    local_world_size: int
    labels: dict[str, str]
    sku: str = ""

    @property
    def world_size(self):
        return self.nnodes * self.local_world_size


# Runs that operators have. Those of 8 ranks come first, so that most limits are tried with 8 ranks.
RUNS = [
    Run(nnodes, ranks, {"size": size} if size else {})
    for size, nnodes, ranks in product(
        ("", "1 GB", "8 GiB", "1 MB", "4 B"), (1, 2, 3, 16, 24, 40), (8, 4, 2, 1, 5, 6, 7)
    )
]


@cache
def run_of(limit):
    named = {part.key: part.text for part in limit.when if part.key not in (*TOPOLOGY, "size")}
    for sku, run in product(datasheets.SKUS if limit.sku == EVERY_SKU else (limit.sku,), RUNS):
        labels = run.labels | named
        if not limit.applies(facts(world_size=run.world_size, nnodes=run.nnodes, labels=labels)):
            continue
        where = {"world_size": run.world_size, "nnodes": run.nnodes, "labels": labels}
        if SHIPPED.limit(limit.metric, sku=sku, **where) is limit:
            return run._replace(labels=labels, sku=sku)
    raise AssertionError(f"no run of {len(RUNS)} is decided by {limit.origin}: {limit.conditions()}")


def hold(limit, value, *, sku="", transport=""):
    """Judge where ``limit`` decides; ``value`` gives each rank's, None for none."""
    run = run_of(limit)
    labels = dict(run.labels)
    if limit.expect_transport:
        labels["transport"] = transport or limit.expect_transport[0]
    made = {}
    for rank in range(run.world_size):
        given = value(rank)
        made[rank] = [] if given is None else [measurement(limit.metric, given, unit=limit.unit, labels=labels)]
    return judge(
        made,
        world=world_of(run.world_size),
        node_of={rank: rank // run.local_world_size for rank in range(run.world_size)},
        limits=SHIPPED,
        sku=run.sku if sku == "" else sku,
        gpu_name="NVIDIA H300",
    )


def one_bad(limit, bad, good=None):
    """Rank 1 is bad, or the only rank; all others are well within the limit."""
    alone = run_of(limit).world_size == 1
    return hold(limit, lambda rank: bad if rank == 1 or alone else good_value(limit) if good is None else good)


def good_value(limit):
    return limit.min * 1.02 if limit.min is not None else (limit.max or 0.0) / 2


def sure(low, value, high):
    return Series(samples=(low, value, high), median=value, low=low, high=high)


def name(limit):
    return f"{limit.sku}-{limit.metric}-{limit.origin.removeprefix('thresholds.yaml:')}"


# An entry that several SKUs have is tried on the first of them.
ENTRIES = list({(limit.origin, limit.metric): limit for limit in reversed(SHIPPED.limits)}.values())
JUDGED = [limit for limit in ENTRIES if limit.record_only is None]
RECORDED = [limit for limit in ENTRIES if limit.record_only is not None]
every_limit = of_each("limit", JUDGED, name)


def test_there_is_something_to_try():
    assert {limit.sku for limit in SHIPPED.limits if limit.record_only is None} == {*datasheets.SKUS, EVERY_SKU}
    assert len(JUDGED) > 100


@every_limit
def test_a_value_exactly_at_the_limit_passes_and_the_next_number_fails(limit):
    bound = limit.min if limit.min is not None else limit.max
    assert bound is not None
    verdict = one_bad(limit, bound)
    assert verdict.outcome == "passed", verdict.message
    beyond = math.nextafter(bound, -1 if limit.min is not None else math.inf)
    verdict = one_bad(limit, beyond)
    assert verdict.outcome == "failed"
    assert f"{limit.metric} " in verdict.message
    assert limit.origin in verdict.text
    assert verdict.measurements[0].worst_rank == (1 if run_of(limit).world_size > 1 else 0)


@every_limit
def test_what_is_not_surely_within_the_limit_fails(limit):
    if limit.min is not None:
        inside, across = (sure(limit.min * share, limit.min * 1.01, limit.min * 1.02) for share in (1, 0.99))
    else:
        top = limit.max or 0.0
        inside, across = (sure(top / 4, top / 2, high) for high in (top, top * 1.01 + 1))
    assert one_bad(limit, inside).outcome == "passed"
    good = good_value(limit)
    noisy = Series(samples=(good,) * 3, median=good, low=good, high=good, inconclusive="it scatters")
    for bad, words in ((across, "is not surely"), (noisy, "inconclusive: it scatters")):
        verdict = one_bad(limit, bad)
        assert verdict.outcome == "failed"
        assert words in verdict.message


@every_limit
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, None], ids=["nan", "inf", "negative", "missing"])
def test_what_cannot_be_judged_is_an_error(limit, bad):
    if bad is None and run_of(limit).world_size == 1:
        assert hold(limit, lambda rank: None).measurements == ()  # the criterion has measured nothing: see judging
        return
    if bad is None and metrics.known(limit.metric).scope in ("node", "world"):
        # What a node or the world reports is not missing where another rank there has reported it.
        assert one_bad(limit, bad).outcome == "passed"
        return
    verdict = one_bad(limit, bad)
    assert verdict.outcome == "error"
    assert f"rank {min(1, run_of(limit).world_size - 1)}" in verdict.message


@of_each("limit", [limit for limit in JUDGED if metrics.known(limit.metric).scope == "node"], name)
def test_a_node_that_reports_nothing_is_an_error(limit):
    labels = {part.key: part.text for part in limit.when if part.key not in TOPOLOGY}
    verdict = judge(
        {0: [measurement(limit.metric, good_value(limit), unit=limit.unit, labels=labels)]},
        world=world_of(4),
        node_of={rank: rank // 2 for rank in range(4)},
        limits=SHIPPED,
        sku=run_of(limit).sku,
        gpu_name=None,
    )
    assert verdict.outcome == "error"
    assert in_order(verdict.message, "no value node 1")


def with_peak():
    for limit in JUDGED:
        metric = metrics.known(limit.metric)
        peak = peak_of(metric, SHIPPED.skus.get(limit.sku))
        # Across nodes the fabric carries it, and no link of a GPU bounds it.
        across = metric.peak in datasheets.LINK_PEAKS and run_of(limit).nnodes > 1
        if peak is not None and metric.peak_is_bound and not across:
            yield limit, peak


@of_each("case", list(with_peak()), lambda case: name(case[0]))
def test_what_is_above_the_data_sheet_peak_is_an_error(case):
    limit, peak = case
    # All ranks near the peak, or the one would be out of line with the others too.
    verdict = one_bad(limit, peak * 1.001, good=peak * 0.99)
    assert verdict.outcome == "error"
    assert in_order(verdict.message, f"{limit.sku} rank 1")
    assert one_bad(limit, peak, good=peak * 0.99).outcome == "passed"


@of_each("limit", [limit for limit in JUDGED if limit.min_ratio_to_median], name)
def test_a_rank_behind_the_others_fails(limit):
    ratio = limit.min_ratio_to_median
    peak = peak_of(metrics.known(limit.metric), SHIPPED.skus.get(limit.sku))
    assert ratio is not None
    assert peak is not None or limit.sku in (datasheets.CPU_REHEARSAL, EVERY_SKU)
    # Nothing is above the peak, so some floors are met by no rank that is so far behind.
    healthy = min(math.inf if peak is None else peak, (limit.min or 0) / ratio * 1.05)
    verdict = one_bad(limit, healthy * ratio * 0.99, good=healthy)
    assert verdict.outcome == "failed"
    assert verdict.measurements[0].worst_rank == 1
    assert verdict.measurements[0].ratio_to_median == pytest.approx(ratio * 0.99)
    kept_the_floor = healthy * ratio * 0.99 >= (limit.min or 0)
    others = run_of(limit).world_size - 1
    text = f"of the median of the {others} other ranks" if others > 1 else "of the other rank"
    assert (text in verdict.message) == kept_the_floor


@of_each("limit", [limit for limit in JUDGED if limit.expect_transport], name)
def test_another_transport_fails(limit):
    assert hold(limit, lambda rank: good_value(limit)).outcome == "passed"
    verdict = hold(limit, lambda rank: good_value(limit), transport="NET/Socket")
    assert verdict.outcome == "failed"
    assert in_order(verdict.message, "NET/Socket expected")


@of_each("limit", RECORDED, name)
def test_what_is_only_recorded_can_come_up_and_says_why(limit):
    verdict = hold(limit, lambda rank: 1.0)
    assert verdict.outcome == "passed"
    assert [judged.status for judged in verdict.measurements] == ["recorded"]
    assert limit.record_only in verdict.measurements[0].reason


GPUS_OF_A_NODE = {"GB200": 4, "GB300": 4, "GH200": 1}
NO_FLOOR = {
    (sku, nnodes)
    for sku in ("H100 PCIe", "H100 NVL", "H800 PCIe", "A100 PCIe 40GB", "A100 PCIe 80GB", "L40S", "GH200")
    for nnodes in (2, 16)
}
"""Between nodes of these nothing is known of the cards, so that an acceptance needs limits of the site."""


@of_each("case", list(product([sku for sku in datasheets.SKUS if sku != datasheets.CPU_REHEARSAL], (1, 2, 16))), str)
def test_every_rate_that_a_criterion_asks_for_has_a_floor_on_a_node_of_each_sku(case):
    sku, nnodes = case
    gpus = GPUS_OF_A_NODE.get(sku, 8)
    world = {"size": "1 GB", "world_size": str(gpus * nnodes), "nnodes": str(nnodes), "transport": "NET/IB"}
    asked = [
        *((name, {"best_of": ALL_SIZES}) for name in metrics.METRICS if re.fullmatch(r"matmul\..*\.tflops", name)),
        *((name, {"size": "8 GiB"}) for name in metrics.METRICS if name.startswith("hbm.")),
        *(
            (name, {"mode": mode})
            for name in metrics.METRICS
            for mode in ("alone", "both", "together")
            if name.startswith("host_link.")
        ),
        ("training.mfu", {"model": "large"}),
    ]
    if gpus * nnodes > 1:
        asked += [
            (name, world) for name in metrics.METRICS if re.fullmatch(r"nccl\.[a-z_]+\.busbw|link\.bandwidth", name)
        ]
    if nnodes > 1:
        asked.append(("fabric.active_ports", {}))
    without = set()
    for metric, labels in asked:
        limit = SHIPPED.limit(metric, sku=sku, world_size=gpus * nnodes, nnodes=nnodes, labels=labels)
        assert limit is not None, metric
        if limit.record_only is not None and limit.record_only != "this GPU has no fp8 units":
            without.add(metric)
    assert bool(without) == (case in NO_FLOOR), without
    assert all(metrics.known(metric).is_rate for metric in without)


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("nnodes", [2, 3, 8, 20])
def test_every_rate_between_nodes_has_an_entry_whatever_their_number_of_gpus(nnodes, gpus):
    """Where no limit is known it is recorded, and the run INCOMPLETE: an unusual node is no broken run."""
    names = [name for name in metrics.METRICS if re.fullmatch(r"nccl\.[a-z_]+\.busbw|link\.bandwidth", name)]
    where = {"world_size": gpus * nnodes, "nnodes": nnodes, "labels": {"size": "1 GB", "transport": "NET/IB"}}
    skus = [sku for sku in datasheets.SKUS if sku != datasheets.CPU_REHEARSAL]
    found = {(sku, name): SHIPPED.limit(name, sku=sku, **where) for sku in skus for name in names}
    assert [asked for asked, limit in found.items() if limit is None] == []


def test_groups_inside_one_run_are_judged_by_their_own_size():
    where = {"sku": "H100 SXM", "world_size": 16, "nnodes": 2}
    for labels, expected in (
        ({"world_size": "1", "nnodes": "1"}, None),
        ({"world_size": "8", "nnodes": "1"}, 400.0),
        ({"world_size": "4", "nnodes": "1"}, 345.0),
        ({}, 415.0),
    ):
        for dtype in ("bf16", "fp32"):
            limit = SHIPPED.limit(BUSBW, labels={"size": "1 GB", "dtype": dtype} | labels, **where)
            assert limit.min == expected


# Figures and sources ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "where", "minimum"),
    [
        ("gpu.memory.total", (16, 2, {}), units.convert(79.19, "GiB", "GB")),
        ("matmul.bf16.tflops", (1, 1, {"best_of": ALL_SIZES}), 700.0),
        ("matmul.bf16.tflops", (16, 2, {"best_of": BOTH_SIZES}), 700.0),
        ("hbm.copy.bandwidth", (16, 2, {}), 2.5),
        (BUSBW, (8, 1, {"size": "1 GB"}), 400.0),
        (BUSBW, (8, 1, {"size": "8 GiB"}), 400.0),
    ],
)
def test_the_h100_limits_are_the_accepted_figures_to_the_digit(metric, where, minimum):
    world_size, nnodes, labels = where
    limit = SHIPPED.limit(metric, sku="H100 SXM", world_size=world_size, nnodes=nnodes, labels=labels)
    assert (limit.min, limit.max) == (minimum, None)
    assert "accept" in limit.source


def test_an_agreed_figure_that_healthy_gpus_miss_is_shown_and_not_judged():
    limit = SHIPPED.limit("matmul.fp32.tflops", sku="H100 SXM", world_size=16, nnodes=2, labels={})
    assert (limit.min, limit.expected) == (47.5, 60.0)
    assert "acceptance of 2 x 8 H100 SXM, > 60 TFLOPS" in limit.source


def test_an_agreed_figure_that_lets_a_quarter_pass_is_kept_by_a_higher_one():
    limit = SHIPPED.limit(BUSBW, sku="H100 SXM", world_size=16, nnodes=2, labels={"size": "1 GB"})
    assert limit.min >= 350
    assert "acceptance of 2 x 8 H100 SXM: > 350 GB/s" in limit.source


def test_small_messages_and_nodes_with_another_number_of_gpus_are_recorded():
    where = {"sku": "H100 SXM", "nnodes": 2}
    small = SHIPPED.limit(BUSBW, world_size=16, labels={"size": "100 MB"}, **where)
    assert small.record_only
    assert SHIPPED.limit(BUSBW, world_size=12, labels={"size": "1 GB"}, **where).record_only
    assert SHIPPED.limit(BUSBW, world_size=16, labels={}, **where) is None


# Taken before any test runs: other tests add metrics of their own.
KNOWN = [name for name, metric in metrics.METRICS.items() if metric.better != "none"]


@of_each("sku", list(datasheets.SKUS))
def test_every_sku_says_something_about_every_metric(sku):
    assert [name for name in KNOWN if not SHIPPED.entries(name, sku=sku)] == []


# The data sheets' capacities, in GB, as their makers print them.
CAPACITIES = {
    "H100 PCIe": 80,
    "H100 NVL": 94,
    "H800 PCIe": 80,
    "H20": 96,
    "H200": 141,
    "GH200": 96,
    "A100 80GB": 80,
    "A100 40GB": 40,
    "A100 PCIe 40GB": 40,
    "A100 PCIe 80GB": 80,
    "B200": 180,
    "B300": 270,
    "GB200": 186,
    "GB300": 278,
    "L40S": 48,
}
# What NVML shows as total, in MiB, on healthy cards: more than the data sheet's figure.
NVML_TOTALS = {
    "H100 SXM": 81559,
    "H100 NVL": 95830,
    "H200": 143771,
    "A100 80GB": 81920,
    "B200": 183359,
    "B300": 275040,
    "GB200": 189471,
    "GB300": 284208,
    "L40S": 46068,
}

RATIOS = {
    "": None,
    "likewise": 0.05,  # a rehearsal floor too
    "0.75, nvidia-resiliency-ext": 0.75,
    "715 of 769, Azure": 715 / 769,
}


@of_each("limit", SHIPPED.limits, name)
def test_every_shipped_figure_agrees_with_the_source_it_cites(limit):
    if limit.record_only is not None:
        assert (limit.min, limit.max, limit.source) == (None, None, "")
        return
    source, _, ratio = limit.source.partition("; ratio: ")
    published = re.match(r"published: ([\d.]+) ([A-Za-z/%]+)", source)
    if published:
        lowest = units.convert(float(published[1]), published[2].rstrip(","), limit.unit)
        support = evidence.support_of(limit, SHIPPED)
        # An entry that another SKU of the same kind shares cites the lower one.
        assert 0.91 * lowest <= limit.min <= 0.97 * lowest
        if support is not None and support.healthy and not support.best_only:
            assert lowest <= support.healthy[0] + 1e-9
    elif limit.metric == "gpu.memory.total" and limit.sku in CAPACITIES:
        assert limit.min == CAPACITIES[limit.sku]
        assert re.search(r"data sheet|user guide", source)
    else:
        assert re.match(r"acceptance of|derived: |Azure/|rehearsal floor|rule: ", source)
    assert (limit.sku == datasheets.CPU_REHEARSAL) <= source.startswith("rehearsal floor")
    assert limit.min_ratio_to_median == pytest.approx(RATIOS[ratio], abs=0.001)


@of_each(
    "case",
    [
        ("H100 SXM", 2, "NET/IB", "8", 0.98, 0.85),  # as the acceptance of 2 x 8 saw it, which asked for 0.9
        ("H200", 2, "NET/IB", "8", 0.98, 0.85),
        ("H100 SXM", 2, "NET/IB", "4", 320 / 476, 0.04),
        ("H100 SXM", 2, "NET/FasTrak", "8", 318.4 / 483.05, 0.04),
        ("H100 SXM", 4, "NET/IB", "8", 320 / 476, 0.04),
        ("B200", 2, "NET/IB", "8", 690.07 / 838, 0.7),
        ("B200", 4, "NET/AWS Libfabric", "8", 372.42 / 734.97, 0.04),
    ],
)
def test_what_healthy_networks_are_published_to_keep_of_a_node_s_busbw_passes(case):
    sku, nnodes, transport, nics, healthy, bad = case
    labels = {"transport": transport, "nics": nics, "local_world_size": "8"}
    limit = SHIPPED.limit("scaling.busbw_retention", sku=sku, world_size=8 * nnodes, nnodes=nnodes, labels=labels)
    assert bad < limit.min <= healthy


@pytest.mark.parametrize("sku", NVML_TOTALS)
def test_a_healthy_card_s_memory_as_nvml_counts_it_keeps_the_limit(sku):
    limit = SHIPPED.limit("gpu.memory.total", sku=sku, world_size=1, nnodes=1, labels={})
    total = units.convert(NVML_TOTALS[sku], "MiB", "GB")
    assert limit.min <= total <= limit.min * 1.08


@pytest.mark.parametrize("sku", ["H100 SXM", "H200", "A100 80GB", "B200", "GB200"])
def test_gpus_inside_of_a_node_may_pass_on_faster_than_those_that_send_to_another_node(sku):
    # The ends of a node are at one port's rate, and the others at NVLink's: no straggler is among them.
    rates = {rank: 45.0 if rank % 8 in (0, 7) else 350.0 for rank in range(16)}
    labels = {"size": "8 GiB", "dtype": "bf16", "world_size": "16", "nnodes": "2", "transport": "NET/IB"}
    judgement = judge(
        {rank: [measurement("nccl.send_recv.busbw", rate, unit="GB/s", labels=labels)] for rank, rate in rates.items()},
        world={rank: f"rank {rank}" for rank in rates},
        node_of={rank: rank // 8 for rank in rates},
        limits=SHIPPED,
        sku=sku,
        gpu_name=None,
    )
    assert judgement.outcome == "passed", judgement.text
