"""What a node is, as text for people: host, GPUs, ports and interfaces, topology.

No line is wider than asked for, and nothing in the text acts on a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Return a fact as lines: its name, and beside it the text."""
    name = padded(shortened(clean(key), _KEY_COLUMNS - 1), _KEY_COLUMNS)
    return paragraph(text, width, first=f"  {name}", rest=" " * (2 + _KEY_COLUMNS))


def facts(pairs: Iterable[tuple[str, str | None]], width: int) -> Iterable[str]:
    """Yield facts; what is not known is said to be."""
    for key, text in pairs:
        yield from fact(key, text or "not told", width)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 1) -> list[str]:
    """Return a table; the first ``left`` columns begin at the left, numbers end at the right. The widest cells of texts
    are cut until it fits."""
    heads = [Column(title=title, is_right=at >= left) for at, title in enumerate(titles)]
    cells = [[clean(cell) for cell in row] for row in [titles, *rows]]
    wide = widths(cells)
    while total(wide) > width - 2 and max(wide) > _LEAST_COLUMNS:
        # Numbers are cut last: a part of one is another number.
        cut = [at for at in range(len(wide)) if wide[at] > _WIDE_COLUMNS]
        cut = cut or [at for at in range(left) if wide[at] > _LEAST_COLUMNS] or list(range(len(wide)))
        wide[max(cut, key=lambda at: wide[at])] -= 1
    return [
        "  " + line_of([shortened(cell, most) for cell, most in zip(row, wide, strict=True)], heads, wide)
        for row in cells
    ]


def amount(in_bytes: float | None) -> str:
    """Return bytes as people say them of memory.

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


def shown(value: object, unit: str = "") -> str:
    """Return a value with its unit, or a question mark."""
    return "?" if value is None else f"{value}{unit and f' {unit}'}"


def switch(value: bool | None, on: str = "on", off: str = "off") -> str:
    """Return what is on, off or not known."""
    return "?" if value is None else on if value else off


def count(number: int | None, what: str) -> str:
    """Return "8 GPUs" or "1 GPU"."""
    return f"? {what}s" if number is None else f"{number} {what}{'s' * (number != 1)}"


Values = Mapping[str, Any]


def of_system(told: Values, width: int) -> Iterable[str]:
    """Yield the system, the container and the scheduler."""
    system = told["system"]
    yield from facts(
        [
            ("system", f"{shown(system['system'])}, Linux {shown(system['kernel'])}, {system['machine']}"),
            ("up", f"{_uptime(system['uptime_seconds'])}, load {_load(system['load'])}"),
            ("container", f"{system['container'] or 'none seen'}, {switch(system['root'], '', 'not ')}as root"),
            ("scheduler", _scheduler(system["scheduler"])),
        ],
        width,
    )


def _uptime(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    days, rest = divmod(round(seconds), 24 * 3600)
    return f"{count(days, 'day')} {duration(rest)}" if days else duration(rest)


def _load(load: Sequence[float] | None) -> str:
    return "?" if load is None else " ".join(f"{number:g}" for number in load)


def _scheduler(told: Values | None) -> str:
    if told is None:
        return "none"
    shape = []
    if told["nnodes"] is not None:
        shape.append(count(told["nnodes"], "node"))
    if told["gpus_per_node"] is not None:
        shape.append(f"{told['gpus_per_node']} GPUs on each")
    rest = [f"{key} {value}" for key, value in told.items() if key not in ("name", "nnodes", "gpus_per_node") and value]
    return ", ".join([told["name"], *rest, *shape])


def of_cpu(told: Values, width: int) -> Iterable[str]:
    """Yield the CPUs in short."""
    cpu = told["cpu"]
    group = f"; the control group gets the time of {cpu['cpus_of_group']:g}" if cpu["cpus_of_group"] is not None else ""
    off = f", {cpu['offline']} offline" if cpu["offline"] else ""
    counted = [count(cpu["sockets"], "socket"), count(cpu["cores"], "core"), count(cpu["cpus"], "CPU")]
    shape = ", ".join(counted) + off
    yield from facts(
        [
            ("model", cpu["model"]),
            ("CPUs", f"{shape}; this process may use {cpu['cpus_allowed']}{group}"),
            ("NUMA nodes", str(len(cpu["numa_nodes"])) if cpu["numa_nodes"] else "not told"),
        ],
        width,
    )


def of_cpu_whole(told: Values, width: int) -> Iterable[str]:
    """Yield the CPUs, and each NUMA node."""
    cpu = told["cpu"]
    yield from of_cpu(told, width)
    clock = [f"at most {cpu['max_mhz']:g} MHz"] if cpu["max_mhz"] is not None else []
    clock += [f"{name} on {count(number, 'CPU')}" for name, number in cpu["governors"].items()]
    yield from fact("clock", ", ".join(clock) or "not the kernel's to choose", width)
    yield from fact("balancing", f"NUMA balancing {switch(cpu['numa_balancing'])}", width)
    rows = [
        [
            str(node["node"]),
            shown(node["cpus"]),
            amount(node["memory_total_bytes"]),
            amount(node["memory_free_bytes"]),
            " ".join(map(str, node["distances"])) or "?",
        ]
        for node in cpu["numa_nodes"]
    ]
    if rows:
        yield from table(("node", "CPUs", "memory", "free", "distances"), rows, width, left=2)


def of_memory(told: Values, width: int) -> Iterable[str]:
    """Yield memory in short."""
    memory = told["memory"]
    group = f"; the control group may use {amount(memory['group_bytes'])}" if memory["group_bytes"] is not None else ""
    shm = memory["shm"]
    pairs = [("memory", f"{amount(memory['total_bytes'])}, {amount(memory['available_bytes'])} available{group}")]
    if shm:
        free, kind = f"{amount(shm['free_bytes'])} of {amount(shm['total_bytes'])} free", shm["kind"]
        text = f"{free} ({kind or 'no mount of its own'})"
        pairs.append(("/dev/shm", text))
    else:
        pairs.append(("/dev/shm", "none"))
    yield from facts(pairs, width)


def of_memory_whole(told: Values, width: int) -> Iterable[str]:
    """Yield memory, huge pages and limits."""
    yield from of_memory(told, width)
    memory, limits = told["memory"], told["memory"]["limits"]
    huge = [
        f"{shown(page['total'])} of {amount(page['size_bytes'])} ({shown(page['free'])} free)"
        for page in memory["huge_pages"]
    ]
    yield from facts(
        [
            ("swap", f"{amount(memory['swap_total_bytes'])}, {amount(memory['swap_free_bytes'])} free"),
            (
                "huge pages",
                f"{', '.join(huge) or 'none'}; transparent ones: {shown(memory['transparent_huge_pages'])}",
            ),
            ("limits", None if limits is None else _limits(limits)),
        ],
        width,
    )


def _limits(limits: Values) -> str:
    locked = limits["memlock_bytes"]
    locked = locked if isinstance(locked, str) else amount(locked)
    may = " (and CAP_IPC_LOCK, by which it may lock all)" if limits["may_lock_all"] else ""
    return f"open files {limits['nofile']}, locked memory {locked}{may}, processes {limits['nproc']}"


def of_stack(told: Values, width: int) -> Iterable[str]:
    """Yield the driver stack."""
    stack, missing = told["stack"], told["stack"]["not_available"]
    driver = stack["driver"] and f"{stack['driver']}, {stack['driver_kind']} kernel modules"
    loaded = ", ".join(f"{name} {version}".rstrip() for name, version in (stack["modules"] or {}).items())
    modules = f"not known: {missing['modules']}" if "modules" in missing else loaded
    wanted = (("CUDA toolkit", "toolkit"), ("NCCL", "nccl"), ("torch", "torch"))
    yield from facts(
        [
            ("driver", driver or f"none: {missing.get('driver', 'its version is not told')}"),
            *((name, stack[key] or "none installed here") for name, key in wanted),
            ("Fabric Manager", stack["fabric_manager"] or f"not known: {missing.get('fabric_manager', '')}"),
            ("OFED", stack["ofed"] or f"not known: {missing.get('ofed', '')}"),
            ("modules", modules or "none of the driver or the RDMA stack is loaded"),
        ],
        width,
    )


def of_mounts(told: Values, width: int) -> Iterable[str]:
    """Yield the root, and what is mounted from other hosts."""
    return _mounts_of([one for one in told["mounts"] if one["network"] or one["point"] == "/"], width)


def of_mounts_whole(told: Values, width: int) -> Iterable[str]:
    """Yield every mount."""
    return _mounts_of(told["mounts"], width)


def _mounts_of(mounts: Sequence[Values], width: int) -> Iterable[str]:
    rows = [[one["point"], one["kind"], one["source"], "ro" if one["read_only"] else "rw"] for one in mounts]
    return (
        table(("mounted at", "kind", "source", "may"), rows, width, left=3) if rows else fact("mounts", "none", width)
    )


_MOST_PROCESSES = 32


def _why_no_gpus(gpus: Values, width: int) -> Iterable[str]:
    counted, found = gpus["count"], len(gpus["gpus"])
    if gpus["why_not"]:
        yield from fact("not available", gpus["why_not"], width)
    elif not counted:
        yield from fact("GPUs", "none", width)
    if counted is not None and found < counted and not gpus["why_not"]:
        yield from fact("missing", f"{counted - found} of {count(counted, 'GPU')} do not answer", width)


def of_gpus(told: Values, width: int) -> Iterable[str]:
    """Yield a line for each GPU."""
    gpus = told["gpus"]
    yield from _why_no_gpus(gpus, width)
    rows = [
        [
            str(gpu["index"]),
            gpu["name"],
            amount(gpu["memory_total_bytes"]),
            shown(gpu["temperature_celsius"], "C"),
            _watts(gpu["power_watts"], gpu["power_limit_watts"]),
            shown(gpu["utilization_percent"], "%"),
            switch(gpu["ecc"]),
            switch(gpu["mig"]),
            _links(gpu),
        ]
        for gpu in gpus["gpus"]
    ]
    if rows:
        titles = ("GPU", "name", "memory", "temp", "power", "busy", "ECC", "MIG", "NVLink")
        yield from table(titles, rows, width, left=2)


def _watts(drawn: float | None, limit: float | None) -> str:
    return f"{'?' if drawn is None else f'{drawn:.0f}'}/{'?' if limit is None else f'{limit:.0f}'} W"


def _links(gpu: Values) -> str:
    links = gpu["nvlink_up"]
    return "?" if links is None else "none" if not links else f"{sum(links.values())}/{len(links)}"


def of_gpus_whole(told: Values, width: int) -> Iterable[str]:
    """Yield each GPU."""
    yield from of_gpus(told, width)
    for gpu in told["gpus"]["gpus"]:
        yield ""
        yield from paragraph(f"GPU {gpu['index']}: {gpu['name']}, {gpu['uuid']}", width)
        yield from facts(_of_gpu(gpu), width)
        yield from _why(gpu["not_available"], width)


def _of_gpu(gpu: Values) -> Iterable[tuple[str, str]]:
    yield "PCI", f"{gpu['pci']}, {_pcie(gpu)}"
    yield "board", f"serial {shown(gpu['serial'])}, part {shown(gpu['board_part_number'])}"
    firmware = (("VBIOS", "vbios"), ("InfoROM", "inforom"), ("GSP", "gsp_firmware"))
    yield "firmware", ", ".join(f"{name} {shown(gpu[key])}" for name, key in firmware)
    yield "memory", f"{amount(gpu['memory_used_bytes'])} of {amount(gpu['memory_total_bytes'])} used"
    clocks = (("SM", "sm_clock_mhz", "sm_clock_max_mhz"), ("memory", "memory_clock_mhz", "memory_clock_max_mhz"))
    told = ", ".join(f"{name} {shown(gpu[now])} of {shown(gpu[most])} MHz" for name, now, most in clocks)
    throttle = gpu["throttle"]
    yield "clocks", f"{told}; held down by {', '.join(throttle) or 'nothing' if throttle is not None else '?'}"
    default = gpu["power_limit_default_watts"]
    told = "?" if default is None else f"{default:.0f} W"
    yield "power", f"{_watts(gpu['power_watts'], gpu['power_limit_watts'])}, by default {told}"
    yield "ECC", _ecc(gpu)
    yield "modes", f"MIG {switch(gpu['mig'])}, persistence {switch(gpu['persistence'])}"
    yield "NVLink", _nvlink(gpu)
    if gpu["fabric"] is not None:
        fabric = gpu["fabric"]
        yield "fabric", ", ".join([fabric["state"], fabric["status"], *fabric["health"]])
    yield "processes", _processes(gpu["processes"])


def _ecc(gpu: Values) -> str:
    errors = f"uncorrected errors {shown(gpu['ecc_uncorrected'])}, in its life {shown(gpu['ecc_uncorrected_of_life'])}"
    pending, failed = (switch(gpu[key], "yes", "no") for key in ("rows_remap_pending", "rows_remap_failed"))
    return f"{switch(gpu['ecc'])}, {errors}; row remap pending {pending}, failed {failed}"


def _pcie(gpu: Values) -> str:
    now = f"gen {shown(gpu['pcie_generation'])} x{shown(gpu['pcie_width'])}"
    return f"{now} now, gen {shown(gpu['pcie_generation_max'])} x{shown(gpu['pcie_width_max'])} at best"


def _nvlink(gpu: Values) -> str:
    links = gpu["nvlink_up"]
    if links is None:
        return "?"
    if not links:
        return "none"
    down = [number for number, up in links.items() if not up]
    versions = sorted(set((gpu["nvlink_version"] or {}).values()))
    kinds = [kind for kind, _ in (gpu["nvlink_ends"] or {}).values()]
    parts = [f"{_links(gpu)} up"]
    parts += [f"down: {', '.join(down)}"] if down else []
    parts += [f"version {' and '.join(versions)}"] if versions else []
    parts += [f"{kinds.count(kind)} to a {kind}" for kind in sorted(set(kinds))]
    return ", ".join(parts)


def _processes(told: Sequence[Values] | None) -> str:
    if told is None:
        return "?"
    held = [
        f"{one['pid']} {one['user'] or 'of an unknown user'} {amount(one['memory_bytes'])}"
        f" ({one['command'] or 'not shown'})"
        for one in told[:_MOST_PROCESSES]
    ]
    more = [f"and {len(told) - _MOST_PROCESSES} more"] if len(told) > _MOST_PROCESSES else []
    return "; ".join([*held, *more]) or "none"


def _why(missing: Mapping[str, str], width: int) -> Iterable[str]:
    """Say why there are question marks: each reason once."""
    reasons: dict[str, list[str]] = {}
    for key, why in missing.items():
        reasons.setdefault(why.partition(" (nvml")[0], []).append(key)
    for why, keys in reasons.items():
        yield from fact("not available", f"{', '.join(keys)}: {why}", width)


def of_infiniband(told: Values, width: int) -> Iterable[str]:
    """Yield a line for each port."""
    known = told["infiniband"]
    if known["why_not"]:
        yield from fact("ports", f"none: {known['why_not']}", width)
    rows = [
        [
            f"{device['name']}/{port['number']}",
            port["link_layer"] or "?",
            f"{port['state'] or '?'}, {port['phys_state'] or '?'}",
            port["rate"] or "?",
            shown(device["numa_node"]),
            device["firmware"] or "?",
        ]
        for device in known["devices"]
        for port in device["ports"]
    ]
    if rows:
        yield from table(("port", "kind", "state", "rate", "NUMA", "firmware"), rows, width, left=4)
    for device in known["devices"]:
        if not device["ports"]:
            yield from fact(clean(device["name"]), "shows no port", width)
    peer = known["peer_memory"]
    yield from fact("GPUDirect", str(PeerMemory(**peer)), width)


def of_infiniband_whole(told: Values, width: int) -> Iterable[str]:
    """Yield each HCA and its ports."""
    yield from of_infiniband(told, width)
    for device in told["infiniband"]["devices"]:
        yield ""
        yield from paragraph(f"{device['name']}: {device['kind'] or '?'}, PSID {device['board'] or '?'}", width)
        yield from facts([("PCI", f"{shown(device['pci'])}, GUID {device['guid'] or '?'}")], width)
        for port in device["ports"]:
            lids = f"LID {port['lid']}, subnet manager at {port['sm_lid']}"
            errors = ", ".join(f"{name} {count}" for name, count in port["errors"].items())
            yield from fact(f"port {port['number']}", f"{lids}; errors since it was reset: {errors or 'none'}", width)


def of_network(told: Values, width: int) -> Iterable[str]:
    """Yield a line for each interface."""
    rows = [
        [
            one["name"],
            one["state"] or "?",
            ", ".join(one["addresses"]) or "no address",
            "?" if one["speed_mbps"] is None else f"{one['speed_mbps'] / 1000:g} Gb/s",
            shown(one["mtu"]),
        ]
        for one in told["network"]
    ]
    if rows:
        yield from table(("interface", "state", "addresses", "speed", "MTU"), rows, width, left=3)
    else:
        yield from fact("interfaces", "none", width)


def of_topology(told: Values, width: int) -> Iterable[str]:
    """Yield what lies between the GPUs, and between them and the HCAs."""
    known = told["topology"]
    names = [f"GPU{index}" for index in known["gpus"]]
    if not names:
        return
    beside = [[shown(node), shown(cpus)] for node, cpus in zip(known["numa_nodes"], known["cpus"], strict=True)]
    yield from _matrix(names, names, known["between_gpus"], width)
    if known["adapters"]:
        yield ""
        yield from _matrix(known["adapters"], names, known["to_gpus"], width)
    yield ""
    rows = [[name, *cells] for name, cells in zip(names, beside, strict=True)]
    yield from table(("", "NUMA node", "CPUs beside it"), rows, width, left=1)
    seen = {
        "NV#" if way.startswith("NV") else way for row in [*known["between_gpus"], *known["to_gpus"]] for way in row
    }
    yield ""
    for way, means in LEGEND.items():
        if way in seen:
            yield from fact(way, means, width)


def _matrix(names: Sequence[str], heads: Sequence[str], ways: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """Return a table of ways, in several blocks where it would be too wide."""
    most = max(1, (width - 2 - 10) // (max(columns(head) for head in heads) + 2))
    for first in range(0, len(heads), most):
        if first:
            yield ""
        rows = [[name, *row[first : first + most]] for name, row in zip(names, ways, strict=True)]
        yield from table(["", *heads[first : first + most]], rows, width)


Section = tuple[str, str, Callable[[Values, int], Iterable[str]]]
_SUMMARY: Sequence[Section] = (
    ("system", "System", of_system),
    ("cpu", "CPUs", of_cpu),
    ("memory", "Memory", of_memory),
    ("stack", "Driver stack", of_stack),
    ("gpus", "GPUs", of_gpus),
    ("infiniband", "InfiniBand and RoCE", of_infiniband),
    ("network", "Network", of_network),
    ("mounts", "Mounts of other hosts, and the root", of_mounts),
)
_WHOLE: Sequence[Section] = (
    ("system", "System", of_system),
    ("cpu", "CPUs", of_cpu_whole),
    ("memory", "Memory", of_memory_whole),
    ("stack", "Driver stack", of_stack),
    ("gpus", "GPUs", of_gpus_whole),
    ("topology", "Topology", of_topology),
    ("infiniband", "InfiniBand and RoCE", of_infiniband_whole),
    ("network", "Network", of_network),
    ("mounts", "Mounts", of_mounts_whole),
)


def render_info(told: Values, *, width: int) -> str:
    """Return a view as text."""
    sections = _SUMMARY if told["view"] == "summary" else _WHOLE
    lines = _title(told, width)
    for part, title, show in sections:
        if part in told:
            body = list(show(told, width))
            lines += ["", title, *body] if body else []
    return "\n".join(lines) + "\n"


def _title(told: Values, width: int) -> list[str]:
    return paragraph(f"{told['host']}, {told['at']}", width)
