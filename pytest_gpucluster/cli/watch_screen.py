"""What ``gpucluster node watch`` shows: the terminal layout, its keys, and a JSON line for programs.

The layout fits any width from 40 columns on, and any height from 10 lines on. The same layout is plain text where
colours are not shown. What is stale, lost or wrong is stated in words, not only shown in a colour.

Keys are read one by one while something else is shown; the terminal is left as it was found. Ctrl-Z is a key like any
other during that: the shell would be left with the display's screen.
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
"""There is no such figure. Why is told below the table, unless this GPU simply has none."""
MOST_NOTES = 4
_GIB, _GB = 2**30, 10**9
_NOT_SUPPORTED = "not supported"
_SIDE_BY_SIDE_COLUMNS, _SIDE_BY_SIDE_PORTS = 78, 3
_GOES_BELOW = {"SM MHz": 78, "mem MHz": 78, "NVLink GB/s": 60, "power W": 44}
"""Columns of the GPUs, each with the width below which it is left out: how a GPU is stays to the last."""


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A part of the screen. ``least``: lines that it keeps where there is no room for all."""

    content: RenderableType
    least: int
    what: str = ""
    """What its lines are, for those that are left out."""
    first: frozenset[int] = frozenset({0})
    """Those of its lines that stay before others."""


class Screen:
    """What rich draws.

    Args:
        node: what is known.
        host: the node's name.
        clock: the time of day as text.
        height: the lines that there are; None: as many as it takes.
        keys: a reminder of the keys; "" where there are none.
    """

    def __init__(self, node: Node, *, host: str, clock: str, height: int | None = None, keys: str = "") -> None:
        self._node, self._host, self._clock, self._height, self._keys = node, host, clock, height, keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as many lines as there is room for."""
        flat = options.update(height=None)
        sections = list(self._sections(options.max_width))
        rendered = [console.render_lines(section.content, flat, pad=False) for section in sections]
        rooms = [len(lines) for lines in rendered]
        if self._height is not None:
            rooms = _rooms(rooms, [section.least for section in sections], self._height)
        for section, lines, room in zip(sections, rendered, rooms, strict=True):
            shown = lines
            if room < len(lines):
                left_out = len(lines) - room + 1
                shown = [lines[number] for number in _kept(len(lines), max(0, room - 1), section.first)]
                more = f"  … {left_out} more {section.what}"
                shown = [*shown, [Segment(more[: options.max_width])]] if room else []
            for line in shown:
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
            yield _Section(content=content, least=4, what="GPUs", first=_title_and_troubled(node.gpus))
        notes = list(_notes(node.gpus))
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
        parts = [f"{_said(self._host, 32)}  {self._clock}", *_host_figures(self._node.host)]
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


def _rooms(wanted: Sequence[int], least: Sequence[int], height: int) -> list[int]:
    """Share out the lines: from the top each gets what it wants, as long as those below keep their least.

    >>> _rooms([1, 9, 9, 20], [1, 4, 3, 2], 14)
    [1, 8, 3, 2]
    """
    rooms = []
    for index, lines in enumerate(wanted):
        below = sum(min(want, keep) for want, keep in zip(wanted[index + 1 :], least[index + 1 :], strict=True))
        room = max(0, min(lines, max(height - below, min(lines, least[index]))))
        room = min(room, height)
        rooms.append(room)
        height -= room
    return rooms


def _kept(lines: int, room: int, first: Collection[int]) -> list[int]:
    """Return which lines stay where there is no room for all.

    >>> _kept(9, 4, {0, 7})
    [0, 1, 2, 7]
    """
    return sorted(sorted(range(lines), key=lambda number: (number not in first, number))[:room])


def _title_and_troubled(gpus: Sequence[Part]) -> frozenset[int]:
    rows = enumerate(gpus, start=1)
    return frozenset({0, *(row for row, gpu in rows if gpu.values.get("lost") or gpu.is_stale or _held_down(gpu))})


def _held_down(gpu: Part) -> str:
    return printable(", ".join(gpu.values.get("throttle") or ()))


def _host_figures(host: Part) -> Iterable[str]:
    told = host.values
    if told.get("load"):
        cpus = f" / {told['cpus']} CPUs" if told.get("cpus") else ""
        busy = host.rates.get("busy_ratio")
        yield f"load {told['load'][0]:.1f}{cpus}" + ("" if busy is None else f", {100 * busy:.0f} % busy")
    total, available = told.get("memory_total_bytes"), told.get("memory_available_bytes")
    if total is not None and available is not None:
        yield f"memory {(total - available) / _GIB:,.0f} / {total / _GIB:,.0f} GiB"
    if host.is_stale:
        yield _age("host", host)


def _age(what: str, part: Part) -> str:
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
    which = ", ".join(f"{count} x {_said(name, 40)}" for name, count in names.items())
    return _line(f"GPUs: {which}, driver {_said(node.driver or 'unknown', 20)}", width)


def _gpu_table(gpus: Sequence[Part], width: int) -> Table:
    titles = ["GPU", "util %", "mem GiB", "°C", "power W", "SM MHz", "mem MHz", "NVLink GB/s", "held down by"]
    rows: list[list[str | Text]] = []
    for gpu in gpus:
        told = gpu.values
        rows.append(
            [
                str(told.get("index", "?")),
                _number(told.get("utilization_percent")),
                _of(told.get("memory_used_bytes"), told.get("memory_total_bytes"), scale=_GIB, digits=1),
                _number(told.get("temperature_celsius")),
                _of(told.get("power_watts"), told.get("power_limit_watts")),
                _number(told.get("sm_clock_mhz")),
                _number(told.get("memory_clock_mhz")),
                _ways(gpu, "nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second"),
                _state(gpu),
            ]
        )
    kept = [index for index, title in enumerate(titles) if width >= _GOES_BELOW.get(title, 0)]
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
    """Lay a table out: every column as wide as what is in it, the last one as what is left. ``left``: titles of columns
    of words; the others are of numbers."""
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
    """Say what is to be known beside the figures; the worst first."""
    told = gpu.values
    if told.get("lost"):
        return Text("LOST", style="bold red")
    if gpu.is_stale:
        return Text("not read" if gpu.age_seconds is None else f"STALE {gpu.age_seconds:.0f} s", style="bold red")
    if gpu.age_seconds is None:
        return Text("…")
    return Text(_held_down(gpu), style="yellow")


def _notes(gpus: Sequence[Part]) -> Iterable[str]:
    """Say why figures are missing, one line a reason; what a GPU does not support is no news."""
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
        beside = [*rows[half:], [""] * 4]
        rows = [[*row, "", *beside[number]] for number, row in enumerate(rows[:half])]
        titles = [*titles, "", *titles]
    return _table(titles, rows, width, left=("port", "state"))


def _port(port: Part, characters: int) -> list[str]:
    told = port.values
    rate = told.get("rate_gbps")
    state = _said(str(told.get("state") or "unknown"), 10)
    if state == "ACTIVE" and rate is not None:
        state = f"{rate:g} Gb/s"
    if port.is_stale:
        state = "STALE"
    return [
        _said(str(told.get("name", "?")), characters),
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
            _said(process["user"] or "?", 12),
            Text(_said(process["command"] or "not shown to this user or container", 200)),
        ]
        for index, process in found
    ]
    return _table(["GPU", "mem GiB", "pid", "user", "command"], rows, width, left=("user", "command"))


def _said(text: str, characters: int) -> str:
    """Return foreign text on one line, in which nothing acts on a terminal or changes its direction."""
    return printable(one_line(text, characters))


def _number(value: Any, *, scale: float = 1, digits: int = 0) -> str:
    return NONE if value is None else f"{value / scale:.{digits}f}"


def _of(value: Any, total: Any, *, scale: float = 1, digits: int = 0) -> str:
    shown = _number(value, scale=scale, digits=digits)
    return shown if total is None else f"{shown}/{_number(total, scale=scale, digits=digits)}"


def _ways(part: Part, *names: str) -> str:
    rates = [part.rates.get(name) for name in names]
    return NONE if all(rate is None for rate in rates) else "/".join(_number(rate, scale=_GB) for rate in rates)


def _line(text: str, width: int) -> Text:
    return Text(_said(text, width), no_wrap=True, overflow="ellipsis")


def _warning(text: str, width: int) -> Text:
    return Text(_said(text, width), style="bold red", no_wrap=True, overflow="ellipsis")


ENDS = b"qQ\x03\x04"
"""Keys that end the display: also Ctrl-C and Ctrl-D, where the terminal gives them as keys."""
_CONTROL_CHARACTERS = 6
"""Where they are in what termios returns."""
_NONE = b"\0"
"""No key: _POSIX_VDISABLE of Linux, termios(3)."""


class Keyboard:
    """The standard input, if it is a terminal."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_there(self) -> bool:
        """Tell whether keys can be read."""
        return self._descriptor is not None

    def wait(self, seconds: float) -> bool:
        """Wait so long for a key; return True if it ends the display."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
                return False
            if not select.select([self._descriptor], [], [], left)[0]:
                return False
            read = os.read(self._descriptor, 64)
            if not read:  # the terminal is gone
                return True
            if any(key in ENDS for key in read):
                return True
        return False


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Take keys as they are pressed, without showing them; where there is no terminal, there are none."""
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
    """Return plain JSON types. A figure that is not there is null, and ``not_available`` says why; what is stale keeps
    its last values, and says so.

    Args:
        node: what is known.
        host: the node's name.
        at: the time, as ISO 8601 in UTC.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "at": at,
        "host": host,
        "driver": node.driver,
        "load": {**_told(node.host, _HOST), "busy_ratio": node.host.rates.get("busy_ratio"), **_json_age(node.host)},
        "gpus": [_gpu(gpu) for gpu in node.gpus],
        "why_no_gpus": node.why_no_gpus or None,
        "nvml_silent_seconds": None if node.silent_seconds is None else round(node.silent_seconds, 1),
        "ports": [
            {**_told(port, _PORT), **{name: port.rates.get(name) for name in _PORT_RATES}, **_json_age(port)}
            for port in node.ports
        ],
        "why_no_ports": node.why_no_ports or None,
        "problem": node.problem or None,
    }


def line(node: Node, *, host: str, at: str) -> str:
    """Return :func:`to_json` as a line."""
    return json.dumps(to_json(node, host=host, at=at), allow_nan=False) + "\n"


def _gpu(gpu: Part) -> dict[str, Any]:
    figures = tuple(key for key in QUERIES if key not in (NVLINK, PROCESSES))
    return {
        **_told(gpu, (*_IDENTITY, *figures)),
        **{name: gpu.rates.get(name) for name in _NVLINK_RATES},
        PROCESSES: gpu.values.get(PROCESSES),
        "not_available": gpu.values.get("not_available", {}),
        "lost": gpu.values.get("lost") or None,
        **_json_age(gpu),
    }


def _told(part: Part, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {name: part.values.get(name) for name in names}


def _json_age(part: Part) -> Mapping[str, Any]:
    age = None if part.age_seconds is None else round(part.age_seconds, 1)
    return {"age_seconds": age, "stale": part.is_stale}
