"""What is to be said of a variable of NCCL, UCX or CUDA that is set: nothing, a note, or that it hurts here. Pure.

NCCL's guide has two kinds of variables: those that tell NCCL of the system may stay set; those of its section
"Debugging" "should not be used in production nor retained in scripts". So each of the latter is worth a note, and what
surely costs speed or breaks something here is more than that: see the rules.

Source: NCCL user guide, "Environment Variables", https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from pytest_gpucluster.metrics.finding import Finding, Identity, Kind
from pytest_gpucluster.nccl_environment import Setting
from pytest_gpucluster.nccl_rules import RULES
from pytest_gpucluster.nccl_values import Place

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


def judge(setting: Setting, place: Place, host: str) -> Finding | None:
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
