"""Comparison of nodes: the facts to compare, the nodes' JSON files, groups of nodes with equal values, text and JSON.

Facts are what should be constant and equal on all nodes. Left out is what belongs to one node or one moment: names,
addresses, serial numbers, temperatures, loads, free memory.

Each node is one JSON file, as ``gpucluster node info all --json`` writes it. Nodes with the same value of a fact form a
group.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.text import one_line

NodeInfo = Mapping[str, Any]
"""The JSON of one node."""

GIB = 2**30
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing to compare.

    Attributes:
        name: as displayed.
        get: returns the value from a node's info, in plain JSON types; None where it is unknown.
        format: returns the value as a short text.
        tolerance_ratio: numbers that differ by no more than this part of the larger one are equal.
    """

    name: str
    get: Callable[[NodeInfo], Any]
    format: Callable[[Any], str] = str
    tolerance_ratio: float = 0.0

    def read(self, info: NodeInfo) -> Any:
        """Return the value, or None where it is missing or of an unexpected form."""
        try:
            return self.get(info)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError):
            return None  # written by another program or version: unknown


def _at(*keys: str) -> Callable[[NodeInfo], Any]:
    def get(info: NodeInfo) -> Any:
        for key in keys:
            info = info[key]
        return info

    return get


def _per_gpu(key: str) -> Callable[[NodeInfo], Any]:
    """Return a getter of the values of all GPUs."""

    def get(info: NodeInfo) -> Any:
        gpus = info["gpus"]["gpus"]
        values = [gpu.get(key) for gpu in gpus]
        return None if not values or values == [None] * len(values) else values

    return get


def _gib(value: Any) -> str:
    return f"{value / GIB:.4g} GiB"


def _counted(values: Any) -> str:
    """Return "8 x 0.88" for eight equal values, and "7 x 0.88, 1 x 0.79" where one differs."""
    counts = Counter("none" if value is None else _short(value) for value in values)
    return ", ".join(f"{count} x {value}" for value, count in counts.most_common())


def _counted_gib(values: Any) -> str:
    return _counted([None if value is None else _gib(value) for value in values])


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _listed(values: Any) -> str:
    return ", ".join(values) or "none"


def _mapping(value: Any) -> str:
    return ", ".join(f"{key} {_short(each)}" for key, each in sorted(value.items())) or "none"


def _matrix(rows: Any) -> str:
    """Return size, words and digest: a matrix does not fit into a line."""
    if not rows:
        return "none"
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:6]
    words = Counter(str(word) for row in rows for word in row)
    return f"{len(rows)} x {len(rows[0])} ({', '.join(sorted(words))}), pattern {digest}"


def _smt(info: NodeInfo) -> float:
    return float(info["cpu"]["cpus"] / info["cpu"]["cores"])


def _numa(info: NodeInfo) -> list[str]:
    return [f"{node['node']}: {node['cpus']}" for node in info["cpu"]["numa_nodes"]]


def _huge_pages(info: NodeInfo) -> list[str]:
    return [
        f"{page['total']} of {page['size_bytes'] >> 10} KiB" for page in info["memory"]["huge_pages"] if page["total"]
    ]


def _nvlinks(info: NodeInfo) -> list[int]:
    return [sum(map(bool, (gpu.get("nvlink_up") or {}).values())) for gpu in info["gpus"]["gpus"]]


def _adapters(info: NodeInfo) -> list[str]:
    return sorted(f"{device['name']} {device['kind']}" for device in info["infiniband"]["devices"])


def _adapter(key: str) -> Callable[[NodeInfo], Any]:
    return lambda info: sorted(str(device[key]) for device in info["infiniband"]["devices"])


def _ports(info: NodeInfo) -> list[str]:
    return sorted(
        f"{device['name']}/{port['number']} {port['link_layer']} {port['rate']} {port['state']}"
        for device in info["infiniband"]["devices"]
        for port in device["ports"]
    )


def _interfaces(info: NodeInfo) -> list[str]:
    """Return the interfaces of PCI devices: those of containers come and go."""
    return sorted(
        f"{each['name']} {each['driver']} mtu {each['mtu']} {each['speed_mbps']} Mb/s {each['state']}"
        for each in info["network"]
        if each["pci"]
    )


def _mounts(info: NodeInfo) -> list[str]:
    return sorted(
        f"{mount['point']} {mount['kind']} {mount['source']}{' (read only)' if mount['read_only'] else ''}"
        for mount in info["mounts"]
        if mount["network"]
    )


FACTS: Sequence[Fact] = (
    Fact(name="distribution", get=_at("system", "system")),
    Fact(name="kernel", get=_at("system", "kernel")),
    Fact(name="machine", get=_at("system", "machine")),
    Fact(name="container", get=lambda info: info["system"]["container"] or "none"),
    Fact(name="CPU", get=_at("cpu", "model")),
    Fact(name="sockets", get=_at("cpu", "sockets")),
    Fact(name="cores", get=_at("cpu", "cores")),
    Fact(name="CPUs online", get=_at("cpu", "cpus")),
    Fact(name="CPUs offline", get=_at("cpu", "offline")),
    Fact(name="threads a core (SMT)", get=_smt, format="{:g}".format),
    Fact(name="CPUs for this job", get=_at("cpu", "cpus_allowed")),
    Fact(name="governors", get=_at("cpu", "governors"), format=_mapping),
    Fact(name="NUMA balancing", get=_at("cpu", "numa_balancing"), format=_short),
    Fact(name="CPUs of NUMA nodes", get=_numa, format=_listed),
    Fact(name="memory", get=_at("memory", "total_bytes"), format=_gib, tolerance_ratio=0.01),
    Fact(name="swap", get=_at("memory", "swap_total_bytes"), format=_gib, tolerance_ratio=0.01),
    Fact(name="memory of the control group", get=_at("memory", "group_bytes"), format=_gib, tolerance_ratio=0.01),
    Fact(name="/dev/shm", get=_at("memory", "shm", "total_bytes"), format=_gib, tolerance_ratio=0.01),
    Fact(name="transparent huge pages", get=_at("memory", "transparent_huge_pages")),
    Fact(name="huge pages", get=_huge_pages, format=_listed),
    Fact(name="open files (nofile)", get=_at("memory", "limits", "nofile")),
    Fact(name="locked memory (memlock, bytes)", get=_at("memory", "limits", "memlock_bytes")),
    Fact(name="processes (nproc)", get=_at("memory", "limits", "nproc")),
    Fact(name="driver", get=_at("stack", "driver")),
    Fact(name="kind of driver", get=_at("stack", "driver_kind")),
    Fact(name="CUDA toolkit", get=_at("stack", "toolkit")),
    Fact(name="torch", get=_at("stack", "torch")),
    Fact(name="NCCL", get=_at("stack", "nccl")),
    Fact(name="pytest-gpucluster", get=_at("stack", "pytest_gpucluster")),
    Fact(name="fabric manager", get=_at("stack", "fabric_manager")),
    Fact(name="OFED", get=_at("stack", "ofed")),
    Fact(name="kernel modules", get=_at("stack", "modules"), format=_mapping),
    Fact(name="why no GPU", get=lambda info: info["gpus"]["why_not"] or None),
    Fact(name="GPUs", get=_at("gpus", "count")),
    Fact(name="GPU models", get=_per_gpu("name"), format=_counted),
    Fact(name="GPU memory", get=_per_gpu("memory_total_bytes"), format=_counted_gib),
    Fact(name="VBIOS", get=_per_gpu("vbios"), format=_counted),
    Fact(name="InfoROM", get=_per_gpu("inforom"), format=_counted),
    Fact(name="GSP firmware", get=_per_gpu("gsp_firmware"), format=_counted),
    Fact(name="board part number", get=_per_gpu("board_part_number"), format=_counted),
    Fact(name="power limit (W)", get=_per_gpu("power_limit_watts"), format=_counted),
    Fact(name="highest SM clock (MHz)", get=_per_gpu("sm_clock_max_mhz"), format=_counted),
    Fact(name="highest memory clock (MHz)", get=_per_gpu("memory_clock_max_mhz"), format=_counted),
    Fact(name="ECC", get=_per_gpu("ecc"), format=_counted),
    Fact(name="MIG", get=_per_gpu("mig"), format=_counted),
    Fact(name="persistence", get=_per_gpu("persistence"), format=_counted),
    Fact(name="PCIe generation", get=_per_gpu("pcie_generation_max"), format=_counted),
    Fact(name="PCIe width", get=_per_gpu("pcie_width"), format=_counted),
    Fact(name="NVLinks up", get=_nvlinks, format=_counted),
    Fact(name="between GPUs", get=_at("topology", "between_gpus"), format=_matrix),
    Fact(name="from HCAs to GPUs", get=_at("topology", "to_gpus"), format=_matrix),
    Fact(name="why no InfiniBand", get=lambda info: info["infiniband"]["why_not"] or None),
    Fact(name="HCAs", get=_adapters, format=_listed),
    Fact(name="HCA firmware", get=_adapter("firmware"), format=_counted),
    Fact(name="HCA boards", get=_adapter("board"), format=_counted),
    Fact(name="HCA ports", get=_ports, format=_listed),
    Fact(name="network", get=_interfaces, format=_listed),
    Fact(name="network mounts", get=_mounts, format=_listed),
)


def format_value(fact: Fact, value: Any) -> str:
    """Return a value of a fact as text; ``unknown`` for None."""
    if value is None:
        return UNKNOWN
    try:
        text = fact.format(value)
    except (TypeError, ValueError, AttributeError, IndexError):
        text = _short(value)  # of another form than this version writes
    return text if text else "none"


SUFFIX = ".json"
VIEW, INFO_SCHEMA_VERSION = "all", 1
"""The view that can be compared, and the version of its keys (docs/nodes.md)."""
_MOST_BYTES = 16 * 2**20
_ERROR_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The nodes' files.

    Attributes:
        nodes: node -> its info.
        missing: node -> why it has no info.
        unexpected: nodes with a file that were not expected.
    """

    nodes: Mapping[str, NodeInfo]
    missing: Mapping[str, str]
    unexpected: tuple[str, ...] = ()


def read_answers(folder: Path, expected: Sequence[str] = ()) -> Answers:
    """Read the files ``NODE.json`` of a folder.

    Args:
        folder: with the files; others in it are ignored.
        expected: nodes that should have a file; empty for those that have one.

    Raises:
        OSError: the folder cannot be read.
    """
    paths = {path.name.removesuffix(SUFFIX): path for path in folder.iterdir() if _is_answer(path)}
    nodes: dict[str, NodeInfo] = {}
    missing = {node: "no answer" for node in expected if node not in paths}
    for node in sorted(paths):
        found = _read(paths[node])
        if isinstance(found, str):
            missing[node] = found
        else:
            nodes[node] = found
    unexpected = tuple(sorted(set(paths) - set(expected))) if expected else ()
    return Answers(nodes=nodes, missing=dict(sorted(missing.items())), unexpected=unexpected)


def _is_answer(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not path.name.startswith(".")


def _read(path: Path) -> Mapping[str, Any] | str:
    """Return a file's info, or why it has none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return f"{path.name} is larger than {_MOST_BYTES >> 20} MiB"
        info = json.loads(path.read_bytes())
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return one_line(f"{path.name} is no JSON: {error}", _ERROR_CHARACTERS)
    if not isinstance(info, dict) or "schema_version" not in info or "host" not in info:
        return f"{path.name} was not written by `gpucluster node info --json`"
    if info["schema_version"] != INFO_SCHEMA_VERSION or info.get("view") != VIEW:
        found = f"version {info['schema_version']!r}, view {info.get('view')!r}"
        return one_line(
            f"{path.name} is not of `gpucluster node info all --json` of this version: {found}", _ERROR_CHARACTERS
        )
    return info


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes with the same value: in plain JSON types, None where it is unknown, and as text."""

    value: Any
    text: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FactComparison:
    """One fact over all nodes: the largest group first."""

    name: str
    groups: tuple[Group, ...]

    @property
    def alike(self) -> bool:
        """Whether all nodes have the same value, or none."""
        return len(self.groups) < 2

    @property
    def known(self) -> bool:
        """Whether any node has a value."""
        return any(group.value is not None for group in self.groups)


def compare_nodes(nodes: Mapping[str, NodeInfo], facts: Sequence[Fact] = FACTS) -> tuple[FactComparison, ...]:
    """Compare each fact over all nodes. A known and an unknown value differ.

    Args:
        nodes: node -> its info.
        facts: to compare.
    """
    return tuple(_compare(fact, {node: fact.read(info) for node, info in sorted(nodes.items())}) for fact in facts)


def _compare(fact: Fact, values: Mapping[str, Any]) -> FactComparison:
    groups: list[tuple[Any, list[str]]] = []
    for node, value in values.items():
        for known, nodes in groups:
            if _same(fact, known, value):
                nodes.append(node)
                break
        else:
            groups.append((value, [node]))
    groups.sort(key=lambda group: (-len(group[1]), group[1]))
    return FactComparison(
        name=fact.name,
        groups=tuple(Group(value=value, text=format_value(fact, value), nodes=tuple(nodes)) for value, nodes in groups),
    )


def _same(fact: Fact, one: Any, other: Any) -> bool:
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other))
    if fact.tolerance_ratio and numbers:
        return bool(abs(one - other) <= fact.tolerance_ratio * max(abs(one), abs(other)))
    return type(one) is type(other) and bool(one == other)


DIFF_SCHEMA_VERSION = 1
_CELL_CHARACTERS = 400
_NAME_COLUMNS = 30


def diff_table(answers: Answers, compared: Sequence[FactComparison], *, width: int) -> str:
    """Return the comparison as text, problems first. Lines are up to ``width`` wide, but for a longer name."""
    return "".join(f"{line.rstrip()}\n" for line in _lines(answers, compared, width))


def diff_document(answers: Answers, compared: Sequence[FactComparison], *, exit_code: int) -> str:
    """Return the comparison as one JSON object, whose keys are in docs/nodes.md."""
    plain = {
        "schema_version": DIFF_SCHEMA_VERSION,
        "exit": exit_code,
        "nodes": sorted(answers.nodes),
        "without_answer": dict(answers.missing),
        "uninvited": list(answers.unexpected),
        "facts": [
            {
                "name": fact.name,
                "alike": fact.alike,
                "groups": [
                    {"shown": group.text, "value": group.value, "nodes": list(group.nodes)} for group in fact.groups
                ],
            }
            for fact in compared
        ],
    }
    return json.dumps(plain, indent=2) + "\n"


def _lines(answers: Answers, compared: Sequence[FactComparison], width: int) -> Iterator[str]:
    different = [fact for fact in compared if not fact.alike]
    if answers.missing:
        yield "without an answer:"
        for node, why in answers.missing.items():
            yield from _wrapped(f"{one_line(node, 80)}: {why}", "  ", width)
        yield ""
    if answers.unexpected:
        yield from _wrapped(f"not expected, but compared: {_node_names(answers.unexpected)}", "", width)
        yield ""
    if different:
        yield "they differ in:"
        for fact in different:
            yield f"  {fact.name}"
            for group in fact.groups:
                yield from _group(group, is_first=group is fact.groups[0], width=width)
        yield ""
    alike = [fact for fact in compared if fact.alike and fact.known]
    if alike:
        yield "alike:" if len(answers.nodes) > 1 else "this node:"
        for fact in alike:
            yield from _wrapped(f"{fact.name:<{_NAME_COLUMNS}}  {_cell(fact.groups[0])}", "  ", width, deeper=34)
        yield ""
    count = len(answers.nodes)
    result = f"differ in {len(different)} of {sum(fact.known for fact in compared)} facts" if different else "are alike"
    summary = f"{count} nodes compared: they {result}"
    if count < 2:
        summary = "1 node: nothing to compare it with" if count else "no node to compare"
    if answers.missing:
        summary += f"; {len(answers.missing)} gave no answer: {_node_names(answers.missing)}"
    yield from _wrapped(summary, "", width)


def _group(group: Group, *, is_first: bool, width: int) -> Iterator[str]:
    yield from _wrapped(f"{len(group.nodes):>5}  {_cell(group)}", "  ", width, deeper=9)
    # The nodes of the largest group are all those that are not listed.
    if not is_first or len(group.nodes) == 1:
        yield from _wrapped(_node_names(group.nodes), " " * 9, width)


def _cell(group: Group) -> str:
    return one_line(group.text, _CELL_CHARACTERS)


def _node_names(nodes: Collection[str]) -> str:
    try:
        return one_line(compress_hostlist(nodes), _CELL_CHARACTERS)
    except LaunchError:  # a file's name that is no host name: unchanged
        return one_line(", ".join(nodes), _CELL_CHARACTERS)


def _wrapped(text: str, indent: str, width: int, *, deeper: int = 2) -> list[str]:
    inner = textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * (deeper if deeper > 2 else 2),
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return inner or [""]
