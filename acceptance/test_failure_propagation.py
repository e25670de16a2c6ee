"""Does a job end, and name the rank, when one of its ranks dies in training?"""

import pytest

from pytest_gpucluster.benchmarks.training.failure_propagation import check_propagation
from pytest_gpucluster.benchmarks.training.model import Geometry

SETUP_SECONDS = 60.0  # killing a job that hangs, and freeing its memory


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give the jobs the time that they may take, one after the other."""
    config = workload.failure_propagation
    seconds = len(config.deaths) * (config.start_seconds + config.end_seconds + SETUP_SECONDS)
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.mark.training
@pytest.mark.needs_local_ranks(2)
@pytest.mark.criterion("failure_propagation")
def test_failure_propagation(cluster, inventory, workload, artifacts, measure):
    """Accepted: on every node, a small training of which one rank dies ends within the limit. Its launcher's exit code
    is not 0 and its output names the rank and its exit code, and no process is left. The rank exits, raises an
    exception, or is killed.

    Why: the other ranks wait for the dead one in their all-reduce. If they are not ended, the job keeps all its GPUs
    until an operator looks; if its exit code is 0, or no rank is named, the next job gets the same GPU. The
    training is a job of its own, which the first rank of each node starts by torchrun, so that it does not end this
    suite. It has torch's own settings for NCCL, and not those that this suite sets for its ranks.

    When it fails: the job's output lies in the test's folder. Processes in state D hang in the driver: look at the
    kernel log. Processes in state S or R do not react to the end: look at what has changed NCCL's or torchrun's
    settings (TORCH_NCCL_*, TORCHELASTIC_*), and for a handler of SIGTERM. A job that does not begin: GPUs in compute
    mode EXCLUSIVE_PROCESS take no second process (``nvidia-smi -c DEFAULT``).

    On cpu this rehearses with gloo.
    """
    if cluster.local_rank != 0:
        return  # one job a node: its ranks take the GPUs of all ranks here
    here = [who for who in inventory if who["node_rank"] == cluster.node_rank]
    model, config = workload.training, workload.failure_propagation
    for how in config.deaths:
        seconds = check_propagation(
            cluster.device,
            Geometry.of(model),
            ranks=len(here),
            how=how,
            batch=model.batch,
            steps=config.steps,
            # The nodes may share the folder.
            folder=artifacts / f"node-{cluster.node_rank}-{how}",
            start_seconds=config.start_seconds,
            end_seconds=config.end_seconds,
            visible=[who["gpu"]["uuid"] for who in here if who["gpu"]],
        )
        measure("failure_propagation.seconds", seconds, unit="s", death=how, ranks=len(here))
