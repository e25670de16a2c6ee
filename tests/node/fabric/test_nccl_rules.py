"""Variables that hurt are errors where they do, and others are notes or nothing."""

import dataclasses
from pathlib import Path

import pytest
from complaints import in_order
from each import of_each
from fabric_nodes import DOWN, node, roce

from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.fabric.nccl_facts import Card, Facts, VisibleGpus
from pytest_gpucluster.node.fabric.nccl_rules import RULES, excludes, judge_environment, number
from pytest_gpucluster.node.pci import PeerMemory


def cards(**changes):
    return tuple(Card(port=port) for port in node(**changes).adapters.ports)


IB, ROCE = cards(), cards(make=roce)
PEERMEM, NO_PEERMEM = (PeerMemory(module=name, why_no_dma_buf="") for name in ("nvidia_peermem", ""))
ONE_GPU = Facts(host="gpu-00", peer_memory=NO_PEERMEM, nnodes=1)
TWO_NODES = dataclasses.replace(
    ONE_GPU,
    nnodes=2,
    local_ranks=8,
    visible=VisibleGpus(nvlink=True, nvls=True),
    cards=IB,
    peer_memory=PEERMEM,
    interfaces=("lo", "eth0", "ib0"),
)


def kind(name, value, facts=TWO_NODES, **changes):
    setting = Setting(name=name, value=value, origin="environment")
    found = judge_environment(setting, dataclasses.replace(facts, **changes))
    return None if found is None else found.kind


def written(text):
    return dict(setting.split("=", 1) for setting in text.split())


# LL128: without Simple.
HURTS = written("""
NCCL_ALGO=Ring NCCL_PROTO=LL128 NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=LOC
NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_NET=Socket NCCL_NET_GDR_LEVEL=LOC NCCL_NET_GDR_READ=0 NCCL_IB_HCA==mlx4_0
NCCL_IB_GID_INDEX=3 NCCL_IB_TIMEOUT=0 NCCL_IB_PCI_RELAXED_ORDERING=0 NCCL_SOCKET_IFNAME=enp9 NCCL_PXN_DISABLE=1
NCCL_TOPO_FILE=/nonexistent/ndv5-topo.xml NCCL_BUFFSIZE=65536 NCCL_NTHREADS=64 NCCL_MAX_NCHANNELS=1 NCCL_MAX_CTAS=2
NCCL_CHECK_POINTERS=1 NCCL_DEBUG=TRACE UCX_NET_DEVICES=mlx4_0:1 CUDA_LAUNCH_BLOCKING=1
TORCH_DISTRIBUTED_DEBUG=DETAIL
""")


@of_each("case", list(HURTS.items()))
def test_what_hurts_on_two_nodes_with_a_fabric_is_an_error_of_the_environment(case):
    name, value = case
    found = judge_environment(Setting(name=name, value=value, origin="/etc/nccl.conf"), TWO_NODES)
    assert (found.kind, found.gpu.host, found.code) == ("environment", "gpu-00", name.lower())
    assert found.found.startswith(f"{name}={value} (/etc/nccl.conf): ")
    assert RULES[name].does in found.found
    assert found.remedy


NEEDS_OTHERS = """
NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE NCCL_NET_GDR_READ NCCL_ALGO NCCL_PXN_DISABLE
NCCL_MAX_CTAS NCCL_P2P_LEVEL NCCL_NET_GDR_LEVEL"""
FINE = written("""
NCCL_IB_HCA==mlx5_0:1,mlx5_3 NCCL_SOCKET_IFNAME=ib NCCL_NET=IB NCCL_NET_PLUGIN=ofi NCCL_CROSS_NIC=0
NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 NCCL_IB_TC=106 NCCL_IB_SL=1 NCCL_COLLNET_ENABLE=1 NCCL_P2P_DISABLE=0
NCCL_IB_DISABLE=0 NCCL_IB_RETRY_CNT=7 NCCL_IB_GID_INDEX=-1 UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1 UCX_TLS=rc,self
UCX_LOG_LEVEL=warn CUDA_DEVICE_MAX_CONNECTIONS=8 CUDA_LAUNCH_BLOCKING=0 OMP_NUM_THREADS=8
TORCH_DISTRIBUTED_DEBUG=INFO NCCL_SOMETHING_NEW=1
""")
NOTED = written("""
NCCL_DEBUG=INFO NCCL_IB_TIMEOUT=22 NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_PCI_RELAXED_ORDERING=1
NCCL_NET_GDR_LEVEL=SYS NCCL_PROTO=^LL128 NCCL_CUMEM_ENABLE=0 NCCL_NET_PLUGIN=none NCCL_DMABUF_ENABLE=0
NCCL_MIN_NCHANNELS=32 NCCL_ASYNC_ERROR_HANDLING=1 NCCL_BLOCKING_WAIT=1 NCCL_IB_CUDA_SUPPORT=1 NCCL_TREE_THRESHOLD=0
NCCL_WIN_ENABLE=0 NCCL_NVLS_ENABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 UCX_LOG_LEVEL=debug
""")


# Of a cluster with InfiniBand, in its users' start files and its images.
USUAL = written("""
NCCL_DEBUG=WARN NCCL_IB_HCA=mlx5 NCCL_SOCKET_IFNAME=^docker,lo NCCL_IB_QPS_PER_CONNECTION=4 NCCL_VERSION=2.27.7
UCX_TLS=ud,self,sm UCX_NET_DEVICES=mlx5_0:1 OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
""")


@of_each(
    "case",
    [
        ("NCCL_ALGO", "Ring", {"nnodes": 1, "visible": VisibleGpus(nvlink=True)}, "note"),
        ("NCCL_ALGO", "Ring", {"nnodes": 1}, "environment"),
        ("NCCL_ALGO", "NVLS,Tree", {}, "note"),
        ("NCCL_PROTO", "Simple,LL128", {}, "note"),
        ("NCCL_PROTO", "Simple,LL128", {"visible": VisibleGpus(nvls=True)}, "environment"),
        ("NCCL_PROTO", "LL", {}, "environment"),
        ("NCCL_IB_DISABLE", "1", {"cards": ()}, "note"),
        ("NCCL_IB_DISABLE", "1", {"cards": cards(ports=1, changed={0: DOWN})}, "note"),
        ("NCCL_IB_DISABLE", "true", {}, None),
        ("NCCL_DMABUF_ENABLE", "0", {"peer_memory": NO_PEERMEM}, "environment"),
        ("NCCL_IB_GID_INDEX", "3", {"cards": ROCE}, "note"),
        ("NCCL_IB_GID_INDEX", "7", {"cards": ROCE}, "environment"),
        ("NCCL_IB_GID_INDEX", "0", {}, "note"),
        ("NCCL_SOCKET_IFNAME", "lo", {}, "environment"),
        ("NCCL_SOCKET_IFNAME", "lo", {"nnodes": 1}, None),
        ("NCCL_SOCKET_IFNAME", "^lo", {}, None),
        ("NCCL_SOCKET_IFNAME", "enp9", {"interfaces": ()}, None),
        ("NCCL_P2P_LEVEL", "NVL", {}, "note"),
        ("NCCL_P2P_LEVEL", "NVL", {"visible": VisibleGpus(nvls=True)}, "environment"),
        ("NCCL_NET", "Socket", {"cards": ()}, None),
        ("UCX_NET_DEVICES", "eth0", {}, None),
        ("UCX_NET_DEVICES", "all", {}, None),
    ],
)
def test_where_it_is_set_decides(case):
    name, value, changes, expected = case
    assert kind(name, value, **changes) == expected


def test_settings_that_are_usual_or_help_or_describe_the_system_are_no_errors():
    assert {name: kind(name, value) for name, value in FINE.items()} == dict.fromkeys(FINE)
    assert {name: kind(name, value) for name, value in NOTED.items()} == dict.fromkeys(NOTED, "note")
    assert "environment" not in {kind(name, value) for name, value in USUAL.items()}


@of_each("name", NEEDS_OTHERS.split())
def test_what_needs_other_gpus_or_nodes_to_hurt_does_not_hurt_one_gpu(name):
    assert kind(name, HURTS[name], ONE_GPU) != "environment"


def test_a_topology_file_that_is_there_is_a_note(tmp_path):
    (tmp_path / "topo.xml").touch()
    assert kind("NCCL_TOPO_FILE", str(tmp_path / "topo.xml")) == "note"


def test_a_blank_before_the_equals_sign_is_a_setting_without_effect():
    found = judge_environment(Setting(name="NCCL_P2P_DISABLE ", value="1", origin="/etc/nccl.conf"), TWO_NODES)
    assert (found.kind, in_order(found.remedy, "NCCL_P2P_DISABLE= /etc/nccl.conf")) == ("note", True)


def test_every_rule_has_a_source_and_the_reference_has_it():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "reference.md").read_text(encoding="utf-8")
    rows = page.partition("| variable | what it does |")[2].partition("\n\n")[0].splitlines()
    documented = {row.split("`")[1]: row for row in rows if row.startswith("| `")}
    assert set(documented) == set(RULES)
    for name, rule in RULES.items():
        assert rule.does in documented[name], name
        assert rule.source, name
        assert rule.remedy, name


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (" 1", 1), ("+2", 2), ("-1", -1), ("0x1F", 31), ("017", 15), ("09", 0), ("", 0), ("yes", 0), ("1x", 1)],
)
def test_a_number_is_what_strtoll_takes_it_for(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    ("value", "word", "without"),
    [
        ("Ring,Tree", "nvls", True),
        ("RING, NVLS", "nvls", False),
        ("^Tree", "tree", True),
        ("^Tree", "nvls", False),
        ("allreduce:ring", "nvls", True),
        ("broadcast:ring", "nvls", False),
        ("ring;allreduce:^tree", "nvls", False),
        ("nvls;allreduce:tree", "nvls", True),
        ("LL,LL128", "simple", True),
        ("^LL128", "ll128", True),
    ],
)
def test_a_list_leaves_out_what_nccl_takes_it_to_leave_out(value, word, without):
    assert excludes(value, word) == without
