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
from typing import Annotated

from pytest_gpucluster.errors import JournalError, OutputError
from pytest_gpucluster.journal.fields import AnyText, MismatchError, read
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
_SEVERAL_GROUPS = "several groups ran at once (NCCL_TESTS_SPLIT), which this project does not measure"


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
        raise OutputError(f"{origin}: {_SEVERAL_GROUPS}")
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


def _count_of(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise MismatchError("a whole number", value)
    return value


_Count = Annotated[int, _count_of]


@dataclass(frozen=True, kw_only=True)
class _Half:
    bus_bw: float
    nwrong: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Result:
    size: _Count
    type: str
    redop: str
    out_of_place: _Half | None = None
    in_place: _Half | None = None


@dataclass(frozen=True, kw_only=True)
class _Device:
    rank: _Count
    group: _Count
    hostname: str


@dataclass(frozen=True, kw_only=True)
class _Config:
    nthreads: _Count
    ngpus: _Count
    devices: tuple[_Device, ...]


@dataclass(frozen=True, kw_only=True)
class _OutOfBounds:
    count: _Count


@dataclass(frozen=True, kw_only=True)
class _File:
    """The fields of a JSON file that are read."""

    version: _Count
    nccl_version: _Count
    args: tuple[AnyText, ...]
    config: _Config
    results: tuple[_Result, ...]
    out_of_bounds: _OutOfBounds


def read_json(text: str, origin: str) -> Output:
    """Read a JSON file.

    Args:
        text: of the file.
        origin: its name in errors and reports.

    Raises:
        OutputError: no JSON, not of nccl-tests, cut off, or a field that is missing or of another kind.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OutputError(f"{origin}: no JSON, or cut off ({error})") from None
    if isinstance(content, dict) and "version" in content and "out_of_bounds" not in content:
        raise OutputError(f"{origin}: cut off: out_of_bounds at its end is missing")
    try:
        file = read(_File, content, f"{origin}: not as nccl-tests -J writes it")
    except JournalError as error:
        raise OutputError(str(error)) from None
    config = file.config
    per_process = config.nthreads * config.ngpus
    if not config.devices or per_process < 1:
        raise OutputError(f"{origin}: the devices (GPUs) are missing")
    if any(device.group for device in config.devices):
        raise OutputError(f"{origin}: {_SEVERAL_GROUPS}")
    ranks, processes = world(max(device.rank for device in config.devices), per_process)
    return Output(
        origin=origin,
        collective=collective_of(file.args[0]) if file.args else None,
        ranks=ranks,
        processes=processes,
        hosts=tuple(dict.fromkeys(short_name(device.hostname) for device in config.devices)),
        nccl=nccl_version(file.nccl_version),
        rows=tuple(map(_json_row, file.results)),
        out_of_bounds=file.out_of_bounds.count,
    )


def _json_row(result: _Result) -> Row:
    halves = {OUT_OF_PLACE: result.out_of_place, IN_PLACE: result.in_place}
    figures = {name: _json_figure(half) for name, half in halves.items() if half is not None}
    return Row(size_bytes=result.size, dtype=result.type, redop=result.redop, figures=figures)


def _json_figure(half: _Half) -> Figure:
    wrong = math.inf if half.nwrong is not None and math.isnan(half.nwrong) else half.nwrong
    return Figure(busbw=half.bus_bw, wrong=wrong)
