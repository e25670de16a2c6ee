"""What to say where nothing decides about a value: the YAML that would."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pytest_gpucluster.limits import KNOWN_LABELS, TOPOLOGY, Limit, Thresholds
from pytest_gpucluster.metrics import datasheets, units
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.text import printable


def missing_limit(
    metric: Metric,
    labels: Mapping[str, str],
    known: Mapping[str, str],
    *,
    limits: Thresholds,
    sku: str | None,
    gpu_name: str | None,
) -> tuple[str, str]:
    """Return what is missing, in a few words, and the YAML to add, in several lines.

    Args:
        metric: what was measured.
        labels: the labels of the measurement.
        known: the facts that conditions are held against.
        limits: the limits in force, in which nothing applies.
        sku: the SKU that was looked for; None where the GPU is unknown.
        gpu_name: NVML's name of the GPU, where there is one.
    """
    bound = "max" if metric.better == "lower" else "min"
    entry = [f"{bound}: <what you accept> {metric.unit}", "source: <where the figure comes from>"]
    entries = limits.entries(metric.name, sku=sku) if sku is not None else []
    when = _conditions(metric, labels, known, entries)
    if when:
        entry.insert(0, f"when: {{{', '.join(f'{name}: {text}' for name, text in when.items())}}}")
    gpu, name = printable(gpu_name or ""), sku or "my-gpu"
    pattern = []
    if sku in limits.skus:
        problem = f"no limit on {sku}" + (" for these conditions" if entries else "")
    else:
        pattern = [f"    nvml_name: {_single_quoted(_pattern(gpu or '<NVML name>'))}"]
        problem = f"unknown GPU {gpu!r}: no SKU matches it" if gpu else "the name of the GPU is not known"
        if sku is not None:
            problem = f"unknown SKU {sku!r}"
    lines = [
        f"{problem}. Add this to a file and pass it with --gpucluster-thresholds FILE:",
        "",
        "schema_version: 1",
        "skus:",
        f"  {_scalar(name)}:",
        *pattern,
        "    limits:",
        f"      {metric.name}:",
        *(f"        {'- ' if index == 0 else '  '}{line}" for index, line in enumerate(entry)),
    ]
    if entries:
        lines += ["", "Limits of this metric there apply to other conditions:"]
        lines += [f"  {limit.conditions()} ({limit.origin})" for limit in entries]
    return problem + "; the text below shows the YAML to add", "\n".join(lines)


def _conditions(
    metric: Metric, labels: Mapping[str, str], known: Mapping[str, str], entries: Sequence[Limit]
) -> dict[str, str]:
    """Choose the conditions that a new entry should have: what others depend on, and what tells values apart."""
    used = {condition.key for limit in entries for condition in limit.when}
    names = [name for name in ("world_size", "nnodes") if known[name].isdecimal()]
    if not (used.intersection(TOPOLOGY) or metric.peak in datasheets.LINK_PEAKS):
        names = []
    when = {name: known[name] for name in names}
    for name in KNOWN_LABELS:
        # Only what the loader reads back as the same condition is worth showing.
        text = labels.get(name, "")
        amount = units.magnitude(text)
        size = amount is not None and amount[0] in ("amount of data", "number")
        if size if name == "size" else re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text):
            when[name] = text
    return when


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9_. -]*[A-Za-z0-9_.])?", text) else _single_quoted(text)


def _single_quoted(text: str) -> str:
    return "'" + printable(text).replace("'", "''") + "'"


def _pattern(nvml_name: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", nvml_name)
