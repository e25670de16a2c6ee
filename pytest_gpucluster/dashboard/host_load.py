"""How busy the host is, from /proc: load, the time its CPUs have spent, memory."""

from __future__ import annotations

import re
from typing import Any

from pytest_gpucluster.host.tree import Tree


def read(tree: Tree) -> dict[str, Any]:
    """Read what the kernel tells; what it does not is None.

    Returns:
        ``load``: runnable tasks, averaged over 1, 5 and 15 minutes; ``cpus`` that run; ``busy_ticks`` and
        ``all_ticks``, which only grow; ``memory_total_bytes``, and of that ``memory_available_bytes``.

    Source: proc_loadavg(5); proc_stat(5), whose guest times are counted in user and nice already; proc_meminfo(5).
    """
    load = re.match(r"([\d.]+) ([\d.]+) ([\d.]+) ", tree.text("/proc/loadavg") or "")
    times = re.match(r"cpu +((?:\d+ ?)+)", tree.text("/proc/stat") or "")
    ticks = [int(number) for number in times[1].split()][:8] if times else []
    online = tree.numbers("/sys/devices/system/cpu/online")
    is_complete = len(ticks) >= 5
    return {
        "load": [float(number) for number in load.groups()] if load else None,
        "cpus": None if online is None else len(online),
        # user nice system idle iowait irq softirq steal
        "busy_ticks": sum(ticks) - ticks[3] - ticks[4] if is_complete else None,
        "all_ticks": sum(ticks) if is_complete else None,
        "memory_total_bytes": _bytes(tree, "MemTotal"),
        "memory_available_bytes": _bytes(tree, "MemAvailable"),
    }


def _bytes(tree: Tree, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", tree.text("/proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None
