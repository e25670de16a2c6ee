"""Is every GPU healthy: does it compute correctly, is anything missing, and are all of them alike?"""

from functools import partial

import pytest

from pytest_gpucluster.benchmarks.burn_in import keep_busy
from pytest_gpucluster.benchmarks.dtypes import check_product, dtypes_of
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.metrics.finding import identity
from pytest_gpucluster.node.health.checks import examine_gpu
from pytest_gpucluster.node.health.snapshot import collect, readings, require_healthy, require_uniform


@pytest.mark.first(3)
@pytest.mark.single_gpu
@pytest.mark.criterion("gpu.compute")
def test_gpu_computes(cluster, inventory, workload, measure):
    """Accepted: every GPU multiplies small matrices in each dtype, and every bit of the products is right.

    Why: a GPU that is listed may still not work, and one that computes wrongly spoils a model without a trace. The
    answers are exact integers, computed on the CPU too.

    When it fails: take the named GPU out of service and run the vendor's diagnostics (``dcgmi diag -r 3``). If a dtype
    is missing on all GPUs, look at the versions of driver and torch.

    On cpu the CPU multiplies, without fp8.
    """
    where = next(str(identity(who)) for who in inventory if who["rank"] == cluster.rank)
    usable = dtypes_of(cluster.device)
    for dtype in usable:
        check_product(cluster.device, dtype, n=workload.health.product_size, where=where)
    measure("gpu.usable_dtypes", len(usable), unit="dtypes")


@pytest.mark.first(3)
@pytest.mark.single_gpu
@pytest.mark.needs_gpu
@pytest.mark.criterion("gpu.health")
def test_gpu_health(cluster, gpu, gpu_sources, inventory, workload, measure):
    """Accepted: driver, kernel log and PCI bus report no fault of any GPU.

    Looked at: memory as promised and 95 % of it free apart from this job's ranks; ECC on and no uncorrected errors; no
    pending or failed row remap; no thermal or hardware slowdown; temperature below the card's own slowdown limit; power
    limit not below the default; PCIe generation and width; NVLinks up and without errors; the Fabric Manager's state
    where there is an NVSwitch; no Xid or SXid that demands action, and no recovery action that NVML asks
    for; MIG as declared; no GPU that has left the bus. What is meaningful only under load is read under load.

    Why: such faults slow a job down at every step or kill it after hours, and no benchmark names the GPU.

    When it fails: each finding names the GPU (index, UUID, serial number, PCI address) and what to do. A failure is a
    fault of the hardware. An error means that it could not be judged, or that another process uses the GPU.
    """
    health = workload.health
    load = partial(keep_busy, cluster.device, seconds=health.load_seconds)
    held = accelerator(cluster.device).reserved_bytes()
    snapshot = collect(
        gpu_sources, inventory, rank=cluster.rank, sku=gpu.sku, mig=health.mig, load=load, held_bytes=held
    )
    findings = examine_gpu(snapshot)
    notes = [str(one) for one in findings if one.kind == "note"]
    hardware = sum(one.kind == "hardware" for one in findings)
    measure("gpu.findings", hardware, unit="findings", telemetry={"notes": notes})
    for reading in readings(snapshot):
        measure(reading.metric, reading.value, unit=reading.unit, record_only=reading.record_only)
    require_healthy(snapshot, findings)


@pytest.mark.first(3)
@pytest.mark.needs_gpu
@pytest.mark.needs_ranks(2)
@pytest.mark.criterion("gpu.fleet")
def test_fleet_is_uniform(inventory, measure):
    """Accepted: all GPUs have the same VBIOS, memory size, power limit, ECC and MIG mode.

    Why: the slowest GPU sets the pace of all. One with older firmware or a lower power limit passes every criterion
    that looks at it alone, and still slows all down.

    When it fails: bring the named ranks' hosts to the firmware and settings of the others.
    """
    measure("inventory.ranks", len(inventory), unit="ranks", record_only=True)
    require_uniform(inventory)
