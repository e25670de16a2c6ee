"""The results of one run of nccl-tests, read strictly from its printed table or from the JSON file of ``-J``.

Source: nccl-tests, src/util.cu (the table and the JSON file), src/common.cu (``test_typenames``).

The table's columns are those of its header, so that tables of older versions are read too: they have no ``redop`` and
``root`` for some collectives, and ``error`` instead of ``#wrong``. Older ones leave ``redop`` blank for collectives
without a reduction, later ones print ``none``.

The JSON file holds the whole environment of the program, which may include passwords and tokens. None of it is read,
shown or kept here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pytest_gpucluster.errors import OutputError
from pytest_gpucluster.text import one_line

PROGRAMS: Mapping[str, str] = MappingProxyType(
    {
        "all_reduce": "all_reduce_perf",
        "all_gather": "all_gather_perf",
        "reduce_scatter": "reduce_scatter_perf",
        "all_to_all": "alltoall_perf",
        "broadcast": "broadcast_perf",
        "send_recv": "sendrecv_perf",
    }
)
"""Our collective -> the program of nccl-tests that measures it."""

DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "half", "fp32": "float", "fp64": "double"})
"""Our dtype -> that of ``-d``."""

IN_PLACE, OUT_OF_PLACE = "in-place", "out-of-place"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One half of a line.

    Attributes:
        busbw: in GB/s; NaN where the program wrote it.
        resolution: in GB/s; the last printed digit may be off by half of it.
        wrong: elements that were not as expected; None where the data were not checked.
    """

    busbw: float
    resolution: float = 0.0
    wrong: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size in one dtype. ``figures`` has the halves that were measured, by ``IN_PLACE`` and ``OUT_OF_PLACE``."""

    size_bytes: int
    dtype: str
    redop: str = ""
    figures: Mapping[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a complete run.

    Attributes:
        origin: the file, or the command.
        collective: our name; None where the output does not state it.
        ranks: GPUs that took part.
        processes: that used them.
        hosts: their short names.
        nccl: version of the library, or an empty text.
        rows: in their order.
        out_of_bounds: the program's own count at its end.
        speeds_only: the file has the speeds of one half only, and nothing about the data.
    """

    origin: str
    collective: str | None
    ranks: int
    processes: int
    hosts: tuple[str, ...]
    nccl: str
    rows: tuple[Row, ...]
    out_of_bounds: int
    speeds_only: bool = False

    @property
    def wrong(self) -> float:
        """Return how many wrong elements there were in all, or what the program counted, whichever is more."""
        wrong = sum(figure.wrong or 0 for row in self.rows for figure in row.figures.values())
        return max(wrong, self.out_of_bounds)


def collective_of(program: str) -> str | None:
    """Return our name of what a program measures, from its path or name.

    >>> collective_of("./build/alltoall_perf"), collective_of("hypercube_perf")
    ('all_to_all', None)
    """
    name = re.sub(r"_mpi$", "", program.rpartition("/")[2].strip())
    return next((ours for ours, theirs in PROGRAMS.items() if theirs == name), None)


def nccl_version(code: int) -> str:
    """Return NCCL's version from its number.

    >>> nccl_version(22703), nccl_version(2708)
    ('2.27.3', '2.7.8')

    Source: nccl.h, ``NCCL_VERSION(X, Y, Z)``: with four digits up to 2.8.
    """
    major, rest = divmod(code, 10_000) if code >= 10_000 else divmod(code, 1_000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def short_name(host: str) -> str:
    """Return a host's name up to its first dot, as nccl-tests prints it.

    >>> short_name("gpu-01.example")
    'gpu-01'
    """
    return host.partition(".")[0]


def world(last_rank: int, per_process: int) -> tuple[int, int]:
    """Return the number of ranks and of processes.

    The JSON file lists only the first GPU of each process, the table all of them; both have the highest process.

    >>> world(0, 8), world(8, 8), world(15, 8), world(15, 1)
    ((8, 1), (16, 2), (16, 2), (16, 16))
    """
    processes = last_rank // per_process + 1
    return processes * per_process, processes


# Prefixes of launchers: `mpirun --tag-output` and `srun --label`.
_TAG = re.compile(r"(\[\d+,\d+\]<std(?:out|err)>:\s?|\s*\d+: )")
_PROGRAM = re.compile(r"# Collective test starting: (\S+)")
_CONFIG = re.compile(r"# nThreads? (\d+) nGpus (\d+) ")
_DEVICE = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+ on\s+(\S+) device")
_NCCL = re.compile(r"\bnccl-library=(\d+)|\bNCCL version (\d+\.\d+\.\d+)")
_BOUNDS = re.compile(r"# Out of bounds values\s*:\s*(\d+)")
_DONE = re.compile(r"# Avg bus bandwidth\s*:")
_ROW = re.compile(r"\s*\d+\s+\d+(\s|$)")
_MOST_QUOTED = 120


def read_table(text: str, origin: str) -> Output:
    """Read a printed table.

    Args:
        text: the whole output.
        origin: its name in errors and reports.

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
            "measures by itself: build nccl-tests with MPI=1. Give files of several runs one by one"
        )
    if not any(map(_DONE.match, lines)):
        raise OutputError(f"{origin}: cut off: the line 'Avg bus bandwidth' at the end of the table is missing")
    columns = lines[heads[0]].lstrip("# ").split()
    rows = tuple(
        _table_row(line, columns, f"{origin}:{number + 1}")
        for number, line in enumerate(lines)
        if number > heads[0] and _ROW.match(line)
    )
    ranks, processes, hosts = _places(lines, origin)
    found = {name: next(filter(None, map(pattern.search, lines)), None) for name, pattern in _PATTERNS.items()}
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


_PATTERNS = {"program": _PROGRAM, "bounds": _BOUNDS, "nccl": _NCCL}


def _is_head(line: str) -> bool:
    words = line.lstrip("# ").split()
    return line.startswith("#") and words[:2] == ["size", "count"] and "busbw" in words


def _places(lines: Sequence[str], origin: str) -> tuple[int, int, tuple[str, ...]]:
    config = next(filter(None, map(_CONFIG.match, lines)), None)
    devices = [found for line in lines if (found := _DEVICE.match(line))]
    if config is None or not devices:
        raise OutputError(f"{origin}: the lines 'nThread' and 'Rank' with its GPUs are missing")
    if any(int(found[2] or 0) for found in devices):
        raise OutputError(
            f"{origin}: several groups ran at once (NCCL_TESTS_SPLIT), which this project does not measure"
        )
    per_process = int(config[1]) * int(config[2])
    if per_process < 1:
        raise OutputError(f"{origin}: it ran on no GPU: {one_line(config[0], _MOST_QUOTED)}")
    ranks, processes = world(max(int(found[1]) for found in devices), per_process)
    return ranks, processes, tuple(dict.fromkeys(short_name(found[3]) for found in devices))


def _table_row(line: str, columns: Sequence[str], where: str) -> Row:
    """Return a line of the table; after the last column there may be a time of day, of two words."""
    named = list(columns)
    words = line.split()
    if named and named[-1] == "timestamp":
        named, words = named[:-1], words[: len(named) - 1]
    if len(words) == len(named) - 1 and "redop" in named and _is_number(words[named.index("redop")]):
        named.remove("redop")  # left blank
    if len(words) != len(named):
        raise OutputError(
            f"{where}: {len(words)} values for {len(named)} columns: {one_line(line, _MOST_QUOTED)!r}. If other "
            "output is mixed in, run it again without NCCL_DEBUG, or give the file of -J"
        )
    halves: dict[str, dict[str, str]] = {OUT_OF_PLACE: {}, IN_PLACE: {}}
    own: dict[str, str] = {}
    for name, word in zip(named, words, strict=True):
        # Each half begins with the time; columns before the first one are about both.
        half = next((half for half in halves.values() if name not in half and (half or name in _TIMES)), None)
        if name in _OWN:
            own[name] = word
        elif half is not None:
            half[name] = word
    try:
        figures = {name: _table_figure(half) for name, half in halves.items() if half}
        return Row(size_bytes=int(own["size"]), dtype=own["type"], redop=own.get("redop", ""), figures=figures)
    except (KeyError, ValueError):
        raise OutputError(f"{where}: not a line of this table: {one_line(line, _MOST_QUOTED)!r}") from None


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word) is not None


_OWN = ("size", "count", "type", "redop", "root")
_TIMES = ("time", "cputime")


def _table_figure(half: dict[str, str]) -> Figure:
    text = half["busbw"]
    wrong = half["#wrong"] if "#wrong" in half else half["error"]
    # `error` is the deviation of the worst element; whether it is too large is counted in the table's last lines.
    counted = "#wrong" in half
    is_checked = wrong != "N/A"
    return Figure(
        busbw=float(text),
        resolution=_resolution(text),
        wrong=None if not is_checked else _count(wrong) if counted else 0.0,
    )


def _count(text: str) -> float:
    value = float(text)
    if math.isnan(value) or value < 0:
        raise ValueError(text)
    return value


def _resolution(text: str) -> float:
    """Return the value of the last printed digit.

    >>> _resolution("442.28"), _resolution("12345"), _resolution("1e+05")
    (0.01, 1.0, 100000.0)
    """
    digits, _, exponent = text.partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))


_HALVES = {"out_of_place": OUT_OF_PLACE, "in_place": IN_PLACE}


def read_json(text: str, origin: str) -> Output:
    """Read a JSON file.

    Args:
        text: of the file.
        origin: its name in errors and reports.

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
        raise OutputError(f"{origin}: cut off: out_of_bounds at its end is missing")
    config = top.inner("config")
    devices = [_Object(each, origin, "a device") for each in config.items("devices")]
    per_process = config.integer("nthreads") * config.integer("ngpus")
    if not devices or per_process < 1:
        raise OutputError(f"{origin}: the devices (GPUs) are missing")
    if any(device.integer("group") for device in devices):
        raise OutputError(
            f"{origin}: several groups ran at once (NCCL_TESTS_SPLIT), which this project does not measure"
        )
    ranks, processes = world(max(device.integer("rank") for device in devices), per_process)
    arguments = top.items("args")
    return Output(
        origin=origin,
        collective=collective_of(str(arguments[0])) if arguments else None,
        ranks=ranks,
        processes=processes,
        hosts=tuple(dict.fromkeys(short_name(device.text("hostname")) for device in devices)),
        nccl=nccl_version(top.integer("nccl_version")),
        rows=tuple(_json_row(_Object(each, origin, "a result")) for each in top.items("results")),
        out_of_bounds=top.inner("out_of_bounds").integer("count"),
    )


def _json_row(result: _Object) -> Row:
    figures = {
        half: _json_figure(_Object(result.content[name], result.origin, f"a result's {name}"))
        for name, half in _HALVES.items()
        if result.content.get(name) is not None
    }
    return Row(
        size_bytes=result.integer("size"), dtype=result.text("type"), redop=result.text("redop"), figures=figures
    )


def _json_figure(half: _Object) -> Figure:
    wrong = half.number("nwrong") if half.content.get("nwrong") is not None else None
    return Figure(busbw=half.number("bus_bw"), resolution=0.0, wrong=math.inf if wrong != wrong else wrong)


class _Object:
    """A JSON object with typed access to its fields."""

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
        """Return a number; nccl-tests writes NaN as the text "nan"."""
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
