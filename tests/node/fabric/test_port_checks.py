"""Bad ports are found on their node, and what several bad nodes share is named."""

import dataclasses

import pytest
from complaints import in_order
from each import of_each
from fabric_nodes import DOWN, PEERMEM, node, port, roce

from pytest_gpucluster.node.fabric.ports import examine_ports, leaf_of, shared_rails
from pytest_gpucluster.node.infiniband import Adapters
from pytest_gpucluster.node.pci import PeerMemory


def fleet(count=4, odd=None, **common):
    """Nodes that are alike, some of which are different."""
    return {
        index: node(f"gpu-{index:02d}", **{**common, "leaf": f"leaf-{index // 2}", **(odd or {}).get(index, {})})
        for index in range(count)
    }


def found(nodes, expected=True):
    return examine_ports(nodes, expected=expected)


def decisive(findings):
    return {
        index: some
        for index, every in findings.of_node.items()
        if (some := [finding for finding in every if finding.kind != "note"])
    }


def only(findings, on):
    """The only finding that decides, which must be on this node."""
    [(index, [finding])] = decisive(findings).items()
    assert index == on
    assert finding.gpu.host == f"gpu-{on:02d}"
    return finding


@pytest.mark.parametrize("make", [port, roce], ids=["InfiniBand", "RoCE"])
def test_nothing_is_wrong_with_nodes_that_are_alike(make):
    boards = fleet(cards={7: {"board": "MT_0000000999", "firmware": "22.31.1014"}}, make=make)
    for nodes in (fleet(make=make), {}, boards):  # another board may have another firmware
        assert (found(nodes).of_node, found(nodes).shared) == ({}, [])


SLOW = {"rate_gbps": 200.0, "rate": "200 Gb/sec (2X NDR)"}
NO_WAY = PeerMemory(module="", why_no_dma_buf="kernel 5.4 is older than 5.12")


@pytest.mark.parametrize(
    ("different", "code", "kind", "words"),
    [
        ({"changed": {3: DOWN}}, "port_state", "hardware", "mlx5_3/1 DOWN 3 of 4"),
        ({"changed": {3: SLOW}}, "port_rate", "hardware", "200 Gb/sec 400 Gb/s"),
        ({"without": (3,)}, "port_missing", "hardware", "mlx5_3/1 3 of 4"),
        ({"cards": {3: {"board": "DEL0000000033"}}}, "board", "hardware", "mlx5_3/1: DEL0000000033, MT_0000000838 3"),
        ({"cards": {3: {"firmware": "28.36.1010"}}}, "firmware", "hardware", "mlx5_3: 28.36.1010, 28.39.2048 31 of 32"),
        ({"peer_memory": NO_WAY}, "peer_memory", "environment", "DMA-BUF: kernel 5.4"),
        ({"hcas": ("=mlx5_9",)}, "no_ports", "environment", "NCCL_IB_HCA==mlx5_9 mlx5_0/1, "),
        ({"adapters": Adapters(why_not="No such file")}, "no_ports", "hardware", "No such file"),
    ],
    ids=["down", "slow", "missing", "board", "firmware", "peer memory", "choice", "none"],
)
def test_the_node_that_is_different_is_named(different, code, kind, words):
    finding = only(found(fleet(odd={2: different})), on=2)
    assert (finding.code, finding.kind) == (code, kind)
    assert in_order(finding.found, words)
    assert finding.remedy


def test_an_ethernet_port_without_an_address_in_an_infiniband_fabric_is_named_twice():
    odd = {2: {"changed": {3: {"link_layer": "Ethernet"}}, "hcas": ("mlx5",)}}
    findings = {finding.code: finding for finding in found(fleet(odd=odd)).of_node[2]}
    assert set(findings) == {"link_layer", "roce_gid"}
    assert findings["link_layer"].kind == "hardware"
    assert in_order(findings["link_layer"].found, "mlx5_3/1 Ethernet InfiniBand 3 4")


def test_of_two_nodes_the_one_whose_port_is_down_or_slow_is_the_bad_one():
    assert only(found(fleet(2, odd={1: {"changed": {0: DOWN}}})), on=1).code == "port_state"
    no_manager = found(fleet(2, odd={1: {"changed": {0: {"state": "INIT"}}}}))
    assert in_order(no_manager.of_node[1][0].found, "subnet manager")
    slow = {0: {"rate_gbps": 100.0, "rate": "100 Gb/sec (1X NDR)"}}
    assert only(found(fleet(2, odd={0: {"changed": slow}})), on=0).code == "port_rate"
    assert only(found(fleet(2, odd={0: {"without": (7,)}})), on=0).code == "port_missing"


def test_of_two_nodes_with_different_firmware_both_are_named_and_neither_is_blamed():
    cards = {index: {"firmware": "28.36.1010"} for index in range(8)}
    findings = decisive(found(fleet(2, odd={1: {"cards": cards}})))
    assert sorted(findings) == [0, 1]
    for [finding] in findings.values():
        assert finding.code == "firmware"
        assert in_order(finding.found, "which is right is unknown")


DMA_BUF = PeerMemory(module="", why_no_dma_buf="")
ERRORS = {5: {"counters": {"link_downed": 7, "symbol_error": 0, "port_rcv_errors": 2, "port_xmit_bytes": 10**12}}}


@of_each(
    "case",
    [
        # Down everywhere: the limit decides. Errors since the driver was loaded. Two ways to GPU memory.
        ({"changed": {7: DOWN}}, {}, "port_inactive", ""),
        ({}, {"changed": ERRORS}, "port_errors", "mlx5_5/1 link_downed 7, port_rcv_errors 2"),
        ({}, {"peer_memory": DMA_BUF}, "peer_memory_differs", f"DMA-BUF, {PEERMEM} 3 4"),
    ],
)
def test_what_is_no_fault_is_a_note(case):
    common, odd, code, words = case
    findings = found(fleet(odd={1: odd}, **common))
    [note] = findings.of_node[1]
    assert (note.code, note.kind) == (code, "note")
    assert in_order(note.found, words)
    assert decisive(findings) == {}


def test_as_many_ports_under_other_names_are_a_note():
    nodes = fleet(4)
    renamed = tuple(
        dataclasses.replace(
            device,
            name=f"mlx5_ib{index}",
            ports=tuple(dataclasses.replace(one, device=f"mlx5_ib{index}") for one in device.ports),
        )
        for index, device in enumerate(nodes[3].adapters.devices)
    )
    nodes[3] = dataclasses.replace(nodes[3], adapters=Adapters(devices=renamed))
    findings = found(nodes)
    assert decisive(findings) == {}
    assert {finding.code for finding in findings.of_node[3]} == {"port_missing"}


@of_each(
    "case",
    [
        ((), None, "environment", "has no usable GID (its GIDs: none)"),
        ((0,), None, "environment", "has no usable GID (its GIDs: 2: IB/RoCE v1)"),
        ((0, 1), 9, "environment", "has no usable GID at NCCL_IB_GID_INDEX=9 (its GIDs: 2: IB/RoCE v1, 3: RoCE v2)"),
        ((0, 1), 2, "note", "has a GID of IB/RoCE v1, which is not routed, at NCCL_IB_GID_INDEX=2"),
    ],
)
def test_a_roce_port_without_a_usable_address_is_named(case):
    gids, index, kind, words = case
    both = roce(0).gids
    changed = {0: {"gids": tuple(both[position] for position in gids)}}
    findings = found(fleet(2, odd={1: {"changed": changed}}, make=roce, gid_index=index))
    some = [finding for finding in findings.of_node[1] if finding.found.startswith("port mlx5_0/1 ")]
    assert [(finding.code, finding.kind) for finding in some] == [("roce_gid", kind)]
    assert words in some[0].found


def test_where_no_fabric_is_expected_everything_is_a_note():
    odd = {1: {"changed": {0: DOWN}, "cards": {1: {"firmware": "1"}}}, 2: {"adapters": Adapters(why_not="none")}}
    findings = found(fleet(odd=odd), expected=False)
    assert decisive(findings) == {}
    assert {"port_state", "firmware"} <= {finding.code for finding in findings.of_node[1]}
    assert findings.shared == []


def test_one_rail_that_is_down_on_several_nodes_points_to_its_switch():
    odd = {index: {"changed": {3: DOWN}} for index in (4, 5)}
    findings = found(fleet(8, odd=odd))
    assert findings.shared == [
        "rail mlx5_3/1: faults on 2 of its 8 nodes (gpu-04, gpu-05)",
        "leaf switch leaf-2: faults on 2 of its 2 nodes (gpu-04, gpu-05)",
    ]


HOSTS = [f"gpu-{index:02d}" for index in range(12)]
LEAVES = {host: "leaf-a" if index < 6 else "leaf-b" for index, host in enumerate(HOSTS)}


@pytest.mark.parametrize(
    ("address", "pattern", "leaf"),
    [
        ("core.s4.gpu-07", "switch.switch.node", "s4"),
        ("s4.gpu-07", "switch.node", "s4"),
        ("core.s4.gpu-07.example.org", "switch.switch.node", "s4"),
        ("gpu-07", "node", ""),
        ("gpu-07", "switch.node", ""),
        ("", "", ""),
    ],
    ids=["tree", "one switch", "dots in the name", "no tree", "broken", "not under Slurm"],
)
def test_slurm_has_the_leaf_switch_of_a_node(address, pattern, leaf):
    variables = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert leaf_of({name: text for name, text in variables.items() if text}) == leaf


def fault(host, rail="mlx5_0/1"):
    return host, rail


def test_single_faults_share_nothing():
    assert shared_rails([fault("gpu-00"), fault("gpu-07", "mlx5_3/1")], LEAVES) == []
    assert shared_rails([], {}) == []
    assert shared_rails([fault("gpu-00"), fault("gpu-00")], LEAVES) == [], "two faults of one node"


def test_several_nodes_of_one_leaf_switch_point_to_it():
    faults = [fault("gpu-06", "mlx5_0/1"), fault("gpu-08", "mlx5_1/1"), fault("gpu-09", "mlx5_2/1")]
    assert shared_rails(faults, LEAVES) == ["leaf switch leaf-b: faults on 3 of its 6 nodes (gpu-06, gpu-08, gpu-09)"]
