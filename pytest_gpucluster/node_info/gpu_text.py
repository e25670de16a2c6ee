"""The GPUs as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_gpucluster.node_info.lines import amount, count, fact, facts, shown, switch, table
from pytest_gpucluster.text import paragraph

_MOST_PROCESSES = 32
Told = Mapping[str, Any]


def _why_no_gpus(gpus: Told, width: int) -> Iterable[str]:
    counted, found = gpus["count"], len(gpus["gpus"])
    if gpus["why_not"]:
        yield from fact("not available", gpus["why_not"], width)
    elif not counted:
        yield from fact("GPUs", "none", width)
    if counted is not None and found < counted and not gpus["why_not"]:
        yield from fact("missing", f"{counted - found} of {count(counted, 'GPU')} do not answer", width)


def of_gpus(told: Told, width: int) -> Iterable[str]:
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


def _links(gpu: Told) -> str:
    links = gpu["nvlink_up"]
    return "?" if links is None else "none" if not links else f"{sum(links.values())}/{len(links)}"


def of_gpus_whole(told: Told, width: int) -> Iterable[str]:
    """Yield each GPU."""
    yield from of_gpus(told, width)
    for gpu in told["gpus"]["gpus"]:
        yield ""
        yield from paragraph(f"GPU {gpu['index']}: {gpu['name']}, {gpu['uuid']}", width)
        yield from facts(_of_gpu(gpu), width)
        yield from _why(gpu["not_available"], width)


def _of_gpu(gpu: Told) -> Iterable[tuple[str, str]]:
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


def _ecc(gpu: Told) -> str:
    errors = f"uncorrected errors {shown(gpu['ecc_uncorrected'])}, in its life {shown(gpu['ecc_uncorrected_of_life'])}"
    pending, failed = (switch(gpu[key], "yes", "no") for key in ("rows_remap_pending", "rows_remap_failed"))
    return f"{switch(gpu['ecc'])}, {errors}; row remap pending {pending}, failed {failed}"


def _pcie(gpu: Told) -> str:
    now = f"gen {shown(gpu['pcie_generation'])} x{shown(gpu['pcie_width'])}"
    return f"{now} now, gen {shown(gpu['pcie_generation_max'])} x{shown(gpu['pcie_width_max'])} at best"


def _nvlink(gpu: Told) -> str:
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


def _processes(told: Sequence[Told] | None) -> str:
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
