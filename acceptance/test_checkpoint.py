"""Does a training resume from a checkpoint with the same results, and how fast is the checkpoint's file system?"""

from statistics import median

import pytest

from pytest_gpucluster.benchmarks.storage.bandwidth import storage_bandwidth
from pytest_gpucluster.benchmarks.storage.resume import check_resume
from pytest_gpucluster.benchmarks.training.model import Geometry

SETUP_SECONDS = 300.0  # without the time for files
SLOWEST_BYTES_PER_SECOND = 10e6  # of a rank; the test does not wait for a slower file system


@pytest.fixture
def scratch(settings, artifacts):
    """The folder that all ranks share: of --gpucluster-scratch, else the test's own."""
    return settings.scratch or artifacts


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give the files the time that a slow file system needs."""
    sizes = workload.checkpoint
    seconds = SETUP_SECONDS + 2 * sizes.passes * sizes.file_bytes / SLOWEST_BYTES_PER_SECOND
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.mark.training
@pytest.mark.criterion("checkpoint")
def test_checkpoint(cluster, workload, scratch, measure):
    """Accepted: a sharded training saved by torch.distributed.checkpoint resumes with the same losses, bit by bit; on
    half of the ranks, or with DistributedDataParallel, too, except for the order of sums. Model and optimizer are those
    that were saved, to the last bit. A copy with a truncated or a missing shard is refused, and the file is named. An
    interrupted save leaves the checkpoint before it unchanged.

    Why: a job on many GPUs will be interrupted. What it resumes from must be what was saved, or the work of days is
    lost without a message.

    When it fails: the message names the file: look at the file system that it lies on, and at the hosts that write to
    it. A wrong state with right files: the versions of torch, then the named rank's GPU. A folder that other hosts do
    not see: pass one on a shared file system by ``--gpucluster-scratch``.

    On one rank there are no fewer ranks to go on with.
    """
    world = cluster.world_size
    fewer = next((size for size in range(world // 2, 0, -1) if world % size == 0), None)
    same, replicated, on_fewer = check_resume(
        cluster.group,
        cluster.device,
        Geometry.of(workload.fsdp),
        scratch,
        fewer=cluster.subgroups(fewer) if fewer else None,
        batch=workload.fsdp.batch,
        steps=workload.checkpoint.steps,
    )
    labels = {"steps": workload.checkpoint.steps}
    measure("checkpoint.resume_error", same, unit="ratio", ranks=world, **labels)
    measure("checkpoint.reshard_error", replicated, unit="ratio", ranks=world, sharded="no", **labels)
    if on_fewer is not None:
        measure("checkpoint.reshard_error", on_fewer, unit="ratio", ranks=fewer, sharded="yes", **labels)


@pytest.mark.training
@pytest.mark.criterion("checkpoint.bandwidth")
def test_checkpoint_bandwidth(cluster, workload, scratch, progress, measure):
    """Accepted: all ranks at once write a file to the shared file system, read that of another rank, and find in it
    every byte as it was written. Where the site has set limits for its storage, they reach them.

    Why: the GPUs wait while a checkpoint is written. The slowest rank decides, since all wait for it.

    The time to write includes that until the data are on stable storage (fsync). A rank reads what was written on
    another host, past its own page cache. The labels say how: ``O_DIRECT`` keeps the cache out; with
    ``posix_fadvise``, where the file system has no O_DIRECT, the kernel is asked to drop what it has. On one host
    the reader's cache is the writer's, so only O_DIRECT measures the storage there.

    When it fails: look at the label ``file_system`` first: ``tmpfs`` or ``overlay`` is no shared file system, so pass
    one by ``--gpucluster-scratch``. Then measure fewer ranks: a rate per rank that rises means that the servers or
    their network are the limit, and one that stays means that the client is.
    """
    sizes = workload.checkpoint
    result = storage_bandwidth(
        cluster.group,
        scratch,
        hosts=cluster.hosts,
        file_bytes=sizes.file_bytes,
        passes=sizes.passes,
        progress=progress,
    )
    labels = {
        "world_size": cluster.world_size,
        "nnodes": cluster.nnodes,
        "file_bytes": sizes.file_bytes,
        "file_system": result.file_system,
    }
    measure("checkpoint.verified", result.verified_ratio, unit="ratio", **labels)
    written, read = result.written_bytes_per_second, result.read_bytes_per_second
    measure("checkpoint.write_bandwidth", median(written), unit="B/s", samples=written, **labels)
    measure(
        "checkpoint.read_bandwidth",
        median(read),
        unit="B/s",
        samples=read,
        past_the_cache=result.past_the_cache,
        other_host="yes" if result.other_host else "no",
        **labels,
    )
