"""The variables of NCCL, UCX and CUDA: what each does, and how a value is judged. Pure.

``RULES`` is the one table of them: the criterion ``nccl.environment`` and the advice of ``gpucluster node nccl-env``
follow it, and docs/reference/reference.md lists it. :func:`judge_environment` returns the finding for a variable that
is set: none, a note, or an error of the environment.

NCCL's guide has two kinds of variables: those that describe the system to NCCL may stay set; those of its section
"Debugging" "should not be used in production nor retained in scripts". So each of the latter is worth a note, and what
surely costs speed or breaks something here is an error: see the rules.

Source, unless a rule has its own: NCCL user guide, "Environment Variables",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from pytest_gpucluster.metrics.finding import Finding, Kind, finding
from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.fabric.nccl_facts import Facts
from pytest_gpucluster.node.infiniband import ETHERNET, INFINIBAND
from pytest_gpucluster.node.interfaces import matches

GUIDE = "NCCL user guide, Environment Variables"
GUIDE_URL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"

Judge = Callable[[str, Facts], Kind | None]
"""Value and node -> "environment" where it hurts, "note" where it may, or None."""


def number(value: str) -> int:
    """Read a number as NCCL does: a value that does not begin with one is 0, so that ``true`` means 0.

    Source: NCCL, src/misc/param.cc, ncclLoadParam, which calls strtoll.

    >>> number("1"), number("0x10"), number("true"), number("-2 ")
    (1, 16, 0, -2)
    """
    found = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", value)
    if found is None:
        return 0
    digits = found[2].lower()
    amount = int(digits, 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10)
    return -amount if found[1] == "-" else amount


def excludes(value: str, word: str) -> bool:
    """Return whether a list of algorithms or protocols excludes one, for all-reduce.

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


# ---- judges of a value


def _always(value: str, facts: Facts) -> Kind | None:
    return "note"


def _on(where: Callable[[Facts], bool] = lambda facts: True) -> Judge:
    """A flag that is on: an error where it matters, a note elsewhere."""
    return lambda value, facts: None if number(value) == 0 else "environment" if where(facts) else "note"


def _off(where: Callable[[Facts], bool]) -> Judge:
    """A flag that is on by default, and set to 0: an error where it matters."""
    return lambda value, facts: "environment" if where(facts) and number(value) == 0 else "note"


def _number(bad: Callable[[int], bool], kind: Kind = "environment", otherwise: Kind | None = "note") -> Judge:
    return lambda value, facts: kind if bad(number(value)) else otherwise


def _word(*words: str, kind: Kind = "environment", otherwise: Kind | None = None) -> Judge:
    return lambda value, facts: kind if value.strip().lower() in words else otherwise


def _bad(hurts: Callable[[str, Facts], bool], otherwise: Kind | None = "note") -> Judge:
    return lambda value, facts: "environment" if hurts(value, facts) else otherwise


_has_peers, _has_fabric = attrgetter("has_peers"), attrgetter("has_fabric")


def _has_fabric_and_nvlink(facts: Facts) -> bool:
    return facts.has_fabric and facts.visible.nvlink


def _has_nvls(facts: Facts) -> bool:
    return facts.visible.nvls and facts.has_peers


def _is_never(level: str) -> bool:
    return level.strip().upper() in ("LOC", "0")


def _keeps_gpus_apart(level: str, facts: Facts) -> bool:
    return facts.has_peers and (_is_never(level) or (level.strip().upper() == "NVL" and not facts.visible.nvlink))


def _excludes_an_algorithm(value: str, facts: Facts) -> bool:
    """Whether it is without NVLS where that is available, or without trees where there are several nodes."""
    without_trees = excludes(value, "tree") and excludes(value, "nvlstree")
    return (excludes(value, "nvls") and _has_nvls(facts)) or (without_trees and facts.has_other_nodes)


def _forces_a_protocol(value: str, facts: Facts) -> bool:
    """Whether it forces LL128 where NCCL would hardly use it, or excludes Simple."""
    # Without NVLink NCCL uses LL128 nowhere; with it, it mostly does by itself (GCP has Simple,LL128 set on H100).
    forced = not value.strip().startswith("^") and not excludes(value, "ll128") and not facts.visible.nvlink
    return forced or excludes(value, "simple")


def _gid_index(value: str, facts: Facts) -> Kind | None:
    """An entry that InfiniBand does not have, or a RoCE port."""
    index, layers = number(value), {port.link_layer for port in facts.active}
    if index < 0 or not layers:
        return None
    if ETHERNET not in layers:
        return "environment" if index > 0 else "note"
    missing = [port for port in facts.active if all(gid.index != index for gid in port.gids)]
    return "environment" if missing and INFINIBAND not in layers else "note"


def _selects_no_card(value: str, facts: Facts) -> bool:
    return bool(value.strip() and facts.cards) and not any(
        matches(port.device, value, port.number) for port in facts.active
    )


def _selects_no_interface(value: str, facts: Facts) -> bool:
    """Whether it selects interfaces that do not exist, or do not leave the host."""
    # NCCL ignores a value of one character.
    if len(value) < 2 or not facts.interfaces:
        return False
    chosen = [name for name in facts.interfaces if matches(name, value)]
    return not chosen or (facts.has_other_nodes and chosen == ["lo"])


def _selects_no_device(value: str, facts: Facts) -> bool:
    if value.strip().lower() in ("", "all") or not facts.cards:
        return False
    known = {card.name for card in facts.cards} | set(facts.interfaces)
    return not any(part.strip() in known for part in value.lstrip("^").split(",") if part.strip())


def _few_channels(value: str, facts: Facts) -> bool:
    """Whether there are too few blocks to fill the links."""
    # This suite's rule: 4 blocks are a quarter of the 16 that NVLS uses on Hopper (NVLS_NCHANNELS in NCCL's log).
    return 0 < number(value) <= 4 and facts.has_peers


# ---- the table


@dataclass(frozen=True)
class Rule:
    """One variable.

    Attributes:
        judge: its verdict on a value.
        does: what it does, where it helps and where it hurts.
        remedy: what to do about it.
        source: of all this.
    """

    judge: Judge
    does: str
    remedy: str = "unset it"
    source: str = GUIDE


RULES: Mapping[str, Rule] = {
    "NCCL_ALGO": Rule(
        _bad(_excludes_an_algorithm),
        "allows only some algorithms. Helps nowhere for long. `Ring` switches NVLS off, which hurts all-reduce where "
        "there is an NVSwitch (366 instead of 482 GB/s on 8 H200), and trees, which hurts many nodes",
    ),
    "NCCL_PROTO": Rule(
        _bad(_forces_a_protocol),
        "allows only some protocols. `LL128` where NCCL has not chosen it can corrupt data; without `Simple` large "
        "messages are slow; `^LL128` is a search for a bug",
    ),
    "NCCL_NVLS_ENABLE": Rule(_off(_has_nvls), "0 switches NVLS off: hurts in a node with an NVSwitch"),
    "NCCL_CUMEM_ENABLE": Rule(
        _always,
        "0 disables the memory that NVLink between nodes (MNNVL) needs; inference frameworks set it to save memory",
        source=f"{GUIDE}; vllm-project/vllm pull request 16992",
    ),
    "NCCL_MNNVL_ENABLE": Rule(
        _off(lambda facts: facts.has_other_nodes and facts.visible.nvls),
        "0 keeps NVLink between nodes (GB200 NVL72) from being used",
    ),
    "NCCL_P2P_DISABLE": Rule(
        _on(_has_peers),
        "1 sends the traffic between GPUs of a node through host memory, instead of NVLink or PCIe; helps only where "
        "P2P over PCIe is broken (IOMMU, ACS)",
    ),
    "NCCL_P2P_LEVEL": Rule(
        _bad(_keeps_gpus_apart),
        "limits how far apart GPUs may be for P2P. `LOC` is never; `NVL` excludes PCIe; `SYS` helps on some machines "
        "without NVLink",
    ),
    "NCCL_SHM_DISABLE": Rule(
        _on(_has_peers),
        "1 sends the traffic between GPUs of a node without P2P over the network; helps only where /dev/shm is too "
        "small, which should be enlarged instead",
    ),
    "NCCL_IB_DISABLE": Rule(
        _on(_has_fabric),
        "1 switches InfiniBand and RoCE off, so that TCP carries all data between nodes; belongs to clusters that have "
        "neither",
    ),
    "NCCL_NET": Rule(
        _bad(lambda value, facts: value.strip().lower() == "socket" and facts.has_fabric, None),
        "forces one network. `Socket` is TCP; `IB` or a plugin's name helps, as NCCL then fails instead of falling "
        "back",
    ),
    "NCCL_NET_PLUGIN": Rule(
        _word("none", kind="note"),
        "chooses the network plugin. `none` disables the one of the image (SHARP, EFA, GCP's)",
    ),
    "NCCL_NET_GDR_LEVEL": Rule(
        _bad(lambda value, facts: facts.has_fabric and _is_never(value)),
        "limits how far a GPU and a network card may be apart for GPUDirect RDMA. `LOC` is never, and hurts; `PHB` and "
        "`SYS` help where cards are not behind the GPUs' own PCIe switches, and can hurt elsewhere",
    ),
    "NCCL_NET_GDR_READ": Rule(
        _off(_has_fabric_and_nvlink),
        "0 sends data that leaves a GPU through host memory; helps on some machines without NVLink, and hurts with it",
    ),
    "NCCL_DMABUF_ENABLE": Rule(
        _off(lambda facts: facts.has_fabric and not facts.peer_memory.module),
        "0 leaves access to GPU memory to nvidia_peermem: without that module GPUDirect RDMA is off",
    ),
    "NCCL_IB_HCA": Rule(
        _bad(_selects_no_card, None),
        "selects the cards. Helps where a node also has cards for storage; without `=` it takes prefixes, so that "
        "`mlx5_1` selects mlx5_10 as well",
        remedy="unset it, or name cards of this node that are Active (`ibv_devices`)",
    ),
    "NCCL_IB_GID_INDEX": Rule(
        _gid_index,
        "selects the address of a RoCE port; 3 is the usual one of RoCE v2 with IPv4. Belongs to RoCE: on InfiniBand "
        "it names an entry that does not exist. NCCL 2.21 and newer find it themselves",
    ),
    "NCCL_IB_TIMEOUT": Rule(
        _number(lambda value: not 0 < value < 32),
        "how long to wait for a lost packet. 22 helps on very large networks, and hides links that flap",
        remedy="unset it, or give it a value from 1 to 31: others wait for ever",
    ),
    "NCCL_IB_RETRY_CNT": Rule(
        _number(lambda value: value != 7, "note", None),
        "how often a packet is sent again; less than the default of 7 breaks jobs at a short disturbance",
    ),
    "NCCL_IB_QPS_PER_CONNECTION": Rule(
        _always, "connections for each pair of ranks; 2 to 4 help on fabrics with several levels"
    ),
    "NCCL_IB_PCI_RELAXED_ORDERING": Rule(
        _off(_has_fabric), "1 helps in virtual machines, and is the default where it is possible; 0 hurts there"
    ),
    "NCCL_SOCKET_IFNAME": Rule(
        _bad(_selects_no_interface, None),
        "selects the interface of NCCL's own connections, and of all data where TCP carries them. Helps where hosts "
        "have several networks",
        remedy="unset it, or name an interface of this node that reaches the others (`ip -br addr`)",
    ),
    "NCCL_PXN_DISABLE": Rule(
        _on(_has_fabric_and_nvlink),
        "1 forbids the path over another GPU's card: hurts all-to-all and large jobs on fabrics of rails",
    ),
    "NCCL_TOPO_FILE": Rule(
        _bad(lambda value, facts: not Path(value).is_file()),
        "a description of the machine; helps in virtual machines that hide it, and hurts on any other machine",
        remedy="name the file that belongs to this kind of machine, or unset it",
    ),
    "NCCL_BUFFSIZE": Rule(
        _number(lambda value: 0 < value < 1 << 20),
        "bytes of the buffer between two GPUs, 4 MiB by default; less saves memory and hurts bandwidth",
    ),
    "NCCL_NTHREADS": Rule(
        _number(lambda value: 0 < value < 256),
        "threads of each block of NCCL's kernels; fewer than the default hurt",
    ),
    "NCCL_MAX_NCHANNELS": Rule(_bad(_few_channels), "most blocks of NCCL's kernels; a few hurt bandwidth"),
    "NCCL_MAX_CTAS": Rule(
        _bad(_few_channels), "the same, under its new name; helps where computing matters more than communication"
    ),
    "NCCL_CHECK_POINTERS": Rule(_on(), "1 checks each pointer before each call: a debugging aid that costs latency"),
    "NCCL_DEBUG": Rule(
        _word("trace", otherwise="note"),
        "how much NCCL logs. INFO and TRACE are for debugging; where a run sets it without NCCL_DEBUG_FILE, this suite "
        "cannot read which transport was chosen",
    ),
    "UCX_NET_DEVICES": Rule(
        _bad(_selects_no_device, None),
        "selects the cards of MPI over UCX. NCCL ignores it, unless its plugin is the one of UCX",
        remedy="unset it, or name cards of this node with their port, such as mlx5_0:1",
        source="OpenUCX documentation, FAQ: Which transports and network devices does UCX use?",
    ),
    "UCX_LOG_LEVEL": Rule(
        _word("debug", "trace", "data", "func", kind="note"),
        "how much UCX logs; debug and trace are for debugging",
        source="OpenUCX documentation, UCX environment parameters",
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": Rule(
        _number(lambda value: value == 1, "note", None),
        "1 puts all kernels into one queue: Megatron needs it for tensor and sequence parallelism up to Hopper; FSDP, "
        "whose copies and kernels should overlap, is slower with it",
        remedy="set it only for the jobs that need it",
        source="NVIDIA/Megatron-LM, megatron/training/arguments.py",
    ),
    "CUDA_LAUNCH_BLOCKING": Rule(
        _on(),
        "1 waits for each kernel: a debugging aid that makes everything slow",
        source="CUDA C programming guide, CUDA environment variables",
    ),
    "TORCH_DISTRIBUTED_DEBUG": Rule(
        _word("detail"),
        "DETAIL compares each collective between the ranks before it runs: a debugging aid that is slow",
        source="PyTorch documentation, torch.distributed, Debugging",
    ),
}
"""Name of a variable -> what is known of it."""

_DEBUGGING = re.compile(
    r"""NCCL_(?:
    CHECKS_DISABLE | CHECK_MODE | IB_AR_THRESHOLD | IB_OOO_RQ | IB_ECE_ENABLE | MEM_SYNC_DOMAIN | CUMEM_HOST_ENABLE
    | IB_GDR_LEVEL | NET_GDR_C2C | NET_SHARED_BUFFERS | NET_SHARED_COMMS | SINGLE_RING_THRESHOLD | LL_THRESHOLD |
    TREE_THRESHOLD | NVB_DISABLE | P2P_PXN_LEVEL | PXN_C2C | RUNTIME_CONNECT | GRAPH_REGISTER | LOCAL_REGISTER |
    LEGACY_CUDA_REGISTER | WIN_ENABLE | SET_STACK_SIZE | GRAPH_MIXING_SUPPORT | P2P_NET_CHUNKSIZE | P2P_LL_THRESHOLD
    | ALLOC_P2P_NET_LL_BUFFERS | COMM_BLOCKING | CGA_CLUSTER_SIZE | MIN_CTAS | IB_MERGE_NICS | MAX_NRINGS |
    MIN_NRINGS | RINGS | P2P_DIRECT_DISABLE | GRAPH_FILE | IB_SPLIT_DATA_ON_QPS | IB_CUDA_SUPPORT | LAUNCH_MODE |
    IB_ADAPTIVE_ROUTING | MIN_NCHANNELS | ASYNC_ERROR_HANDLING | BLOCKING_WAIT
    )""",
    re.VERBOSE,
)
"""Variables of the guide's section "Debugging" without a rule, and names of earlier versions of NCCL and torch."""


def judge_environment(setting: Setting, facts: Facts) -> Finding | None:
    """Return the finding for a variable that is set on this node, or None."""
    name, rule = setting.name.strip(), RULES.get(setting.name)
    if setting.name != name:
        kind: Kind | None = "note"
        does = f"it has no effect: the blank before = makes it another name than {name}"
        remedy = f"write {name}= without a blank in {setting.origin}"
    elif rule is not None:
        kind, does, remedy = rule.judge(setting.value, facts), rule.does, rule.remedy
    else:
        kind = "note" if _DEBUGGING.fullmatch(name) else None
        does, remedy = "it is a debugging aid, or of an earlier version, and should not stay set", "unset it"
    if kind is None:
        return None
    if name in facts.required_by_plugin:
        kind, remedy = "note", "leave it: the provider's plugin for NCCL requires it"
    allowed = "not set" if kind == "environment" else "where it is meant"
    return finding(kind, name.lower(), facts.host, f"{setting}: {does}", allowed=allowed, remedy=remedy)
