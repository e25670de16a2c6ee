"""From the facts of a node to all advice about NCCL's variables on it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.node.fabric import nccl_advice_rules
from pytest_gpucluster.node.fabric.nccl_advice_rules import Advice, Item, Step, leave
from pytest_gpucluster.node.fabric.nccl_facts import EFA, IB, ROCE, Fabric, Facts, find_fabric
from pytest_gpucluster.node.fabric.nccl_rules import GUIDE, RULES, judge_environment, unneeded

SLURM_EXPORT = "SLURM_EXPORT_ENV"
"""What steps of a job take from its environment: ``sbatch --export`` sets it. Source: sbatch(1), --export=NONE."""
_PEER_MEMORY = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html"


@dataclass(frozen=True, kw_only=True)
class NcclAdvice:
    """All advice for a node; at most one entry about each variable.

    Attributes:
        fabric: of the node; where its kind is None, nothing about it is advised.
        set, remove, look, leave: by the kind of advice.
        steps: to do besides.
        unknown: what is unknown, and what to do about it.
    """

    fabric: Fabric
    set: tuple[Advice, ...] = ()
    remove: tuple[Advice, ...] = ()
    look: tuple[Advice, ...] = ()
    leave: tuple[Advice, ...] = ()
    steps: tuple[Step, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether a variable has to be set or removed."""
        return bool(self.remove) or any(not advice.is_met for advice in self.set)

    def notes(self, host: str) -> Iterator[Finding]:
        """Yield a note for each variable that should be set and is not, or is set otherwise."""
        for advice in self.set:
            if not advice.is_met:
                yield Finding(
                    code=f"advice.{advice.name.lower()}",
                    kind="note",
                    gpu=Identity(host=host),
                    found=f"{advice.name} is {advice.state}: {advice.why}",
                    allowed=f"{advice.name}={advice.value} is advised",
                    remedy=f"set it, or keep what works; source: {advice.source}",
                )

    def properties(self) -> dict[str, str]:
        """Return the properties to record with a criterion."""
        found = {"advice.fabric": f"{self.fabric.kind or 'unknown'}: {self.fabric.why}"}
        found |= {f"advice.{one.name}": f"{one.value}; {one.state}; {one.why}" for one in self.set}
        found |= {f"advice.step.{number}": f"{one.what}: {one.why}" for number, one in enumerate(self.steps, start=1)}
        return found | {f"advice.unknown.{number}": text for number, text in enumerate(self.unknown, start=1)}

    def to_json(self) -> dict[str, Any]:
        """Return plain types: ``fabric``, and a list for each of the other attributes."""
        fabric = self.fabric
        return {
            "fabric": {
                "kind": fabric.kind,
                "why": fabric.why,
                "ports": [card.name for card in fabric.cards],
                "outside": {card.name: why for card, why in fabric.outside},
                "slow": [card.name for card in fabric.slow],
                "unclear": fabric.unclear,
            },
            "set": [advice.to_json() for advice in self.set],
            "remove": [advice.to_json() for advice in self.remove],
            "look": [advice.to_json() for advice in self.look],
            "leave": [advice.to_json() for advice in self.leave],
            "steps": [vars(step) for step in self.steps],
            "unknown": list(self.unknown),
        }


def advise(facts: Facts) -> NcclAdvice:
    """Return the advice for a node. Where its fabric is unknown, none is given about it."""
    fabric = find_fabric(facts)
    items: list[Item] = []
    if fabric.kind is None:
        items.append(f"the network that carries the data: {fabric.why}")
    if facts.launcher_unknown:
        items.append(f"the launcher: {facts.launcher_unknown}")
    if facts.gpus_unknown:
        items.append(f"the GPUs: {facts.gpus_unknown}")
    items += [
        *nccl_advice_rules.advise_cards(facts, fabric),
        *nccl_advice_rules.advise_sockets(facts, fabric),
        *nccl_advice_rules.advise_cloud(facts, fabric),
        *(leave(facts, name, unset.why, unset.source) for name, unset in unneeded(facts, fabric)),
        *_steps(facts, fabric),
    ]
    wanted = [item for item in items if isinstance(item, Advice) and item.kind == "set"]
    items += _launcher_steps(facts, wanted)
    present = list(_present(facts, {advice.name for advice in wanted if advice.is_met}))
    changed = {advice.name for advice in (*wanted, *present) if advice.kind != "look"}
    # A variable has one entry, the first; and none where it is to be set or removed.
    unset = {item.name: item for item in reversed(items) if isinstance(item, Advice) and item.kind == "leave"}
    order = dict.fromkeys(item.name for item in items if isinstance(item, Advice) and item.name in unset)
    return NcclAdvice(
        fabric=fabric,
        set=tuple(wanted),
        remove=tuple(advice for advice in present if advice.kind == "remove"),
        look=tuple(advice for advice in present if advice.kind == "look"),
        leave=tuple(unset[name] for name in order if name not in changed),
        steps=tuple(item for item in items if isinstance(item, Step)),
        unknown=tuple(item for item in items if isinstance(item, str)),
    )


def _present(facts: Facts, met: set[str]) -> Iterator[Advice]:
    """Judge what is set, by the same rules as the criterion ``nccl.environment``."""
    for setting in facts.settings:
        found = judge_environment(setting, facts)
        if found is None or setting.name in met or setting.name in facts.required_by_plugin:
            continue
        rule = RULES.get(setting.name)
        yield Advice(
            kind="look" if found.kind == "note" else "remove",
            name=setting.name,
            value=setting.value,
            why=rule.does if rule else found.found.partition("): ")[2],
            remedy=found.remedy,
            source=rule.source if rule else GUIDE,
            setting=setting,
        )


def _launcher_steps(facts: Facts, wanted: Sequence[Advice]) -> Iterator[Step]:
    """Yield what a launcher needs, so that the variables are set on the ranks."""
    names = [advice.name for advice in wanted]
    if names and facts.launcher == "openmpi":
        yield Step(
            what=f"start with mpirun {' '.join(f'-x {name}' for name in names)}",
            why="mpirun passes no variables but its own to other hosts",
            source="https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man1/mpirun.1.html",
        )
    if names and facts.scheduler == "slurm" and not steps_inherit(facts):
        yield Step(
            what=f"put export {SLURM_EXPORT}=ALL into the batch script",
            why=f"{SLURM_EXPORT} is {facts.environ[SLURM_EXPORT]} (sbatch --export): srun passes nothing else on",
            source="https://slurm.schedmd.com/sbatch.html#OPT_export",
        )


def steps_inherit(facts: Facts) -> bool:
    """Return whether the steps of a Slurm job get the environment of its script."""
    exported = facts.environ.get(SLURM_EXPORT)
    return exported is None or "ALL" in exported.split(",")


def _steps(facts: Facts, fabric: Fabric) -> Iterator[Step]:
    """Yield what the fabric lacks besides variables."""
    if fabric.kind in (IB, ROCE, EFA) and facts.gpus and not facts.peer_memory.is_reachable:
        module = "Amazon's module efa_nv_peermem" if fabric.kind == EFA else "nvidia_peermem"
        yield Step(
            what=f"load {module}, or use the driver's open kernel modules on Linux 5.12 or newer",
            why=f"network cards cannot access GPU memory: {facts.peer_memory}",
            source=nccl_advice_rules.AWS_PEER_MEMORY if fabric.kind == EFA else _PEER_MEMORY,
        )
    if fabric.kind in (IB, ROCE, EFA) and not facts.verbs:
        where = f"the container ({facts.container})" if facts.container else "this process"
        yield Step(
            what="give the container the node's RDMA devices (in Kubernetes the resource of the device plugin)",
            why=f"the kernel shows the ports, and {where} has no /dev/infiniband/uverbs*: NCCL would use TCP",
            source="Linux kernel, Documentation/infiniband/user_verbs.rst",
        )
    if fabric.slow:
        slow = ", ".join(f"{card.name} ({card.port.rate})" for card in fabric.slow)
        yield Step(
            what="check its cable, transceiver and switch port; excluding the port would hide the fault",
            why=f"slower than others of the same card: {slow}",
            source="docs/fabric.md, finding port_rate",
        )
    layer = fabric.cards[0].port.link_layer if fabric.cards else ""
    inactive = [card for card in facts.cards if not card.port.is_active and card.port.link_layer == layer]
    if inactive:
        listed = ", ".join(f"{card.name} {card.port.state or 'state unknown'}" for card in inactive)
        yield Step(
            what="check whether these ports have a cable",
            why=f"NCCL ignores ports that are not Active: {listed}",
            source="docs/fabric.md, finding port_inactive",
        )
