"""What others measured of healthy and faulty GPUs, and which limit would judge it.

``evidence.tsv`` has a row for each published number, its source and how it was taken. Rows name their conditions as
their owners do; ``as_measured`` puts them into the labels that this suite gives its own measurements, so that a
published value is judged by the same limits in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pytest_gpucluster.judge.limits import Limit, Thresholds
from pytest_gpucluster.metrics import measurement, stats, units

PATH = Path(__file__).with_name("evidence.tsv")
COLUMNS = ("sku", "metric", "value", "world_size", "nodes", "labels", "class", "how", "source")
CONTRACT = "acceptance of 2 x 8 H100 SXM"
"""In the source of a limit that a user has agreed on."""
ROOM_RATIO = 0.97
"""How much of the lowest comparable healthy value a floor may be: some 3 % belong to the next healthy GPU."""

_TRANSPORTS: Mapping[str, str] = {
    "EFA": "NET/AWS Libfabric",
    "TCPXO": "NET/FasTrak",
    "TCPX": "NET/GPUDirectTCPX",
    "TCP": "NET/Socket",
    "NVLink": "P2P",
}
_SMALLEST_JUDGED = "1 GB"
_BEST_OF = "4096, 8192, 16384"
_READ: Mapping[str, str] = {"within": "transport", "best": "best_of"}
"""Label of a row -> the label of a measurement that is made of it, where that has another name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published number, in the metric's unit.

    Attributes:
        kind: healthy, faulty, floor (a peer's tool fails below it) or expected (somebody says what to expect).
        labels: as its owner names the conditions; a label without a value is "".
        line: in the file, from 1.
    """

    sku: str
    metric: str
    value: float
    world_size: int
    nodes: int
    labels: Mapping[str, str]
    kind: str
    how: str
    source: str
    line: int

    @property
    def comparable(self) -> bool:
        """Return whether it may be compared with a limit."""
        return not self.labels.get("comparable", "").startswith("no")

    @property
    def best(self) -> bool:
        """Return whether it is the best of many shapes, and so above what one fixed shape gives."""
        return self.labels.get("best") == "1"


@dataclass(frozen=True, kw_only=True)
class Support:
    """What is published about one limit: healthy, comparable values that it would judge, from low to high.

    Attributes:
        best_only: all of them are the best of many shapes, which is more than the judged shape gives.
        faulty: values of faulty hardware that it would judge, from low to high.
    """

    healthy: tuple[float, ...]
    faulty: tuple[float, ...]
    best_only: bool = False

    @property
    def typical(self) -> float | None:
        """The median of the healthy values; None without any."""
        return stats.median(self.healthy) if self.healthy else None

    def share(self, value: float) -> float | None:
        """Return a value as a part of the typical one."""
        return None if self.typical is None else value / self.typical

    def uniform_loss(self, limit: Limit) -> float | None:
        """Return what all GPUs may lose and still pass: 1 - floor / median. None where nothing is published."""
        return None if self.typical is None or limit.min is None else 1 - limit.min / self.typical


def read(path: Path = PATH) -> tuple[Row, ...]:
    """Read a table of evidence, whose first line without ``#`` has the columns.

    Raises: MeasurementError, UnitError or ValueError: a line has another form.
    """
    numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    lines = [(number, line.split("\t")) for number, line in numbered if line and not line.startswith("#")]
    return tuple(_row(dict(zip(COLUMNS, fields, strict=True)), number) for number, fields in lines[1:])


@cache
def published() -> tuple[Row, ...]:
    """Return the rows that come with this version."""
    return read()


def _row(of: Mapping[str, str], line: int) -> Row:
    metric = measurement.known(of["metric"])
    labels = (label.strip().partition("=") for label in of["labels"].split(";") if label.strip())
    return Row(
        sku=of["sku"],
        metric=metric.name,
        value=units.parse(of["value"], like=metric.unit).to(metric.unit),
        world_size=int(of["world_size"]),
        nodes=int(of["nodes"]),
        labels=MappingProxyType({key: text for key, _, text in labels}),
        kind=of["class"],
        how=of["how"],
        source=of["source"],
        line=line,
    )


def as_measured(metric: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that this suite would have given to a value which is published with these.

    A size that its owner does not state ("large") counts as the smallest one that is judged, whose floor is the lowest.
    Network cards without a transport are those of InfiniBand or RoCE.
    A copy between host and GPU without a mode is alone; the best of many shapes is compared with the floor of the
    best size; the model of a published training is a large one.
    """
    found = dict(labels)
    if "transport" in found:
        name = found["transport"].partition(" (")[0]
        found["transport"] = _TRANSPORTS.get(name, name)
    elif "within" in found:
        found["transport"] = "P2P"
    if nics := re.match(r"[0-9]+", found.get("nics", "")):
        found["nics"] = nics[0]
        found.setdefault("transport", "NET/IB")
    family = metric.partition(".")[0]
    if family == "nccl" and units.magnitude(found.get("size", "")) is None:
        found["size"] = _SMALLEST_JUDGED
    if family == "host_link":
        found.setdefault("mode", "alone")
    if family == "matmul" and found.pop("best", "") == "1":
        found["best_of"] = _BEST_OF
    if metric == "training.mfu" and found.get("model") != "contract":
        found["model"] = "large"
    return found


def unused(metric: str, labels: Iterable[str], limits: Thresholds, sku: str) -> list[str]:
    """Return the labels that no limit for this metric looks at."""
    asked = {part.key for limit in limits.entries(metric, sku=sku) for part in limit.when}
    asked |= {"transport" for limit in limits.entries(metric, sku=sku) if limit.expect_transport}
    return [name for name in labels if name not in asked and _READ.get(name) not in asked]


def deciding(row: Row, limits: Thresholds) -> Limit | None:
    """Return the limit that judges a published value."""
    return limits.limit(
        row.metric,
        sku=row.sku,
        world_size=row.world_size,
        nnodes=row.nodes,
        labels=as_measured(row.metric, row.labels),
    )


def support_of(limit: Limit, limits: Thresholds) -> Support | None:
    """Return what is published about one limit; None where it judges no comparable value."""
    rows = [
        row
        for row in _by_name().get((limit.sku, limit.metric), ())
        if row.comparable and row.kind in ("healthy", "faulty") and deciding(row, limits) is limit
    ]
    return _support(rows) if rows else None


@cache
def _by_name() -> Mapping[tuple[str, str], Sequence[Row]]:
    return stats.grouped(((row.sku, row.metric), row) for row in published())


def _support(rows: Sequence[Row]) -> Support:
    healthy = [row for row in rows if row.kind == "healthy"]
    own = [row for row in healthy if not row.best]
    return Support(
        healthy=tuple(sorted(row.value for row in own or healthy)),
        faulty=tuple(sorted(row.value for row in rows if row.kind == "faulty")),
        best_only=bool(healthy) and not own,
    )


def too_high(limits: Thresholds) -> list[str]:
    """Return each floor that leaves the next healthy GPU no room, with its file and line.

    A floor lies at least 3 % below the lowest comparable healthy value that it judges; one that a contract demands,
    not above it. Values that are the best of many shapes set no floor, but must keep it.
    """
    found = []
    for row in published():
        if row.kind != "healthy" or not row.comparable:
            continue
        limit = deciding(row, limits)
        if limit is None or limit.record_only is not None or limit.min is None:
            continue
        contract = CONTRACT in limit.source.partition(";")[0] and not limit.source.startswith("published")
        room = 1.0 if row.best or contract else ROOM_RATIO
        if limit.min > row.value * room:
            unit = limit.unit
            found.append(
                f"{limit.origin}: {row.metric} on {row.sku}: min {units.show(limit.min, unit)} is above"
                f" {100 * room:g} % of {units.show(row.value, unit)}, which is published as healthy: {row.source}"
                f" ({PATH.name}:{row.line})"
            )
    return sorted(set(found))


def compare(value: float, limit: Limit, limits: Thresholds) -> str:
    """Return a value compared with the published ones, such as "94 % of typical for H100 SXM, 12 published"; "" where
    nothing comparable is."""
    support = support_of(limit, limits)
    share = None if support is None else support.share(value)
    if support is None or share is None:
        return ""
    count = f"{len(support.healthy)} published" + (", the best of shapes" if support.best_only else "")
    return f"{100 * share:.0f} % of typical for {limit.sku}, {count}"
