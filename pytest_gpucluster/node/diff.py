"""Comparison of nodes: the facts to compare, the nodes' JSON files, groups of nodes with equal values, text and JSON.

Facts are what should be constant and equal on all nodes. Left out is what belongs to one node or one moment: names,
addresses, serial numbers, temperatures, loads, free memory.

Each node is one JSON file, as ``gpucluster node info all --json`` writes it. Nodes with the same value of a fact form a
group.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.node.info_text import value_text
from pytest_gpucluster.text import one_line, paragraph

NodeInfo = Mapping[str, Any]
"""The JSON of one node."""

UNKNOWN = "unknown"
_TOLERANCE_RATIO = 0.01
"""Bytes that differ by no more than this part of the larger number are equal."""

Fact = str | Callable[[NodeInfo], Any]
"""The path of a value in a node's info, where ``*`` is each item of a list; or a function that returns the value."""


def _read(fact: Fact, info: NodeInfo) -> Any:
    """Return the value in plain JSON types, None where it is missing or of an unexpected form."""
    try:
        return _at(info, fact.split(".")) if isinstance(fact, str) else fact(info)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError):
        return None  # written by another program or version: unknown


def _at(value: Any, path: Sequence[str]) -> Any:
    for number, key in enumerate(path):
        if key == "*":
            values = [_at(each, path[number + 1 :]) for each in value]
            return None if values == [None] * len(values) else values
        value = value.get(key) if number and path[number - 1] == "*" else value[key]
    return value


def _matrix(rows: Sequence[Sequence[str]]) -> str:
    """Return size, words and digest: a matrix does not fit into a line."""
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:6]
    words = sorted({str(word) for row in rows for word in row})
    return f"{len(rows)} x {len(rows[0])} ({', '.join(words)}), pattern {digest}" if rows else "none"


def _each(template: str, items: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted(template.format_map(each) for each in items)


def _ports(info: NodeInfo) -> Iterator[Mapping[str, Any]]:
    return ({**device, **port} for device in info["infiniband"]["devices"] for port in device["ports"])


FACTS: Mapping[str, Fact] = {
    "distribution": "system.system",
    "kernel": "system.kernel",
    "machine": "system.machine",
    "container": lambda info: info["system"]["container"] or "none",
    "CPU": "cpu.model",
    "sockets": "cpu.sockets",
    "cores": "cpu.cores",
    "CPUs online": "cpu.cpus",
    "CPUs offline": "cpu.offline",
    "threads a core (SMT)": lambda info: info["cpu"]["cpus"] / info["cpu"]["cores"],
    "CPUs for this job": "cpu.cpus_allowed",
    "governors": "cpu.governors",
    "NUMA balancing": "cpu.numa_balancing",
    "CPUs of NUMA nodes": lambda info: [f"{node['node']}: {node['cpus']}" for node in info["cpu"]["numa_nodes"]],
    "memory": "memory.total_bytes",
    "swap": "memory.swap_total_bytes",
    "memory of the control group": "memory.group_bytes",
    "/dev/shm": "memory.shm.total_bytes",
    "transparent huge pages": "memory.transparent_huge_pages",
    "huge pages": lambda info: [
        f"{page['total']} of {page['size_bytes'] >> 10} KiB" for page in info["memory"]["huge_pages"] if page["total"]
    ],
    "open files (nofile)": "memory.limits.nofile",
    "locked memory (memlock)": "memory.limits.memlock_bytes",
    "processes (nproc)": "memory.limits.nproc",
    "driver": "stack.driver",
    "kind of driver": "stack.driver_kind",
    "CUDA toolkit": "stack.toolkit",
    "torch": "stack.torch",
    "NCCL": "stack.nccl",
    "pytest-gpucluster": "stack.pytest_gpucluster",
    "fabric manager": "stack.fabric_manager",
    "OFED": "stack.ofed",
    "kernel modules": "stack.modules",
    "why no GPU": lambda info: info["gpus"]["why_not"] or None,
    "GPUs": "gpus.count",
    "GPU models": "gpus.gpus.*.name",
    "GPU memory": "gpus.gpus.*.memory_total_bytes",
    "VBIOS": "gpus.gpus.*.vbios",
    "InfoROM": "gpus.gpus.*.inforom",
    "GSP firmware": "gpus.gpus.*.gsp_firmware",
    "board part number": "gpus.gpus.*.board_part_number",
    "power limit (W)": "gpus.gpus.*.power_limit_watts",
    "highest SM clock (MHz)": "gpus.gpus.*.sm_clock_max_mhz",
    "highest memory clock (MHz)": "gpus.gpus.*.memory_clock_max_mhz",
    "ECC": "gpus.gpus.*.ecc",
    "MIG": "gpus.gpus.*.mig",
    "persistence": "gpus.gpus.*.persistence",
    "PCIe generation": "gpus.gpus.*.pcie_generation_max",
    "PCIe width": "gpus.gpus.*.pcie_width",
    "NVLinks up": lambda info: [sum((gpu.get("nvlink_up") or {}).values()) for gpu in info["gpus"]["gpus"]],
    "between GPUs": lambda info: _matrix(info["topology"]["between_gpus"]),
    "from HCAs to GPUs": lambda info: _matrix(info["topology"]["to_gpus"]),
    "why no InfiniBand": lambda info: info["infiniband"]["why_not"] or None,
    "HCAs": lambda info: _each("{name} {kind}", info["infiniband"]["devices"]),
    "HCA firmware": "infiniband.devices.*.firmware",
    "HCA boards": "infiniband.devices.*.board",
    "HCA ports": lambda info: _each("{name}/{number} {link_layer} {rate} {state}", _ports(info)),
    # The interfaces of PCI devices: those of containers come and go.
    "network": lambda info: _each(
        "{name} {driver} mtu {mtu} {speed_mbps} Mb/s {state}", (one for one in info["network"] if one["pci"])
    ),
    "network mounts": lambda info: _each(
        "{point} {kind} {source}, read only: {read_only}", (one for one in info["mounts"] if one["network"])
    ),
}
"""What to compare, by the name that is printed."""


def format_value(fact: Fact, value: Any) -> str:
    """Return a value as text, such as "7 x 0.88, 0.79" for a list; ``unknown`` for None."""
    if value is None:
        return UNKNOWN
    key = fact if isinstance(fact, str) else ""
    if not isinstance(value, list):
        return value_text(key, value)
    counts = Counter("none" if each is None else value_text(key, each) for each in value)
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counts.most_common()) or "none"


SUFFIX = ".json"
VIEW, INFO_SCHEMA_VERSION = "all", 1
"""The view that can be compared, and the version of its keys (docs/nodes.md)."""
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

    ``expected`` are the nodes that should have a file; empty for those that have one. Other files are ignored.

    Raises:
        OSError: the folder cannot be read.
    """
    paths = {path.stem: path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith(".")}
    found = {node: _parse(path) for node, path in sorted(paths.items())}
    missing = {node: "no answer" for node in expected if node not in paths}
    missing |= {node: why for node, why in found.items() if isinstance(why, str)}
    return Answers(
        nodes={node: info for node, info in found.items() if not isinstance(info, str)},
        missing=dict(sorted(missing.items())),
        unexpected=tuple(sorted(set(paths) - set(expected))) if expected else (),
    )


def _parse(path: Path) -> Mapping[str, Any] | str:
    """Return a file's info, or why it has none."""
    try:
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


def compare_nodes(nodes: Mapping[str, NodeInfo]) -> tuple[FactComparison, ...]:
    """Compare each fact over all nodes, by name. A known and an unknown value differ."""
    compared = []
    for name, fact in FACTS.items():
        groups: list[tuple[Any, list[str]]] = []
        for node, info in sorted(nodes.items()):
            value = _read(fact, info)
            members = next((members for known, members in groups if _same(fact, known, value)), None)
            if members is None:
                groups.append((value, [node]))
            else:
                members.append(node)
        groups.sort(key=lambda group: (-len(group[1]), group[1]))
        found = (Group(value=value, text=format_value(fact, value), nodes=tuple(some)) for value, some in groups)
        compared.append(FactComparison(name=name, groups=tuple(found)))
    return tuple(compared)


def _same(fact: Fact, one: Any, other: Any) -> bool:
    if isinstance(fact, str) and fact.endswith("_bytes") and isinstance(one, int) and isinstance(other, int):
        return abs(one - other) <= _TOLERANCE_RATIO * max(abs(one), abs(other))
    return type(one) is type(other) and bool(one == other)


DIFF_SCHEMA_VERSION = 1
_CELL_CHARACTERS = 400


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


def diff_lines(answers: Answers, compared: Sequence[FactComparison], *, width: int) -> Iterator[str]:
    """Yield the comparison as text, problems first. Lines are up to ``width`` wide, but for a longer name."""
    different = [fact for fact in compared if not fact.alike]
    if answers.missing:
        yield "without an answer:"
        for node, why in answers.missing.items():
            yield from paragraph(f"{one_line(node, 80)}: {why}", width, first="  ", rest="    ")
        yield ""
    if answers.unexpected:
        yield from paragraph(f"not expected, but compared: {_node_names(answers.unexpected)}", width)
        yield ""
    if different:
        yield "they differ in:"
        for fact in different:
            yield f"  {fact.name}"
            for group in fact.groups:
                yield from paragraph(_cell(group), width, first=f"  {len(group.nodes):>5}  ", rest=" " * 11)
                # The nodes of the largest group are all those that are not listed.
                if group is not fact.groups[0] or len(group.nodes) == 1:
                    yield from paragraph(_node_names(group.nodes), width, first=" " * 9, rest=" " * 9)
        yield ""
    alike = [fact for fact in compared if fact.alike and fact.known]
    if alike:
        yield "alike:" if len(answers.nodes) > 1 else "this node:"
        for fact in alike:
            yield from paragraph(_cell(fact.groups[0]), width, first=f"  {fact.name:<30}  ", rest=" " * 34)
        yield ""
    count = len(answers.nodes)
    result = f"differ in {len(different)} of {sum(fact.known for fact in compared)} facts" if different else "are alike"
    summary = f"{count} nodes compared: they {result}"
    if count < 2:
        summary = "1 node: nothing to compare it with" if count else "no node to compare"
    if answers.missing:
        summary += f"; {len(answers.missing)} gave no answer: {_node_names(answers.missing)}"
    yield from paragraph(summary, width)


def _cell(group: Group) -> str:
    return one_line(group.text, _CELL_CHARACTERS)


def _node_names(nodes: Collection[str]) -> str:
    try:
        return one_line(compress_hostlist(nodes), _CELL_CHARACTERS)
    except LaunchError:  # a file's name that is no host name: unchanged
        return one_line(", ".join(nodes), _CELL_CHARACTERS)
