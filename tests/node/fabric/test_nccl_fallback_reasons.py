from __future__ import annotations

import pytest
from complaints import in_order
from each import of_each

from pytest_gpucluster.node.fabric.nccl_log import DIRECT, NETWORK, NODE, Reason, describe_reasons, find_reasons

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


def gather(*lines: str) -> tuple[Reason, ...]:
    return tuple(find_reasons(lines))


def test_a_log_without_a_fall_back_has_no_reasons() -> None:
    assert gather(*HEALTHY) == ()


def test_a_fall_back_to_sockets_has_the_sufficient_reason_first() -> None:
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
def test_a_line_with_a_reason_has_a_short_text(case: tuple[str, str, str]) -> None:
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
def test_any_other_line_is_no_reason(line: str) -> None:
    assert gather(line) == ()


def test_ranks_are_named_where_a_reason_is_not_that_of_all() -> None:
    none = gather("NCCL INFO NET/IB : No device found.")
    assert in_order(describe_reasons([none, none], NETWORK), "NCCL InfiniBand")
    assert in_order(describe_reasons([(), none, none, ()], NETWORK), "NCCL InfiniBand ranks 1-2")
    assert describe_reasons([], NETWORK) == ""
