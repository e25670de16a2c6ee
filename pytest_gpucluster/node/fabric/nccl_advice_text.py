"""Advice about NCCL as text: for people, a shell, a Slurm batch script, and ``env`` of a Kubernetes container. Pure.

Text for people is never wider than requested. In text for programs, values are quoted, so that a name with special
characters stays one word. Everything else is in comments of one printable line each.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence

from pytest_gpucluster.node.fabric.nccl_advice import SLURM_EXPORT, NcclAdvice, steps_inherit
from pytest_gpucluster.node.fabric.nccl_environment import ENVIRONMENT
from pytest_gpucluster.node.fabric.nccl_facts import SEVERAL_NODES, Facts
from pytest_gpucluster.node.info_text import fact
from pytest_gpucluster.text import paragraph, printable


def render_advice(facts: Facts, advice: NcclAdvice, *, width: int) -> str:
    """Return the facts of the node and all advice, for people."""
    return "\n".join([*_node(facts, advice, width), *_advice(advice, width)]) + "\n"


def _node(facts: Facts, advice: NcclAdvice, width: int) -> Iterator[str]:
    fabric = advice.fabric
    yield from paragraph(f"NCCL's variables on {facts.host}", width)
    yield from fact("fabric", f"{fabric.kind or 'unknown'}: {fabric.why}", width)
    for card, why in fabric.outside:
        yield from fact("", f"without {card.name}: {why}", width)
    names = " and ".join(dict.fromkeys(gpu.name for gpu in facts.gpus))
    links = "NVSwitches between them" if facts.nvls else "NVLink between them" if facts.nvlink else "no known NVLink"
    hidden = len(facts.gpus_of_node) - len(facts.gpus)
    visible = f"{len(facts.gpus)} {names}, {links}" if facts.gpus else facts.gpus_unknown or "none"
    others = f"; {hidden} more on the PCI bus, not visible to this process" if hidden else ""
    yield from fact("GPUs", f"{visible}{others}", width)
    yield from fact("GPUDirect", str(facts.peer_memory), width)
    yield from fact("NCCL", facts.nccl or "version unknown", width)
    machine = f" ({facts.machine})" if facts.machine else ""
    yield from fact("machine", f"{facts.provider or 'no known cloud'}{machine}", width)
    yield from fact("container", facts.container or "none detected", width)
    started = facts.launcher or ("unknown" if facts.launcher_unknown else "none: a shell")
    within = f" in a job of {facts.scheduler}" if facts.scheduler else ""
    yield from fact("launcher", f"{started}{within}", width)
    nodes = f"{facts.nnodes}" if facts.nnodes else f"unknown; the advice is for {SEVERAL_NODES} and more"
    yield from fact("nodes", nodes, width)


def _advice(advice: NcclAdvice, width: int) -> Iterator[str]:
    also = {one.name: f"also {', '.join(one.also)}" if one.also else "" for one in advice.remove}
    sections: dict[str, list[Sequence[str]]] = {
        "To set (a job takes it from the environment: see --format)": [
            (f"{one.name}={one.value}", one.state, one.why, one.source) for one in advice.set
        ],
        "Set, and harmful here (remove these)": [
            (f"{one.name}={one.value} ({one.origin})", also[one.name], one.why, f"what to do: {one.remedy}", one.source)
            for one in advice.remove
        ],
        "Set, and good in some places only (know why, or remove these)": [
            (f"{one.name}={one.value} ({one.origin})", one.why, one.source) for one in advice.look
        ],
        "Best left unset": [
            (f"{one.name}{'' if one.now is None else f' (is {one.now})'}: {one.why}",) for one in advice.leave
        ],
        "To do besides": [(f"{step.what}: {step.why}", step.source) for step in advice.steps],
        "Unknown (nothing is advised about these)": [(text,) for text in advice.unknown],
    }
    for title, entries in sections.items():
        if entries:
            yield ""
            yield from paragraph(title, width)
        for first, *details in entries:
            yield from paragraph(first, width, first="  ", rest="    ")
            for detail in filter(None, details):
                yield from paragraph(detail, width, first="    ", rest="    ")
    if not advice.set and not advice.remove and advice.fabric.kind is not None and not advice.unknown:
        yield ""
        yield "Nothing is to be set or removed."


def shell(facts: Facts, advice: NcclAdvice) -> str:
    """Return lines for ``eval`` or ``source``: exports and unsets, with the reasons as comments."""
    return _text([*_head(facts, advice), *_of_shell(advice), *_remarks(advice)])


def slurm(facts: Facts, advice: NcclAdvice) -> str:
    """Return lines for a batch script, before its srun.

    They are exports and no ``--export=NAME=VALUE``: there a comma begins the next name, and NCCL's lists have commas.
    Source: sbatch(1), --export.
    """
    before = "For the batch script, before srun, which passes the environment on unless --export forbids it"
    lines = [*_head(facts, advice), _comment(before)]
    if not steps_inherit(facts):
        lines += [f"export {SLURM_EXPORT}=ALL"]
    return _text([*lines, *_of_shell(advice), *_remarks(advice)])


def yaml(facts: Facts, advice: NcclAdvice) -> str:
    """Return a list for ``env`` of a container in Kubernetes; an empty list where nothing is to be set."""
    lines = list(_head(facts, advice))
    for one in advice.remove:
        lines.append(_comment(f"remove {one.name} ({one.name}={one.value}, {one.origin}): {one.why}"))
    for wanted in advice.set:
        lines += [_comment(f"{wanted.name}: {wanted.why} ({wanted.source})")]
        lines += [f"- name: {wanted.name}", f"  value: {json.dumps(wanted.value)}"]
    if not advice.set:
        lines.append("[]")
    return _text([*lines, *_remarks(advice)])


def _of_shell(advice: NcclAdvice) -> Iterator[str]:
    wanted = {one.name for one in advice.set}
    for one in advice.remove:
        yield _comment(f"{one.name}={one.value}: {one.why}")
        if one.origin != ENVIRONMENT:
            yield _comment(f"remove it from {one.origin}: unset does not undo it")
        elif one.name not in wanted:
            yield f"unset {one.name}"
        for other in one.also:
            yield _comment(f"and remove it where it is {other}")
    for new in advice.set:
        yield _comment(f"{new.name}: {new.why} ({new.source})")
        yield f"export {new.name}={_word(new.value)}"


def _head(facts: Facts, advice: NcclAdvice) -> Iterator[str]:
    yield _comment(
        f"gpucluster node nccl-env on {facts.host}; {advice.fabric.kind or 'unknown fabric'}: {advice.fabric.why}"
    )
    if not advice.set and not advice.remove:
        yield _comment("nothing is to be set" if advice.fabric.kind else "the fabric is unknown, so nothing is advised")


def _remarks(advice: NcclAdvice) -> Iterator[str]:
    for step in advice.steps:
        yield _comment(f"to do: {step.what}; {step.why} ({step.source})")
    for text in advice.unknown:
        yield _comment(f"unknown: {text}")


def _comment(text: str) -> str:
    return f"# {printable(text)}"


def _word(value: str) -> str:
    """Return a value as one word of any shell. Always quoted: zsh takes ``=eth0`` for the path of a program."""
    quoted = shlex.quote(value)
    return quoted if quoted.startswith("'") else f"'{quoted}'"


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
