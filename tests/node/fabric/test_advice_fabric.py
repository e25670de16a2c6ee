"""The fabric of a node and its cards: found where the facts are clear, left open where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_nodes import Node, azure, efa, eight_gpus, ethernet, google, infiniband, laptop, pod, roce
from sysfs_ports import ROCE_GIDS

from pytest_gpucluster.node.fabric.nccl_advice import Fabric, find_fabric
from pytest_gpucluster.node.fabric.nccl_facts import collect_facts

STORAGE = {"rate": "100 Gb/sec (4X EDR)", "board": "MT_0000000359"}


def of(node: Node) -> Fabric:
    return find_fabric(collect_facts(node.sources()))


def names(fabric: Fabric) -> list[str]:
    return [card.name for card in fabric.cards]


def outside(fabric: Fabric) -> dict[str, str]:
    return {card.name: why for card, why in fabric.outside}


def test_the_kind_of_each_node(tmp_path: Path) -> None:
    kinds = {infiniband: "InfiniBand", roce: "RoCE", ethernet: "Ethernet", efa: "EFA", azure: "InfiniBand",
             google: "Ethernet", laptop: "Ethernet", pod: None, Node: None}  # fmt: skip
    assert {make: of(make(tmp_path / make.__name__)).kind for make in kinds} == kinds
    assert "(eth0)" in of(pod(tmp_path / "again")).why


def test_eight_rails_of_infiniband_are_the_fabric_and_nothing_is_left_out(tmp_path: Path) -> None:
    found = of(infiniband(tmp_path))
    assert names(found) == [f"mlx5_{number}:1" for number in range(8)]
    assert (found.outside, found.unclear) == ((), "")
    assert "400 Gb/s (mlx5_0:1, " in found.why


def test_excluded_cards_are_named_with_the_reason(tmp_path: Path) -> None:
    slower, storage = infiniband(tmp_path / "slower"), roce(tmp_path / "storage")
    slower.card("mlx5_8", close_to=0, **STORAGE)
    storage.card("mlx5_8", rate="200 Gb/sec (4X HDR)")
    for node, kind, name, words in (
        (azure(tmp_path / "azure"), "InfiniBand", "mlx5_an0:1", "Ethernet"),
        (storage, "RoCE", "mlx5_8:1", "InfiniBand"),
        (slower, "InfiniBand", "mlx5_8:1", "100 Gb/s"),
    ):
        found = of(node)
        [(left_out, why)] = outside(found).items()
        assert (found.kind, left_out, len(found.cards)) == (kind, name, 8)
        assert words in why


def test_two_kinds_of_which_neither_is_clearly_more_are_not_known(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=2)
    for number in range(4):
        node.roce(f"mlx5_{number + 4}", f"rail{number}", close_to=number + 4, rate="400 Gb/sec (4X NDR)")
    found = of(node)
    assert found.kind is None
    assert "InfiniBand" in found.why
    assert (found.cards, found.outside) == ((), ())
    unknown = infiniband(tmp_path / "unknown rate")
    unknown.roce("mlx5_8", "ens8", rate="")
    assert of(unknown).kind is None


def test_a_slower_port_of_the_same_card_is_a_fault_and_not_left_out(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=7)
    node.card("mlx5_7", close_to=7, rate="200 Gb/sec (2X NDR)")
    found = of(node)
    assert outside(found) == {}
    assert len(found.cards) == 8


def test_a_card_far_from_all_gpus_is_left_out_where_each_gpu_has_one(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.card("mlx5_8")
    node.card("mlx5_9")
    found = of(node)
    assert set(outside(found)) == {"mlx5_8:1", "mlx5_9:1"}
    assert "(NODE)" in outside(found)["mlx5_8:1"]


def test_cards_far_from_all_gpus_belong_to_it_where_the_gpus_have_none(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    for number in range(4):
        node.card(f"mlx5_{number}")
    found = of(node)
    assert (len(found.cards), outside(found), found.unclear) == (4, {}, "")


@pytest.mark.parametrize("visible", [0, 1, 4])
def test_cards_close_to_gpus_that_a_job_was_not_given_are_of_the_fabric(tmp_path: Path, visible: int) -> None:
    node = infiniband(tmp_path)
    del node.visible[visible:]
    assert (len(of(node).cards), outside(of(node))) == (8, {})
    node.card("mlx5_8")
    assert set(outside(of(node))) == {"mlx5_8:1"}


def test_an_unknown_rate_leaves_it_open(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=7)
    node.card("mlx5_7", close_to=7, rate="")
    assert "mlx5_7:1" in of(node).unclear


def test_ports_that_are_all_down_are_no_known_fabric(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    node.card("mlx5_0", close_to=0, state="1: DOWN")
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
    alone = Node(tmp_path / "alone")
    alone.network("wlan0")
    alone.card("rxe0", link_layer="Ethernet", gids=ROCE_GIDS)
    (alone.sysfs / "class/infiniband/rxe0/device").unlink()
    assert of(alone).kind is None


def test_a_container_that_was_given_no_device_is_not_known_and_the_cards_on_the_bus_are_named(tmp_path: Path) -> None:
    node = pod(tmp_path)
    node.network("eth1")
    node.pci("0000:18:00.0", "pci0000:16", **{"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"})
    found = of(node)
    assert found.kind is None
    assert "0000:18:00.0" in found.why
    assert "(kubernetes)" in found.why
    plain = eight_gpus(tmp_path / "plain")
    plain.network("rail0", speed=400_000)
    assert of(plain).kind == "Ethernet"
    plain.pci("0000:18:00.0", "pci0000:16", **{"class": "0x020000", "vendor": "0x15b3", "device": "0x1021"})
    assert (of(plain).kind, "0000:18:00.0" in of(plain).why) == (None, True)
