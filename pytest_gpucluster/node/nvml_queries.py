"""The NVML queries of a GPU: named, each with one plain value.

    >>> QUERIES["power.draw"].key
    'power_watts'

Nothing here imports NVML: a query gets the module and a handle.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

Read = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query of a GPU.

    Attributes:
        name: of the query.
        read: returns the value, from the module and a handle.
        of_slice: a MIG slice has a value of its own.
        key: the name of the value in JSON, with the unit where it needs one.
    """

    name: str
    read: Read
    of_slice: bool = False
    key: str


THROTTLE_REASONS: Mapping[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bit -> short name; the last two are of driver 615 or later. Source: NVML, nvmlClocksEventReasons."""

NVLINK_COUNTERS: Mapping[str, str] = {
    name: f"NVML_NVLINK_ERROR_DL_{name.upper()}" for name in ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
}
"""Error counters of a link up to NVLink 4, by nvmlDeviceGetNvLinkErrorCounter."""

NVLINK5_COUNTERS: Mapping[str, str] = {
    "malformed_packets": "NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS",
    "buffer_overruns": "NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS",
    "received_errors": "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    "received_remote_errors": "NVML_FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS",
    "received_general_errors": "NVML_FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS",
    "local_link_integrity": "NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
    "transmit_discards": "NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS",
    "link_recovery_failed": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
    "link_recovery": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
    "effective_errors": "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS",
    "symbol_errors": "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS",
}
"""Error counters of a link from NVLink 5 on: field values whose scope is the link."""

LINK_ENDS: Mapping[int, str] = {0: "gpu", 1: "npu", 2: "switch", 255: "unknown"}
"""Source: nvml.h, nvmlIntNvLinkDeviceType_t; an npu is IBM's POWER CPU."""

LINK_VERSIONS: Mapping[int, str] = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""NVML numbers the versions: an A100's 5 is 3.1. Source: nvml.h, NVML_NVLINK_VERSION_*."""

FABRIC_STATES = ("not supported", "not started", "in progress", "completed")
"""By NVML_GPU_FABRIC_STATE_*."""

# Field of the health mask -> (the problem, the values that mean it).
# Source: NVML, NVML_GPU_FABRIC_HEALTH_MASK_*: two-bit fields, 0 not supported, 1 true, 2 false.
_FABRIC_HEALTH = (
    ("DEGRADED_BW", "bandwidth degraded", (1,)),
    ("ROUTE_RECOVERY", "route recovery in progress", (1,)),
    ("ROUTE_UNHEALTHY", "route unhealthy", (1,)),
    ("ACCESS_TIMEOUT_RECOVERY", "access timeout recovery in progress", (1,)),
    ("INCORRECT_CONFIGURATION", "incorrect configuration", tuple(range(2, 16))),
)


def text(value: str | bytes) -> str:
    """Return NVML's text, which older nvidia-ml-py returns as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _processes(nvml: Any, gpu: Any) -> tuple[tuple[int, int | None], ...]:
    found = {int(entry.pid): entry.usedGpuMemory for entry in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    try:
        graphics = nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu)
    except nvml.NVMLError_NotSupported:
        graphics = ()  # a card without graphics has no such processes
    for entry in graphics:
        found.setdefault(int(entry.pid), entry.usedGpuMemory)
    return tuple((pid, None if used is None else int(used)) for pid, used in sorted(found.items()))


def _throttle(nvml: Any, gpu: Any) -> tuple[str, ...]:
    try:
        bits = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    except nvml.NVMLError_FunctionNotFound:
        # Drivers before 535 have the same bits under the older name only. Source: nvml.h, nvmlClocksThrottleReasons.
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~sum(THROTTLE_REASONS)
    return (*names, *([f"unknown_{unknown:#x}"] if unknown else []))


def _of_links(nvml: Any, links: Iterable[int], read: Callable[[int], Any]) -> dict[int, Any]:
    """Read a value of each link; links without it are left out, and numbers beyond the card's last link."""
    values: dict[int, Any] = {}
    for link in links:
        try:
            values[link] = read(link)
        # No link of Blackwell has the older error counters: NVML API reference, changes between v560 and v565.
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_Deprecated):
            continue
    return values


def _links(nvml: Any, gpu: Any) -> dict[int, bool]:
    every = range(nvml.NVML_NVLINK_MAX_LINKS)
    return _of_links(nvml, every, lambda link: bool(nvml.nvmlDeviceGetNvLinkState(gpu, link)))


def _up(nvml: Any, gpu: Any) -> list[int]:
    return [link for link, up in _links(nvml, gpu).items() if up]


def _link_ends(nvml: Any, gpu: Any) -> dict[int, tuple[str, str]]:
    def end(link: int) -> tuple[str, str]:
        kind = int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link))
        # On a system with switches the driver gives the switch's address as zeros.
        address = text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId)
        return LINK_ENDS.get(kind, f"unknown ({kind})"), address

    return _of_links(nvml, _up(nvml, gpu), end)


def _link_versions(nvml: Any, gpu: Any) -> dict[int, str]:
    numbers = _of_links(nvml, _up(nvml, gpu), lambda link: int(nvml.nvmlDeviceGetNvLinkVersion(gpu, link)))
    return {link: LINK_VERSIONS.get(number, f"unknown ({number})") for link, number in numbers.items()}


def _link_errors(nvml: Any, gpu: Any) -> dict[str, dict[int, int]]:
    links = _up(nvml, gpu)

    def count(which: int) -> dict[int, int]:
        return _of_links(nvml, links, lambda link: int(nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, which)))

    counts = {name: count(getattr(nvml, constant)) for name, constant in NVLINK_COUNTERS.items()}
    for link in links:
        for name, value in _fields(nvml, gpu, NVLINK5_COUNTERS, link).items():
            counts.setdefault(name, {})[link] = value
    counts = {name: of_link for name, of_link in counts.items() if of_link}
    if links and not counts:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return counts


def _fields(nvml: Any, gpu: Any, constants: Mapping[str, str], scope: int = 0) -> dict[str, int]:
    """Read field values; those that this GPU lacks are left out."""
    known = {name: getattr(nvml, constant) for name, constant in constants.items() if hasattr(nvml, constant)}
    if not known:
        return {}
    values = nvml.nvmlDeviceGetFieldValues(gpu, [(field, scope) for field in known.values()])
    lost = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
    for value in values:
        if value.nvmlReturn in lost:
            raise nvml.NVMLError(value.nvmlReturn)
    return {
        name: int(_field(nvml, value))
        for name, value in zip(known, values, strict=True)
        if value.nvmlReturn == nvml.NVML_SUCCESS
    }


def _field(nvml: Any, value: Any) -> int | float:
    members = {
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }
    found: int | float = getattr(value.value, members[value.valueType])
    return found


def _fabric(nvml: Any, gpu: Any) -> dict[str, Any]:
    """Query with the newest structure that driver and package share; the first has no health mask."""
    for structure in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        if not hasattr(nvml, structure):
            continue
        info = getattr(nvml, structure)()
        try:
            nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
        except (
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_ArgumentVersionMismatch,
            nvml.NVMLError_InvalidArgument,
        ):
            continue  # this driver does not have the structure; the error differs between drivers
        return _fabric_state(nvml, info, mask=int(info.healthMask))
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(gpu, ctypes.byref(info))
    return _fabric_state(nvml, info, mask=0)


def _fabric_state(nvml: Any, info: Any, mask: int) -> dict[str, Any]:
    state, status = int(info.state), int(info.status)
    health = []
    for field, words, bad in _FABRIC_HEALTH:
        shift = getattr(nvml, f"NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_{field}", None)
        width = getattr(nvml, f"NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_{field}", None)
        if shift is not None and width is not None and (mask >> shift) & width in bad:
            health.append(words)
    return {
        "state": FABRIC_STATES[state] if state < len(FABRIC_STATES) else f"unknown ({state})",
        "status": "success" if status == nvml.NVML_SUCCESS else str(nvml.NVMLError(status)),
        "health": tuple(health),
    }


def _memory(field: str) -> Read:
    # Version 2 reports what the driver reserves separately from what processes use.
    return lambda nvml, gpu: int(getattr(nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2), field))


def _field_value(constant: str) -> Read:
    def read(nvml: Any, gpu: Any) -> int:
        found = _fields(nvml, gpu, {"value": constant})
        if not found:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        return found["value"]

    return read


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _item(position: int, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: convert(values[position])


def _define(name: str, read: Read, *, key: str = "", of_slice: bool = False) -> Query:
    return Query(name=name, read=read, of_slice=of_slice, key=key or name.replace(".", "_"))


def _call(name: str, function: str, convert: Callable[[Any], Any], *constants: str, key: str = "") -> Query:
    """Return the query that converts the result of one function, called with these constants of NVML."""

    def read(nvml: Any, gpu: Any) -> Any:
        return convert(getattr(nvml, function)(gpu, *(getattr(nvml, constant) for constant in constants)))

    return _define(name, read, key=key)


_ECC, _ROWS = "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"
_CLOCK, _MAX_CLOCK = "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"
_CORRECTED, _UNCORRECTED = "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"
_VOLATILE, _AGGREGATE = "NVML_VOLATILE_ECC", "NVML_AGGREGATE_ECC"  # since the driver was loaded, over the card's life
_SLOWDOWN = "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"
_TABLE = (
    _call("serial", "nvmlDeviceGetSerial", text),
    _call("vbios", "nvmlDeviceGetVbiosVersion", text),
    _call("board.part_number", "nvmlDeviceGetBoardPartNumber", text),
    _call("inforom", "nvmlDeviceGetInforomImageVersion", text),
    _call("gsp.firmware", "nvmlDeviceGetGspFirmwareVersion", text),
    _define("memory.total", _memory("total"), key="memory_total_bytes", of_slice=True),
    _define("memory.free", _memory("free"), key="memory_free_bytes", of_slice=True),
    _define("memory.used", _memory("used"), key="memory_used_bytes", of_slice=True),
    _define("memory.reserved", _memory("reserved"), key="memory_reserved_bytes", of_slice=True),
    # Processes with a context on the GPU; None where NVML does not report the bytes.
    _define("processes", _processes, of_slice=True),
    _call("ecc.mode", "nvmlDeviceGetEccMode", _item(0, bool), key="ecc"),
    _call("ecc.uncorrected.volatile", _ECC, int, _UNCORRECTED, _VOLATILE, key="ecc_uncorrected"),
    _call("ecc.uncorrected.aggregate", _ECC, int, _UNCORRECTED, _AGGREGATE, key="ecc_uncorrected_of_life"),
    _call("ecc.corrected.volatile", _ECC, int, _CORRECTED, _VOLATILE),
    # Rows remapped after correctable errors, after uncorrectable ones, one pending a reset, one failed: no spare row.
    _call("rows.remapped.corrected", _ROWS, _item(0, int)),
    _call("rows.remapped.uncorrected", _ROWS, _item(1, int)),
    _call("rows.pending", _ROWS, _item(2, bool), key="rows_remap_pending"),
    _call("rows.failed", _ROWS, _item(3, bool), key="rows_remap_failed"),
    # A page waits to be retired; only before row remapping.
    _call("pages.pending", "nvmlDeviceGetRetiredPagesPendingStatus", bool),
    _call("clock.sm", _CLOCK, int, "NVML_CLOCK_SM", key="sm_clock_mhz"),
    _call("clock.sm.max", _MAX_CLOCK, int, "NVML_CLOCK_SM", key="sm_clock_max_mhz"),
    _call("clock.memory", _CLOCK, int, "NVML_CLOCK_MEM", key="memory_clock_mhz"),
    _call("clock.memory.max", _MAX_CLOCK, int, "NVML_CLOCK_MEM", key="memory_clock_max_mhz"),
    _call("power.draw", "nvmlDeviceGetPowerUsage", _watts, key="power_watts"),
    _call("power.limit", "nvmlDeviceGetEnforcedPowerLimit", _watts, key="power_limit_watts"),
    _call("power.limit.default", "nvmlDeviceGetPowerManagementDefaultLimit", _watts, key="power_limit_default_watts"),
    _call("temperature.gpu", "nvmlDeviceGetTemperature", int, "NVML_TEMPERATURE_GPU", key="temperature_celsius"),
    _call("temperature.slowdown", "nvmlDeviceGetTemperatureThreshold", int, _SLOWDOWN, key="slowdown_celsius"),
    # Distance to the nearest slowdown threshold; newer cards have this instead.
    _call("temperature.margin", "nvmlDeviceGetMarginTemperature", int),
    # Part of the time in which a kernel ran.
    _call("utilization.gpu", "nvmlDeviceGetUtilizationRates", attrgetter("gpu"), key="utilization_percent"),
    _define("throttle.reasons", _throttle, key="throttle"),
    _call("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration", int),
    _call("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth", int),
    # Best generation and most lanes of this card in this slot.
    _call("pcie.generation.max", "nvmlDeviceGetMaxPcieLinkGeneration", int),
    _call("pcie.width.max", "nvmlDeviceGetMaxPcieLinkWidth", int),
    _call("pcie.replays", "nvmlDeviceGetPcieReplayCounter", int),
    _define("nvlink.up", _links),
    # Of the links that are up: gpu, switch or npu, and its PCI address.
    _define("nvlink.ends", _link_ends),
    _define("nvlink.version", _link_versions),
    # The number of links to an NVSwitch.
    _define("nvlink.switch", _field_value("NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT")),
    _define("nvlink.errors", _link_errors),
    # State, status and health of the GPU's registration with the Fabric Manager.
    _define("fabric", _fabric),
    # The action that the GPU needs: 0 is none, the others are nvmlDeviceGpuRecoveryAction_t.
    _define("recovery.action", _field_value("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")),
    _call("mig.mode", "nvmlDeviceGetMigMode", _item(0, bool), key="mig"),
    _call("persistence.mode", "nvmlDeviceGetPersistenceMode", bool, key="persistence"),
)
QUERIES: Mapping[str, Query] = {query.name: query for query in _TABLE}


def keys(*names: str) -> Mapping[str, str]:
    """Return JSON key -> query of these queries.

    >>> keys("power.draw")["power_watts"]
    'power.draw'
    """
    return {QUERIES[name].key: name for name in names}
