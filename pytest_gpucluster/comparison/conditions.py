"""What must be alike for two values to say something about each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_gpucluster.comparison.side import Facts

STATES = frozenset(
    {
        *("gpu.temperature", "burn_in.temperature", "gpu.memory.free", "clock.skew"),
        *("dns.forward", "dns.reverse", "connectivity.connect", "connectivity.rendezvous", "slurm.controller"),
        *("shared_filesystem.visible", "shared_filesystem.free", "shared_filesystem.free_inodes"),
    }
)
"""Metrics that tell the state of a moment. Their limits judge them; that they were otherwise before decides nothing."""

OF_ONE_GPU = ("matmul.", "hbm.", "gpu.", "burn_in.")
"""Metrics whose value does not depend on how many ranks there are."""

IN_LABELS = ("sizes", "latency_sizes")
"""Keys of a workload whose values stand in the labels: another size is another value there."""

TIMES = (
    *("warmup", "window", "longest", "tolerance", "deadline", "interval", "budget", "probe", "lookup"),
    *("clock_samples", "round", "repeats", "look"),
)
"""Keys of a workload that say how long is measured, and not what."""

METRICS_OF = {
    "matmul": ("matmul.",),
    "hbm": ("hbm.",),
    "nccl": ("nccl.", "scaling.busbw_retention"),
    "links": ("link.",),
    "isolation": (),
    "telemetry": (),
    "health": ("gpu.",),
    "host": ("host.",),
    "host_link": ("host_link.",),
    "training": ("training.", "ddp."),
    "fsdp": ("fsdp.",),
    "checkpoint": ("checkpoint.",),
    "scaling": ("scaling.",),
    "failure_propagation": ("failure_propagation.",),
    "vision": ("vision.",),
    "lora": ("lora.",),
    "burn_in": ("burn_in.",),
    "memory_patterns": ("gpu.memory_patterns.",),
    "determinism": ("gpu.determinism.",),
    "connectivity": ("connectivity.", "dns.", "clock."),
    "shared_filesystem": ("shared_filesystem.",),
}
"""First part of a workload's key -> the metrics that are measured with it. A key that is not here concerns all."""

OF_A_SEARCH = ".best_tflops"
"""How a metric ends that is the best of a search. Its labels tell what was found, and only the keys below
``matmul.search`` what was looked for."""


def obstacles(old: Facts, new: Facts) -> tuple[str, ...]:
    """Return why nothing of two runs can be compared; nothing if it can."""
    return tuple(_obstacles(old, new))


def _obstacles(old: Facts, new: Facts) -> Iterator[str]:
    if old.rehearsal != new.rehearsal:
        words = ("a run on GPUs", "a REHEARSAL on cpu")
        yield f"{words[old.rehearsal]} before, {words[new.rehearsal]} now"
    elif old.sku != new.sku:
        yield f"another SKU: {old.sku or 'unknown'} before, {new.sku or 'unknown'} now"
    elif old.gpu_name != new.gpu_name:
        yield f"another GPU: {old.gpu_name or 'unknown'} before, {new.gpu_name or 'unknown'} now"
    if (old.workload is None) != (new.workload is None):
        yield f"what was run {'before' if old.workload is None else 'now'} is not on record"


def notes(old: Facts, new: Facts) -> tuple[str, ...]:
    """Return in which way the runs differ, where some of it can be compared nevertheless."""
    said = []
    if _is_other_shape(old, new):
        said.append(f"another shape: {old.shape} before, {new.shape} now; only what one GPU does is compared")
    hosts = [{place.host for place in side.places.values() if place.host} for side in (old, new)]
    if hosts[0] and hosts[1] and not hosts[0] & hosts[1]:
        said.append("other hosts than before; ranks that share no GPU are matched by their number")
    return tuple(said)


def why_not_of(old: Facts, new: Facts) -> Callable[[str], str]:
    """Return a function that tells why a metric of these two runs is not comparable, or an empty text if it is."""
    shape = f"{old.shape} before, {new.shape} now" if _is_other_shape(old, new) else ""
    before, now = old.workload or {}, new.workload or {}
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not _is_harmless(key)]

    def why_not(metric: str) -> str:
        if shape and not metric.startswith(OF_ONE_GPU):
            return shape
        for key in changed:
            if _concerns(key, metric):
                return f"measured otherwise: {key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}"
        return ""

    return why_not


def _concerns(key: str, metric: str) -> bool:
    if key.startswith("matmul.search."):
        return metric.endswith(OF_A_SEARCH)
    of = METRICS_OF.get(key.partition(".")[0])
    return of is None or metric.startswith(of)


def _is_other_shape(old: Facts, new: Facts) -> bool:
    return (old.world_size, old.nnodes) != (new.world_size, new.nnodes)


def _is_harmless(key: str) -> bool:
    return key.rpartition(".")[2] in (*IN_LABELS, *TIMES)
