"""Heat maps of square matrices, and of a link survey: one per node, or per rail across nodes."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.reports.charts import figure
from pytest_gpucluster.reports.charts.figure import Figure, Unreadable
from pytest_gpucluster.reports.charts.svg import BAD, GRID, INK, MUTED, Drawing, finite, text_width, tick_text
from pytest_gpucluster.reports.markup import html_table
from pytest_gpucluster.text import one_line

_LABEL_CHARACTERS = 18
_MOST_CELLS = 32
"""Rows and columns; of larger matrices each block has its worst value."""
_WITH_NUMBERS = 16
# The ends and the middle of ColorBrewer's "Blues", light for low values; safe for colour-blind readers and in print.
# Source: C. Brewer, https://colorbrewer2.org/#type=sequential&scheme=Blues.
_PALETTE = ((247, 251, 255), (107, 174, 214), (8, 48, 107))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a matrix. ``is_bad`` cells are outlined, and their number is bold."""

    value: float
    is_bad: bool = False


def heat_map(
    names: Sequence[str],
    cells: Mapping[tuple[int, int], Cell],
    *,
    title: str,
    unit: str,
    heads: Sequence[str] = (),
) -> Markup:
    """Return a square matrix: darker is more, bad cells are outlined, unknown ones are empty.

    The scale begins at zero, so that scatter does not look like a fault.

    Args:
        names: of the rows and columns.
        cells: by row and column, from 0.
        title: what it shows.
        unit: of the values.
        heads: short names of the columns; default: their numbers.
    """
    heads = heads if len(heads) == len(names) <= _MOST_CELLS else ()
    names, cells = _blocks(names, cells)
    count = len(names)
    labels = [one_line(name, _LABEL_CHARACTERS) for name in names]
    has_numbers = count <= _WITH_NUMBERS
    size = 40.0 if has_numbers else 18.0
    tall = 0.68 * size
    left, top = 24 + max((text_width(label, 10) for label in labels), default=0.0), 34.0
    width, height = max(left + max(count, 1) * size + 12, left + 300), top + max(count, 1) * tall + 34
    drawing = Drawing(width, height, title=title, description=_description(names, cells, unit), label="heat-map")
    highest = max(finite(cell.value for cell in cells.values()), default=0.0)
    drawing.text(4, 12, f"rows send, columns receive; {unit}", MUTED, size=10)
    for index, label in enumerate(labels):
        drawing.text(left - 5, top + index * tall + tall / 2 + 3.5, label, INK, anchor="end", size=10)
        head = one_line(heads[index], 5) if heads else str(index)
        text = head if has_numbers or index % 4 == 0 else ""
        drawing.text(left + index * size + size / 2, top - 5, text, MUTED, anchor="middle", size=10)
    inside = [(left + column * size, top + row * tall, cells[row, column]) for row, column in sorted(cells)]
    for x, y, cell in inside:
        text, ink, is_bold = "?", BAD, True
        if math.isfinite(cell.value):
            share = 0.0 if highest <= 0 else min(1.0, max(0.0, cell.value / highest))
            drawing.rectangle(x, y, size, tall, fill=_colour(share))
            # The numbers' colour depends on the cell's colour, which is the same on a dark page.
            text, ink, is_bold = tick_text(cell.value), "#fff" if share > 0.62 else "#111", cell.is_bad
        else:
            drawing.rectangle(x, y, size, tall, fill="none", stroke=BAD, stroke_width=1, stroke_dasharray="2 2")
        if has_numbers or ink == BAD:
            drawing.text(x + size / 2, y + tall / 2 + 3.5, text, ink, anchor="middle", size=10, bold=is_bold)
    for x, y, cell in inside:  # outlines last, so that no neighbour covers them
        if cell.is_bad:
            drawing.rectangle(x + 1, y + 1, size - 2, tall - 2, fill="none", stroke=BAD, stroke_width=2.2)
    drawing.rectangle(left, top, count * size, count * tall, fill="none", stroke=GRID, stroke_width=0.8)
    outlined = "; outlined: slow or wrong" if any(cell.is_bad for cell in cells.values()) else ""
    for step in range(10):
        drawing.rectangle(left + 10 * step, height - 20, 10, 9, fill=_colour((step + 0.5) / 10))
    drawing.text(left - 4, height - 12, "0", MUTED, anchor="end", size=10)
    drawing.text(left + 104, height - 12, f"{tick_text(highest)} {unit}{outlined}", MUTED, size=10)
    return drawing.done()


def _colour(share: float) -> str:
    low, high = (_PALETTE[0], _PALETTE[1]) if share < 0.5 else (_PALETTE[1], _PALETTE[2])
    within = 2 * share if share < 0.5 else 2 * share - 1
    red, green, blue = (round(a + within * (b - a)) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _blocks(
    names: Sequence[str], cells: Mapping[tuple[int, int], Cell]
) -> tuple[Sequence[str], Mapping[tuple[int, int], Cell]]:
    """Return a matrix that fits: each block has its lowest value, and is bad if one of its cells is."""
    if len(names) <= _MOST_CELLS:
        return names, cells
    each = math.ceil(len(names) / _MOST_CELLS)
    found: dict[tuple[int, int], Cell] = {}
    for (row, column), cell in cells.items():
        place = row // each, column // each
        known = found.get(place)
        lower = known is None or not math.isfinite(cell.value) or cell.value < known.value
        value = cell.value if known is None or lower else known.value
        found[place] = Cell(value=value, is_bad=cell.is_bad or (known is not None and known.is_bad))
    firsts = range(0, len(names), each)
    return [f"{names[at]} and {min(each, len(names) - at) - 1} more" for at in firsts], found


def _description(names: Sequence[str], cells: Mapping[tuple[int, int], Cell], unit: str) -> str:
    values = finite(cell.value for cell in cells.values())
    if not values:
        return "no value"
    bad = [place for place, cell in sorted(cells.items()) if cell.is_bad]
    text = f"{len(cells)} values from {tick_text(min(values))} to {tick_text(max(values))} {unit}; {len(bad)} outlined"
    listed = ", ".join(f"{names[row]} to {names[column]}" for row, column in bad[:12])
    return f"{text}: {listed}" if listed else text


_MOST_MATRICES = 4
"""Maps per survey, those with bad links first."""
_ROWS = 400
_NAME_CHARACTERS = 60


def link_matrices(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    """Yield the maps of each survey in a test's artifacts."""
    for path in figure.find_artifacts(folder, result.nodeid, "links-*.json", most=_MOST_MATRICES):
        try:
            survey = figure.matrix(path)
        except Unreadable as error:
            yield figure.unreadable("Links", error)
            continue
        yield from _maps(survey)


def _maps(survey: Mapping[str, Any]) -> Iterator[Figure]:
    across = survey.get("scope") != "node"
    nodes: Sequence[Sequence[int]] = survey["nodes"]
    places = _places(survey, nodes)
    bad = _bad(survey)
    rates = {(one[0], one[1]): math.nan if one[2] is None else float(one[2]) for one in survey["readings"]}
    if across:
        rails = max((len(ranks) for ranks in nodes), default=0)
        groups = [(f"rail {rail}", [ranks[rail] for ranks in nodes if rail < len(ranks)]) for rail in range(rails)]
    else:
        hosts = [places[ranks[0]].host if ranks else "" for ranks in nodes]
        groups = [(host or f"node {node}", list(nodes[node])) for node, host in enumerate(hosts)]
    groups = [(name, ranks) for name, ranks in groups if any({*pair} <= {*ranks} for pair in rates)]
    # Those with bad links come first; else the order stays.
    groups.sort(key=lambda group: -len([pair for pair in bad if {*pair} <= {*group[1]}]))
    more = len(groups) - _MOST_MATRICES
    for name, ranks in groups[:_MOST_MATRICES]:
        yield _map(f"Links, {name}", survey, ranks, places, rates, bad, across=across, more=more)


def _map(
    title: str,
    survey: Mapping[str, Any],
    ranks: Sequence[int],
    places: Mapping[int, _Place],
    rates: Mapping[tuple[int, int], float],
    bad: Container[tuple[int, int]],
    *,
    across: bool,
    more: int,
) -> Figure:
    index = {rank: number for number, rank in enumerate(ranks)}
    inside = {pair: rate for pair, rate in rates.items() if pair[0] in index and pair[1] in index}
    cells = {(index[pair[0]], index[pair[1]]): Cell(value=rate, is_bad=pair in bad) for pair, rate in inside.items()}
    names = [places[rank].short_name(across) for rank in ranks]
    slowest_first = sorted(inside, key=lambda pair: -math.inf if math.isnan(inside[pair]) else inside[pair])
    rows = [
        (
            places[sender].name,
            places[receiver].name,
            f"{inside[sender, receiver]:.4g}",
            "slow or wrong" if (sender, receiver) in bad else "",
        )
        for sender, receiver in slowest_first
    ]
    return Figure(
        title=title,
        svg=heat_map(names, cells, title=title, unit="GB/s", heads=[str(rank) for rank in ranks]),
        caption=_caption(survey, index) + (f" {more} more maps are not shown." if more > 0 else ""),
        table=html_table(
            f"{title}: the slowest first",
            ("From", "To", "GB/s", "Finding"),
            rows,
            numbers=("GB/s",),
            tones=["failed" if pair in bad else "" for pair in slowest_first],
            most=_ROWS if len(inside) <= _ROWS else 64,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A rank's name in the file, such as "rank 3 (gpu-01, GPU 3)", and its parts."""

    name: str
    host: str
    gpu: str

    def short_name(self, across: bool) -> str:
        """Return "rank 3, gpu-01" across nodes, else "rank 3, GPU 3"."""
        part = self.host if across else f"GPU {self.gpu}" if self.gpu else ""
        rank = self.name.partition(" (")[0]
        return f"{rank}, {part}" if part else rank


def _places(survey: Mapping[str, Any], nodes: Sequence[Sequence[int]]) -> dict[int, _Place]:
    listed = survey.get("ranks")
    listed = listed if isinstance(listed, list) else []
    found = {}
    for rank in (rank for node in nodes for rank in node):
        name = one_line(str(listed[rank]), _NAME_CHARACTERS) if rank < len(listed) else f"rank {rank}"
        host, _, gpu = name.partition(" (")[2].rstrip(")").partition(", GPU ")
        found[rank] = _Place(name=name, host=host, gpu=gpu)
    return found


def _culprits(survey: Mapping[str, Any]) -> list[dict[str, Any]]:
    culprits = survey.get("culprits")
    return [one for one in culprits if isinstance(one, dict)] if isinstance(culprits, list) else []


def _bad(survey: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return both directions of every pair that the survey reports as slow or wrong."""
    found: set[tuple[int, int]] = set()
    for pair in (pair for one in _culprits(survey) for pair in one.get("pairs") or ()):
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(rank, int) for rank in pair):
            found |= {(pair[0], pair[1]), (pair[1], pair[0])}
    return found


def _caption(survey: Mapping[str, Any], ranks: Container[int]) -> str:
    """Return the culprits among these ranks, at most three, and the median of all links."""
    parts = []
    for one in _culprits(survey):
        of_culprit = one.get("ranks")
        is_here = not isinstance(of_culprit, list) or any(rank in ranks for rank in of_culprit if isinstance(rank, int))
        if isinstance(one.get("text"), str) and is_here:
            parts.append(f"{one_line(one['text'], 300).rstrip('.')}.")
    parts = parts[:3]
    missing, median = survey.get("not_measured"), survey.get("median")
    if isinstance(missing, list) and missing:
        parts.append(f"{len(missing)} pairs were not measured.")
    if isinstance(median, (int, float)):
        parts.append(f"Median of all links: {median:.4g} GB/s.")
    return " ".join(parts)
