"""The text of ``gpucluster node info``: templates of facts and of rows, filled with the values of a part.

Lines are at most ``width`` wide, and the text has no control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.node.info_gpus import LEGEND
from pytest_gpucluster.node.pci import PeerMemory
from pytest_gpucluster.text import (
    Column,
    clean,
    line_of,
    padded,
    paragraph,
    plural,
    shortened,
    total,
    widths,
)

Info = Mapping[str, Any]
UNKNOWN = "?"
_KEY_COLUMNS = 27
_FOR_NULL = {"cpus_of_group": "unlimited", "group_bytes": "unlimited", "container": "none seen", "scheduler": "none"}
"""Keys whose null is not unknown."""


def amount(in_bytes: float) -> str:
    """Format bytes in units of 1024.

    >>> amount(2**31), amount(1500)
    ('2 GiB', '1.465 KiB')
    """
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while abs(in_bytes) >= 1024 and unit != "TiB":
        in_bytes, unit = in_bytes / 1024, next(units, "TiB")
    return f"{in_bytes:.4g} {unit}"


def value_text(key: str, value: Any) -> str:
    """Return a value as text, in the unit that its key ends with; ``UNKNOWN`` for null.

    >>> value_text("memory_used_bytes", 2048), value_text("load", [1.5, 2.0]), value_text("governors", {"powersave": 2})
    ('2 KiB', '1.5, 2', 'powersave 2')
    >>> value_text("uptime_seconds", 41.7), value_text("uptime_seconds", 200000), value_text("modules", {"mlx5_ib": ""})
    ('41 seconds', '2 days', 'mlx5 ib')
    """
    if value is None or value == "":
        return _FOR_NULL.get(key, UNKNOWN)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        # A module that is built into the kernel has no version.
        texts = (f" {value_text(name, each)}" if each != "" else "" for name, each in value.items())
        return ", ".join(f"{_label(name)}{text}" for name, text in zip(value, texts, strict=True)) or "none"
    if isinstance(value, (list, tuple)):
        separator = "; " if any(isinstance(each, Mapping) for each in value) else ", "
        return separator.join(value_text(key, each) for each in value) or "none"
    if isinstance(value, (int, float)):
        if key.endswith("_bytes"):
            return amount(value)
        if key.endswith("_seconds"):
            return _time(value)
        return f"{value:.0f}" if key.endswith("_watts") else f"{value:.10g}"
    return str(value)


def _time(seconds: float) -> str:
    for unit, least in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= least:
            return plural(int(seconds // least), unit)
    return plural(int(seconds), "second")


def _label(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def fact(key: str, text: str, width: int, *, key_columns: int = 16) -> list[str]:
    """Return a fact as lines: its name, then the text."""
    name = padded(shortened(clean(key), key_columns - 1), key_columns)
    return paragraph(text, width, first=f"  {name}", rest=" " * (2 + key_columns))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; the first ``left`` columns are left-aligned, the others right-aligned."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


Item = tuple[str, str] | Table | str
"""A fact, a table, or a paragraph."""


def _facts(values: Info, *left_out: str) -> Iterator[Item]:
    """Yield each value by its key; the reason of a null, where there is one."""
    missing = values.get("not_available", {})
    for key, value in values.items():
        if key not in ("not_available", *left_out):
            yield _label(key), missing.get(key) or value_text(key, value)


def _grouped(items: Mapping[str, Info], *left_out: str) -> Iterator[Item]:
    """Yield each value of several items by its key, equal ones once; others with the names of their items."""
    for key in next(iter(items.values()), {}):
        if key not in ("not_available", *left_out):
            groups = grouped(
                (values.get("not_available", {}).get(key) or value_text(key, values[key]), name)
                for name, values in items.items()
            )
            several = (f"{text} ({', '.join(names)})" for text, names in groups.items())
            yield _label(key), "; ".join(groups if len(groups) == 1 else several)


def _table(templates: Mapping[str, str], rows: Iterable[Info], left: int) -> Table:
    """Return a table by title -> template of a cell."""
    texts = ({key: value_text(key, value) for key, value in row.items()} for row in rows)
    cells = [[template.format_map(row) for template in templates.values()] for row in texts]
    return Table(titles=list(templates), rows=cells, left=left)


def _cpu(cpu: Info, whole: bool) -> Iterator[Item]:
    yield from _facts(cpu, "numa_nodes")
    cells = {"node": "{node}", "CPUs": "{cpus}", "memory": "{memory_total_bytes}", "free": "{memory_free_bytes}"}
    yield _table({**cells, "distances": "{distances}"}, cpu["numa_nodes"] if whole else (), left=2)


def _mounts(mounts: Sequence[Info], whole: bool) -> Iterator[Item]:
    templates = {"mounted at": "{point}", "kind": "{kind}", "source": "{source}", "read only": "{read_only}"}
    yield _table(templates, [one for one in mounts if whole or one["network"] or one["point"] == "/"], left=3)


_GPU_COLUMNS = {
    "GPU": "{index}",
    "name": "{name}",
    "memory": "{memory_total_bytes}",
    "temp": "{temperature_celsius} C",
    "power W": "{power_watts}/{power_limit_watts}",
    "busy": "{utilization_percent} %",
    "ECC": "{ecc}",
    "MIG": "{mig}",
    "NVLink": "{nvlink_up}",
}


def _gpus(known: Info, whole: bool) -> Iterator[Item]:
    gpus = [{**gpu, **_links(gpu)} for gpu in known["gpus"]]
    if known["why_not"]:
        yield "not available", known["why_not"]
    elif len(gpus) < known["count"]:
        yield "missing", f"{known['count'] - len(gpus)} of {known['count']} GPUs do not answer"
    yield _table(_GPU_COLUMNS, gpus, left=2)
    if whole and gpus:
        yield ""
        yield from _grouped({f"GPU {gpu['index']}": gpu for gpu in gpus}, "index")


def _links(gpu: Info) -> Info:
    """Return the NVLinks of a GPU: how many are up, their versions and ends."""
    up = gpu["nvlink_up"]
    kinds = [kind for kind, _ in (gpu["nvlink_ends"] or {}).values()]
    return {
        "nvlink_up": up and f"{sum(up.values())}/{len(up)}" if up != {} else "none",
        "nvlink_version": sorted(set((gpu["nvlink_version"] or {}).values())),
        "nvlink_ends": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "nvlink_down": [number for number, is_up in (up or {}).items() if not is_up],
    }


def _infiniband(known: Info, whole: bool) -> Iterator[Item]:
    if known["why_not"]:
        yield "ports", f"none: {known['why_not']}"
    templates = {
        "port": "{name}/{number}",
        "kind": "{link_layer}",
        "state": "{state}, {phys_state}",
        "rate": "{rate}",
        "NUMA": "{numa_node}",
        "firmware": "{firmware}",
    }
    ports = [{**device, **port} for device in known["devices"] for port in device["ports"]]
    yield _table(templates, ports, left=4)
    yield from ((device["name"], "shows no port") for device in known["devices"] if not device["ports"])
    yield "GPUDirect", str(PeerMemory(**known["peer_memory"]))
    if whole and ports:
        yield ""
        yield from _grouped({f"{port['name']}/{port['number']}": port for port in ports}, "name", "number", "ports")


def _network(interfaces: Sequence[Info], whole: bool) -> Iterator[Item]:
    templates = {"interface": "{name}", "state": "{state}", "addresses": "{addresses}"}
    yield _table({**templates, "Mb/s": "{speed_mbps}", "MTU": "{mtu}"}, interfaces, left=3)


def _topology(known: Info, whole: bool) -> Iterator[Item]:
    names = [f"GPU{index}" for index in known["gpus"]]
    if not names or not whole:
        return
    for heads, ways in ((names, known["between_gpus"]), (known["adapters"], known["to_gpus"])):
        yield Table(titles=["", *names], rows=[[head, *row] for head, row in zip(heads, ways, strict=True)])
        yield ""
    places = zip(names, known["numa_nodes"], known["cpus"], strict=True)
    rows = [{"gpu": name, "node": node, "cpus": cpus} for name, node, cpus in places]
    yield _table({"": "{gpu}", "NUMA node": "{node}", "local CPUs": "{cpus}"}, rows, left=1)
    paths = {path for row in [*known["between_gpus"], *known["to_gpus"]] for path in row}
    used = {"NV#" if path.startswith("NV") else path for path in paths}
    yield ""
    yield from ((path, meaning) for path, meaning in LEGEND.items() if path in used)


_SECTIONS: Mapping[str, tuple[str, Callable[[Any, bool], Iterator[Item]]]] = {
    "system": ("System", lambda system, whole: _facts(system)),
    "cpu": ("CPUs", _cpu),
    "memory": ("Memory", lambda memory, whole: _facts(memory)),
    "stack": ("Driver stack", lambda stack, whole: _facts(stack)),
    "gpus": ("GPUs", _gpus),
    "topology": ("Topology", _topology),
    "infiniband": ("InfiniBand and RoCE", _infiniband),
    "network": ("Network", _network),
    "mounts": ("Mounts", _mounts),
}


def render_info(info: Info, *, width: int) -> str:
    """Return a view as text. A summary has no topology, and less of the other parts."""
    lines = paragraph(f"{info['host']}, {info['at']}", width)
    for part, (title, items) in _SECTIONS.items():
        if part in info:
            body = [line for item in items(info[part], info["view"] != "summary") for line in _lines(item, width)]
            lines += ["", title, *(body or ["  none"])] if body or part != "topology" else []
    return "\n".join(lines) + "\n"


def _lines(item: Item, width: int) -> list[str]:
    if not isinstance(item, Table):
        return paragraph(item, width) if isinstance(item, str) else fact(*item, width, key_columns=_KEY_COLUMNS)
    heads = [Column(title=title, is_right=at >= item.left) for at, title in enumerate(item.titles)]
    cells = [[clean(cell) for cell in row] for row in [item.titles, *item.rows]]
    wide = widths(cells)
    while total(wide) > width - 2:  # the widest cells are shortened until they fit
        wide[wide.index(max(wide))] -= 1
    short = ([shortened(cell, most) for cell, most in zip(row, wide, strict=True)] for row in cells)
    return ["  " + line_of(row, heads, wide) for row in short] if item.rows else []
