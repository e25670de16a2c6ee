"""metrics.prom: a run for node_exporter's textfile collector.

Base units, as Prometheus requires: bytes, seconds, ratios. 1 is only what is known to be good: a run that was cut off,
a rehearsal on cpu, a test that was skipped or never reached is 0. Samples have no timestamps, which the collector would
reject; start and end of the run are metrics of their own.

The number of series is bounded: one per GPU, two or three per test, and per measurement the deciding rank's value with
its host and GPU, for the first ``MOST_MEASUREMENTS``, failures first. The number of those left out is a metric, too.
All ranks' values are in results.json and in the journal.

Source: https://prometheus.io/docs/practices/naming/ ;
https://github.com/prometheus/node_exporter#textfile-collector .
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.verdict import ACCEPTED, VERDICTS
from pytest_gpucluster.metrics import units
from pytest_gpucluster.metrics.measurement import METRICS
from pytest_gpucluster.reports.summary import STATUS_ORDER, Outline, Row, margin_ratio, moment, outline, run_seconds
from pytest_gpucluster.text import one_line

MOST_MEASUREMENTS = 1000
"""More measurements are left out and counted. The suite makes about 300."""

PREFIX = "gpucluster"
_OUTCOMES = ("passed", "failed", "error", "skipped", "running", "in progress", "not run")
_LABEL_CHARACTERS = 128
_LABELS = 12
_BASE = {
    # dimension: (its unit in units.py, the end of the metric's name)
    "amount of data": ("B", "bytes"),
    "data rate": ("B/s", "bytes_per_second"),
    "compute rate": ("FLOPS", "flops"),
    "time": ("s", "seconds"),
    "token rate": ("tokens/s", "tokens_per_second"),
    "image rate": ("images/s", "images_per_second"),
    "file rate": ("files/s", "files_per_second"),
    "power": ("W", "watts"),
    "frequency": ("Hz", "hertz"),
    "temperature": ("degC", "celsius"),
    "ratio": ("ratio", "ratio"),
}
# Ends of this suite's names with a unit that is not the base unit.
_SCALED = ("tflops",)
_LEFT_OUT = "run_left_out_measurements"
_OWN_LABELS = ("criterion", "test", "host", "gpu_uuid", "sku")

Labels = Mapping[str, str]


@dataclass
class _Family:
    """One metric: its help text, and its samples by their labels."""

    help: str
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)


class _Families:
    """Metrics by name in the order of their creation. A collector of prometheus_client."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    @property
    def names(self) -> set[str]:
        """The names in use, without the prefix."""
        return {name.removeprefix(f"{PREFIX}_") for name in self._families}

    def add(self, name: str, help: str, value: float, labels: Labels | None = None) -> bool:
        """Add a sample. Return False, and add nothing, if one with the same labels exists."""
        values = {key: _label_value(label) for key, label in (labels or {}).items()}
        samples = self._families.setdefault(f"{PREFIX}_{name}", _Family(help)).samples
        key = tuple(sorted((name, label) for name, label in values.items() if label))
        if key in samples:
            return False
        samples[key] = value
        return True

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. All samples of one have the same label names; an empty label counts as absent."""
        for name, family in self._families.items():
            metric = Metric(name, family.help, "gauge")
            names = sorted({label for key in family.samples for label, _ in key})
            for key, value in family.samples.items():
                metric.add_sample(name, {**dict.fromkeys(names, ""), **dict(key)}, value)
            yield metric


def render(journal: Journal) -> str:
    """Return metrics.prom of a run, also of one that was cut off."""
    families = _Families()
    overview = outline(journal)
    sku = (journal.limits.sku if journal.limits is not None else None) or ""
    _add_run(families, journal, overview, sku)
    _add_gpus(families, journal, overview, sku)
    _add_tests(families, journal, overview, sku)
    _add_measurements(families, journal, overview, sku)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return generate_latest(registry).decode("utf-8")


def _add_run(families: _Families, journal: Journal, overview: Outline, sku: str) -> None:
    run = journal.run
    families.add(
        "run_info",
        "The run; always 1.",
        1,
        {
            "run_id": run.run_id,
            "host": run.hostname,
            "sku": sku,
            "device": run.device,
            "launcher": run.launcher,
            "profile": journal.workload.profile if journal.workload is not None else "",
            "version": run.plugin_version,
        },
    )
    families.add(
        "run_accepted",
        "1 only if the whole suite passed on GPUs: the verdict is ACCEPTED. 0 for anything else, such as a "
        "rehearsal, a selection, or a run that was cut off.",
        _is(overview.word == ACCEPTED and overview.exit == 0 and not overview.rehearsal),
    )
    for word in dict.fromkeys((*VERDICTS, overview.word)):
        is_verdict = _is(word == overview.word)
        families.add("run_verdict", "1 for the verdict, 0 for the others.", is_verdict, {"verdict": word})
    families.add("run_exit_code", "The exit code of the verdict.", overview.exit)
    families.add("run_rehearsal", "1 on cpu: no statement about hardware.", _is(overview.rehearsal))
    families.add("run_selection", "1 if only a part of the suite was selected.", _is(run.selection))
    families.add("run_ranks", "Ranks as launched.", run.world_size)
    families.add("run_nodes", "Nodes as launched.", run.nnodes)
    families.add("run_duration_seconds", "Duration of the run, as far as it is known.", run_seconds(journal))
    moments = {"start": run.started_at, "end": journal.end.at if journal.end is not None else ""}
    for name, text in moments.items():
        at = moment(text)
        if at is not None:
            help = f"Unix time of the run's {name}; absent if unknown."
            families.add(f"run_{name}_timestamp_seconds", help, at.timestamp())
    for outcome in dict.fromkeys((*_OUTCOMES, *overview.counts)):
        labels = {"outcome": outcome.replace(" ", "_")}
        families.add("run_tests", "Tests by outcome.", overview.counts.get(outcome, 0), labels)
    families.add("run_problems", "Problems outside of any test.", len(journal.problems))


def _add_gpus(families: _Families, journal: Journal, overview: Outline, sku: str) -> None:
    culprit_counts: dict[int, int] = {}
    for row in overview.bad:
        for rank in set(row.result.culprits if row.result is not None else ()):
            culprit_counts[rank] = culprit_counts.get(rank, 0) + 1
    for place in journal.cluster.ranks if journal.cluster is not None else ():
        gpu = place.gpu or {}
        where = {"host": place.host, "gpu_uuid": gpu.get("uuid", ""), "sku": sku, "rank": str(place.rank)}
        info = {"index": gpu.get("index", ""), "name": gpu.get("name", ""), "pci_bus_id": gpu.get("pci_bus_id", "")}
        info |= {"serial": gpu.get("serial", ""), "vbios": gpu.get("vbios", "")}
        info |= {"driver": place.versions.get("driver", "")}
        families.add("gpu_info", "A rank of the run and its GPU; always 1.", 1, where | info)
        families.add(
            "gpu_culprit_tests",
            "Tests that failed or broke and name this GPU's rank as a culprit.",
            culprit_counts.get(place.rank, 0),
            where,
        )


def _add_tests(families: _Families, journal: Journal, overview: Outline, sku: str) -> None:
    for row in overview.rows:
        labels = _of(row) | {"sku": sku}
        families.add(
            "criterion_passed",
            "1 only if the test passed on GPUs. 0 for anything else: failed, broken, skipped, never reached, or "
            "passed in a rehearsal.",
            _is(row.is_good and not overview.rehearsal),
            labels,
        )
        if row.result is not None:
            families.add(
                "criterion_duration_seconds",
                "Duration of the test, with setup and teardown.",
                row.result.duration_seconds,
                labels,
            )
        if row.margin is not None and row.headline is not None:
            families.add(
                "criterion_margin_ratio",
                "Margin of the deciding value as a ratio of its limit; negative: missed.",
                row.margin,
                labels | _where(row.headline, journal),
            )


def _add_measurements(families: _Families, journal: Journal, overview: Outline, sku: str) -> None:
    every = [(row, judged) for row in overview.rows if row.result is not None for judged in row.result.measurements]
    every.sort(key=lambda each: STATUS_ORDER.get(each[1].status, 1))
    names = _Names(families)
    left_out = max(0, len(every) - MOST_MEASUREMENTS)
    for row, judged in every[:MOST_MEASUREMENTS]:
        labels = {**_of(row), **_where(judged, journal), "sku": sku, **_own_labels(judged.labels)}
        left_out += not _add_measurement(families, names.of(judged), judged, labels)
    families.add(
        _LEFT_OUT,
        f"Measurements left out: beyond {MOST_MEASUREMENTS}, without a value, or with the same labels as another.",
        left_out,
    )


def _add_measurement(families: _Families, name: tuple[str, str], judged: JudgedMetric, labels: Labels) -> bool:
    """Add one measurement, its limit and its median; return whether there was a value to add."""
    stem, unit = name
    metric = METRICS.get(judged.metric)
    what = f"{judged.metric}: {metric.doc if metric is not None else 'a metric of the site'}"
    help = one_line(f"{what.rstrip('.')}. The deciding rank's value.", 400)
    if judged.value is None or not families.add(_join(stem, unit), help, _base(judged, judged.value), labels):
        return False
    limit = judged.limit
    bounds = {} if limit is None else {"limit_min": limit.min, "limit_max": limit.max}
    plain = {key: value for key, value in labels.items() if key not in ("host", "gpu_uuid")}
    for end, value in bounds.items():
        if value is not None:
            help = f"The {end[-3:]}imum limit of {judged.metric}."
            families.add(_join(f"{stem}_{end}", unit), help, _base(judged, value), plain)
    if judged.median is not None and len(judged.values) > 1:
        help = f"The median of all ranks of {judged.metric}."
        families.add(_join(f"{stem}_median", unit), help, _base(judged, judged.median), plain)
    share = margin_ratio(judged)
    if share is not None:
        help = f"Margin of {judged.metric} as a ratio of its limit; negative: missed."
        families.add(f"{stem}_margin_ratio", help, share, labels)
    return True


class _Names:
    """Metric -> its name here. No two metrics share a name."""

    def __init__(self, families: _Families) -> None:
        self._taken = {*families.names, _LEFT_OUT}
        self._given: dict[tuple[str, str], tuple[str, str]] = {}

    def of(self, judged: JudgedMetric) -> tuple[str, str]:
        """Return the stem of a metric's name and its unit.

        >>> _Names(_Families()).of(JudgedMetric(metric="nccl.all_reduce.busbw", unit="GB/s"))
        ('nccl_all_reduce_busbw', 'bytes_per_second')
        """
        key = judged.metric, judged.unit
        if key not in self._given:
            unit = _unit_word(judged.unit)
            stem = _snake(judged.metric) or "metric"
            for end in (unit, *_SCALED):
                stem = (stem.removesuffix(f"_{end}") if end else stem) or stem
            unused, number = stem, 1
            while self._taken & _names_of(unused, unit):
                number += 1
                unused = f"{stem}_{number}"
            self._taken |= _names_of(unused, unit)
            self._given[key] = unused, unit
        return self._given[key]


def _names_of(stem: str, unit: str) -> set[str]:
    ends = ("", "_limit_min", "_limit_max", "_median")
    return {f"{stem}_margin_ratio", *(_join(f"{stem}{end}", unit) for end in ends)}


def _unit_word(symbol: str) -> str:
    try:
        return _BASE[units.unit(symbol).dimension][1]
    except UnitError:
        return _snake(symbol)
    except KeyError:  # a count is its own base unit
        return _snake(symbol)


def _base(judged: JudgedMetric, value: float) -> float:
    """Return a value in the base unit; unchanged if none is known."""
    try:
        return units.convert(value, judged.unit, _BASE[units.unit(judged.unit).dimension][0])
    except (UnitError, KeyError):
        return value


def _join(stem: str, unit: str) -> str:
    return f"{stem}_{unit}" if unit else stem


def _snake(text: str) -> str:
    """Return a text as a part of a name: lower-case letters, digits and single underscores."""
    return re.sub(r"_+", "_", re.sub(r"[^a-z0-9]", "_", text.lower())).strip("_")[:120]


def _of(row: Row) -> dict[str, str]:
    # A test that is no criterion has its own name, so that no two tests share a series.
    return {"criterion": row.criterion or row.name, "test": row.nodeid}


def _where(judged: JudgedMetric, journal: Journal) -> dict[str, str]:
    place = journal.place(judged.worst_rank) if judged.worst_rank is not None else None
    return {} if place is None else {"host": place.host, "gpu_uuid": (place.gpu or {}).get("uuid", "")}


def _own_labels(labels: Labels) -> dict[str, str]:
    """Return a measurement's labels under names that are valid for Prometheus and not used by this module."""
    found: dict[str, str] = {}
    for key, value in list(labels.items())[:_LABELS]:
        name = _snake(key)
        if not name or name in (*_OWN_LABELS, *found) or not name[0].isalpha():
            name = _unused(f"label_{name}".rstrip("_"), found)
        found[name] = value
    rest = list(labels.items())[_LABELS:]
    if rest:
        found[_unused("label_others", found)] = ", ".join(f"{key}={value}" for key, value in rest)
    return found


def _unused(name: str, taken: Iterable[str]) -> str:
    unused, number, known = name, 1, set(taken)
    while unused in known:
        number += 1
        unused = f"{name}_{number}"
    return unused


def _label_value(text: str) -> str:
    """Return a label's value: printable and of limited length; a digest keeps a cut one unique."""
    line = "".join(each if each.isprintable() else f"#x{ord(each):02X}" for each in one_line(text, len(text) * 8 + 1))
    if len(line) <= _LABEL_CHARACTERS:
        return line
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{line[: _LABEL_CHARACTERS - 10]}\N{HORIZONTAL ELLIPSIS} {digest}"


def _is(good: bool) -> float:
    return 1.0 if good else 0.0
