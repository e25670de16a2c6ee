"""The display of ``gpucluster node watch``: terminal layout, keys, and a JSON line for programs.

The layout fits any width from 40 columns and any height from 10 lines, also as plain text without colours: stale, lost
and wrong parts are marked in words too.

Keys are read one by one during the display, and the terminal is restored. Ctrl-Z is an ordinary key then: it would
leave the shell with the display's screen.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.node.health.node_reader import NVLINK, PROCESSES, QUERIES
from pytest_gpucluster.node.health.node_state import Node, Part
from pytest_gpucluster.text import one_line, printable

NONE = "-"
"""No value. The reason is below the table, unless the GPU does not support it."""
MOST_NOTES = 4
_GIB, _GB = 2**30, 10**9
_NOT_SUPPORTED = "not supported"
_SIDE_BY_SIDE_COLUMNS, _SIDE_BY_SIDE_PORTS = 78, 3
_LEAST_WIDTHS = {"SM MHz": 78, "mem MHz": 78, "NVLink GB/s": 60, "power W": 44}
"""Columns of the GPUs, each with the width below which it is left out. The state of a GPU is always shown."""


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A part of the screen. ``least``: lines that it keeps if not all fit."""

    content: RenderableType
    least: int
    what: str = ""
    """Name of its lines, for the note on those that are left out."""
    first: frozenset[int] = frozenset({0})
    """Lines that are kept before others."""


class Screen:
    """The display as a renderable of rich.

    Args:
        node: the state of the node.
        host: the node's name.
        clock: the time of day as text.
        height: number of lines; None for as many as needed.
        keys: a reminder of the keys; may be empty.
    """

    def __init__(self, node: Node, *, host: str, clock: str, height: int | None = None, keys: str = "") -> None:
        self._node, self._host, self._clock, self._height, self._keys = node, host, clock, height, keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as many lines as fit."""
        flat = options.update(height=None)
        sections = list(self._sections(options.max_width))
        rendered = [console.render_lines(section.content, flat, pad=False) for section in sections]
        allotted = [len(lines) for lines in rendered]
        if self._height is not None:
            allotted = _allot_lines(allotted, [section.least for section in sections], self._height)
        for section, lines, lines_left in zip(sections, rendered, allotted, strict=True):
            kept = lines
            if lines_left < len(lines):
                left_out = len(lines) - lines_left + 1
                kept = [lines[number] for number in _keep_lines(len(lines), max(0, lines_left - 1), section.first)]
                more = f"  … {left_out} more {section.what}"
                kept = [*kept, [Segment(more[: options.max_width])]] if lines_left else []
            for line in kept:
                yield from line
                yield Segment.line()

    def _sections(self, width: int) -> Iterable[_Section]:
        node = self._node
        yield _Section(content=self._head(width), least=1)
        if node.problem:
            yield _Section(content=_warning(node.problem, width), least=1)
        yield _Section(content=_gpu_title(node, width), least=1)
        if node.gpus:
            content = _gpu_table(node.gpus, width)
            yield _Section(content=content, least=4, what="GPUs", first=_title_and_problems(node.gpus))
        notes = list(_missing_value_notes(node.gpus))
        for note in notes[:MOST_NOTES]:
            yield _Section(content=_warning(note, width), least=1)
        if len(notes) > MOST_NOTES:
            yield _Section(content=_warning(f"… {len(notes) - MOST_NOTES} more like these: --json", width), least=1)
        if node.ports:
            yield _Section(content=_port_table(node.ports, width), least=3, what="lines of ports")
        elif node.why_no_ports:
            yield _Section(content=_line(f"ports: none: {node.why_no_ports}", width), least=1)
        if any(gpu.values.get(PROCESSES) for gpu in node.gpus):
            yield _Section(content=_process_table(node.gpus, width), least=2, what="processes")

    def _head(self, width: int) -> Text:
        parts = [f"{_printable(self._host, 32)}  {self._clock}", *_host_figures(self._node.host)]
        head = Text("  ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")
        if self._keys and head.cell_len + len(self._keys) + 2 <= width:
            head.append(" " * (width - head.cell_len - len(self._keys)) + self._keys, style="dim")
        head.truncate(width, overflow="ellipsis")
        return head


def plain(node: Node, *, host: str, clock: str, width: int) -> str:
    """Return the whole layout as text without colours or control characters."""
    written = io.StringIO()
    console = Console(file=written, width=width, color_system=None, no_color=True, markup=False, emoji=False)
    console.print(Screen(node, host=host, clock=clock))
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def _allot_lines(wanted: Sequence[int], least: Sequence[int], height: int) -> list[int]:
    """Allot lines: from the top each section gets its wish, as long as those below keep their least.

    >>> _allot_lines([1, 9, 9, 20], [1, 4, 3, 2], 14)
    [1, 8, 3, 2]
    """
    allotted = []
    for index, lines in enumerate(wanted):
        below = sum(min(want, keep) for want, keep in zip(wanted[index + 1 :], least[index + 1 :], strict=True))
        lines_left = max(0, min(lines, max(height - below, min(lines, least[index]))))
        lines_left = min(lines_left, height)
        allotted.append(lines_left)
        height -= lines_left
    return allotted


def _keep_lines(lines: int, lines_left: int, first: Collection[int]) -> list[int]:
    """Return which lines are kept if not all fit.

    >>> _keep_lines(9, 4, {0, 7})
    [0, 1, 2, 7]
    """
    return sorted(sorted(range(lines), key=lambda number: (number not in first, number))[:lines_left])


def _title_and_problems(gpus: Sequence[Part]) -> frozenset[int]:
    rows = enumerate(gpus, start=1)
    return frozenset(
        {0, *(row for row, gpu in rows if gpu.values.get("lost") or gpu.is_stale or _throttle_reasons(gpu))}
    )


def _throttle_reasons(gpu: Part) -> str:
    return printable(", ".join(gpu.values.get("throttle") or ()))


def _host_figures(host: Part) -> Iterable[str]:
    values = host.values
    if values.get("load"):
        cpus = f" / {values['cpus']} CPUs" if values.get("cpus") else ""
        busy = host.rates.get("busy_ratio")
        yield f"load {values['load'][0]:.1f}{cpus}" + ("" if busy is None else f", {100 * busy:.0f} % busy")
    total, available = values.get("memory_total_bytes"), values.get("memory_available_bytes")
    if total is not None and available is not None:
        yield f"memory {(total - available) / _GIB:,.0f} / {total / _GIB:,.0f} GiB"
    if host.is_stale:
        yield _age_text("host", host)


def _age_text(what: str, part: Part) -> str:
    return f"{what} not read" if part.age_seconds is None else f"{what} stale for {part.age_seconds:.0f} s"


def _gpu_title(node: Node, width: int) -> Text:
    if node.silent_seconds is not None:
        return _warning(f"GPUs: NVML has not answered for {node.silent_seconds:.0f} s", width)
    if node.why_no_gpus:
        return _warning(f"GPUs: none: {node.why_no_gpus}", width)
    if not node.gpus:
        return _warning("GPUs: none of those that were asked for", width)
    if all(gpu.is_stale for gpu in node.gpus):
        ages = [gpu.age_seconds for gpu in node.gpus if gpu.age_seconds is not None]
        since = f" for {min(ages):.0f} s" if ages else ""
        return _warning(f"GPUs: {len(node.gpus)}, and NVML has not answered{since}", width)
    names = Counter(str(gpu.values.get("name") or "of unknown kind") for gpu in node.gpus)
    which = ", ".join(f"{count} x {_printable(name, 40)}" for name, count in names.items())
    return _line(f"GPUs: {which}, driver {_printable(node.driver or 'unknown', 20)}", width)


def _gpu_table(gpus: Sequence[Part], width: int) -> Table:
    titles = ["GPU", "util %", "mem GiB", "°C", "power W", "SM MHz", "mem MHz", "NVLink GB/s", "throttled by"]
    rows: list[list[str | Text]] = []
    for gpu in gpus:
        values = gpu.values
        rows.append(
            [
                str(values.get("index", "?")),
                _number(values.get("utilization_percent")),
                _fraction(values.get("memory_used_bytes"), values.get("memory_total_bytes"), scale=_GIB, digits=1),
                _number(values.get("temperature_celsius")),
                _fraction(values.get("power_watts"), values.get("power_limit_watts")),
                _number(values.get("sm_clock_mhz")),
                _number(values.get("memory_clock_mhz")),
                _both_directions(gpu, "nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second"),
                _state(gpu),
            ]
        )
    kept = [index for index, title in enumerate(titles) if width >= _LEAST_WIDTHS.get(title, 0)]
    titles, rows = [titles[index] for index in kept], [[row[index] for index in kept] for row in rows]
    return _table(titles, rows, width, dim=[gpu.is_stale for gpu in gpus], left=titles[-1:])


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    *,
    left: Sequence[str] = (),
    dim: Sequence[bool] = (),
) -> Table:
    """Return a table: every column as wide as its content, the last one as the remaining width. ``left``: titles of
    left-aligned columns; numbers are right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    left_over = width
    for index, title in enumerate(titles):
        wide = max([len(title), *(cell_len(str(row[index])) for row in rows)])
        is_last = index == len(titles) - 1
        wide = max(1, min(wide, left_over) if is_last else wide)
        left_over -= wide + 1
        justify: Literal["left", "right"] = "left" if title in left else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", width=wide)
    for index, row in enumerate(rows):
        table.add_row(*row, style="dim" if index < len(dim) and dim[index] else None)
    return table


def _state(gpu: Part) -> Text:
    """Return a GPU's state, the worst first."""
    values = gpu.values
    if values.get("lost"):
        return Text("LOST", style="bold red")
    if gpu.is_stale:
        return Text("not read" if gpu.age_seconds is None else f"STALE {gpu.age_seconds:.0f} s", style="bold red")
    if gpu.age_seconds is None:
        return Text("…")
    return Text(_throttle_reasons(gpu), style="yellow")


def _missing_value_notes(gpus: Sequence[Part]) -> Iterable[str]:
    """Yield why values are missing, one line for each reason; unsupported values are left out."""
    reasons: dict[str, list[tuple[str, str]]] = {}
    for gpu in gpus:
        index = str(gpu.values.get("index", "?"))
        if gpu.values.get("lost"):
            reasons.setdefault(str(gpu.values["lost"]), []).append((index, ""))
            continue
        for key, why in gpu.values.get("not_available", {}).items():
            if not str(why).startswith((_NOT_SUPPORTED, "not known to this driver")):
                reasons.setdefault(str(why), []).append((index, str(key)))
    for why, found in reasons.items():
        which = list(dict.fromkeys(index for index, _ in found))
        keys = [key for key in dict.fromkeys(key for _, key in found) if key]
        who = f"GPU {which[0]}" if len(which) == 1 else f"GPUs {', '.join(which)}"
        yield f"{who}: {', '.join(keys)}{': ' if keys else ''}{why}"


def _port_table(ports: Sequence[Part], width: int) -> Table:
    both = len(ports) > _SIDE_BY_SIDE_PORTS and width >= _SIDE_BY_SIDE_COLUMNS
    titles = ["port", "state", "out GB/s", "in GB/s"]
    rows = [_port(port, 12 if both else 24) for port in ports]
    if both:
        half = (len(rows) + 1) // 2
        right = [*rows[half:], [""] * 4]
        rows = [[*row, "", *right[number]] for number, row in enumerate(rows[:half])]
        titles = [*titles, "", *titles]
    return _table(titles, rows, width, left=("port", "state"))


def _port(port: Part, characters: int) -> list[str]:
    values = port.values
    rate = values.get("rate_gbps")
    state = _printable(str(values.get("state") or "unknown"), 10)
    if state == "ACTIVE" and rate is not None:
        state = f"{rate:g} Gb/s"
    if port.is_stale:
        state = "STALE"
    return [
        _printable(str(values.get("name", "?")), characters),
        state,
        _number(port.rates.get("sent_bytes_per_second"), scale=_GB, digits=1),
        _number(port.rates.get("received_bytes_per_second"), scale=_GB, digits=1),
    ]


def _process_table(gpus: Sequence[Part], width: int) -> Table:
    found: list[tuple[Any, dict[str, Any]]] = [
        (gpu.values.get("index", "?"), process) for gpu in gpus for process in gpu.values.get(PROCESSES) or ()
    ]
    found.sort(key=lambda one: -(one[1]["memory_bytes"] or 0))
    rows: list[list[str | Text]] = [
        [
            str(index),
            _number(process["memory_bytes"], scale=_GIB, digits=1),
            str(process["pid"]),
            _printable(process["user"] or "?", 12),
            Text(_printable(process["command"] or "not kept to this user or container", 200)),
        ]
        for index, process in found
    ]
    return _table(["GPU", "mem GiB", "pid", "user", "command"], rows, width, left=("user", "command"))


def _printable(text: str, characters: int) -> str:
    """Return text from any source on one line, without control characters."""
    return printable(one_line(text, characters))


def _number(value: Any, *, scale: float = 1, digits: int = 0) -> str:
    return NONE if value is None else f"{value / scale:.{digits}f}"


def _fraction(value: Any, total: Any, *, scale: float = 1, digits: int = 0) -> str:
    kept = _number(value, scale=scale, digits=digits)
    return kept if total is None else f"{kept}/{_number(total, scale=scale, digits=digits)}"


def _both_directions(part: Part, *names: str) -> str:
    rates = [part.rates.get(name) for name in names]
    return NONE if all(rate is None for rate in rates) else "/".join(_number(rate, scale=_GB) for rate in rates)


def _line(text: str, width: int) -> Text:
    return Text(_printable(text, width), no_wrap=True, overflow="ellipsis")


def _warning(text: str, width: int) -> Text:
    return Text(_printable(text, width), style="bold red", no_wrap=True, overflow="ellipsis")


QUIT_KEYS = b"qQ\x03\x04"
"""Also Ctrl-C and Ctrl-D, if the terminal sends them as keys."""
_CONTROL_CHARACTERS = 6
"""Their index in the result of termios."""
_NONE = b"\0"
"""No key: _POSIX_VDISABLE of Linux, termios(3)."""


class Keyboard:
    """The standard input, if it is a terminal."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_available(self) -> bool:
        """Whether keys can be read."""
        return self._descriptor is not None

    def wait(self, seconds: float) -> bool:
        """Wait for a key, at most this long; return True if it ends the display."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
                return False
            if not select.select([self._descriptor], [], [], left)[0]:
                return False
            read = os.read(self._descriptor, 64)
            if not read:  # the terminal was closed
                return True
            if any(key in QUIT_KEYS for key in read):
                return True
        return False


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Read keys as they are pressed, without echo; without a terminal there are none."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal, or no standard input at all
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(descriptor)
        attributes = termios.tcgetattr(descriptor)
        attributes[_CONTROL_CHARACTERS][termios.VSUSP] = _NONE
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


SCHEMA_VERSION = 1
_IDENTITY = ("index", "uuid", "name", "pci_bus_id")
_NVLINK_RATES = ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second")
_PORT = ("name", "link_layer", "state", "rate_gbps")
_PORT_RATES = ("sent_bytes_per_second", "received_bytes_per_second")
_HOST = ("load", "cpus", "memory_total_bytes", "memory_available_bytes")


def to_json(node: Node, *, host: str, at: str) -> dict[str, Any]:
    """Return plain JSON types. A missing value is null, with the reason in ``not_available``; stale parts keep their
    last values and are marked.

    Args:
        node: the state of the node.
        host: the node's name.
        at: the time, as ISO 8601 in UTC.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "at": at,
        "host": host,
        "driver": node.driver,
        "load": {**_select(node.host, _HOST), "busy_ratio": node.host.rates.get("busy_ratio"), **_json_age(node.host)},
        "gpus": [_gpu(gpu) for gpu in node.gpus],
        "why_no_gpus": node.why_no_gpus or None,
        "nvml_silent_seconds": None if node.silent_seconds is None else round(node.silent_seconds, 1),
        "ports": [
            {**_select(port, _PORT), **{name: port.rates.get(name) for name in _PORT_RATES}, **_json_age(port)}
            for port in node.ports
        ],
        "why_no_ports": node.why_no_ports or None,
        "problem": node.problem or None,
    }


def json_line(node: Node, *, host: str, at: str) -> str:
    """Return :func:`to_json` as a line."""
    return json.dumps(to_json(node, host=host, at=at), allow_nan=False) + "\n"


def _gpu(gpu: Part) -> dict[str, Any]:
    figures = tuple(key for key in QUERIES if key not in (NVLINK, PROCESSES))
    return {
        **_select(gpu, (*_IDENTITY, *figures)),
        **{name: gpu.rates.get(name) for name in _NVLINK_RATES},
        PROCESSES: gpu.values.get(PROCESSES),
        "not_available": gpu.values.get("not_available", {}),
        "lost": gpu.values.get("lost") or None,
        **_json_age(gpu),
    }


def _select(part: Part, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {name: part.values.get(name) for name in names}


def _json_age(part: Part) -> Mapping[str, Any]:
    age = None if part.age_seconds is None else round(part.age_seconds, 1)
    return {"age_seconds": age, "stale": part.is_stale}
