"""What failed, and where: the failures of a run by the place of their culprit, and a map of its nodes and GPUs.

A failure counts with the culprit that takes part in it: of a slow GPU and the collectives that it slows down, the map
marks the GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import RankPlace
from pytest_gpucluster.judge.misses import explanation
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.metrics.finding import has_findings
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.reports.charts.plots import missing_ranks
from pytest_gpucluster.reports.findings import isolation_of
from pytest_gpucluster.reports.summary import GROUPS, NODE, Outline, Row, display_name, missed_ratio, ratios_to_others
from pytest_gpucluster.reports.tables import headline_text, margin
from pytest_gpucluster.text import rank_ranges, some_of

OK, FAILED, BROKEN, SHARED, UNKNOWN = ".", "F", "E", "~", "?"
MARKS: Mapping[str, str] = {
    OK: "OK",
    FAILED: "failed",
    BROKEN: "broken",
    SHARED: "fails, no culprit",
    UNKNOWN: "not measured",
}
"""The mark of a GPU in the map -> what it means, in words."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A rank's GPU in the map."""

    place: RankPlace
    mark: str = OK
    rows: tuple[Row, ...] = ()
    """The failures of which it is a culprit, the worst first."""

    @property
    def index(self) -> str:
        """Return its index in nvidia-smi, or the local rank."""
        return (self.place.gpu or {}).get("index", str(self.place.local_rank))


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node in the map, or several that are healthy."""

    name: str
    """Its host, or a host list."""
    gpus: tuple[Gpu, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether no GPU has a mark."""
        return all(gpu.mark == OK for gpu in self.gpus)


def failures_by_place(journal: Journal, overview: Outline) -> dict[frozenset[int], list[Row]]:
    """Return the ranks of each culprit -> its failures, the worst first: a finding before a missed rate; places of the
    fewest ranks come first.

    A few GPUs that each miss a limit of a test of nodes, in which each works alone, are a place each, unless they are
    all of a node. What contains the ranks of an earlier place counts with it, but for findings, which have causes of
    their own. Failures without a culprit come last, with no rank.
    """
    found: dict[frozenset[int], list[Row]] = {}
    culprits = {row.nodeid: culprit_ranks(row, journal) for row in overview.bad}
    nodes = grouped((place.host, place.rank) for place in journal.ranks).values()

    def severity(row: Row) -> tuple[float, bool, float]:
        few = len(culprits[row.nodeid]) or math.inf
        return few, row.outcome != "failed", -math.inf if row.margin is None else row.margin

    for row in sorted(overview.bad, key=severity):
        all_ranks = culprits[row.nodeid]
        is_node = any(len(node) > 1 and all_ranks.issuperset(node) for node in nodes)
        for ranks, own in [(all_ranks, row)] if is_node else _apart(row, all_ranks):
            place = next((known for known in found if known and known < ranks and not _has_findings(row)), ranks)
            found.setdefault(place, []).append(own)
    return found


def _has_findings(row: Row) -> bool:
    return row.result is not None and has_findings(row.result.text)


def failures_elsewhere(journal: Journal, overview: Outline) -> dict[str, str]:
    """Return of each limit that more ranks miss than a culprit among them: the test's id -> "gpu-01 GPU 3 (rank 7),
    which failed hbm[read]", the first one of several."""
    found = {}
    for ranks, (worst, *rows) in failures_by_place(journal, overview).items():
        text = f"{place_text(ranks, journal)}, which failed {display_name(worst.name)}"
        missed = [row for row in rows if row.headline is not None and row.headline.status == "failed"]
        found.update({row.nodeid: text for row in missed if ranks < culprit_ranks(row, journal)})
    return found


def places_text(journal: Journal, overview: Outline, reason: str) -> str:
    """Return the places of the culprits, where the reason of the verdict is a failed test; else an empty text."""
    if not any(reason.startswith(row.nodeid) for row in overview.bad):
        return ""
    places = [place_text(ranks, journal) for ranks in failures_by_place(journal, overview) if ranks]
    return some_of(places, _PLACES, "; ")


_PLACES = 8
_FEW = 4
"""More ranks that miss a limit share a cause."""


def _apart(row: Row, ranks: frozenset[int]) -> Iterator[tuple[frozenset[int], Row]]:
    """Yield the ranks of each place of a failure, and the failure as it is there."""
    judged, result = row.headline, row.result
    of_each = row.group == NODE and judged is not None and {*missing_ranks(judged)} == ranks
    if judged is None or result is None or not of_each or not 1 < len(ranks) <= _FEW:
        yield ranks, row
        return
    ratios = ratios_to_others(judged)
    for rank in sorted(ranks, key=judged.values.__getitem__):
        value, interval, ratio = judged.values[rank], judged.intervals.get(rank), ratios.get(rank)
        distance = margin(judged, value, interval)
        own = replace(judged, value=value, worst_rank=rank, interval=interval, margin=distance, ratio_to_median=ratio)
        why = next((each.message for each in result.ranks if each.rank == rank), row.why)
        its = replace(result, culprits=(rank,), isolation={})
        yield frozenset({rank}), replace(row, headline=own, why=why, result=its)


def cluster_map(journal: Journal, overview: Outline) -> tuple[Node, ...]:
    """Return the nodes with their GPUs in the order of the ranks; no node before the ranks are known.

    A GPU is OK that no failure names, where a test that passed has measured more than the deployment.
    """
    passed = [row for row in overview.rows if row.is_good and row.group != GROUPS[0]]
    has_measured = any(row.result is not None and row.result.measurements for row in passed)
    marks = {place.rank: OK if has_measured else UNKNOWN for place in journal.ranks}
    rows: dict[int, list[Row]] = {}
    for ranks, failures in reversed(failures_by_place(journal, overview).items()):
        all_alike = len(ranks) == len(marks) > 1 and not any(map(_has_findings, failures))
        is_shared = not ranks or all_alike
        for rank in (ranks or marks) & marks.keys():
            broken = all(row.outcome != "failed" for row in failures)
            marks[rank] = SHARED if is_shared else BROKEN if broken else FAILED
            rows[rank] = failures + ([] if is_shared else rows.get(rank, []))
    gpus = [Gpu(place=place, mark=marks[place.rank], rows=tuple(rows.get(place.rank, ()))) for place in journal.ranks]
    gpus.sort(key=lambda gpu: (gpu.place.node_rank, gpu.place.host, gpu.place.rank))
    by_host = groupby(gpus, key=lambda gpu: (gpu.place.node_rank, gpu.place.host))
    return tuple(Node(name=host, gpus=tuple(each)) for (_, host), each in by_host)


def merged_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield healthy nodes with as many GPUs as one, then the others."""
    healthy: dict[int, list[Node]] = {}
    others: list[Node] = []
    for node in nodes:
        (healthy.setdefault(len(node.gpus), []) if node.is_healthy else others).append(node)
    for each in healthy.values():
        try:
            name = compress_hostlist(node.name for node in each)
        except LaunchError:  # a name that no host list can hold
            name = some_of([node.name for node in each])
        yield Node(name=name, gpus=each[0].gpus)
    yield from others


def culprit_ranks(row: Row, journal: Journal) -> frozenset[int]:
    """Return the ranks of the culprits: those that the search for them found, or else those that the test named."""
    if row.result is None:
        return frozenset()
    found = isolation_of(row.result.isolation)
    names = [name for culprit in found.culprits for name in found.named(culprit.units)] if found is not None else []
    ranks = [
        place.rank
        for place in journal.ranks
        if place.host in names or any(name.startswith(f"rank {place.rank} (") for name in names)
    ]
    return frozenset(ranks or row.result.culprits)


def place_text(ranks: Collection[int], journal: Journal) -> str:
    """Return where ranks are: "gpu-02 GPU 3 (rank 11)", "gpu-02, all 8 GPUs", "all 16 ranks"."""
    if len(ranks) > 1 and len(ranks) == journal.run.world_size:
        return f"all {len(ranks)} ranks"
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        place = journal.place(rank)
        by_host.setdefault("" if place is None else place.host, []).append(rank)
    return some_of([_place_on_host(host, on_host, journal) for host, on_host in by_host.items()])


def _place_on_host(host: str, ranks: Sequence[int], journal: Journal) -> str:
    places = [place for place in journal.ranks if place.host == host]
    if len(ranks) > 1 and len(ranks) == len(places):
        return f"{host}, all {len(ranks)} GPUs"
    gpus = [place.gpu.get("index", "?") for place in places if place.gpu and place.rank in ranks]
    named = f" GPU {', '.join(gpus)}" if gpus else ""
    return f"{host}{named} ({rank_ranges(ranks)})".strip()


def failure_text(row: Row, journal: Journal | None, *, name: str = "") -> str:
    """Return where and why a test did not pass: "gpu-02 GPU 3 (rank 11): tflops 584.4 < 700 TFLOPS, -16.5 %", or with
    the whole message where no value decided."""
    if journal is None:
        return row.why
    ranks, text = culprit_ranks(row, journal), _miss_text(row)
    if text.startswith(tuple(f"rank {rank} (" for rank in ranks if len(ranks) == 1)):
        text = text.partition("): ")[2] or text  # the place has its rank
    return ": ".join(filter(None, (place_text(ranks, journal), name, text)))


_OF_A_TRACEBACK = re.compile(r"^E +(?:\w+\.)*")
"""What pytest writes before the name of an exception."""


def _miss_text(row: Row) -> str:
    judged = row.headline
    if judged is not None and judged.status == "failed" and row.why.startswith(("isolated: ", judged.metric)):
        own = None if judged.value is None else margin(judged, judged.value)
        expected, carrier = judged.limit and judged.limit.expect_transport, judged.labels.get("transport")
        over = f", over {carrier} and not {' or '.join(expected)}" if expected and carrier not in expected else ""
        several = len({each.metric for each in row.result.measurements if each.limit} if row.result else ()) > 1
        text = f"{judged.metric.rpartition('.')[2]} " * several + headline_text(judged) + over
        origin = judged.limit.origin if judged.limit else ""
        text += "" if origin.startswith("thresholds.yaml") or not origin else f" ({origin})"  # a limit of the site
        return text if missed_ratio(judged) or (own is not None and own < 0) else judged.reason
    if row.result is None or not row.why.endswith("\N{HORIZONTAL ELLIPSIS}"):
        return row.why
    start = row.why[:-1]
    later = start.partition("): ")[2] or start  # the text has the rank in a line of its own
    uncut = start.rpartition("; ")[0]  # of several findings
    cut = f"{uncut}; and more" if uncut else row.why
    whole = next((each for each in row.result.text.splitlines() if start in each or later in each), cut)
    return _OF_A_TRACEBACK.sub("", whole)


def advice(row: Row) -> list[str]:
    """Return what may explain a failure by the telemetry of the worst rank, and what to do, as far as it is known; of
    what to do not the beginning of another one."""
    judged, result = row.headline, row.result
    if result is None:
        return []
    remedies = [remedy for _, remedy in advice_in((result.message, result.text))]
    found = [f"what to do: {each}" for each in remedies if not any(o != each and o.startswith(each) for o in remedies)]
    if judged is not None and judged.status == "failed" and judged.worst_rank is not None:
        own = judged.telemetry.get(judged.worst_rank, {})
        whole = {} if own.get("samples") else result.telemetry.get(judged.worst_rank, {})
        of_rate = judged.limit is None or judged.limit.max is None
        found.insert(0, explanation({**whole, **own}, of_rate=of_rate))
    return list(dict.fromkeys(filter(None, found)))[:3]


_MOST_ADVICE = 64
_ADVICE = re.compile(r"(?:(?P<found>.{1,2000}?); )?what to do: *(?P<remedy>.+)")


def advice_in(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return (finding or "", what to do) for each advice in some texts, each once, in their order.

    Checks of GPUs and nodes write a line for each finding (``metrics.finding``); other failures end with "what to do".
    """
    found: dict[tuple[str, str], None] = {}
    for text in texts:
        for raw in text.splitlines():
            stripped = raw.strip()
            # A line that quotes source code or a pytest marker is no advice.
            if stripped.startswith((">", "raise ", "E  ")):
                stripped = stripped.lstrip("E ") if stripped.startswith("E  ") else ""
            match = _ADVICE.fullmatch(stripped)
            if match is not None and len(found) < _MOST_ADVICE:
                found.setdefault((match["found"] or "", match["remedy"]))
    return list(found)
