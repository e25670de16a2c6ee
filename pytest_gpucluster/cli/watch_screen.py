"""The display of ``gpucluster node watch``, for terminals of any size and for files.

Stale, lost and wrong parts are marked in words, so that the display needs no colours.
"""

from __future__ import annotations

import datetime
import io
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.node.health.node_reader import PROCESSES, Node, Part
from pytest_gpucluster.text import clean

NONE = "-"
"""No value. The reason is below the table, unless the GPU does not support it."""
MOST_NOTES = 4
_GIB, _GB = 2**30, 10**9
_SILENT = ("not supported", "not known to this driver")
"""Beginnings of reasons that are not shown."""
_NVLINK_RATES = ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second")
_GPU_HEADS = ("GPU", "util %", "mem GiB", "°C", "power W", "SM MHz", "mem MHz", "NVLink GB/s", "throttled by")
_MOST_WIDTHS = {"throttled by": 13, "state": 10, "user": 12}
_PORT_RATES = ("sent_bytes_per_second", "received_bytes_per_second")


def draw(read: Callable[[], Node], *, host: str, seconds: float) -> NoReturn:
    """Draw the node on the terminal's alternate screen, again after ``seconds``, until an exception ends it."""
    # LINES and COLUMNS may be of a former size.
    environ = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
    with Live(console=Console(_environ=environ), screen=True, auto_refresh=False) as live:
        while True:
            clock = f"{datetime.datetime.now(datetime.timezone.utc):%H:%M:%S} UTC"
            live.update(screen(read(), host=host, clock=clock), refresh=True)
            time.sleep(seconds)


def plain(node: Node, *, host: str, clock: str, width: int) -> str:
    """Return the whole display as text, no line wider than ``width``."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(screen(node, host=host, clock=clock))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def screen(node: Node, *, host: str, clock: str) -> Group:
    """Return the display; GPUs with a problem come first, for a terminal that is too low for all.

    Args:
        node: the state of the node.
        host: its name.
        clock: the time of day as text.
    """
    return Group(*_parts(node, sorted(node.gpus, key=lambda gpu: not _state(gpu)), host, clock))


def _parts(node: Node, gpus: Sequence[Part], host: str, clock: str) -> Iterator[RenderableType]:
    yield _text(", ".join([host[:32], clock, *_host_figures(node.host)]), "bold")
    if node.problem:
        yield _text(node.problem, "red")
    yield _gpu_title(node)
    if gpus:
        *numbers, state = _GPU_HEADS
        yield _table(_GPU_HEADS, map(_gpu_row, gpus), texts=[state], shortened=numbers, styles=map(_style, gpus))
    notes = list(_missing_value_notes(gpus))
    if len(notes) > MOST_NOTES:
        notes[MOST_NOTES:] = [f"… {len(notes) - MOST_NOTES} more like these"]
    yield from (_text(note, "red") for note in notes)
    if node.ports:
        heads = ["port", "state", "out GB/s", "in GB/s"]
        yield _table(heads, map(_port, node.ports), texts=heads[:2], shortened=heads[:1])
    elif node.why_no_ports:
        yield _text(f"ports: none: {node.why_no_ports}")
    processes = [(gpu.values.get("index", "?"), one) for gpu in gpus for one in gpu.values.get(PROCESSES) or ()]
    if processes:
        processes.sort(key=lambda one: -(one[1]["memory_bytes"] or 0))
        rows = [_process(index, process) for index, process in processes]
        heads = ["GPU", "mem GiB", "pid", "user", "command"]
        yield _table(heads, rows, texts=heads[3:], shortened=heads[4:])


def _host_figures(host: Part) -> Iterator[str]:
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


def _gpu_title(node: Node) -> Text:
    if node.silent_seconds is not None:
        return _text(f"GPUs: NVML has not answered for {node.silent_seconds:.0f} s", "red")
    if not node.gpus:
        return _text(f"GPUs: none{node.why_no_gpus and f': {node.why_no_gpus}'}", "red")
    if all(gpu.is_stale for gpu in node.gpus):
        ages = [gpu.age_seconds for gpu in node.gpus if gpu.age_seconds is not None]
        since = f" for {min(ages):.0f} s" if ages else ""
        return _text(f"GPUs: {len(node.gpus)}, and NVML has not answered{since}", "red")
    names = Counter(str(gpu.values.get("name") or "of unknown kind") for gpu in node.gpus)
    which = ", ".join(f"{count} x {name[:40]}" for name, count in names.items())
    return _text(f"GPUs: {which}, driver {node.driver or 'unknown'}")


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
    if gpu.values.get("lost"):
        return "LOST"
    if gpu.is_stale:
        return "not read" if gpu.age_seconds is None else f"STALE {gpu.age_seconds:.0f} s"
    return ", ".join(gpu.values.get("throttle") or ())


def _style(gpu: Part) -> str:
    return "red" if gpu.is_stale or gpu.values.get("lost") else "yellow" if _state(gpu) else ""


def _missing_value_notes(gpus: Sequence[Part]) -> Iterator[str]:
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
    rate, state = values.get("rate_gbps"), str(values.get("state") or "unknown")
    if state == "ACTIVE" and rate is not None:
        state = f"{rate:g} Gb/s"
    rates = [_number(port.rates.get(name), scale=_GB, digits=1) for name in _PORT_RATES]
    return [str(values.get("name", "?")), "STALE" if port.is_stale else state, *rates]


def _process(index: object, process: Mapping[str, Any]) -> list[str]:
    memory = _number(process["memory_bytes"], scale=_GIB, digits=1)
    command = process["command"] or "not kept to this user or container"
    return [str(index), memory, str(process["pid"]), process["user"] or "?", command]


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: Sequence[str],
    shortened: Sequence[str],
    styles: Iterable[str] = (),
) -> Table:
    """Return a table with ``texts`` on the left; where it is too wide, the columns ``shortened`` are."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for head in heads:
        table.add_column(
            _text(head),
            justify="left" if head in texts else "right",
            no_wrap=head not in shortened,
            max_width=_MOST_WIDTHS.get(head),
        )
    for row, style in itertools.zip_longest(rows, styles):
        table.add_row(*map(_text, row), style=style)
    return table


def _number(value: Any, *, scale: float = 1, digits: int = 0) -> str:
    return NONE if value is None else f"{value / scale:.{digits}f}"


def _fraction(value: Any, total: Any, *, scale: float = 1, digits: int = 0) -> str:
    kept = _number(value, scale=scale, digits=digits)
    return kept if total is None else f"{kept}/{_number(total, scale=scale, digits=digits)}"


def _text(text: str, style: str = "") -> Text:
    return Text(clean(text), style, no_wrap=True, overflow="ellipsis")
