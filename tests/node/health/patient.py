"""A GPU for tests of health: a healthy H100 with something planted, gathered by the product's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.metrics.finding import Finding
from pytest_gpucluster.node.health.checks import examine_gpu
from pytest_gpucluster.node.health.snapshot import HealthSnapshot, Reading, Sources, collect, readings, require_healthy
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.pci import PciGpu
from pytest_gpucluster.node.processes import Process

UUID, PCI = "GPU-5f2c", "00000000:3B:00.0"
NAMES = ("GPU 0", UUID, "1650123456789", PCI, "gpu-07")
"""What every finding on this GPU must name."""
PID = 4321
"""Of the one rank."""


def who(rank: int = 0, **changes: Any) -> dict[str, Any]:
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


def nvml(planted: Mapping[str, Any] | None = None, without: Iterable[str] = (), **settings: Any) -> FakeNvml:
    """Return NVML with one healthy H100, some of whose values are planted, and some missing."""
    values = {**HEALTHY_H100, **(planted or {})}
    kept = {query: value for query, value in values.items() if query not in set(without)}
    return FakeNvml({UUID: kept}, pci={UUID: PCI}, **settings)


def sources(
    fake: FakeNvml,
    *,
    log: KernelLog | None = None,
    unlisted: tuple[PciGpu, ...] | OSError = (),
    known_pids: bool = True,
) -> Sources:
    """Return sources of a healthy GPU with these faults."""

    def bus(listed: Iterable[str]) -> tuple[PciGpu, ...]:
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

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def readings(self) -> Iterator[Reading]:
        return readings(self.snapshot)

    def require_healthy(self) -> None:
        require_healthy(self.snapshot, self.findings)


def look_twice(look: Callable[[], None]) -> None:
    """A load that lets two looks be taken."""
    look()
    look()


def examined(
    planted: Mapping[str, Any] | None = None,
    *,
    without: Iterable[str] = (),
    sku: str | None = "H100 SXM",
    mig: str = "off",
    load: Callable[[Callable[[], None]], object] = look_twice,
    held_bytes: int = 0,
    inventory: list[dict[str, Any]] | None = None,
    log: KernelLog | None = None,
    unlisted: tuple[PciGpu, ...] | OSError = (),
    known_pids: bool = True,
    fake: FakeNvml | None = None,
    **settings: Any,
) -> Examined:
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
