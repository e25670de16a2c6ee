"""How a conversation is laid out for a model, and which part of it the assistant says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpucluster.benchmarks.lora.conversation import BETWEEN, LABELS
from pytest_gpucluster.benchmarks.lora.rows import Row


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a conversation that is turned into tokens by itself.

    Attributes:
        text: the piece.
        judged: the assistant says it. After it comes the end token, which is judged as well.
    """

    text: str
    judged: bool


def segments(row: Row) -> Iterator[Segment]:
    """Yield a conversation piece by piece: what is given, then what the assistant says, and so on.

    ``ASSISTANT:`` is given; what the assistant says begins with the space after it. Turns are two empty lines apart, as
    in glaive's files, whatever stood between them in the row.
    """
    given, first = row.system.strip(), not row.system.strip()
    for turn in row.turns:
        given += ("" if first else BETWEEN) + LABELS[turn.role]
        first = False
        if turn.role == "assistant":
            yield Segment(text=given, judged=False)
            yield Segment(text=f" {turn.text}" if turn.text else "", judged=True)
            given = ""
        else:
            given += f" {turn.text}"
    if given:
        yield Segment(text=given, judged=False)


def text_of(row: Row) -> str:
    """Return a whole conversation, without end tokens."""
    return "".join(segment.text for segment in segments(row))
