"""The matrix of links that a survey has left, as a heat map for each node, or for each rail across the nodes."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.reports.charts import artifact
from pytest_gpucluster.reports.charts.artifact import Unreadable
from pytest_gpucluster.reports.charts.figure import Figure
from pytest_gpucluster.reports.charts.matrix import Cell, heat_map
from pytest_gpucluster.reports.html.table import table
from pytest_gpucluster.text import one_line

_MOST = 4
"""Maps of one survey: those with bad links first."""
_ROWS = 400
_NAME_CHARACTERS = 60


def link_matrices(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    """Yield the maps of each survey that a test has left."""
    for path in artifact.found(folder, result.nodeid, "links-*.json", most=_MOST):
        try:
            told = artifact.matrix(path)
        except Unreadable as error:
            yield Figure(title="Links", svg=Markup(""), caption=f"Not shown: {error}")
            continue
        yield from _maps(told)


def _maps(told: Mapping[str, Any]) -> Iterator[Figure]:
    across = told.get("scope") != "node"
    nodes: Sequence[Sequence[int]] = told["nodes"]
    names = _names(told, nodes)
    bad = _bad(told)
    rates = {(one[0], one[1]): math.nan if one[2] is None else float(one[2]) for one in told["readings"]}
    if across:
        rails = max((len(ranks) for ranks in nodes), default=0)
        groups = [(f"rail {rail}", [ranks[rail] for ranks in nodes if rail < len(ranks)]) for rail in range(rails)]
    else:
        groups = [(_host(names, ranks, f"node {node}"), list(ranks)) for node, ranks in enumerate(nodes)]
    groups = [(name, ranks) for name, ranks in groups if any({*pair} <= {*ranks} for pair in rates)]
    # Those with bad links come first; else the order stays.
    groups.sort(key=lambda group: -len([pair for pair in bad if {*pair} <= {*group[1]}]))
    for name, ranks in groups[:_MOST]:
        place = {rank: index for index, rank in enumerate(ranks)}
        inside = {pair: rate for pair, rate in rates.items() if pair[0] in place and pair[1] in place}
        cells = {
            (place[sender], place[receiver]): Cell(value=rate, is_bad=(sender, receiver) in bad)
            for (sender, receiver), rate in inside.items()
        }
        left_out = len(groups) - _MOST
        yield Figure(
            title=f"Links, {name}",
            svg=heat_map(
                [_row_name(names[rank], across) for rank in ranks],
                cells,
                title=f"Links, {name}",
                unit="GB/s",
                heads=[str(rank) for rank in ranks],
            ),
            caption=_caption(told, place) + (f" {left_out} more maps are not shown." if left_out > 0 else ""),
            table=table(
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


def _names(told: Mapping[str, Any], nodes: Sequence[Sequence[int]]) -> dict[int, str]:
    """Return what the file calls each rank."""
    listed = told.get("ranks")
    listed = listed if isinstance(listed, list) else []
    ranks = [rank for node in nodes for rank in node]
    return {
        rank: one_line(str(listed[rank]), _NAME_CHARACTERS) if rank < len(listed) else f"rank {rank}" for rank in ranks
    }


def _row_name(name: str, across: bool) -> str:
    """Return of "rank 3 (gpu-01, GPU 3)" what the title does not say: across nodes the host, else the GPU."""
    rank, _, place = name.partition(" (")
    host, _, gpu = place.rstrip(")").partition(", GPU ")
    told = host if across else f"GPU {gpu}" if gpu else ""
    return f"{rank}, {told}" if told else rank


def _host(names: Mapping[int, str], ranks: Sequence[int], otherwise: str) -> str:
    """Return the host in "rank 3 (gpu-01, GPU 3)"."""
    name = names.get(ranks[0], "") if ranks else ""
    host = name.partition(" (")[2].rstrip(")").partition(", GPU ")[0]
    return host or otherwise


def _bad(told: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return both directions of every pair that the survey found slow or wrong."""
    found: set[tuple[int, int]] = set()
    culprits = told.get("culprits")
    for one in culprits if isinstance(culprits, list) else ():
        for pair in one.get("pairs") or () if isinstance(one, dict) else ():
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(rank, int) for rank in pair):
                found |= {(pair[0], pair[1]), (pair[1], pair[0])}
    return found


def _caption(told: Mapping[str, Any], ranks: Container[int]) -> str:
    """Return who is to blame among these ranks, and the median of all links."""
    parts = []
    culprits = told.get("culprits")
    for one in culprits if isinstance(culprits, list) else ():
        if not isinstance(one, dict) or not isinstance(one.get("text"), str):
            continue
        whose = one.get("ranks")
        if not isinstance(whose, list) or any(rank in ranks for rank in whose if isinstance(rank, int)):
            parts.append(f"{one_line(one['text'], 300).rstrip('.')}.")
    missing = told.get("not_measured")
    if isinstance(missing, list) and missing:
        parts.append(f"{len(missing)} pairs of all were not measured.")
    median = told.get("median")
    if isinstance(median, (int, float)):
        parts.append(f"Median of all links: {median:.4g} GB/s.")
    return " ".join([*parts[:3], *parts[3:][-2:]])
