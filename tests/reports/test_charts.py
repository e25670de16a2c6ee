"""Charts: what is seen in them, that nothing in them is markup, and that no value breaks them."""

import math
import re
import xml.etree.ElementTree as ET

import example_runs
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_gpucluster import journal
from pytest_gpucluster.journal import Cluster, Journal, JudgedLimit, JudgedMetric, RankPlace, Run
from pytest_gpucluster.reports.charts import Cell, Level, Line, heat_map, limit_bar, line_chart, rank_dots
from pytest_gpucluster.reports.charts.scale import Scale, span, tick_text, ticks

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
        assert name in {"svg", "title", "desc", "line", "path", "rect", "circle", "text"}
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


def described(svg):
    return drawn(svg).find(f"{SVG}desc").text


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


def cluster_of(ranks, host="gpu-{:02}"):
    places = [
        RankPlace(rank=rank, host=host.format(rank // 8), gpu={"index": str(rank % 8), "uuid": "GPU-1f2e"})
        for rank in range(ranks)
    ]
    return Journal(run=Run(run_id="", started_at="", world_size=ranks), cluster=Cluster(ranks=tuple(places)))


def crosses(svg):
    """Return the marks of those that miss a limit."""
    return [path for path in drawn(svg).iter(f"{SVG}path") if "l" in path.get("d") and "m" in path.get("d")]


# ---- a value beside its limit --------------------------------------------------------------------------------------


def bar_ends(svg):
    """Return where the bar ends and where the tick of the limit stands."""
    root = drawn(svg)
    bar = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") != "none")
    tick = next(line for line in root.iter(f"{SVG}line") if line.get("x1") == line.get("x2"))
    return float(bar.get("x")) + float(bar.get("width")), float(tick.get("x1"))


def test_a_bar_ends_beyond_the_limit_that_it_keeps_and_before_the_one_that_it_misses():
    end, limit = bar_ends(limit_bar(judged([731.0])))
    assert end > limit
    end, limit = bar_ends(limit_bar(judged([588.0], status="failed")))
    assert end < limit


def test_a_bar_tells_its_value_limit_and_peak_in_words():
    svg = limit_bar(judged([588.0], status="failed", peak_ratio=588 / 989.4))
    assert drawn(svg).find(f"{SVG}title").text == (
        "failed: 588 TFLOPS, limit >= 700 TFLOPS, data sheet peak 989.4 TFLOPS"
    )


def test_a_bar_without_anything_to_stand_beside_is_not_drawn():
    assert limit_bar(judged([731.0], limit=None, status="recorded")) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, -1.0])
def test_what_is_no_value_has_no_bar(value):
    svg = limit_bar(judged({0: value}, status="error", worst=0))
    assert texts(svg) == ["no value to draw"]
    assert [rect.get("fill") for rect in drawn(svg).iter(f"{SVG}rect")] == ["none"]


def test_where_the_limit_is_a_share_of_the_others_the_bar_is_that_share():
    limit = JudgedLimit(min_ratio_to_median=0.75)
    end, tick = bar_ends(limit_bar(judged([100.0, 731.0], limit=limit, status="failed", ratio_to_median=0.14)))
    assert end < tick
    end, tick = bar_ends(limit_bar(judged([730.0, 731.0], limit=limit, ratio_to_median=0.99)))
    assert end > tick


def test_a_limit_of_nothing_is_drawn():
    svg = limit_bar(judged([0.0], limit=JudgedLimit(max=0.0)))
    assert len(list(drawn(svg).iter(f"{SVG}line"))) == 1


@settings(max_examples=40)
@given(value=ANY, low=ANY, high=ANY, ratio=ANY)
@example(value=1e308, low=1.0, high=1e308, ratio=1e-300)
@example(value=5e-324, low=5e-324, high=math.nan, ratio=0.0)
def test_no_numbers_break_a_bar(value, low, high, ratio):
    limit = JudgedLimit(min=low, max=high)
    svg = limit_bar(judged({0: value}, limit=limit, worst=0, peak_ratio=ratio, interval=(low, high)))
    assert svg == "" or drawn(svg) is not None


# ---- all ranks -----------------------------------------------------------------------------------------------------


def test_the_rank_that_misses_the_limit_is_a_cross_with_its_name():
    svg = rank_dots(judged([731.0] * 11 + [588.0] + [730.0] * 4, status="failed"), cluster_of(16))
    assert len(crosses(svg)) == 1
    assert "rank 11, gpu-01 GPU 3" in texts(svg)
    assert "limit ≥ 700 TFLOPS" in texts(svg)
    assert "rank 11 (gpu-01, GPU 3 GPU-1f2e) misses the limit: 588 TFLOPS" in described(svg)
    assert len(list(drawn(svg).iter(f"{SVG}circle"))) == 15


def test_a_value_that_keeps_the_limit_while_its_interval_does_not_is_a_cross():
    values, sure = [731.0, 705.0], {1: (690.0, 712.0)}
    assert len(crosses(rank_dots(judged(values, status="failed", intervals=sure), cluster_of(2)))) == 1


def test_a_rank_behind_the_others_is_a_cross_where_the_limit_says_so():
    limit = JudgedLimit(min=100.0, min_ratio_to_median=0.93)
    svg = rank_dots(judged([731.0] * 7 + [640.0], status="failed", limit=limit), cluster_of(8))
    assert len(crosses(svg)) == 1
    assert "is behind the others" in described(svg)


def test_ranks_that_keep_the_limit_are_never_crosses():
    svg = rank_dots(judged([731.0, 701.0, 735.0]), cluster_of(3))
    assert crosses(svg) == []
    assert "miss" not in described(svg)


def test_where_a_whole_node_misses_the_limit_the_worst_speaks_for_it():
    svg = rank_dots(judged([731.0] * 8 + [601.0 - rank for rank in range(8)], status="failed"), cluster_of(16))
    assert "rank 15, gpu-01 GPU 7 and 7 more" in texts(svg)
    assert len(crosses(svg)) == 8


def test_an_outlier_that_keeps_the_limit_is_named_but_no_cross():
    svg = rank_dots(judged([931.0 + rank / 10 for rank in range(15)] + [760.0]), cluster_of(16))
    assert "rank 15, gpu-01 GPU 7" in texts(svg)
    assert crosses(svg) == []


def test_a_rank_without_a_number_is_told_and_has_no_place_among_the_values():
    values = {0: 731.0, 1: math.nan, 2: math.inf, 3: 730.0}
    svg = rank_dots(judged(values, status="error", worst=1), cluster_of(4))
    assert texts(svg).count("?") == 2
    assert "rank 1, gpu-00 GPU 1: no number" in texts(svg)
    assert "2 ranks have no number" in described(svg)
    assert len(list(drawn(svg).iter(f"{SVG}circle"))) == 2


def test_above_64_ranks_groups_are_bands_and_the_worst_still_have_their_names():
    values = [731.0 + (rank % 17) / 10 for rank in range(1024)]
    values[657] = 588.0
    svg = rank_dots(judged(values, status="failed"), cluster_of(1024))
    assert len(crosses(svg)) == 1
    assert "rank 657, gpu-82 GPU 1" in texts(svg)
    assert len(list(drawn(svg).iter(f"{SVG}circle"))) < 8
    assert len(svg) < 24_000


def test_nothing_measured_is_nothing_drawn():
    assert rank_dots(judged({}, status="error"), cluster_of(2)) == ""


@pytest.mark.parametrize("values", [[0.0], [731.0], [0.0, 0.0], [math.nan], [math.nan, math.inf]], ids=str)
def test_few_values_and_none_are_drawn(values):
    assert drawn(rank_dots(judged(values, status="error", worst=0), cluster_of(2))) is not None


@given(values=st.lists(ANY, min_size=1, max_size=80), low=ANY, high=ANY)
@example(values=[1.7e308, -1.7e308, 0.0], low=math.nan, high=5e-324)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_numbers_break_the_dots(values, low, high):
    limit = JudgedLimit(min=low, max=high, min_ratio_to_median=0.9)
    intervals = {0: (low, high)}
    svg = rank_dots(judged(values, status="failed", limit=limit, worst=0, intervals=intervals), cluster_of(len(values)))
    assert drawn(svg) is not None


def test_a_host_s_name_is_a_text_and_nothing_else():
    svg = rank_dots(judged([731.0] * 7 + [588.0], status="failed"), cluster_of(8, host=HOSTILE))
    assert "<script" not in svg
    assert "\u202e" not in svg
    assert any("</title>" in text for text in texts(svg))


# ---- lines ---------------------------------------------------------------------------------------------------------


def lines_of(*lines, **others):
    return line_chart(lines, **{"title": "a title", "x_label": "steps", "y_label": "nats"} | others)


def test_a_line_has_its_name_at_its_end_and_levels_theirs():
    svg = lines_of(Line(name="training", points=[(1, 2.0), (2, 1.0)]), levels=[Level(name="limit", value=0.5)])
    assert {"training", "limit", "steps", "nats"} <= set(texts(svg))
    assert "training: from 2 to 1, lowest 1, highest 2 (nats)" in described(svg)


def test_a_value_that_is_no_number_leaves_a_gap_that_is_told():
    points = [(1, 2.0), (2, 1.8), (3, math.nan), (4, 1.2), (5, 1.0)]
    svg = lines_of(Line(name="", points=points))
    assert len([path for path in drawn(svg).iter(f"{SVG}path") if path.get("fill") == "none"]) == 2
    assert "1 not finite" in described(svg)


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(math.inf, 1.0)]], ids=str)
def test_without_a_value_it_says_so(points):
    assert "no values to draw" in texts(lines_of(Line(name="a", points=points)))


def test_one_point_is_a_mark():
    assert len(list(drawn(lines_of(Line(name="a", points=[(3, 4.0)]))).iter(f"{SVG}circle"))) == 1


def test_a_logarithmic_axis_leaves_out_what_has_no_logarithm():
    svg = lines_of(Line(name="a", points=[(0, 1.0), (1e6, 2.0), (1e9, 3.0)]), log_x=True)
    assert len(list(drawn(svg).iter(f"{SVG}circle"))) == 2


def test_more_points_than_are_seen_are_not_written():
    svg = lines_of(Line(name="a", points=[(step, math.sin(step)) for step in range(100_000)]))
    assert len(svg) < 12_000


def test_lines_are_told_apart_without_colour():
    svg = lines_of(*(Line(name=f"l{n}", points=[(1, n), (2, n + 0.5)]) for n in range(6)))
    shapes = {
        (element.tag, element.get("fill") == "none") for element in drawn(svg).iter() if element.tag.endswith("circle")
    }
    dashes = {path.get("stroke-dasharray") for path in drawn(svg).iter(f"{SVG}path")}
    assert len(shapes) + len(dashes) > 2


@given(points=st.lists(st.tuples(ANY, ANY), max_size=30), level=ANY, log_x=st.booleans(), zero=st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_numbers_break_a_line(points, level, log_x, zero):
    svg = lines_of(
        Line(name=HOSTILE, points=points),
        levels=[Level(name=HOSTILE, value=level)],
        band=[(x, y, level) for x, y in points],
        log_x=log_x,
        zero=zero,
    )
    assert drawn(svg) is not None


# ---- a matrix ------------------------------------------------------------------------------------------------------


def matrix_of(rates, bad=(), **others):
    cells = {place: Cell(value=rate, is_bad=place in bad) for place, rate in rates.items()}
    count = 1 + max(max(place) for place in rates) if rates else 0
    names = others.pop("names", [f"rank {index}" for index in range(count)])
    return heat_map(names, cells, title="links", unit="GB/s", **others)


def test_a_bad_cell_is_outlined_and_named():
    svg = matrix_of({(0, 1): 372.0, (1, 0): 149.0}, bad={(1, 0)})
    outlined = [rect for rect in drawn(svg).iter(f"{SVG}rect") if rect.get("stroke-width") == "2.2"]
    assert len(outlined) == 1
    assert {"372", "149"} <= set(texts(svg))
    assert described(svg) == "2 values from 149 to 372 GB/s; 1 outlined: rank 1 to rank 0"


def test_more_is_darker():
    svg = matrix_of({(0, 1): 100.0, (1, 0): 372.0})
    fills = [rect.get("fill") for rect in drawn(svg).iter(f"{SVG}rect")][:2]
    light, dark = (sum(int(fill[at : at + 2], 16) for at in (1, 3, 5)) for fill in fills)
    assert light > dark


def test_a_cell_without_a_number_is_marked():
    svg = matrix_of({(0, 1): math.nan, (1, 0): 372.0})
    assert "?" in texts(svg)


def test_of_a_large_matrix_a_bad_cell_is_not_lost():
    rates = {(row, column): 372.0 for row in range(128) for column in range(128) if row != column}
    rates[70, 3] = 1.0
    svg = matrix_of(rates, bad={(70, 3)})
    assert len([rect for rect in drawn(svg).iter(f"{SVG}rect") if rect.get("stroke-width") == "2.2"]) == 1
    assert "from 1 to 372" in described(svg)
    assert len(svg) < 120_000


@given(rates=st.dictionaries(st.tuples(st.integers(0, 40), st.integers(0, 40)), ANY, max_size=60))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_numbers_break_a_matrix(rates):
    assert drawn(matrix_of(rates, names=[HOSTILE] * 41)) is not None


# ---- scales --------------------------------------------------------------------------------------------------------


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


@example(low=3602879702.828125, width=1e-6)
@given(low=st.floats(-1e12, 1e12), width=st.floats(1e-6, 1e12))
def test_ticks_are_few_and_in_between(low, width):
    marks = ticks(low, low + width)
    assert len(marks) <= 8
    assert marks == sorted(set(marks))


def test_ticks_that_are_near_each_other_are_told_apart():
    marks = [731.001, 731.002]
    assert len({tick_text(mark, marks) for mark in marks}) == 2


# ---- all that the example runs hold --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", example_runs.NAMES)
def test_every_measurement_of_the_example_runs_is_drawn(tmp_path, name):
    told = journal.read(example_runs.write(tmp_path, name) / journal.FILE_NAME, keep_samples=False)
    for result in told.results:
        for one in result.measurements:
            for svg in (limit_bar(one), rank_dots(one, told)):
                if svg:
                    drawn(svg)
                    assert "<script" not in svg
                    assert "\x1b" not in svg
