"""What counts faults on a node, before and after a test, and what its changes mean.

    before = counters.take(sources)
    ...
    found = counters.changes(before, counters.take(sources))
    found.require_no_fault()

A rank answers for its own GPU (NVML); the first rank of a node also for what is the node's: Xids in the kernel log and
InfiniBand ports. Nothing here communicates or decides about a test.
"""

from pytest_gpucluster.counters.growth import Changes, changes
from pytest_gpucluster.counters.snapshot import Counters, take
from pytest_gpucluster.counters.sources import Sources

__all__ = ["Changes", "Counters", "Sources", "changes", "take"]
