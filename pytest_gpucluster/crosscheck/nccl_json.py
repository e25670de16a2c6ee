"""The file that nccl-tests writes with ``-J``, read strictly.

It holds the whole environment of the program, in which there may be passwords and tokens. Nothing of that is read,
shown or kept here.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pytest_gpucluster.crosscheck.nccl_output import (
    IN_PLACE,
    OUT_OF_PLACE,
    Figure,
    Output,
    Row,
    collective_of,
    nccl_version,
    short_name,
    world,
)
from pytest_gpucluster.errors import OutputError

_HALVES = {"out_of_place": OUT_OF_PLACE, "in_place": IN_PLACE}


def read(text: str, origin: str) -> Output:
    """Return what a JSON file tells.

    Args:
        text: of the file.
        origin: how errors and reports call it.

    Raises:
        OutputError: no JSON, not of nccl-tests, cut off, or a field that is missing or of another kind.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OutputError(f"{origin}: no JSON, or cut off ({error})") from None
    top = _Object(document, origin, "the file")
    top.integer("version")
    if "out_of_bounds" not in top.content:
        raise OutputError(f"{origin}: cut off: the program ended before its last line")
    config = top.inner("config")
    devices = [_Object(each, origin, "a device") for each in config.items("devices")]
    per_process = config.integer("nthreads") * config.integer("ngpus")
    if not devices or per_process < 1:
        raise OutputError(f"{origin}: it does not say on which GPUs it ran")
    if any(device.integer("group") for device in devices):
        raise OutputError(f"{origin}: several groups ran side by side (NCCL_TESTS_SPLIT): there is nothing beside it")
    ranks, processes = world(max(device.integer("rank") for device in devices), per_process)
    arguments = top.items("args")
    return Output(
        origin=origin,
        collective=collective_of(str(arguments[0])) if arguments else None,
        ranks=ranks,
        processes=processes,
        hosts=tuple(dict.fromkeys(short_name(device.text("hostname")) for device in devices)),
        nccl=nccl_version(top.integer("nccl_version")),
        rows=tuple(_row(_Object(each, origin, "a result")) for each in top.items("results")),
        out_of_bounds=top.inner("out_of_bounds").integer("count"),
    )


def _row(result: _Object) -> Row:
    figures = {
        half: _figure(_Object(result.content[name], result.origin, f"a result's {name}"))
        for name, half in _HALVES.items()
        if result.content.get(name) is not None
    }
    return Row(
        size_bytes=result.integer("size"), dtype=result.text("type"), redop=result.text("redop"), figures=figures
    )


def _figure(half: _Object) -> Figure:
    wrong = half.number("nwrong") if half.content.get("nwrong") is not None else None
    return Figure(busbw=half.number("bus_bw"), resolution=0.0, wrong=math.inf if wrong != wrong else wrong)


class _Object:
    """A JSON object whose fields are asked for by name and kind."""

    def __init__(self, content: Any, origin: str, what: str) -> None:
        if not isinstance(content, dict):
            raise OutputError(f"{origin}: {what} is no object, so this is no file of nccl-tests -J")
        self.content: dict[str, Any] = content
        self.origin = origin
        self._what = what

    def integer(self, name: str) -> int:
        value = self.content.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._unlike(name, "a whole number")
        return value

    def number(self, name: str) -> float:
        """Return a number; nccl-tests writes what is none as the text "nan"."""
        value = self.content.get(name)
        if value == "nan":
            return math.nan
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._unlike(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self._unlike(name, "a number of 64 bits") from None

    def text(self, name: str) -> str:
        value = self.content.get(name)
        if not isinstance(value, str):
            raise self._unlike(name, "a text")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.content.get(name)
        if not isinstance(value, list):
            raise self._unlike(name, "a list")
        return value

    def inner(self, name: str) -> _Object:
        return _Object(self.content.get(name), self.origin, name)

    def _unlike(self, name: str, kind: str) -> OutputError:
        return OutputError(f"{self.origin}: {name!r} of {self._what} is not {kind}, as nccl-tests -J writes it")
