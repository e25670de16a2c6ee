"""The interface is chosen as NCCL or gloo would, and a variable that fits none is an error that lists what there is."""

import pytest
from complaints import in_order
from each import of_each

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node import interfaces as module
from pytest_gpucluster.node.interfaces import Interface, choose, choose_for_gloo, choose_for_nccl, interfaces, matches


def interface(name, *addresses, running=True):
    return Interface(name=name, running=running, addresses=addresses or (f"10.0.0.{len(name)}",))


LO = interface("lo", "127.0.0.1")
DOCKER = interface("docker0", "172.17.0.1")
ETH0 = interface("eth0", "10.1.0.5", "fd00::5")
ETH1 = interface("eth1", "10.2.0.5")
IB0 = interface("ib0", "10.9.0.5")
ALL = (LO, DOCKER, ETH0, ETH1, IB0)


def test_what_a_value_of_nccl_socket_ifname_fits():
    fits = "eth0 eth; eth0 eth0; eth01 eth0; eth0 =eth0,ib0; ib0 eth,ib; eth0 ^docker,lo; eth1 ^=eth0; eth0 eth0:5"
    fits_not = "eth01 =eth0; lo ^docker,lo; eth0 ^=eth0"
    for text, expected in ((fits, True), (fits_not, False)):
        for case in text.split("; "):
            name, wanted = case.split()
            assert matches(name, wanted) is expected, case


@of_each(
    "case",
    [
        (ALL, {}, "10.9.0.5"),
        ((LO, DOCKER, ETH0), {}, "10.1.0.5"),
        ((LO, DOCKER), {}, "172.17.0.1"),
        ((LO,), {}, "127.0.0.1"),
        (ALL, {"NCCL_SOCKET_IFNAME": "eth1"}, "10.2.0.5"),
        (ALL, {"NCCL_SOCKET_IFNAME": "^ib,lo,docker"}, "10.1.0.5"),
        (ALL, {"NCCL_SOCKET_IFNAME": "e"}, "10.9.0.5"),
        (ALL, {"NCCL_SOCKET_FAMILY": "AF_INET6"}, "fd00::5"),
        ((LO, interface("ib0", running=False), ETH0), {}, "10.1.0.5"),
    ],
)
def test_nccl_s_choice(case):
    found, environ, address = case
    assert choose_for_nccl(found, environ).address == address


def test_where_nccl_would_find_none_the_interfaces_are_listed():
    ipv6 = {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_FAMILY": "AF_INET6"}
    for environ, words in (({"NCCL_SOCKET_IFNAME": "bond0"}, "NCCL_SOCKET_IFNAME=bond0"), (ipv6, "AF_INET6")):
        with pytest.raises(EnvironmentBroken, match=words) as raised:
            choose_for_nccl((LO, ETH0, interface("bond1", "10.3.0.1", running=False), ETH1), environ)
        assert in_order(str(raised.value), "eth0 (up: 10.1.0.5 fd00::5) bond1 (down: 10.3.0.1)")


def test_gloo_uses_the_variable_else_the_route_to_the_rendezvous_else_the_first_one_but_loopback(monkeypatch):
    assert choose_for_gloo(ALL, {"GLOO_SOCKET_IFNAME": "nothing,eth1"}, "10.1.0.1").address == "10.2.0.5"
    monkeypatch.setattr(module, "_source", lambda toward: "10.9.0.5")
    chosen = choose_for_gloo(ALL, {}, "10.9.0.1")
    assert (chosen.interface, chosen.address, chosen.why) == ("ib0", "10.9.0.5", "the route to 10.9.0.1")
    assert choose_for_gloo((LO, ETH0), {}, None).address == "10.1.0.5"
    assert choose_for_gloo((LO,), {}, None).address == "127.0.0.1"


def test_gloo_without_a_usable_interface_or_a_way_is_an_error(monkeypatch):
    def unreachable(*arguments, **more):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(module.socket, "getaddrinfo", unreachable)
    for found, environ, head, words in (
        (ALL, {"GLOO_SOCKET_IFNAME": "bond0"}, None, "GLOO_SOCKET_IFNAME=bond0"),
        ((), {}, None, "loopback"),
        (ALL, {}, "head", "to head: Network is unreachable"),
    ):
        with pytest.raises(EnvironmentBroken, match=words):
            choose_for_gloo(found, environ, head)


def test_this_host_has_a_loopback_that_runs(tmp_path):
    found = {one.name: one for one in interfaces()}
    assert found["lo"].running
    assert found["lo"].addresses[0] == "127.0.0.1"
    assert choose("gloo", {"MASTER_ADDR": "127.0.0.1"}).address == "127.0.0.1"
    assert choose("nccl", {"NCCL_SOCKET_IFNAME": "=lo"}).address == "127.0.0.1"


def test_ipv6_addresses_are_read_but_for_those_of_one_link_and_the_loopback_s(tmp_path):
    path = tmp_path / "if_inet6"
    path.write_text(
        f"{1:032x} 01 80 10 80 lo\nfe800000000000000000000000000001 02 40 20 80 lo\n"
        "fd000000000000000000000000000007 02 40 00 80 lo\n"
    )
    [lo] = [one for one in interfaces(path) if one.name == "lo"]
    assert lo.addresses == ("127.0.0.1", "fd00::7")
    assert [one.addresses for one in interfaces(tmp_path / "none") if one.name == "lo"] == [("127.0.0.1",)]
