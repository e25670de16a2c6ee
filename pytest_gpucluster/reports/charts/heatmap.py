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
    left = 24 + max((text_width(label, 10) for label in labels), default=0.0)
    top = 34.0
    width, height = left + max(count, 1) * size + 12, top + max(count, 1) * (0.68 * size) + 34
    drawing = Drawing(
        max(width, left + 300), height, title=title, description=_description(names, cells, unit), label="heat-map"
    )
    tall = 0.68 * size
    highest = max(finite(cell.value for cell in cells.values()), default=0.0)
    drawing.text(4, 12, f"rows send, columns receive; {unit}", MUTED, size=10)
    for index, label in enumerate(labels):
        drawing.text(left - 5, top + index * tall + tall / 2 + 3.5, label, INK, anchor="end", size=10)
        head = one_line(heads[index], 5) if heads else str(index)
        text = head if has_numbers or index % 4 == 0 else ""
        drawing.text(left + index * size + size / 2, top - 5, text, MUTED, anchor="middle", size=10)
    for (row, column), cell in sorted(cells.items()):
        if row < count and column < count:
            _draw(drawing, cell, (left + column * size, top + row * tall), (size, tall), highest, has_numbers)
    # Outlines last, so that no neighbour covers them.
    for (row, column), cell in sorted(cells.items()):
        if cell.is_bad and row < count and column < count:
            x, y = left + column * size, top + row * tall
            drawing.rectangle(x + 1, y + 1, size - 2, tall - 2, fill="none", stroke=BAD, stroke_width=2.2)
    drawing.rectangle(left, top, count * size, count * tall, fill="none", stroke=GRID, stroke_width=0.8)
    outlined = "; outlined: slow or wrong" if any(cell.is_bad for cell in cells.values()) else ""
    _legend(drawing, left, height - 20, f"{tick_text(highest)} {unit}{outlined}")
    return drawing.done()


def _draw(
    drawing: Drawing,
    cell: Cell,
    at: tuple[float, float],
    size: tuple[float, float],
    highest: float,
    has_numbers: bool,
) -> None:
    (x, y), (width, height) = at, size
    if not math.isfinite(cell.value):
        drawing.rectangle(x, y, width, height, fill="none", stroke=BAD, stroke_width=1, dash="2 2")
        drawing.text(x + width / 2, y + height / 2 + 3.5, "?", BAD, anchor="middle", size=10, bold=True)
        return
    share = 0.0 if highest <= 0 else min(1.0, max(0.0, cell.value / highest))
    drawing.rectangle(x, y, width, height, fill=_colour(share))
    if has_numbers:
        # The numbers' colour depends on the cell's colour, which is the same on a dark page.
        ink = "#fff" if share > 0.62 else "#111"
        text, middle = tick_text(cell.value), x + width / 2
        drawing.text(middle, y + height / 2 + 3.5, text, ink, anchor="middle", size=10, bold=cell.is_bad)


def _legend(drawing: Drawing, x: float, y: float, highest: str) -> None:
    for step in range(10):
        drawing.rectangle(x + 10 * step, y, 10, 9, fill=_colour((step + 0.5) / 10))
    drawing.text(x - 4, y + 8, "0", MUTED, anchor="end", size=10)
    drawing.text(x + 104, y + 8, highest, MUTED, size=10)


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
            yield Figure(title="Links", svg=Markup(""), caption=f"Not shown: {error}")
            continue
        yield from _maps(survey)


def _maps(survey: Mapping[str, Any]) -> Iterator[Figure]:
    across = survey.get("scope") != "node"
    nodes: Sequence[Sequence[int]] = survey["nodes"]
    names = _names(survey, nodes)
    bad = _bad(survey)
    rates = {(one[0], one[1]): math.nan if one[2] is None else float(one[2]) for one in survey["readings"]}
    if across:
        rails = max((len(ranks) for ranks in nodes), default=0)
        groups = [(f"rail {rail}", [ranks[rail] for ranks in nodes if rail < len(ranks)]) for rail in range(rails)]
    else:
        groups = [(_host(names, ranks, f"node {node}"), list(ranks)) for node, ranks in enumerate(nodes)]
    groups = [(name, ranks) for name, ranks in groups if any({*pair} <= {*ranks} for pair in rates)]
    # Those with bad links come first; else the order stays.
    groups.sort(key=lambda group: -len([pair for pair in bad if {*pair} <= {*group[1]}]))
    for name, ranks in groups[:_MOST_MATRICES]:
        place = {rank: index for index, rank in enumerate(ranks)}
        inside = {pair: rate for pair, rate in rates.items() if pair[0] in place and pair[1] in place}
        cells = {
            (place[sender], place[receiver]): Cell(value=rate, is_bad=(sender, receiver) in bad)
            for (sender, receiver), rate in inside.items()
        }
        left_out = len(groups) - _MOST_MATRICES
        yield Figure(
            title=f"Links, {name}",
            svg=heat_map(
                [_row_name(names[rank], across) for rank in ranks],
                cells,
                title=f"Links, {name}",
                unit="GB/s",
                heads=[str(rank) for rank in ranks],
            ),
            caption=_caption(survey, place) + (f" {left_out} more maps are not shown." if left_out > 0 else ""),
            table=html_table(
                f"Links, {name}: the slowest first",
                ("From", "To", "GB/s", "Finding"),
                [
                    (
                        names.get(sender, str(sender)),
                        names.get(receiver, str(receiver)),
                        f"{rate:.4g}",
                        "slow or wrong" if (sender, receiver) in bad else "",
                    )
                    for (sender, receiver), rate in sorted(inside.items(), key=lambda each: _slowest(each[1]))
                ],
                numbers=("GB/s",),
                tones=[
                    "failed" if pair in bad else "" for pair in sorted(inside, key=lambda pair: _slowest(inside[pair]))
                ],
                most=_ROWS if len(inside) <= _ROWS else 64,
            ),
        )


def _slowest(rate: float) -> float:
    return -math.inf if math.isnan(rate) else rate


def _names(survey: Mapping[str, Any], nodes: Sequence[Sequence[int]]) -> dict[int, str]:
    """Return the name of each rank in the file."""
    listed = survey.get("ranks")
    listed = listed if isinstance(listed, list) else []
    ranks = [rank for node in nodes for rank in node]
    return {
        rank: one_line(str(listed[rank]), _NAME_CHARACTERS) if rank < len(listed) else f"rank {rank}" for rank in ranks
    }


def _row_name(name: str, across: bool) -> str:
    """Return "rank 3, gpu-01" across nodes, else "rank 3, GPU 3", of "rank 3 (gpu-01, GPU 3)"."""
    rank, _, place = name.partition(" (")
    host, _, gpu = place.rstrip(")").partition(", GPU ")
    part = host if across else f"GPU {gpu}" if gpu else ""
    return f"{rank}, {part}" if part else rank


def _host(names: Mapping[int, str], ranks: Sequence[int], otherwise: str) -> str:
    """Return the host of "rank 3 (gpu-01, GPU 3)"."""
    name = names.get(ranks[0], "") if ranks else ""
    host = name.partition(" (")[2].rstrip(")").partition(", GPU ")[0]
    return host or otherwise


def _bad(survey: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return both directions of every pair that the survey reports as slow or wrong."""
    found: set[tuple[int, int]] = set()
    culprits = survey.get("culprits")
    for one in culprits if isinstance(culprits, list) else ():
        for pair in one.get("pairs") or () if isinstance(one, dict) else ():
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(rank, int) for rank in pair):
                found |= {(pair[0], pair[1]), (pair[1], pair[0])}
    return found


def _caption(survey: Mapping[str, Any], ranks: Container[int]) -> str:
    """Return the culprits among these ranks, and the median of all links."""
    parts = []
    culprits = survey.get("culprits")
    for one in culprits if isinstance(culprits, list) else ():
        if not isinstance(one, dict) or not isinstance(one.get("text"), str):
            continue
        ranks_of_it = one.get("ranks")
        if not isinstance(ranks_of_it, list) or any(rank in ranks for rank in ranks_of_it if isinstance(rank, int)):
            parts.append(f"{one_line(one['text'], 300).rstrip('.')}.")
    missing = survey.get("not_measured")
    if isinstance(missing, list) and missing:
        parts.append(f"{len(missing)} pairs were not measured.")
    median = survey.get("median")
    if isinstance(median, (int, float)):
        parts.append(f"Median of all links: {median:.4g} GB/s.")
    return " ".join([*parts[:3], *parts[3:][-2:]])
