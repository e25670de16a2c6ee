"""The properties of the testsuite: what was decided, run and measured, where, and with what."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.reports.tables import limit_text, told_pairs
from pytest_gpucluster.text import rank_ranges


def suite_properties(journal: Journal, named: Iterable[tuple[str, TestResult]]) -> dict[str, str]:
    """Return all of it in the order in which it is written.

    Args:
        journal: of the run.
        named: every finished test after the name that its testcase has, CLASSNAME.NAME.
    """
    run = journal.run
    properties = {
        "verdict": journal.verdict,
        "exit": str(journal.exit),
        "reason": journal.reason,
        "rehearsal": "true" if run.rehearsal else "false",
        "selection": "true" if run.selection else "false",
        "deviations": "; ".join(journal.deviations),
        "device": run.device,
        "world_size": str(run.world_size),
        "nnodes": str(run.nnodes),
        "launcher": run.launcher,
        "run_id": run.run_id,
        "version.pytest-gpucluster": run.plugin_version,
    }
    properties |= {f"version.{name}": version for name, version in run.versions.items()}
    properties |= cluster_facts(journal)
    for name, (value, origin) in run.options.items():
        if origin != "default":
            properties[f"option.{name}"] = f"{value} (from {origin})" if origin else value
    properties |= _workload_properties(journal)
    properties = {name: value for name, value in properties.items() if value}
    for name, value in journal.properties:
        _set(properties, name, value)
    for where, result in named:
        for name, text in told_pairs(result):
            _set(properties, f"{where}[{name}]", text)
        for judged in result.measurements:
            if judged.limit is not None:
                source = f"; {judged.limit.source}" if judged.limit.source else ""
                limit = f"{limit_text(judged)}; {judged.limit.origin or 'of unknown origin'}{source}"
                _set(properties, f"limit[{judged.metric}]", limit, unless_same=True)
    return properties


def _workload_properties(journal: Journal) -> dict[str, str]:
    """Return what was run, each value with where it was set."""
    workload = journal.workload
    if workload is None:
        return {}
    properties = {"workload.profile": workload.profile, "workload.file": workload.file}
    for key, value in workload.values.items():
        origin = workload.origins.get(key, "")
        properties.setdefault(f"workload.{key}", f"{value} ({origin})" if origin else value)
    return properties


def cluster_facts(journal: Journal) -> dict[str, str]:
    """Return hosts, GPUs and versions; where ranks differ, each value with its ranks."""
    ranks = journal.cluster.ranks if journal.cluster else ()
    facts: dict[str, dict[str, list[int]]] = {}
    for place in ranks:
        known = {"host": place.host, "gpu": (place.gpu or {}).get("name", "")}
        known |= {f"version.{name}": version for name, version in place.versions.items()}
        for name, value in known.items():
            if value:
                facts.setdefault(name, {}).setdefault(value, []).append(place.rank)
    return {
        name: next(iter(values))
        if len(values) == 1
        else ", ".join(f"{value} ({rank_ranges(members)})" for value, members in values.items())
        for name, values in facts.items()
    }


def _set(properties: dict[str, str], name: str, value: str, *, unless_same: bool = False) -> None:
    """Add a property and never replace one: a second one of a name gets a number."""
    free, number = name, 1
    while free in properties:
        if unless_same and properties[free] == value:
            return
        number += 1
        free = f"{name} ({number})"
    properties[free] = value
