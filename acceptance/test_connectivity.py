"""Do the nodes reach each other, know each other by name, and agree on the time?"""

import os

import pytest

from pytest_gpucluster.node import name_resolution
from pytest_gpucluster.node.fabric import nccl_environment
from pytest_gpucluster.node.interfaces import Nodes, choose
from pytest_gpucluster.node.name_resolution import all_questions, look_up, require_known
from pytest_gpucluster.node.network import connect_all, longest_seconds, skew_of_nodes

SETUP_SECONDS = 60.0


@pytest.fixture
def environ(cluster):
    """The environment as NCCL sees it: its configuration files included."""
    environment = {**os.environ, **nccl_environment.effective(nccl_environment.read_environment(os.environ))}
    if cluster.nnodes == 1:  # its ranks have met there, and need not know the name
        environment["MASTER_ADDR"] = "127.0.0.1"
    return environment


@pytest.fixture
def nodes(cluster, inventory):
    """The nodes, and for each the rank that represents it."""
    return Nodes.of(inventory, cluster.node_rank)


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give the nodes the time that connections and lookups may take."""
    config, count = workload.connectivity, cluster.nnodes
    seconds = SETUP_SECONDS + longest_seconds(count, config.deadline_seconds)
    seconds += name_resolution.longest_seconds(2 * count, config.lookup_seconds)
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.mark.first(6)
@pytest.mark.criterion("connectivity")
def test_connectivity(board, cluster, environ, measure, nodes, workload):
    """Accepted: every node reaches every other node, and itself, over plain TCP, on the interface that NCCL will use
    for its own connections; small and large payloads pass. The ranks' store answers.

    Why: where a firewall or a wrong interface lies between two nodes, the first collective hangs, and no message says
    why. So this runs before all tests that communicate, without NCCL.

    When it fails: the message names both ends of each pair that is not connected, with address, interface and why that
    one. Compare NCCL_SOCKET_IFNAME with `ip -br addr` on these hosts. "Connection refused" is a host that answers: look
    at its firewall. A timeout is a lost packet: look at the network between. "A few bytes pass, and many do
    not": the MTUs differ.

    On cpu it is the interface that gloo will use.
    """
    if nodes.representative != cluster.rank:
        return
    config = workload.connectivity
    reached = connect_all(
        board,
        nodes,
        lambda: choose(cluster.backend, environ),
        payload_bytes=config.payload_bytes,
        deadline_seconds=config.deadline_seconds,
    )
    if cluster.rank == 0:
        print("\n".join(f"{reached.hosts[node]}: {where}" for node, where in reached.addresses.items()))
        measure("connectivity.nodes", reached.whole_nodes, unit="nodes", record_only=True, of=cluster.nnodes)
        measure("connectivity.pairs", 100 * reached.reached_ratio, unit="%", nodes=cluster.nnodes)
    measure("connectivity.rendezvous", board.round_trip_seconds(), unit="s")
    if nodes.me in reached.slowest:
        measure("connectivity.connect", reached.slowest[nodes.me], unit="s")
    reached.require_whole(nodes.me)


@pytest.mark.needs_nodes(2)
@pytest.mark.criterion("dns")
def test_dns(board, cluster, environ, measure, nodes, workload):
    """Accepted: from every node the name of every node has an address, and each lookup of a name or of an address is
    answered in time. An address without a name is noted.

    Why: the store through which ranks meet looks up the name of each address that connects. Where such lookups wait for
    a server that does not answer, the start of a job on many nodes takes minutes, and looks like a hang.

    When it fails: the output lists every slow lookup with the node that made it. Look at /etc/resolv.conf there, and at
    the reverse zone of the named addresses; or list all nodes in /etc/hosts on every node.

    In Kubernetes pods have names for each other only behind a headless service: there, an unknown name is noted.
    """
    if nodes.representative != cluster.rank:
        return
    config = workload.connectivity
    questions = all_questions(
        board, nodes, lambda: choose(cluster.backend, environ), deadline_seconds=config.deadline_seconds
    )
    answers = look_up(questions, deadline_seconds=config.lookup_seconds)
    for kind in ("forward", "reverse"):
        of_kind = [answer for answer in answers if answer.question.kind == kind]
        measure(f"dns.{kind}", max(answer.seconds for answer in of_kind), unit="s", lookups=len(of_kind))
    require_known(answers, nodes.hosts, me=nodes.me, in_pods="KUBERNETES_SERVICE_HOST" in os.environ)


@pytest.mark.needs_nodes(2)
@pytest.mark.criterion("clock_skew")
def test_clock_skew(board, cluster, environ, measure, nodes, workload):
    """Accepted: the clocks of all nodes agree.

    Why: where clocks differ, the logs of two nodes cannot be ordered, files seem to be from the future, and tickets and
    certificates are refused. Slurm refuses its own messages where clocks differ by minutes.

    Each node asks the first one for its time several times, and takes the fastest answer. The uncertainty, half of the
    round trip, counts as skew. Each node's clock is compared with the median of the others; of two nodes both are
    named, since either may be wrong.

    When it fails: look at `chronyc tracking` or `timedatectl` on the named node.
    """
    if nodes.representative != cluster.rank:
        return
    config = workload.connectivity
    series = skew_of_nodes(
        board,
        nodes,
        lambda: choose(cluster.backend, environ),
        samples=config.clock_samples,
        deadline_seconds=config.deadline_seconds,
    )
    measure("clock.skew", series, unit="s")
