"""A GPU for tests of health: a healthy H100 with something planted, gathered by the product's own code."""

from __future__ import annotations

from dataclasses import dataclass

from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.metrics.finding import Finding
from pytest_gpucluster.node.health.checks import examine_gpu
from pytest_gpucluster.node.health.snapshot import HealthSnapshot, Sources, collect, readings, require_healthy
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.processes import Process

UUID, PCI = "GPU-5f2c", "00000000:3B:00.0"
NAMES = ("GPU 0", UUID, "1650123456789", PCI, "gpu-07")
"""What every finding on this GPU must name."""
PID = 4321
"""Of the one rank."""


def who(rank=0, **changes):
    """Return what a rank says of itself."""
    gpu = {
        "index": rank,
        "uuid": UUID if rank == 0 else f"GPU-{rank}",
        "pci_bus_id": PCI,
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 85_029_158_912,
        "serial": "1650123456789",
        "vbios": "96.00.74.00.01",
        "power_limit_watts": 700.0,
        "ecc": True,
        "mig": False,
    }
    me = {"rank": rank, "host": "gpu-07", "node_rank": 0, "local_rank": rank, "local_world_size": 1, "pid": PID + rank}
    return {**me, "gpu": {**gpu, **changes}}


def nvml(planted=None, without=(), **settings):
    """Return NVML with one healthy H100, some of whose values are planted, and some missing."""
    values = {**HEALTHY_H100, **(planted or {})}
    kept = {query: value for query, value in values.items() if query not in set(without)}
    return FakeNvml({UUID: kept}, pci={UUID: PCI}, **settings)


def sources(fake, *, log=None, unlisted=(), known_pids=True):
    """Return sources of a healthy GPU with these faults."""

    def bus(listed):
        if isinstance(unlisted, OSError):
            raise unlisted
        return unlisted

    return Sources(
        nvml=fake,
        kernel_log=lambda: log or KernelLog(source="dmesg"),
        unlisted=bus,
        find_process=lambda pid: Process(pid=pid, user="alice", command="python train.py", known=known_pids),
    )


@dataclass(frozen=True)
class Examined:
    """A snapshot with its findings."""

    snapshot: HealthSnapshot
    findings: tuple[Finding, ...]

    def of_kind(self, kind):
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def readings(self):
        return readings(self.snapshot)

    def require_healthy(self):
        require_healthy(self.snapshot, self.findings)


def look_twice(look):
    """A load that lets two looks be taken."""
    look()
    look()


def examined(
    planted=None,
    *,
    without=(),
    sku="H100 SXM",
    mig="off",
    load=look_twice,
    held_bytes=0,
    inventory=None,
    log=None,
    unlisted=(),
    known_pids=True,
    fake=None,
    **settings,
):
    """Gather a GPU's snapshot and apply every check."""
    fake = fake or nvml(planted, without, **settings)
    snapshot = collect(
        sources(fake, log=log, unlisted=unlisted, known_pids=known_pids),
        inventory or [who()],
        rank=0,
        sku=sku,
        mig=mig,
        load=load,
        held_bytes=held_bytes,
    )
    return Examined(snapshot, examine_gpu(snapshot))
