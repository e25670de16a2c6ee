"""Charts: what is seen in them, that nothing in them is markup, and that no value breaks them."""

import math
import re
import xml.etree.ElementTree as ET

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Cluster, RankPlace, Run
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.reports.charts.plots import (
    Bar,
    Level,
    Line,
    heat_map,
    limit_bar,
    line_chart,
    rank_dots,
    spread_chart,
    time_chart,
)
from pytest_gpucluster.reports.charts.svg import Scale, span

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</title><script>alert(1)</script> "x" onload=alert(2) \x1b[31m\u202e\x00\ud800 ]]>'
ANY = st.floats(allow_nan=True, allow_infinity=True)
LIMIT = JudgedLimit(min=700.0, source="a contract", origin="site.yaml:3:5")


def drawn(svg):
    """Return a chart as elements, after looking that it is one and holds nothing that acts."""
    text = str(svg)
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text
    _, _, width, height = map(float, root.get("viewBox").split())
    for element in root.iter():
        name = element.tag.removeprefix(SVG)
        assert name in {"svg", "title", "line", "path", "rect", "circle", "text"}
        acting = ("href", "style", "class") if name != "svg" else ("href", "style")
        assert not [key for key in element.attrib if key.startswith("on") or key in acting]
        for key in ("x", "x1", "x2", "cx"):
            assert -1 <= float(element.get(key, 0)) <= width + 1, (name, key, element.attrib)
        for key in ("y", "y1", "y2", "cy"):
            assert -1 <= float(element.get(key, 0)) <= height + 1, (name, key, element.attrib)
    assert "nan" not in re.sub(r">[^<]*<", "><", text).lower()
    return root


def texts(svg):
    return [element.text for element in drawn(svg).iter(f"{SVG}text")]


def title_of(svg):
    return drawn(svg).find(f"{SVG}title").text


def judged(values, *, status="passed", limit=LIMIT, worst=None, **others):
    values = dict(enumerate(values)) if not isinstance(values, dict) else values
    worst = min(values, key=values.get) if worst is None and values else worst
    return JudgedMetric(
        metric="matmul.bf16.tflops",
        unit="TFLOPS",
        status=status,
        value=values.get(worst),
        worst_rank=worst,
        limit=limit,
        values=values,
        **others,
    )


def cluster_of(ranks):
    gpus = [{"index": str(rank % 8), "uuid": "GPU-1f2e"} for rank in range(ranks)]
    places = [RankPlace(rank=rank, host=f"gpu-{rank // 8:02}", gpu=gpu) for rank, gpu in enumerate(gpus)]
    return Journal(run=Run(run_id="", started_at="", world_size=ranks), cluster=Cluster(ranks=tuple(places)))


def crosses_and_circles(svg):
    """Return how many marks are of those that miss a limit, and how many of the others."""
    paths = [path.get("d") for path in drawn(svg).iter(f"{SVG}path")]
    return sum(path.count("m") for path in paths), sum(path.count("h0") for path in paths)


def bar_ends(svg):
    root = drawn(svg)
    bar = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") != "none")
    tick = next(line for line in root.iter(f"{SVG}line") if line.get("x1") == line.get("x2"))
    return float(bar.get("x")) + float(bar.get("width")), float(tick.get("x1"))


def test_a_bar_ends_beyond_the_limit_that_it_keeps_and_before_the_one_that_it_misses():
    end, limit = bar_ends(limit_bar(judged([731.0])))
    assert end > limit
    end, limit = bar_ends(limit_bar(judged([588.0], status="failed")))
    assert end < limit


@settings(max_examples=40)
@given(value=ANY, low=ANY, high=ANY, ratio=ANY)
@example(value=1e308, low=1.0, high=1e308, ratio=1e-300)
@example(value=5e-324, low=5e-324, high=math.nan, ratio=0.0)
def test_no_numbers_break_a_bar(value, low, high, ratio):
    limit = JudgedLimit(min=low, max=high)
    svg = limit_bar(judged({0: value}, limit=limit, worst=0, peak_ratio=ratio, interval=(low, high)))
    assert svg == "" or drawn(svg) is not None


def test_the_rank_that_misses_the_limit_is_a_cross_with_its_name():
    svg = rank_dots(judged([731.0] * 11 + [588.0] + [730.0] * 4, status="failed"), cluster_of(16))
    assert crosses_and_circles(svg) == (1, 15)
    assert "rank 11 (gpu-01, GPU 3)" in texts(svg)
    assert "limit ≥ 700 TFLOPS" in texts(svg)
    assert "1 miss the limit" in title_of(svg)
    # So is one whose interval misses it, and one that is behind the others where the limit says so.
    unsure = judged([731.0, 705.0], status="failed", intervals={1: (690.0, 712.0)})
    behind = judged([731.0] * 7 + [640.0], limit=JudgedLimit(min=100.0, min_ratio_to_median=0.93), status="failed")
    assert [crosses_and_circles(rank_dots(each, cluster_of(8))) for each in (unsure, behind)] == [(1, 1), (1, 7)]


def test_a_rank_without_a_number_is_reported_and_has_no_place_among_the_values():
    values = {0: 731.0, 1: math.nan, 2: math.inf, 3: 730.0}
    svg = rank_dots(judged(values, status="error", worst=1), cluster_of(4))
    assert texts(svg).count("?") == 2
    assert "rank 1 (gpu-00, GPU 1) and 1 more" in texts(svg)
    assert "2 have no number" in title_of(svg)
    assert crosses_and_circles(svg) == (0, 2)


@given(values=st.lists(ANY, min_size=1, max_size=80), low=ANY, high=ANY)
@example(values=[1.7e308, -1.7e308, 0.0], low=math.nan, high=5e-324)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_numbers_break_the_dots(values, low, high):
    limit = JudgedLimit(min=low, max=high, min_ratio_to_median=0.9)
    intervals = {0: (low, high)}
    svg = rank_dots(judged(values, status="failed", limit=limit, worst=0, intervals=intervals), cluster_of(len(values)))
    assert drawn(svg) is not None


def test_tests_over_time_have_their_names_and_the_search_an_outline():
    bars = [
        Bar(name="hbm", begin=0.0, end=60.0),
        Bar(name="matmul", begin=60.0, end=400.0, is_bad=True, searched_from=300.0),
    ]
    svg = time_chart(bars)
    assert {"hbm", "matmul", "min"} <= {*texts(svg)}
    assert [rect.get("fill") == "none" for rect in drawn(svg).iter(f"{SVG}rect")] == [False, False, True]
    many = time_chart([Bar(name=f"test {number}", begin=number, end=number + 1 + number % 7) for number in range(300)])
    assert "100 of 300 tests" in title_of(many)


def test_the_spread_names_the_rank_that_is_behind_and_has_no_row_for_what_does_not_spread():
    rows = [("slow", judged([731.0] * 11 + [588.0] + [730.0] * 4, status="failed")), ("equal", judged([700.0] * 16))]
    svg = spread_chart(rows, cluster_of(16))
    assert crosses_and_circles(svg) == (1, 0)
    assert "rank 11 (gpu-01, GPU 3)" in texts(svg)
    assert "equal" not in texts(svg)
    # Where all miss the limit, no rank is named.
    assert "rank 3 (gpu-00, GPU 3)" not in texts(
        spread_chart([("all", judged([5.0, 6.0, 5.5, 4.0], status="failed"))], cluster_of(4))
    )


@given(values=st.lists(ANY, min_size=1, max_size=40), begin=st.floats(0, 1e9), seconds=st.floats(0, 1e9), search=ANY)
@example(values=[1.7e308, 5e-324, 1.0], begin=0.0, seconds=0.0, search=math.nan)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_numbers_break_the_spread_nor_the_times(values, begin, seconds, search):
    assert (
        drawn(spread_chart([(HOSTILE, judged(values, status="failed", worst=0))], cluster_of(len(values)))) is not None
    )
    assert drawn(time_chart([Bar(name=HOSTILE, begin=begin, end=begin + seconds, searched_from=search)])) is not None


@given(points=st.lists(st.tuples(ANY, ANY), max_size=30), level=ANY, log_x=st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_numbers_break_a_line(points, level, log_x):
    levels = [Level(name=HOSTILE, value=level)]
    axes = {"title": "a title", "x_label": "steps", "y_label": "nats"}
    assert drawn(line_chart([Line(name=HOSTILE, points=points)], levels=levels, log_x=log_x, **axes)) is not None


@given(rates=st.dictionaries(st.tuples(st.integers(0, 31), st.integers(0, 31)), ANY, max_size=60))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_numbers_break_a_matrix(rates):
    bad = {place for place in rates if sum(place) % 7 == 0}
    svg = heat_map([HOSTILE] * 32, rates, bad, heads=[HOSTILE] * 32, title="links", unit="GB/s")
    assert f"{len(bad)} outlined" in title_of(svg)


@given(values=st.lists(ANY, max_size=10), zero=st.booleans())
@example(values=[1e300 / 0.99], zero=False)
@example(values=[1.7e308], zero=False)
def test_a_span_holds_every_value_that_can_be_drawn(values, zero):
    low, high = span([abs(value) for value in values] if zero else values, zero=zero)
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert low < high
    scale = Scale(low=low, high=high, start=0.0, end=100.0)
    assert all(0 <= scale(value) <= 100 for value in values if math.isfinite(value))
