"""The lines of a self-test, as text and JSON, and the archive to send: without names, addresses or serial numbers."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pytest_gpucluster.metrics import codec
from pytest_gpucluster.text import paragraph

State = Literal["OK", "WRONG", "UNPROVEN"]
SCHEMA_VERSION = 1
SEND = "send the archive to the maintainers"
GPU_ONLY = "run it on a node with a GPU"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One result.

    Attributes:
        state: WRONG: the product or the node is not as the product assumes. UNPROVEN: it could not be tried.
        what: its short name.
        text: what was found.
        todo: what to do about it.
        values: the figures, in plain JSON types.
    """

    state: State
    what: str
    text: str
    todo: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def line(what: str, good: bool | None, text: str, todo: str = "", **values: Any) -> Line:
    """Return a line: OK, WRONG, or UNPROVEN for None; what to do only where it is not OK."""
    state: State = "UNPROVEN" if good is None else "OK" if good else "WRONG"
    return Line(state=state, what=what, text=text, todo="" if good else todo, values=codec.to_json(values))


@dataclass(frozen=True, kw_only=True)
class Report:
    """All lines of one self-test. ``at``: UTC, ISO 8601; ``device``: "cuda" or "cpu"; ``seconds``: all of it."""

    schema_version: int = SCHEMA_VERSION
    version: str
    at: str
    device: str
    seconds: float
    lines: tuple[Line, ...]

    @property
    def is_wrong(self) -> bool:
        """Whether a line is WRONG."""
        return any(line.state == "WRONG" for line in self.lines)

    def summary(self) -> str:
        """Return the number of lines in each state, and what the whole is not."""
        count = Counter(line.state for line in self.lines)
        states: tuple[State, ...] = ("OK", "WRONG", "UNPROVEN")
        counts = ", ".join(f"{count[state]} {state}" for state in states)
        return (
            f"{counts}; {self.seconds:.0f} s on {self.device}. This is no verdict: only the acceptance suite gives one."
        )

    def text(self) -> str:
        """Return it for people."""
        head = f"pytest-gpucluster {self.version}, self-test, {self.at}"
        return "\n".join([head, *(render(line) for line in self.lines), self.summary()]) + "\n"

    def json(self) -> str:
        """Return it for programs."""
        return json.dumps(codec.to_json(self), indent=1) + "\n"


def render(line: Line, width: int = 110) -> str:
    """Return one line as text, wrapped."""
    begin, rest = f"{line.state:<8}  {line.what:<17}  ", " " * 29
    lines = paragraph(line.text, width, first=begin, rest=rest)
    return "\n".join([*lines, *(paragraph(f"do: {line.todo}", width, first=rest, rest=rest) if line.todo else [])])


_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_UNIQUE = re.compile(r"((?:Serial Number|GPU PDI|Board ID|Module ID|GUID|Guid)\s*: *)(?!N/A)\S+")
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE)
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_IPV4 = re.compile(rf"(?<![\w.])(?!127\.|0\.0\.0\.0){_BYTE}(?:\.{_BYTE}){{3}}(?![\w.])")
_IPV6 = re.compile(r"(?<![\w:])(?=[0-9a-f:]*(?:::|(?:[0-9a-f]+:){7}))(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])")


class Redactor:
    """Replaces what identifies a machine or its owner: one replacement for each value, the same everywhere.

    Args:
        names: a text, such as the host's name -> what replaces it as a whole word.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        words = sorted((name for name in names if name), key=len, reverse=True)
        self._names, self._numbers = names, dict[str, int]()
        self._words = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words) or r"(?!)")

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        text = self._words.sub(lambda found: self._names[found[0]], text)
        text = _UUID.sub(lambda found: f"00000000-0000-0000-0000-{self._number(found[0].lower()):012d}", text)
        text = _UNIQUE.sub(r"\1(removed)", text)
        text = _MAC.sub("MAC", text)
        text = _IPV4.sub(lambda found: f"192.0.2.{self._number(found[0]) % 256}", text)
        return _IPV6.sub("2001:db8--removed", text)

    def _number(self, value: str) -> int:
        return self._numbers.setdefault(value, len(self._numbers) + 1)


def write_archive(path: Path, files: Mapping[str, str]) -> None:
    """Write texts as a tar.gz with one folder.

    Raises: OSError if it cannot be written.
    """
    folder = path.name.removesuffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        for name, text in sorted(files.items()):
            content = text.encode("utf-8", "backslashreplace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def shapes(lines: Iterable[str], most: int = 200) -> list[str]:
    """Return different lines, each once, with one N for all numbers.

    >>> shapes(["Ring 01 : 0 -> 1", "Ring 02 : 1 -> 0"])
    ['Ring N : N -> N']
    """
    plain = (re.sub(r"0x[0-9a-f]+|\d+", "N", line).strip() for line in lines)
    return list(dict.fromkeys(filter(None, plain)))[:most]
