"""The command of each node is one that it understands."""

import subprocess

import pytest
from programs import require_program

from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.cli import main
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.runners.hosts import parse_hosts
from pytest_gpucluster.runners.plan import SshPlan, forwarded_environment, parse_per_node, require_unreserved
from pytest_gpucluster.runners.ssh import Access, ssh_command
from pytest_gpucluster.runners.torchrun import command_line

HOSTS = parse_hosts("gpu-1 address=10.0.0.1\ngpu-2\n", "hosts")
EIGHT = Expectation.parse("1x8xH100")


def plan(**more):
    given = {"hosts": HOSTS, "per_node": None, "ranks": None, "arguments": ("acceptance/", "-k", "a b")}
    given |= {"access": Access(python="python", report_dir="out"), "run_id": "r1", "master": "10.0.0.1", "port": 20001}
    return SshPlan(**{**given, **more})


def test_each_node_gets_its_own_rank_and_folder_and_the_same_rendezvous():
    words = [plan(per_node=EIGHT, hosts=HOSTS[:1] + parse_hosts("gpu-2", "h")).node_command(rank) for rank in (0, 1)]
    assert words[1] == [
        *("run", "--node-rank=1", "--nnodes=2", "--master-addr=10.0.0.1", "--master-port=20001", "--nproc-per-node=8"),
        *("--", "acceptance/", "-k", "a b", "--gpucluster-expect=2x8xH100"),
        *("--gpucluster-report-dir=out/r1/gpu-2", "--junitxml=out/r1/gpu-2/report.xml"),
    ]
    assert [a for a, b in zip(*words, strict=True) if a != b] == [
        *("--node-rank=0", "--gpucluster-report-dir=out/r1/gpu-1", "--junitxml=out/r1/gpu-1/report.xml")
    ]


def test_ranks_are_those_of_the_option_else_of_the_node():
    assert "--nproc-per-node=2" in plan(ranks=2).node_command(0)
    assert not [word for word in plan().node_command(0) if word.startswith(("--nproc-per-node", "--gpucluster-expect"))]


def test_the_command_is_understood_by_the_cli_and_by_torchrun():
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    for hosts in (HOSTS, HOSTS[:1]):
        options = main.parse(plan(per_node=EIGHT, hosts=hosts).node_command(len(hosts) - 1))
        line = command_line(options.for_torchrun, options.forwarded, {})
        parsed = parser.parse_args(line)
        assert (parsed.standalone, parsed.nproc_per_node, parsed.training_script) == (len(hosts) == 1, "8", "pytest")
        assert parsed.training_script_args[:3] == ["acceptance/", "-k", "a b"]
        if len(hosts) > 1:
            assert (parsed.nnodes, parsed.node_rank, parsed.rdzv_backend) == ("2", 1, "static")
            assert (parsed.master_addr, parsed.master_port) == ("10.0.0.1", 20001)


def test_what_a_node_has_begins_with_its_gpus():
    for text in ("", "H100", "0", "8x", "8 GPUs", "2x8xH100", "-1"):
        with pytest.raises(OptionError, match="8xH100"):
            parse_per_node(text)


def test_reserved_arguments_of_pytest_are_refused():
    reserved = ("--junitxml", "--junit-xml=x", "--gpucluster-report-dir", "--gpucluster-expect=2x8")
    for word in (*reserved, "-n", "-n8", "-nauto", "-nlogical"):
        with pytest.raises(OptionError, match=word):
            require_unreserved(["acceptance/", word])
    require_unreserved(["acceptance/", "-k", "not n", "--gpucluster-profile=quick", "-no", "-m", "single_gpu"])


def test_settings_of_the_suite_are_forwarded_and_what_could_matter_is_named():
    environ = {"GPUCLUSTER_THRESHOLDS": "my limits.yaml", "PYTEST_ADDOPTS": "-q", "GPUCLUSTER_HOSTNAME": "here"}
    environ |= {"GPUCLUSTER_EXPECT": "9x9", "NCCL_DEBUG": "INFO", "UCX_TLS": "tcp", "HOME": "/root", "EMPTY": ""}
    given, left = forwarded_environment(environ, ["UCX_TLS", "A=b=c", "EMPTY"])
    kept = {"GPUCLUSTER_THRESHOLDS": "my limits.yaml", "PYTEST_ADDOPTS": "-q", "UCX_TLS": "tcp"}
    assert given == {**kept, "A": "b=c", "EMPTY": ""}
    assert left == ["NCCL_DEBUG"]


def test_a_variable_that_cannot_be_forwarded_is_refused():
    for asked in ("1A=b", "", "=x", "GONE", "GPUCLUSTER_HOSTNAME=a", "GPUCLUSTER_EXPECT=1x8", "a b=c"):
        with pytest.raises(OptionError, match="--env"):
            forwarded_environment({}, [asked])


def test_ssh_itself_understands_its_options():
    ssh = require_program("ssh")
    [host] = parse_hosts("admin@gpu-1 address=10.0.0.1 port=2222", "hosts")
    command = ssh_command(
        host,
        Access(python="/opt/my env/python", options=("-oProxyJump=bastion", "-F/dev/null", "-oServerAliveInterval=7")),
    )
    # -G prints the set_to that result, and does not connect.
    done = subprocess.run([ssh, "-G", *command[1:]], capture_output=True, text=True, timeout=30, check=True)
    value = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    assert (value["hostname"], value["port"], value["user"], value["proxyjump"]) == (
        "10.0.0.1",
        "2222",
        "admin",
        "bastion",
    )
    assert (value["batchmode"], value["connecttimeout"], value["requesttty"]) == ("yes", "10", "false")
    assert (value["serveraliveinterval"], value["serveralivecountmax"]) == ("7", "4")  # the operator's comes first
    assert (value["forwardagent"], value["forwardx11"], value["clearallforwardings"]) == ("no", "no", "yes")
    assert done.stderr == ""
