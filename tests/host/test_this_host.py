"""What is read of a host is there on the one that runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

from fake_host import who

from pytest_gpucluster import kernel_log, peer_memory
from pytest_gpucluster.affinity import own_place
from pytest_gpucluster.counters import snapshot, sources
from pytest_gpucluster.files import mount_of, read_mounts
from pytest_gpucluster.host import facts, memory, process_limits, processors
from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.inventory import start_time
from pytest_gpucluster.metrics.finding import Identity
from pytest_gpucluster.pci_bus import DEVICES, unlisted


def test_this_host_can_be_read(tmp_path: Path) -> None:
    gathered, here, (total, free) = facts.gather([who(0)], rank=0), own_place(), memory.space(tmp_path)
    assert gathered.own_cpus == here.cpus == os.sched_getaffinity(0)
    assert gathered.cpus
    assert here.nodes
    assert memory.read(Tree()).total_bytes
    assert 0 <= free <= total
    assert process_limits.read(Tree())
    assert processors.read(Tree()).online
    assert start_time()
    proc = mount_of(Path("/proc"), read_mounts())
    assert proc is not None
    assert proc.kind == "proc"
    assert "/proc" in {mount.point for mount in Tree().mounts()}
    assert not DEVICES.is_dir() or isinstance(unlisted(()), tuple)
    assert str(peer_memory.read())
    log = kernel_log.read()
    assert bool(log.why_not) != bool(log.source)
    taken = snapshot.take(sources.Sources(gpu=Identity(host="here"), of_node=True))
    assert ("infiniband" in taken.missing) != any(name.startswith("infiniband.") for name in taken.values)
