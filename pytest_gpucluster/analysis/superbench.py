"""SuperBench's results of nccl-tests: ``results-summary.jsonl`` of all nodes, or ``results-summary.json`` of one.

A summary is one object a node, of metric -> number. It has a busbw of nccl-tests for each size, but no GPUs,
dtype or count of wrong data. These are taken from SuperBench's defaults: one process for all GPUs of a node,
``float``, out of place.

Source: microsoft/superbenchmark, superbench/runner/runner.py (names of metrics, and ``node``) and
superbench/benchmarks/micro_benchmarks/cuda_nccl_bw_performance.py (operations, sizes in bytes, GB/s, the parameters'
defaults); superbench/config/azure_ndv4.yaml (one process, ``ngpus: 8``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis.nccl_tests import OUT_OF_PLACE, Figure, Output, Row, short_name
from pytest_gpucluster.errors import OutputError

OPERATIONS: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
"""SuperBench's operation -> our collective."""

_INSIDE = ("default", "nvlink")
"""Prefixes of the annotations of benchmarks over the links of a node. Others, such as ``gdr-only`` or ``ib``, send the
data another way, or to other nodes."""
_BENCHMARK = "nccl-bw"
_KEY = re.compile(
    rf"{_BENCHMARK}(?::(?P<annotation>[^/]+))?/(?:\d+/)?"
    r"(?:(?P<operation>[a-z]+)_(?P<size>\d{1,18})_busbw|(?P<code>return_code))(?::\d+)?"
)
_RESOLUTION = 0.01
"""nccl-tests prints hundredths of GB/s, as SuperBench does."""


def is_summary(text: str) -> bool:
    """Return whether a text is a summary of SuperBench, by its first key: ``node``, or a benchmark with its metric."""
    return re.match(r'\s*\{\s*("node"\s*:|"[\w.-]+(:[^"/]+)?/)', text) is not None


def read(text: str, origin: str, gpus_of: Callable[[str], int]) -> tuple[Output, ...]:
    """Return the collectives inside nodes of a summary, one output for each node and collective.

    Args:
        text: of the file.
        origin: the file's path; that of one node's summary names the node, ``nodes/NAME/results-summary.json``.
        gpus_of: short name of a host -> its GPUs, which are not in the summary.

    Raises:
        OutputError: no JSON, or cut off; no node; nothing of ``nccl-bw`` inside a node; a benchmark that
            failed, or a value that is no number.
    """
    found = [output for node, metrics in _nodes(text, origin) for output in _of_node(node, metrics, origin, gpus_of)]
    if not found:
        raise OutputError(
            f"{origin}: no busbw of {_BENCHMARK} inside a node in it: looked for {_BENCHMARK}/allreduce_SIZE_busbw and "
            f"{_BENCHMARK}:nvlink/allreduce_SIZE_busbw, also of {', '.join(list(OPERATIONS)[1:])}"
        )
    return tuple(found)


def _nodes(text: str, origin: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each node with its metrics: a line each, or a whole file of one node."""
    try:
        objects = [json.loads(text)]
    except (ValueError, RecursionError):
        objects = []
    for number, line in enumerate(text.splitlines() if not objects else (), start=1):
        if line.strip():
            try:
                objects.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise OutputError(f"{origin}:{number}: no JSON, or cut off ({error})") from None
    folder = Path(origin).parent
    named = folder.name if folder.parent.name == "nodes" else ""
    for found in objects:
        if not isinstance(found, dict):
            raise OutputError(f"{origin}: a line is no object, so this is no summary of SuperBench")
        node = found.get("node", named)
        if not (isinstance(node, str) and node):
            raise OutputError(
                f"{origin}: its node is not named; give results-summary.jsonl, or nodes/NAME/results-summary.json"
            )
        yield short_name(node), found


def _of_node(node: str, metrics: Mapping[str, Any], origin: str, gpus_of: Callable[[str], int]) -> Iterator[Output]:
    rows: dict[str, list[Row]] = {}
    for name, value in metrics.items():
        key = _KEY.fullmatch(name)
        if key is None or not (key["annotation"] or _INSIDE[0]).startswith(_INSIDE):
            continue
        if key["code"]:
            if value != 0:
                raise OutputError(f"{origin}: {name} of {node} is {value}: nccl-tests failed there")
        elif key["operation"] in OPERATIONS:
            figure = Figure(busbw=_busbw(value, name, node, origin), resolution=_RESOLUTION)
            row = Row(size_bytes=int(key["size"]), dtype="float", figures={OUT_OF_PLACE: figure})
            rows.setdefault(OPERATIONS[key["operation"]], []).append(row)
    for collective, measured in rows.items():
        yield Output(
            origin=origin,
            collective=collective,
            ranks=gpus_of(node),
            processes=1,
            hosts=(node,),
            nccl="",
            rows=tuple(measured),
            out_of_bounds=0,
            speeds_only=True,
        )


def _busbw(value: Any, name: str, node: str, origin: str) -> float:
    """Return a figure in GB/s; NaN where SuperBench has none."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OutputError(f"{origin}: {name} of {node} is {value!r:.40}, which is no number")
    try:
        return float(value)
    except OverflowError:
        raise OutputError(f"{origin}: {name} of {node} is larger than any rate") from None
