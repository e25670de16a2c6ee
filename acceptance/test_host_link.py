"""How fast are copies between each GPU and its host?"""

import pytest

from pytest_gpucluster.benchmarks.host_link import longest_seconds, measure_host_link
from pytest_gpucluster.benchmarks.host_link_concurrent import measure_host_links_concurrently
from pytest_gpucluster.node.host_checks import place_of_gpu, require_local

SETUP_SECONDS = 120.0  # allocating, pinning and filling the memory
FASTEST_GB_PER_SECOND = 63.0  # PCIe gen5 x16, where no data sheet says more
TURNS = 16  # GPUs of a node, at most, that are copied to one after the other; without a launcher the number is unknown


@pytest.fixture(autouse=True)
def deadline(request, cluster, gpu, workload):
    """Give the copies the time that they may take, and what it takes to compare each of them."""
    ranks = max(TURNS, cluster.local_world_size)
    fastest = (gpu.peaks and gpu.peaks.host_gb_per_second) or FASTEST_GB_PER_SECOND
    longest = longest_seconds(workload.host_link.sampling, ranks=ranks, gb_per_second=fastest)
    seconds = SETUP_SECONDS + longest
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.fixture
def hold(cluster, gpu, inventory, workload, telemetry, measure):
    """Measure in one of the two ways, and record telemetry with the rates."""

    def measured_by(benchmark, *arguments):
        sizes = workload.host_link
        place, window = place_of_gpu(gpu.pci_bus_id), telemetry()
        result = benchmark(
            *arguments,
            payload_bytes=sizes.size_bytes,
            copies=sizes.copies,
            sampling=sizes.sampling,
            cpus=place.cpus if place else None,
            during=window,
        )
        context = {**window.summary(), "memory": result.memory}
        for direction in result.directions:
            metric, rate = f"host_link.{direction}.bandwidth", result.bytes_per_second
            measure(metric, rate, unit="B/s", telemetry=context, mode=result.mode, size=result.size)
        require_local(inventory[cluster.rank], result.nodes, place)

    return measured_by


@pytest.mark.single_gpu
@pytest.mark.criterion("host_link")
@pytest.mark.parametrize("way", ["h2d", "d2h", "both"])
def test_host_link(way, cluster, hold):
    """Accepted: copies from pinned host memory to each GPU, and back, reach the limit's rate, and every copy is
    correct. "both" is both directions at once, by the bytes of each. GPUs of a node take turns.

    Why: batches, offloaded weights and checkpoints use this link. One with half its lanes, or a generation behind,
    shows in no other criterion, and slows the whole job down at each step.

    When it fails: on one GPU look at the PCIe generation and width, which ``test_gpu_health`` checks under load; then
    at the slot, the riser, and errors (``nvidia-smi -q``, part PCI). On all GPUs:
    an IOMMU (``test_host_limits``), slow memory, a CPU governor, or a limit meant for another host. Wrong data: take
    the GPU out of service. An error about memory: there was not enough of it on the GPU's NUMA node.

    Host memory is allocated on the GPU's NUMA node. On cpu both sides are host memory.
    """
    hold(measure_host_link, cluster.device, way)


@pytest.mark.needs_local_ranks(2)
@pytest.mark.criterion("host_link")
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_host_links_together(direction, cluster, inventory, hold):
    """Accepted: the same while all GPUs of a node copy at once; all nodes do so at the same time, each for itself.

    Why: GPUs share the uplinks of PCIe switches, and the memory of their CPU. In training they all load at once.

    When it fails: and ``test_host_link`` passes, look at what the GPUs share: memory channels that are not all filled,
    NUMA settings of the BIOS (one node for each socket), ranks bound to one socket (``test_affinity``). One GPU
    below the others, by pairs: they are on one PCIe switch.

    The bytes of each GPU count, over the time until the last one has ended.
    """
    group = cluster.node_group([who["node_rank"] for who in inventory])
    hold(measure_host_links_concurrently, group, cluster.device, direction)
