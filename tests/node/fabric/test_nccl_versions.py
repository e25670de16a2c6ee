"""Lines that NCCL 2.18 to 2.29 have really written are read: published logs, and one of a GPU that this suite ran on.

Hosts, addresses and pointers are replaced by others. Where no address is given, the log is in a public repository that
the search for it did not name.
"""

from pathlib import Path

from complaints import in_order
from each import of_each

from pytest_gpucluster.node.fabric.nccl_log import NETWORK, choice, describe_reasons, find_reasons, unread

RECORDED = Path(__file__).parents[2] / "data/selftest/cuda-580.159.04-2.11.0-2.28.9/NCCL.775.log"
"""Recorded in November 2026 in a virtual machine with one H100 SXM, driver 580.159.04."""
NO_PLUGIN = "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."
LOGS = (
    (
        "2.18.3+cuda12.2",
        "github.com/NVIDIA/nccl-tests/issues/166",
        """
        Failed to open libibverbs.so[.1]
        NET/Socket : Using [0]ens4:192.0.2.1<0>
        Using network Socket
        NCCL_DMABUF_ENABLE set by environment to 0.
        Channel 16/0 : 0[0] -> 8[0] [receive] via NET/Socket/0
        Channel 00 : 15[7] -> 14[6] via SHM/direct/direct
        """,
        {"network": "Socket", "transports": ("SHM", "NET/Socket")},
        "libibverbs ens4",
    ),
    (
        "2.19.3+cuda12.3",
        "github.com/NVIDIA/nccl-tests/issues/185",
        """
        NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory No plugin \
found (libnccl-net.so), using internal implementation
        NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:192.0.2.1<0>
        Using non-device net plugin version 0
        Using network IB
        """,
        {"network": "IB", "transports": ()},
        "libnccl-net.so",
    ),
    (
        "2.20.5+cuda12.4",
        "github.com/NVIDIA/nccl/issues/1817",
        """
        Failed to open libibverbs.so[.1]
        NET/Socket : Using [0]eth0:192.0.2.1<0>
        Using network Socket
        """,
        {"network": "Socket"},
        "libibverbs eth0",
    ),
    (
        "2.21.5+cuda12.4",
        "github.com/NVIDIA/nccl-tests/issues/252",
        "cudaDriverVersion 12060",
        {"network": "", "transports": ()},
        "",
    ),
    (
        "2.22.3+cuda12.5",
        "github.com/NVIDIA/nccl/issues/1538",
        """
        Channel 04/0 : 0[0] -> 7[7] via P2P/CUMEM
        NVLS Head  4:  4 12
        """,
        {"nvls": "", "transports": ("P2P",)},
        "",
    ),
    (
        "2.23.4+cuda12.4",
        "github.com/NVIDIA/nccl/issues/1597",
        "Channel 07/0 : 1[1] -> 0[0] [send] via NET/AWS Libfabric/1/GDRDMA",
        {"transports": ("NET/AWS Libfabric",)},
        "",
    ),
    (
        "2.24.3+cuda12.2",
        "github.com/NVIDIA/nccl/issues/1584",
        """
        P2P plugin IBext_v8
        NET/IB : Using [0]ibp0:1/IB/SHARP [1]ibp1:1/IB/SHARP [RO]; OOB eth0:192.0.2.1<0>
        Using network IBext_v8
        ncclCommInitRankConfig comm 0x57a7c7b8 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1a000 commId 0xdf - Init START
        """,
        {"network": "IBext_v8", "ranks": ()},
        "",
    ),
    (
        "2.25.1+cuda12.2",
        "github.com/NVIDIA/nccl/issues/1637",
        f"""
        {NO_PLUGIN}
        NET/IB : No device found.
        NET/IB : Using [RO]; OOB eno1:192.0.2.1<0>
        NET/Socket : Using [0]eno1:192.0.2.1<0> [1]CloudflareWARP:172.16.0.2<0>
        Using network Socket
        """,
        {"network": "Socket"},
        "InfiniBand device libnccl-net.so eno1 CloudflareWARP",
    ),
    (
        "2.26.2+cuda12.8",
        "github.com/tinygrad/open-gpu-kernel-modules/issues/35",
        """
        NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.
        NET/IB : No device found.
        NET/Socket : Using [0]eno1:192.0.2.1<0>
        Using network Socket
        """,
        {"network": "Socket"},
        "InfiniBand device libnccl-net.so eno1",
    ),
    (
        "2.27.3+cuda12.9",
        "",  # four p4d.24xlarge with aws-ofi-nccl 1.16.2
        """
        NET/Plugin: Loaded net plugin Libfabric (v10)
        Initialized NET plugin Libfabric
        Assigned NET plugin Libfabric to comm
        Using network Libfabric
        ncclCommInitRankConfig comm 0x556d504b rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 101d0 - Init START
        ncclCommInitRankConfig comm 0x556d504b rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 101d0 - Init COMPLETE
        Channel 00/0 : 3[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA
        Channel 01/0 : 0[0] -> 1[0] [send] via NET/Libfabric/0/GDRDMA
        Connected all rings, use ring PXN 0 GDR 0
        """,
        {"network": "Libfabric", "transports": ("NET/AWS Libfabric",), "ranks": (4,)},
        "",
    ),
    (
        "2.27.5+cuda12.9",
        "",  # two nodes of eight GPUs with RoCE
        """
        NCCL_IB_DISABLE set by environment to 0.
        NET/IB : Made virtual device [0] name=mlx5_0 speed=400000 ndevs=1
        TUNER/Plugin: Could not find: libnccl-tuner.so. Using internal tuner plugin.
        ncclCommInitRank comm 0x55a0be47 rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 18000 commId 0x22 - Init COMPLETE
        AllReduce: 4 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
        """,
        {"ranks": (16,), "algorithms": {"AllReduce": {4: ("Tree LL",)}}},
        "",
    ),
    (
        "2.29.2+cuda12.8",
        "",  # two g7e.8xlarge with aws-ofi-nccl 1.18.0
        """
        ENV/Plugin: Could not find: libnccl-env.so
        NCCL git version HEAD ebd1e92
        NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR
        Using network Libfabric
        [Rank 0] ncclCommInitRank comm 0x630259b4 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 30000 - Init START
        ncclCommInitRank comm 0x630259b4 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 30000 - Init COMPLETE
        Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Libfabric/0
        Symmetric memory is not supported. cuMemEnable 1, ginSupport 0, globalNicFused 0
        """,
        {"network": "Libfabric", "transports": ("NET/AWS Libfabric",), "ranks": (2,)},
        "",
    ),
)
"""Version, source, lines without their prefix, what is read of them, words of the reasons against a network."""
OF_UNKNOWN_VERSION = """
Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
Channel 00/0 : 1[0] -> 2[0] [receive] via NET/IBext_v8/1
NVLS multicast support is available on dev 0
Connected NVLS tree
comm 0x5a0ca40 rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 38000 commId 0xf021d9037f92 - Init COMPLETE
805306368 Bytes -> Algo 1 proto 2 time 3970.683594
"""
"""Of github.com/NVIDIA/nccl/issues/1189, 1453, 1595 and 1814 and nccl-tests/issues/373, whose formats are older than
2.24. Lines on algorithms had numbers then, and no name of the collective: what was chosen is unknown."""


@of_each("log", LOGS, name=lambda log: log[0])
def test_published_lines_of_each_version_are_read(log):
    version, _, text, expected, reasons = log
    prefix = "node-a:14159:14168 [0] NCCL INFO "
    # Up to 2.22 the line with the version has no prefix.
    lines = [f"{'' if version < '2.23' else prefix}NCCL version {version}"]
    lines += [prefix + line.strip() for line in text.strip().splitlines()]
    found = choice(lines)
    assert found.version == version
    assert {name: getattr(found, name) for name in expected} == expected
    assert in_order(describe_reasons([tuple(find_reasons(lines))], NETWORK), reasons)
    assert unread(lines)[1] == []


def test_older_lines_on_algorithms_are_unknown_and_all_others_are_read():
    lines = [f"node-a:14159:14168 [0] NCCL INFO {line}" for line in OF_UNKNOWN_VERSION.strip().splitlines()]
    found = choice(lines)
    assert (found.transports, found.nvls, found.ranks) == (("P2P", "NET/IB"), "used", (4,))
    assert found.algorithms == {}
    assert unread(lines)[1] == ["805306368 Bytes -> Algo 1 proto 2 time 3970.683594"]


def test_the_recorded_log_of_one_gpu_is_read_and_no_line_that_matters_is_left():
    lines = RECORDED.read_text().splitlines()
    found = choice(lines)
    assert (found.version, found.network, found.ranks) == ("2.28.9+cuda13.0", "Socket", (1,))
    assert (found.transports, found.algorithms, found.nvls) == ((), {}, "")
    assert found.unknown != "", "one rank has no connection"
    reasons = describe_reasons([tuple(find_reasons(lines))], NETWORK)
    assert in_order(reasons, "InfiniBand device IB libnccl-net.so eth0")
    assert unread(lines)[1] == []
