"""Descriptions of simulated clusters: YAML files, those that come with this package and those of users.

>>> load("4x8xH100").hosts
('gpu-00', 'gpu-01', 'gpu-02', 'gpu-03')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.yaml_source import Document, Node
from pytest_gpucluster.errors import OptionError, UnitError
from pytest_gpucluster.metrics import measurement, units
from pytest_gpucluster.metrics.datasheets import SKUS
from pytest_gpucluster.metrics.units import did_you_mean
from pytest_gpucluster.node.infiniband import ETHERNET, INFINIBAND
from pytest_gpucluster.simulation.faults import Fault, Faults, parse

FOLDER = Path(__file__).with_name("clusters")
"""The descriptions that come with this package."""
_SHAPE = re.compile(r"(?P<nodes>[1-9][0-9]*)x(?P<gpus>[1-9][0-9]*)x(?P<gpu>\w.*)")


def _in(unit: str) -> Any:
    """A number that is written with a unit, and kept in this one."""
    return field(metadata={"unit": unit})


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """One kind of GPU, as CUDA and NVML report it. Powers in W, clocks in MHz, temperatures in degrees Celsius."""

    name: str
    memory_bytes: int = _in("B")
    capability: str
    multiprocessors: int
    cache_bytes: int = _in("B")
    sm_clock_mhz: int = _in("MHz")
    memory_clock_mhz: int = _in("MHz")
    power_limit_watts: float = _in("W")
    idle_power_watts: float = _in("W")
    load_power_watts: float = _in("W")
    idle_temperature_celsius: int = _in("degC")
    load_temperature_celsius: int = _in("degC")
    slowdown_temperature_celsius: int = _in("degC")
    vbios: str
    board: str
    inforom: str


@dataclass(frozen=True, kw_only=True)
class NodeModel:
    """A node but for its GPUs.

    Attributes:
        ports: RDMA ports, each a device of its own, ``mlx5_0`` and on.
        port_rate_bits: of each of them.
        link_layer: "InfiniBand" or "Ethernet".
        numa_nodes: the GPUs and ports are spread over them evenly.
    """

    cpus: int
    memory_bytes: int = _in("B")
    numa_nodes: int
    ports: int
    port_rate_bits: float = _in("b/s")
    link_layer: str
    driver: str
    cuda: str


@dataclass(frozen=True, kw_only=True)
class NcclModel:
    """What NCCL does on this cluster.

    Attributes:
        version: such as 2.28.9.
        transport: between nodes, as it is in the labels of measurements.
        group_bytes: device memory of one communicator.
        all_to_all_bytes: what its first all_to_all adds. Source: https://github.com/NVIDIA/nccl/issues/1685, 8 H100.
        latency_seconds, net_latency_seconds: of a small collective on one node, and between nodes.
    """

    version: str
    transport: str
    group_bytes: int = _in("B")
    all_to_all_bytes: int = _in("B")
    latency_seconds: float = _in("s")
    net_latency_seconds: float = _in("s")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A described cluster.

    Attributes:
        name: of the description.
        sku: as in thresholds.yaml.
        nodes, gpus_per_node: its shape.
        host_names: a pattern with the node's number.
        spread: standard deviation of the GPUs' rates, as a ratio.
        rates: metric -> what every healthy GPU reaches, in the metric's unit, instead of what is published.
        seed: of all that is drawn.
    """

    name: str
    sku: str
    nodes: int
    gpus_per_node: int
    host_names: str = "gpu-{:02}"
    spread: float = field(default=0.004, metadata={"unit": "ratio"})
    gpu: GpuModel
    node: NodeModel
    nccl: NcclModel
    rates: Mapping[str, float] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    seed: int = 1

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The names of its nodes."""
        return tuple(self.host_names.format(node) for node in range(self.nodes))

    @cached_property
    def ports(self) -> tuple[str, ...]:
        """The RDMA devices of a node."""
        return tuple(f"mlx5_{number}" for number in range(self.node.ports))

    def ports_of(self, gpu: int) -> tuple[str, ...]:
        """Return the RDMA devices that are nearest to a GPU, all of which it uses; none where there is none."""
        count, gpus = self.node.ports, self.gpus_per_node
        own = [port for number, port in enumerate(self.ports) if number * gpus // count == gpu]
        return tuple(own) or self.ports[gpu * count // gpus :][:1]

    def with_faults(self, faults: Sequence[Fault]) -> Cluster:
        """Return it with these faults.

        Raises: OptionError: a fault is at a place that it does not have, or would change nothing.
        """
        places = {"gpu": [str(number) for number in range(self.gpus_per_node)], "port": self.ports}
        for fault in faults:
            where = fault.kind.where
            for what, found, allowed in (
                ("host", fault.host, self.hosts if where != "cluster" else ("",)),
                ("GPU" if where == "gpu" else "port", fault.place, places.get(where, ("",))),
            ):
                if found not in allowed:
                    known = ", ".join(allowed) if len(allowed) <= 16 else f"{allowed[0]} to {allowed[-1]}"
                    known = known or "none"
                    raise OptionError(
                        f"{fault}: {self.name} has no {what} {found!r}; it has {known}{did_you_mean(found, allowed)}"
                    )
            if fault.name == "nic-down" and not self.ports:
                raise OptionError(f"{fault}: the nodes of {self.name} have no ports (node.ports)")
            if fault.name == "power-cap" and fault.amount >= self.gpu.power_limit_watts:
                raise OptionError(
                    f"{fault}: {fault.amount:g} W are no less than the {self.gpu.power_limit_watts:g} W of its GPUs; "
                    f"write power-cap:{fault.host}=AMOUNT with fewer"
                )
        return replace(self, faults=Faults(tuple(faults)))


def shipped() -> list[str]:
    """Return the names of the descriptions that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(what: str, above: Sequence[Path] = ()) -> Cluster:
    """Return a cluster by the name of a shipped description, by another shape of the same GPU, or from a file.

    Args:
        what: ``2x8xH100``, ``4x8xH100``, or the path of a YAML file.
        above: the files that are like it.

    Raises: OptionError that says where it is wrong, what was found and what is allowed.
    """
    if what in shipped():
        return _read(FOLDER / f"{what}.yaml", above)
    shape = _SHAPE.fullmatch(what)
    if shape is not None and not Path(what).exists():
        of_gpu = {name.rpartition("x")[2].lower(): name for name in shipped()}
        like = of_gpu.get(shape["gpu"].lower())
        if like is None:
            raise OptionError(
                f"{what}: no simulated cluster has {shape['gpu']} GPUs; known are {', '.join(shipped())}, and other "
                f"numbers of nodes and GPUs of these; or write a file{did_you_mean(shape['gpu'], of_gpu)}"
            )
        found = replace(load(like), name=what, nodes=int(shape["nodes"]), gpus_per_node=int(shape["gpus"]))
        if wrong := dict(_impossible(found)):
            raise OptionError(f"{what}: {next(iter(wrong.values()))}")
        return found
    if not Path(what).is_file():
        raise OptionError(
            f"{what!r} is neither a file nor a simulated cluster; known are {', '.join(shipped())}"
            f"{did_you_mean(what, shipped())}"
        )
    path = Path(what).resolve()
    if path in above:
        raise OptionError(f"{what} is like itself")
    return _read(Path(what), (*above, path))


_SECTIONS = {"gpu": GpuModel, "node": NodeModel, "nccl": NcclModel}
_KINDS: Mapping[str, type] = {"str": str, "int": int, "float": float}
_UNITS = ("bytes", "mhz", "watts", "celsius", "bits", "seconds")


def _read(path: Path, above: Sequence[Path]) -> Cluster:
    document = Document(str(path))
    root = document.root(path, needs="the keys of a cluster", block_scalar_hint="quote the text")
    keys = ("schema_version", "like", *_plain_fields(Cluster), *_SECTIONS, "rates", "faults")
    top = None if root is None else document.mapping(root, "the file", keys)
    cluster = None
    if root is not None and top is not None:
        document.require_version(root, top, 1)
        cluster = _cluster(document, root, top, path, above)
    if document.complaints or cluster is None:
        raise OptionError("\n".join(document.report()))
    return cluster


def _cluster(
    document: Document, root: Node, top: Mapping[str, tuple[Node, Node]], path: Path, above: Sequence[Path]
) -> Cluster | None:
    base: Cluster | None = None
    if "like" in top:
        try:
            base = load(document.text(top["like"][1], "like") or "", above)
        except OptionError as error:
            document.fail(top["like"][1], str(error))
    found: dict[str, Any] = {"name": path.stem, **_plain_values(document, top, "", Cluster)}
    for key, model in _SECTIONS.items():
        if key in top:
            found[key] = _model(document, top[key][1], key, model, getattr(base, key, None))
    if "rates" in top:
        found["rates"] = _rates(document, top["rates"][1])
    missing = (
        [] if base is not None else [key for key in ("sku", "nodes", "gpus_per_node", *_SECTIONS) if key not in found]
    )
    if missing and not document.complaints:
        document.fail(
            root, f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing; or say what it is like"
        )
    if document.complaints:
        return None
    cluster = Cluster(**found) if base is None else replace(base, **found)
    for key, wrong in _impossible(cluster):
        document.fail(top.get(key.partition(".")[0], (root, root))[1], wrong)
    if document.complaints:
        return None
    try:
        names = {host for host in cluster.hosts if re.fullmatch(r"\w[\w.-]*", host)}
    except (ValueError, LookupError, AttributeError):  # of the pattern
        names = set()
    if len(names) < cluster.nodes:
        text = f"{cluster.host_names!r} does not give {cluster.nodes} nodes names of their own, as gpu-{{:02}} does"
        document.fail(top.get("host_names", top.get("nodes", (root, root)))[1], text)
        return None
    if "faults" not in top:
        return cluster
    faults: list[Fault] = []
    for item in document.items(top["faults"][1]):
        written = document.text(item, "a fault")
        try:
            if written is not None:
                fault = parse(written)
                cluster.with_faults([fault])
                faults.append(fault)
        except OptionError as error:
            document.fail(item, str(error))
    return replace(cluster, faults=Faults(tuple(faults)))


def _impossible(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield each key whose value is of its kind and can be none of a simulated cluster, and why."""
    gpu, node, transport = cluster.gpu, cluster.node, cluster.nccl.transport
    skus = [name for name, sku in SKUS.items() if sku.promise is not None]
    for key, found, fits, allowed in (
        ("sku", cluster.sku, cluster.sku in skus, f"a GPU with limits{did_you_mean(cluster.sku, skus)}"),
        ("nodes", cluster.nodes, cluster.nodes <= 1000, "from 1 to 1000"),
        # Each GPU and each port has PCI addresses of its own.
        ("gpus_per_node", cluster.gpus_per_node, cluster.gpus_per_node <= 16, "from 1 to 16"),
        ("spread", cluster.spread, cluster.spread < 0.5, "below 50 %"),
        ("gpu.capability", gpu.capability, re.fullmatch(r"(8|9|10|12)\.\d", gpu.capability), "8.x, 9.x, 10.x or 12.x"),
        ("node.numa_nodes", node.numa_nodes, node.numa_nodes <= node.cpus, f"from 1 to {node.cpus}, as many as CPUs"),
        ("node.ports", node.ports, node.ports <= 64, "from 0 to 64"),
        ("node.link_layer", node.link_layer, node.link_layer in (ETHERNET, INFINIBAND), f"{INFINIBAND} or {ETHERNET}"),
        ("nccl.transport", transport, re.fullmatch("P2P|NET/.+", transport), "P2P, or NET/ and what carries it"),
    ):
        if not fits:
            yield key, f"{key}: {found!r} is not {allowed}"


def _model(document: Document, node: Node, what: str, model: Any, base: Any) -> Any:
    """Read one of ``_SECTIONS``."""
    known = _plain_fields(model)
    items = document.mapping(node, what, list(known)) or {}
    found = _plain_values(document, items, f"{what}.", model)
    if base is not None:
        return replace(base, **found)
    missing = [key for key in known if key not in items]  # none has a default
    if missing and items:
        document.fail(node, f"{what} lacks {', '.join(missing)}")
    return None if missing else model(**found)


def _plain_fields(model: Any) -> dict[str, Field[Any]]:
    """Return the fields that are a text or a number; a key is called as its attribute without the unit."""
    plain = [each for each in fields(model) if each.type in _KINDS]
    return {re.sub(f"_({'|'.join(_UNITS)})$", "", each.name): each for each in plain}


def _plain_values(document: Document, items: Mapping[str, tuple[Node, Node]], begin: str, model: Any) -> dict[str, Any]:
    return {
        each.name: _value(
            document, items[key][1], begin + key, _KINDS[str(each.type)], str(each.metadata.get("unit", ""))
        )
        for key, each in _plain_fields(model).items()
        if key in items
    }


def _value(document: Document, node: Node, what: str, kind: type, unit: str) -> Any:
    text = document.text(node, what)
    if text is None:
        return None
    try:
        if unit:
            value = units.parse(text, like=unit).to(unit)
            if value < 0 or (value == 0 and unit != "ratio"):
                raise ValueError(f"{text!r} is not above zero")
            return round(value) if kind is int else value
        if kind is int and not re.fullmatch("0|[1-9][0-9]*", text):
            raise ValueError(f"{text!r} is no whole number")
        if text == "0" and what.rpartition(".")[2] not in ("ports", "seed"):
            raise ValueError("0 is not above zero")
        return kind(text)
    except (ValueError, UnitError) as error:
        document.fail(node, f"{what}: {error}")
        return None


def _rates(document: Document, node: Node) -> dict[str, float]:
    found = {}
    for name, (key, value) in (document.mapping(node, "rates", None) or {}).items():
        try:
            metric = measurement.known(name)
        except Exception as error:  # its message says which metrics there are
            document.fail(key, str(error))
            continue
        found[name] = _value(document, value, name, float, metric.unit)
    return found
