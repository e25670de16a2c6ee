"""metrics.prom: a run for node_exporter's textfile collector.

1 is only what is known to be good: a run that was cut off, a rehearsal on cpu, a simulated cluster, a test that was
skipped or never reached is 0. Samples have no timestamps, which the collector would reject; start and end of the run
are metrics of their own.

The number of series is bounded: one per GPU, two or three per test, and per measurement the deciding rank's value with
its host and GPU, for the first ``MOST_MEASUREMENTS``, failures first. The number of those left out is a metric, too.
Metric, unit and labels of a measurement are labels here, as results.json has them; that and the journal have all ranks'
values.

Source: https://prometheus.io/docs/practices/naming/ ;
https://github.com/prometheus/node_exporter#textfile-collector .
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import OUTCOMES, REHEARSAL, SIMULATED, RankPlace
from pytest_gpucluster.journal.verdict import VERDICTS
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.reports import summary
from pytest_gpucluster.text import one_line

MOST_MEASUREMENTS = 1000
"""More measurements are left out and counted. The suite makes about 300."""

PREFIX = "gpucluster"
_LABEL_CHARACTERS = 128
_HELP = {
    "run_info": "The run; always 1.",
    "run_accepted": "1 only if the whole suite passed on GPUs: the verdict is ACCEPTED. 0 for anything else, such as a "
    "rehearsal, a simulated cluster, a selection, or a run that was cut off.",
    "run_verdict": "1 for the verdict, 0 for the others.",
    "run_exit_code": "The exit code of the verdict.",
    "run_rehearsal": "1 on cpu: no statement about hardware.",
    "run_simulated": "1 on a simulated cluster: no statement about hardware.",
    "run_selection": "1 if only a part of the suite was selected.",
    "run_ranks": "Ranks as launched.",
    "run_nodes": "Nodes as launched.",
    "run_duration_seconds": "Duration of the run, as far as it is known.",
    "run_start_timestamp_seconds": "Unix time of the run's start; absent if unknown.",
    "run_end_timestamp_seconds": "Unix time of the run's end; absent if unknown.",
    "run_tests": "Tests by outcome.",
    "run_problems": "Problems outside of any test.",
    "gpu_info": "A rank of the run and its GPU; always 1.",
    "gpu_culprit_tests": "Tests that failed or broke and name this GPU's rank as a culprit.",
    "criterion_passed": "1 only if the test passed on GPUs. 0 for anything else: failed, broken, skipped, never "
    "reached, or passed in a rehearsal or on a simulated cluster.",
    "criterion_duration_seconds": "Duration of the test, with setup and teardown.",
    "criterion_margin_ratio": "Margin of the deciding value as a ratio of its limit; negative: missed.",
    "measurement": "The deciding rank's value of a measurement, in the unit of its label.",
    "measurement_limit_min": "Its minimum limit.",
    "measurement_limit_max": "Its maximum limit.",
    "measurement_median": "The median of all ranks.",
    "measurement_margin_ratio": "Its margin as a ratio of its limit; negative: missed.",
    "run_left_out_measurements": f"Measurements left out: beyond {MOST_MEASUREMENTS}, without a value, or with the "
    "same labels as another.",
}
"""Metric -> its help text."""

Labels = Mapping[str, str]


class _Families:
    """Metrics by name in the order of their creation. A collector of prometheus_client."""

    def __init__(self) -> None:
        self._families: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}

    def add(self, name: str, value: float, labels: Labels | None = None) -> bool:
        """Add a sample. Return False, and add nothing, if one with the same labels exists."""
        values = {key: _label_value(label) for key, label in (labels or {}).items()}
        samples = self._families.setdefault(name, {})
        key = tuple(sorted((name, label) for name, label in values.items() if label))
        if key in samples:
            return False
        samples[key] = value
        return True

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. All samples of one have the same label names; an empty label counts as absent."""
        for name, samples in self._families.items():
            metric = Metric(f"{PREFIX}_{name}", _HELP[name], "gauge")
            names = sorted({label for key in samples for label, _ in key})
            for key, value in samples.items():
                metric.add_sample(metric.name, {**dict.fromkeys(names, ""), **dict(key)}, value)
            yield metric


def render(journal: Journal) -> str:
    """Return metrics.prom of a run, also of one that was cut off."""
    families = _Families()
    overview = summary.outline(journal)
    sku = journal.sku or ""
    _add_run(families, journal, overview, sku)
    _add_gpus(families, journal, overview, sku)
    for row in overview.rows:
        # A test that is no criterion has its own name, so that no two tests share a series.
        labels = {"criterion": row.criterion or row.name, "test": row.nodeid, "sku": sku}
        families.add("criterion_passed", row.is_good and not overview.kind, labels)
        if row.result is not None:
            families.add("criterion_duration_seconds", row.result.duration_seconds, labels)
        if row.margin is not None and row.headline is not None:
            families.add("criterion_margin_ratio", row.margin, labels | _where(row.headline, journal))
    _add_measurements(families, journal, overview, sku)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return generate_latest(registry).decode("utf-8")


def _add_run(families: _Families, journal: Journal, overview: summary.Outline, sku: str) -> None:
    run = journal.run
    info = {"run_id": run.run_id, "host": run.hostname, "sku": sku, "device": run.device, "launcher": run.launcher}
    families.add("run_info", 1, info | {"profile": journal.profile, "version": run.plugin_version})
    families.add("run_accepted", overview.is_accepted)
    for word in dict.fromkeys((*VERDICTS, overview.word)):
        families.add("run_verdict", word == overview.word, {"verdict": word})
    families.add("run_exit_code", overview.exit)
    families.add("run_rehearsal", overview.kind == REHEARSAL)
    families.add("run_simulated", overview.kind == SIMULATED)
    families.add("run_selection", run.selection)
    families.add("run_ranks", run.world_size)
    families.add("run_nodes", run.nnodes)
    families.add("run_duration_seconds", summary.run_seconds(journal))
    for name, text in (("start", run.started_at), ("end", journal.end.at if journal.end is not None else "")):
        at = summary.moment(text)
        if at is not None:
            families.add(f"run_{name}_timestamp_seconds", at.timestamp())
    for outcome in dict.fromkeys((*OUTCOMES, summary.RUNNING, summary.IN_PROGRESS, summary.NOT_RUN, *overview.counts)):
        families.add("run_tests", overview.counts.get(outcome, 0), {"outcome": outcome.replace(" ", "_")})
    families.add("run_problems", len(journal.problems))


def _add_gpus(families: _Families, journal: Journal, overview: summary.Outline, sku: str) -> None:
    results = [row.result for row in overview.bad if row.result is not None]
    culprits = Counter(rank for result in results for rank in set(result.culprits))
    for place in journal.cluster.ranks if journal.cluster is not None else ():
        where = _labels_of(place) | {"sku": sku, "rank": str(place.rank)}
        info = {key: (place.gpu or {}).get(key, "") for key in ("name", "pci_bus_id", "serial", "vbios")}
        families.add("gpu_info", 1, where | info | {"driver": place.versions.get("driver", "")})
        families.add("gpu_culprit_tests", culprits[place.rank], where)


def _add_measurements(families: _Families, journal: Journal, overview: summary.Outline, sku: str) -> None:
    every = [(row, judged) for row in overview.rows if row.result is not None for judged in row.result.measurements]
    every.sort(key=lambda each: summary.STATUS_ORDER.get(each[1].status, 1))
    left_out = max(0, len(every) - MOST_MEASUREMENTS)
    for row, judged in every[:MOST_MEASUREMENTS]:
        plain = {"criterion": row.criterion or row.name, "test": row.nodeid, "sku": sku}
        plain |= {"metric": judged.metric, "unit": judged.unit}
        plain["labels"] = ", ".join(f"{key}={value}" for key, value in judged.labels.items())
        labels = plain | _where(judged, journal)
        if judged.value is None or not families.add("measurement", judged.value, labels):
            left_out += 1
            continue
        limit = judged.limit
        for end, value in (
            ("limit_min", None if limit is None else limit.min),
            ("limit_max", None if limit is None else limit.max),
            ("median", judged.median if len(judged.values) > 1 else None),
        ):
            if value is not None:
                families.add(f"measurement_{end}", value, plain)
        share = summary.margin_ratio(judged)
        if share is not None:
            families.add("measurement_margin_ratio", share, labels)
    families.add("run_left_out_measurements", left_out)


def _where(judged: JudgedMetric, journal: Journal) -> dict[str, str]:
    place = journal.place(judged.worst_rank) if judged.worst_rank is not None else None
    return {} if place is None else _labels_of(place)


def _labels_of(place: RankPlace) -> dict[str, str]:
    """Return host, index in nvidia-smi and UUID as dcgm-exporter names them, so that its metrics can be joined."""
    return {"Hostname": place.host, "gpu": (place.gpu or {}).get("index", ""), "UUID": place.uuid}


def _label_value(text: str) -> str:
    """Return a label's value: printable and of limited length; a digest keeps a cut one unique."""
    line = "".join(each if each.isprintable() else f"#x{ord(each):02X}" for each in one_line(text, len(text) * 8 + 1))
    if len(line) <= _LABEL_CHARACTERS:
        return line
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{line[: _LABEL_CHARACTERS - 10]}\N{HORIZONTAL ELLIPSIS} {digest}"
