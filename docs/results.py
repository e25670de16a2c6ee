"""Write docs/results.md: what was measured on GPUs, from the journals of the runs that measured it.

python docs/results.py JOURNAL ...

Without a journal the page says of every metric that it has not been measured.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal, locate, read
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.metrics import datasheets, measurement
from pytest_gpucluster.reports import tables
from pytest_gpucluster.text import one_line

PAGE = Path(__file__).with_name("results.md")
NOT_MEASURED = "not measured"
_CELL_CHARACTERS = 400

_INTRODUCTION = """\
# Results on GPUs

This page is made from journals by `python docs/results.py JOURNAL ...`. Do not edit it. A figure is here only if it
stands in the journal of a run on GPUs, which is named by its run id and the SHA-256 of its `journal.jsonl`. What CPU
ranks do says nothing about hardware and never stands here.
"""

_LEGEND = """\
Each value is that of the worst rank, and its interval encloses the true median with 95 % confidence. The share is that
of the data sheet peak. Telemetry is what the GPU of the worst rank did in the same window.
"""


class NoEvidence(Exception):
    """A journal that says nothing about GPUs."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a kind of GPU is to reach here. A target, not a result."""

    sku: str
    metric: str
    least: float
    unit: str
    instead: str = ""
    source: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The journal of a run on GPUs."""

    journal: Journal
    sha256: str

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs of all ranks, each once."""
        ranks = self.journal.cluster.ranks if self.journal.cluster is not None else ()
        return tuple(dict.fromkeys(place.gpu.get("name", "") for place in ranks if place.gpu))

    @property
    def measured(self) -> Iterator[tuple[TestResult, JudgedMetric]]:
        """Every measurement with its test, in the order of the run."""
        return ((result, judged) for result in self.journal.results for judged in result.measurements)


def _goals() -> Iterator[Goal]:
    yield Goal(
        sku="H200",
        metric="matmul.bf16.best_tflops",  # as the figure in the same row: the best of a search over shapes
        least=790.0,
        unit="TFLOPS",
        instead="or the best of `torch.matmul` in the same run",
        source=(
            "this project's goal. For comparison: 794.5 TFLOPS, found on an H100 SXM by a search over many shapes and "
            "given for the H200 too (stas00/ml-engineering, compute/accelerator/README.md, Maximum Achievable Matmul "
            "FLOPS comparison table)"
        ),
    )
    peaks = datasheets.SKUS["H200"].peaks
    assert peaks is not None
    least = 4.3
    yield Goal(
        sku="H200",
        metric="hbm.copy.bandwidth",
        least=least,
        unit="TB/s",
        source=(
            f"this project's goal: derived, {tables.share(least / peaks.hbm_tb_per_second)} of "
            f"{peaks.hbm_tb_per_second:g} TB/s ({peaks.source})"
        ),
    )


def evidence(path: Path) -> Evidence:
    """Read a journal that may stand on the page.

    Raises:
        JournalError: it cannot be read.
        NoEvidence: it is that of a rehearsal, or names no GPU.
    """
    place = locate(path)
    journal = read(place, keep_samples=False)
    if journal.run.rehearsal or journal.run.device != "cuda":
        device = journal.run.device or "an unknown device"
        raise NoEvidence(f"{place}: a rehearsal on {device}; it says nothing about hardware: name a run on GPUs")
    found = Evidence(journal=journal, sha256=hashlib.sha256(place.read_bytes()).hexdigest())
    if not found.gpus:
        raise NoEvidence(f"{place}: no rank of this run names its GPU, so no result of it belongs to a GPU")
    return found


def page(runs: Sequence[Evidence] = ()) -> str:
    """Return the whole page."""
    runs = sorted(runs, key=lambda run: (run.gpus, run.journal.run.started_at))
    parts = [_INTRODUCTION]
    if not runs:
        parts.append("**Nothing has been measured on a GPU yet.**\n")
    parts += _goal_section(runs)
    if runs:
        parts.append(_LEGEND)
    for run in runs:
        parts += _run_section(run)
    parts += _missing_section(runs)
    return "\n".join(parts)


def _goal_section(runs: Sequence[Evidence]) -> Iterator[str]:
    yield "## Goals\n"
    yield "Targets, not results. The last column is the best value on this page.\n"
    yield from _table(
        ("GPU", "metric", "goal", "source", "measured"),
        (
            (
                goal.sku,
                f"`{goal.metric}`",
                " ".join(filter(None, [f">= {tables.quantity(goal.least, goal.unit)}", goal.instead])),
                _plain(goal.source),
                _best(goal, runs),
            )
            for goal in _goals()
        ),
    )


def _best(goal: Goal, runs: Sequence[Evidence]) -> str:
    """Return the best value of a goal's metric that was measured as it should be, on GPUs of its kind only."""
    sku = datasheets.SKUS[goal.sku]
    good = [
        (judged.value, judged, run)
        for run in runs
        if all(sku.matches(name) for name in run.gpus)
        for result, judged in run.measured
        if judged.metric == goal.metric
        and result.outcome == "passed"
        and judged.status in ("passed", "recorded")
        and not judged.inconclusive
        and judged.value is not None
    ]
    if not good:
        return NOT_MEASURED
    value, judged, run = max(good, key=lambda each: each[0])
    text = tables.quantity(value, judged.unit, compared_with=goal.least)
    return _plain(f"{text} ({', '.join(filter(None, [_labels(judged), f'run {run.journal.run.run_id}']))})")


def _run_section(run: Evidence) -> Iterator[str]:
    journal = run.journal
    yield f"## {_plain(', '.join(run.gpus))}, {_plain(journal.run.started_at[:10] or 'of an unknown date')}\n"
    yield from _table(("what", "value"), ((_plain(name), _plain(value)) for name, value in _facts(run) if value))
    yield from _table(
        ("metric", "labels", "status", "value", "95 % interval", "of peak", "limit", "telemetry"),
        (_measurement_row(result, judged) for result, judged in run.measured),
    )


def _facts(run: Evidence) -> Iterator[tuple[str, str]]:
    journal = run.journal
    about, workload = journal.run, journal.workload
    yield "run id", about.run_id
    yield "SHA-256 of the journal", run.sha256
    yield "verdict", f"{journal.verdict}: {journal.reason}"
    if journal.cut:
        yield "journal", "its last line is cut off and left out"
    yield "started", about.started_at
    ranks, nodes = (
        f"{count} {what}{'s' * (count != 1)}" for count, what in ((about.world_size, "rank"), (about.nnodes, "node"))
    )
    yield "GPUs", f"{ranks} on {nodes}, {', '.join(run.gpus)}"
    for name, title in {"driver": "driver", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL"}.items():
        yield title, ", ".join(_versions(journal, name)) or "unknown"
    yield "pytest-gpucluster", about.plugin_version
    yield "selection", "only a selection of the suite ran" if about.selection else ""
    if workload is None:
        yield "profile", about.options["profile"][0] if "profile" in about.options else "unknown"
        return
    yield "profile", f"{workload.profile} ({workload.file})" if workload.file else workload.profile
    for key, value in workload.values.items():
        origin = workload.origins.get(key, "")
        yield key, f"{value} ({origin})" if origin else value


def _versions(journal: Journal, name: str) -> list[str]:
    """Return the versions of something on all ranks, each once."""
    places = journal.cluster.ranks if journal.cluster is not None else ()
    found = [place.versions.get(name, "") for place in places] or [journal.run.versions.get(name, "")]
    return [version for version in dict.fromkeys(found) if version]


def _measurement_row(result: TestResult, judged: JudgedMetric) -> Sequence[str]:
    status = judged.status if result.outcome == "passed" else f"{judged.status}; its test: {result.outcome}"
    if judged.inconclusive:
        status += f"; inconclusive: {judged.inconclusive}"
    value = tables.quantity(judged.value, judged.unit)
    limit = ""
    if judged.limit is not None:
        origin = f" ({judged.limit.origin})" if judged.limit.origin else ""
        limit = tables.limit_text(judged) + origin
    return (
        f"`{judged.metric}`" if judged.metric in measurement.METRICS else _plain(judged.metric),
        _plain(_labels(judged)),
        _plain(status),
        _plain(f"{value} (worst of {len(judged.values)} ranks)" if len(judged.values) > 1 else value),
        _plain(tables.interval_text(judged, judged.interval).removeprefix(", 95 % interval ")),
        "" if judged.peak_ratio is None else tables.share(judged.peak_ratio),
        _plain(limit),
        _plain(tables.worst_telemetry(judged)),
    )


def _labels(judged: JudgedMetric) -> str:
    return ", ".join(f"{key}={value}" for key, value in judged.labels.items())


def _missing_section(runs: Sequence[Evidence]) -> Iterator[str]:
    measured = {judged.metric for run in runs for _, judged in run.measured if judged.value is not None}
    missing = [metric for metric in measurement.METRICS.values() if metric.name not in measured]
    if not missing:
        return
    yield "## Not measured\n"
    yield from _table(
        ("metric", "unit", "what it is", "on a GPU"),
        ((f"`{m.name}`", m.unit, _plain(m.doc), NOT_MEASURED) for m in missing),
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    for row in rows:
        yield _row(row)
    yield ""


def _row(cells: Sequence[str]) -> str:
    # Within a table a pipe ends the cell, wherever it stands.
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(text: str) -> str:
    """Return a text from outside so that Markdown shows it as it is, on one line."""
    return re.sub(r"([\\`*<])", r"\\\1", one_line(text, _CELL_CHARACTERS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and return the exit code: 0, or 2 if a journal cannot stand on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journals", metavar="JOURNAL", nargs="*", type=Path, help="a journal.jsonl or a run's folder")
    parser.add_argument("--out", type=Path, default=PAGE, help="where to write the page (default: docs/results.md)")
    options = parser.parse_args(arguments)
    try:
        text = page([evidence(path) for path in options.journals])
    except (JournalError, NoEvidence) as error:
        print(f"results.py: {error}", file=sys.stderr)
        return 2
    options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
