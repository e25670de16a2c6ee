"""Process groups: gloo's for real, and what is asked of torch for NCCL where there is no GPU."""

import contextlib
import os
import re
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_cause import NO_NVLS
from torchrun import torchrun

from pytest_gpucluster.agreement.release import SocketReleaser
from pytest_gpucluster.benchmarks import group
from pytest_gpucluster.device import environment
from pytest_gpucluster.device.process_group import NcclReleaser
from pytest_gpucluster.device.products import deterministic
from pytest_gpucluster.errors import CommunicationError, EnvironmentBroken, HardwareFault, NvlsFailed, kind_of
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.metrics.measurement import WITHOUT_NVLS
from pytest_gpucluster.session.cluster import Cluster
from pytest_gpucluster.session.phases import ranks_at_fault

P2P = "node-a:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
IB = "node-a:7:8 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA\n"


class Nccl:
    """torch.distributed as rank 5 of 16 on 2 nodes sees it, where what NCCL would do is written down."""

    def __init__(self, monkeypatch):
        self.made, self.guards, self.log, self.fails, self.destroyed = [], [], None, None, []
        self.says = ""
        monkeypatch.setattr(dist, "init_process_group", self.init)
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(dist, "destroy_process_group", self.destroy)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
        alike = SimpleNamespace(gather_objects=lambda value: [value] * 16)
        monkeypatch.setattr(group, "Ranks", lambda *_: alike)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(ranks=list(range(16)))))
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        self.cluster = Cluster(
            RankFacts(
                rank=5,
                world_size=16,
                local_rank=5,
                local_world_size=8,
                node_rank=0,
                nnodes=2,
                hostname="node-a",
                launcher="torchrun",
                run_id="x",
            ),
            hosts=["node-a"] * 8 + ["node-b"] * 8,
            has_gpus=True,
            device_type="cuda",
            device_index=5,
            store_for_group=lambda key: SimpleNamespace(set_timeout=lambda timeout: None),
            guard=lambda *releasers: self.guards.append(releasers),
            deadline_seconds=10,
            count_cards=lambda: 4,
        )

    def init(self, backend, **options):
        if self.fails:
            raise self.fails
        self.made.append((backend, options["device_id"]))
        self.write(IB + self.says)

    def new_group(self, ranks, **options):
        self.made.append((ranks, options))
        self.guarded_while_making = self.guards[-1]
        if self.fails:
            raise self.fails
        self.write(P2P)
        return SimpleNamespace(ranks=ranks)

    def destroy(self, group):
        self.destroyed.append(group.ranks)
        if self.fails:
            raise self.fails

    def write(self, text):
        if self.cluster.nccl_log.path is not None:
            with self.cluster.nccl_log.path.open("a") as file:
                file.write(text)


@pytest.fixture
def nccl(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    environment.prepare(os.environ)
    yield Nccl(monkeypatch)
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        os.environ.pop(name, None)


def test_with_nccl_one_split_makes_all_groups_of_a_size_and_each_rank_asks_for_its_own(nccl):
    groups = [nccl.cluster.subgroups(size) for size in (1, 8, 8, 16)]
    assert nccl.made[0] == ("nccl", torch.device("cuda:5"))
    assert [ranks for ranks, _ in nccl.made[1:]] == [[5], list(range(8))]
    assert all(options["use_local_synchronization"] for _, options in nccl.made[1:])
    assert groups[1] is groups[2]
    assert groups[3] is nccl.cluster.group


def test_a_nodes_ranks_need_not_be_consecutive(nccl):
    nccl.cluster.node_group([rank % 2 for rank in range(16)])
    assert nccl.made[1][0] == [1, 3, 5, 7, 9, 11, 13, 15]


def test_nodes_with_different_numbers_of_ranks_are_refused_on_all_ranks(nccl):
    with pytest.raises(CommunicationError, match=r"\(node 0 has 10, node 1 has 6\)"):
        nccl.cluster.node_group([0] * 10 + [1] * 6)
    assert nccl.made == []


@pytest.mark.parametrize("size", [0, -1, 3, 17])
def test_a_size_that_does_not_divide_the_world_is_refused(nccl, size):
    with pytest.raises(ValueError, match=f"16 ranks .* {size}"):
        nccl.cluster.subgroups(size)
    assert nccl.made == []


def test_while_nccl_splits_a_release_shuts_the_whole_groups_sockets_too_and_afterwards_it_does_not(nccl):
    assert nccl.cluster.group
    [making], made = nccl.guards[0], nccl.guards[-1]
    assert isinstance(making, SocketReleaser), "the sockets over which the whole group was made"
    assert isinstance(made[0], NcclReleaser)
    assert making not in made, "an abort frees a rank, and a watchdog may still want the store"
    nccl.cluster.subgroups(8)
    assert nccl.guarded_while_making == (*made, making)
    assert nccl.guards[-1] == made


def test_a_group_that_cannot_be_made_names_rank_and_ranks_and_restores_the_guard(nccl):
    assert nccl.cluster.group
    nccl.fails = RuntimeError("NCCL error\nmore")
    with pytest.raises(CommunicationError, match=r"^rank 5 on node-a: .* ranks 0 to 7 "):
        nccl.cluster.subgroups(8)
    assert len(nccl.guards[-1]) == 2
    nccl.fails = None
    assert nccl.cluster.subgroups(8).ranks == list(range(8))


@pytest.mark.parametrize(
    ("text", "shown"), [("wrong backend\nmore", "wrong backend"), ("", "ValueError")], ids=["with a text", "without"]
)
def test_an_argument_that_torch_refuses_is_of_the_environment(nccl, text, shown):
    nccl.fails = ValueError(text)
    with pytest.raises(CommunicationError, match=f"^rank 5 on node-a: .*: {shown}$"):
        nccl.cluster.group.size()
    assert kind_of(CommunicationError(), "call") == "error"


def test_no_group_is_made_while_torch_is_deterministic_because_it_would_switch_nvls_off_for_good(nccl):
    with deterministic(), pytest.raises(CommunicationError, match="NCCL_ALGO"):
        nccl.cluster.group.size()
    assert nccl.cluster.group
    with deterministic():
        assert nccl.cluster.subgroups(16) is nccl.cluster.group
        with pytest.raises(CommunicationError, match="NCCL_ALGO"):
            nccl.cluster.subgroups(8)
    assert len(nccl.made) == 1


def test_a_group_that_fails_by_nvls_says_so(nccl):
    nccl.fails = NO_NVLS
    with pytest.raises(NvlsFailed, match=r"rank 5 on node-a: .*Fabric Manager"):
        nccl.cluster.group.size()
    nccl.fails = None
    assert nccl.cluster.group
    nccl.fails = NO_NVLS
    with pytest.raises(NvlsFailed, match="ranks 0 to 7 "):
        nccl.cluster.subgroups(8)


NVLS = "node-a:7:8 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)\n"
READY = "node-a:7:8 [0] NCCL INFO ncclCommInitRankConfig comm 0x1 rank 5 nranks 16 cudaDev 5 - Init COMPLETE\n"


@pytest.mark.parametrize(
    ("log", "why"),
    [(READY, ""), (NVLS + READY, "NVLS is available"), ("", "cannot be seen")],
    ids=["off", "on", "none"],
)
def test_without_nvls_a_group_is_made_only_if_nccls_log_shows_that_it_is_off(nccl, monkeypatch, log, why):
    for name in ("NCCL_NVLS_ENABLE", "GPUCLUSTER_NVLS_SWITCHED_OFF"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
    assert nccl.cluster.group
    nccl.write(NVLS)
    nccl.cluster.discard(epoch=7)
    assert nccl.cluster.labels == {}
    nccl.cluster.switch_nvls_off()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert nccl.cluster.labels == {}, "this test has asked for no group since"
    monkeypatch.setattr(nccl, "says", log)
    if why:
        with pytest.raises(NvlsFailed, match=why):
            nccl.cluster.group.size()
        return
    assert nccl.cluster.group
    assert nccl.cluster.labels == WITHOUT_NVLS
    nccl.cluster.close_subgroups()
    assert nccl.cluster.labels == {}


def test_after_a_test_its_subgroups_are_destroyed_in_the_order_of_their_making_and_later_made_anew(nccl):
    alone, node, world = nccl.cluster.subgroups(1), nccl.cluster.subgroups(8), nccl.cluster.group
    nccl.cluster.close_subgroups()
    nccl.cluster.close_subgroups()
    assert nccl.destroyed == [alone.ranks, node.ranks]
    assert nccl.cluster.group is world
    nccl.cluster.subgroups(1)
    again = nccl.cluster.subgroups(8)
    assert again is not node
    assert nccl.cluster.carried_by(again).properties()["connections"] == "16 P2P/CUMEM", "of 16 ranks, one each"
    nccl.fails = RuntimeError("NCCL error")
    with pytest.raises(RuntimeError, match="NCCL error"):
        nccl.cluster.close_subgroups()
    assert nccl.destroyed[2:] == [alone.ranks, node.ranks], "the second one, too"


def test_each_group_is_told_by_its_own_part_of_the_log(nccl):
    node, world = nccl.cluster.subgroups(8), nccl.cluster.group
    with nccl.cluster.using(node):
        nccl.write(P2P)
    nccl.write(IB)
    assert nccl.cluster.carried_by(node).transport == "P2P"
    assert nccl.cluster.carried_by(world).transport == "NET/IB"
    assert nccl.cluster.carried_by(world).properties()["connections"] == "32 NET/IB/GDRDMA"
    assert nccl.cluster.carried_by(nccl.cluster.subgroups(1)).transport == "none"
    assert nccl.cluster.carried_by(world).labels == {"transport": "NET/IB", "nics": "4"}


def test_a_log_that_cannot_be_made_leaves_the_transport_unknown_and_the_group_works(nccl, monkeypatch):
    def refuse():
        raise PermissionError("/tmp/x")

    monkeypatch.setattr(nccl.cluster.nccl_log, "open", refuse)
    carried = nccl.cluster.carried_by(nccl.cluster.group)
    assert carried.transport is None
    assert re.match("rank 0: .*: /tmp/x$", carried.unknown)


def test_the_end_of_a_run_removes_the_log(nccl, tmp_path):
    assert nccl.cluster.group
    assert nccl.cluster.nccl_log.path.exists()
    with contextlib.suppress(ValueError):  # there is no real group to destroy
        nccl.cluster.close()
    assert list(tmp_path.iterdir()) == []


def test_torch_keeps_a_subgroup_in_the_register_that_an_abort_goes_through():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = dist.new_group([0], use_local_synchronization=True)
        assert set(dist.distributed_c10d._world.pg_names) == {dist.group.WORLD, made}
    finally:
        dist.destroy_process_group()


# ---- gloo, for real ------------------------------------------------------------------------------------------------

SUITE = """
import os
import time
import pytest
import torch
import torch.distributed as dist
from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from stamps import RANK, meet, stamp

def total(group):
    tensor = torch.tensor([float(RANK)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()

def test_every_size(cluster):
    assert total(cluster.subgroups(1)) == RANK
    assert total(cluster.subgroups(2)) == [1, 1, 5, 5][RANK]
    assert total(cluster.subgroups(4)) == 6
    assert cluster.subgroups(1).size() == 1
    assert cluster.subgroups(2) is cluster.subgroups(2)
    assert cluster.subgroups(4) is cluster.group

def test_nodes(cluster):
    assert total(cluster.node_group([0, 1, 0, 1])) == [2, 4, 2, 4][RANK]
    assert cluster.carried_by(cluster.subgroups(2)).labels == {"transport": "gloo"}

def test_uneven_nodes(cluster):
    cluster.node_group([0, 0, 0, 1])

def test_hang_in_a_subgroup(cluster):
    pair = cluster.subgroups(2)
    total(pair)
    stamp("hang")
    if RANK == 3:
        time.sleep(600)
    total(pair)

def test_after_hang_in_a_subgroup(cluster):
    assert total(cluster.subgroups(2)) == [1, 1, 5, 5][RANK]
    meet(cluster, "hang")

def test_hang_before_a_subgroup_is_made(cluster):
    cluster.barrier()
    if RANK == 2:
        time.sleep(600)
    total(cluster.subgroups(2))

def test_after_hang_before_a_subgroup_is_made(cluster):
    assert total(cluster.subgroups(2)) == [1, 1, 5, 5][RANK]
    meet(cluster, "making")

def test_nvls_fails_on_one_rank(cluster):
    cluster.barrier()
    if RANK == 2:
        raise RuntimeError("NCCL error\\nFailed to bind NVLink SHARP (NVLS) Multicast memory of size 1")
    cluster.barrier()

def test_nvls_is_off_on_all_ranks(cluster):
    assert cluster.nvls_off and os.environ["NCCL_NVLS_ENABLE"] == "0"
    cluster.barrier()
    assert cluster.labels == {"nvls": "switched off"}

def test_a_host_is_at_fault(cluster):
    if RANK == 2:
        raise HardwareFault("a port", hosts=[cluster.hostname])

@pytest.mark.xfail(raises=EnvironmentBroken)
def test_a_host_as_expected(cluster):
    if RANK == 2:
        raise EnvironmentBroken("a setting", hosts=[cluster.hostname])

@pytest.mark.xfail(raises=EnvironmentBroken)
def test_expected_of_one_rank_only(cluster):
    if RANK == 2:
        raise EnvironmentBroken("a setting", ranks=[1])
    if RANK == 1:
        raise HardwareFault("its own")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("cluster"), {"test_groups.py": SUITE}, ranks=4, deadline=2.0)


def test_groups_of_every_size_sum_up_their_own_ranks_only(run):
    assert run.verdicts["test_every_size"] == "passed"
    assert run.verdicts["test_nodes"] == "passed"


def test_uneven_nodes_are_an_error_that_says_what_to_do(run):
    assert run.verdicts["test_uneven_nodes"].startswith("error: ")
    assert "(node 0 has 3, node 1 has 1)" in run.verdicts["test_uneven_nodes"]


@pytest.mark.parametrize(
    ("fault", "victim"), [("hang_in_a_subgroup", 3), ("hang_before_a_subgroup_is_made", 2)], ids=["in it", "before it"]
)
def test_a_rank_that_hangs_holds_up_its_subgroup_only_until_the_deadline(run, fault, victim):
    assert run.verdicts[f"test_{fault}"].startswith(f"error: rank {victim} (node-a): hangs at test_groups.py:")
    assert run.verdicts[f"test_after_{fault}"] == "passed"
    assert run.left_over == []


def test_nvls_that_fails_on_one_rank_is_switched_off_on_all(run):
    assert run.verdicts["test_nvls_fails_on_one_rank"].startswith("error: rank 2 (node-a): NvlsFailed: ")
    assert run.verdicts["test_nvls_is_off_on_all_ranks"] == "passed"


def test_a_fault_of_a_host_is_no_single_rank_s(run):
    assert run.verdicts["test_a_host_is_at_fault"].startswith("failure: ranks 0-3: HardwareFault: a port")
    assert run.verdicts["test_a_host_as_expected"].startswith("skipped")
    assert run.verdicts["test_expected_of_one_rank_only"].startswith("failure: rank 1 ")
    hosts = {rank: {"host": host, "node_rank": rank // 2} for rank, host in enumerate("aabbcc")}
    hosts |= {6: {"host": "b", "node_rank": 9}}
    cases = ((0, "a", [0, 1]), (0, "c", [4, 5]), (0, "b", []), (2, "b", [2, 3]), (6, "bc", [4, 5, 6]), (0, "x", []))
    for rank, named, about in cases:
        assert ranks_at_fault(HardwareFault("x", hosts=named), rank, hosts) == about


def test_some_ranks_are_a_world_of_their_own_with_its_own_keys_and_the_same_gpu(nccl, monkeypatch):
    asked = []
    monkeypatch.setattr(
        nccl.cluster, "_store_for_group", lambda key: asked.append(key) or SimpleNamespace(set_timeout=lambda _: None)
    )
    among = nccl.cluster.among([3, 5, 12], name="isolation/9/3", deadline_seconds=60)
    assert (among.rank, among.world_size, among.nnodes, among.node_rank) == (1, 3, 2, 0)
    assert among.hosts == ["node-a", "node-a", "node-b"]
    assert among.device == nccl.cluster.device
    assert among.group is not None
    assert asked == ["isolation/9/3/group/0"]
    assert nccl.made == [("nccl", torch.device("cuda", 5))]


def test_a_part_must_not_be_made_beside_the_groups_of_all(nccl):
    assert nccl.cluster.group is not None
    with pytest.raises(RuntimeError, match="before"):
        nccl.cluster.among([5], name="x", deadline_seconds=1)


def test_a_part_is_not_made_where_an_abort_has_left_a_group_behind(nccl, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(EnvironmentBroken, match="still there"):
        nccl.cluster.among([5], name="x", deadline_seconds=1)


def test_a_rank_is_not_in_a_part_that_leaves_it_out(nccl):
    with pytest.raises(ValueError, match=r"^5 "):
        nccl.cluster.among([3], name="x", deadline_seconds=1)
