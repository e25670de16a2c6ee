"""Does the node let its ranks do what a job needs?"""

import dataclasses

import pytest

from pytest_gpucluster.metrics.finding import require_nothing
from pytest_gpucluster.node.host import collect_node
from pytest_gpucluster.node.host_checks import examine_host, readings


@pytest.mark.first(2)
@pytest.mark.single_gpu
@pytest.mark.criterion("host.limits")
def test_host_limits(cluster, inventory, workload, measure):
    """Accepted: open files, locked memory, /dev/shm, CPUs and tasks are enough for the ranks of each node, and no
    setting of the host slows the GPUs down: CPU frequency governor, IOMMU, PCIe switches that redirect.

    Why: such limits end a job after hours, or at the first collective over the network, with a message that names
    none of them; and such settings cost a part of every step. In a container its own limits count.

    When it fails: each figure comes with what was found and how to raise it. An error is about a setting, and states
    how to change it, or how to accept it (``--gpucluster-workload host.governor=any``). docs/discovery.md
    lists them all.

    One rank of each node checks. On cpu the settings are only noted, and the limits are very low.
    """
    if cluster.local_rank != 0:
        return
    facts = collect_node(inventory, rank=cluster.rank)
    findings = examine_host(facts, dataclasses.asdict(workload.host))
    for reading in readings(facts):
        print(reading)
        context = {"found": reading.found, "for more": reading.remedy}
        measure(reading.metric, reading.value, unit=reading.unit, telemetry=context)
    require_nothing(findings)
