"""The text of ``gpucluster node info``: host, GPUs, ports and interfaces, topology.

Lines are at most ``width`` wide, and the text has no control characters.
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
    """Return a fact as lines: its name, then the text."""
    name = padded(shortened(clean(key), _KEY_COLUMNS - 1), _KEY_COLUMNS)
    return paragraph(text, width, first=f"  {name}", rest=" " * (2 + _KEY_COLUMNS))


def facts(pairs: Iterable[tuple[str, str | None]], width: int) -> Iterable[str]:
    """Yield facts, "unknown" for those without a value."""
    for key, text in pairs:
        yield from fact(key, text or "unknown", width)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 1) -> list[str]:
    """Return a table; the first ``left`` columns are left-aligned, the others right-aligned. The widest text cells are
    shortened until it fits."""
    heads = [Column(title=title, is_right=at >= left) for at, title in enumerate(titles)]
    cells = [[clean(cell) for cell in row] for row in [titles, *rows]]
    wide = widths(cells)
    while total(wide) > width - 2 and max(wide) > _LEAST_COLUMNS:
        # Numbers are shortened last: a part of one is another number.
        cut = [at for at in range(len(wide)) if wide[at] > _WIDE_COLUMNS]
        cut = cut or [at for at in range(left) if wide[at] > _LEAST_COLUMNS] or list(range(len(wide)))
        wide[max(cut, key=lambda at: wide[at])] -= 1
    return [
        "  " + line_of([shortened(cell, most) for cell, most in zip(row, wide, strict=True)], heads, wide)
        for row in cells
    ]


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


Info = Mapping[str, Any]


def system_lines(info: Info, width: int) -> Iterable[str]:
    """Yield the system, the container and the scheduler."""
    system = info["system"]
    yield from facts(
        [
            ("system", f"{with_unit(system['system'])}, Linux {with_unit(system['kernel'])}, {system['machine']}"),
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


def _scheduler(scheduler: Info | None) -> str:
    if scheduler is None:
        return "none"
    shape = []
    if scheduler["nnodes"] is not None:
        shape.append(count(scheduler["nnodes"], "node"))
    if scheduler["gpus_per_node"] is not None:
        shape.append(f"{scheduler['gpus_per_node']} GPUs on each")
    rest = [
        f"{key} {value}" for key, value in scheduler.items() if key not in ("name", "nnodes", "gpus_per_node") and value
    ]
    return ", ".join([scheduler["name"], *rest, *shape])


def cpu_lines(info: Info, width: int) -> Iterable[str]:
    """Yield a summary of the CPUs."""
    cpu = info["cpu"]
    group = f"; the control group gets the time of {cpu['cpus_of_group']:g}" if cpu["cpus_of_group"] is not None else ""
    off = f", {cpu['offline']} offline" if cpu["offline"] else ""
    counted = [count(cpu["sockets"], "socket"), count(cpu["cores"], "core"), count(cpu["cpus"], "CPU")]
    shape = ", ".join(counted) + off
    yield from facts(
        [
            ("model", cpu["model"]),
            ("CPUs", f"{shape}; this process may use {cpu['cpus_allowed']}{group}"),
            ("NUMA nodes", str(len(cpu["numa_nodes"])) if cpu["numa_nodes"] else "unknown"),
        ],
        width,
    )


def cpu_details(info: Info, width: int) -> Iterable[str]:
    """Yield the CPUs, and each NUMA node."""
    cpu = info["cpu"]
    yield from cpu_lines(info, width)
    clock = [f"at most {cpu['max_mhz']:g} MHz"] if cpu["max_mhz"] is not None else []
    clock += [f"{name} on {count(number, 'CPU')}" for name, number in cpu["governors"].items()]
    yield from fact("clock", ", ".join(clock) or "not the kernel's to choose", width)
    yield from fact("balancing", f"NUMA balancing {switch(cpu['numa_balancing'])}", width)
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
    if rows:
        yield from table(("node", "CPUs", "memory", "free", "distances"), rows, width, left=2)


def memory_lines(info: Info, width: int) -> Iterable[str]:
    """Yield a summary of the memory."""
    memory = info["memory"]
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


def memory_details(info: Info, width: int) -> Iterable[str]:
    """Yield memory, huge pages and limits."""
    yield from memory_lines(info, width)
    memory, limits = info["memory"], info["memory"]["limits"]
    huge = [
        f"{with_unit(page['total'])} of {amount(page['size_bytes'])} ({with_unit(page['free'])} free)"
        for page in memory["huge_pages"]
    ]
    yield from facts(
        [
            ("swap", f"{amount(memory['swap_total_bytes'])}, {amount(memory['swap_free_bytes'])} free"),
            (
                "huge pages",
                f"{', '.join(huge) or 'none'}; transparent ones: {with_unit(memory['transparent_huge_pages'])}",
            ),
            ("limits", None if limits is None else _limits(limits)),
        ],
        width,
    )


def _limits(limits: Info) -> str:
    locked = limits["memlock_bytes"]
    locked = locked if isinstance(locked, str) else amount(locked)
    may = " (unlimited by CAP_IPC_LOCK)" if limits["may_lock_all"] else ""
    return f"open files {limits['nofile']}, locked memory {locked}{may}, processes {limits['nproc']}"


def stack_lines(info: Info, width: int) -> Iterable[str]:
    """Yield the driver stack."""
    stack, missing = info["stack"], info["stack"]["not_available"]
    driver = stack["driver"] and f"{stack['driver']}, {stack['driver_kind']} kernel modules"
    loaded = ", ".join(f"{name} {version}".rstrip() for name, version in (stack["modules"] or {}).items())
    modules = f"unknown: {missing['modules']}" if "modules" in missing else loaded
    wanted = (("CUDA toolkit", "toolkit"), ("NCCL", "nccl"), ("torch", "torch"))
    yield from facts(
        [
            ("driver", driver or f"none: {missing.get('driver', 'its version is unknown')}"),
            *((name, stack[key] or "none installed here") for name, key in wanted),
            ("Fabric Manager", stack["fabric_manager"] or f"unknown: {missing.get('fabric_manager', '')}"),
            ("OFED", stack["ofed"] or f"unknown: {missing.get('ofed', '')}"),
            ("modules", modules or "none of the driver or the RDMA stack is loaded"),
        ],
        width,
    )


def mounts_lines(info: Info, width: int) -> Iterable[str]:
    """Yield the root and network mounts."""
    return _mount_table([one for one in info["mounts"] if one["network"] or one["point"] == "/"], width)


def mounts_details(info: Info, width: int) -> Iterable[str]:
    """Yield every mount."""
    return _mount_table(info["mounts"], width)


def _mount_table(mounts: Sequence[Info], width: int) -> Iterable[str]:
    rows = [[one["point"], one["kind"], one["source"], "ro" if one["read_only"] else "rw"] for one in mounts]
    return (
        table(("mounted at", "kind", "source", "mode"), rows, width, left=3) if rows else fact("mounts", "none", width)
    )


_MOST_PROCESSES = 32


def _gpu_problems(gpus: Info, width: int) -> Iterable[str]:
    counted, found = gpus["count"], len(gpus["gpus"])
    if gpus["why_not"]:
        yield from fact("not available", gpus["why_not"], width)
    elif not counted:
        yield from fact("GPUs", "none", width)
    if counted is not None and found < counted and not gpus["why_not"]:
        yield from fact("missing", f"{counted - found} of {count(counted, 'GPU')} do not answer", width)


def gpus_lines(info: Info, width: int) -> Iterable[str]:
    """Yield a line for each GPU."""
    gpus = info["gpus"]
    yield from _gpu_problems(gpus, width)
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
        for gpu in gpus["gpus"]
    ]
    if rows:
        titles = ("GPU", "name", "memory", "temp", "power", "busy", "ECC", "MIG", "NVLink")
        yield from table(titles, rows, width, left=2)


def _watts(drawn: float | None, limit: float | None) -> str:
    return f"{'?' if drawn is None else f'{drawn:.0f}'}/{'?' if limit is None else f'{limit:.0f}'} W"


def _links(gpu: Info) -> str:
    links = gpu["nvlink_up"]
    return "?" if links is None else "none" if not links else f"{sum(links.values())}/{len(links)}"


def gpus_details(info: Info, width: int) -> Iterable[str]:
    """Yield each GPU."""
    yield from gpus_lines(info, width)
    for gpu in info["gpus"]["gpus"]:
        yield ""
        yield from paragraph(f"GPU {gpu['index']}: {gpu['name']}, {gpu['uuid']}", width)
        yield from facts(_gpu_facts(gpu), width)
        yield from _missing_lines(gpu["not_available"], width)


def _gpu_facts(gpu: Info) -> Iterable[tuple[str, str]]:
    yield "PCI", f"{gpu['pci']}, {_pcie(gpu)}"
    yield "board", f"serial {with_unit(gpu['serial'])}, part {with_unit(gpu['board_part_number'])}"
    firmware = (("VBIOS", "vbios"), ("InfoROM", "inforom"), ("GSP", "gsp_firmware"))
    yield "firmware", ", ".join(f"{name} {with_unit(gpu[key])}" for name, key in firmware)
    yield "memory", f"{amount(gpu['memory_used_bytes'])} of {amount(gpu['memory_total_bytes'])} used"
    clocks = (("SM", "sm_clock_mhz", "sm_clock_max_mhz"), ("memory", "memory_clock_mhz", "memory_clock_max_mhz"))
    text = ", ".join(f"{name} {with_unit(gpu[now])} of {with_unit(gpu[most])} MHz" for name, now, most in clocks)
    throttle = gpu["throttle"]
    yield "clocks", f"{text}; throttled by {', '.join(throttle) or 'nothing' if throttle is not None else '?'}"
    default = gpu["power_limit_default_watts"]
    default_text = "?" if default is None else f"{default:.0f} W"
    yield "power", f"{_watts(gpu['power_watts'], gpu['power_limit_watts'])}, by default {default_text}"
    yield "ECC", _ecc(gpu)
    yield "modes", f"MIG {switch(gpu['mig'])}, persistence {switch(gpu['persistence'])}"
    yield "NVLink", _nvlink(gpu)
    if gpu["fabric"] is not None:
        fabric = gpu["fabric"]
        yield "fabric", ", ".join([fabric["state"], fabric["status"], *fabric["health"]])
    yield "processes", _processes(gpu["processes"])


def _ecc(gpu: Info) -> str:
    aggregate = with_unit(gpu["ecc_uncorrected_of_life"])
    errors = f"uncorrected errors {with_unit(gpu['ecc_uncorrected'])}, over its life {aggregate}"
    pending, failed = (switch(gpu[key], "yes", "no") for key in ("rows_remap_pending", "rows_remap_failed"))
    return f"{switch(gpu['ecc'])}, {errors}; row remap pending {pending}, failed {failed}"


def _pcie(gpu: Info) -> str:
    now = f"gen {with_unit(gpu['pcie_generation'])} x{with_unit(gpu['pcie_width'])}"
    return f"{now} now, gen {with_unit(gpu['pcie_generation_max'])} x{with_unit(gpu['pcie_width_max'])} at best"


def _nvlink(gpu: Info) -> str:
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


def _missing_lines(missing: Mapping[str, str], width: int) -> Iterable[str]:
    """Yield the reasons of question marks, each once."""
    reasons: dict[str, list[str]] = {}
    for key, why in missing.items():
        reasons.setdefault(why.partition(" (nvml")[0], []).append(key)
    for why, keys in reasons.items():
        yield from fact("not available", f"{', '.join(keys)}: {why}", width)


def infiniband_lines(info: Info, width: int) -> Iterable[str]:
    """Yield a line for each port."""
    known = info["infiniband"]
    if known["why_not"]:
        yield from fact("ports", f"none: {known['why_not']}", width)
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
    if rows:
        yield from table(("port", "kind", "state", "rate", "NUMA", "firmware"), rows, width, left=4)
    for device in known["devices"]:
        if not device["ports"]:
            yield from fact(clean(device["name"]), "shows no port", width)
    peer = known["peer_memory"]
    yield from fact("GPUDirect", str(PeerMemory(**peer)), width)


def infiniband_details(info: Info, width: int) -> Iterable[str]:
    """Yield each HCA and its ports."""
    yield from infiniband_lines(info, width)
    for device in info["infiniband"]["devices"]:
        yield ""
        yield from paragraph(f"{device['name']}: {device['kind'] or '?'}, PSID {device['board'] or '?'}", width)
        yield from facts([("PCI", f"{with_unit(device['pci'])}, GUID {device['guid'] or '?'}")], width)
        for port in device["ports"]:
            lids = f"LID {port['lid']}, subnet manager at {port['sm_lid']}"
            errors = ", ".join(f"{name} {count}" for name, count in port["errors"].items())
            yield from fact(f"port {port['number']}", f"{lids}; errors since it was reset: {errors or 'none'}", width)


def network_lines(info: Info, width: int) -> Iterable[str]:
    """Yield a line for each interface."""
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
    if rows:
        yield from table(("interface", "state", "addresses", "speed", "MTU"), rows, width, left=3)
    else:
        yield from fact("interfaces", "none", width)


def topology_lines(info: Info, width: int) -> Iterable[str]:
    """Yield the paths between the GPUs, and between HCAs and GPUs."""
    known = info["topology"]
    names = [f"GPU{index}" for index in known["gpus"]]
    if not names:
        return
    local = [[with_unit(node), with_unit(cpus)] for node, cpus in zip(known["numa_nodes"], known["cpus"], strict=True)]
    yield from _matrix(names, names, known["between_gpus"], width)
    if known["adapters"]:
        yield ""
        yield from _matrix(known["adapters"], names, known["to_gpus"], width)
    yield ""
    rows = [[name, *cells] for name, cells in zip(names, local, strict=True)]
    yield from table(("", "NUMA node", "local CPUs"), rows, width, left=1)
    seen = {
        "NV#" if way.startswith("NV") else way for row in [*known["between_gpus"], *known["to_gpus"]] for way in row
    }
    yield ""
    for way, means in LEGEND.items():
        if way in seen:
            yield from fact(way, means, width)


def _matrix(names: Sequence[str], heads: Sequence[str], ways: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """Return a table of paths, in several blocks where it would be too wide."""
    most = max(1, (width - 2 - 10) // (max(columns(head) for head in heads) + 2))
    for first in range(0, len(heads), most):
        if first:
            yield ""
        rows = [[name, *row[first : first + most]] for name, row in zip(names, ways, strict=True)]
        yield from table(["", *heads[first : first + most]], rows, width)


Section = tuple[str, str, Callable[[Info, int], Iterable[str]]]
_SUMMARY: Sequence[Section] = (
    ("system", "System", system_lines),
    ("cpu", "CPUs", cpu_lines),
    ("memory", "Memory", memory_lines),
    ("stack", "Driver stack", stack_lines),
    ("gpus", "GPUs", gpus_lines),
    ("infiniband", "InfiniBand and RoCE", infiniband_lines),
    ("network", "Network", network_lines),
    ("mounts", "Root and network mounts", mounts_lines),
)
_DETAILS: Sequence[Section] = (
    ("system", "System", system_lines),
    ("cpu", "CPUs", cpu_details),
    ("memory", "Memory", memory_details),
    ("stack", "Driver stack", stack_lines),
    ("gpus", "GPUs", gpus_details),
    ("topology", "Topology", topology_lines),
    ("infiniband", "InfiniBand and RoCE", infiniband_details),
    ("network", "Network", network_lines),
    ("mounts", "Mounts", mounts_details),
)


def render_info(info: Info, *, width: int) -> str:
    """Return a view as text."""
    sections = _SUMMARY if info["view"] == "summary" else _DETAILS
    lines = _title(info, width)
    for part, title, show in sections:
        if part in info:
            body = list(show(info, width))
            lines += ["", title, *body] if body else []
    return "\n".join(lines) + "\n"


def _title(info: Info, width: int) -> list[str]:
    return paragraph(f"{info['host']}, {info['at']}", width)
