"""Comparison of nodes: the facts compared, the nodes' answers, groups of nodes that agree, and the output.

Compared is what stays the same from one minute to the next, and should be the same on all nodes. Left out is what
belongs to one node or one moment: names, addresses, serial numbers, temperatures, loads, free memory.

What nodes have told of themselves: one file of JSON each, as ``gpucluster node info all --json`` writes it.

Nodes that are alike in a fact stand in one group: who differs from the others, and in what.

What nodes have in common and in what they differ: as text, and as one JSON object.
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

Told = Mapping[str, Any]

GIB = 2**30
NOT_TOLD = "not told"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing to compare.

    Attributes:
        name: for people.
        of: returns it from what a node told, as plain JSON types; None where the node did not tell.
        shown: returns it as a short text.
        alike_ratio: numbers that differ by no more than this share of the larger one are the same.
    """

    name: str
    of: Callable[[Told], Any]
    shown: Callable[[Any], str] = str
    alike_ratio: float = 0.0

    def read(self, told: Told) -> Any:
        """Return it, or None for what is not there or not of the expected form."""
        try:
            return self.of(told)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError):
            return None  # another program, or an older version of this one, has written it: the node has not told it


def _at(*keys: str) -> Callable[[Told], Any]:
    def of(told: Told) -> Any:
        for key in keys:
            told = told[key]
        return told

    return of


def _of_gpus(key: str) -> Callable[[Told], Any]:
    """Return a value of every GPU, each once where all have the same."""

    def of(told: Told) -> Any:
        gpus = told["gpus"]["gpus"]
        values = [gpu.get(key) for gpu in gpus]
        return None if not values or values == [None] * len(values) else values

    return of


def _gib(value: Any) -> str:
    return f"{value / GIB:.4g} GiB"


def _counted(values: Any) -> str:
    """Say "8 x 0.88" of eight equal values, and "7 x 0.88, 1 x 0.79" where one is another."""
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
    """A matrix is known by a few digits of its digest: it does not fit into a line."""
    if not rows:
        return "none"
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:6]
    words = Counter(str(word) for row in rows for word in row)
    return f"{len(rows)} x {len(rows[0])} ({', '.join(sorted(words))}), pattern {digest}"


def _smt(told: Told) -> float:
    return float(told["cpu"]["cpus"] / told["cpu"]["cores"])


def _numa(told: Told) -> list[str]:
    return [f"{node['node']}: {node['cpus']}" for node in told["cpu"]["numa_nodes"]]


def _huge_pages(told: Told) -> list[str]:
    return [
        f"{page['total']} of {page['size_bytes'] >> 10} KiB" for page in told["memory"]["huge_pages"] if page["total"]
    ]


def _nvlinks(told: Told) -> list[int]:
    return [sum(map(bool, (gpu.get("nvlink_up") or {}).values())) for gpu in told["gpus"]["gpus"]]


def _adapters(told: Told) -> list[str]:
    return sorted(f"{device['name']} {device['kind']}" for device in told["infiniband"]["devices"])


def _adapter(key: str) -> Callable[[Told], Any]:
    return lambda told: sorted(str(device[key]) for device in told["infiniband"]["devices"])


def _ports(told: Told) -> list[str]:
    return sorted(
        f"{device['name']}/{port['number']} {port['link_layer']} {port['rate']} {port['state']}"
        for device in told["infiniband"]["devices"]
        for port in device["ports"]
    )


def _interfaces(told: Told) -> list[str]:
    """Return the interfaces of real devices: those of containers come and go."""
    return sorted(
        f"{each['name']} {each['driver']} mtu {each['mtu']} {each['speed_mbps']} Mb/s {each['state']}"
        for each in told["network"]
        if each["pci"]
    )


def _mounts(told: Told) -> list[str]:
    return sorted(
        f"{mount['point']} {mount['kind']} {mount['source']}{' (read only)' if mount['read_only'] else ''}"
        for mount in told["mounts"]
        if mount["network"]
    )


FACTS: Sequence[Fact] = (
    Fact(name="distribution", of=_at("system", "system")),
    Fact(name="kernel", of=_at("system", "kernel")),
    Fact(name="machine", of=_at("system", "machine")),
    Fact(name="container", of=lambda told: told["system"]["container"] or "none"),
    Fact(name="CPU", of=_at("cpu", "model")),
    Fact(name="sockets", of=_at("cpu", "sockets")),
    Fact(name="cores", of=_at("cpu", "cores")),
    Fact(name="CPUs online", of=_at("cpu", "cpus")),
    Fact(name="CPUs offline", of=_at("cpu", "offline")),
    Fact(name="threads a core (SMT)", of=_smt, shown="{:g}".format),
    Fact(name="CPUs for this job", of=_at("cpu", "cpus_allowed")),
    Fact(name="governors", of=_at("cpu", "governors"), shown=_mapping),
    Fact(name="NUMA balancing", of=_at("cpu", "numa_balancing"), shown=_short),
    Fact(name="CPUs of NUMA nodes", of=_numa, shown=_listed),
    Fact(name="memory", of=_at("memory", "total_bytes"), shown=_gib, alike_ratio=0.01),
    Fact(name="swap", of=_at("memory", "swap_total_bytes"), shown=_gib, alike_ratio=0.01),
    Fact(name="memory of the control group", of=_at("memory", "group_bytes"), shown=_gib, alike_ratio=0.01),
    Fact(name="/dev/shm", of=_at("memory", "shm", "total_bytes"), shown=_gib, alike_ratio=0.01),
    Fact(name="transparent huge pages", of=_at("memory", "transparent_huge_pages")),
    Fact(name="huge pages", of=_huge_pages, shown=_listed),
    Fact(name="open files (nofile)", of=_at("memory", "limits", "nofile")),
    Fact(name="locked memory (memlock, bytes)", of=_at("memory", "limits", "memlock_bytes")),
    Fact(name="processes (nproc)", of=_at("memory", "limits", "nproc")),
    Fact(name="driver", of=_at("stack", "driver")),
    Fact(name="kind of driver", of=_at("stack", "driver_kind")),
    Fact(name="CUDA toolkit", of=_at("stack", "toolkit")),
    Fact(name="torch", of=_at("stack", "torch")),
    Fact(name="NCCL", of=_at("stack", "nccl")),
    Fact(name="pytest-gpucluster", of=_at("stack", "pytest_gpucluster")),
    Fact(name="fabric manager", of=_at("stack", "fabric_manager")),
    Fact(name="OFED", of=_at("stack", "ofed")),
    Fact(name="kernel modules", of=_at("stack", "modules"), shown=_mapping),
    Fact(name="why no GPU", of=lambda told: told["gpus"]["why_not"] or None),
    Fact(name="GPUs", of=_at("gpus", "count")),
    Fact(name="GPU models", of=_of_gpus("name"), shown=_counted),
    Fact(name="GPU memory", of=_of_gpus("memory_total_bytes"), shown=_counted_gib),
    Fact(name="VBIOS", of=_of_gpus("vbios"), shown=_counted),
    Fact(name="InfoROM", of=_of_gpus("inforom"), shown=_counted),
    Fact(name="GSP firmware", of=_of_gpus("gsp_firmware"), shown=_counted),
    Fact(name="board part number", of=_of_gpus("board_part_number"), shown=_counted),
    Fact(name="power limit (W)", of=_of_gpus("power_limit_watts"), shown=_counted),
    Fact(name="highest SM clock (MHz)", of=_of_gpus("sm_clock_max_mhz"), shown=_counted),
    Fact(name="highest memory clock (MHz)", of=_of_gpus("memory_clock_max_mhz"), shown=_counted),
    Fact(name="ECC", of=_of_gpus("ecc"), shown=_counted),
    Fact(name="MIG", of=_of_gpus("mig"), shown=_counted),
    Fact(name="persistence", of=_of_gpus("persistence"), shown=_counted),
    Fact(name="PCIe generation", of=_of_gpus("pcie_generation_max"), shown=_counted),
    Fact(name="PCIe width", of=_of_gpus("pcie_width"), shown=_counted),
    Fact(name="NVLinks up", of=_nvlinks, shown=_counted),
    Fact(name="between GPUs", of=_at("topology", "between_gpus"), shown=_matrix),
    Fact(name="from HCAs to GPUs", of=_at("topology", "to_gpus"), shown=_matrix),
    Fact(name="why no InfiniBand", of=lambda told: told["infiniband"]["why_not"] or None),
    Fact(name="HCAs", of=_adapters, shown=_listed),
    Fact(name="HCA firmware", of=_adapter("firmware"), shown=_counted),
    Fact(name="HCA boards", of=_adapter("board"), shown=_counted),
    Fact(name="HCA ports", of=_ports, shown=_listed),
    Fact(name="network", of=_interfaces, shown=_listed),
    Fact(name="network mounts", of=_mounts, shown=_listed),
)


def show(fact: Fact, value: Any) -> str:
    """Return a value of a fact as a text; ``not told`` for None."""
    if value is None:
        return NOT_TOLD
    try:
        text = fact.shown(value)
    except (TypeError, ValueError, AttributeError, IndexError):
        text = _short(value)  # of another form than this version writes: shown as it is
    return text if text else "none"


SUFFIX = ".json"
VIEW, INFO_SCHEMA_VERSION = "all", 1
"""What can be compared: all that a node is, by the names of docs/info.md, and the version of these names."""
_MOST_BYTES = 16 * 2**20
_ERROR_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Who has answered what.

    Attributes:
        told: node -> what ``gpucluster node info`` has told there.
        without: node -> why nothing is known of it.
        uninvited: nodes that have answered and were not expected.
    """

    told: Mapping[str, Mapping[str, Any]]
    without: Mapping[str, str]
    uninvited: tuple[str, ...] = ()


def read_answers(folder: Path, expected: Sequence[str] = ()) -> Answers:
    """Return the answers in a folder. Each is a file with the node's name and ``.json`` behind it.

    Args:
        folder: with the files; others in it are passed over.
        expected: nodes that should have answered; none for those that have.

    Raises:
        OSError: the folder cannot be read.
    """
    paths = {path.name.removesuffix(SUFFIX): path for path in folder.iterdir() if _is_answer(path)}
    told: dict[str, Mapping[str, Any]] = {}
    without = {node: "no answer" for node in expected if node not in paths}
    for node in sorted(paths):
        found = _read(paths[node])
        if isinstance(found, str):
            without[node] = found
        else:
            told[node] = found
    uninvited = tuple(sorted(set(paths) - set(expected))) if expected else ()
    return Answers(told=told, without=dict(sorted(without.items())), uninvited=uninvited)


def _is_answer(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not path.name.startswith(".")


def _read(path: Path) -> Mapping[str, Any] | str:
    """Return what a file tells, or why that is nothing."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return f"{path.name} is larger than {_MOST_BYTES >> 20} MiB"
        told = json.loads(path.read_bytes())
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return one_line(f"{path.name} is no JSON: {error}", _ERROR_CHARACTERS)
    if not isinstance(told, dict) or "schema_version" not in told or "host" not in told:
        return f"{path.name} was not written by `gpucluster node info --json`"
    if told["schema_version"] != INFO_SCHEMA_VERSION or told.get("view") != VIEW:
        found = f"version {told['schema_version']!r}, view {told.get('view')!r}"
        return one_line(
            f"{path.name} is not of `gpucluster node info all --json` of this version: {found}", _ERROR_CHARACTERS
        )
    return told


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes that have told the same. ``shown`` is what, as a text; ``value`` as plain JSON types, None: not told."""

    value: Any
    shown: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One fact over all nodes: the largest group first."""

    name: str
    groups: tuple[Group, ...]

    @property
    def alike(self) -> bool:
        """Whether all nodes have told the same, be it nothing."""
        return len(self.groups) < 2

    @property
    def known(self) -> bool:
        """Whether any node has told it."""
        return any(group.value is not None for group in self.groups)


def compare_nodes(told: Mapping[str, Told], facts: Sequence[Fact] = FACTS) -> tuple[Compared, ...]:
    """Return each fact over all nodes. Where some tell it and others do not, they differ.

    Args:
        told: node -> what it has told.
        facts: what to compare.
    """
    return tuple(_compare(fact, {node: fact.read(each) for node, each in sorted(told.items())}) for fact in facts)


def _compare(fact: Fact, values: Mapping[str, Any]) -> Compared:
    groups: list[tuple[Any, list[str]]] = []
    for node, value in values.items():
        for known, nodes in groups:
            if _same(fact, known, value):
                nodes.append(node)
                break
        else:
            groups.append((value, [node]))
    groups.sort(key=lambda group: (-len(group[1]), group[1]))
    return Compared(
        name=fact.name,
        groups=tuple(Group(value=value, shown=show(fact, value), nodes=tuple(nodes)) for value, nodes in groups),
    )


def _same(fact: Fact, one: Any, other: Any) -> bool:
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other))
    if fact.alike_ratio and numbers:
        return bool(abs(one - other) <= fact.alike_ratio * max(abs(one), abs(other)))
    return type(one) is type(other) and bool(one == other)


DIFF_SCHEMA_VERSION = 1
_CELL_CHARACTERS = 400
_NAME_COLUMNS = 30


def diff_table(answers: Answers, compared: Sequence[Compared], *, width: int) -> str:
    """Return the comparison as text, what is wrong first. Every line but a long name's is at most ``width`` wide."""
    return "".join(f"{line.rstrip()}\n" for line in _lines(answers, compared, width))


def diff_document(answers: Answers, compared: Sequence[Compared], *, exit_code: int) -> str:
    """Return the comparison as one JSON object, whose keys are in docs/slurm.md."""
    plain = {
        "schema_version": DIFF_SCHEMA_VERSION,
        "exit": exit_code,
        "nodes": sorted(answers.told),
        "without_answer": dict(answers.without),
        "uninvited": list(answers.uninvited),
        "facts": [
            {
                "name": fact.name,
                "alike": fact.alike,
                "groups": [
                    {"shown": group.shown, "value": group.value, "nodes": list(group.nodes)} for group in fact.groups
                ],
            }
            for fact in compared
        ],
    }
    return json.dumps(plain, indent=2) + "\n"


def _lines(answers: Answers, compared: Sequence[Compared], width: int) -> Iterator[str]:
    different = [fact for fact in compared if not fact.alike]
    if answers.without:
        yield "without an answer:"
        for node, why in answers.without.items():
            yield from _wrapped(f"{one_line(node, 80)}: {why}", "  ", width)
        yield ""
    if answers.uninvited:
        yield from _wrapped(f"not expected, and compared all the same: {_named(answers.uninvited)}", "", width)
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
        yield "alike:" if len(answers.told) > 1 else "it is:"
        for fact in alike:
            yield from _wrapped(f"{fact.name:<{_NAME_COLUMNS}}  {_shown(fact.groups[0])}", "  ", width, deeper=34)
        yield ""
    count = len(answers.told)
    ending = f"differ in {len(different)} of {sum(fact.known for fact in compared)} facts" if different else "are alike"
    told = f"{count} nodes told what they are: they {ending}"
    if count < 2:
        told = "1 node told what it is: nothing is there to compare it with" if count else "no node told what it is"
    if answers.without:
        told += f"; {len(answers.without)} gave no answer: {_named(answers.without)}"
    yield from _wrapped(told, "", width)


def _group(group: Group, *, is_first: bool, width: int) -> Iterator[str]:
    yield from _wrapped(f"{len(group.nodes):>5}  {_shown(group)}", "  ", width, deeper=9)
    # Of the largest group all that is to be said is that the others are not in it.
    if not is_first or len(group.nodes) == 1:
        yield from _wrapped(_named(group.nodes), " " * 9, width)


def _shown(group: Group) -> str:
    return one_line(group.shown, _CELL_CHARACTERS)


def _named(nodes: Collection[str]) -> str:
    try:
        return one_line(compress_hostlist(nodes), _CELL_CHARACTERS)
    except LaunchError:  # a file's name that no node has: it stands as it is
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
