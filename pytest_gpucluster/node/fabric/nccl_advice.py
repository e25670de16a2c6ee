"""From the facts of a node to all advice about NCCL's variables on it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_gpucluster.node.fabric import nccl_advice_rules
from pytest_gpucluster.node.fabric.nccl_environment import ENVIRONMENT
from pytest_gpucluster.node.fabric.nccl_facts import (
    EFA,
    IB,
    ROCE,
    Advised,
    Fabric,
    Facts,
    Leave,
    Look,
    Remove,
    Set,
    Step,
    find,
)
from pytest_gpucluster.node.fabric.nccl_rules import GUIDE, RULES, Place, judge_environment

SEVERAL = 2
"""Nodes that a job is thought to have where nothing says how many: what is advised is for jobs over several."""
EXPORTED = "SLURM_EXPORT_ENV"
"""What steps of a job take from its environment: ``sbatch --export`` sets it. Source: sbatch(1), --export=NONE."""
_PEER_MEMORY = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html"


def advise(facts: Facts) -> Advised:
    """Return the advice for a node. Where its fabric is not known, none is given about it."""
    fabric = find(facts)
    said: list[Set | Leave | Step | str] = []
    if fabric.kind is None:
        said.append(f"which network carries the data: {fabric.why}")
    if facts.launcher_unknown:
        said.append(f"which launcher this is: {facts.launcher_unknown}")
    if facts.gpus_unknown:
        said.append(f"the GPUs: {facts.gpus_unknown}")
    said += [
        *nccl_advice_rules.advise_cards(facts, fabric),
        *nccl_advice_rules.advise_sockets(facts, fabric),
        *nccl_advice_rules.advise_cloud(facts, fabric),
        *nccl_advice_rules.advise_unneeded(facts, fabric),
        *_steps(facts, fabric),
    ]
    wanted = tuple(one for one in said if isinstance(one, Set))
    said += _handed_on(facts, wanted)
    alone = {one.name: one for one in reversed(said) if isinstance(one, Leave)}
    remove, look = _present(facts, {one.name for one in wanted if one.is_met})
    changed = {one.name for one in wanted} | {one.name for one in remove}
    return Advised(
        fabric=fabric,
        set=wanted,
        remove=tuple(remove),
        look=tuple(look),
        # A variable has one entry, the first; and none where it is to be set or removed.
        leave=tuple(
            alone[name]
            for name in dict.fromkeys(one.name for one in said if isinstance(one, Leave))
            if name not in changed
        ),
        steps=tuple(one for one in said if isinstance(one, Step)),
        unknown=tuple(one for one in said if isinstance(one, str)),
    )


def place(facts: Facts) -> Place:
    """Return where the variables are set, for the rules about variables that hurt."""
    return Place(
        nnodes=facts.nnodes if facts.nnodes is not None else SEVERAL,
        local_ranks=max(1, len(facts.gpus)),
        nvlink=facts.nvlink,
        nvls=facts.nvls,
        adapters=facts.adapters,
        peermem=bool(facts.peer_memory.module),
        interfaces=facts.interfaces,
        demanded=nccl_advice_rules.demanded(facts),
    )


def _present(facts: Facts, met: set[str]) -> tuple[list[Remove], list[Look]]:
    """Judge what is set, by the same rules as the criterion ``nccl.environment``."""
    remove: list[Remove] = []
    look: list[Look] = []
    where = place(facts)
    for setting in facts.settings:
        found = judge_environment(setting, where, facts.host)
        if found is None or setting.name in met or setting.name in where.demanded:
            continue
        rule = RULES.get(setting.name)
        source, why = rule.source if rule else GUIDE, rule.does if rule else found.found.partition("): ")[2]
        if found.kind == "note":
            look.append(Look(name=setting.name, value=setting.value, origin=setting.origin, why=why, source=source))
        else:
            remove.append(
                Remove(
                    name=setting.name,
                    value=setting.value,
                    origin=setting.origin,
                    why=why,
                    remedy=found.remedy,
                    source=source,
                    also=setting.instead_of if setting.origin == ENVIRONMENT else (),
                )
            )
    return remove, look


def _handed_on(facts: Facts, wanted: Sequence[Set]) -> Iterator[Step]:
    """Yield what a launcher needs, so that what is set here is set on the ranks."""
    names = [one.name for one in wanted]
    if names and facts.launcher == "openmpi":
        yield Step(
            what=f"start with mpirun {' '.join(f'-x {name}' for name in names)}",
            why="mpirun hands on no variables but its own to other hosts",
            source="https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man1/mpirun.1.html",
        )
    if names and facts.scheduler == "slurm" and not steps_inherit(facts):
        yield Step(
            what=f"put export {EXPORTED}=ALL into the batch script",
            why=f"{EXPORTED} is {facts.environ[EXPORTED]} (sbatch --export): srun hands on nothing else",
            source="https://slurm.schedmd.com/sbatch.html#OPT_export",
        )


def steps_inherit(facts: Facts) -> bool:
    """Tell whether the steps of a Slurm job get the environment of its script."""
    kept = facts.environ.get(EXPORTED)
    return kept is None or "ALL" in kept.split(",")


def _steps(facts: Facts, fabric: Fabric) -> Iterator[Step]:
    """Yield what is missing for the fabric, and is no variable."""
    if fabric.kind in (IB, ROCE, EFA) and facts.gpus and not facts.peer_memory.is_reachable:
        module = "Amazon's module efa_nv_peermem" if fabric.kind == EFA else "nvidia_peermem"
        yield Step(
            what=f"load {module}, or use the driver's open kernel modules on Linux 5.12 or newer",
            why=f"network cards cannot reach GPU memory: {facts.peer_memory}",
            source=nccl_advice_rules.AWS_PEER_MEMORY if fabric.kind == EFA else _PEER_MEMORY,
        )
    if fabric.kind in (IB, ROCE, EFA) and not facts.verbs:
        of = f"the container ({facts.container})" if facts.container else "this process"
        yield Step(
            what="give the container the node's RDMA devices (in Kubernetes the resource of the device plugin)",
            why=f"the kernel shows the ports, and {of} sees no /dev/infiniband/uverbs*: NCCL would take TCP",
            source="Linux kernel, Documentation/infiniband/user_verbs.rst",
        )
    if fabric.slow:
        slow = ", ".join(f"{card.name} ({card.port.rate})" for card in fabric.slow)
        yield Step(
            what="have its cable, transceiver and switch port looked at; leaving the port out would hide the fault",
            why=f"slower than others of the same card: {slow}",
            source="docs/fabric.md, finding port_rate",
        )
    inactive = [card for card in facts.cards if not card.port.is_active and card.port.link_layer == _layer(fabric)]
    if inactive:
        listed = ", ".join(f"{card.name} {card.port.state or 'state unknown'}" for card in inactive)
        yield Step(
            what="see whether these ports have a cable",
            why=f"NCCL leaves out ports that are not Active: {listed}",
            source="docs/fabric.md, finding port_inactive",
        )


def _layer(fabric: Fabric) -> str:
    return fabric.cards[0].port.link_layer if fabric.cards else ""
