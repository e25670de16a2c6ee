import dataclasses

from each import of_each
from sysfs_ports import add_port, add_roce
from verdicts import SHIPPED

from pytest_gpucluster.judge import loader
from pytest_gpucluster.node import infiniband
from pytest_gpucluster.node.fabric.ports import (
    FabricSources,
    examine_ports,
    expects_infiniband,
    network_cards,
    read_ports,
    roce_gid,
    used_ports,
)
from pytest_gpucluster.node.interfaces import matches
from pytest_gpucluster.node.sysfs import Tree


def node(root, **changes):
    sources = FabricSources(tree=Tree(root=root), environ={})
    settings = {"host": "gpu-00", "hcas": [""], "gid_index": None, **changes}
    return read_ports(sources, **settings)


@of_each(
    "case",
    [
        ("mlx5_1", ["mlx5_1/1", "mlx5_10/1", "mlx5_10/2"]),
        ("=mlx5_1", ["mlx5_1/1"]),
        ("=mlx5_1,mlx5_10:2", ["mlx5_1/1", "mlx5_10/2"]),
        ("mlx5_10:1", ["mlx5_10/1"]),
        ("^mlx5_10", ["mlx5_1/1"]),
        ("^=mlx5_1", ["mlx5_10/1", "mlx5_10/2"]),
        ("=mlx5_1:1:0:0,mlx5_10::1:0", ["mlx5_1/1", "mlx5_10/1", "mlx5_10/2"]),
        ("hfi1", []),
        (",", []),
    ],
)
def test_a_choice_of_cards_means_what_it_means_to_nccl(case, tmp_path):
    wanted, chosen = case
    add_port(tmp_path / "sys", "mlx5_1")
    add_port(tmp_path / "sys", "mlx5_10", 1, pci="0000:19:00.0")
    add_port(tmp_path / "sys", "mlx5_10", 2, pci="0000:19:00.0")
    ports = infiniband.read(tmp_path / "sys").ports
    assert [port.name for port in ports if matches(port.device, wanted, port.number)] == chosen


def test_a_slow_card_for_storage_is_not_the_slowest_port_of_the_fabric(tmp_path):
    for index in range(3):
        slow = {"rate": "200 Gb/sec (4X HDR)"} if index == 2 else {}
        add_port(tmp_path / "sys", f"mlx5_{index}", pci=f"0000:{index + 16}:00.0", **slow)
    assert [node(tmp_path).slowest_rate(gpus) for gpus in (1, 2, 3, 8)] == [400, 400, 200, 200]
    assert node(tmp_path / "none").slowest_rate(8) == 0


DOWN = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
ETHERNET = {"link_layer": "Ethernet"}
LEFT_OUT = {"NCCL_IB_HCA": "mlx5_0"}
STORAGE = {"kind": "MT4123", "board": "MT_0000000223", "rate": "200 Gb/sec (4X HDR)"}


@of_each(
    "case",
    [
        ("four cards", [{}] * 4, {}, 4),
        ("eight, four of them without a link", [{}, DOWN] * 4, {}, 8),
        ("eight, four of them slow", [{}, {"rate": "200 Gb/sec (4X HDR)"}] * 4, {}, 8),
        ("eight of two makers", [{}, {"kind": "MT4130"}] * 4, {}, 8),
        ("four, and four for storage", [{}, STORAGE] * 4, {}, 4),
        ("four, and Ethernet", [{}, ETHERNET] * 4, {}, 4),
        ("four of two ports", [{"pci": f"0000:{card:02x}:00.{port}"} for card in range(4) for port in (0, 1)], {}, 4),
        ("eight, of which a variable leaves one", [{}] * 8, LEFT_OUT, 8),
        ("none that is active", [DOWN] * 8, {}, 8),
        ("none that is active but two for storage", [DOWN] * 8 + [{"kind": "MT41692", **ETHERNET}] * 2, {}, 8),
        ("eight, and a variable for storage", [ETHERNET] + [{}] * 8, LEFT_OUT, 8),
        ("none", [], {}, None),
    ],
    lambda case: case[0],
)
def test_the_cards_of_a_node_are_those_that_are_plugged_in_for_data(case, tmp_path):
    name, ports, environ, count = case
    for index, changes in enumerate(ports):
        add_port(tmp_path / name / "sys", f"mlx5_{index}", **{"pci": f"0000:{index + 16:02x}:00.0", **changes})
    assert network_cards(FabricSources(tree=Tree(root=tmp_path / name), environ=environ, home=lambda: None)) == count


# Nodes as their owners published them. Of an H100 node ibdev2netdev, by whose interfaces the addresses are known, with
# what each card is (imbue-ai/cluster-health#4); of another node sysfs itself (stackhpc/ansible-slurm-appliance#988).
CX6 = {"kind": "MT4125", "board": "MT_0000000359", "link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)"}
CX6_DOWN = CX6 | {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "40 Gb/sec (4X QDR)"}
EDR = {"rate": "100 Gb/sec (4X EDR)"}
IMBUE = {
    **{
        f"mlx5_{n}": {"pci": f"0000:{bus:02x}:00.0"}
        for n, bus in {0: 26, 3: 60, 4: 77, 5: 94, 6: 156, 9: 188, 10: 204, 11: 220}.items()
    },
    "mlx5_1": CX6 | {"pci": "0000:1b:00.0"},
    "mlx5_2": CX6_DOWN | {"pci": "0000:1b:00.1"},
    "mlx5_7": CX6 | {"pci": "0000:9d:00.0"},
    "mlx5_8": CX6_DOWN | {"pci": "0000:9d:00.1"},
}


@of_each(
    "case",
    [
        (IMBUE, {"mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"}, 400.0),
        ({"mlx5_0": EDR, "mlx5_1": EDR | {"pci": "0000:19:00.0"}}, {"mlx5_0", "mlx5_1"}, 100.0),
    ],
)
def test_the_fabric_of_published_nodes_is_found(case, tmp_path):
    ports, fabric, rate = case
    root = tmp_path / str(len(ports))
    for device, attributes in ports.items():
        add_port(root / "sys", device, **attributes)
    found = node(root)
    assert {port.device for port in used_ports(found.adapters)} == fabric
    assert network_cards(FabricSources(tree=Tree(root=root), environ={})) == len(fabric)
    assert found.slowest_rate(8) == rate
    findings = examine_ports({0: found}, expected=True).of_node.get(0, [])
    assert [finding.code for finding in findings if finding.kind != "note"] == ["peer_memory"]  # no driver is planted


def test_a_card_that_shows_no_port_is_plugged_in_still(tmp_path):
    for index in range(2):
        port = add_port(tmp_path / "sys", f"mlx5_{index}", pci=f"0000:{index + 16:02x}:00.0")
    port.rename(tmp_path / "port")
    assert network_cards(FabricSources(tree=Tree(root=tmp_path), environ={}, home=lambda: None)) == 2


def test_of_two_kinds_of_ports_those_of_infiniband_are_the_fabric_where_any_is_active(tmp_path):
    both, without, nothing = (tmp_path / name for name in ("both", "without", "nothing"))
    add_port(both / "sys", "mlx5_0")
    for root in (both, without, nothing):
        add_port(root / "sys", "mlx5_1", pci="0000:19:00.0", state="1: DOWN")
    for root in (both, without):
        add_roce(root / "sys", "mlx5_2", pci="0000:1a:00.0", interface="eth2")
    found = node(both)
    assert [port.name for port in found.used] == ["mlx5_0/1", "mlx5_1/1"]
    assert [port.name for port in found.active] == ["mlx5_0/1"]
    assert found.device_of(found.used[0]).firmware == "28.39.2048"
    assert [port.name for port in node(without).used] == ["mlx5_2/1"]
    assert [port.name for port in node(nothing).used] == ["mlx5_1/1"], "where nothing is active all are"
    assert node(nothing).active == ()


def test_ranks_that_use_a_card_each_use_all_of_them_together(tmp_path):
    for index in range(3):
        add_port(tmp_path / "sys", f"mlx5_{index}", pci=f"0000:{index + 16}:00.0")
    adapters = infiniband.read(tmp_path / "sys")
    assert [p.device for p in used_ports(adapters, ("=mlx5_0", "=mlx5_2"))] == ["mlx5_0", "mlx5_2"]
    assert len(used_ports(adapters, ("=mlx5_0", ""))) == 3, "a rank without a choice uses all"


def test_roce_needs_a_gid_that_can_be_routed(tmp_path):
    add_roce(tmp_path / "sys")
    [port] = node(tmp_path).used
    assert [roce_gid(port, index) and roce_gid(port, index).index for index in (None, 3, 1, 7)] == [3, 3, 1, None]
    without_ipv4 = dataclasses.replace(port, gids=tuple(gid for gid in port.gids if not gid.is_ipv4))
    found = roce_gid(without_ipv4, None)
    assert (found.index, found.kind) == (1, "RoCE v2")
    assert roce_gid(dataclasses.replace(port, gids=port.gids[:1]), None) is None


def expects(sku="H100 SXM", nnodes=2, *, on_cpu=False, limits=SHIPPED):
    found, why = expects_infiniband(
        limits,
        sku=sku,
        world_size=8 * nnodes,
        nnodes=nnodes,
        sizes=["1 MB", "1 GB"],
        on_cpu=on_cpu,
    )
    assert why
    return found


def test_a_fabric_is_expected_between_nodes_unless_limits_expect_another_transport(tmp_path):
    assert expects(), "and where no limit says otherwise"
    assert expects(sku="L40S")
    assert expects(sku=None)
    assert expects(nnodes=64)
    assert not expects(nnodes=1)
    assert not expects(on_cpu=True)
    file = tmp_path / "efa.yaml"
    file.write_text(
        "schema_version: 1\nskus:\n  H100 SXM:\n    limits:\n      nccl.all_reduce.busbw:\n"
        "        - when: {nnodes: 2 or more, size: 1 GB or more}\n          min: 300 GB/s\n"
        "          expect_transport: NET/AWS Libfabric\n          source: contract\n"
    )
    assert not expects(limits=loader.load(file))
    file.write_text(file.read_text().replace("NET/AWS Libfabric", "[NET/IB, COLLNET/SHARP]"))
    assert expects(limits=loader.load(file))
