"""results.json: verdict and measurements, for programs.

Each key is described in docs/results.schema.json, which :mod:`pytest_gpucluster.reports.results_schema` makes. The
order of keys is fixed, and tests have the order of the run, so two files can be compared line by line. JSON has no NaN
and no infinity: they are the texts "NaN", "Infinity" and "-Infinity", as in the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpucluster.journal.fields import JudgedLimit, JudgedMetric
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal
from pytest_gpucluster.journal.records import Cluster, PartOfTime, Problem, RankPlace, TestResult
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.journal.verdict import ACCEPTED
from pytest_gpucluster.metrics.measurement import number_to_json, stopped_to_json
from pytest_gpucluster.metrics.time_budget import PARTS
from pytest_gpucluster.reports.summary import Outline, Row, is_better_higher, outline, peak_value, run_seconds
from pytest_gpucluster.reports.tables import worst_telemetry

SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes away; a new key does not raise it."""


def render(journal: Journal) -> str:
    """Return results.json of a run, also of one that was cut off. It is ASCII."""
    return json.dumps(document(journal), indent=2, allow_nan=False) + "\n"


def document(journal: Journal) -> dict[str, Any]:
    """Return results.json as plain JSON types."""
    overview = outline(journal)
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": _verdict(overview),
        "run": _run(journal),
        "cluster": _cluster(journal.cluster),
        "limits": _limits(journal),
        "environment": _environment(journal),
        "workload": _workload(journal),
        "tests": [_test(row, journal) for row in overview.rows],
        "not_run": [
            {"nodeid": row.nodeid, "name": row.name, "criterion": row.criterion, "outcome": row.outcome, "why": row.why}
            for row in overview.did_not_run
        ],
        "tightest": [
            {"nodeid": row.nodeid, "measurement": _index(row, judged), "margin": judged.margin}
            for row, judged in overview.tightest()
        ],
        "problems": [_problem(problem) for problem in journal.problems],
        "properties": [list(pair) for pair in journal.properties],
        "links": {"journal": JOURNAL_FILE, "artifacts": ARTIFACTS},
    }


def _verdict(overview: Outline) -> dict[str, Any]:
    return {
        "word": overview.word,
        "exit": overview.exit,
        "reason": overview.reason,
        # Not merely exit code 0, which a rehearsal and a selection have too.
        "accepted": overview.word == ACCEPTED and overview.exit == 0 and not overview.rehearsal,
        "rehearsal": overview.rehearsal,
        "counts": dict(overview.counts),
    }


def _run(journal: Journal) -> dict[str, Any]:
    run, end = journal.run, journal.end
    return {
        "run_id": run.run_id,
        "started_at": run.started_at,
        "ended_at": end.at if end is not None else None,
        "seconds": number_to_json(run_seconds(journal)),
        "closed_by": end.by if end is not None else None,
        "cut": journal.cut,
        "merged_from": [
            {
                "journal": each.journal,
                "sha256": each.sha256,
                "run_id": each.run_id,
                "started_at": each.started_at,
                "verdict": each.verdict,
                "exit": each.exit,
            }
            for each in run.merged_from
        ],
        "merged_despite": list(run.merged_despite),
        "hostname": run.hostname,
        "launcher": run.launcher,
        "device": run.device,
        "selection": run.selection,
        "deviations": list(journal.deviations),
        "world_size": run.world_size,
        "nnodes": run.nnodes,
        "argv": list(run.argv),
        "options": {name: {"value": value, "origin": origin} for name, (value, origin) in run.options.items()},
        "versions": dict(run.versions),
        "plugin_version": run.plugin_version,
    }


def _cluster(cluster: Cluster | None) -> dict[str, Any]:
    ranks = cluster.ranks if cluster is not None else ()
    return {
        "ranks": [
            {
                "rank": place.rank,
                "host": place.host,
                "local_rank": place.local_rank,
                "node_rank": place.node_rank,
                "gpu": dict(place.gpu) if place.gpu else None,
                "versions": dict(place.versions),
            }
            for place in ranks
        ],
        "problems": list(cluster.problems) if cluster is not None else [],
    }


def _limits(journal: Journal) -> dict[str, Any] | None:
    limits = journal.limits
    if limits is None:
        return None
    files = [{"path": path, "sha256": digest} for path, digest in limits.files]
    return {"sku": limits.sku, "gpu_name": limits.gpu_name, "files": files}


def _environment(journal: Journal) -> dict[str, Any] | None:
    found = journal.environment
    if found is None:
        return None
    return {"host": found.host, "system": found.system, "cpus": found.cpus, "variables": dict(found.variables)}


def _workload(journal: Journal) -> dict[str, Any] | None:
    workload = journal.workload
    if workload is None:
        return None
    values = {key: {"value": value, "origin": workload.origins.get(key, "")} for key, value in workload.values.items()}
    return {"profile": workload.profile, "file": workload.file, "values": values}


def _test(row: Row, journal: Journal) -> dict[str, Any]:
    result = row.result or TestResult(nodeid=row.nodeid, outcome="error", phase="")
    started = result.started_at
    if row.result is None and journal.running is not None and journal.running.nodeid == row.nodeid:
        started = journal.running.at
    return {
        "nodeid": row.nodeid,
        "name": row.name,
        "criterion": row.criterion,
        "outcome": row.outcome,
        "message": result.message or row.why,
        "text": result.text,
        "phase": result.phase or None,
        "xfail": result.wasxfail,
        "attempts": result.attempts,
        "applicable": result.applicable,
        "unjudged": result.unjudged,
        "started_at": started or None,
        "seconds": number_to_json(result.duration_seconds),
        "spent": _spent(result.spent),
        "headline": None if row.headline is None else _index(row, row.headline),
        "measurements": [_measurement(judged, journal) for judged in result.measurements],
        "ranks": [{"rank": each.rank, "outcome": each.outcome, "message": each.message} for each in result.ranks],
        "culprits": list(result.culprits),
        "released": list(result.released),
        "isolation": _isolation(result.isolation),
        "properties": [list(pair) for pair in result.properties],
        "artifacts": f"{ARTIFACTS}/{artifacts_name(row.nodeid)}",
    }


def _spent(parts: Mapping[str, PartOfTime]) -> dict[str, Any] | None:
    if not parts.keys() >= set(PARTS):
        return None
    return {
        part: {
            "seconds": number_to_json(times.seconds),
            "most_seconds": number_to_json(times.most_seconds),
            "most_rank": times.most_rank,
        }
        for part, times in ((part, parts[part]) for part in PARTS)
    }


def _index(row: Row, judged: JudgedMetric) -> int:
    measurements = row.result.measurements if row.result is not None else ()
    return next(number for number, each in enumerate(measurements) if each is judged)


def _measurement(judged: JudgedMetric, journal: Journal) -> dict[str, Any]:
    higher = is_better_higher(judged)
    return {
        "metric": judged.metric,
        "labels": dict(judged.labels),
        "unit": judged.unit,
        "better": None if higher is None else "higher" if higher else "lower",
        "status": judged.status,
        "reason": judged.reason,
        "inconclusive": judged.inconclusive,
        "stopped": None if judged.stopped is None else stopped_to_json(judged.stopped),
        "value": _number(judged.value),
        "interval": _pair(judged.interval),
        "worst": None if judged.worst_rank is None else _place(judged.worst_rank, journal),
        "limit": _limit(judged.limit),
        "shipped_limit": _limit(judged.shipped),
        "margin": _number(judged.margin),
        "peak": _number(peak_value(judged)),
        "peak_ratio": _number(judged.peak_ratio),
        "median": _number(judged.median),
        "mean": _number(judged.mean),
        "ratio_to_median": _number(judged.ratio_to_median),
        "values": {str(rank): number_to_json(value) for rank, value in judged.values.items()},
        "baseline": _baseline(judged.baseline),
        "telemetry": worst_telemetry(judged),
    }


def _limit(limit: JudgedLimit | None) -> dict[str, Any] | None:
    if limit is None:
        return None
    return {
        "min": _number(limit.min),
        "max": _number(limit.max),
        "min_ratio_to_median": _number(limit.min_ratio_to_median),
        "expected": _number(limit.expected),
        "expect_transport": None if limit.expect_transport is None else list(limit.expect_transport),
        "source": limit.source,
        "origin": limit.origin,
    }


def _place(rank: int, journal: Journal) -> dict[str, Any]:
    place = journal.place(rank) or RankPlace(rank=rank)
    return {"rank": rank, "host": place.host or None, "gpu_uuid": (place.gpu or {}).get("uuid")}


def _baseline(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the comparison with the baseline. The journal stores it unchecked, so every key is checked here."""
    if not found:
        return None
    old = found.get("old")
    return {
        "kind": str(found.get("kind") or ""),
        "old": _quantity(old.get("value") if isinstance(old, Mapping) else None),
        "old_rank": _count(found.get("old_rank")),
        "rank": _count(found.get("rank")),
        "matched_by": str(found.get("matched_by") or ""),
        "change_ratio": _quantity(found.get("change_ratio")),
        "allowed_ratio": _quantity(found.get("allowed_ratio")),
        "decides": found.get("decides") is True,
        "why": str(found.get("why") or ""),
    }


def _quantity(value: object) -> float | str | None:
    """Return a number as the journal writes it; None for anything else."""
    if isinstance(value, str):
        return value if value in ("NaN", "Infinity", "-Infinity") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return number_to_json(value)


def _isolation(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the result of a search for culprits. The journal stores it unchecked, so every key is checked here."""
    if not found:
        return None
    names = found.get("names")
    names_by_unit: Mapping[str, Any] = names if isinstance(names, Mapping) else {}

    def named(units: object) -> list[str]:
        return [str(names_by_unit.get(str(unit), unit)) for unit in _items(units)]

    return {
        "culprits": [
            {
                "names": named(culprit.get("units")),
                "kind": str(culprit.get("kind", "")),
                "failed": _count(culprit.get("failed")),
                "probes": _count(culprit.get("probes")),
                "evidence": [str(line) for line in _items(culprit.get("evidence"))],
            }
            for culprit in _items(found.get("culprits"))
            if isinstance(culprit, Mapping)
        ],
        "cleared": named(found.get("cleared")),
        "undecided": named(found.get("undecided")),
        "why_undecided": str(found.get("why_undecided") or ""),
        "reproduced": found.get("reproduced") is True,
        "cut_short": str(found.get("cut_short") or ""),
    }


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _problem(problem: Problem) -> dict[str, Any]:
    return {"name": problem.name, "outcome": problem.outcome, "message": problem.message, "text": problem.text}


def _number(value: float | None) -> float | str | None:
    return None if value is None else number_to_json(value)


def _pair(ends: tuple[float, float] | None) -> list[float | str] | None:
    return None if ends is None else [number_to_json(end) for end in ends]
