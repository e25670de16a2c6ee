"""What is read of a host is there on the one that runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

from fake_host import who

from pytest_gpucluster.files import mount_of, read_mounts
from pytest_gpucluster.metrics.finding import Identity
from pytest_gpucluster.node import host, kernel_log, pci
from pytest_gpucluster.node.health import counters
from pytest_gpucluster.node.host_checks import own_place
from pytest_gpucluster.node.pci import unlisted_gpus
from pytest_gpucluster.node.sysfs import PCI_DEVICES, Tree


def test_this_host_can_be_read(tmp_path: Path) -> None:
    facts, here, (total, free) = host.collect_node([who(0)], rank=0), own_place(), host.space(tmp_path)
    assert facts.own_cpus == here.cpus == os.sched_getaffinity(0)
    assert facts.cpus
    assert here.nodes
    assert host.read_memory(Tree()).total_bytes
    assert 0 <= free <= total
    assert host.read_process_limits(Tree())
    assert host.read_processors(Tree()).online
    proc = mount_of(Path("/proc"), read_mounts())
    assert proc is not None
    assert proc.kind == "proc"
    assert "/proc" in {mount.point for mount in Tree().mounts()}
    assert not Tree().has(PCI_DEVICES) or isinstance(unlisted_gpus(()), tuple)
    assert str(pci.read_peer_memory(Tree()))
    log = kernel_log.read()
    assert bool(log.why_not) != bool(log.source)
    taken = counters.read(counters.Sources(gpu=Identity(host="here"), of_node=True))
    assert ("infiniband" in taken.missing) != any(name.startswith("infiniband.") for name in taken.values)
