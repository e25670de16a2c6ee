"""The host as text: system, CPUs, memory, driver stack, mounts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_gpucluster.node_info.lines import amount, count, fact, facts, shown, switch, table
from pytest_gpucluster.text import duration

Told = Mapping[str, Any]


def of_system(told: Told, width: int) -> Iterable[str]:
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


def _scheduler(told: Told | None) -> str:
    if told is None:
        return "none"
    shape = []
    if told["nnodes"] is not None:
        shape.append(count(told["nnodes"], "node"))
    if told["gpus_per_node"] is not None:
        shape.append(f"{told['gpus_per_node']} GPUs on each")
    rest = [f"{key} {value}" for key, value in told.items() if key not in ("name", "nnodes", "gpus_per_node") and value]
    return ", ".join([told["name"], *rest, *shape])


def of_cpu(told: Told, width: int) -> Iterable[str]:
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


def of_cpu_whole(told: Told, width: int) -> Iterable[str]:
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


def of_memory(told: Told, width: int) -> Iterable[str]:
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


def of_memory_whole(told: Told, width: int) -> Iterable[str]:
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


def _limits(limits: Told) -> str:
    locked = limits["memlock_bytes"]
    locked = locked if isinstance(locked, str) else amount(locked)
    may = " (and CAP_IPC_LOCK, by which it may lock all)" if limits["may_lock_all"] else ""
    return f"open files {limits['nofile']}, locked memory {locked}{may}, processes {limits['nproc']}"


def of_stack(told: Told, width: int) -> Iterable[str]:
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


def of_mounts(told: Told, width: int) -> Iterable[str]:
    """Yield the root, and what is mounted from other hosts."""
    return _mounts_of([one for one in told["mounts"] if one["network"] or one["point"] == "/"], width)


def of_mounts_whole(told: Told, width: int) -> Iterable[str]:
    """Yield every mount."""
    return _mounts_of(told["mounts"], width)


def _mounts_of(mounts: Sequence[Told], width: int) -> Iterable[str]:
    rows = [[one["point"], one["kind"], one["source"], "ro" if one["read_only"] else "rw"] for one in mounts]
    return (
        table(("mounted at", "kind", "source", "may"), rows, width, left=3) if rows else fact("mounts", "none", width)
    )
