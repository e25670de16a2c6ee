"""NVML for tests: GPUs whose every query has a planted value, or an exception in its place."""

from collections.abc import Callable

from pytest_gpucluster.node.nvml import NotAvailable, NvmlGpu
from pytest_gpucluster.node.nvml_queries import QUERIES


class FakeNvml:
    """GPUs by UUID -> query -> value, an exception to raise, or a callable that gives one or the other.

    A query without a planted value is not supported, as on a card that lacks it. GPUs are numbered as they come.
    """

    def __init__(self, gpus, *, name="NVIDIA H100 80GB HBM3", driver="580.65.06", pci=None, count=None, silent=()):
        """``silent``: UUIDs that are counted and do not answer, as a lost GPU."""
        self.planted = {uuid: dict(values) for uuid, values in gpus.items()}
        for values in self.planted.values():
            assert set(values) <= set(QUERIES), f"no such query: {sorted(set(values) - set(QUERIES))}"
        self.name, self.driver, self.silent = name, driver, set(silent)
        self.pci = dict(pci or {uuid: f"00000000:{0x1B + 0x10 * i:02X}:00.0" for i, uuid in enumerate(self.planted)})
        self._count = count

    def driver_version(self):
        return self.driver

    def gpus(self):
        found = tuple(map(self.find, self.planted))
        return (*found, *[None] * ((self._count or 0) - len(found)))

    def find(self, uuid):
        if uuid not in self.planted or uuid in self.silent:
            return None
        return NvmlGpu(index=list(self.planted).index(uuid), uuid=uuid, pci_bus_id=self.pci[uuid], name=self.name)

    def read(self, uuid, query):
        if uuid not in self.planted or uuid in self.silent:
            raise NotAvailable("the GPU is lost: it has fallen off the bus or is inaccessible", "lost")
        if query not in self.planted[uuid]:
            raise NotAvailable(f"not supported by this GPU or driver ({query})")
        value = self.planted[uuid][query]
        if isinstance(value, Callable):
            value = value()
        if isinstance(value, BaseException):
            raise value
        return value


HEALTHY_H100 = {
    "serial": "1650123456789",
    "vbios": "96.00.74.00.01",
    "board.part_number": "900-2G520-0000-000",
    "inforom": "G520.0200.00.05",
    "gsp.firmware": "580.65.06",
    "memory.total": 85_520_809_984,
    "memory.free": 84_400_000_000,
    "memory.used": 520_000_000,
    "memory.reserved": 600_000_000,
    "processes": (),
    "ecc.mode": True,
    "ecc.uncorrected.volatile": 0,
    "ecc.uncorrected.aggregate": 0,
    "ecc.corrected.volatile": 0,
    "rows.remapped.corrected": 0,
    "rows.remapped.uncorrected": 0,
    "rows.pending": False,
    "rows.failed": False,
    "clock.sm": 1755,
    "clock.sm.max": 1980,
    "clock.memory": 2619,
    "clock.memory.max": 2619,
    "power.draw": 690.0,
    "power.limit": 700.0,
    "power.limit.default": 700.0,
    "temperature.gpu": 61,
    "temperature.slowdown": 89,
    "temperature.margin": 26,
    "utilization.gpu": 100,
    "throttle.reasons": (),
    "pcie.generation": 5,
    "pcie.width": 16,
    "pcie.generation.max": 5,
    "pcie.width.max": 16,
    "pcie.replays": 0,
    "nvlink.up": dict.fromkeys(range(18), True),
    "nvlink.ends": dict.fromkeys(range(18), ("switch", "00000000:00:00.0")),
    "nvlink.version": dict.fromkeys(range(18), "4.0"),
    "nvlink.switch": 18,
    "nvlink.errors": {name: dict.fromkeys(range(18), 0) for name in ("replay", "recovery", "crc_flit")},
    "fabric": {"state": "completed", "status": "success", "health": ()},
    "recovery.action": 0,
    "mig.mode": False,
    "persistence.mode": True,
}
"""What an H100 SXM says that nothing is wrong with. It has no retired pages."""
