"""nccl-tests: its programs, and their printed table, read strictly.

Source: nccl-tests, src/util.cu (the table), src/common.cu (``test_typenames``), README.md (the options).

Tables of versions without the column ``#wrong``, which do not state whether the data were right, are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.errors import OutputError
from pytest_gpucluster.text import one_line

PROGRAMS: Mapping[str, str] = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "broadcast": "broadcast_perf",
    "send_recv": "sendrecv_perf",
}
"""Our collective -> the program of nccl-tests that measures it."""

DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "half", "fp32": "float", "fp64": "double"}
"""Our dtype -> that of ``-d``."""

IN_PLACE, OUT_OF_PLACE = "in-place", "out-of-place"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One half of a line: busbw in GB/s, and the elements that were not as expected.

    ``resolution`` is the value of the last printed digit of busbw. ``wrong`` is None where the data were not checked.
    """

    busbw: float
    resolution: float
    wrong: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size in one dtype. ``figures`` has the two halves of the line, by ``IN_PLACE`` and ``OUT_OF_PLACE``."""

    size_bytes: int
    dtype: str
    figures: Mapping[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a complete run.

    Attributes:
        origin: the file.
        collective: our name; None where the output does not state it.
        ranks: GPUs that took part.
        processes: that used them.
        hosts: their short names.
        nccl: version of the library, or an empty text.
        rows: in their order.
        wrong: wrong elements in all, or what the program counted at its end, whichever is more.
    """

    origin: str
    collective: str | None
    ranks: int
    processes: int
    hosts: tuple[str, ...]
    nccl: str
    rows: tuple[Row, ...]
    wrong: float


def collective_of(program: str) -> str | None:
    """Return our name of what a program measures, from its path or name.

    >>> collective_of("./build/alltoall_perf"), collective_of("hypercube_perf")
    ('all_to_all', None)
    """
    name = re.sub(r"_mpi$", "", program.rpartition("/")[2].strip())
    return next((ours for ours, theirs in PROGRAMS.items() if theirs == name), None)


def short_name(host: str) -> str:
    """Return a host's name up to its first dot, as nccl-tests prints it.

    >>> short_name("gpu-01.example")
    'gpu-01'
    """
    return host.partition(".")[0]


_TAG = re.compile(r"(\[\d+,\d+\]<std(?:out|err)>:\s?|\s*\d+: )")
"""What `mpirun --tag-output` and `srun --label` put before each line."""
_PROGRAM = re.compile(r"# Collective test starting: (\S+)")
_CONFIG = re.compile(r"# nThreads? (\d+) nGpus (\d+) ")
_DEVICE = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+ on\s+(\S+) device")
_NCCL = re.compile(r"\bnccl-library=(\d+)|\bNCCL version (\d+\.\d+\.\d+)")
_BOUNDS = re.compile(r"# Out of bounds values\s*:\s*(\d+)")
_DONE = re.compile(r"# Avg bus bandwidth\s*:")
_HEAD = re.compile(r"#\s+size\s+count\s.*\btime\s.*\bbusbw\s+#wrong\s+time\s.*\bbusbw\s+#wrong\s*$")
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
    heads = [number for number, line in enumerate(lines) if _HEAD.match(line)]
    program, config, bounds, nccl, done = (
        next(filter(None, map(pattern.search, lines)), None) for pattern in (_PROGRAM, _CONFIG, _BOUNDS, _NCCL, _DONE)
    )
    devices = [found for line in lines if (found := _DEVICE.match(line))]
    problem = ""
    if not heads:
        problem = "no table of nccl-tests in it: no line has the columns size, time, busbw and #wrong"
    elif len(heads) > 1:
        problem = (
            f"{len(heads)} tables in one output. Of programs that were built without MPI, each process measures by "
            "itself: build nccl-tests with MPI=1. Give files of several runs one by one"
        )
    elif bounds is None or done is None:
        problem = "cut off: the lines 'Out of bounds values' and 'Avg bus bandwidth' at the end are missing"
    elif config is None or not devices:
        problem = "the lines 'nThread' and 'Rank' with its GPUs are missing"
    elif any(int(found[2] or 0) for found in devices):
        problem = "several groups ran at once (NCCL_TESTS_SPLIT), which is not measured here"
    elif int(config[1]) * int(config[2]) < 1:
        problem = f"it ran on no GPU: {one_line(config[0], _MOST_QUOTED)}"
    if problem or config is None or bounds is None:
        raise OutputError(f"{origin}: {problem}")
    per_process = int(config[1]) * int(config[2])
    processes = max(int(found[1]) for found in devices) // per_process + 1
    columns = lines[heads[0]].lstrip("# ").split()
    library = int(nccl[1] or 0) if nccl is not None else 0  # NCCL_VERSION(X, Y, Z) of nccl.h
    rows = tuple(
        _row(line, columns, f"{origin}:{number + 1}")
        for number, line in enumerate(lines)
        if number > heads[0] and _ROW.match(line)
    )
    return Output(
        origin=origin,
        collective=collective_of(program[1]) if program is not None else None,
        ranks=processes * per_process,
        processes=processes,
        hosts=tuple(dict.fromkeys(short_name(found[3]) for found in devices)),
        nccl="" if nccl is None else nccl[2] or f"{library // 10_000}.{library // 100 % 100}.{library % 100}",
        rows=rows,
        wrong=max(sum(half.wrong or 0 for row in rows for half in row.figures.values()), int(bounds[1])),
    )


def _row(line: str, columns: Sequence[str], where: str) -> Row:
    words = line.split()
    if len(words) != len(columns):
        raise OutputError(
            f"{where}: {len(words)} values for {len(columns)} columns: {one_line(line, _MOST_QUOTED)!r}. If other "
            "output is mixed in, run it again without NCCL_DEBUG"
        )
    # What precedes the first time is about both halves, each of which begins with its own.
    first = columns.index("time")
    second = columns.index("time", first + 1)
    about, *halves = (
        dict(zip(columns[begin:end], words[begin:end], strict=True))
        for begin, end in ((0, first), (first, second), (second, len(columns)))
    )
    try:
        figures = {name: _figure(half) for name, half in zip((OUT_OF_PLACE, IN_PLACE), halves, strict=True)}
        return Row(size_bytes=int(about["size"]), dtype=about["type"], figures=figures)
    except (KeyError, ValueError):
        raise OutputError(f"{where}: not a line of this table: {one_line(line, _MOST_QUOTED)!r}") from None


def _figure(half: Mapping[str, str]) -> Figure:
    busbw, wrong = half["busbw"], None if half["#wrong"] == "N/A" else float(half["#wrong"])
    if wrong is not None and not wrong >= 0:
        raise ValueError(wrong)
    digits, _, exponent = busbw.partition("e")
    resolution = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return Figure(busbw=float(busbw), resolution=resolution, wrong=wrong)
