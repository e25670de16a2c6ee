"""What variables of NCCL, UCX and CUDA do: which help, which hurt, and where. A table of rules. Pure.

Source, unless a rule has its own: NCCL user guide, "Environment Variables",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster import nccl_values as values
from pytest_gpucluster.nccl_values import Judge

GUIDE = "NCCL user guide, Environment Variables"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One variable.

    Attributes:
        name: of the variable.
        does: what it does, where it helps and where it hurts.
        judge: what its value is here: None where there is nothing to say.
        remedy: what to do about it.
        source: where this is from.
    """

    name: str
    does: str
    judge: Judge
    remedy: str = "unset it"
    source: str = GUIDE


def _table(rules: Sequence[Rule]) -> Mapping[str, Rule]:
    return {rule.name: rule for rule in rules}


RULES: Mapping[str, Rule] = _table(
    (
        Rule(
            name="NCCL_ALGO",
            does="allows only some algorithms. Helps nowhere for long. `Ring` switches NVLS off, which hurts "
            "all-reduce where there is an NVSwitch (366 instead of 482 GB/s on 8 H200), and trees, which hurts many "
            "nodes",
            judge=values.algorithms,
        ),
        Rule(
            name="NCCL_PROTO",
            does="allows only some protocols. `LL128` where NCCL has not chosen it can corrupt data; without `Simple` "
            "large messages are slow; `^LL128` is a search for a bug",
            judge=values.protocols,
        ),
        Rule(
            name="NCCL_NVLS_ENABLE",
            does="0 switches NVLS off: hurts in a node with an NVSwitch",
            judge=values.when_off("environment", values.through_switch),
        ),
        Rule(
            name="NCCL_CUMEM_ENABLE",
            does="0 takes away the memory that NVLink between nodes (MNNVL) needs; frameworks for inference set it to "
            "save memory",
            judge=lambda value, place: "note",
            source=f"{GUIDE}; vllm-project/vllm pull request 16992",
        ),
        Rule(
            name="NCCL_MNNVL_ENABLE",
            does="0 keeps NVLink between nodes (GB200 NVL72) from being used",
            judge=values.when_off("environment", lambda place: place.nnodes > 1 and place.nvls),
        ),
        Rule(
            name="NCCL_P2P_DISABLE",
            does="1 sends what GPUs of a node say to each other through the host's memory, instead of NVLink or PCIe; "
            "helps only where P2P over PCIe is broken (IOMMU, ACS)",
            judge=values.when_on("environment", values.beside_others),
        ),
        Rule(
            name="NCCL_P2P_LEVEL",
            does="limits how far apart GPUs may be for P2P. `LOC` is never; `NVL` leaves PCIe out; `SYS` helps on some "
            "machines without NVLink",
            judge=values.p2p_level,
        ),
        Rule(
            name="NCCL_P2P_DIRECT_DISABLE",
            does="1 forbids direct access to buffers of other GPUs of the same process; with one GPU a process it "
            "does nothing",
            judge=values.when_on("note"),
        ),
        Rule(
            name="NCCL_SHM_DISABLE",
            does="1 sends what GPUs of a node without P2P say to each other over the network; helps only where "
            "/dev/shm is too small, which is to be mended instead",
            judge=values.when_on("environment", values.beside_others),
        ),
        Rule(
            name="NCCL_IB_DISABLE",
            does="1 switches InfiniBand and RoCE off, so that TCP carries all data between nodes; belongs to clusters "
            "that have neither",
            judge=values.when_on("environment", values.over_fabric),
        ),
        Rule(
            name="NCCL_NET",
            does="forces one network. `Socket` is TCP; `IB` or a plugin's name helps, as NCCL then fails instead of "
            "falling back",
            judge=values.network,
        ),
        Rule(
            name="NCCL_NET_PLUGIN",
            does="chooses the network plugin. `none` leaves out the one of the image (SHARP, EFA, GCP's)",
            judge=lambda value, place: "note" if value.strip().lower() == "none" else None,
        ),
        Rule(
            name="NCCL_NET_GDR_LEVEL",
            does="limits how far a GPU and a network card may be apart for GPUDirect RDMA. `LOC` is never, and hurts; "
            "`PHB` and `SYS` help where cards are not behind the GPUs' own PCIe switches, and can hurt elsewhere",
            judge=values.gdr_level,
        ),
        Rule(
            name="NCCL_NET_GDR_READ",
            does="0 sends through the host's memory what leaves a GPU; helps on some machines without NVLink, and "
            "hurts with it",
            judge=values.when_off("environment", lambda place: place.has_fabric and place.nvlink),
        ),
        Rule(
            name="NCCL_DMABUF_ENABLE",
            does="0 leaves the way to GPU memory to nvidia_peermem: without that module GPUDirect RDMA is off",
            judge=values.when_off("environment", lambda place: place.has_fabric and not place.peermem),
        ),
        Rule(
            name="NCCL_IB_HCA",
            does="chooses the cards. Helps where a node also has cards for storage; without `=` it takes prefixes, so "
            "that `mlx5_1` takes mlx5_10 as well",
            judge=values.cards,
            remedy="unset it, or name cards of this node that are Active (`ibv_devices`)",
        ),
        Rule(
            name="NCCL_IB_GID_INDEX",
            does="chooses the address of a RoCE port; 3 is the usual one of RoCE v2 with IPv4. Belongs to RoCE: on "
            "InfiniBand it names an entry that does not exist. NCCL 2.21 and newer find it themselves",
            judge=values.gid_index,
        ),
        Rule(
            name="NCCL_IB_TIMEOUT",
            does="how long a lost packet is waited for. 22 helps on very large networks, and hides links that flap",
            judge=lambda value, place: "environment" if not 0 < values.number(value) < 32 else "note",
            remedy="unset it, or give it a value from 1 to 31: others wait for ever",
        ),
        Rule(
            name="NCCL_IB_RETRY_CNT",
            does="how often a packet is sent again; less than the default of 7 breaks jobs at a short disturbance",
            judge=lambda value, place: "note" if values.number(value) != 7 else None,
        ),
        Rule(
            name="NCCL_IB_QPS_PER_CONNECTION",
            does="connections for each pair of ranks; 2 to 4 help on fabrics with several levels",
            judge=lambda value, place: "note",
        ),
        Rule(
            name="NCCL_IB_SPLIT_DATA_ON_QPS",
            does="1 splits each message over the connections: hurts latency",
            judge=lambda value, place: "note",
        ),
        Rule(
            name="NCCL_IB_PCI_RELAXED_ORDERING",
            does="1 helps in virtual machines, and is chosen by itself where it is possible; 0 hurts there",
            judge=values.when_off("environment", values.over_fabric),
        ),
        Rule(
            name="NCCL_IB_ADAPTIVE_ROUTING",
            does="1 is the default on InfiniBand; on RoCE it helps only where the switches do it",
            judge=lambda value, place: "note",
        ),
        Rule(
            name="NCCL_IB_CUDA_SUPPORT",
            does="nothing since NCCL 2.4: NCCL_NET_GDR_LEVEL has replaced it",
            judge=lambda value, place: "note",
        ),
        Rule(
            name="NCCL_SOCKET_IFNAME",
            does="chooses the interface of NCCL's own connections, and of all data where TCP carries them. Helps where "
            "hosts have several networks",
            judge=values.interface,
            remedy="unset it, or name an interface of this node that reaches the others (`ip -br addr`)",
        ),
        Rule(
            name="NCCL_SOCKET_NTHREADS",
            does="threads of each connection over TCP, 1 to 16; 4 help from 100 Gb/s on, and take CPUs. Does nothing "
            "where RDMA carries the data",
            judge=lambda value, place: None,
        ),
        Rule(
            name="NCCL_NSOCKS_PERTHREAD",
            does="sockets of each of these threads; 4 help from 100 Gb/s on. Threads times sockets are 64 at most",
            judge=lambda value, place: None,
        ),
        Rule(
            name="NCCL_IB_TC",
            does="the traffic class of RoCE's packets; belongs to the switches' configuration, and is lossy or slow "
            "where it is another than theirs",
            judge=lambda value, place: None,
        ),
        Rule(
            name="NCCL_IB_SL",
            does="the service level on InfiniBand; belongs to the subnet manager's configuration",
            judge=lambda value, place: None,
        ),
        Rule(
            name="NCCL_CROSS_NIC",
            does="0 keeps to rails and belongs to fabrics that are built of rails; 1 belongs to those where all cards "
            "of a node are on one switch",
            judge=lambda value, place: None,
        ),
        Rule(
            name="NCCL_COLLNET_ENABLE",
            does="1 lets switches reduce (SHARP); helps where it is set up, does nothing elsewhere",
            judge=lambda value, place: None,
        ),
        Rule(
            name="NCCL_PXN_DISABLE",
            does="1 forbids the way over another GPU's card: hurts all-to-all and large jobs on fabrics of rails",
            judge=values.when_on("environment", lambda place: place.has_fabric and place.nvlink),
        ),
        Rule(
            name="NCCL_TOPO_FILE",
            does="a description of the machine; helps in virtual machines that hide it, and hurts on any other machine",
            judge=values.topology,
            remedy="name the file that belongs to this kind of machine, or unset it",
        ),
        Rule(
            name="NCCL_GRAPH_FILE",
            does="rings and trees that somebody has computed before; hurts on any other machine",
            judge=lambda value, place: "note",
            source="NCCL, src/graph/search.cc",
        ),
        Rule(
            name="NCCL_BUFFSIZE",
            does="bytes of the buffer between two GPUs, 4 MiB by default; less saves memory and hurts bandwidth",
            judge=lambda value, place: "environment" if 0 < values.number(value) < 1 << 20 else "note",
        ),
        Rule(
            name="NCCL_NTHREADS",
            does="threads of each block of NCCL's kernels; fewer than the default hurt",
            judge=lambda value, place: "environment" if 0 < values.number(value) < 256 else "note",
        ),
        Rule(
            name="NCCL_MAX_NCHANNELS", does="most blocks of NCCL's kernels; a few hurt bandwidth", judge=values.channels
        ),
        Rule(
            name="NCCL_MAX_CTAS",
            does="the same, under its new name; helps where computing matters more than communication",
            judge=values.channels,
        ),
        Rule(
            name="NCCL_MIN_NCHANNELS",
            does="fewest blocks of NCCL's kernels; more help bandwidth and take SMs from the model",
            judge=lambda value, place: "note",
        ),
        Rule(
            name="NCCL_CHECK_POINTERS",
            does="1 looks at each pointer before each call: a help in debugging that costs latency",
            judge=values.when_on("environment"),
        ),
        Rule(
            name="NCCL_LAUNCH_MODE",
            does="how kernels are launched where one process has several GPUs; not recommended since 2.9",
            judge=lambda value, place: "note",
        ),
        Rule(
            name="NCCL_DEBUG",
            does="how much NCCL writes. INFO and TRACE are for debugging; where a run sets it without NCCL_DEBUG_FILE, "
            "this suite cannot read which transport was chosen",
            judge=lambda value, place: "environment" if value.strip().upper() == "TRACE" else "note",
        ),
        Rule(
            name="NCCL_ASYNC_ERROR_HANDLING",
            does="a name of torch's that is TORCH_NCCL_ASYNC_ERROR_HANDLING by now",
            judge=lambda value, place: "note",
            source="pytorch/pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
        ),
        Rule(
            name="NCCL_BLOCKING_WAIT",
            does="a name of torch's that is TORCH_NCCL_BLOCKING_WAIT by now",
            judge=lambda value, place: "note",
            source="pytorch/pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
        ),
        Rule(
            name="UCX_NET_DEVICES",
            does="chooses the cards of MPI over UCX. NCCL takes no notice of it, unless its plugin is the one of UCX",
            judge=values.ucx_devices,
            remedy="unset it, or name cards of this node with their port, such as mlx5_0:1",
            source="OpenUCX documentation, FAQ: Which network devices does UCX use?",
        ),
        Rule(
            name="UCX_TLS",
            does="chooses the transports of MPI over UCX; NCCL takes no notice of it",
            judge=lambda value, place: None,
            source="OpenUCX documentation, FAQ: Which transports does UCX use?",
        ),
        Rule(
            name="UCX_LOG_LEVEL",
            does="how much UCX writes; debug and trace are for debugging",
            judge=lambda value, place: "note" if value.strip().lower() in ("debug", "trace", "data", "func") else None,
            source="OpenUCX documentation, UCX environment parameters",
        ),
        Rule(
            name="CUDA_DEVICE_MAX_CONNECTIONS",
            does="1 puts all kernels into one queue: Megatron needs it for tensor and sequence parallelism up to "
            "Hopper; FSDP, whose copies and kernels are to overlap, is slower with it",
            judge=lambda value, place: "note" if values.number(value) == 1 else None,
            remedy="set it only for the jobs that need it",
            source="NVIDIA/Megatron-LM, megatron/training/arguments.py",
        ),
        Rule(
            name="CUDA_LAUNCH_BLOCKING",
            does="1 waits for each kernel: a help in debugging that makes everything slow",
            judge=values.when_on("environment"),
            source="CUDA C programming guide, CUDA environment variables",
        ),
        Rule(
            name="OMP_NUM_THREADS",
            does="threads of computations on the CPU. torchrun sets it to 1 where nobody has; a loader that computes, "
            "or an optimizer on the CPU, needs more",
            judge=lambda value, place: None,
            source="pytorch/pytorch, torch/distributed/run.py",
        ),
        Rule(
            name="TORCH_DISTRIBUTED_DEBUG",
            does="DETAIL compares each collective between the ranks before it runs: a help in debugging that is slow",
            judge=lambda value, place: "environment" if value.strip().upper() == "DETAIL" else None,
            source="PyTorch documentation, torch.distributed, Debugging",
        ),
    )
)
"""Name of a variable -> what is known of it."""
