"""What a sweep runs, and what it cannot be asked for."""

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.runners.plan import SweepPlan, parse_per_node
from pytest_gpucluster.runners.sweep import require_nodes


def plan(expect="8xH100 SXM"):
    return SweepPlan(
        nodes=("a", "b"),
        per_node=parse_per_node(expect),
        pytest_arguments=("acceptance/", "-k", "a b"),
        node_seconds=1.0,
        joint_seconds=2.0,
        at_once=3,
        min_nodes=2,
        python="/py",
        port=7,
    )


def test_the_same_suite_runs_alone_and_together_each_with_its_own_expectation():
    suite = ["-m", "pytest", "acceptance/", "-k", "a b"]
    alone = ["--standalone", "--nproc-per-node=8", *suite, "--gpucluster-expect=1x8xH100 SXM"]
    assert plan().arguments(1, "a") == alone
    together = ["--nnodes=3", "--master-addr=a", "--master-port=7", "--nproc-per-node=8", *suite]
    assert plan().arguments(3, "a") == [*together, "--gpucluster-expect=3x8xH100 SXM"]
    assert plan("4").arguments(1, "a")[-1] == "--gpucluster-expect=1x4"
    assert (plan().world_size(3), plan().seconds(1), plan().seconds(3)) == (24, 1.0, 2.0)


def test_nodes_have_names_that_files_and_shells_take():
    for nodes in ([], ["a", "a"], ["a/b"], ["../x"], ["-a"], ["a b"], ["a$(x)"], [""]):
        with pytest.raises(OptionError):
            require_nodes(nodes)
    require_nodes(["gpu-001", "ip-10-0-0-1.ec2.internal", "A_1"])
