"""Are the network cards of all nodes present, connected, fast and alike, and can they reach GPU memory?"""

import pytest

from pytest_gpucluster.metrics.finding import require_nothing
from pytest_gpucluster.node.fabric.nccl_environment import effective
from pytest_gpucluster.node.fabric.port_exchange import ports_of_all
from pytest_gpucluster.node.fabric.ports import expects_infiniband


@pytest.mark.first(5)
@pytest.mark.criterion("fabric.ports")
def test_fabric_ports(board, cluster, fabric_sources, gpu, inventory, limits, measure, record_property, workload):
    """Accepted: each node has the number of active InfiniBand or RoCE ports that the limits demand, at their rate;
    ports, cards, firmware and link layer are the same on all nodes; on RoCE there is an address that NCCL can use; and
    a way to GPU memory, nvidia_peermem or DMA-BUF.

    Why: NCCL uses what it finds. A port without a link is one rail less, and without ports NCCL falls back to TCP: the
    job runs at a tenth of its speed.

    Where no fabric is expected, its ports are recorded only: on one node, in a rehearsal, and where the limits of the
    all-reduce expect another transport (``expect_transport``).

    When it fails: each finding names its host and port. The same port on several nodes points to the switch of that
    rail, nodes of one leaf switch to that switch. See docs/fabric.md.

    On cpu the host's ports are read, if there are any.
    """
    expected, why = expects_infiniband(
        limits,
        sku=gpu.sku,
        world_size=cluster.world_size,
        nnodes=cluster.nnodes,
        sizes=workload.all_reduce.sizes,
        on_cpu=not cluster.has_gpus,
    )
    settings = effective(fabric_sources.settings())
    ports = ports_of_all(board, fabric_sources, settings, inventory, cluster.rank, expected=expected)
    if ports is None:
        return
    record_property("fabric.expected", f"{'yes' if expected else 'no'}: {why}")
    record_property("fabric.ports", "; ".join(map(str, ports.mine.used)) or f"none: {ports.mine.adapters.why_not}")
    record_property("fabric.peer_memory", str(ports.mine.peer_memory))
    summary = ports.mine.summary()
    measure("fabric.active_ports", len(ports.mine.active), unit="ports", telemetry=summary, record_only=not expected)
    if expected or ports.anywhere:
        slowest = ports.mine.slowest_rate(cluster.local_world_size)
        measure("fabric.port_rate", slowest, unit="Gb/s", record_only=not expected)
    require_nothing(ports.findings)
