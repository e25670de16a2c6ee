"""Which network it is, and which cards belong to it: found where the facts say it, left open where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_nodes import Node, azure, efa, eight_gpus, ethernet, google, infiniband, laptop, pod, roce
from sysfs_ports import ROCE_GIDS

from pytest_gpucluster.nccl_advice.fabric import Fabric, find
from pytest_gpucluster.nccl_advice.gathering import gather

STORAGE = {"rate": "100 Gb/sec (4X EDR)", "board": "MT_0000000359"}


def of(node: Node) -> Fabric:
    return find(gather(node.sources()))


def names(fabric: Fabric) -> list[str]:
    return [card.name for card in fabric.cards]


def outside(fabric: Fabric) -> dict[str, str]:
    return {card.name: why for card, why in fabric.outside}


@pytest.mark.parametrize(
    ("make", "kind"),
    [(infiniband, "InfiniBand"), (roce, "RoCE"), (ethernet, "Ethernet"), (efa, "EFA"), (azure, "InfiniBand"),
     (google, "Ethernet"), (laptop, "Ethernet"), (pod, None)],
)  # fmt: skip
def test_the_kind_of_each_node(tmp_path: Path, make: object, kind: str | None) -> None:
    assert of(make(tmp_path)).kind == kind  # type: ignore[operator]  # makers of the module beside


def test_eight_rails_of_infiniband_are_the_fabric_and_nothing_is_left_out(tmp_path: Path) -> None:
    found = of(infiniband(tmp_path))
    assert names(found) == [f"mlx5_{number}:1" for number in range(8)]
    assert (found.outside, found.unclear, found.slow) == ((), "", ())
    assert found.why.startswith("8 active ports of 400 Gb/s (mlx5_0:1, ")


def test_ethernet_beside_infiniband_is_left_out(tmp_path: Path) -> None:
    assert outside(of(azure(tmp_path))) == {"mlx5_an0:1": "it is Ethernet, and the fabric is InfiniBand"}


def test_infiniband_for_storage_beside_faster_roce_is_left_out(tmp_path: Path) -> None:
    node = roce(tmp_path)
    node.card("mlx5_8", rate="200 Gb/sec (4X HDR)")
    found = of(node)
    assert (found.kind, outside(found)) == ("RoCE", {"mlx5_8:1": "it is InfiniBand, and the fabric is Ethernet"})


def test_two_kinds_of_which_neither_is_clearly_more_are_not_known(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=2)
    for number in range(4):
        node.roce(f"mlx5_{number + 4}", f"rail{number}", beside=number + 4, rate="400 Gb/sec (4X NDR)")
    found = of(node)
    assert found.kind is None
    assert "both InfiniBand" in found.why
    assert (found.cards, found.outside) == ((), ())


def test_two_kinds_of_which_a_rate_is_not_told_are_not_known(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.roce("mlx5_8", "ens8", rate="")
    assert of(node).kind is None


def test_a_slower_card_of_another_kind_is_left_out(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.card("mlx5_8", beside=0, **STORAGE)
    found = of(node)
    assert outside(found) == {"mlx5_8:1": "it has 100 Gb/s and is another card than the 8 of 400 Gb/s"}
    assert len(found.cards) == 8


def test_a_slower_port_of_the_same_card_is_a_fault_and_not_left_out(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=7)
    node.card("mlx5_7", beside=7, rate="200 Gb/sec (2X NDR)")
    found = of(node)
    assert (outside(found), [card.name for card in found.slow]) == ({}, ["mlx5_7:1"])
    assert len(found.cards) == 8


def test_what_is_no_part_of_the_fabric_is_not_slow(tmp_path: Path) -> None:
    node = roce(tmp_path)
    node.roce("mlx5_bond_0", "bond0", rate="200 Gb/sec (4X HDR)")
    found = of(node)
    assert (set(outside(found)), found.slow) == ({"mlx5_bond_0:1"}, ())


def test_one_fast_card_of_another_kind_does_not_make_the_rails_storage(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    for number in range(4):
        node.card(f"mlx5_{number}", beside=number, rate="200 Gb/sec (4X HDR)")
    node.card("mlx5_8", board="MT_0000000884")
    found = of(node)
    assert (found.kind, outside(found)) == ("InfiniBand", {})
    assert "it cannot be told which are for storage" in found.unclear


def test_a_card_beside_no_gpu_is_left_out_where_each_gpu_has_one(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.card("mlx5_8")
    node.card("mlx5_9")
    found = of(node)
    assert set(outside(found)) == {"mlx5_8:1", "mlx5_9:1"}
    assert outside(found)["mlx5_8:1"] == "it is beside no GPU (NODE), and 8 others are (PIX)"


def test_cards_beside_no_gpu_belong_to_it_where_the_gpus_have_none(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    for number in range(4):
        node.card(f"mlx5_{number}")
    found = of(node)
    assert (len(found.cards), outside(found), found.unclear) == (4, {}, "")


@pytest.mark.parametrize("seen", [0, 1, 4])
def test_cards_beside_gpus_that_a_job_was_not_given_are_of_the_fabric_all_the_same(tmp_path: Path, seen: int) -> None:
    node = infiniband(tmp_path)
    del node.seen[seen:]
    assert (len(of(node).cards), outside(of(node))) == (8, {})
    node.card("mlx5_8")
    assert set(outside(of(node))) == {"mlx5_8:1"}


def test_without_gpus_nobody_is_left_out_for_its_place(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for number in range(9):
        node.card(f"mlx5_{number}", beside=number if number < 8 else None)
    assert len(of(node).cards) == 9


def roce_without_switches(root: Path, ports: int) -> Node:
    node = eight_gpus(root)
    for number in range(ports):
        node.roce(f"mlx5_{number}", f"ens{number}")
    node.default("ens0")
    return node


def test_the_way_to_the_world_is_left_out_where_the_others_are_the_rails(tmp_path: Path) -> None:
    found = of(roce_without_switches(tmp_path, 9))
    assert outside(found) == {"mlx5_0:1": "its interface ens0 has the default route, and 8 other ports are the rails"}


@pytest.mark.parametrize("ports", [2, 8])
def test_a_rail_may_have_the_default_route(tmp_path: Path, ports: int) -> None:
    found = of(roce_without_switches(tmp_path, ports))
    assert (len(found.cards), found.outside, found.unclear) == (ports, (), "")


def test_a_number_of_ports_that_fits_nothing_is_left_open(tmp_path: Path) -> None:
    found = of(roce_without_switches(tmp_path, 7))
    assert (outside(found), found.unclear) == (
        {},
        "7 ports for 8 GPUs are no number of rails, and neither are 6 of them",
    )


def test_without_knowing_the_gpus_the_default_route_leaves_it_open(tmp_path: Path) -> None:
    node = roce_without_switches(tmp_path, 9)
    for gpu in node.seen:
        (node.sysfs / "bus/pci/devices" / gpu.pci / "class").unlink()
    node.seen.clear()
    assert "without knowing the GPUs" in of(node).unclear


def test_the_default_route_over_a_vlan_is_that_of_its_card(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    for number in range(9):
        node.roce(f"mlx5_{number}", f"ens{number}")
    node.network("vlan7", real=False, over=("ens4",))
    node.default("vlan7")
    assert list(outside(of(node))) == ["mlx5_4:1"]


def test_an_unknown_rate_leaves_it_open(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=7)
    node.card("mlx5_7", beside=7, rate="")
    assert of(node).unclear == "the rate of mlx5_7:1 is not known"


def test_ports_that_are_all_down_are_no_known_fabric(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    node.card("mlx5_0", beside=0, state="1: DOWN")
    node.network("eth0")
    found = of(node)
    assert found.kind is None
    assert "mlx5_0:1 DOWN" in found.why


def test_rdma_in_software_is_no_fabric(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.card("rxe0", link_layer="Ethernet", gids=ROCE_GIDS)
    link = node.sysfs / "class/infiniband/rxe0/device"
    link.unlink()
    (node.sysfs / "devices/virtual/net/rxe").mkdir(parents=True)
    link.symlink_to(node.sysfs / "devices/virtual/net/rxe")
    assert "software" in outside(of(node))["rxe0:1"]


def test_rdma_in_software_alone_is_not_known(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.network("wlan0")
    node.card("rxe0", link_layer="Ethernet", gids=ROCE_GIDS)
    link = node.sysfs / "class/infiniband/rxe0/device"
    link.unlink()
    assert of(node).kind is None


def test_a_container_that_was_given_no_device_is_not_known_and_the_cards_on_the_bus_are_named(tmp_path: Path) -> None:
    node = pod(tmp_path)
    node.network("eth1")
    node.pci("0000:18:00.0", "pci0000:16", **{"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"})
    found = of(node)
    assert found.kind is None
    assert "0000:18:00.0" in found.why
    assert "container (kubernetes)" in found.why


def test_cards_that_can_do_roce_and_show_no_rdma_device_are_no_plain_ethernet(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    node.network("rail0", speed=400_000)
    assert of(node).kind == "Ethernet"
    node.pci("0000:18:00.0", "pci0000:16", **{"class": "0x020000", "vendor": "0x15b3", "device": "0x1021"})
    found = of(node)
    assert (found.kind, "0000:18:00.0" in found.why) == (None, True)


def test_a_container_with_a_virtual_interface_only_is_not_known(tmp_path: Path) -> None:
    assert "cannot be seen (eth0)" in of(pod(tmp_path)).why


def test_a_node_with_nothing_is_not_known(tmp_path: Path) -> None:
    assert of(Node(tmp_path)).kind is None
