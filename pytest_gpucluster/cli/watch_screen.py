"""The display of ``gpucluster node watch``: lines for a terminal of any size.

Stale, lost and wrong parts are marked in words, so that the display needs no colours.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from pytest_gpucluster.node.health.node_reader import PROCESSES
from pytest_gpucluster.node.health.node_state import Node, Part
from pytest_gpucluster.text import Column, clean, line_of, shortened, styled, widths

NONE = "-"
"""No value. The reason is below the table, unless the GPU does not support it."""
MOST_NOTES = 4
_GIB, _GB = 2**30, 10**9
_SILENT = ("not supported", "not known to this driver")
"""Beginnings of reasons that are not shown."""
_NVLINK_RATES = ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second")
_PORT_RATES = ("sent_bytes_per_second", "received_bytes_per_second")
_LEAST_WIDTHS = {"SM MHz": 78, "mem MHz": 78, "NVLink GB/s": 60, "power W": 44}
"""Columns of the GPUs, each with the width below which it is left out. The state of a GPU is always shown."""


class Line(NamedTuple):
    """A line of the display, without control characters."""

    text: str
    style: str = ""


def draw(read: Callable[[], Node], *, host: str, seconds: float) -> NoReturn:
    """Draw the node on the terminal's alternate screen, again after ``seconds``, until an exception ends it.

    The former content of the screen comes back.
    """
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        while True:
            # Not LINES and COLUMNS, which may be of a former size.
            size = os.get_terminal_size(sys.stdout.fileno())
            clock = f"{datetime.datetime.now(datetime.timezone.utc):%H:%M:%S} UTC"
            lines = screen(read(), host=host, clock=clock, width=size.columns or 80, height=size.lines or 24)
            text = "\x1b[K\r\n".join(styled(line, style, colour=bool(style)) for line, style in lines)
            sys.stdout.write(f"\x1b[H{text}\x1b[J")
            sys.stdout.flush()
            time.sleep(seconds)
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def plain(node: Node, *, host: str, clock: str, width: int) -> str:
    """Return the whole display as text."""
    return "".join(f"{line.text}\n" for line in screen(node, host=host, clock=clock, width=width))


def screen(node: Node, *, host: str, clock: str, width: int, height: int | None = None) -> list[Line]:
    """Return the lines of the display, none wider than ``width``.

    Args:
        node: the state of the node.
        host: its name.
        clock: the time of day as text.
        width: columns of the terminal.
        height: of the terminal; None for as many lines as needed. If not all fit, GPUs with a problem are the first.
    """
    lines = [*_lines(node, node.gpus, host, clock, width)]
    if height is not None and len(lines) > height:
        lines = [*_lines(node, sorted(node.gpus, key=lambda gpu: not _state(gpu)), host, clock, width)]
        lines[height - 1 :] = [Line(f"… {len(lines) - height + 1} more lines")]
    return [Line(shortened(line.text, width), line.style) for line in lines]


def _lines(node: Node, gpus: Sequence[Part], host: str, clock: str, width: int) -> Iterator[Line]:
    yield Line("  ".join([f"{shortened(clean(host), 32)}  {clock}", *_host_figures(node.host)]), "bold")
    if node.problem:
        yield _warning(node.problem)
    yield _gpu_title(node)
    if gpus:
        yield from _gpu_table(gpus, width)
    notes = list(_missing_value_notes(gpus))
    yield from map(_warning, notes[:MOST_NOTES])
    if len(notes) > MOST_NOTES:
        yield _warning(f"… {len(notes) - MOST_NOTES} more like these")
    if node.ports:
        titles = [Column(title="port"), Column(title="state"), *_right("out GB/s", "in GB/s")]
        yield from _table(titles, [_port(port) for port in node.ports])
    elif node.why_no_ports:
        yield Line(clean(f"ports: none: {node.why_no_ports}"))
    processes = [(gpu.values.get("index", "?"), one) for gpu in gpus for one in gpu.values.get(PROCESSES) or ()]
    if processes:
        titles = [*_right("GPU", "mem GiB", "pid"), Column(title="user"), Column(title="command")]
        processes.sort(key=lambda one: -(one[1]["memory_bytes"] or 0))
        yield from _table(titles, [_process(index, process) for index, process in processes])


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
        yield "host not read" if host.age_seconds is None else f"host stale for {host.age_seconds:.0f} s"


def _gpu_title(node: Node) -> Line:
    if node.silent_seconds is not None:
        return _warning(f"GPUs: NVML has not answered for {node.silent_seconds:.0f} s")
    if node.why_no_gpus:
        return _warning(f"GPUs: none: {node.why_no_gpus}")
    if not node.gpus:
        return _warning("GPUs: none")
    if all(gpu.is_stale for gpu in node.gpus):
        ages = [gpu.age_seconds for gpu in node.gpus if gpu.age_seconds is not None]
        since = f" for {min(ages):.0f} s" if ages else ""
        return _warning(f"GPUs: {len(node.gpus)}, and NVML has not answered{since}")
    names = Counter(str(gpu.values.get("name") or "of unknown kind") for gpu in node.gpus)
    which = ", ".join(f"{count} x {shortened(clean(name), 40)}" for name, count in names.items())
    return Line(f"GPUs: {which}, driver {shortened(clean(node.driver or 'unknown'), 20)}")


def _gpu_table(gpus: Sequence[Part], width: int) -> Iterator[Line]:
    heads = [
        *_right("GPU", "util %", "mem GiB", "°C", "power W", "SM MHz", "mem MHz", "NVLink GB/s"),
        Column(title="throttled by"),
    ]
    kept = [index for index, head in enumerate(heads) if width >= _LEAST_WIDTHS.get(head.title, 0)]
    rows = [_gpu_row(gpu) for gpu in gpus]
    styles = ["red" if gpu.is_stale or gpu.values.get("lost") else "yellow" if _state(gpu) else "" for gpu in gpus]
    yield from _table([heads[index] for index in kept], [[row[index] for index in kept] for row in rows], styles)


def _gpu_row(gpu: Part) -> list[str]:
    values = gpu.values
    sent, received = (gpu.rates.get(name) for name in _NVLINK_RATES)
    return [
        str(values.get("index", "?")),
        _number(values.get("utilization_percent")),
        _fraction(values.get("memory_used_bytes"), values.get("memory_total_bytes"), scale=_GIB, digits=1),
        _number(values.get("temperature_celsius")),
        _fraction(values.get("power_watts"), values.get("power_limit_watts")),
        _number(values.get("sm_clock_mhz")),
        _number(values.get("memory_clock_mhz")),
        NONE if sent is received is None else f"{_number(sent, scale=_GB)}/{_number(received, scale=_GB)}",
        _state(gpu) or ("…" if gpu.age_seconds is None else ""),
    ]


def _state(gpu: Part) -> str:
    """Return what is wrong with a GPU, the worst first; empty if nothing is."""
    if gpu.values.get("lost"):
        return "LOST"
    if gpu.is_stale:
        return "not read" if gpu.age_seconds is None else f"STALE {gpu.age_seconds:.0f} s"
    return clean(", ".join(gpu.values.get("throttle") or ()))


def _missing_value_notes(gpus: Sequence[Part]) -> Iterable[str]:
    """Yield why values are missing, one line for each reason; unsupported values are left out."""
    reasons: dict[str, dict[str, dict[str, None]]] = {}
    for gpu in gpus:
        missing = {"": gpu.values["lost"]} if gpu.values.get("lost") else gpu.values.get("not_available", {})
        for key, why in missing.items():
            if not str(why).startswith(_SILENT):
                found = reasons.setdefault(str(why), {"gpus": {}, "keys": {}})
                found["gpus"][str(gpu.values.get("index", "?"))] = found["keys"][str(key)] = None
    for why, found in reasons.items():
        keys = ", ".join(filter(None, found["keys"]))
        yield f"{'GPU' if len(found['gpus']) == 1 else 'GPUs'} {', '.join(found['gpus'])}: {keys and f'{keys}: '}{why}"


def _port(port: Part) -> list[str]:
    values = port.values
    rate = values.get("rate_gbps")
    state = shortened(clean(str(values.get("state") or "unknown")), 10)
    if state == "ACTIVE" and rate is not None:
        state = f"{rate:g} Gb/s"
    return [
        shortened(clean(str(values.get("name", "?"))), 24),
        "STALE" if port.is_stale else state,
        *(_number(port.rates.get(name), scale=_GB, digits=1) for name in _PORT_RATES),
    ]


def _process(index: object, process: Mapping[str, Any]) -> list[str]:
    return [
        str(index),
        _number(process["memory_bytes"], scale=_GIB, digits=1),
        str(process["pid"]),
        shortened(clean(process["user"] or "?"), 12),
        clean(process["command"] or "not kept to this user or container"),
    ]


def _right(*titles: str) -> list[Column]:
    return [Column(title=title, is_right=True) for title in titles]


def _table(heads: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Iterator[Line]:
    titles = [head.title for head in heads]
    wide = widths([titles, *rows])
    yield Line(line_of(titles, heads, wide))
    for index, row in enumerate(rows):
        yield Line(line_of(row, heads, wide), styles[index] if styles else "")


def _number(value: Any, *, scale: float = 1, digits: int = 0) -> str:
    return NONE if value is None else f"{value / scale:.{digits}f}"


def _fraction(value: Any, total: Any, *, scale: float = 1, digits: int = 0) -> str:
    kept = _number(value, scale=scale, digits=digits)
    return kept if total is None else f"{kept}/{_number(total, scale=scale, digits=digits)}"


def _warning(text: str) -> Line:
    return Line(clean(text), "red")
