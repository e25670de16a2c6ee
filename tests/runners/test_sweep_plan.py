"""What a sweep runs, and what it cannot be asked for."""

from __future__ import annotations

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.runners.plan import SweepPlan, parse_per_node, report_arguments, require_unreserved
from pytest_gpucluster.runners.sweep import require_nodes


def plan(expect="8xH100 SXM"):
    return SweepPlan(
        nodes=("a", "b"),
        per_node=parse_per_node(expect),
        pytest_arguments=("acceptance/", "-k", "a b"),
        node_seconds=1.0,
        joint_seconds=1.0,
        at_once=3,
        min_nodes=2,
        python="/py",
        port=7,
    )


def test_the_same_suite_runs_alone_and_together_each_with_its_own_expectation():
    run, suite = ["/py", "-m", "torch.distributed.run"], ["-m", "pytest", "acceptance/", "-k", "a b"]
    alone = [*run, "--standalone", "--nproc-per-node=8", *suite, "--gpucluster-expect=1x8xH100 SXM"]
    assert plan().node_command() == alone
    together = [*run, "--nnodes=3", "--nproc-per-node=8", "--master-addr=a", "--master-port=7", *suite]
    assert plan().joint_command(3, "a") == [*together, "--gpucluster-expect=3x8xH100 SXM"]
    assert plan("4").node_command()[-1] == "--gpucluster-expect=1x4"
    assert plan().world_size(3) == 24


def test_torchrun_understands_the_commands():
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    found = parser.parse_args([*plan().node_command()[3:], *report_arguments("d", "x.xml")])
    assert (found.standalone, found.nproc_per_node, found.module, found.training_script) == (True, "8", True, "pytest")
    found = parser.parse_args(["--node-rank=2", *plan().joint_command(3, "a")[3:]])
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == ("3", 2, "a", 7)
    assert found.rdzv_backend == "static"
    assert found.training_script_args[:3] == ["acceptance/", "-k", "a b"]


def test_what_a_node_has_begins_with_its_gpus():
    for text in ("", "H100", "0", "8x", "8 GPUs", "2x8xH100", "-1"):
        with pytest.raises(OptionError, match="8xH100"):
            parse_per_node(text)


def test_what_the_sweep_sets_is_not_pytests():
    for argument in ("--junitxml", "--junit-xml=x", "--gpucluster-report-dir=x", "-n", "-n4", "-nauto"):
        with pytest.raises(OptionError, match=argument):
            require_unreserved(["acceptance/", argument])
    require_unreserved(["acceptance/", "-k", "not n", "--gpucluster-device=cpu", "-m", "single_gpu", "--no-header"])


def test_nodes_have_names_that_files_and_shells_take():
    for nodes in ([], ["a", "a"], ["a/b"], ["../x"], ["-a"], ["a b"], ["a$(x)"], [""]):
        with pytest.raises(OptionError):
            require_nodes(nodes)
    require_nodes(["gpu-001", "ip-10-0-0-1.ec2.internal", "A_1"])
