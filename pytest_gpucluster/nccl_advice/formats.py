"""Advice as text for programs: a shell, a batch script of Slurm, a container's ``env`` in Kubernetes. Pure.

Values are quoted, so that a name with special characters stays one word. Everything else stands in comments of one line
each, in which nothing acts on a terminal or ends the comment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator

from pytest_gpucluster.nccl_advice.advice import Advised
from pytest_gpucluster.nccl_advice.advising import EXPORTED, steps_inherit
from pytest_gpucluster.nccl_advice.facts import Facts
from pytest_gpucluster.nccl_environment import ENVIRONMENT
from pytest_gpucluster.text import printable


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
        f"gpucluster nccl-env on {facts.host}; {advised.fabric.kind or 'unknown fabric'}: {advised.fabric.why}"
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
