"""The table that nccl-tests prints, read strictly.

The columns are those that the header names, so that tables of older versions, which have no ``redop`` and ``root`` for
some collectives and ``error`` in the place of ``#wrong``, are read as well. Older ones leave the place under ``redop``
blank for collectives that reduce nothing, where later ones print ``none``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

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
from pytest_gpucluster.text import one_line

# What launchers put before each line: `mpirun --tag-output` and `srun --label`.
_TAG = re.compile(r"(\[\d+,\d+\]<std(?:out|err)>:\s?|\s*\d+: )")
_PROGRAM = re.compile(r"# Collective test starting: (\S+)")
_CONFIG = re.compile(r"# nThreads? (\d+) nGpus (\d+) ")
_DEVICE = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+ on\s+(\S+) device")
_NCCL = re.compile(r"\bnccl-library=(\d+)|\bNCCL version (\d+\.\d+\.\d+)")
_BOUNDS = re.compile(r"# Out of bounds values\s*:\s*(\d+)")
_DONE = re.compile(r"# Avg bus bandwidth\s*:")
_ROW = re.compile(r"\s*\d+\s+\d+(\s|$)")
_MOST_QUOTED = 120


def read(text: str, origin: str) -> Output:
    """Return what a printed table tells.

    Args:
        text: all that was printed.
        origin: how errors and reports call it.

    Raises:
        OutputError: no table of nccl-tests, one that is cut off, several of them, or a line of it that is damaged.
    """
    lines = [_TAG.sub("", line, count=1) if _TAG.match(line) else line for line in text.splitlines()]
    heads = [number for number, line in enumerate(lines) if _is_head(line)]
    if not heads:
        raise OutputError(f"{origin}: no table of nccl-tests in it: no line has the columns size and busbw")
    if len(heads) > 1:
        raise OutputError(
            f"{origin}: {len(heads)} tables in one output. Of programs that were built without MPI, each process "
            "measures by itself: build nccl-tests with MPI=1. Files of several runs are to be given one by one"
        )
    if not any(map(_DONE.match, lines)):
        raise OutputError(f"{origin}: cut off: the line 'Avg bus bandwidth' at the end of the table is missing")
    columns = lines[heads[0]].lstrip("# ").split()
    rows = tuple(
        _row(line, columns, f"{origin}:{number + 1}")
        for number, line in enumerate(lines)
        if number > heads[0] and _ROW.match(line)
    )
    ranks, processes, hosts = _places(lines, origin)
    found = {name: next(filter(None, map(pattern.search, lines)), None) for name, pattern in _TOLD.items()}
    bounds, nccl = found["bounds"], found["nccl"]
    if bounds is None:
        raise OutputError(f"{origin}: cut off: the line 'Out of bounds values' at the end of the table is missing")
    return Output(
        origin=origin,
        collective=collective_of(found["program"][1]) if found["program"] else None,
        ranks=ranks,
        processes=processes,
        hosts=hosts,
        nccl="" if nccl is None else nccl[2] or nccl_version(int(nccl[1])),
        rows=rows,
        out_of_bounds=int(bounds[1]),
    )


_TOLD = {"program": _PROGRAM, "bounds": _BOUNDS, "nccl": _NCCL}


def _is_head(line: str) -> bool:
    words = line.lstrip("# ").split()
    return line.startswith("#") and words[:2] == ["size", "count"] and "busbw" in words


def _places(lines: Sequence[str], origin: str) -> tuple[int, int, tuple[str, ...]]:
    config = next(filter(None, map(_CONFIG.match, lines)), None)
    devices = [found for line in lines if (found := _DEVICE.match(line))]
    if config is None or not devices:
        raise OutputError(f"{origin}: it does not say on which GPUs it ran: the lines 'nThread' and 'Rank' are missing")
    if any(int(found[2] or 0) for found in devices):
        raise OutputError(f"{origin}: several groups ran side by side (NCCL_TESTS_SPLIT): there is nothing beside it")
    per_process = int(config[1]) * int(config[2])
    if per_process < 1:
        raise OutputError(f"{origin}: it ran on no GPU: {one_line(config[0], _MOST_QUOTED)}")
    ranks, processes = world(max(int(found[1]) for found in devices), per_process)
    return ranks, processes, tuple(dict.fromkeys(short_name(found[3]) for found in devices))


def _row(line: str, columns: Sequence[str], where: str) -> Row:
    """Return a line of the table; after the last column there may be a time of day, of two words."""
    named = list(columns)
    words = line.split()
    if named and named[-1] == "timestamp":
        named, words = named[:-1], words[: len(named) - 1]
    if len(words) == len(named) - 1 and "redop" in named and _is_number(words[named.index("redop")]):
        named.remove("redop")  # left blank: a reduction is a word
    if len(words) != len(named):
        raise OutputError(
            f"{where}: {len(words)} values for {len(named)} columns: {one_line(line, _MOST_QUOTED)!r}. Where other "
            "lines have come between, run it again without NCCL_DEBUG, or give the file of -J"
        )
    halves: dict[str, dict[str, str]] = {OUT_OF_PLACE: {}, IN_PLACE: {}}
    own: dict[str, str] = {}
    for name, word in zip(named, words, strict=True):
        # Each half begins with the time; what stands before the first one is about both.
        half = next((half for half in halves.values() if name not in half and (half or name in _TIMES)), None)
        if name in _OWN:
            own[name] = word
        elif half is not None:
            half[name] = word
    try:
        figures = {name: _figure(half) for name, half in halves.items() if half}
        return Row(size_bytes=int(own["size"]), dtype=own["type"], redop=own.get("redop", ""), figures=figures)
    except (KeyError, ValueError):
        raise OutputError(f"{where}: not a line of this table: {one_line(line, _MOST_QUOTED)!r}") from None


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word) is not None


_OWN = ("size", "count", "type", "redop", "root")
_TIMES = ("time", "cputime")


def _figure(half: dict[str, str]) -> Figure:
    text = half["busbw"]
    wrong = half["#wrong"] if "#wrong" in half else half["error"]
    # `error` is how far the worst element was off; whether that is too far is counted in the table's last lines.
    counted = "#wrong" in half
    looked_at = wrong != "N/A"
    return Figure(
        busbw=float(text),
        resolution=_resolution(text),
        wrong=None if not looked_at else _count(wrong) if counted else 0.0,
    )


def _count(text: str) -> float:
    value = float(text)
    if math.isnan(value) or value < 0:
        raise ValueError(text)
    return value


def _resolution(text: str) -> float:
    """Return what the last printed digit stands for.

    >>> _resolution("442.28"), _resolution("12345"), _resolution("1e+05")
    (0.01, 1.0, 100000.0)
    """
    digits, _, exponent = text.partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))
