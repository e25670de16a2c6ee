"""What an acceptance record says: a pure function of a journal, so that it can be made again and compared."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster.acceptance_record.canonical import plain
from pytest_gpucluster.acceptance_record.objections import objections
from pytest_gpucluster.acceptance_record.parts import missing, nodes
from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.journal_measurements import JudgedMetric


def content(journal: Journal, *, sha256: str) -> dict[str, Any]:
    """Return all that a record holds but by whom and when it was made.

    Args:
        journal: of the run, read with its samples: what each node has told of its network adapters is among them.
        sha256: of the journal's file.
    """
    against, found = objections(journal), nodes(journal)
    limits, end = journal.limits, journal.end
    told = {
        "accepted": not against,
        "not_accepted_because": list(against),
        "verdict": {"word": journal.verdict, "exit": journal.exit, "reason": journal.reason},
        "run": {
            "run_id": journal.run.run_id,
            "started_at": journal.run.started_at,
            "ended_at": end.at if end is not None else "",
            "host": journal.run.hostname,
            "launcher": journal.run.launcher,
            "world_size": journal.run.world_size,
            "nnodes": journal.run.nnodes,
            "profile": journal.workload.profile if journal.workload is not None else "",
            "plugin_version": journal.run.plugin_version,
            "rehearsal": journal.run.rehearsal,
            "selection": journal.run.selection,
            "expected": _option(journal, "expect"),
            "merged_from": [
                {
                    "run_id": one.run_id,
                    "started_at": one.started_at,
                    "verdict": one.verdict,
                    "journal": one.journal,
                    "sha256": one.sha256,
                }
                for one in journal.run.merged_from
            ],
            "merged_despite": list(journal.run.merged_despite),
        },
        "journal": {"sha256": sha256},
        "limits": {
            "sku": limits.sku if limits is not None else None,
            "gpu_name": limits.gpu_name if limits is not None else None,
            "files": [
                {"path": path, "sha256": digest} for path, digest in (limits.files if limits is not None else ())
            ],
        },
        "nodes": found,
        "missing": missing(found),
        "tests": [_test(result, journal) for result in journal.results],
    }
    made = plain(told)
    assert isinstance(made, dict)
    return made


def _option(journal: Journal, name: str) -> str:
    """Return the value of an option that was given; "" if it was not."""
    value, _ = journal.run.options.get(name, ("None", ""))
    return "" if value == "None" else value


def _test(result: TestResult, journal: Journal) -> dict[str, Any]:
    return {
        "nodeid": result.nodeid,
        "criterion": result.criterion,
        "outcome": result.outcome,
        "attempts": result.attempts,
        "message": result.message,
        "measurements": [_measurement(judged, journal) for judged in result.measurements],
    }


def _measurement(judged: JudgedMetric, journal: Journal) -> dict[str, Any]:
    limit = judged.limit
    place = None if judged.worst_rank is None else journal.place(judged.worst_rank)
    return {
        "metric": judged.metric,
        "labels": dict(judged.labels),
        "unit": judged.unit,
        "status": judged.status,
        "value": judged.value,
        "interval": None if judged.interval is None else list(judged.interval),
        "worst_rank": judged.worst_rank,
        "worst_host": place.host if place is not None else "",
        "worst_gpu_uuid": (place.gpu or {}).get("uuid", "") if place is not None else "",
        "margin": judged.margin,
        "limit": None
        if limit is None
        else {
            "min": limit.min,
            "max": limit.max,
            "min_ratio_to_median": limit.min_ratio_to_median,
            **({} if limit.expected is None else {"expected": limit.expected}),
            "expect_transport": None if limit.expect_transport is None else list(limit.expect_transport),
            "source": limit.source,
            "origin": limit.origin,
        },
    }
