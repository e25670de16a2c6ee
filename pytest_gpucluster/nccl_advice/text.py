"""Advice as text for people, never wider than asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.nccl_advice.advice import Advised
from pytest_gpucluster.nccl_advice.advising import SEVERAL
from pytest_gpucluster.nccl_advice.facts import Facts
from pytest_gpucluster.node_info.lines import fact
from pytest_gpucluster.text import paragraph


def render(facts: Facts, advised: Advised, *, width: int) -> str:
    """Return all of it."""
    return "\n".join([*_node(facts, advised, width), *_advice(advised, width)]) + "\n"


def _node(facts: Facts, advised: Advised, width: int) -> Iterator[str]:
    fabric = advised.fabric
    yield from paragraph(f"NCCL's variables on {facts.host}", width)
    yield from fact("fabric", f"{fabric.kind or 'not known'}: {fabric.why}", width)
    for card, why in fabric.outside:
        yield from fact("", f"without {card.name}: {why}", width)
    names = " and ".join(dict.fromkeys(gpu.name for gpu in facts.gpus))
    links = "NVSwitches between them" if facts.nvls else "NVLink between them" if facts.nvlink else "no NVLink is known"
    hidden = len(facts.gpus_of_node) - len(facts.gpus)
    seen = f"{len(facts.gpus)} {names}, {links}" if facts.gpus else facts.gpus_unknown or "none"
    others = f"; {hidden} more on the PCI bus, which this process does not see" if hidden else ""
    yield from fact("GPUs", f"{seen}{others}", width)
    yield from fact("GPUDirect", str(facts.peer_memory), width)
    yield from fact("NCCL", facts.nccl or "version not known", width)
    machine = f" ({facts.machine})" if facts.machine else ""
    yield from fact("machine", f"{facts.provider or 'no cloud that is known here'}{machine}", width)
    yield from fact("container", facts.container or "none is seen", width)
    started = facts.launcher or ("not known" if facts.launcher_unknown else "none: a shell")
    within = f" in a job of {facts.scheduler}" if facts.scheduler else ""
    yield from fact("launcher", f"{started}{within}", width)
    nodes = f"{facts.nnodes}" if facts.nnodes else f"not told; advised for {SEVERAL} and more"
    yield from fact("nodes", nodes, width)


def _advice(advised: Advised, width: int) -> Iterator[str]:
    if advised.set:
        yield from _title(width, "To set", "a job takes it from the environment: see --format")
        for one in advised.set:
            yield from paragraph(f"{one.name}={one.value}", width, first="  ", rest="    ")
            yield from _more(width, one.state, one.why, one.source)
    if advised.remove:
        yield from _title(width, "Set, and harmful here", "take these out")
        for bad in advised.remove:
            yield from paragraph(f"{bad.name}={bad.value} ({bad.origin})", width, first="  ", rest="    ")
            also = f"also {', '.join(bad.also)}" if bad.also else ""
            yield from _more(width, also, bad.why, f"what to do: {bad.remedy}", bad.source)
    if advised.look:
        yield from _title(width, "Set, and good in some places only", "know why, or take these out")
        for doubt in advised.look:
            yield from paragraph(f"{doubt.name}={doubt.value} ({doubt.origin})", width, first="  ", rest="    ")
            yield from _more(width, doubt.why, doubt.source)
    if advised.leave:
        yield from _title(width, "Best left alone", "")
        for rest in advised.leave:
            now = f" (is {rest.now})" if rest.now is not None else ""
            yield from paragraph(f"{rest.name}{now}: {rest.why}", width, first="  ", rest="    ")
    if advised.steps:
        yield from _title(width, "To do beside", "")
        for step in advised.steps:
            yield from paragraph(f"{step.what}: {step.why}", width, first="  ", rest="    ")
            yield from _more(width, step.source)
    if advised.unknown:
        yield from _title(width, "Not known", "nothing is advised about these")
        for text in advised.unknown:
            yield from paragraph(text, width, first="  ", rest="    ")
    if not advised.set and not advised.remove and advised.fabric.kind is not None and not advised.unknown:
        yield ""
        yield "Nothing is to be set or taken out."


def _title(width: int, title: str, more: str) -> Iterator[str]:
    yield ""
    yield from paragraph(f"{title} ({more})" if more else title, width)


def _more(width: int, *texts: str) -> Iterator[str]:
    for text in texts:
        if text:
            yield from paragraph(text, width, first="    ", rest="    ")
