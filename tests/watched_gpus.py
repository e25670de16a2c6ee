"""Real sessions on cpu whose ranks believe in GPUs that are not there: the node's sampler runs, counters are taken.

In this process :func:`pretend` patches what asks the hardware. In a process of its own a session does it by the
``conftest.py`` of :func:`conftest`, which calls the same.
"""

import json
from pathlib import Path

import fake_sampler
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.node import inventory
from pytest_gpucluster.node.health import monitor, telemetry
from pytest_gpucluster.node.health.counters import Sources
from pytest_gpucluster.node.infiniband import Adapters
from pytest_gpucluster.node.kernel_log import KernelLog

NAME = "NVIDIA H100 80GB HBM3"
QUIET = KernelLog(lines=("NVRM: loading",), source="dmesg")
NO_PORTS = Adapters(why_not="no InfiniBand here")
SAMPLED = {
    "clock.sm": 1755,
    "clock.sm.max": 1980,
    "clock.memory": 2619,
    "power.draw": 698.25,
    "temperature.gpu": 67,
    "temperature.slowdown": 89,
    "utilization.gpu": 99,
    "throttle.reasons": ["sw_power_cap"],
}
"""What the sampler reads of a GPU that is well and at its power limit."""


def uuid_of(rank):
    """Return the GPU of a rank."""
    return f"GPU-{rank:08x}"


def pci_of(rank):
    """Return its address, as NVML writes it."""
    return f"00000000:{0x1B + rank:02X}:00.0"


def pretend(patch, folder, *, sampled=None, counted=({},), kernel_logs=(QUIET,)):
    """Give every rank the GPU of its number on its node.

    Args:
        patch: such as ``monkeypatch.setattr``.
        folder: for what the sampler process reads.
        sampled: GPU -> what the sampler reads; None: a GPU that is well, for each of 8 ranks.
        counted: what differs from a healthy H100, each time counters are taken; the last one stays.
        kernel_logs: likewise, on the first rank of a node.
    """
    planted = {uuid_of(rank): SAMPLED for rank in range(8)} if sampled is None else sampled
    real_identify = inventory.identify

    def identify(facts, device, **more):
        number = facts.local_rank
        gpu = {"index": number, "uuid": uuid_of(number), "pci_bus_id": pci_of(number), "name": NAME, "serial": "165"}
        return {**real_identify(facts, "cpu", **more), "gpu": gpu, "visible_gpus": facts.local_world_size}

    def sources_of(node, rank):
        uuid = next(who for who in node if who["rank"] == rank)["gpu"]["uuid"]
        logs = iter(kernel_logs)
        nvml = _Turning(uuid, counted)
        return Sources.of(
            node, rank=rank, nvml=nvml, kernel_log=lambda: next(logs, kernel_logs[-1]), adapters=lambda: NO_PORTS
        )

    patch(inventory, "identify", identify)
    patch(telemetry, "COMMAND", fake_sampler.command(folder, planted))
    patch(telemetry, "ANSWER_SECONDS", 30.0)  # a busy machine is no sampler that hangs
    patch(monitor, "sources_of", sources_of)


class _Turning(FakeNvml):
    """An H100 whose counters are others each time they are taken. ``ecc.uncorrected.volatile`` is asked first."""

    def __init__(self, uuid, counted):
        super().__init__({uuid: HEALTHY_H100})
        self._counted = list(counted)

    def read(self, uuid, query):
        if query == "ecc.uncorrected.volatile":
            changed = self._counted.pop(0) if len(self._counted) > 1 else self._counted[0]
            self.planted[uuid] = {**HEALTHY_H100, **changed}
        return super().read(uuid, query)


def conftest(**settings):
    """Return a conftest.py for a suite in a process of its own. ``settings`` are of :func:`pretend`, plain ones."""
    here = str(Path(__file__).parent)
    return (
        "import json, sys, tempfile\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {here!r})\n"
        "import watched_gpus\n"
        f"watched_gpus.pretend(setattr, Path(tempfile.mkdtemp()), **json.loads({json.dumps(json.dumps(settings))}))\n"
    )
