"""The NVML queries of a GPU: named, each with its unit and one plain value.

    >>> QUERIES["power.draw"].unit
    'W'

Nothing here imports NVML: a query gets the module and a handle.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/; each query names its functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Read = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query. ``functions`` are NVML's; ``of_slice``: a MIG slice has a value of its own."""

    name: str
    unit: str
    doc: str
    functions: str
    read: Read
    of_slice: bool = False


THROTTLE_REASONS: Mapping[int, str] = MappingProxyType(
    {
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
)
"""Bit -> short name; the last two are of driver 615 or later. Source: NVML, nvmlClocksEventReasons."""

NVLINK_COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "replay": "NVML_NVLINK_ERROR_DL_REPLAY",
        "recovery": "NVML_NVLINK_ERROR_DL_RECOVERY",
        "crc_flit": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
        "crc_data": "NVML_NVLINK_ERROR_DL_CRC_DATA",
        "ecc_data": "NVML_NVLINK_ERROR_DL_ECC_DATA",
    }
)
"""Error counters of a link up to NVLink 4, by nvmlDeviceGetNvLinkErrorCounter."""

NVLINK5_COUNTERS: Mapping[str, str] = MappingProxyType(
    {
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
)
"""Error counters of a link from NVLink 5 on: field values whose scope is the link."""

NVLINK_KIBIBYTES: Mapping[str, str] = MappingProxyType(
    {
        "sent": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
        "received": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
    }
)
"""Field values that count user data in KiB, of one link or, with ``ALL_LINKS`` as scope, of all. Source: nvml.h,
NVLink throughput counters field values."""

NVLINK5_BYTES: Mapping[str, str] = MappingProxyType(
    {
        "sent": "NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES",
        "received": "NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES",
    }
)
"""Field values that count the bytes of one link from NVLink 5 on."""

ALL_LINKS = 2**32 - 1
"""UINT_MAX as scope: the sum over all links. Source: nvml.h."""

LINK_ENDS: Mapping[int, str] = MappingProxyType({0: "gpu", 1: "npu", 2: "switch", 255: "unknown"})
"""Source: nvml.h, nvmlIntNvLinkDeviceType_t; an npu is IBM's POWER CPU."""

LINK_VERSIONS: Mapping[int, str] = MappingProxyType(
    {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
)
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


def _memory(field: str) -> Callable[[Any, Any], int]:
    # Version 2 reports what the driver reserves separately from what processes use.
    return lambda nvml, gpu: int(getattr(nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2), field))


def _processes(nvml: Any, gpu: Any) -> tuple[tuple[int, int | None], ...]:
    found = {int(entry.pid): entry.usedGpuMemory for entry in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    try:
        graphics = nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu)
    except nvml.NVMLError_NotSupported:
        graphics = ()  # a card without graphics has no such processes
    for entry in graphics:
        found.setdefault(int(entry.pid), entry.usedGpuMemory)
    return tuple((pid, None if used is None else int(used)) for pid, used in sorted(found.items()))


def _ecc_errors(kind: str, counter: str) -> Callable[[Any, Any], int]:
    return lambda nvml, gpu: int(
        nvml.nvmlDeviceGetTotalEccErrors(
            gpu, getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}"), getattr(nvml, f"NVML_{counter}_ECC")
        )
    )


def _remapped(position: int, of: type) -> Read:
    # (by correctable errors, by uncorrectable ones, one is pending, one has failed)
    return lambda nvml, gpu: of(nvml.nvmlDeviceGetRemappedRows(gpu)[position])


def _throttle(nvml: Any, gpu: Any) -> tuple[str, ...]:
    try:
        bits = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    except nvml.NVMLError_FunctionNotFound:
        # Drivers before 535 have the same bits under the older name only. Source: nvml.h, nvmlClocksThrottleReasons.
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~sum(THROTTLE_REASONS)
    return (*names, *([f"unknown_{unknown:#x}"] if unknown else []))


def _watts(function: str) -> Callable[[Any, Any], float]:
    return lambda nvml, gpu: getattr(nvml, function)(gpu) / 1000


def _links(nvml: Any, gpu: Any) -> dict[int, bool]:
    """Query link by link; numbers beyond the card's last link are invalid arguments or not supported."""
    states: dict[int, bool] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states[link] = bool(nvml.nvmlDeviceGetNvLinkState(gpu, link))
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            continue
    return states


def _per_link(nvml: Any, gpu: Any, read: Callable[[int], Any]) -> dict[int, Any]:
    """Read a value of each link that is up; links without a value are left out."""
    values: dict[int, Any] = {}
    for link in [link for link, up in _links(nvml, gpu).items() if up]:
        try:
            values[link] = read(link)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            continue
    return values


def _link_ends(nvml: Any, gpu: Any) -> dict[int, tuple[str, str]]:
    def end(link: int) -> tuple[str, str]:
        kind = int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link))
        # On a system with switches the driver gives the switch's address as zeros.
        address = text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId)
        return LINK_ENDS.get(kind, f"unknown ({kind})"), address

    return _per_link(nvml, gpu, end)


def _link_versions(nvml: Any, gpu: Any) -> dict[int, str]:
    def version(link: int) -> str:
        number = int(nvml.nvmlDeviceGetNvLinkVersion(gpu, link))
        return LINK_VERSIONS.get(number, f"unknown ({number})")

    return _per_link(nvml, gpu, version)


def _switch_links(nvml: Any, gpu: Any) -> int:
    found = _fields(nvml, gpu, {"links": "NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT"})
    if not found:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return found["links"]


def _recovery_action(nvml: Any, gpu: Any) -> int:
    found = _fields(nvml, gpu, {"action": "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"})
    if not found:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return found["action"]


def _link_errors(nvml: Any, gpu: Any) -> dict[str, dict[int, int]]:
    counts: dict[str, dict[int, int]] = {}
    links = [link for link, up in _links(nvml, gpu).items() if up]
    for link in links:
        for name, constant in NVLINK_COUNTERS.items():
            try:
                value = nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, getattr(nvml, constant))
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_Deprecated):
                continue  # none of them on Blackwell: NVML API reference, changes between v560 and v565
            counts.setdefault(name, {})[link] = int(value)
        for name, value in _fields(nvml, gpu, NVLINK5_COUNTERS, link).items():
            counts.setdefault(name, {})[link] = value
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


def _link_bytes(nvml: Any, gpu: Any) -> dict[str, int]:
    """Read the sum over all links; where a generation lacks it, add up the links' counters."""
    found = _fields(nvml, gpu, NVLINK_KIBIBYTES, ALL_LINKS)
    if len(found) == len(NVLINK_KIBIBYTES):
        return {name: 1024 * count for name, count in found.items()}
    totals: dict[str, int] = {}
    for link in (link for link, up in _links(nvml, gpu).items() if up):
        for name, count in _fields(nvml, gpu, NVLINK5_BYTES, link).items():
            totals[name] = totals.get(name, 0) + count
    if len(totals) < len(NVLINK5_BYTES):
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return totals


def _number(function: str) -> Callable[[Any, Any], int]:
    return lambda nvml, gpu: int(getattr(nvml, function)(gpu))


def _switch(function: str) -> Callable[[Any, Any], bool]:
    return lambda nvml, gpu: bool(getattr(nvml, function)(gpu))


def _words(function: str) -> Callable[[Any, Any], str]:
    return lambda nvml, gpu: text(getattr(nvml, function)(gpu))


def _clock(kind: str) -> Callable[[Any, Any], int]:
    return lambda nvml, gpu: int(nvml.nvmlDeviceGetClockInfo(gpu, getattr(nvml, f"NVML_CLOCK_{kind}")))


def _max_clock(kind: str) -> Callable[[Any, Any], int]:
    return lambda nvml, gpu: int(nvml.nvmlDeviceGetMaxClockInfo(gpu, getattr(nvml, f"NVML_CLOCK_{kind}")))


def _table() -> dict[str, Query]:
    table: dict[str, Query] = {}

    def add(name: str, unit: str, function: str, read: Read, doc: str, **more: bool) -> None:
        table[name] = Query(name=name, unit=unit, doc=doc, functions=function, read=read, **more)

    def plain(name: str, unit: str, function: str, make: Callable[[str], Read], doc: str) -> None:
        add(name, unit, function, make(function), doc)

    plain("serial", "text", "nvmlDeviceGetSerial", _words, "Serial number of the board.")
    plain("vbios", "text", "nvmlDeviceGetVbiosVersion", _words, "Version of the video BIOS.")
    plain("board.part_number", "text", "nvmlDeviceGetBoardPartNumber", _words, "Part number of the board.")
    plain("inforom", "text", "nvmlDeviceGetInforomImageVersion", _words, "Version of the whole InfoROM on the board.")
    plain("gsp.firmware", "text", "nvmlDeviceGetGspFirmwareVersion", _words, "Version of the GSP's firmware.")
    memory = "nvmlDeviceGetMemoryInfo_v2"
    add("memory.total", "B", memory, _memory("total"), "Device memory, the driver's part included.", of_slice=True)
    add("memory.free", "B", memory, _memory("free"), "Memory that is free.", of_slice=True)
    add("memory.used", "B", memory, _memory("used"), "Memory that processes use.", of_slice=True)
    add("memory.reserved", "B", memory, _memory("reserved"), "Memory that the driver reserves.", of_slice=True)
    add(
        "processes",
        "(pid, B)",
        "nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses",
        _processes,
        "Processes with a context on the GPU: pairs of pid and bytes, None where NVML does not report the bytes.",
        of_slice=True,
    )
    add(
        "ecc.mode", "bool", "nvmlDeviceGetEccMode", lambda nvml, gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]), "ECC on."
    )
    total = "nvmlDeviceGetTotalEccErrors"
    add(
        "ecc.uncorrected.volatile",
        "errors",
        total,
        _ecc_errors("UNCORRECTED", "VOLATILE"),
        "Uncorrected errors since the driver was loaded.",
    )
    add(
        "ecc.uncorrected.aggregate",
        "errors",
        total,
        _ecc_errors("UNCORRECTED", "AGGREGATE"),
        "Uncorrected errors over the life of the card.",
    )
    add(
        "ecc.corrected.volatile",
        "errors",
        total,
        _ecc_errors("CORRECTED", "VOLATILE"),
        "Corrected errors since the driver was loaded.",
    )
    rows = "nvmlDeviceGetRemappedRows"
    add("rows.remapped.corrected", "rows", rows, _remapped(0, int), "Rows remapped after correctable errors.")
    add("rows.remapped.uncorrected", "rows", rows, _remapped(1, int), "Rows remapped after uncorrectable errors.")
    add("rows.pending", "bool", rows, _remapped(2, bool), "A remap waits for a reset of the GPU.")
    add("rows.failed", "bool", rows, _remapped(3, bool), "A remap has failed: no spare row was left.")
    plain(
        "pages.pending",
        "bool",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        _switch,
        "A page waits to be retired; only before row remapping.",
    )
    plain("clock.sm", "MHz", "nvmlDeviceGetClockInfo", lambda _: _clock("SM"), "Clock of the SMs.")
    plain("clock.sm.max", "MHz", "nvmlDeviceGetMaxClockInfo", lambda _: _max_clock("SM"), "Highest clock of the SMs.")
    plain("clock.memory", "MHz", "nvmlDeviceGetClockInfo", lambda _: _clock("MEM"), "Clock of the memory.")
    plain(
        "clock.memory.max",
        "MHz",
        "nvmlDeviceGetMaxClockInfo",
        lambda _: _max_clock("MEM"),
        "Highest clock of the memory.",
    )
    plain("power.draw", "W", "nvmlDeviceGetPowerUsage", _watts, "Power of the board.")
    plain("power.limit", "W", "nvmlDeviceGetEnforcedPowerLimit", _watts, "Power limit that is enforced.")
    plain("power.limit.default", "W", "nvmlDeviceGetPowerManagementDefaultLimit", _watts, "Power limit by default.")
    add(
        "temperature.gpu",
        "degC",
        "nvmlDeviceGetTemperature",
        lambda nvml, gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        "Temperature of the GPU.",
    )
    add(
        "temperature.slowdown",
        "degC",
        "nvmlDeviceGetTemperatureThreshold",
        lambda nvml, gpu: int(nvml.nvmlDeviceGetTemperatureThreshold(gpu, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)),
        "Temperature at which the hardware slows the GPU down.",
    )
    plain(
        "temperature.margin",
        "degC",
        "nvmlDeviceGetMarginTemperature",
        _number,
        "Distance to the nearest slowdown threshold; newer cards have this instead.",
    )
    add(
        "utilization.gpu",
        "%",
        "nvmlDeviceGetUtilizationRates",
        lambda nvml, gpu: int(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "Part of the time in which a kernel ran.",
    )
    add(
        "throttle.reasons",
        "names",
        "nvmlDeviceGetCurrentClocksEventReasons",
        _throttle,
        "Current throttle reasons, as short names.",
    )
    plain("pcie.generation", "gen", "nvmlDeviceGetCurrPcieLinkGeneration", _number, "PCIe generation now.")
    plain("pcie.width", "lanes", "nvmlDeviceGetCurrPcieLinkWidth", _number, "PCIe lanes now.")
    plain(
        "pcie.generation.max",
        "gen",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        _number,
        "Best generation of this card in this slot.",
    )
    plain("pcie.width.max", "lanes", "nvmlDeviceGetMaxPcieLinkWidth", _number, "Most lanes of this card in this slot.")
    plain("pcie.replays", "replays", "nvmlDeviceGetPcieReplayCounter", _number, "Packets resent over PCIe.")
    add("nvlink.up", "link -> bool", "nvmlDeviceGetNvLinkState", _links, "The card's NVLinks, and whether each is up.")
    add(
        "nvlink.ends",
        "link -> (kind, address)",
        "nvmlDeviceGetNvLinkRemoteDeviceType, nvmlDeviceGetNvLinkRemotePciInfo",
        _link_ends,
        "The other end of each NVLink that is up: gpu, switch or npu, and its PCI address.",
    )
    plain(
        "nvlink.version",
        "link -> version",
        "nvmlDeviceGetNvLinkVersion",
        lambda _: _link_versions,
        "Version of NVLink of each link that is up.",
    )
    add("nvlink.switch", "links", "nvmlDeviceGetFieldValues", _switch_links, "NVLinks that lead to an NVSwitch.")
    add(
        "nvlink.errors",
        "counter -> link -> count",
        "nvmlDeviceGetNvLinkErrorCounter, nvmlDeviceGetFieldValues",
        _link_errors,
        "Error counters of the NVLinks that are up, those that this generation has.",
    )
    add(
        "nvlink.bytes",
        "sent, received -> B",
        "nvmlDeviceGetFieldValues",
        _link_bytes,
        "Bytes over all of the GPU's NVLinks; they only grow.",
    )
    add(
        "fabric",
        "state, status, health",
        "nvmlDeviceGetGpuFabricInfoV",
        _fabric,
        "State, status and health of the GPU's registration with the Fabric Manager.",
    )
    add(
        "recovery.action",
        "number",
        "nvmlDeviceGetFieldValues",
        _recovery_action,
        "The action that the GPU needs: 0 is none, the others are nvmlDeviceGpuRecoveryAction_t.",
    )
    add(
        "mig.mode", "bool", "nvmlDeviceGetMigMode", lambda nvml, gpu: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]), "MIG on."
    )
    plain(
        "persistence.mode",
        "bool",
        "nvmlDeviceGetPersistenceMode",
        _switch,
        "The driver stays loaded while no process uses the GPU.",
    )
    return table


QUERIES: Mapping[str, Query] = MappingProxyType(_table())


def text(value: str | bytes) -> str:
    """Return NVML's text, which older nvidia-ml-py returns as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
