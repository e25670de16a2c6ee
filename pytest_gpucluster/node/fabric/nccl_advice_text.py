"""Advice about NCCL as text: for people, a shell, a Slurm batch script, and ``env`` of a Kubernetes container. Pure.

Text for people is never wider than asked for. In text for programs, values are quoted, so that a name with special
characters stays one word. Everything else is in comments of one line each, in which nothing acts on a terminal or ends
the comment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator

from pytest_gpucluster.node.fabric.nccl_advice import EXPORTED, SEVERAL, steps_inherit
from pytest_gpucluster.node.fabric.nccl_environment import ENVIRONMENT
from pytest_gpucluster.node.fabric.nccl_facts import Advised, Facts
from pytest_gpucluster.node.info_text import fact
from pytest_gpucluster.text import paragraph, printable


def render_advice(facts: Facts, advised: Advised, *, width: int) -> str:
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


def shell(facts: Facts, advised: Advised) -> str:
    """Return lines for ``eval`` or ``source``: exports and unsets, with the reasons as comments."""
    return _text([*_head(facts, advised), *_of_shell(advised), *_remarks(advised)])


def slurm(facts: Facts, advised: Advised) -> str:
    """Return lines for a batch script, before its srun.

    They are exports and no ``--export=NAME=VALUE``: there a comma begins the next name, and NCCL's lists have commas.
    Source: sbatch(1), --export.
    """
    before = "For the batch script, before srun, which hands on the environment unless --export says otherwise"
    lines = [*_head(facts, advised), _comment(before)]
    if not steps_inherit(facts):
        lines += [f"export {EXPORTED}=ALL"]
    return _text([*lines, *_of_shell(advised), *_remarks(advised)])


def yaml(facts: Facts, advised: Advised) -> str:
    """Return a list for ``env`` of a container in Kubernetes; an empty list where nothing is to be set."""
    lines = list(_head(facts, advised))
    for one in advised.remove:
        lines.append(_comment(f"take {one.name} out ({one.name}={one.value}, {one.origin}): {one.why}"))
    for wanted in advised.set:
        lines += [_comment(f"{wanted.name}: {wanted.why} ({wanted.source})")]
        lines += [f"- name: {wanted.name}", f"  value: {_scalar(wanted.value)}"]
    if not advised.set:
        lines.append("[]")
    return _text([*lines, *_remarks(advised)])


def _of_shell(advised: Advised) -> Iterator[str]:
    wanted = {one.name for one in advised.set}
    for one in advised.remove:
        yield _comment(f"{one.name}={one.value}: {one.why}")
        if one.origin != ENVIRONMENT:
            yield _comment(f"take it out of {one.origin}: unset does not undo it")
        elif one.name not in wanted:
            yield f"unset {one.name}"
        for other in one.also:
            yield _comment(f"and take it out where it is {other}")
    for new in advised.set:
        yield _comment(f"{new.name}: {new.why} ({new.source})")
        yield f"export {new.name}={_word(new.value)}"


def _head(facts: Facts, advised: Advised) -> Iterator[str]:
    yield _comment(
        f"gpucluster node nccl-env on {facts.host}; {advised.fabric.kind or 'unknown fabric'}: {advised.fabric.why}"
    )
    if not advised.set and not advised.remove:
        told = "nothing is to be set" if advised.fabric.kind else "the fabric is not known, so nothing is advised"
        yield _comment(told)


def _remarks(advised: Advised) -> Iterator[str]:
    for step in advised.steps:
        yield _comment(f"to do: {step.what}; {step.why} ({step.source})")
    for text in advised.unknown:
        yield _comment(f"not known: {text}")


def _comment(text: str) -> str:
    return f"# {printable(text)}"


def _word(value: str) -> str:
    """Return a value as one word of any shell. Always quoted: zsh takes ``=eth0`` for the path of a program."""
    quoted = shlex.quote(value)
    return quoted if quoted.startswith("'") else f"'{quoted}'"


def _scalar(value: str) -> str:
    """Return a value as a quoted scalar, which YAML and JSON read alike."""
    return json.dumps(value)


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
