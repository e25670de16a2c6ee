import dataclasses
from unittest.mock import patch

import pytest
from boards import SharedBoard
from complaints import in_order
from sysfs_ports import add_port, write

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node.fabric import port_exchange
from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.fabric.port_exchange import differences, ports_of_all, settings_of_all
from pytest_gpucluster.node.fabric.ports import FabricSources
from pytest_gpucluster.node.sysfs import Tree


def inventory(nodes, local_ranks=2):
    return [
        {"rank": rank, "host": f"gpu-{rank // local_ranks:02d}", "node_rank": rank // local_ranks,
         "local_rank": rank % local_ranks}
        for rank in range(nodes * local_ranks)
    ]  # fmt: skip


class Nodes:
    """Nodes with a sysfs each, and two healthy ports."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        self.board = SharedBoard()
        self.settings = {}
        for index in range(count):
            for device in range(2):
                add_port(self.sysfs(index), f"mlx5_{device}", pci=f"0000:{device + 16}:00.0")
            (self.sysfs(index) / "module" / "nvidia_peermem").mkdir(parents=True)

    def sysfs(self, index):
        return self.folder / f"node-{index}" / "sys"

    def port(self, index, device=0):
        return self.sysfs(index) / "class" / "infiniband" / f"mlx5_{device}" / "ports" / "1"

    def look(self, *, expected=True, without=(), within=20.0):
        everyone = inventory(self.count)

        def one(rank):
            sources = FabricSources(tree=Tree(root=self.sysfs(rank // 2).parent), environ={})
            settings = self.settings.get(rank, {})
            board = self.board.of(rank)
            return ports_of_all(board, sources, settings, everyone, rank, expected=expected)

        with patch.object(port_exchange, "WITHIN_SECONDS", within):
            return self.board.run([rank for rank in range(2 * self.count) if rank not in without], one)


def test_nodes_that_are_alike_have_nothing_to_say(tmp_path):
    found = Nodes(tmp_path, 3).look()
    assert [found[rank] for rank in (1, 3, 5)] == [None, None, None]
    for rank in (0, 2, 4):
        assert (found[rank].findings, found[rank].anywhere) == ((), True)
        assert [port.name for port in found[rank].mine.active] == ["mlx5_0/1", "mlx5_1/1"]


def test_a_bad_node_gets_its_finding_and_the_others_do_not(tmp_path):
    nodes = Nodes(tmp_path, 3)
    write(nodes.port(1) / "state", "1: DOWN")
    found = nodes.look()
    assert [finding.code for finding in found[2].findings] == ["port_state"]
    assert found[2].findings[0].gpu.host == "gpu-01"
    assert found[0].findings == found[4].findings == ()


def test_faults_that_share_a_rail_have_a_note_on_their_nodes(tmp_path):
    nodes = Nodes(tmp_path, 4)
    for index in (1, 2):
        write(nodes.port(index, 1) / "state", "1: DOWN")
    found = nodes.look()
    for rank in (2, 4):
        assert [finding.code for finding in found[rank].findings] == ["port_state", "shared"]
        assert "rail mlx5_1/1: faults on 2 of its 4 nodes" in found[rank].findings[1].found
    assert found[0].findings == ()


def test_cards_and_the_index_of_an_address_are_read_from_the_settings(tmp_path):
    nodes = Nodes(tmp_path, 1)
    for settings, index in ({"NCCL_IB_GID_INDEX": "3"}, 3), ({"NCCL_IB_GID_INDEX": "-1"}, None):
        nodes.settings = {0: settings}
        nodes.board = SharedBoard()
        assert nodes.look()[0].mine.gid_index == index
    nodes.settings = {0: {"NCCL_IB_HCA": "=mlx5_0"}, 1: {"NCCL_IB_HCA": "=mlx5_1"}}
    nodes.board = SharedBoard()
    assert [port.name for port in nodes.look()[0].mine.used] == ["mlx5_0/1", "mlx5_1/1"], "of all ranks of the node"


def test_a_node_that_does_not_report_is_an_error_and_no_port_of_it_counts(tmp_path):
    found = Nodes(tmp_path, 3).look(without=(2, 3), within=0.3)
    [silent] = found[0].findings
    assert (silent.code, silent.kind, silent.gpu.host) == ("silent", "environment", "gpu-01")
    assert found[4].findings == ()


def test_a_rank_that_compares_and_does_not_answer_is_an_error(tmp_path):
    found = Nodes(tmp_path, 2).look(without=(0, 1), within=0.1)
    assert isinstance(found[2], EnvironmentBroken)
    assert in_order(str(found[2]), "rank 0 0.2 s")


def test_nodes_without_ports_differ_from_a_run_without_any(tmp_path):
    nodes = Nodes(tmp_path, 2)
    (nodes.sysfs(1) / "class" / "infiniband").rename(tmp_path / "gone")
    found = nodes.look(expected=False)
    assert found[2].anywhere
    assert [(finding.code, finding.kind) for finding in found[2].findings] == [("no_ports", "note")]
    nodes = Nodes(tmp_path / "none", 1)
    (nodes.sysfs(0) / "class" / "infiniband").rename(tmp_path / "gone too")
    assert not nodes.look(expected=False)[0].anywhere


def setting(name, value):
    return Setting(name=name, value=value, origin="environment")


def settings_seen(of_rank, nodes=2, within=20.0):
    board, everyone = SharedBoard(), inventory(nodes)

    def one(rank):
        return settings_of_all(board.of(rank), of_rank[rank], everyone, rank)

    with patch.object(port_exchange, "WITHIN_SECONDS", within):
        return board.run(list(of_rank), one)


def test_ranks_with_the_same_settings_have_nothing_to_say():
    found = settings_seen({rank: [setting("NCCL_ALGO", "Tree")] for rank in range(4)})
    assert [found[rank] for rank in (1, 2, 3)] == [None] * 3
    assert found[0].findings == ()
    assert found[0].distinct() == [
        {"ranks": [0, 1, 2, 3], "settings": [dataclasses.asdict(setting("NCCL_ALGO", "Tree"))]},
    ]


def test_a_rank_with_another_value_is_named_with_its_host():
    found = settings_seen({rank: [setting("NCCL_ALGO", "Ring")] if rank == 3 else [] for rank in range(4)})
    [finding] = found[0].findings
    assert (finding.kind, finding.gpu.host) == ("environment", "gpu-01")
    assert in_order(finding.found, "NCCL_ALGO ranks 0-2 Ring rank 3 gpu-01")
    found = settings_seen({rank: [setting("NCCL_IB_HCA", f"mlx5_{rank % 2}")] for rank in range(4)})
    [finding] = found[0].findings
    assert finding.kind == "note", "a card for each local rank is meant"


def test_a_rank_that_reports_no_settings_is_an_error():
    found = settings_seen({0: [], 1: [], 2: []}, within=0.2)
    [finding] = found[0].findings
    assert (finding.code, finding.kind) == ("silent", "environment")
    assert finding.found.startswith("rank 3 reported no settings")


@pytest.mark.parametrize(
    ("name", "of"),
    [("NCCL_IB_HCA", lambda rank: f"mlx5_{rank % 4}"), ("NCCL_SOCKET_IFNAME", lambda rank: f"ens{rank // 4}f0")],
    ids=["a card for each local rank", "an interface for each node"],
)
def test_a_pattern_that_a_launcher_sets_is_meant_and_any_other_is_not(name, of):
    pattern = {rank: {name: of(rank)} for rank in range(8)}
    other = {rank: {"NCCL_ALGO": of(rank)} for rank in range(8)}
    for values, kind in ((pattern, "note"), ({**pattern, 6: {name: "odd"}}, "environment"), (other, "environment")):
        assert [found.kind for found in differences(values, inventory(2, 4))] == [kind]


@pytest.mark.parametrize("odd", [(0,), (3, 5), tuple(range(8))])
def test_the_ranks_with_an_unusual_value_have_it_and_of_equally_frequent_ones_all(odd):
    some = range(4) if len(odd) == 8 else odd
    [found] = differences({rank: {"NCCL_ALGO": "Ring"} if rank in some else {} for rank in range(8)}, inventory(2, 4))
    assert found.ranks == odd
