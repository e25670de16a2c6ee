"""The facts of a run in the page: limits, workload, settings, environment, nodes and GPUs.

What all ranks have in common is shown once; what differs has a row per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import RankPlace
from pytest_gpucluster.reports.junit import cluster_facts
from pytest_gpucluster.reports.markup import Table, html_table, line, word
from pytest_gpucluster.reports.summary import duration, moment, run_seconds
from pytest_gpucluster.reports.tables import limit_text, quantity
from pytest_gpucluster.reports.terminal import launcher_text, shape_text
from pytest_gpucluster.text import plural

BASELINE = "baseline"
"""The run's property that names the baseline."""

Pairs = tuple[tuple[str, str], ...]


def run_facts(journal: Journal) -> Pairs:
    """Return the main facts: cluster, software, start and duration."""
    run, facts = journal.run, cluster_facts(journal)
    began = moment(run.started_at)
    ranks, nodes = plural(run.world_size, "rank"), plural(run.nnodes, "node")
    shape = shape_text(journal.cluster) if journal.cluster is not None and journal.cluster.ranks else ""
    sku = journal.limits.sku if journal.limits is not None else None
    pairs = (
        ("Cluster", shape or "unknown: no rank reported its place"),
        ("Launched as", f"{ranks} on {nodes} by {launcher_text(run) if run.launcher else 'an unknown launcher'}"),
        ("Limits for", sku or "no known SKU"),
        ("Profile", journal.workload.profile if journal.workload is not None else ""),
        ("Driver", facts.get("version.driver", "")),
        ("CUDA", facts.get("version.cuda", "")),
        ("NCCL", facts.get("version.nccl", "")),
        ("torch", facts.get("version.torch", "")),
        ("Started", began.strftime("%Y-%m-%d %H:%M:%S %Z") if began is not None else run.started_at),
        ("Duration", duration(run_seconds(journal))),
        ("First host", run.hostname),
    )
    return _pairs(pairs)


def versions(journal: Journal) -> Pairs:
    """Return the versions of software; where ranks differ, each with its ranks."""
    facts = cluster_facts(journal)
    of_ranks = {name.removeprefix("version."): value for name, value in facts.items() if name.startswith("version.")}
    found = {**journal.run.versions, **of_ranks}
    # The ranks use its module's name; they may differ from rank 0.
    own = found.pop("pytest_gpucluster", "") or journal.run.plugin_version
    found = {"pytest-gpucluster": own, **found}
    return _pairs(tuple(found.items()))


def limits_table(journal: Journal) -> Table | None:
    """Return each limit that a value was compared with, with its place and its source."""
    uses: dict[tuple[str, str, str, str], int] = {}
    for result in journal.results:
        for judged in result.measurements:
            if judged.limit is not None:
                key = judged.metric, limit_text(judged), judged.limit.source, judged.limit.origin
                uses[key] = uses.get(key, 0) + 1
    rows = [
        (metric, limit, source or "not named", origin or "unknown", str(number))
        for (metric, limit, source, origin), number in sorted(uses.items())
    ]
    head = ("Metric", "Limit", "Source", "Defined in", "Values")
    return html_table("Limits that values were compared with", head, rows, numbers=("Values",))


def limit_files(journal: Journal) -> Pairs:
    """Return the files of limits in force, with their SHA-256."""
    files = journal.limits.files if journal.limits is not None else ()
    pairs = [(path, f"SHA-256 {digest}" if digest else "not readable: no digest") for path, digest in files]
    pairs += [("Baseline", value) for name, value in journal.properties if name == BASELINE]
    return _pairs(tuple(pairs))


def properties(journal: Journal) -> Pairs:
    """Return the run's properties, each once, without those shown elsewhere in the page."""
    return _pairs(tuple(dict.fromkeys(pair for pair in journal.properties if pair[0] != BASELINE)))


def merged_table(journal: Journal) -> Table | None:
    """Return the runs that were merged into this one; None if it was not merged."""
    runs = journal.run.merged_from
    rows = [
        (str(number), each.run_id, each.started_at, f"{each.verdict}, exit code {each.exit}", each.journal, each.sha256)
        for number, each in enumerate(runs, start=1)
    ]
    head = ("No.", "Run", "Started", "Verdict", "Journal", "SHA-256 of the journal")
    return html_table("The runs that were merged, the oldest first", head, rows)


def workload_table(journal: Journal) -> Table | None:
    """Return the sizes, shapes and times in force with their origin."""
    workload = journal.workload
    if workload is None:
        return None
    rows = [(key, value, workload.origins.get(key, "")) for key, value in workload.values.items()]
    return html_table(f"Profile {word(workload.profile)}, {line(workload.file)}", ("Setting", "Value", "Set in"), rows)


def options_table(journal: Journal) -> Table | None:
    """Return the options of the run with their origin, those set by the operator first."""
    options = sorted(journal.run.options.items(), key=lambda each: each[1][1] == "default")
    rows = [(name, value, origin) for name, (value, origin) in options]
    return html_table("Options", ("Option", "Value", "Set by"), rows)


def environment(journal: Journal) -> tuple[Pairs, Table | None]:
    """Return the system of the first rank, and the variables that influence measurements."""
    found = journal.environment
    if found is None:
        return (), None
    pairs = (
        ("Host", found.host),
        ("System", found.system),
        ("CPUs", "" if found.cpus is None else str(found.cpus)),
        ("Command line", " ".join(journal.run.argv)),
        ("Run", journal.run.run_id),
    )
    variables = list(found.variables.items())
    return _pairs(pairs), html_table("Environment variables", ("Variable", "Value"), variables)


def _pairs(pairs: Pairs) -> Pairs:
    return tuple((word(name), line(value)) for name, value in pairs if value)


_NAMES = {
    "index": "GPU",
    "name": "Model",
    "uuid": "UUID",
    "serial": "Serial",
    "pci_bus_id": "PCI",
    "vbios": "VBIOS",
    "board_part_number": "Board part number",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP firmware",
    "memory_bytes": "Memory",
    "power_limit_watts": "Power limit",
    "ecc": "ECC",
    "mig": "MIG",
}
# They identify a rank, so they are in its row even if there is only one rank.
_OF_EACH = ("host", "index", "uuid", "serial", "pci_bus_id")
_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Names and values that are the same on every rank, and a row per rank."""

    same: tuple[tuple[str, str], ...]
    ranks: Table | None
    problems: tuple[str, ...]


def inventory(journal: Journal) -> Inventory:
    """Return the ranks: host, GPU, UUID, serial, PCI, VBIOS, driver and what else each rank reported."""
    if journal.cluster is None or not journal.cluster.ranks:
        problems = journal.cluster.problems if journal.cluster is not None else ()
        return Inventory(same=(), ranks=None, problems=tuple(map(line, problems)))
    ranks = sorted(journal.cluster.ranks, key=lambda place: place.rank)
    facts = [_facts(place) for place in ranks]
    keys = list(dict.fromkeys(key for each in facts for key in each))
    values = {key: {each.get(key, "") for each in facts} for key in keys}
    same = [key for key in keys if key not in _OF_EACH and len(values[key]) == 1]
    differ = [key for key in keys if key not in same]
    rows = [(str(place.rank), *(each.get(key, "") for key in differ)) for place, each in zip(ranks, facts, strict=True)]
    return Inventory(
        same=tuple((_title(key), next(iter(values[key]))) for key in same),
        ranks=html_table("Ranks", ("Rank", *map(_title, differ)), rows, numbers=("GPU",), most=_RANKS),
        problems=tuple(map(line, journal.cluster.problems)),
    )


def _facts(place: RankPlace) -> dict[str, str]:
    facts = {"host": word(place.host), "local_rank": str(place.local_rank)}
    gpu = place.gpu or {}
    known = [key for key in _NAMES if key in gpu]
    facts |= {key: word(_with_unit(key, gpu[key])) for key in (*known, *(key for key in gpu if key not in _NAMES))}
    return facts | {f"version.{name}": word(version) for name, version in place.versions.items()}


def _with_unit(key: str, text: str) -> str:
    """Return a fact with its unit; unchanged if it is not the expected number."""
    if key in ("ecc", "mig"):
        return {"True": "on", "False": "off", "None": "unknown"}.get(text, text)
    try:
        if key == "memory_bytes":
            # Enough digits to distinguish a GPU with one retired page.
            return quantity(int(text) / 2**30, "GiB", digits=6)
        if key == "power_limit_watts":
            return f"{float(text):g} W"
    except (ValueError, OverflowError):
        pass  # returned unchanged
    return "unknown" if text == "None" else text


def _title(key: str) -> str:
    if key in ("host", "local_rank"):
        return {"host": "Host", "local_rank": "Local rank"}[key]
    return _NAMES.get(key, word(key.removeprefix("version.").replace("_", " ")))
