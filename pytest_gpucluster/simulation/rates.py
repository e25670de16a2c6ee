"""The rates of healthy GPUs: published ones where there are some, else what a derived floor rests on.

>>> from pytest_gpucluster.simulation.cluster import load
>>> Rates(load("2x8xH100")).of("hbm.copy.bandwidth").basis
'published'
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from pytest_gpucluster.judge import evidence, loader
from pytest_gpucluster.judge.evidence import Row
from pytest_gpucluster.judge.limits import Thresholds
from pytest_gpucluster.metrics import measurement, stats
from pytest_gpucluster.metrics.datasheets import SKUS
from pytest_gpucluster.metrics.units import show
from pytest_gpucluster.simulation.cluster import Cluster

Basis = Literal["stated", "published", "one row", "floor", "data sheet"]
BELOW_BEST = 0.94
"""Part of the best of many shapes that one shape reaches. Source: H100 SXM, 670 to 729 of 720 to 789 TFLOPS in bf16,
and 49.6 to 51.6 of 52.1 in fp32."""
ABOVE_FLOOR = 1 / 0.9
"""A derived floor lies 10 % or more below what it rests on. Source: the entries of thresholds.yaml."""
OF_PEAK = 0.85


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What a healthy GPU reaches, in the metric's unit.

    Attributes:
        value: the rate.
        basis: what it rests on; "published" has rows that set it, and others that check it.
        setting, checking: the rows of each.
    """

    value: float
    basis: Basis
    setting: Sequence[Row] = ()
    checking: Sequence[Row] = ()


class Condition(NamedTuple):
    """What a rate depends on, as :meth:`Rates.of` takes it."""

    metric: str
    labels: Mapping[str, str] = MappingProxyType({})
    world_size: int = 1
    nodes: int = 1
    n: int = 0


def conditions(cluster: Cluster) -> Iterator[Condition]:
    """Yield what the devices of a cluster ask for: of GPUs alone, then of a node, then of the cluster. Products have
    8192 rows, and collectives move 1 GB."""
    yield from (Condition(f"matmul.{dtype}.tflops", n=8192) for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8"))
    yield from (Condition(f"hbm.{kind}.bandwidth") for kind in ("copy", "read", "write"))
    yield from (Condition(f"host_link.{way}.bandwidth", {"mode": "alone"}) for way in ("h2d", "d2h"))
    yield Condition("training.mfu", {"model": "large"})
    for nodes in sorted({1, cluster.nodes}):
        over = {"transport": "P2P" if nodes == 1 else cluster.nccl.transport}
        ranks = nodes * cluster.gpus_per_node
        yield Condition("link.bandwidth", over, ranks, nodes)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"):
            yield Condition(f"nccl.{name}.busbw", {**over, "size": show(1e9, "B")}, ranks, nodes)


class Rates:
    """The healthy rates of a cluster.

    Args:
        cluster: its SKU, seed and stated rates decide.
        limits: by default the shipped ones: rows that they judge alike are of one condition.
    """

    def __init__(self, cluster: Cluster, limits: Thresholds | None = None) -> None:
        self._cluster, self._given = cluster, limits
        self._known: dict[tuple[object, ...], Rate] = {}

    @cached_property
    def _limits(self) -> Thresholds:
        return self._given or loader.load()

    def of(
        self, metric: str, labels: Mapping[str, str] | None = None, *, world_size: int = 1, nodes: int = 1, n: int = 0
    ) -> Rate:
        """Return the rate of a metric under conditions; ``n``: rows of a square product, 0 where it is none."""
        key = (metric, tuple(sorted((labels or {}).items())), world_size, nodes, n)
        if key not in self._known:
            self._known[key] = self._find(metric, labels or {}, world_size, nodes, n)
        return self._known[key]

    def _find(self, metric: str, labels: Mapping[str, str], world_size: int, nodes: int, n: int) -> Rate:
        stated = self._cluster.rates.get(metric)
        if stated is not None:
            return Rate(value=stated, basis="stated")
        limit = self._limits.limit(metric, sku=self._cluster.sku, world_size=world_size, nnodes=nodes, labels=labels)
        rows = [row for row in self._healthy(metric) if evidence.deciding(row, self._limits) is limit]
        if n:
            rows = _of_size(self._healthy(metric), n) or rows
        if rows:
            return self._published(metric, rows)
        if limit is not None and limit.min is not None:
            return Rate(value=limit.min * ABOVE_FLOOR, basis="floor")
        peak = measurement.known(metric).peak
        found = getattr(SKUS[self._cluster.sku].peaks, peak, None) if peak else None
        return Rate(value=OF_PEAK * float(found) if found else 1.0, basis="data sheet")

    def _healthy(self, metric: str) -> list[Row]:
        rows = [
            row
            for row in evidence.published()
            if (row.sku, row.metric, row.kind) == (self._cluster.sku, metric, "healthy") and row.comparable
        ]
        own = [row for row in rows if not row.best]
        return own or rows

    def _published(self, metric: str, rows: Sequence[Row]) -> Rate:
        drawn = random.Random(f"{self._cluster.seed}/{metric}/{rows[0].line}")
        setting = drawn.sample(list(rows), math.ceil(len(rows) / 2)) if len(rows) > 1 else list(rows)
        value = stats.median([row.value for row in setting]) * (BELOW_BEST if rows[0].best else 1)
        checking = [row for row in rows if row not in setting]
        return Rate(value=value, basis="published" if checking else "one row", setting=setting, checking=checking)


def _of_size(rows: Sequence[Row], n: int) -> list[Row]:
    """Return the rows of the square products that are nearest to n x n in size."""
    sized = [(int(row.labels["n"]), row) for row in rows if re.fullmatch("[0-9]+", row.labels.get("n", ""))]
    if not sized:
        return []
    nearest = min((size for size, _ in sized), key=lambda size: abs(math.log(size / n)))
    return [row for size, row in sized if size == nearest]
