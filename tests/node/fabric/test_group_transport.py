"""What a group uses by NCCL's log, and why nothing better."""

import dataclasses

import pytest
from complaints import in_order
from each import of_each
from verdicts import SHIPPED, hold

from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.node.fabric.nccl_log import (
    DIRECT,
    NETWORK,
    NODE,
    Choice,
    choice,
    describe_reasons,
    find_reasons,
    group_transport,
)

# Written for these tests, in the formats of NCCL 2.27 and 2.28.
ONE_NODE = """\
NCCL version 2.28.9+cuda12.9
node-a:4101:4188 [0] NCCL INFO Using network IB
node-a:4101:4188 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0c1e0 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1b000 \
commId 0x9d2e1c - Init START
node-a:4101:4188 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
node-a:4101:4188 [0] NCCL INFO Channel 00/24 : 0 1 2 3 4 5 6 7
node-a:4101:4188 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0c1e0 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1b000 \
commId 0x9d2e1c - Init COMPLETE
node-a:4101:4205 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node-a:4101:4205 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node-a:4101:4205 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
node-a:4101:4206 [0] NCCL INFO NVLS comm 0x55d0c1e0 headRank 0 nHeads 8 nvlsRanks 8 buffSize 1048576 nvlsPerRankSize \
33554432 nvlsTotalSize 268435456
node-a:4101:4101 [0] NCCL INFO AllReduce: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
node-a:4101:4101 [0] NCCL INFO Broadcast: 1000000000 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}
node-a:4101:4101 [0] NCCL INFO AllReduce: 1000000000 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}
""".splitlines()
IB = "node-a:1:2 [7] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0(8)/GDRDMA"
SOCKET = "node-a:1:2 [7] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/Socket/1"
P2P = "node-a:1:2 [3] NCCL INFO Channel 05/0 : 3[3] -> 4[4] via P2P/IPC/read"
SHM = "node-a:1:2 [3] NCCL INFO Channel 05 : 3[3] -> 4[4] via SHM/direct/direct"


AWS = "NET/AWS Libfabric"


@of_each(
    "case",
    [
        (P2P, "P2P", "P2P/IPC/read"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P", "P2P/CUMEM"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", "P2P", "P2P/direct pointer"),
        ("Channel 00/0 : 0[0] -> 3[3] via P2P/indirect/1[1]", "P2P", "P2P/indirect"),
        (SHM, "SHM", "SHM/direct/direct"),
        (IB, "NET/IB", "NET/IB/GDRDMA"),
        ("Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IBext_v8/2", "NET/IB", "NET/IBext_v8"),
        (f"Channel 00/0 : 0[0] -> 8[0] [send] via {AWS}/0/GDRDMA/Shared", AWS, f"{AWS}/GDRDMA/Shared"),
        ("Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA", AWS, "NET/Libfabric/GDRDMA"),
        (
            "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/GPUDirectTCPX_v7/0",
            "NET/GPUDirectTCPX",
            "NET/GPUDirectTCPX_v7",
        ),
        (SOCKET, "NET/Socket", "NET/Socket"),
        ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP", "COLLNET/SHARP/GDRDMA"),
        ("Channel 00/0 : 0[0] -> 1[1] via WARP/9", "WARP", "WARP"),
    ],
)
def test_a_line_about_a_connection_gives_its_transport(case):
    line, transport, kind = case
    found = choice([line if "INFO" in line else f"h:1:2 [0] NCCL INFO {line}"])
    assert (found.transports, found.connections, found.unknown) == ((transport,), {kind: 1}, "")


def test_a_whole_log_has_version_network_nvls_and_algorithms():
    found = choice(ONE_NODE)
    assert found == Choice(
        transports=("P2P",),
        connections={"P2P/CUMEM/read": 2},
        algorithms={
            "AllReduce": {4: ("Ring LL",), 1000000000: ("NVLS Simple",)},
            "Broadcast": {1000000000: ("Ring Simple",)},
        },
        nvls="used",
        network="IB",
        version="2.28.9+cuda12.9",
        ranks=(8,),
    )


@of_each(
    "case",
    [
        ("AllReduce: 8 Bytes -> Algo TREE proto LL128 channel{Lo..Hi}={0..1}", "Tree LL128"),
        ("AllReduce: 8 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..1}", "NVLSTree Simple"),
        ("AllReduce: 8 Bytes -> Algo COLLNET_DIRECT proto SIMPLE channel{Lo..Hi}={0..1}", "CollnetDirect Simple"),
        ("AllReduce: 8 Bytes -> Algo WARP proto SIMPLE channel{Lo..Hi}={0..1}", "WARP Simple"),
        ("AllReduce [Symmetric]: 8 Bytes -> Kernel AllReduce_AGxLL_R nchannels 1", "symmetric AllReduce_AGxLL_R"),
        ("AllGather [Copy Engine]: 8 Bytes -> cudaMemcpy", "copy engine"),
        ("AllGather [Copy Engine]: 8 Bytes -> cudaMemcpy; CE synchronization with NVLS", "copy engine"),
        ("AllGather [Hierarchical CE]: 8 Bytes -> RMA proxy + CE", "network and copy engine"),
    ],
)
def test_an_algorithm_has_one_name_however_it_is_written(case):
    text, name = case
    of_collective = next((known for known in ("AllReduce", "AllGather") if text.startswith(known)), "")
    assert choice([f"h:1:1 [0] NCCL INFO {text}"]).algorithms == {of_collective: {8: (name,)}}


def test_available_nvls_differs_from_nvls_in_use():
    off, on = (f"NCCL INFO NVLS multicast support is {word}available on dev 0" for word in ("not ", ""))
    logs = {"not available": [off], "available": [on], "used": ["NCCL INFO Connected NVLS tree", on], "": []}
    assert {nvls: choice(lines).nvls for nvls, lines in logs.items()} == {nvls: nvls for nvls in logs}


def test_what_is_no_connection_leaves_the_transport_unknown():
    start = "Channel 00/0 : 0[0] -> 1[1] via"
    for line in ("", "NCCL INFO Channel 00/24 : 0 1 2 3", "via NET/IB/0", start, "\0\0\0", "Bytes -> Algo"):
        found = choice([line])
        assert found.transports == ()
        assert in_order(found.unknown, "log connection")


def together(*lines_of_ranks, ranks=16, hosts=1):
    return group_transport([choice(lines) for lines in lines_of_ranks], ranks=ranks, hosts=hosts)


@of_each(
    "case",
    [
        ([[P2P], [P2P]], "P2P"),
        ([[P2P], [SHM]], "SHM"),
        ([[P2P, IB], [P2P], [SHM]], "NET/IB"),
        ([[P2P, IB], [P2P, SOCKET]], "NET/Socket"),
        ([[IB], [IB.replace("NET/IB", "NET/gIB")]], "NET/IB+NET/gIB"),
        ([[IB], [P2P.replace("P2P", "WARP")]], "WARP"),
    ],
)
def test_the_farthest_hop_of_any_rank_is_the_groups_transport(case):
    lines, transport = case
    found = together(*lines)
    assert (found.transport, found.labels) == (transport, {"transport": transport})


def test_nvlink_between_hosts_is_p2p_and_one_rank_alone_has_no_connections():
    line = "h:1:2 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] via P2P/MNNVL"
    assert together([P2P], [line], hosts=2).transport == "P2P"
    assert together([], [], ranks=1).labels == {"transport": "none"}
    assert together([IB], [IB]).properties()["algorithms"].startswith("unknown:")


def test_one_rank_that_does_not_know_leaves_all_without_a_transport():
    found = together([P2P, IB], [])
    assert (found.transport, found.labels) == (None, {})
    assert in_order(found.properties()["transport"], "unknown: rank 1:")
    assert group_transport([], ranks=8, hosts=1).transport is None


def test_hosts_that_no_log_shows_a_connection_between_leave_the_transport_unknown():
    found = together([P2P], [SHM], hosts=2)
    assert found.transport is None
    assert in_order(found.unknown, "2 P2P SHM")


def test_the_properties_add_up_all_ranks():
    found = together(ONE_NODE, [P2P, P2P], ranks=8).properties()
    assert found == {
        "transport": "P2P",
        "connections": "2 P2P/CUMEM/read, 2 P2P/IPC/read",
        "algorithms": "4 B: Ring LL; 1000000000 B: NVLS Simple",
        "nvls": "used",
        "network": "IB",
        "version": "2.28.9+cuda12.9",
    }


def test_the_recorded_algorithms_are_those_of_the_collective_that_was_measured():
    expected = {
        "broadcast": "1000000000 B: Ring Simple",
        "all_gather": "known",
        "all_to_all": "none",
        "send_recv": "none",
    }
    for collective, words in expected.items():
        assert words in together(ONE_NODE, ranks=8).properties(collective)["algorithms"]


def saying(*lines, reasons=(), cards=8):
    return dataclasses.replace(choice(lines), reasons=tuple(find_reasons(reasons)), cards=cards)


NO_DEVICE = "node-a:1:2 [0] NCCL INFO NET/IB : No device found."
HOST_MEMORY = IB.replace("/GDRDMA", "")
NO_MODULE = "node-a:1:2 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"


def test_a_fall_back_to_sockets_is_on_record_with_its_reason_and_explains_a_miss():
    found = group_transport([saying(SOCKET, reasons=[NO_DEVICE]), saying(SOCKET)], ranks=16, hosts=2)
    assert in_order(found.why, "NCCL InfiniBand rank 0")
    assert found.properties()["why"] == found.why
    assert found.add_to({"samples": 3}) == {"samples": 3, "transport": found.why}


def test_a_path_through_host_memory_has_the_reason_against_gpudirect_rdma():
    found = group_transport([saying(IB, HOST_MEMORY, P2P, reasons=[NO_MODULE, NO_DEVICE])], ranks=16, hosts=2)
    assert found.transport == "NET/IB"
    assert in_order(found.why, "GPUDirect RDMA 1 2 mlx5_0 nvidia_peermem DMA-BUF")
    silent = group_transport([saying(HOST_MEMORY)], ranks=16, hosts=2)
    assert in_order(silent.why, "GPUDirect RDMA 1 1")
    line = "node-a:1:2 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1."
    assert "NCCL_P2P_DISABLE=1" in group_transport([saying(SHM, reasons=[line])], ranks=2, hosts=1).why


@pytest.mark.parametrize("lines", [[IB], [P2P], [P2P, IB]], ids=["direct", "nvlink", "both"])
def test_where_no_better_transport_is_known_there_is_no_reason(lines):
    found = group_transport([saying(*lines, reasons=[NO_DEVICE, NO_MODULE])], ranks=16, hosts=1)
    assert found.why == ""
    assert "why" not in found.properties()
    assert found.add_to({"samples": 3}) == {"samples": 3}


@pytest.mark.parametrize(
    ("log", "outcome", "words"),
    [
        (saying(P2P, IB), "passed", ""),
        (saying(SOCKET, reasons=[NO_DEVICE]), "failed", "NET/Socket expected NET/IB InfiniBand device"),
        (Choice(unknown="NCCL_DEBUG=WARN is set"), "error", "NET/IB rank 0: NCCL_DEBUG=WARN"),
    ],
    ids=["expected", "another", "unknown"],
)
def test_two_nodes_pass_over_infiniband_only_and_the_log_has_the_reason(log, outcome, words):
    found = group_transport([log] * 16, ranks=16, hosts=2)
    labels = {"size": "1 GB", "dtype": "bf16", **found.labels}
    made = measurement("nccl.all_reduce.busbw", 440.0, unit="GB/s", labels=labels, telemetry=found.add_to({}))
    verdict = hold({rank: [made] for rank in range(16)}, size=16, limits=SHIPPED)
    assert verdict.outcome == outcome, verdict.text
    assert in_order(verdict.text, words)


@of_each(
    "case",
    [
        ((8, 8), IB, {"transport": "NET/IB", "nics": "8"}),
        ((8, 4), IB, {"transport": "NET/IB", "nics": "8"}),
        ((8, None), IB, {"transport": "NET/IB"}),
        ((4, 4), P2P.replace("P2P/IPC/read", "P2P/MNNVL"), {"transport": "P2P"}),
        ((4, 4), SOCKET, {"transport": "NET/Socket"}),
        ((4, 4), IB.replace("NET/IB", AWS), {"transport": AWS, "nics": "4"}),
    ],
    str,
)
def test_a_node_that_has_lost_cards_does_not_lower_the_number_of_all(case):
    cards, line, labels = case
    found = group_transport([saying(line, cards=some) for some in cards], ranks=16, hosts=2)
    assert found.labels == labels
    assert found.properties().get("nics", "unknown") == labels.get("nics", "unknown")


@pytest.mark.parametrize(
    ("cards", "outcome", "words"),
    [(4, "passed", ""), (8, "failed", "320 GB/s < 437 GB/s"), (None, "failed", "437 GB/s network cards unknown")],
)
def test_four_cards_are_judged_by_what_four_can_do_and_an_unknown_number_as_a_full_set(cards, outcome, words):
    found = group_transport([saying(IB, cards=cards)] * 16, ranks=16, hosts=2)
    labels = {"size": "1 GB", "dtype": "bf16", **found.labels}
    made = measurement("nccl.all_reduce.busbw", 320.0, unit="GB/s", labels=labels, telemetry=found.add_to({}))
    verdict = hold({rank: [made] for rank in range(16)}, size=16, sku="H200", limits=SHIPPED)
    assert verdict.outcome == outcome, verdict.text
    assert in_order(verdict.text, words)


@pytest.mark.parametrize("sku", ["H100 SXM", "H20", "H200", "A100 80GB", "B200", "B300"])
def test_with_fewer_cards_no_rate_between_nodes_is_judged_by_the_floor_of_a_full_set(sku):
    for metric in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "link"):
        name = "link.bandwidth" if metric == "link" else f"nccl.{metric}.busbw"
        for nnodes in (2, 4, 16):
            where = {"sku": sku, "world_size": 8 * nnodes, "nnodes": nnodes}
            labels = {"size": "1 GB", "transport": "NET/IB"}
            floors = [
                SHIPPED.limit(name, labels={**labels, "nics": cards}, **where).min for cards in ("8", "4", "2", "1")
            ]
            assert floors == sorted(set(floors), reverse=True), (name, nnodes)


# In the formats of NCCL 2.18 to 2.28, as logs of users have them.
SOCKETS = """\
node-a:4101:4101 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.4<0>
node-a:4101:4188 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
node-a:4101:4188 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so
node-a:4101:4188 [0] NCCL INFO NCCL_IB_HCA set to mlx5_8
node-a:4101:4188 [0] NCCL INFO NET/IB : No device found.
node-a:4101:4188 [0] NCCL INFO Failed to initialize NET plugin IB
node-a:4101:4188 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0> [1]eth1:10.1.0.4<0>
node-a:4101:4188 [0] NCCL INFO Initialized NET plugin Socket
node-a:4101:4188 [0] NCCL INFO Using network Socket
""".splitlines(keepends=True)
HEALTHY = """\
node-a:4101:4188 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.4<0>
node-a:4101:4188 [0] NCCL INFO Using network IB
node-a:4101:4188 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
node-a:4101:4188 [0] NCCL INFO GPU Direct RDMA Enabled for GPU 0 / HCA 0 (distance 4 <= 5), read 1 mode Default
node-a:4101:4188 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
node-a:4101:4205 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
node-a:4101:4205 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
""".splitlines()


def gather(*lines):
    return tuple(find_reasons(lines))


def test_a_log_without_a_fall_back_has_no_reasons():
    assert gather(*HEALTHY) == ()


def test_a_fall_back_to_sockets_has_the_sufficient_reason_first():
    text = describe_reasons([gather(*SOCKETS)], NETWORK)
    assert in_order(text, "NCCL InfiniBand IB libnccl-net.so NCCL_IB_HCA=mlx5_8 eth0 eth1")
    assert describe_reasons([gather(*SOCKETS)], DIRECT) == ""


@of_each(
    "case",
    [
        ("INFO NCCL_IB_DISABLE set by environment to 1.", NETWORK, "NCCL_IB_DISABLE=1"),
        ("INFO NCCL_NET set by environment to Socket.", NETWORK, "NCCL_NET=Socket"),
        ("INFO Failed to open libibverbs.so[.1]", NETWORK, "libibverbs"),
        ("WARN NET/IB : Unable to open device mlx5_0", NETWORK, "mlx5_0"),
        ("INFO NET/Plugin: Could not find: libnccl-net-ofi.so. Using internal", NETWORK, "libnccl-net-ofi.so"),
        ("INFO NET/Plugin : dlerror=libnccl-net.so: cannot open No plugin found (libnccl-net.so), using internal "
         "implementation", NETWORK, "libnccl-net.so"),
        ("INFO External network plugin /opt/net.so is unsupported", NETWORK, "/opt/net.so"),
        ("INFO NCCL_SOCKET_IFNAME set by environment to docker0", NETWORK, "NCCL_SOCKET_IFNAME=docker0"),
        ("INFO NET/Socket : Using [0]docker0:172.17.0.2<0>", NETWORK, "docker0"),
        ("INFO NET/IB : GPU Direct RDMA Disabled for HCA 5 'mlx5_5'", DIRECT, "mlx5_5 nvidia_peermem DMA-BUF"),
        ("INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)", DIRECT, "mlx5_0 module"),
        ("INFO GPU Direct RDMA Disabled for GPU 0 / HCA 0 (distance 8 > 5)", DIRECT, "distance 8 5"),
        ("INFO GPU Direct RDMA Disabled for GPU 1b000 / HCA 2 (distance 4 > 3)", DIRECT, "distance 4 3"),
        ("INFO NCCL_NET_GDR_LEVEL set by environment to LOC", DIRECT, "NCCL_NET_GDR_LEVEL=LOC"),
        ("INFO NCCL_DMABUF_ENABLE set by environment to 0.", DIRECT, "NCCL_DMABUF_ENABLE=0"),
        ("INFO NCCL_P2P_DISABLE set by environment to 1.", NODE, "NCCL_P2P_DISABLE=1"),
        ("INFO NCCL_P2P_LEVEL set by environment to LOC", NODE, "NCCL_P2P_LEVEL=LOC"),
        ("INFO NCCL_SHM_DISABLE set by environment to 1.", NODE, "NCCL_SHM_DISABLE=1"),
        ("WARN P2P is disabled between NVLINK connected GPUs 5 and 4. This should not be", NODE, "P2P GPUs 5 4"),
        ("INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message", NODE, "P2P GPUs 1 0"),
    ],
)  # fmt: skip
def test_a_line_with_a_reason_has_a_short_text(case):
    line, about, words = case
    [reason] = gather(f"node-a:1:2 [0] NCCL {line}\n")
    assert reason.about == about
    assert in_order(reason.text, words)


@pytest.mark.parametrize(
    "line",
    [
        "NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
        "NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so",
        "NCCL INFO PROFILER/Plugin: Could not find: libnccl-profiler.so",
        "NCCL INFO AllReduce: 8 Bytes -> Algo RING NET/IB : No device found.",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.4<0>",
        "",
        "\0\0NET/",
    ],
)
def test_any_other_line_is_no_reason(line):
    assert gather(line) == ()


def test_ranks_are_named_where_a_reason_is_not_that_of_all():
    none = gather("NCCL INFO NET/IB : No device found.")
    assert in_order(describe_reasons([none, none], NETWORK), "NCCL InfiniBand")
    assert in_order(describe_reasons([(), none, none, ()], NETWORK), "NCCL InfiniBand ranks 1-2")
    assert describe_reasons([], NETWORK) == ""
