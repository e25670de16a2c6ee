"""What a cloud's machines need: files and scripts of the provider, which change with its images. Pure.

The values in a provider's script are its own and are not repeated here: it is named, for the operator to source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pytest_gpucluster.nccl_advice.advice import GUIDE, Leave, Set, Step
from pytest_gpucluster.nccl_advice.fabric import EFA, IB, ROCE, TCP, Fabric
from pytest_gpucluster.nccl_advice.facts import Facts
from pytest_gpucluster.nccl_advice.sockets import of_gpus

TOPOLOGY = "NCCL_TOPO_FILE"
AZURE_TOPOLOGIES: Mapping[str, str] = {
    r"NVIDIA A100.*": "/opt/microsoft/ndv4-topo.xml",
    r"NVIDIA H100.*": "/opt/microsoft/ndv5-topo.xml",
    r"NVIDIA H200.*": "/opt/microsoft/ndv5-topo.xml",
}
"""Pattern of a GPU's name -> the description of the machine that Azure's images have for it."""
AZURE = "https://github.com/Azure/azhpc-images/tree/master/topology"

EFA_PLUGINS = ("libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so")
"""Names under which the plugin is installed. Source: https://github.com/aws/aws-ofi-nccl, INSTALL.md; the last two are
of newer installers."""
AWS = "https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md"
AWS_PLUGIN = "https://github.com/aws/aws-ofi-nccl"
AWS_PEER_MEMORY = "https://github.com/amzn/amzn-drivers/issues/282"

GOOGLE_SCRIPTS: Mapping[str, str] = {
    ROCE: "/usr/local/gib/scripts/set_nccl_env.sh",
    TCP: "/var/lib/tcpxo/lib64/nccl-env-profile.sh",
}
"""Fabric of a Google machine -> the script that sets what its plugin needs: gIB (A3 Ultra, A4), GPUDirect-TCPXO (A3
Mega). In a container of GKE the latter is in /usr/local/nvidia/lib64."""
GOOGLE_IN_CONTAINER = "/usr/local/nvidia/lib64/nccl-env-profile.sh"
OF_MEGA = 8
"""Cards for the GPUs of an A3 Mega. With fewer it is an A3 High: GPUDirect-TCPX, which has no such script."""
GOOGLE_PLUGINS = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")
"""How the variables of GPUDirect-TCPXO and -TCPX begin."""
DEMANDED = frozenset(("NCCL_ALGO", "NCCL_NVLS_ENABLE"))
"""What these plugins want set to a value that hurts elsewhere: they check it, or leave NVLS out. Source: the script
nccl-env-profile.sh and the checker's a3plus_guest_config.textproto, which belong to the plugin."""
OF_GOOGLE: Mapping[str, Sequence[str]] = {
    TCP: (*sorted(DEMANDED), "NCCL_PROTO"),
    ROCE: ("NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL", "NCCL_IB_TC", "NCCL_IB_QPS_PER_CONNECTION"),
}
"""Fabric of a Google machine -> variables for which its plugin has values of its own."""
GOOGLE = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"

OF_OLD_EFA = {
    "FI_PROVIDER": "aws-ofi-nccl finds efa itself; it was needed up to 1.5",
    "FI_EFA_USE_DEVICE_RDMA": "needed before libfabric 1.18 and aws-ofi-nccl 1.7 only; where there is no RDMA read it "
    "stops the job",
    "NCCL_PROTO": "aws-ofi-nccl chooses what EFA can do; it was needed up to 1.5",
    "NCCL_MIN_NCHANNELS": "more channels make messages smaller than EFA needs them",
    "NCCL_BUFFSIZE": "AWS recommends the default",
}
"""Variable that older instructions for EFA have -> why it is best left alone by now."""

TOPOLOGY_FILE, EFA_PLUGIN, SCRIPT = "topology", "EFA plugin", "Google's script"
"""Keys of ``Facts.files``."""


def advise(facts: Facts, fabric: Fabric) -> Iterator[Set | Leave | Step | str]:
    """Yield what is to be said of a provider's machine; a text is what cannot be told."""
    if fabric.kind == EFA:
        yield from _aws(facts)
    elif facts.provider == "Azure" and fabric.kind == IB:
        yield from _azure(facts)
    elif facts.provider == "Google Cloud" and fabric.kind in (ROCE, TCP):
        yield from _google(facts, fabric)


def topology_of(facts: Facts) -> str | None:
    """Return the path of the description that Azure has for this kind of machine; None for one that is not known."""
    names = {gpu.name for gpu in facts.gpus}
    paths = {path for name in names for known, path in AZURE_TOPOLOGIES.items() if re.fullmatch(known, name)}
    return paths.pop() if len(paths) == 1 else None


def _aws(facts: Facts) -> Iterator[Leave | Step]:
    if not facts.files.get(EFA_PLUGIN):
        yield Step(
            what="install aws-ofi-nccl, and let LD_LIBRARY_PATH lead to it",
            why="no plugin for EFA was found where it is installed, nor in LD_LIBRARY_PATH: NCCL would take TCP",
            source=AWS_PLUGIN,
        )
    for name, why in OF_OLD_EFA.items():
        setting = facts.setting(name)
        now = setting.value if setting else facts.environ.get(name)
        yield Leave(name=name, why=why, source=AWS, now=now)


def _azure(facts: Facts) -> Iterator[Set | Step | str]:
    path = topology_of(facts)
    if path is None:
        listed = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus)) or facts.gpus_unknown or "no GPU is seen"
        yield f"{TOPOLOGY}: it is not known which of Azure's descriptions belongs to this machine ({listed})"
        return
    setting = facts.setting(TOPOLOGY)
    if not facts.files.get(TOPOLOGY_FILE):
        if setting is None:
            yield Step(
                what=f"bring {path} of the host to the same path here, and set {TOPOLOGY} to it",
                why="the virtual machine hides which GPU is beside which card, and the file that says so is not here",
                source=AZURE,
            )
        return
    yield Set(
        name=TOPOLOGY,
        value=path,
        why="the virtual machine hides which GPU is beside which card; this file of Azure's says it",
        source=f"{GUIDE}; {AZURE}",
        now=setting.value if setting else None,
        origin=setting.origin if setting else "",
        is_met=setting is not None and setting.value in facts.files[TOPOLOGY_FILE],
    )


def demanded(facts: Facts) -> frozenset[str]:
    """Return the variables that a provider's plugin wants set, where it is in use: they are no leftovers there."""
    in_use = any(one.name.startswith(GOOGLE_PLUGINS) for one in facts.settings)
    return DEMANDED if facts.provider == "Google Cloud" and in_use else frozenset()


def _google(facts: Facts, fabric: Fabric) -> Iterator[Leave | Step]:
    if fabric.kind == TCP and not of_gpus(facts):
        return  # a machine without the further cards that GPUs have there
    kind, found = str(fabric.kind), facts.files.get(SCRIPT)
    if found:
        # Without this variable the script of TCPXO ends the shell that sources it.
        given = f", with NCCL_LIB_DIR={found[0].rpartition('/')[0]}" if fabric.kind == TCP else ""
        what = f"source {found[0]} in the job before torchrun{given}"
        why = "it sets what Google's plugin for NCCL needs"
    elif fabric.kind == TCP and of_gpus(facts) < OF_MEGA:
        what = "set up GPUDirect-TCPX: its plugin, its daemon and the variables of Google's guide"
        why = "without the plugin NCCL does not use this network as it is meant to be"
    else:
        what = f"mount Google's plugin for NCCL, and source its script (such as {GOOGLE_SCRIPTS[kind]})"
        why = "without the plugin NCCL does not use this network as it is meant to be"
    yield Step(what=what, why=why, source=GOOGLE)
    for name in OF_GOOGLE[kind]:
        setting = facts.setting(name)
        why = "Google's plugin has a value of its own for it: take that one, or none"
        yield Leave(name=name, why=why, source=GOOGLE, now=setting.value if setting else None)
