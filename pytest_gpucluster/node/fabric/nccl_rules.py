"""Rules about variables of NCCL, UCX and CUDA that are set: which help, which hurt, and where. Pure.

A table has a rule for each variable. Its judge returns the kind of finding for a value at the place where it is set, or
None where there is nothing to report; :func:`judge_environment` returns the finding: none, a note, or that it hurts.

NCCL's guide has two kinds of variables: those that describe the system to NCCL may stay set; those of its section
"Debugging" "should not be used in production nor retained in scripts". So each of the latter is worth a note, and what
surely costs speed or breaks something here is more than that: see the rules.

Source, unless a rule has its own: NCCL user guide, "Environment Variables",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.metrics.finding import Finding, Identity, Kind
from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.fabric.ports import selects
from pytest_gpucluster.node.infiniband import ETHERNET, INFINIBAND, Adapters
from pytest_gpucluster.node.interfaces import matches


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the variables are set, as far as it matters to what they do.

    Attributes:
        nnodes, local_ranks: nodes of the run, and ranks of this one.
        nvlink, nvls: the GPUs of a node reach each other over NVLink, and through a switch that can sum up.
        adapters: the node's InfiniBand and RoCE ports.
        peermem: the module that lets network cards reach GPU memory is loaded.
        interfaces: names of the network interfaces; empty where they are not known.
        demanded: variables that the provider's own plugin wants set here.
    """

    nnodes: int = 1
    local_ranks: int = 1
    nvlink: bool = False
    nvls: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    peermem: bool = False
    interfaces: tuple[str, ...] = ()
    demanded: frozenset[str] = frozenset()

    @property
    def link_layers(self) -> set[str]:
        """The kinds of ports that carry data."""
        return {port.link_layer for port in self.adapters.ports if port.is_active}

    @property
    def has_fabric(self) -> bool:
        """Tell whether there are nodes to reach, and ports to reach them by."""
        return self.nnodes > 1 and bool(self.link_layers)


Judge = Callable[[str, Place], Kind | None]


def number(value: str) -> int:
    """Read a number as NCCL does: what begins with none is 0, so that ``true`` means 0.

    Source: NCCL, src/misc/param.cc, ncclLoadParam, which calls strtoll.

    >>> number("1"), number("0x10"), number("true"), number("-2 ")
    (1, 16, 0, -2)
    """
    found = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)", value)
    if found is None:
        return 0
    digits = found[2]
    if digits.startswith(("0x", "0X")):
        amount = int(digits, 16)
    elif digits.startswith("0"):
        amount = int(re.split("[89]", digits)[0], 8)
    else:
        amount = int(digits)
    return -amount if found[1] == "-" else amount


def excludes(value: str, word: str) -> bool:
    """Tell whether a list of algorithms or protocols leaves one out, for all-reduce.

    >>> [excludes(value, "nvls") for value in ("Ring", "^Tree", "^NVLS", "Ring,NVLS", "ring;allreduce:nvls")]
    [True, False, True, False, False]
    """
    lists = {}
    for part in value.lower().split(";"):
        function, colon, names = part.partition(":")
        lists[function.strip() if colon else ""] = names if colon else function
    chosen = lists.get("allreduce", lists.get("", "^"))
    listed = word.lower() in [name.strip() for name in chosen.removeprefix("^").split(",")]
    return listed == chosen.startswith("^")


def when_on(kind: Kind, where: Callable[[Place], bool] = lambda place: True) -> Judge:
    """A flag that is on: of this kind where it matters, a note elsewhere."""
    return lambda value, place: None if number(value) == 0 else (kind if where(place) else "note")


def when_off(kind: Kind, where: Callable[[Place], bool] = lambda place: True) -> Judge:
    """A flag that is on by default, and set to 0."""
    return lambda value, place: ("note" if number(value) else kind) if where(place) else "note"


def _level(value: str, place: Place) -> Kind | None:
    return "environment" if value.strip().upper() == "LOC" or value.strip() == "0" else "note"


def p2p_level(value: str, place: Place) -> Kind | None:
    """Judge a level that keeps the GPUs of a node from reaching each other."""
    never = _level(value, place) == "environment" or (value.strip().upper() == "NVL" and not place.nvlink)
    return "environment" if never and place.local_ranks > 1 else "note"


def gdr_level(value: str, place: Place) -> Kind | None:
    """Judge a level that keeps network cards from GPU memory."""
    return _level(value, place) if place.has_fabric else "note"


def algorithms(value: str, place: Place) -> Kind | None:
    """Judge a choice that leaves NVLS out where there is it, or trees where there are several nodes."""
    without_nvls = excludes(value, "nvls") and place.nvls and place.local_ranks > 1
    across = excludes(value, "tree") and excludes(value, "nvlstree") and place.nnodes > 1
    return "environment" if without_nvls or across else "note"


def protocols(value: str, place: Place) -> Kind | None:
    """Judge a choice that forces LL128 where NCCL would hardly take it, or leaves Simple out."""
    # Without NVLink NCCL takes LL128 nowhere; with it, it mostly does by itself (GCP has Simple,LL128 set on H100).
    forced = not value.strip().startswith("^") and not excludes(value, "ll128") and not place.nvlink
    return "environment" if forced or excludes(value, "simple") else "note"


def network(value: str, place: Place) -> Kind | None:
    """Judge sockets where there is a fabric."""
    return "environment" if value.strip().lower() == "socket" and place.has_fabric else None


def gid_index(value: str, place: Place) -> Kind | None:
    """Judge an entry that InfiniBand does not have, or a RoCE port."""
    if number(value) < 0 or not place.link_layers:
        return None
    if ETHERNET not in place.link_layers:
        return "environment" if number(value) > 0 else "note"
    if INFINIBAND in place.link_layers:
        return "note"
    ports = [port for port in place.adapters.ports if port.is_active and port.link_layer == ETHERNET]
    missing = [port for port in ports if all(gid.index != number(value) for gid in port.gids)]
    return "environment" if missing else "note"


def cards(value: str, place: Place) -> Kind | None:
    """Judge a choice of cards of which none is active."""
    active = [port for port in place.adapters.ports if port.is_active]
    if not value.strip() or not place.adapters.ports:
        return None
    return None if any(selects(value, port) for port in active) else "environment"


def interface(value: str, place: Place) -> Kind | None:
    """Judge a choice of interfaces that are not there, or do not leave the host."""
    # NCCL takes a value of one character for none.
    if len(value) < 2 or not place.interfaces:
        return None
    chosen = [name for name in place.interfaces if matches(name, value)]
    return "environment" if not chosen or (place.nnodes > 1 and chosen == ["lo"]) else None


def ucx_devices(value: str, place: Place) -> Kind | None:
    """Judge a choice of which nothing is there."""
    if value.strip().lower() in ("", "all") or not place.adapters.ports:
        return None
    known = {f"{port.device}:{port.number}" for port in place.adapters.ports} | set(place.interfaces)
    named = [part.strip() for part in value.lstrip("^").split(",") if part.strip()]
    return "environment" if not any(part in known for part in named) else None


def topology(value: str, place: Place) -> Kind | None:
    """Judge a file that is not there."""
    return "note" if Path(value).is_file() else "environment"


def channels(value: str, place: Place) -> Kind | None:
    """Judge a number of blocks that cannot fill the links."""
    # This suite's rule: 4 blocks are a quarter of the 16 that NVLS takes on Hopper (NVLS_NCHANNELS in NCCL's log).
    return "environment" if 0 < number(value) <= 4 and place.local_ranks > 1 else "note"


def beside_others(place: Place) -> bool:
    """Tell whether there are other GPUs on the node."""
    return place.local_ranks > 1


def over_fabric(place: Place) -> bool:
    """Tell whether there is a fabric to other nodes."""
    return place.has_fabric


def through_switch(place: Place) -> bool:
    """Tell whether a switch could sum up what the GPUs of this node send."""
    return place.nvls and place.local_ranks > 1


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
            judge=algorithms,
        ),
        Rule(
            name="NCCL_PROTO",
            does="allows only some protocols. `LL128` where NCCL has not chosen it can corrupt data; without `Simple` "
            "large messages are slow; `^LL128` is a search for a bug",
            judge=protocols,
        ),
        Rule(
            name="NCCL_NVLS_ENABLE",
            does="0 switches NVLS off: hurts in a node with an NVSwitch",
            judge=when_off("environment", through_switch),
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
            judge=when_off("environment", lambda place: place.nnodes > 1 and place.nvls),
        ),
        Rule(
            name="NCCL_P2P_DISABLE",
            does="1 sends what GPUs of a node say to each other through the host's memory, instead of NVLink or PCIe; "
            "helps only where P2P over PCIe is broken (IOMMU, ACS)",
            judge=when_on("environment", beside_others),
        ),
        Rule(
            name="NCCL_P2P_LEVEL",
            does="limits how far apart GPUs may be for P2P. `LOC` is never; `NVL` leaves PCIe out; `SYS` helps on some "
            "machines without NVLink",
            judge=p2p_level,
        ),
        Rule(
            name="NCCL_P2P_DIRECT_DISABLE",
            does="1 forbids direct access to buffers of other GPUs of the same process; with one GPU a process it "
            "does nothing",
            judge=when_on("note"),
        ),
        Rule(
            name="NCCL_SHM_DISABLE",
            does="1 sends what GPUs of a node without P2P say to each other over the network; helps only where "
            "/dev/shm is too small, which is to be mended instead",
            judge=when_on("environment", beside_others),
        ),
        Rule(
            name="NCCL_IB_DISABLE",
            does="1 switches InfiniBand and RoCE off, so that TCP carries all data between nodes; belongs to clusters "
            "that have neither",
            judge=when_on("environment", over_fabric),
        ),
        Rule(
            name="NCCL_NET",
            does="forces one network. `Socket` is TCP; `IB` or a plugin's name helps, as NCCL then fails instead of "
            "falling back",
            judge=network,
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
            judge=gdr_level,
        ),
        Rule(
            name="NCCL_NET_GDR_READ",
            does="0 sends through the host's memory what leaves a GPU; helps on some machines without NVLink, and "
            "hurts with it",
            judge=when_off("environment", lambda place: place.has_fabric and place.nvlink),
        ),
        Rule(
            name="NCCL_DMABUF_ENABLE",
            does="0 leaves the way to GPU memory to nvidia_peermem: without that module GPUDirect RDMA is off",
            judge=when_off("environment", lambda place: place.has_fabric and not place.peermem),
        ),
        Rule(
            name="NCCL_IB_HCA",
            does="chooses the cards. Helps where a node also has cards for storage; without `=` it takes prefixes, so "
            "that `mlx5_1` takes mlx5_10 as well",
            judge=cards,
            remedy="unset it, or name cards of this node that are Active (`ibv_devices`)",
        ),
        Rule(
            name="NCCL_IB_GID_INDEX",
            does="chooses the address of a RoCE port; 3 is the usual one of RoCE v2 with IPv4. Belongs to RoCE: on "
            "InfiniBand it names an entry that does not exist. NCCL 2.21 and newer find it themselves",
            judge=gid_index,
        ),
        Rule(
            name="NCCL_IB_TIMEOUT",
            does="how long a lost packet is waited for. 22 helps on very large networks, and hides links that flap",
            judge=lambda value, place: "environment" if not 0 < number(value) < 32 else "note",
            remedy="unset it, or give it a value from 1 to 31: others wait for ever",
        ),
        Rule(
            name="NCCL_IB_RETRY_CNT",
            does="how often a packet is sent again; less than the default of 7 breaks jobs at a short disturbance",
            judge=lambda value, place: "note" if number(value) != 7 else None,
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
            judge=when_off("environment", over_fabric),
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
            judge=interface,
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
            judge=when_on("environment", lambda place: place.has_fabric and place.nvlink),
        ),
        Rule(
            name="NCCL_TOPO_FILE",
            does="a description of the machine; helps in virtual machines that hide it, and hurts on any other machine",
            judge=topology,
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
            judge=lambda value, place: "environment" if 0 < number(value) < 1 << 20 else "note",
        ),
        Rule(
            name="NCCL_NTHREADS",
            does="threads of each block of NCCL's kernels; fewer than the default hurt",
            judge=lambda value, place: "environment" if 0 < number(value) < 256 else "note",
        ),
        Rule(name="NCCL_MAX_NCHANNELS", does="most blocks of NCCL's kernels; a few hurt bandwidth", judge=channels),
        Rule(
            name="NCCL_MAX_CTAS",
            does="the same, under its new name; helps where computing matters more than communication",
            judge=channels,
        ),
        Rule(
            name="NCCL_MIN_NCHANNELS",
            does="fewest blocks of NCCL's kernels; more help bandwidth and take SMs from the model",
            judge=lambda value, place: "note",
        ),
        Rule(
            name="NCCL_CHECK_POINTERS",
            does="1 looks at each pointer before each call: a help in debugging that costs latency",
            judge=when_on("environment"),
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
            judge=ucx_devices,
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
            judge=lambda value, place: "note" if number(value) == 1 else None,
            remedy="set it only for the jobs that need it",
            source="NVIDIA/Megatron-LM, megatron/training/arguments.py",
        ),
        Rule(
            name="CUDA_LAUNCH_BLOCKING",
            does="1 waits for each kernel: a help in debugging that makes everything slow",
            judge=when_on("environment"),
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


DEBUGGING = frozenset(
    (
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DIRECT_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_BUFFSIZE",
        "NCCL_NTHREADS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_CHECKS_DISABLE",
        "NCCL_CHECK_POINTERS",
        "NCCL_CHECK_MODE",
        "NCCL_LAUNCH_MODE",
        "NCCL_IB_DISABLE",
        "NCCL_IB_AR_THRESHOLD",
        "NCCL_IB_OOO_RQ",
        "NCCL_IB_QPS_PER_CONNECTION",
        "NCCL_IB_SPLIT_DATA_ON_QPS",
        "NCCL_IB_CUDA_SUPPORT",
        "NCCL_IB_PCI_RELAXED_ORDERING",
        "NCCL_IB_ADAPTIVE_ROUTING",
        "NCCL_IB_ECE_ENABLE",
        "NCCL_MEM_SYNC_DOMAIN",
        "NCCL_CUMEM_ENABLE",
        "NCCL_CUMEM_HOST_ENABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_IB_GDR_LEVEL",
        "NCCL_NET_GDR_C2C",
        "NCCL_NET_GDR_READ",
        "NCCL_NET_SHARED_BUFFERS",
        "NCCL_NET_SHARED_COMMS",
        "NCCL_SINGLE_RING_THRESHOLD",
        "NCCL_LL_THRESHOLD",
        "NCCL_TREE_THRESHOLD",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_NVB_DISABLE",
        "NCCL_PXN_DISABLE",
        "NCCL_P2P_PXN_LEVEL",
        "NCCL_PXN_C2C",
        "NCCL_RUNTIME_CONNECT",
        "NCCL_GRAPH_REGISTER",
        "NCCL_LOCAL_REGISTER",
        "NCCL_LEGACY_CUDA_REGISTER",
        "NCCL_WIN_ENABLE",
        "NCCL_SET_STACK_SIZE",
        "NCCL_GRAPH_MIXING_SUPPORT",
        "NCCL_DMABUF_ENABLE",
        "NCCL_P2P_NET_CHUNKSIZE",
        "NCCL_P2P_LL_THRESHOLD",
        "NCCL_ALLOC_P2P_NET_LL_BUFFERS",
        "NCCL_COMM_BLOCKING",
        "NCCL_CGA_CLUSTER_SIZE",
        "NCCL_MAX_CTAS",
        "NCCL_MIN_CTAS",
        "NCCL_NVLS_ENABLE",
        "NCCL_IB_MERGE_NICS",
        "NCCL_MNNVL_ENABLE",
        "NCCL_MAX_NRINGS",
        "NCCL_MIN_NRINGS",
        "NCCL_RINGS",
    )
)
"""The variables of the guide's section "Debugging", and names that these had before."""


def judge_environment(setting: Setting, place: Place, host: str) -> Finding | None:
    """Return what is to be said of a variable on a host, or None.

    Args:
        setting: the variable.
        place: where it is set.
        host: the node's name.
    """
    rule = RULES.get(setting.name)
    name = setting.name.strip()
    kind: Kind | None = None
    does, remedy = "", "unset it"
    if setting.name != name:
        kind, does = "note", f"it has no effect: the blank before = makes it another name than {name}"
        remedy = f"write {name}= without a blank in {setting.origin}"
    elif rule is not None:
        kind, does, remedy = rule.judge(setting.value, place), rule.does, rule.remedy
    elif name in DEBUGGING:
        kind, does = "note", "NCCL's guide has it among those for debugging, which are not meant to stay set"
    if kind is None:
        return None
    if name in place.demanded:
        kind, remedy = "note", "leave it: the provider's plugin for NCCL wants it"
    return Finding(
        code=name.lower(),
        kind=kind,
        gpu=Identity(host=host),
        found=f"{setting}: {does}",
        allowed="not set" if kind == "environment" else "where it is meant",
        remedy=remedy,
    )
