"""What the operator sees before the first test: which cluster, which limits, which settings. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import Cluster, Run
from pytest_gpucluster.text import paragraph

NAME = "gpucluster"
_SOFTWARE = {"driver": "driver", "cuda": "CUDA", "nccl": "NCCL", "torch": "torch"}
_INDENT = " " * 4
_CPU = "CPU rank"


def header_lines(journal: Journal, *, width: int = 80) -> list[str]:
    """Return the header of a run as lines no wider than ``width``. What is not known yet is left out."""
    lines: list[str] = []
    for what, text in _facts(journal):
        lines += fact(what, text, width=width)
    return lines


def cluster_lines(journal: Journal, *, width: int = 80) -> list[str]:
    """Return the lines of the header that only the ranks can tell: the cluster, and the limits for its GPUs."""
    return [line for what, text in _cluster_facts(journal) for line in fact(what, text, width=width)]


def fact(what: str, text: str, *, width: int) -> list[str]:
    """Return one fact of the header as lines: "gpucluster limits: H100 SXM, of thresholds.yaml"."""
    return paragraph(f"{NAME} {what}: {text}" if what else f"{NAME}: {text}", width, rest=_INDENT)


def cluster_text(journal: Journal) -> str:
    """Return "2 nodes x 8 NVIDIA H100 80GB HBM3 (H100 SXM), driver 580.95.05, CUDA 13.0, ..."; nothing while no rank
    has told."""
    cluster = journal.cluster
    if cluster is None or not cluster.ranks:
        return ""
    sku = journal.limits.sku if journal.limits is not None else None
    is_named = sku is not None and not journal.run.rehearsal
    return ", ".join([f"{shape_text(cluster)}{f' ({sku})' if is_named else ''}", *_software(cluster)])


def limits_text(journal: Journal) -> str:
    """Return "H100 SXM, of thresholds.yaml, overlaid by site.yaml", or that there are none for this GPU."""
    limits = journal.limits
    if limits is None:
        return ""
    files = [path for path, _ in limits.files]
    of = f"of {files[0]}" if files else "of no file"
    over = f", overlaid by {' and '.join(files[1:])}" if len(files) > 1 else ""
    if limits.sku is None:
        gpu = f"the GPU {limits.gpu_name!r}" if limits.gpu_name else "this GPU"
        return f"none: {gpu} is no SKU {of}{over}, so nothing can be judged"
    return f"{limits.sku}, {of}{over}"


def _facts(journal: Journal) -> Iterator[tuple[str, str]]:
    run = journal.run
    shape = f"{_counted(run.world_size, 'rank')} on {_counted(run.nnodes, 'node')} ({launcher_text(run)})"
    remark = ", REHEARSAL: says nothing about hardware" if run.rehearsal else ""
    yield "", f"{shape}, device {run.device or 'unknown'}{remark}"
    if run.merged_from:
        yield "merged", ", ".join(f"{each.run_id} of {each.started_at} ({each.verdict})" for each in run.merged_from)
    if run.merged_despite:
        yield "DIFFERENT CLUSTERS", "; ".join(run.merged_despite)
    yield from _cluster_facts(journal)
    chosen = [f"{name}={value} ({origin})" for name, (value, origin) in run.options.items() if origin != "default"]
    if chosen:
        yield "settings", ", ".join(chosen)
    profile, origin = run.options.get("profile", ("", ""))
    if run.rehearsal and origin != "default" and profile:
        yield "profile", f"cpu, and not {profile}: a rehearsal on cpu takes no other"
    elif profile:
        yield "profile", "cpu" if run.rehearsal else profile


def launcher_text(run: Run) -> str:
    """Return what has started the ranks: torchrun, slurm, ...; pytest where there is no launcher."""
    if run.launcher == "single":
        return "pytest" if run.world_size == 1 else "pytest -n"
    return run.launcher or "unknown"


def _cluster_facts(journal: Journal) -> Iterator[tuple[str, str]]:
    for what, text in (("cluster", cluster_text(journal)), ("limits", limits_text(journal))):
        if text:
            yield what, text


def shape_text(cluster: Cluster) -> str:
    """Return "2 nodes x 8 NVIDIA H100", or how many there are where the nodes are not alike."""
    per_node = Counter((place.node_rank, place.host) for place in cluster.ranks)
    kinds = Counter(place.gpu.get("name", "GPU") if place.gpu else _CPU for place in cluster.ranks)
    sizes = set(per_node.values())
    nodes = _counted(len(per_node), "node")
    if len(sizes) == 1 and len(kinds) == 1:
        each, kind = sizes.pop(), next(iter(kinds))
        return f"{nodes} x {each} {kind}{'s' * (each != 1 and kind == _CPU)}"
    return f"{nodes}, {len(cluster.ranks)} ranks: {' and '.join(f'{count} {kind}' for kind, count in kinds.items())}"


def _software(cluster: Cluster) -> list[str]:
    return [
        f"{name} {' and '.join(found)}"
        for key, name in _SOFTWARE.items()
        if (found := _distinct(place.versions.get(key, "") for place in cluster.ranks))
    ]


def _distinct(versions: Iterable[str]) -> list[str]:
    return [version for version in dict.fromkeys(versions) if version and version != "None"]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
