"""The text of ``gpucluster node info``: host, GPUs, ports and interfaces, topology.

Lines are at most ``width`` wide, and the text has no control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.node.info_gpus import LEGEND
from pytest_gpucluster.node.pci import PeerMemory
from pytest_gpucluster.text import (
    Column,
    clean,
    columns,
    duration,
    line_of,
    padded,
    paragraph,
    shortened,
    total,
    widths,
)

_KEY_COLUMNS = 16
_LEAST_COLUMNS, _WIDE_COLUMNS = 4, 24


def fact(key: str, text: str, width: int) -> list[str]:
    """Return a fact as lines: its name, then the text."""
    name = padded(shortened(clean(key), _KEY_COLUMNS - 1), _KEY_COLUMNS)
    return paragraph(text, width, first=f"  {name}", rest=" " * (2 + _KEY_COLUMNS))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; the first ``left`` columns are left-aligned, the others right-aligned."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def lines(self, width: int) -> list[str]:
        """Return the lines; the widest text cells are shortened until they fit."""
        heads = [Column(title=title, is_right=at >= self.left) for at, title in enumerate(self.titles)]
        cells = [[clean(cell) for cell in row] for row in [self.titles, *self.rows]]
        wide = widths(cells)
        while total(wide) > width - 2 and max(wide) > _LEAST_COLUMNS:
            # Numbers are shortened last: a part of one is another number.
            cut = [at for at in range(len(wide)) if wide[at] > _WIDE_COLUMNS]
            cut = cut or [at for at in range(self.left) if wide[at] > _LEAST_COLUMNS] or list(range(len(wide)))
            wide[max(cut, key=lambda at: wide[at])] -= 1
        return [
            "  " + line_of([shortened(cell, most) for cell, most in zip(row, wide, strict=True)], heads, wide)
            for row in cells
        ]


Info = Mapping[str, Any]
Item = tuple[str, str | None] | Table | str
"""A fact, None if it is unknown; a table, left out if it has no rows; or a paragraph."""


def _lines(items: Iterable[Item], width: int) -> Iterator[str]:
    for item in items:
        if isinstance(item, Table):
            yield from item.lines(width) if item.rows else ()
        elif isinstance(item, str):
            yield from paragraph(item, width)
        else:
            yield from fact(item[0], item[1] or "unknown", width)


def amount(in_bytes: float | None) -> str:
    """Format bytes in units of 1024.

    >>> amount(2**31), amount(1500), amount(None)
    ('2 GiB', '1.46 KiB', '?')
    """
    if in_bytes is None:
        return "?"
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while abs(in_bytes) >= 1024 and unit != "TiB":
        in_bytes, unit = in_bytes / 1024, next(units, "TiB")
    return f"{in_bytes:.0f} {unit}" if abs(in_bytes) >= 1000 else f"{in_bytes:.3g} {unit}"


def with_unit(value: object, unit: str = "") -> str:
    """Return a value with its unit, or a question mark."""
    return "?" if value is None else f"{value}{unit and f' {unit}'}"


def switch(value: bool | None, on: str = "on", off: str = "off") -> str:
    """Return ``on``, ``off`` or a question mark."""
    return "?" if value is None else on if value else off


def count(number: int | None, what: str) -> str:
    """Return "8 GPUs" or "1 GPU"."""
    return f"? {what}s" if number is None else f"{number} {what}{'s' * (number != 1)}"


def _system(info: Info, whole: bool, width: int) -> Iterator[Item]:
    system = info["system"]
    yield "system", f"{with_unit(system['system'])}, Linux {with_unit(system['kernel'])}, {system['machine']}"
    load = "?" if system["load"] is None else " ".join(f"{number:g}" for number in system["load"])
    yield "up", f"{_uptime(system['uptime_seconds'])}, load {load}"
    yield "container", f"{system['container'] or 'none seen'}, {switch(system['root'], '', 'not ')}as root"
    yield "scheduler", _scheduler(system["scheduler"])


def _uptime(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    days, rest = divmod(round(seconds), 24 * 3600)
    return f"{count(days, 'day')} {duration(rest)}" if days else duration(rest)


def _scheduler(scheduler: Info | None) -> str:
    if scheduler is None:
        return "none"
    rest = dict(scheduler)
    name, nnodes, gpus = (rest.pop(key) for key in ("name", "nnodes", "gpus_per_node"))
    shape = [] if nnodes is None else [count(nnodes, "node")]
    shape += [] if gpus is None else [f"{gpus} GPUs on each"]
    return ", ".join([name, *(f"{key} {value}" for key, value in rest.items() if value), *shape])


def _cpu(info: Info, whole: bool, width: int) -> Iterator[Item]:
    cpu = info["cpu"]
    quota = f"; the control group gets the time of {cpu['cpus_of_group']:g}" if cpu["cpus_of_group"] is not None else ""
    counts = ", ".join([count(cpu["sockets"], "socket"), count(cpu["cores"], "core"), count(cpu["cpus"], "CPU")])
    offline = f", {cpu['offline']} offline" if cpu["offline"] else ""
    yield "model", cpu["model"]
    yield "CPUs", f"{counts}{offline}; this process may use {cpu['cpus_allowed']}{quota}"
    yield "NUMA nodes", str(len(cpu["numa_nodes"])) if cpu["numa_nodes"] else None
    if not whole:
        return
    clock = [f"at most {cpu['max_mhz']:g} MHz"] if cpu["max_mhz"] is not None else []
    clock += [f"{name} on {count(number, 'CPU')}" for name, number in cpu["governors"].items()]
    yield "clock", ", ".join(clock) or "not set by the kernel"
    yield "balancing", f"NUMA balancing {switch(cpu['numa_balancing'])}"
    rows = [
        [
            str(node["node"]),
            with_unit(node["cpus"]),
            amount(node["memory_total_bytes"]),
            amount(node["memory_free_bytes"]),
            " ".join(map(str, node["distances"])) or "?",
        ]
        for node in cpu["numa_nodes"]
    ]
    yield Table(titles=("node", "CPUs", "memory", "free", "distances"), rows=rows, left=2)


def _memory(info: Info, whole: bool, width: int) -> Iterator[Item]:
    memory, shm, limits = info["memory"], info["memory"]["shm"], info["memory"]["limits"]
    group = f"; the control group may use {amount(memory['group_bytes'])}" if memory["group_bytes"] is not None else ""
    yield "memory", f"{amount(memory['total_bytes'])}, {amount(memory['available_bytes'])} available{group}"
    free = shm and f"{amount(shm['free_bytes'])} of {amount(shm['total_bytes'])} free"
    yield "/dev/shm", f"{free} ({shm['kind'] or 'not a mount of its own'})" if shm else "none"
    if not whole:
        return
    yield "swap", f"{amount(memory['swap_total_bytes'])}, {amount(memory['swap_free_bytes'])} free"
    huge = [
        f"{with_unit(page['total'])} of {amount(page['size_bytes'])} ({with_unit(page['free'])} free)"
        for page in memory["huge_pages"]
    ]
    transparent = with_unit(memory["transparent_huge_pages"])
    yield "huge pages", f"{', '.join(huge) or 'none'}; transparent ones: {transparent}"
    yield "limits", None if limits is None else _limits(limits)


def _limits(limits: Info) -> str:
    locked = limits["memlock_bytes"]
    locked = locked if isinstance(locked, str) else amount(locked)
    may = " (unlimited by CAP_IPC_LOCK)" if limits["may_lock_all"] else ""
    return f"open files {limits['nofile']}, locked memory {locked}{may}, processes {limits['nproc']}"


def _stack(info: Info, whole: bool, width: int) -> Iterator[Item]:
    stack, missing = info["stack"], info["stack"]["not_available"]
    driver = stack["driver"] and f"{stack['driver']}, {stack['driver_kind']} kernel modules"
    yield "driver", driver or f"none: {missing.get('driver', 'its version is unknown')}"
    for name, key in (("CUDA toolkit", "toolkit"), ("NCCL", "nccl"), ("torch", "torch")):
        yield name, stack[key] or "none installed here"
    for name, key in (("Fabric Manager", "fabric_manager"), ("OFED", "ofed")):
        yield name, stack[key] or f"unknown: {missing.get(key, '')}"
    loaded = ", ".join(f"{name} {version}".rstrip() for name, version in (stack["modules"] or {}).items())
    modules = f"unknown: {missing['modules']}" if "modules" in missing else loaded
    yield "modules", modules or "none of the driver or the RDMA stack is loaded"


def _mounts(info: Info, whole: bool, width: int) -> Iterator[Item]:
    mounts = [mount for mount in info["mounts"] if whole or mount["network"] or mount["point"] == "/"]
    rows = [[one["point"], one["kind"], one["source"], "ro" if one["read_only"] else "rw"] for one in mounts]
    titles = ("mounted at" if whole else "root and network mounts", "kind", "source", "mode")
    yield Table(titles=titles, rows=rows, left=3) if rows else ("mounts", "none")


_MOST_PROCESSES = 32


def _gpus(info: Info, whole: bool, width: int) -> Iterator[Item]:
    gpus, total_count = info["gpus"]["gpus"], info["gpus"]["count"]
    if info["gpus"]["why_not"]:
        yield "not available", info["gpus"]["why_not"]
    elif not total_count:
        yield "GPUs", "none"
    elif len(gpus) < total_count:
        yield "missing", f"{total_count - len(gpus)} of {count(total_count, 'GPU')} do not answer"
    rows = [
        [
            str(gpu["index"]),
            gpu["name"],
            amount(gpu["memory_total_bytes"]),
            with_unit(gpu["temperature_celsius"], "C"),
            _watts(gpu["power_watts"], gpu["power_limit_watts"]),
            with_unit(gpu["utilization_percent"], "%"),
            switch(gpu["ecc"]),
            switch(gpu["mig"]),
            _links(gpu),
        ]
        for gpu in gpus
    ]
    titles = ("GPU", "name", "memory", "temp", "power", "busy", "ECC", "MIG", "NVLink")
    yield Table(titles=titles, rows=rows, left=2)
    for gpu in gpus if whole else ():
        yield ""
        yield f"GPU {gpu['index']}: {gpu['name']}, {gpu['uuid']}"
        yield from _gpu(gpu)
        reasons: dict[str, list[str]] = {}
        for key, why in gpu["not_available"].items():
            reasons.setdefault(why.partition(" (nvml")[0], []).append(key)
        yield from (("not available", f"{', '.join(keys)}: {why}") for why, keys in reasons.items())


def _watts(drawn: float | None, limit: float | None) -> str:
    return f"{'?' if drawn is None else f'{drawn:.0f}'}/{'?' if limit is None else f'{limit:.0f}'} W"


def _links(gpu: Info) -> str:
    links = gpu["nvlink_up"]
    return "?" if links is None else "none" if not links else f"{sum(links.values())}/{len(links)}"


def _gpu(gpu: Info) -> Iterator[Item]:
    value = {key: with_unit(number) for key, number in gpu.items()}
    now = f"gen {value['pcie_generation']} x{value['pcie_width']} now"
    yield "PCI", f"{gpu['pci']}, {now}, gen {value['pcie_generation_max']} x{value['pcie_width_max']} at best"
    yield "board", f"serial {value['serial']}, part {value['board_part_number']}"
    yield "firmware", f"VBIOS {value['vbios']}, InfoROM {value['inforom']}, GSP {value['gsp_firmware']}"
    yield "memory", f"{amount(gpu['memory_used_bytes'])} of {amount(gpu['memory_total_bytes'])} used"
    sm = f"SM {value['sm_clock_mhz']} of {value['sm_clock_max_mhz']} MHz"
    memory = f"memory {value['memory_clock_mhz']} of {value['memory_clock_max_mhz']} MHz"
    throttle = "?" if gpu["throttle"] is None else ", ".join(gpu["throttle"]) or "nothing"
    yield "clocks", f"{sm}, {memory}; throttled by {throttle}"
    default = "?" if gpu["power_limit_default_watts"] is None else f"{gpu['power_limit_default_watts']:.0f} W"
    yield "power", f"{_watts(gpu['power_watts'], gpu['power_limit_watts'])}, by default {default}"
    errors = f"uncorrected errors {value['ecc_uncorrected']}, over its life {value['ecc_uncorrected_of_life']}"
    pending, failed = (switch(gpu[key], "yes", "no") for key in ("rows_remap_pending", "rows_remap_failed"))
    yield "ECC", f"{switch(gpu['ecc'])}, {errors}; row remap pending {pending}, failed {failed}"
    yield "modes", f"MIG {switch(gpu['mig'])}, persistence {switch(gpu['persistence'])}"
    yield "NVLink", _nvlink(gpu)
    if gpu["fabric"] is not None:
        yield "fabric", ", ".join([gpu["fabric"]["state"], gpu["fabric"]["status"], *gpu["fabric"]["health"]])
    yield "processes", _processes(gpu["processes"])


def _nvlink(gpu: Info) -> str:
    if not gpu["nvlink_up"]:
        return _links(gpu)
    down = [number for number, up in gpu["nvlink_up"].items() if not up]
    versions = sorted(set((gpu["nvlink_version"] or {}).values()))
    kinds = [kind for kind, _ in (gpu["nvlink_ends"] or {}).values()]
    parts = [f"{_links(gpu)} up"]
    parts += [f"down: {', '.join(down)}"] if down else []
    parts += [f"version {' and '.join(versions)}"] if versions else []
    return ", ".join(parts + [f"{kinds.count(kind)} to a {kind}" for kind in sorted(set(kinds))])


def _processes(processes: Sequence[Info] | None) -> str:
    if processes is None:
        return "?"
    listed = [
        f"{one['pid']} {one['user'] or 'of an unknown user'} {amount(one['memory_bytes'])}"
        f" ({one['command'] or 'not shown'})"
        for one in processes[:_MOST_PROCESSES]
    ]
    more = [f"and {len(processes) - _MOST_PROCESSES} more"] if len(processes) > _MOST_PROCESSES else []
    return "; ".join([*listed, *more]) or "none"


def _infiniband(info: Info, whole: bool, width: int) -> Iterator[Item]:
    known = info["infiniband"]
    if known["why_not"]:
        yield "ports", f"none: {known['why_not']}"
    rows = [
        [
            f"{device['name']}/{port['number']}",
            port["link_layer"] or "?",
            f"{port['state'] or '?'}, {port['phys_state'] or '?'}",
            port["rate"] or "?",
            with_unit(device["numa_node"]),
            device["firmware"] or "?",
        ]
        for device in known["devices"]
        for port in device["ports"]
    ]
    yield Table(titles=("port", "kind", "state", "rate", "NUMA", "firmware"), rows=rows, left=4)
    yield from ((clean(device["name"]), "shows no port") for device in known["devices"] if not device["ports"])
    yield "GPUDirect", str(PeerMemory(**known["peer_memory"]))
    for device in known["devices"] if whole else ():
        yield ""
        yield f"{device['name']}: {device['kind'] or '?'}, PSID {device['board'] or '?'}"
        yield "PCI", f"{with_unit(device['pci'])}, GUID {device['guid'] or '?'}"
        for port in device["ports"]:
            lids = f"LID {port['lid']}, subnet manager at {port['sm_lid']}"
            errors = ", ".join(f"{name} {number}" for name, number in port["errors"].items())
            yield f"port {port['number']}", f"{lids}; errors since it was reset: {errors or 'none'}"


def _network(info: Info, whole: bool, width: int) -> Iterator[Item]:
    rows = [
        [
            one["name"],
            one["state"] or "?",
            ", ".join(one["addresses"]) or "no address",
            "?" if one["speed_mbps"] is None else f"{one['speed_mbps'] / 1000:g} Gb/s",
            with_unit(one["mtu"]),
        ]
        for one in info["network"]
    ]
    titles = ("interface", "state", "addresses", "speed", "MTU")
    yield Table(titles=titles, rows=rows, left=3) if rows else ("interfaces", "none")


def _topology(info: Info, whole: bool, width: int) -> Iterator[Item]:
    known = info["topology"]
    names = [f"GPU{index}" for index in known["gpus"]]
    if not names or not whole:
        return
    yield from _matrix(names, names, known["between_gpus"], width)
    if known["adapters"]:
        yield ""
        yield from _matrix(known["adapters"], names, known["to_gpus"], width)
    yield ""
    places = zip(names, map(with_unit, known["numa_nodes"]), map(with_unit, known["cpus"]), strict=True)
    yield Table(titles=("", "NUMA node", "local CPUs"), rows=[*map(list, places)])
    paths = {path for row in [*known["between_gpus"], *known["to_gpus"]] for path in row}
    used = {"NV#" if path.startswith("NV") else path for path in paths}
    yield ""
    yield from ((path, meaning) for path, meaning in LEGEND.items() if path in used)


def _matrix(names: Sequence[str], heads: Sequence[str], ways: Sequence[Sequence[str]], width: int) -> Iterator[Item]:
    """Yield a table of paths, in several blocks where it would be too wide."""
    most = max(1, (width - 2 - 10) // (max(columns(head) for head in heads) + 2))
    for first in range(0, len(heads), most):
        if first:
            yield ""
        rows = [[name, *row[first : first + most]] for name, row in zip(names, ways, strict=True)]
        yield Table(titles=["", *heads[first : first + most]], rows=rows)


_SECTIONS: Mapping[str, tuple[str, Callable[[Info, bool, int], Iterator[Item]]]] = {
    "system": ("System", _system),
    "cpu": ("CPUs", _cpu),
    "memory": ("Memory", _memory),
    "stack": ("Driver stack", _stack),
    "gpus": ("GPUs", _gpus),
    "topology": ("Topology", _topology),
    "infiniband": ("InfiniBand and RoCE", _infiniband),
    "network": ("Network", _network),
    "mounts": ("Mounts", _mounts),
}


def render_info(info: Info, *, width: int) -> str:
    """Return a view as text. A summary has no topology, and less of the other parts."""
    whole = info["view"] != "summary"
    lines = paragraph(f"{info['host']}, {info['at']}", width)
    for part, (title, items) in _SECTIONS.items():
        if part in info:
            body = [*_lines(items(info, whole, width), width)]
            lines += ["", title, *body] if body else []
    return "\n".join(lines) + "\n"
