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
            survey = _Survey(figure.matrix(path))
        except Unreadable as error:
            yield figure.unreadable("Links", error)
            continue
        groups = survey.groups()
        more = len(groups) - _MOST_MATRICES
        for name, ranks in groups[:_MOST_MATRICES]:
            yield survey.map(f"Links, {name}", ranks, more)


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


class _Survey:
    """A link survey. ``content`` has been checked as far as :func:`figure.matrix` does, and no further."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.across = content.get("scope") != "node"
        self.nodes: Sequence[Sequence[int]] = content["nodes"]
        self.rates = {(one[0], one[1]): math.nan if one[2] is None else float(one[2]) for one in content["readings"]}
        self.missing, self.median = content.get("not_measured"), content.get("median")
        names, culprits = content.get("ranks"), content.get("culprits")
        names = names if isinstance(names, list) else []
        ranks = [rank for node in self.nodes for rank in node]
        self.places = {rank: _place(str(names[rank]) if rank < len(names) else f"rank {rank}") for rank in ranks}
        culprits = culprits if isinstance(culprits, list) else []
        self.culprits = [one for one in culprits if isinstance(one, dict)]
        self.bad: set[tuple[int, int]] = set()
        """Both directions of every pair that is slow or wrong."""
        for pair in (pair for one in self.culprits for pair in one.get("pairs") or ()):
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(rank, int) for rank in pair):
                self.bad |= {(pair[0], pair[1]), (pair[1], pair[0])}

    def groups(self) -> list[tuple[str, Sequence[int]]]:
        """Return name and ranks of each map, those with the most bad links first; else in their order."""
        found: list[tuple[str, Sequence[int]]]
        if self.across:
            rails = range(max((len(ranks) for ranks in self.nodes), default=0))
            found = [(f"rail {rail}", [ranks[rail] for ranks in self.nodes if rail < len(ranks)]) for rail in rails]
        else:
            hosts = [self.places[ranks[0]].host if ranks else "" for ranks in self.nodes]
            found = [(host or f"node {node}", self.nodes[node]) for node, host in enumerate(hosts)]
        found = [(name, ranks) for name, ranks in found if any({*pair} <= {*ranks} for pair in self.rates)]
        return sorted(found, key=lambda group: -len([pair for pair in self.bad if {*pair} <= {*group[1]}]))

    def map(self, title: str, ranks: Sequence[int], more: int) -> Figure:
        """Return the map of some ranks; ``more`` maps are left out."""
        index = {rank: number for number, rank in enumerate(ranks)}
        inside = {pair: rate for pair, rate in self.rates.items() if {*pair} <= index.keys()}
        cells = {
            (index[sender], index[receiver]): Cell(value=rate, is_bad=(sender, receiver) in self.bad)
            for (sender, receiver), rate in inside.items()
        }
        names = [self.places[rank].short_name(self.across) for rank in ranks]
        slowest_first = sorted(inside, key=lambda pair: -math.inf if math.isnan(inside[pair]) else inside[pair])
        rows = [
            (
                *(self.places[rank].name for rank in pair),
                f"{inside[pair]:.4g}",
                "slow or wrong" if pair in self.bad else "",
            )
            for pair in slowest_first
        ]
        return Figure(
            title=title,
            svg=heat_map(names, cells, title=title, unit="GB/s", heads=[str(rank) for rank in ranks]),
            caption=self._caption(index) + (f" {more} more maps are not shown." if more > 0 else ""),
            table=html_table(
                f"{title}: the slowest first",
                ("From", "To", "GB/s", "Finding"),
                rows,
                numbers=("GB/s",),
                tones=["failed" if pair in self.bad else "" for pair in slowest_first],
                most=_ROWS if len(inside) <= _ROWS else 64,
            ),
        )

    def _caption(self, ranks: Container[int]) -> str:
        """Return the culprits among these ranks, at most three, and the median of all links."""
        parts = []
        for one in self.culprits:
            of_culprit = one.get("ranks")
            is_here = not isinstance(of_culprit, list) or any(
                rank in ranks for rank in of_culprit if isinstance(rank, int)
            )
            if isinstance(one.get("text"), str) and is_here:
                parts.append(f"{one_line(one['text'], 300).rstrip('.')}.")
        parts = parts[:3]
        if isinstance(self.missing, list) and self.missing:
            parts.append(f"{len(self.missing)} pairs were not measured.")
        if isinstance(self.median, (int, float)):
            parts.append(f"Median of all links: {self.median:.4g} GB/s.")
        return " ".join(parts)


def _place(name: str) -> _Place:
    name = one_line(name, _NAME_CHARACTERS)
    host, _, gpu = name.partition(" (")[2].rstrip(")").partition(", GPU ")
    return _Place(name=name, host=host, gpu=gpu)
