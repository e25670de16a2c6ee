"""What goes over the connection: a request, then beats of a heart one way and lines of JSON the other way. Pure.

A login shell may print a greeting in front of it, or a program something in between. So each of our lines has a mark,
and the last one says that it is the last: where it is missing, the connection was lost.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken

PROTOCOL = 1
"""Raised when either side could misunderstand the other one."""
MARK = b"gpucluster-node:"
BEAT, INTERRUPT, TERMINATE = "beat", "interrupt", "terminate"
"""What is said after the request, each on a line."""
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""After so long without a beat a node takes the connection for lost."""
HELLO, OUT, ERR, PART, ANSWER, END = "hello", "out", "err", "part", "answer", "end"
"""Kinds of lines of a node: who it is; what a program prints, in two ways; a piece of an archive; facts; the end."""
_KINDS = (HELLO, OUT, ERR, PART, ANSWER, END)


@dataclass(frozen=True)
class Frame:
    """One line of a node."""

    kind: str
    value: Any


def encode(kind: str, value: object) -> bytes:
    """Return a line of a node. Bytes become base64."""
    plain = base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
    return MARK + json.dumps({kind: plain}).encode("ascii") + b"\n"


def decode(line: bytes) -> Frame | None:
    """Read a line of a node; None for a line that is somebody else's."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        told = json.loads(text)
        [(kind, value)] = told.items()
        if kind == PART:
            value = base64.b64decode(value, validate=True)
    except (ValueError, AttributeError, TypeError, binascii.Error, RecursionError):
        return None
    wanted = {OUT: str, ERR: str, PART: bytes, HELLO: dict, ANSWER: dict, END: dict}.get(kind)
    return Frame(kind, value) if kind in _KINDS and wanted is not None and isinstance(value, wanted) else None


def request(do: str, **more: object) -> bytes:
    """Return the line that a node gets first."""
    return json.dumps({"protocol": PROTOCOL, "do": do, **more}).encode("ascii") + b"\n"


def read_request(line: bytes) -> Mapping[str, Any]:
    """Read that line, on the node.

    Raises:
        EnvironmentBroken: it is none, or of another version.
    """
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("do"), str):
        raise EnvironmentBroken("no request came over the connection; this program is started by `gpucluster ssh`")
    if told.get("protocol") != PROTOCOL:
        raise EnvironmentBroken(
            f"the request is of protocol {told.get('protocol')!r}, and this node's version of pytest-gpucluster speaks "
            f"{PROTOCOL}: install one version everywhere"
        )
    return told
