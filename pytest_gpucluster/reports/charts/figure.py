"""A chart with its data as a table, and reading the artifacts that charts are made from.

A run may have been killed while it wrote a file, so a missing, damaged or too large file is reported in place of the
chart and is never an error.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pytest_gpucluster.errors import CurveError
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.metrics.loss_curve import Curve, read_csv
from pytest_gpucluster.reports.markup import Table


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart. ``svg`` is empty if its file cannot be read; then ``caption`` has the reason."""

    title: str
    svg: Markup
    caption: str = ""
    table: Table | None = None


LARGEST_BYTES = 16_000_000
"""Of one file. The matrix of 1,024 GPUs on 128 nodes has some 130,000 readings, in 9 MB."""
_BURN_IN_HEADER = "seconds,products,busy_seconds,tflops"


class Unreadable(Exception):
    """A file cannot be read; the message begins with its name."""


def unreadable(title: str, error: Unreadable) -> Figure:
    """Return the message in place of a chart."""
    return Figure(title=title, svg=Markup(""), caption=f"Not shown: {error}")


def find_artifacts(folder: Path | None, nodeid: str, pattern: str, *, most: int = 4096) -> list[Path]:
    """Return the files of a test that match a pattern, also in the folders of local workers, one per rank."""
    try:
        paths = [path for place in artifact_folders(folder, nodeid) for path in place.glob(pattern)]
        return sorted(paths, key=by_number)[:most]
    except OSError:  # such as a name that is too long for this file system
        return []


def artifact_folders(folder: Path | None, nodeid: str) -> list[Path]:
    """Return the folder of a test's files, and those of local workers, one per rank."""
    if folder is None:
        return []
    name, artifacts = artifacts_name(nodeid), folder / ARTIFACTS
    return [artifacts / name, *sorted((place / name for place in artifacts.glob("rank-*")), key=by_number)]


def by_number(name: object) -> list[tuple[str, int]]:
    """Return a sort key by which rank-2 comes before rank-10."""
    parts = re.findall(r"([^0-9]*)([0-9]{0,18})", str(name))
    return [(text, int(digits or -1)) for text, digits in parts]


def curve(path: Path) -> Curve:
    """Read a loss curve.

    Raises: Unreadable
    """
    _require_small(path)
    try:
        return read_csv(path)
    except CurveError as error:
        raise Unreadable(str(error).replace(str(path), path.name)) from None


def matrix(path: Path) -> dict[str, Any]:
    """Read a link survey (``isolation.link_survey.to_json``); its required keys have been checked.

    Raises: Unreadable
    """
    try:
        survey = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name}: damaged: not JSON ({error})") from None
    if not isinstance(survey, dict) or survey.get("schema_version") != 1:
        raise Unreadable(f"{path.name}: no link survey that this version reads")
    readings, nodes = survey.get("readings"), survey.get("nodes")
    good = isinstance(readings, list) and all(_is_reading(one) for one in readings)
    good = good and isinstance(nodes, list) and all(isinstance(node, list) for node in nodes)
    if not good or not all(_is_rank(rank) for node in nodes or () for rank in node):
        raise Unreadable(f"{path.name}: damaged: its readings are not [sender, receiver, value, ...]")
    return survey


def _is_reading(one: object) -> bool:
    return isinstance(one, list) and len(one) >= 3 and _is_rank(one[0]) and _is_rank(one[1]) and _is_number(one[2])


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def burn_in_rates(path: Path) -> list[tuple[float, float]]:
    """Read the time series of a burn-in: (seconds, TFLOPS). A last line that was cut off is ignored.

    Raises: Unreadable
    """
    lines = _text(path).splitlines()
    if not lines or lines[0] != _BURN_IN_HEADER:
        raise Unreadable(f"{path.name}: no rates of a burn-in: it does not begin with {_BURN_IN_HEADER}")
    points = []
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split(",")
        try:
            at, rate = float(cells[0]), float(cells[3])
        except (ValueError, IndexError):
            if number == len(lines):
                break
            raise Unreadable(f"{path.name}:{number}: damaged: not four numbers") from None
        if math.isfinite(at):
            points.append((at, rate))
    return points


def each_rank(paths: list[Path]) -> Iterator[tuple[int, Path]]:
    """Yield the rank in the name of each file, and the file."""
    for path in paths:
        number = path.stem.rpartition("-")[2]
        # A local worker is rank 0 of its own world; its folder has its number.
        worker = path.parent.parent.name
        if worker.startswith("rank-") and path.parent.parent.parent.name == ARTIFACTS:
            number = worker.removeprefix("rank-")
        if number.isascii() and number.isdigit() and len(number) < 10:
            yield int(number), path


def _text(path: Path) -> str:
    _require_small(path)
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise Unreadable(f"{path.name}: cannot be read: {error.strerror or error}") from None


def _require_small(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise Unreadable(f"{path.name}: cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
        raise Unreadable(f"{path.name}: no regular file")
    if status.st_size > LARGEST_BYTES:
        size, most = status.st_size / 1e6, LARGEST_BYTES / 1e6
        raise Unreadable(f"{path.name}: {size:.0f} MB, the limit is {most:.0f} MB")
