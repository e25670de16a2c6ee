"""What was run and under which conditions: the facts of a run, its limits, workload, settings and environment."""

from __future__ import annotations

import re

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.reports.header import launcher_text, shape_text
from pytest_gpucluster.reports.html.readable import line, word
from pytest_gpucluster.reports.html.table import Table, table
from pytest_gpucluster.reports.junit_properties import cluster_facts
from pytest_gpucluster.reports.tables import limit_text
from pytest_gpucluster.reports.timing import duration, moment, run_seconds

BASELINE = "baseline"
"""The run's property that says which run its values were held against, beside the limits."""

_MERGED_RUN = re.compile("merged run [0-9]+")
_OF_A_MERGE = re.compile("merged (run|despite) [0-9]+( sha256)?")

Pairs = tuple[tuple[str, str], ...]


def run_facts(journal: Journal) -> Pairs:
    """Return what a reader asks first: which cluster, with which software, when, and how long."""
    run, told = journal.run, cluster_facts(journal)
    began = moment(run.started_at)
    ranks = f"{run.world_size} {'rank' if run.world_size == 1 else 'ranks'}"
    nodes = f"{run.nnodes} {'node' if run.nnodes == 1 else 'nodes'}"
    shape = shape_text(journal.cluster) if journal.cluster is not None and journal.cluster.ranks else ""
    sku = journal.limits.sku if journal.limits is not None else None
    pairs = (
        ("Cluster", shape or "unknown: no rank told where it runs"),
        ("Launched as", f"{ranks} on {nodes} by {launcher_text(run) if run.launcher else 'an unknown launcher'}"),
        ("Limits for", sku or "no known SKU"),
        ("Profile", journal.workload.profile if journal.workload is not None else ""),
        ("Driver", told.get("version.driver", "")),
        ("CUDA", told.get("version.cuda", "")),
        ("NCCL", told.get("version.nccl", "")),
        ("torch", told.get("version.torch", "")),
        ("Started", began.strftime("%Y-%m-%d %H:%M:%S %Z") if began is not None else run.started_at),
        ("Took", duration(run_seconds(journal))),
        ("First host", run.hostname),
    )
    return _pairs(pairs)


def versions(journal: Journal) -> Pairs:
    """Return the versions of software; where ranks differ, each with its ranks."""
    told = cluster_facts(journal)
    of_ranks = {name.removeprefix("version."): value for name, value in told.items() if name.startswith("version.")}
    found = {**journal.run.versions, **of_ranks}
    # The ranks call it by its module's name; where they differ from rank 0, that is to be seen.
    own = found.pop("pytest_gpucluster", "") or journal.run.plugin_version
    found = {"pytest-gpucluster": own, **found}
    return _pairs(tuple(found.items()))


def limits_table(journal: Journal) -> Table | None:
    """Return each limit that a value was held against, with where it stands and where it comes from."""
    uses: dict[tuple[str, str, str, str], int] = {}
    for result in journal.results:
        for judged in result.measurements:
            if judged.limit is not None:
                key = judged.metric, limit_text(judged), judged.limit.source, judged.limit.origin
                uses[key] = uses.get(key, 0) + 1
    if not uses:
        return None
    rows = [
        (metric, limit, source or "not named", origin or "unknown", str(number))
        for (metric, limit, source, origin), number in sorted(uses.items())
    ]
    head = ("Metric", "Limit", "Source", "Stands in", "Values")
    return table("Limits that values were held against", head, rows, numbers=("Values",))


def limit_files(journal: Journal) -> Pairs:
    """Return the files of limits in force, with their SHA-256."""
    files = journal.limits.files if journal.limits is not None else ()
    told = [(path, f"SHA-256 {digest}" if digest else "not readable: no digest") for path, digest in files]
    # Once a run: what each value is beside the baseline's stands among the measurements.
    told += [("Baseline", value) for name, value in journal.properties if name == BASELINE]
    return _pairs(tuple(told))


def properties(journal: Journal) -> Pairs:
    """Return the run's own properties, each once: what stands elsewhere in the page is none of them."""
    told = [(name, value) for name, value in journal.properties if name != BASELINE]
    if journal.run.merged_from:
        told = [(name, value) for name, value in told if not _OF_A_MERGE.fullmatch(name)]
    return _pairs(tuple(dict.fromkeys(told)))


def merged_runs(journal: Journal) -> Pairs:
    """Return how each of the merged runs ended, and why."""
    known = journal.properties if journal.run.merged_from else ()
    return _pairs(tuple((name, value) for name, value in known if _MERGED_RUN.fullmatch(name)))


def merged_table(journal: Journal) -> Table | None:
    """Return the runs that were merged into this one; None for a run of its own."""
    runs = journal.run.merged_from
    rows = [
        (str(number), each.run_id, each.started_at, f"{each.verdict}, exit code {each.exit}", each.journal, each.sha256)
        for number, each in enumerate(runs, start=1)
    ]
    head = ("No.", "Run", "Started", "Verdict", "Journal", "SHA-256 of the journal")
    return table("The runs that were merged, the oldest first", head, rows) if rows else None


def workload_table(journal: Journal) -> Table | None:
    """Return the sizes, shapes and times in force, with where each was set."""
    workload = journal.workload
    if workload is None or not workload.values:
        return None
    rows = [(key, value, workload.origins.get(key, "")) for key, value in workload.values.items()]
    return table(f"Profile {word(workload.profile)}, {line(workload.file)}", ("Setting", "Value", "Set in"), rows)


def options_table(journal: Journal) -> Table | None:
    """Return the options of the run with their origin, those that somebody has set first."""
    options = sorted(journal.run.options.items(), key=lambda each: each[1][1] == "default")
    rows = [(name, value, origin) for name, (value, origin) in options]
    return table("Options", ("Option", "Value", "Set by"), rows) if rows else None


def environment(journal: Journal) -> tuple[Pairs, Table | None]:
    """Return the system of the first rank, and the variables that change what is measured."""
    where = journal.environment
    if where is None:
        return (), None
    pairs = (
        ("Host", where.host),
        ("System", where.system),
        ("CPUs", "" if where.cpus is None else str(where.cpus)),
        ("Command line", " ".join(journal.run.argv)),
        ("Run", journal.run.run_id),
    )
    variables = list(where.variables.items())
    return _pairs(pairs), table("Environment variables", ("Variable", "Value"), variables) if variables else None


def _pairs(pairs: Pairs) -> Pairs:
    return tuple((word(name), line(value)) for name, value in pairs if value)
