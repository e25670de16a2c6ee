"""The runs of one cluster over time: the GPUs that failed in several of them, and how far each is behind the others.

A GPU is known by its UUID, or else by host and number: another one in the same slot is another GPU. It has failed in a
run where a test names it, alone or with others of its node. How far it is behind is its worst value as a share of the
median of all ranks in that run, over the tests whose values spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gpucluster.analysis.fleet import NodeRun
from pytest_gpucluster.analysis.output import Block, Rows
from pytest_gpucluster.journal.verdict import marked
from pytest_gpucluster.reports.charts.plots import Level, Line, line_chart, ratios_to_median
from pytest_gpucluster.reports.failures import BROKEN, FAILED, UNKNOWN, cluster_map
from pytest_gpucluster.reports.summary import outline
from pytest_gpucluster.text import heads, plural

REPEATED = 2
"""From this number of runs on a GPU that has failed is a repeat offender."""
_ABSENT = " "
_MOST_LINES = 8
_HEADS = heads("GPU, failed, runs, first, worst, last", right="first, worst, last")


@dataclass(frozen=True, kw_only=True)
class GpuHistory:
    """One GPU in the runs of a history, the oldest first.

    Attributes:
        name: host and number where it was last, and the beginning of its UUID.
        marks: as in the map of a run (``failures.MARKS``), a blank where it took no part.
        shares: its worst value as a share of the median; None where it has none.
    """

    name: str
    marks: str
    shares: Sequence[float | None]

    @property
    def failures(self) -> int:
        """The number of runs in which it failed."""
        return sum(mark in (FAILED, BROKEN) for mark in self.marks)


@dataclass(frozen=True, kw_only=True)
class History:
    """The runs of a cluster, the oldest first, and its GPUs, those with the most failures first."""

    runs: Sequence[NodeRun]
    gpus: Sequence[GpuHistory]
    unreadable: Sequence[tuple[str, str]]
    """Path of each journal that cannot be read, and why."""

    @property
    def is_good(self) -> bool | None:
        """Whether no GPU has failed in several runs; None if none is known to, but a journal cannot be read."""
        return False if self.offenders else None if self.unreadable else True

    @property
    def offenders(self) -> Sequence[GpuHistory]:
        """The GPUs that have failed in several runs."""
        return [gpu for gpu in self.gpus if gpu.failures >= REPEATED]

    @property
    def summary(self) -> str:
        """Return how many GPUs failed repeatedly, in one line."""
        once = sum(gpu.failures == 1 for gpu in self.gpus)
        found = f"{plural(len(self.offenders), 'GPU')} failed in {REPEATED} runs or more, {once} in one"
        unread = f", {plural(len(self.unreadable), 'journal')} cannot be read" if self.unreadable else ""
        return f"{plural(len(self.runs), 'run')} of {plural(len(self.gpus), 'GPU')}: {found}{unread}"


def history(runs: Iterable[NodeRun], *, unreadable: Sequence[tuple[str, str]] = ()) -> History:
    """Return the history of runs in any order."""
    ordered = sorted(runs, key=lambda run: run.journal.run.started_at)
    names: dict[str, str] = {}
    marks: dict[str, list[str]] = {}
    shares: dict[str, list[float | None]] = {}
    for number, run in enumerate(ordered):
        overview, worst = outline(run.journal), dict[int, float]()
        for judged in (row.headline for row in overview.rows if row.headline is not None):
            for rank, share in ratios_to_median(judged).items():
                worst[rank] = min(share, worst.get(rank, share))
        for gpu in (gpu for node in cluster_map(run.journal, overview) for gpu in node.gpus):
            place = f"{gpu.place.host} GPU {gpu.index}"
            key = gpu.place.uuid or place
            names[key] = f"{place} {gpu.place.uuid[:12]}".strip()
            marks.setdefault(key, [_ABSENT] * len(ordered))[number] = gpu.mark
            shares.setdefault(key, [None] * len(ordered))[number] = worst.get(gpu.place.rank)
    gpus = [GpuHistory(name=name, marks="".join(marks[key]), shares=shares[key]) for key, name in names.items()]
    gpus.sort(key=lambda gpu: (-gpu.failures, gpu.name))
    return History(runs=ordered, gpus=gpus, unreadable=unreadable)


def history_blocks(found: History) -> Iterator[Block]:
    """Yield the runs, a row for each GPU that has failed, and for the page a chart of them and the rows of all."""
    yield from (f"note: {why if path in why else f'{path}: {why}'}" for path, why in found.unreadable)
    yield from (f"note: {run.path}: its last line is truncated and left out" for run in found.runs if run.journal.cut)
    for run in found.runs:
        journal = run.journal
        yield f"  {journal.run.started_at[:16]} {marked(journal.verdict, journal.run.kind)}: {run.path}"
    bad = [gpu for gpu in found.gpus if gpu.failures]
    if bad:
        yield ""
        yield Rows(
            caption="GPUs that have failed, the most often first", heads=_HEADS, rows=[(_cells(gpu), ()) for gpu in bad]
        )
    if len(found.runs) > 1 and found.gpus:
        yield _chart(found, bad[:_MOST_LINES])
    rows = [(_cells(gpu), ()) for gpu in found.gpus]
    yield Rows(caption="All GPUs", heads=_HEADS, rows=rows, on_page_only=True)
    yield ""
    yield f"runs, the oldest first: {FAILED} failed, {BROKEN} broken, . OK, {UNKNOWN} not measured, ~ all failed alike"
    yield found.summary


def _cells(gpu: GpuHistory) -> tuple[str, ...]:
    known = [share for share in gpu.shares if share is not None]
    present = len(gpu.marks) - gpu.marks.count(_ABSENT)
    shares = (f"{100 * share:.1f} %" for share in (known[0], min(known), known[-1])) if known else ("", "", "")
    return (gpu.name, f"{gpu.failures} of {present}", gpu.marks.replace(_ABSENT, "_"), *shares)


def _chart(found: History, gpus: Sequence[GpuHistory]) -> Block:
    lines = [
        Line(name=gpu.name, points=[(number, 100 * share) for number, share in enumerate(gpu.shares, start=1) if share])
        for gpu in gpus
    ]
    slowest = [
        min((share for gpu in found.gpus if (share := gpu.shares[number])), default=0.0)
        for number in range(len(found.runs))
    ]
    points = [(number, 100 * share) for number, share in enumerate(slowest, start=1) if share]
    lines.append(Line(name="slowest GPU", points=points, tone="muted", dashed=True))
    return line_chart(
        lines,
        title="The worst value of each GPU that has failed, as a share of the median",
        x_label="run",
        y_label="% of the median",
        levels=[Level(name="median", value=100.0, tone="muted")],
        x_ticks={number: str(number) for number in range(1, 1 + len(found.runs))},
    )
