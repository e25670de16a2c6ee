"""The GPUs of a simulated node: what its processes share of each, and NVML's value of every query.

A rank moves its GPU on; the node's sampler and NVML of any process read it. It is a file of numbers that all of them
map.

Values are those of an H100 with driver 580 (``tests/data/selftest``), with the NVLinks of the SKU's data sheet.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from pytest_gpucluster.metrics.datasheets import SKUS, Promise
from pytest_gpucluster.node.health import sampler_process
from pytest_gpucluster.node.nvml import NotAvailable, NvmlGpu
from pytest_gpucluster.node.nvml_queries import NVLINK5_COUNTERS, NVLINK_COUNTERS, QUERIES
from pytest_gpucluster.simulation.cluster import Cluster

FAULT_AFTER_SECONDS = 1.0
"""Simulated seconds of load until a fault appears that appears under load."""
HOT_RATIO = 0.6
"""What is left of the clocks, and of the rates, of a GPU that is too hot. Source: an A100 at 85 C."""
POWER_EXPONENT = 0.46
"""Of clocks and rates over the power limit. Source: an H100 held at 500 of 700 W gave 585 of 682 TFLOPS in bf16."""
CONTEXT_BYTES = 500_000_000
"""Device memory of a CUDA context. derived: an H100 showed 0.5 GB for a process that had only made one."""
RESERVED_BYTES = 503_316_480
STALE_BYTES = 20_000_000_000
STALE_PID = 3_900_000
"""And the number of the GPU: the process that an earlier job has left behind."""
IDLE_CLOCK_MHZ, VIDEO_MARGIN_CELSIUS = 345, 2
CLUSTER_FILE = "cluster.pickle"
"""In the folder of a simulated run: the cluster, for processes that know only this folder."""
_LINK_VERSIONS = {"8": "3.1", "9": "4.0", "10": "5.0", "12": "5.0"}
"""Major compute capability -> version of its NVLinks."""
_LOST = {
    "xid79": "the GPU is lost: it has fallen off the bus or is inaccessible",
    "xid119": "the GPU requires a reset before it can be used again",
}
_SWITCH = ("switch", "00000000:00:00.0")
"""The other end of a link: the driver gives a switch's address as zeros."""


_LOADED_SECONDS = 1.0
"""How long a GPU counts as loaded after its last work, in real time: the host works in between."""


class Machine(ctypes.Structure):
    """The numbers of one GPU. :meth:`of` maps them.

    Attributes:
        host, index: where it is.
        now: simulated seconds since the run began, as this GPU's rank sees them.
        busy_seconds: for how many of them it has worked.
        worked_at: when it last did, by this machine's monotonic clock.
        load: how much of its full power that took, from 0 to 1.
        group_bytes: memory of NCCL's communicators.
        pid: the process of its rank; 0 before there is one.
    """

    _fields_ = (
        *((name, ctypes.c_double) for name in ("now", "busy_seconds", "worked_at", "load")),
        *((name, ctypes.c_int64) for name in ("group_bytes", "pid")),
    )
    host: str
    index: int
    now: float
    busy_seconds: float
    worked_at: float
    load: float
    group_bytes: int
    pid: int

    @classmethod
    def of(cls, folder: Path, host: str, index: int) -> Machine:
        """Return a GPU of a host, whose numbers are in the folder of the simulated run."""
        path = folder / host / f"gpu-{index}"
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(number, ctypes.sizeof(cls))
        found = cls.from_buffer(mmap.mmap(number, ctypes.sizeof(cls)))
        os.close(number)
        found.host, found.index = host, index
        return found

    @property
    def is_loaded(self) -> bool:
        """Whether it works, or has until a moment ago."""
        return 0 < time.monotonic() - self.worked_at < _LOADED_SECONDS

    def work(self, seconds: float, load: float = 1.0) -> None:
        """Let it work for simulated seconds, at this part of its full power."""
        self.load, self.worked_at = load, time.monotonic()
        self.busy_seconds += seconds
        self.now += seconds

    def take(self, pid: int) -> None:
        """Make it the GPU of a rank, from a new beginning."""
        ctypes.memset(ctypes.addressof(self), 0, ctypes.sizeof(self))
        self.pid = pid


@dataclass(frozen=True)
class SimulatedGpu:
    """One GPU, as NVML and CUDA show it.

    Args:
        cluster: its description, with the faults.
        machine: its numbers.
    """

    cluster: Cluster
    machine: Machine

    def has(self, fault: str) -> bool:
        """Return whether the GPU, or its host, has a fault."""
        return self.cluster.faults.amount(fault, self.machine.host, self.machine.index) is not None

    def shows(self, fault: str) -> bool:
        """Return whether it has a fault that has appeared by now, under load."""
        return self.has(fault) and self.machine.busy_seconds >= FAULT_AFTER_SECONDS

    @property
    def is_hot(self) -> bool:
        """Whether it has been under load for longer than the fault takes, and slows down."""
        after = self.cluster.faults.amount("throttle", self.machine.host, self.machine.index)
        return after is not None and self.machine.is_loaded and self.machine.busy_seconds > after

    @property
    def power_limit_watts(self) -> float:
        """The enforced power limit."""
        own = self.cluster.gpu.power_limit_watts
        return min(own, self.cluster.faults.amount("power-cap", self.machine.host) or own)

    @cached_property
    def uuid(self) -> str:
        """Its UUID as NVML writes it, the same in every run of this cluster."""
        digits = self._digest("uuid")
        return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"

    @property
    def address(self) -> str:
        """Its PCI address, as the kernel writes it."""
        return gpu_address(self.machine.index)

    def lost(self) -> str:
        """Return NVML's reason where the GPU does not answer any more; else ""."""
        return next((why for fault, why in _LOST.items() if self.shows(fault)), "")

    def values(self) -> dict[str, Any]:
        """Return query -> value, of now; a query that this kind of GPU does not support is left out."""
        gpu, promise = self.cluster.gpu, SKUS[self.cluster.sku].promise
        assert promise is not None  # a description names a SKU that has one
        uncorrected = 2 * self.shows("ecc") + self.shows("xid94")
        width, generation = 16, promise.pcie_generation or 5
        return {
            "serial": str(1_650_000_000_000 + int(self._digest("serial")[:8], 16)),
            "vbios": "96.00.30.00.01" if self.has("vbios") else gpu.vbios,
            "board.part_number": gpu.board,
            "inforom": gpu.inforom,
            "gsp.firmware": self.cluster.node.driver,
            **self._memory(),
            "ecc.mode": True,
            "ecc.uncorrected.volatile": uncorrected,
            "ecc.uncorrected.aggregate": uncorrected,
            "ecc.corrected.volatile": 7 * self.shows("ecc-corrected"),
            "rows.remapped.corrected": 0,
            "rows.remapped.uncorrected": int(self.has("row-remapped")),
            "rows.pending": self.shows("xid94"),
            "rows.failed": self.shows("row-remap"),
            **self._load(),
            "pcie.generation": generation,
            "pcie.width": width // 2 if self.has("pcie") else width,
            "pcie.generation.max": generation,
            "pcie.width.max": width,
            "pcie.replays": 0,
            **self._links(promise),
            "recovery.action": 4 * self.shows("xid94") + self.shows("nvlink5-fatal"),
            "mig.mode": self.has("mig"),
            "persistence.mode": True,
        }

    def _memory(self) -> dict[str, Any]:
        machine, total = self.machine, self.cluster.gpu.memory_bytes
        processes = [(STALE_PID + machine.index, STALE_BYTES)] if self.has("stale-process") else []
        if machine.pid:
            processes.insert(0, (machine.pid, machine.group_bytes + CONTEXT_BYTES))
        used = min(sum(amount for _, amount in processes), total - RESERVED_BYTES)
        return {
            "memory.total": total,
            "memory.reserved": RESERVED_BYTES,
            "memory.used": used,
            "memory.free": total - RESERVED_BYTES - used,
            "processes": tuple(sorted(processes)),
        }

    def _load(self) -> dict[str, Any]:
        gpu, is_loaded, limit = self.cluster.gpu, self.machine.is_loaded, self.power_limit_watts
        warmer = int(self._digest("temperature"), 16) % 4
        temperature = (gpu.load_temperature_celsius if is_loaded else gpu.idle_temperature_celsius) + warmer
        reasons: tuple[str, ...] = () if is_loaded else ("gpu_idle",)
        drawn = gpu.idle_power_watts + self.machine.load * (gpu.load_power_watts - gpu.idle_power_watts)
        if is_loaded and drawn > 0.97 * limit:
            reasons = ("sw_power_cap",)
        if self.is_hot:
            reasons = (*reasons, "hw_slowdown", "sw_thermal", "hw_thermal")
            temperature = gpu.slowdown_temperature_celsius - 1
        power = gpu.idle_power_watts + warmer
        if is_loaded:
            power = min(drawn, 0.99 * limit) * (HOT_RATIO if self.is_hot else 1)
        ratio = (HOT_RATIO if self.is_hot else 1) * (limit / gpu.power_limit_watts) ** POWER_EXPONENT
        return {
            "clock.sm": round(gpu.sm_clock_mhz * ratio) if is_loaded else IDLE_CLOCK_MHZ,
            "clock.sm.max": gpu.sm_clock_mhz,
            "clock.memory": gpu.memory_clock_mhz,
            "clock.memory.max": gpu.memory_clock_mhz,
            "power.draw": round(power, 1),
            "power.limit": limit,
            "power.limit.default": gpu.power_limit_watts,
            "temperature.gpu": temperature,
            "temperature.slowdown": gpu.slowdown_temperature_celsius,
            "temperature.margin": gpu.slowdown_temperature_celsius - VIDEO_MARGIN_CELSIUS - temperature,
            "utilization.gpu": 100 if is_loaded else 0,
            "throttle.reasons": reasons,
        }

    def _links(self, promise: Promise) -> dict[str, Any]:
        links = range(promise.nvlinks or 0)
        down = {1} if self.has("nvlink-down") or self.shows("nvlink5-fatal") else set()
        up = [link for link in links if link not in down]
        major = self.cluster.gpu.capability.partition(".")[0]
        counters = NVLINK5_COUNTERS if int(major) >= 10 else NVLINK_COUNTERS
        state = "completed" if promise.fabric_state else "not supported"
        return {
            "nvlink.up": {link: link in up for link in links},
            "nvlink.ends": dict.fromkeys(up, _SWITCH),
            "nvlink.version": dict.fromkeys(up, _LINK_VERSIONS[major]),
            "nvlink.switch": len(up) if promise.nvswitch else 0,
            "nvlink.errors": {counter: dict.fromkeys(up, 0) for counter in counters},
            "fabric": {"state": state, "status": "success", "health": ()},
        }

    def _digest(self, what: str) -> str:
        text = f"{self.cluster.name}/{self.machine.host}/{self.machine.index}/{what}"
        return hashlib.sha256(text.encode()).hexdigest()


def gpu_address(index: int) -> str:
    """Return the PCI address of a node's GPU by its number.

    >>> gpu_address(3)
    '0000:23:00.0'
    """
    return f"0000:{0x20 + index:02x}:00.0"


class SimulatedNvml:
    """The NVML of a simulated host.

    Args:
        gpus: of the host.
        on_fall: called with a GPU that has fallen off the bus, before NVML is asked for its GPUs.
    """

    def __init__(
        self, gpus: Sequence[SimulatedGpu], on_fall: Callable[[SimulatedGpu], None] = lambda gpu: None
    ) -> None:
        self._gpus, self._on_fall = tuple(gpus), on_fall
        self._by_uuid: Mapping[str, SimulatedGpu] = {gpu.uuid: gpu for gpu in gpus}
        self._values: dict[str, tuple[bytes, Mapping[str, Any]]] = {}
        """UUID -> the GPU's numbers, and what it shows with these."""

    def driver_version(self) -> str:
        """Return the described one."""
        return self._gpus[0].cluster.node.driver

    def cuda_version(self) -> str:
        """Return the described one."""
        return self._gpus[0].cluster.node.cuda

    def gpus(self) -> tuple[NvmlGpu | None, ...]:
        """List the GPUs of the host."""
        return tuple(map(self._identify, self._gpus))

    def find(self, uuid: str) -> NvmlGpu | None:
        """Look a GPU up."""
        return self._identify(self._by_uuid[uuid]) if uuid in self._by_uuid else None

    def read(self, uuid: str, query: str) -> Any:
        """Read one query."""
        QUERIES[query]  # a KeyError where there is none
        gpu = self._by_uuid.get(uuid)
        if gpu is None or gpu.lost():
            raise NotAvailable(f"{gpu.lost() if gpu else _LOST['xid79']} ({query})", "lost")
        # All numbers, and whether it works: what it shows is the same while these are.
        state = bytes(gpu.machine) + bytes([gpu.machine.is_loaded])
        if self._values.get(uuid, (b"", {}))[0] != state:
            self._values[uuid] = state, gpu.values()
        values = self._values[uuid][1]
        if query not in values:
            raise NotAvailable(f"not supported by this GPU or driver ({query})")
        return values[query]

    def _identify(self, gpu: SimulatedGpu) -> NvmlGpu | None:
        if gpu.shows("xid79"):
            self._on_fall(gpu)
            return None
        pci = f"0000{gpu.address}".upper()
        return NvmlGpu(index=gpu.machine.index, uuid=gpu.uuid, pci_bus_id=pci, name=gpu.cluster.gpu.name)


def gpus_of(cluster: Cluster, host: str, folder: Path) -> tuple[SimulatedGpu, ...]:
    """Return the GPUs of a host of a simulated run, whose folder this is."""
    return tuple(SimulatedGpu(cluster, Machine.of(folder, host, index)) for index in range(cluster.gpus_per_node))


def main() -> NoReturn:
    """Run as the sampler process of a host: FOLDER HOST, and then as the real one."""
    folder, host = Path(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    cluster = pickle.loads((folder / CLUSTER_FILE).read_bytes())
    sampler_process.main(lambda: SimulatedNvml(gpus_of(cluster, host, folder)))


if __name__ == "__main__":
    main()
