"""Which nodes reach which, and how far apart their clocks are."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from complaints import in_order
from each import of_each
from torch.distributed import HashStore

from pytest_gpucluster.agreement.store import Board
from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics import sampling
from pytest_gpucluster.node import network
from pytest_gpucluster.node.interfaces import Chosen, Nodes
from pytest_gpucluster.node.network import (
    _HEAD,
    MAX_BYTES,
    Caller,
    Offset,
    Reachability,
    connect_all,
    offset,
    receive,
    respond,
    skew,
    skew_of_nodes,
)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 2048], ids=["nothing", "a byte", "512 KiB"])
def test_what_was_sent_comes_back(payload):
    with (
        respond("127.0.0.1", deadline_seconds=5) as service,
        Caller(**service, deadline_seconds=5) as caller,
    ):
        caller.echo(payload)
        caller.echo(b"and again")


def test_the_times_are_of_the_other_host_s_clock(monkeypatch):
    times = iter((100.0, 100.5))
    monkeypatch.setattr(network, "NOW", lambda: next(times))
    with respond("127.0.0.1", deadline_seconds=5) as service, Caller(**service, deadline_seconds=5) as caller:
        assert caller.echo() == (100.0, 100.5)


@pytest.mark.parametrize("token", ["0" * 16, "Ü" * 8], ids=["another token", "other bytes"])
def test_who_does_not_know_the_token_gets_no_answer(token):
    with (
        respond("127.0.0.1", deadline_seconds=5) as service,
        Caller("127.0.0.1", service["port"], token, deadline_seconds=5) as caller,
        pytest.raises(ConnectionError, match="another program"),
    ):
        caller.echo(b"x")


def test_a_length_beyond_reason_gets_no_answer():
    with (
        respond("127.0.0.1", deadline_seconds=5) as service,
        socket.create_connection(("127.0.0.1", service["port"]), timeout=5) as connection,
    ):
        connection.sendall(_HEAD.pack(service["token"].encode(), MAX_BYTES + 1))
        with pytest.raises(EOFError):
            receive(connection, 1)


def answering(answer):
    """Start something that answers these bytes to whatever comes, and return its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server, server.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(answer)
            connection.recv(1000)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def test_other_bytes_than_were_sent_are_noticed():
    with (
        Caller("127.0.0.1", answering(bytes(16) + b"abd"), "x" * 16, deadline_seconds=5) as caller,
        pytest.raises(ConnectionError, match="3 bytes"),
    ):
        caller.echo(b"abc")


def test_silence_ends_at_the_deadline_and_a_port_without_a_listener_is_refused():
    with Caller("127.0.0.1", answering(b""), "x" * 16, deadline_seconds=0.1) as caller, pytest.raises(TimeoutError):
        caller.echo(b"abc")
    with respond("127.0.0.1", deadline_seconds=5) as service:
        port = service["port"]
    with pytest.raises(ConnectionRefusedError):
        Caller("127.0.0.1", port, "x" * 16, deadline_seconds=5)


INVENTORY = [
    {"rank": 2 * node + local, "node_rank": node, "local_rank": local, "host": f"node-{'abcd'[node]}"}
    for node in range(4)
    for local in range(2)
]


def reached(count, *broken, absent=None):
    """Everybody reaches everybody, but for some pairs."""
    away = absent or {}
    return Reachability(
        hosts={node: f"node-{node}" for node in range(count)},
        addresses={node: f"10.0.0.{node} on eth0, NCCL's own choice" for node in range(count) if node not in away},
        slowest={node: 0.001 * (1 + node) for node in range(count) if node not in away},
        failures=dict.fromkeys(broken, "timed out"),
        absent=away,
    )


def test_all_who_reach_each_other_are_whole():
    found = reached(4)
    assert (found.reached_ratio, found.whole_nodes, found.suspects()) == (1.0, 4, ())
    assert found.slowest[2] == pytest.approx(0.003)
    for node in range(4):
        found.require_whole(node)


def around(node, count):
    return [pair for other in range(count) if other != node for pair in ((node, other), (other, node))]


@pytest.mark.parametrize(
    ("count", "broken", "blamed"),
    [
        pytest.param(2, [(0, 1)], (0, 1), id="two nodes: both ends"),
        pytest.param(8, [(2, 5), (5, 2)], (2, 5), id="one pair: both ends"),
        pytest.param(8, around(3, 8), (3,), id="a node that no node reaches"),
        pytest.param(8, around(3, 8)[:10], (3,), id="a node that most do not reach"),
        pytest.param(8, [*around(3, 8), (0, 1)], (0, 1, 3), id="a node, and a pair"),
        pytest.param(8, [*around(3, 8), *around(6, 8)], (3, 6), id="two nodes"),
        pytest.param(3, [(1, 1)], (1,), id="a node that does not reach itself"),
        pytest.param(8, [(3, 3), *around(3, 8)], (3,), id="a node that reaches no node, nor itself"),
    ],
)
def test_failures_point_to_the_nodes_that_explain_them(count, broken, blamed):
    found = reached(count, *broken)
    assert found.suspects() == blamed
    for node in range(count):
        if node in blamed:
            with pytest.raises(HardwareFault, match="look at node-"):
                found.require_whole(node)
        else:
            found.require_whole(node)


def test_a_node_without_an_interface_is_an_error_and_no_fault_of_the_hardware():
    found = reached(3, absent={2: "no interface"})
    assert (found.reached_ratio, found.whole_nodes, found.suspects()) == (1.0, 0, (2,))
    found.require_whole(0)
    with pytest.raises(EnvironmentBroken, match="- node-2: no interface"):
        found.require_whole(2)


def test_a_node_that_is_silent_is_reported_by_the_first_one_and_its_pairs_count_as_broken():
    found = replace(reached(4), silent=(2,), untried=frozenset((2, other) for other in range(4)))
    assert (found.reached_ratio, found.whole_nodes, found.suspects()) == (0.75, 0, (2,))
    for node in (1, 3):
        found.require_whole(node)
    for node in (0, 2):
        with pytest.raises(EnvironmentBroken, match=r"look at node-2\n- node-2: "):
            found.require_whole(node)


# Over real sockets of this host ------------------------------------------------------------------------------------


def connect(count, exchange=None, choose=None, deadline_seconds=5.0, done=lambda node: None):
    """Let nodes, each a thread, connect to each other; each calls ``done`` at its end."""
    store = HashStore()

    def loopback():
        return Chosen(interface="lo", address="127.0.0.1", why="a test")

    def run(node):
        nodes = Nodes.of([who for who in INVENTORY if who["node_rank"] < count], node)
        found = connect_all(
            Board(store, nodes.representative, lambda: 1),
            nodes,
            choose(node) if choose else loopback,
            payload_bytes=4096,
            deadline_seconds=deadline_seconds,
            exchange=exchange(node) if exchange else None,
        )
        done(node)
        return found

    with ThreadPoolExecutor(max_workers=count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("count", [1, 3])
def test_nodes_that_reach_each_other_all_learn_of_it(count):
    for found in connect(count):
        assert (found.reached_ratio, found.whole_nodes) == (1.0, count)
        assert (found.failures, found.untried) == ({}, frozenset())
        assert all(0 < found.slowest[node] < 5 for node in range(count))
        assert in_order(found.addresses[0], "127.0.0.1 lo")


def test_a_node_whose_results_do_not_come_is_silent_on_all_others(monkeypatch):
    monkeypatch.setattr(network, "_MARGIN_SECONDS", 0.1)
    late, given_up = threading.Event(), threading.Barrier(2, action=lambda: late.set())

    def exchange(node):
        def call(address, port, token, **more):
            if node == 2:
                late.wait(60)
            return 0.001

        return call

    found = connect(3, exchange, deadline_seconds=0.5, done=lambda node: node < 2 and given_up.wait(60))
    assert [one.silent for one in found] == [(2,), (2,), ()]
    assert found[0].reached_ratio == pytest.approx(6 / 9)


def test_a_node_that_cannot_be_called_is_named_on_every_node():
    def choose(node):
        return lambda: Chosen(interface="lo", address=f"127.0.0.{1 + node}", why="a test")

    def exchange(node):
        def call(address, port, token, **more):
            if (address == "127.0.0.3") != (node == 2):
                raise ConnectionRefusedError("Connection refused")
            return network.call(address, port, token, **more)

        return call

    for found in connect(3, exchange, choose):
        assert found.failures == dict.fromkeys([(0, 2), (1, 2), (2, 0), (2, 1)], "Connection refused")
        assert (found.suspects(), found.whole_nodes) == ((2,), 0)
        assert found.reached_ratio == pytest.approx(5 / 9)


def test_few_bytes_that_pass_where_many_do_not_point_to_the_mtu(monkeypatch):
    def echo(self, payload):
        if len(payload) > 1500:
            raise TimeoutError("timed out")

    monkeypatch.setattr(network.Caller, "echo", echo)
    [found, _] = connect(2)
    assert len(found.failures) == 4
    assert in_order(found.failures[0, 1], "4096 MTUs")


def test_a_node_without_an_interface_delays_no_other_node():
    def choose(node):
        def loopback():
            if node == 1:
                raise EnvironmentBroken("no interface")
            return Chosen(interface="lo", address="127.0.0.1", why="a test")

        return loopback

    for found in connect(3, choose=choose):
        assert found.absent == {1: "no interface"}
        assert (found.failures, found.whole_nodes) == ({}, 0)


def test_an_address_that_nothing_can_listen_on_is_reported_as_well():
    def choose(node):
        return lambda: Chosen(interface="eth9", address="203.0.113.77" if node else "127.0.0.1", why="a test")

    found = connect(2, choose=choose)[0]
    assert list(found.absent) == [1]
    assert in_order(found.absent[1], "assign requested")


THREE_NODES = [{"rank": node, "node_rank": node, "local_rank": 0, "host": f"node-{'abc'[node]}"} for node in range(3)]


@pytest.mark.parametrize("by", [0.0, 3600.0, -0.25])
@pytest.mark.parametrize("there", [0.001, 0.004], ids=["equal ways", "a slow way there"])
def test_the_offset_is_right_within_its_error(by, there):
    back = 0.001
    sample = (100.0, 100.0 + there + by, 100.0 + there + by + 0.5, 100.0 + there + 0.5 + back)
    found = offset([sample])
    assert abs(found.seconds - by) <= found.error + 1e-9
    assert found.error == pytest.approx((there + back) / 2)


def test_of_several_answers_the_one_that_came_back_fastest_counts():
    slow, fast = (0.0, 5.9, 5.9, 1.0), (10.0, 15.001, 15.001, 10.002)
    assert offset([slow, fast, slow]) == Offset(seconds=5.0, error=0.001)
    assert offset([(10.0, 10.0, 10.5, 10.2)]).error == 0.0, "a clock that is set during the exchange"
    with pytest.raises(ValueError, match="no sample"):
        offset([])
    with pytest.raises(ValueError, match="no other clock"):
        skew(offsets(0.0), 0)


def offsets(*seconds):
    return {node: Offset(seconds=one, error=0.001) for node, one in enumerate(seconds)}


@of_each(
    "case",
    [
        ((0.0, 5.0), (5.0, 5.0)),
        ((0.0, 0.0, 5.0), (0.0, 0.0, 5.0)),
        ((0.0, 5.0, 5.0), (5.0, 0.0, 0.0)),
        ((0.0, 0.0, 5.0, 0.0), (0.0, 0.0, 5.0, 0.0)),
        ((0.0, 5.0, -5.0, 0.0, 0.0), (0.0, 5.0, 5.0, 0.0, 0.0)),
    ],
)
def test_each_clock_is_held_against_the_median_of_the_others(case):
    seconds, skews = case
    assert [skew(offsets(*seconds), node) for node in range(len(seconds))] == [(value, 0.002) for value in skews]


def compared(monkeypatch, choose=None):
    store = HashStore()

    def loopback():
        return Chosen(interface="lo", address="127.0.0.1", why="a test")

    def run(node):
        nodes = Nodes.of(THREE_NODES, node)
        board = Board(store, nodes.representative, lambda: 1)
        try:
            return skew_of_nodes(board, nodes, choose or loopback, samples=4, deadline_seconds=0.3)
        except EnvironmentBroken as error:
            return error

    monkeypatch.setattr(network, "_MARGIN_SECONDS", 0.5)
    with ThreadPoolExecutor(max_workers=3) as pool:
        return list(pool.map(run, range(3)))


def test_nodes_on_one_host_have_one_clock(monkeypatch):
    for series in compared(monkeypatch):
        assert isinstance(series, sampling.Series)
        assert series.low <= series.median <= series.high < 1.0


def test_a_first_node_without_an_address_delays_no_other_node(monkeypatch):
    def none():
        raise EnvironmentBroken("no interface")

    for error in compared(monkeypatch, none):
        assert isinstance(error, EnvironmentBroken)
        assert in_order(str(error), "node-a: no interface node-b: node-a: no interface node-c: node-a: no interface")


def test_a_first_node_that_does_not_answer_is_an_error_on_all_nodes(monkeypatch):
    def never(_):
        time.sleep(1)
        raise EOFError

    silence = SimpleNamespace(unpack=never, size=network._HEAD.size, pack=network._HEAD.pack)
    monkeypatch.setattr(network, "_HEAD", silence)
    found = compared(monkeypatch)
    for error in found:
        assert isinstance(error, EnvironmentBroken)
        assert in_order(str(error), "node-b node-a")
        assert in_order(str(error), "node-c node-a")
