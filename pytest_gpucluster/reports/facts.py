"""The facts of a run: its shape, cluster, limits, settings, versions and workload.

What all ranks have in common is listed once; where they differ, each value has its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import SIMULATED, Cluster
from pytest_gpucluster.text import paragraph, plural, rank_ranges

NAME = "gpucluster"
_SOFTWARE = {"driver": "driver", "cuda": "CUDA", "nccl": "NCCL", "torch": "torch"}
_CPU = "CPU rank"


def header_lines(journal: Journal, *, width: int = 80) -> list[str]:
    """Return the header of a run as lines no wider than ``width``, as far as it is known yet."""
    return [line for what, text in facts(journal).items() for line in fact(what, text, width=width)]


def cluster_lines(journal: Journal, *, width: int = 80) -> list[str]:
    """Return the lines of the header that need the ranks' facts: the cluster, and the limits for its GPUs."""
    return [line for what, text in _cluster_facts(journal) for line in fact(what, text, width=width)]


def fact(what: str, text: str, *, width: int) -> list[str]:
    """Return one fact of the header as lines: "gpucluster limits: H100 SXM, from thresholds.yaml"."""
    return paragraph(f"{NAME} {what}: {text}" if what else f"{NAME}: {text}", width, rest=" " * 4)


def facts(journal: Journal) -> dict[str, str]:
    """Return the main facts of a run, as far as they are known; "" is how it was launched."""
    run = journal.run
    launcher = run.launcher or "unknown"
    if launcher == "single":
        launcher = "pytest" if run.world_size == 1 else "pytest -n"
    shape = f"{plural(run.world_size, 'rank')} on {plural(run.nnodes, 'node')} ({launcher})"
    remark = f", {run.kind}: no statement about hardware" if run.kind else ""
    found = {"": f"{shape}, device {run.device or 'unknown'}{remark}"}
    if run.merged_from:
        found["merged"] = ", ".join(f"{each.run_id} of {each.started_at} ({each.verdict})" for each in run.merged_from)
    found |= dict(_cluster_facts(journal))
    chosen = [f"{name}={value} ({origin})" for name, (value, origin) in run.options.items() if origin != "default"]
    if chosen:
        found["settings"] = ", ".join(chosen)
    profile, origin = run.options.get("profile", ("", ""))
    if run.rehearsal and origin != "default" and profile:
        found["profile"] = f"cpu instead of {profile}: a rehearsal on cpu has no other profile"
    elif profile:
        found["profile"] = "cpu" if run.rehearsal else profile
    return found


def _cluster_facts(journal: Journal) -> Iterator[tuple[str, str]]:
    for what, text in (("cluster", cluster_text(journal)), ("limits", limits_text(journal))):
        if text:
            yield what, text


def cluster_text(journal: Journal) -> str:
    """Return "2 nodes x 8 NVIDIA H100 80GB HBM3 (H100 SXM), driver 580.95.05, CUDA 13.0, ..."; an empty
    text before the ranks are known."""
    cluster = journal.cluster
    if cluster is None or not cluster.ranks:
        return ""
    sku = f" ({journal.sku})" if journal.sku is not None and not journal.run.rehearsal else ""
    parts = [f"{_shape(cluster)}{sku}"]
    for key, name in _SOFTWARE.items():
        versions = dict.fromkeys(place.versions.get(key, "") for place in cluster.ranks)
        known = [version for version in versions if version and version != "None"]
        parts += [f"{name} {' and '.join(known)}"] if known else []
    return ", ".join(parts)


def limits_text(journal: Journal) -> str:
    """Return "H100 SXM, from thresholds.yaml, overlaid by site.yaml", or that there are none for this GPU."""
    limits = journal.limits
    if limits is None:
        return ""
    files = [file.path for file in limits.files]
    source = f"from {files[0]}" if files else "from no file"
    over = f", overlaid by {' and '.join(files[1:])}" if len(files) > 1 else ""
    if limits.sku is None:
        gpu = f"the GPU {limits.gpu_name!r}" if limits.gpu_name else "this GPU"
        return f"none: {gpu} matches no SKU {source}{over}, so nothing can be judged"
    return f"{limits.sku}, {source}{over}"


def _shape(cluster: Cluster) -> str:
    per_node = Counter((place.node_rank, place.host) for place in cluster.ranks)
    kinds = Counter(place.gpu.get("name", "GPU") if place.gpu else _CPU for place in cluster.ranks)
    sizes = set(per_node.values())
    nodes = plural(len(per_node), "node")
    if len(sizes) == 1 and len(kinds) == 1:
        size, kind = sizes.pop(), next(iter(kinds))
        return f"{nodes} x {size} {kind}{'s' * (size != 1 and kind == _CPU)}"
    return f"{nodes}, {len(cluster.ranks)} ranks: {' and '.join(f'{count} {kind}' for kind, count in kinds.items())}"


def run_properties(journal: Journal) -> dict[str, str]:
    """Return what was run, where, with which software, settings and workload, by the names of JUnit's properties."""
    run = journal.run
    found = {
        "verdict": journal.verdict,
        "exit": str(journal.exit),
        "reason": journal.reason,
        "rehearsal": "true" if run.rehearsal else "false",
        "simulated": "true" if run.kind == SIMULATED else "",
        "selection": "true" if run.selection else "false",
        "deviations": "; ".join(journal.deviations),
        "device": run.device,
        "world_size": str(run.world_size),
        "nnodes": str(run.nnodes),
        "launcher": run.launcher,
        "run_id": run.run_id,
        "version.pytest-gpucluster": run.plugin_version,
    }
    found |= {f"version.{name}": version for name, version in run.versions.items()}
    found |= _rank_facts(journal)
    for name, (value, origin) in run.options.items():
        if origin != "default":
            found[f"option.{name}"] = f"{value} (from {origin})" if origin else value
    workload = journal.workload
    if workload is not None:
        found |= {"workload.profile": workload.profile, "workload.file": workload.file}
        for key, value in workload.values.items():
            origin = workload.origins.get(key, "")
            found.setdefault(f"workload.{key}", f"{value} ({origin})" if origin else value)
    return {name: value for name, value in found.items() if value}


def _rank_facts(journal: Journal) -> dict[str, str]:
    facts: dict[str, dict[str, list[int]]] = {}
    for place in journal.ranks:
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
