"""Runs over a real ssh: two nodes are two sshd on this host, each with an address and a name of its own.

One real run each for what no program in ssh's place can show: that ranks meet and reports come, that everything ends
with Ctrl-C, and that it ends where a connection is cut.
"""

import json
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from programs import require_program
from sessions import Process, environment
from ssh_nodes import ssh_nodes

from pytest_gpucluster.journal import journal
from pytest_gpucluster.runners.node_agent import descendants

pytestmark = pytest.mark.extended

SUITE = """\
import time
import pytest

@pytest.mark.needs_ranks(2)
def test_sum(cluster):
    assert cluster.all_gather_object(cluster.rank) == [0, 1]

def test_alone(cluster):
    assert cluster.hostname != "node-2" or cluster.nnodes > 1, "a bad node"

def test_slow(cluster):
    open(f"begun-{cluster.rank}", "w").close()
    time.sleep(120)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    require_program("ssh")
    sshd = require_program("sshd")
    folder = tmp_path_factory.mktemp("ssh-nodes")
    names = ("node-1", "node-2", "node-3", "node-deaf")
    with ssh_nodes(folder, sshd, names, forced={"node-deaf": "sleep 600"}) as started:
        yield started


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "my suite"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\ngpucluster = true\naddopts = -p no:hypothesispytest\n")
    (folder / "test_it.py").write_text(SUITE)
    return folder


def start(nodes, folder, what, *words, only="node-[1-2]"):
    """Start a command over the nodes, or over all that the hosts file has by now."""
    hosts = folder / "hosts"
    if not hosts.exists():
        nodes.hosts(hosts)
    command = [sys.executable, "-m", "pytest_gpucluster", *what.split(), str(hosts), nodes.option]
    command += [f"--nodes={only}"] if only else []
    return Process([*command, "--node-report-dir=on the node", *words], folder, environment())


def run(nodes, folder, name):
    """Start one test of the suite on two nodes with a rank each."""
    return start(nodes, folder, "run --hosts", "--nproc-per-node=1", "--", ".", "-k", name, "--gpucluster-device=cpu")


def end_of(process):
    with process:
        return process.wait()


def left_on(nodes):
    """What is still running on the nodes, after a moment: connections end a little later than what they carried."""
    until = time.monotonic() + 30
    while True:
        found = [pid for node in nodes.nodes.values() for pid in descendants(node.process.pid)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def await_files(process, folder, pattern="begun-*"):
    until = time.monotonic() + 100
    while len(list(folder.glob(pattern))) < 2:
        assert process.popen.poll() is None, process.output
        assert time.monotonic() < until, process.output
        time.sleep(0.05)


@pytest.mark.smoke
def test_two_nodes_run_together_and_their_reports_come(nodes, suite):
    left = end_of(run(nodes, suite, "sum"))
    assert left.exit == 0, left.output
    assert left.stderr.splitlines()[-1].startswith("REHEARSAL, REHEARSED, exit code 0: 1 passed")
    assert "collected 3 items" in left.stdout
    folder = suite / "gpucluster-ssh" / "latest"
    record = journal.read(journal.locate(folder / "node-1"))
    assert (record.run.nnodes, record.run.world_size, record.verdict) == (2, 2, "REHEARSED")
    for name in ("report.html", "results.json", "metrics.prom", "report.md", "node-1/report.xml", "node-2/output.log"):
        assert (folder / name).stat().st_size, name
    results = json.loads((folder / "results.json").read_text())
    assert sorted({rank["host"] for rank in results["cluster"]["ranks"]}) == ["node-1", "node-2"]
    assert [node["exit"] for node in json.loads((folder / "ssh.json").read_text())["nodes"]] == [0, 0]
    assert left_on(nodes) == []


@pytest.mark.parametrize("cut", [False, True], ids=["Ctrl-C", "a connection is cut"])
def test_what_ends_a_run_ends_it_on_all_nodes_and_reports_come(nodes, suite, cut):
    with run(nodes, suite, "slow") as process:
        await_files(process, suite)
        if cut:
            assert nodes.nodes["node-2"].cut()
        else:
            process.popen.send_signal(signal.SIGINT)
        left = process.wait()
    code = 11 if cut else 2
    assert left.exit == code, left.output
    last_line = left.stderr.splitlines()[-1]
    assert f"BROKEN, exit code {code}: {'node-2: ' if cut else 'interrupted (SIGINT)'}" in last_line
    record = journal.read(journal.locate(suite / "gpucluster-ssh" / "latest" / "node-1"))
    assert (record.verdict, "node-2" in record.reason) == ("BROKEN", cut)
    assert left_on(nodes) == []


def test_nothing_runs_on_when_the_command_itself_is_killed(nodes, suite):
    with run(nodes, suite, "slow") as process:
        # Started on both nodes; what is started there need not have come far.
        await_files(process, suite / "on the node", "*/node-*/output.log")
        process.popen.kill()
        process.popen.wait()
        assert left_on(nodes) == []


def test_a_check_reports_what_is_wrong_with_each_node(nodes, suite):
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # no process listens there
        nodes.hosts(
            suite / "hosts",
            f"node-mute address=127.0.0.1 port={mute.getsockname()[1]}",
            f"node-down address=127.0.0.1 port={refusing.getsockname()[1]}",
        )
        words = ("--check", "--connect-within=3 s")
        left = end_of(start(nodes, suite, "run --hosts", *words, only="node-[1-2],node-mute,node-down"))
    assert left.exit == 12, left.output
    lines = left.stdout.splitlines()
    states = {line.split()[0]: line for line in lines if line.startswith("node-")}
    assert [states[name].split()[1] for name in ("node-1", "node-2")] == ["ready"] * 2
    for name, why in (("node-mute", "timed out"), ("node-down", "Connection refused")):
        assert states[name].split()[1:3] == ["no", "answer"]
        assert why in lines[lines.index(states[name]) + 1]
    assert lines[-1].endswith(": node-mute, node-down")
    # It takes the connection, and says nothing.
    with start(
        nodes, suite, "run --hosts", "--check", "--connect-within=2 s", "--answer-within=1 s", only="node-deaf"
    ) as process:
        left = process.wait()
    assert (left.exit, " 3 s" in left.stdout) == (12, True), left.output
    assert left_on(nodes) == []


def test_an_obstacle_is_reported_with_a_remedy(nodes, suite):
    for words, message in (
        (["--python=/no/such/python"], "--python"),
        (["--ssh=-oIdentityFile=/dev/null", "--ssh=-oIdentitiesOnly=yes", "--ssh=-F/dev/null"], "known_hosts"),
        (["--directory=/no/such folder"], "/no/such folder: "),
        (["--python=/usr/bin/env python3 -S"], "--python"),
    ):
        left = end_of(start(nodes, suite, "run --hosts", *words, "--check", only="node-1"))
        assert left.exit in (11, 12), left.output
        assert message in left.stdout


def test_a_sweep_leaves_out_what_fails_alone_and_runs_the_others_together(nodes, suite):
    words = ("--expect=1", "--", ".", "-k", "alone", "--gpucluster-device=cpu")
    left = end_of(start(nodes, suite, "sweep ssh", *words, only="node-[1-3]"))
    assert left.exit == 1, left.output
    folder = suite / "gpucluster-sweep" / "latest"
    summary = json.loads((folder / "sweep.json").read_text())
    assert {each["node"]: each["verdict"] for each in summary["alone"]} == {
        "node-1": "REHEARSED",
        "node-2": "REJECTED",
        "node-3": "REHEARSED",
    }
    assert summary["together"]["verdict"] == "REHEARSED"
    assert "[slurm]\nnode-2\n" in (folder / "exclude.txt").read_text()
    assert (folder / "nodes" / "node-2" / "report.xml").is_file()
    joint = journal.read(Path(summary["together"]["journal"]))
    assert (joint.run.nnodes, joint.run.world_size) == (2, 2)
    assert left_on(nodes) == []
