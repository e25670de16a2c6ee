"""The GPUs of a node, through NVML: what is asked, and a child process that asks it.

A driver that hangs holds up whoever asks it, for ever and deaf to signals. So a child asks, writes a line for each
thing that it has learned, and is left behind when it is late: what it has told until then is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node_info.program import Answer, ask
from pytest_gpucluster.nvml import NotAvailable, Nvml
from pytest_gpucluster.process_table import Who, who_is

ANSWER_SECONDS = 30.0
"""Several times what a sleeping driver needs to wake up eight GPUs, where persistence mode is off."""
_CHILD = (sys.executable, "-m", "pytest_gpucluster.node_info.gpu_reader")

QUERIES = {
    "serial": "serial",
    "board_part_number": "board.part_number",
    "vbios": "vbios",
    "inforom": "inforom",
    "gsp_firmware": "gsp.firmware",
    "memory_total_bytes": "memory.total",
    "memory_used_bytes": "memory.used",
    "sm_clock_mhz": "clock.sm",
    "sm_clock_max_mhz": "clock.sm.max",
    "memory_clock_mhz": "clock.memory",
    "memory_clock_max_mhz": "clock.memory.max",
    "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "power_limit_default_watts": "power.limit.default",
    "temperature_celsius": "temperature.gpu",
    "utilization_percent": "utilization.gpu",
    "throttle": "throttle.reasons",
    "ecc": "ecc.mode",
    "ecc_uncorrected": "ecc.uncorrected.volatile",
    "ecc_uncorrected_of_life": "ecc.uncorrected.aggregate",
    "rows_remap_pending": "rows.pending",
    "rows_remap_failed": "rows.failed",
    "mig": "mig.mode",
    "persistence": "persistence.mode",
    "pcie_generation": "pcie.generation",
    "pcie_generation_max": "pcie.generation.max",
    "pcie_width": "pcie.width",
    "pcie_width_max": "pcie.width.max",
    "nvlink_up": "nvlink.up",
    "nvlink_version": "nvlink.version",
    "nvlink_ends": "nvlink.ends",
    "fabric": "fabric",
    "processes": "processes",
}
"""Key of a GPU -> NVML query. What each is in is in its name, or is NVML's own word."""


def tell(open_nvml: Callable[[], Nvml], write: Callable[[dict[str, Any]], None]) -> None:
    """In the child: ask all there is to ask, and write each answer at once."""
    try:
        nvml = open_nvml()
        write({"driver": nvml.driver_version(), "count": nvml.count()})
        write({"asking": "which GPUs there are"})
        listed = nvml.listed()
    except EnvironmentBroken as error:
        write({"why_not": str(error)})
        return
    for gpu in listed:
        identity = {"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid, "pci": gpu.pci_bus_id}
        write({"gpu": identity})
        for key, query in QUERIES.items():
            write({"asking": f"{query} of GPU {gpu.index}"})
            try:
                write({"of": gpu.uuid, "key": key, "value": nvml.read(gpu.uuid, query)})
            except NotAvailable as error:
                write({"of": gpu.uuid, "key": key, "why_not": str(error)})
    for number, gpu in enumerate(listed):
        for other in listed[number + 1 :]:
            write({"asking": f"the way from GPU {gpu.index} to GPU {other.index}"})
            try:
                write({"from": gpu.uuid, "to": other.uuid, "common": nvml.between(gpu.uuid, other.uuid)})
            except NotAvailable as error:
                write({"from": gpu.uuid, "to": other.uuid, "why_not": str(error)})
    write({"done": True})


def ask_child(command: Sequence[str] = _CHILD, seconds: float = ANSWER_SECONDS) -> Answer:
    """Let a child ask, and return what it has written by the deadline."""
    return ask(command, seconds, environ=detached_process.child_environment())


def read(answer: Answer, who: Callable[[int], Who] = who_is) -> dict[str, Any]:
    """Put the child's lines together.

    Returns:
        ``why_not``: why nothing, or not all, is known; "" where all was told. ``driver``: its version. ``count``: GPUs
        that this process may use, also those that do not answer. ``gpus``: each with ``index``, ``name``, ``uuid``,
        ``pci``, a key for each of ``QUERIES``, and ``not_available``, why a key is null. ``ways``: ``from``, ``to`` and
        ``common``, the nearest thing that two GPUs have in common.
    """
    told: dict[str, Any] = {"why_not": "", "driver": None, "count": None, "gpus": [], "ways": []}
    gpus: dict[str, dict[str, Any]] = {}
    asking, is_done = "whether NVML is there", False
    for line in answer.text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # the last line of a child that was killed while it wrote
        if "asking" in said:
            asking = said["asking"]
        elif "done" in said:
            is_done = True
        elif "gpu" in said:
            gpus[said["gpu"]["uuid"]] = {**said["gpu"], **dict.fromkeys(QUERIES), "not_available": {}}
        elif "of" in said:
            _take(gpus[said["of"]], said, who)
        elif "from" in said:
            told["ways"].append({"common": None, **said})
        else:
            told |= said
            is_done = is_done or "why_not" in said
    if not is_done:
        why = answer.why_not or "the child that asks NVML has ended early"
        told["why_not"] = f"{why}; it was asking for {asking}" if answer.text else why
        for gpu in gpus.values():
            rest = {key: "not asked: NVML does not answer" for key in QUERIES if gpu[key] is None}
            gpu["not_available"] = {**rest, **gpu["not_available"]}
    told["gpus"] = list(gpus.values())
    return told


def _take(gpu: dict[str, Any], said: dict[str, Any], who: Callable[[int], Who]) -> None:
    key = said["key"]
    if "why_not" in said:
        gpu["not_available"][key] = said["why_not"]
    elif key == "processes":
        gpu[key] = [{"pid": pid, "memory_bytes": used, **_named(who(pid))} for pid, used in said["value"]]
    else:
        gpu[key] = said["value"]


def _named(process: Who) -> dict[str, Any]:
    return {"user": process.user or None, "command": process.command or None}
