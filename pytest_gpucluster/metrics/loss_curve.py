"""The loss curve of a training run, and its file: CSV to be read by anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

from pytest_gpucluster.errors import CurveError
from pytest_gpucluster.files import atomic_write

FIRST_LINE = "# pytest-gpucluster loss curve 1"
"""The first line of a curve's file, with its version."""
_HELD_OUT = "held_out_loss"


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one optimizer step showed. Losses are means over the tokens of the global batch, in nats a token."""

    step: int
    """Counted from 1."""
    loss: float
    """Over the tokens with labels: those of the assistant."""
    all_token_loss: float
    """Over all tokens."""
    gradient_norm: float
    """Global 2-norm before clipping."""
    learning_rate: float
    """Of this step."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of a run in the order of steps, each step once. A value may be NaN.

    Raises:
        CurveError: steps that do not rise.
    """

    points: tuple[Point, ...]
    held_out: tuple[tuple[int, float], ...] = ()
    """(step, loss over held-out rows in nats a token); step 0 is before training."""
    context: Mapping[str, str] = field(default_factory=dict)
    """What defines the experiment, such as model, data, seed: a reference curve is compared only where all of it is the
    same. What may differ between equal experiments does not belong here: without dropout, the number of ranks."""

    def __post_init__(self) -> None:
        for what, steps in (
            ("points", [point.step for point in self.points]),
            ("held-out losses", [step for step, _ in self.held_out]),
        ):
            if any(step < 0 for step in steps[:1]) or any(a >= b for a, b in pairwise(steps)):
                raise CurveError(f"the {what} of a curve are not in the order of steps: {steps}")

    def write_csv(self, path: Path) -> None:
        """Write the curve as CSV, every number so that it is read back exactly; NaN as ``nan``. A file that is there is
        replaced at once.

        The context stands in lines with ``#`` above the header. A step at which only a held-out loss is known has a row
        with that alone.

        Raises:
            OSError: it cannot be written.
        """
        held_out = dict(self.held_out)
        points = {point.step: point for point in self.points}
        lines = [FIRST_LINE, *(f"# {key}={json.dumps(value)}" for key, value in self.context.items())]
        lines.append(",".join([*_COLUMNS, _HELD_OUT]))
        for step in sorted({*points, *held_out}):
            values = [repr(float(getattr(points[step], name))) for name in _VALUES] if step in points else []
            values = values or [""] * len(_VALUES)
            lines.append(",".join([str(step), *values, repr(float(held_out[step])) if step in held_out else ""]))
        atomic_write(path, "".join(f"{line}\n" for line in lines))


_COLUMNS = tuple(each.name for each in fields(Point))
_VALUES = _COLUMNS[1:]


def read_csv(path: Path) -> Curve:
    """Read what :meth:`Curve.write_csv` has written. Two curves are equal if all but NaN in them is.

    Raises:
        CurveError: it cannot be read or is no such file. The message names the file and, where it can, the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CurveError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = text.splitlines()
    if not lines or lines[0] != FIRST_LINE:
        found = repr(lines[0][:80]) if lines else "nothing"
        raise CurveError(f"{path}:1: no loss curve of this version: it begins with {found}, not with {FIRST_LINE!r}")
    header = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    context: dict[str, str] = {}
    for number, line in enumerate(lines[1:header], start=2):
        key, _, value = line.removeprefix("# ").partition("=")
        try:
            entry = json.loads(value)
        except ValueError:
            entry = None
        if not isinstance(entry, str):
            raise CurveError(f'{path}:{number}: {value!r} is no text in quotes, such as # model="tiny"')
        context[key] = entry
    expected = [*_COLUMNS, _HELD_OUT]
    if header == len(lines) or lines[header].split(",") != expected:
        found = lines[header] if header < len(lines) else "nothing"
        raise CurveError(f"{path}:{header + 1}: the columns must be {','.join(expected)}, not {found}")
    points, held_out = [], []
    for number, line in enumerate(lines[header + 1 :], start=header + 2):
        cells = line.split(",")
        if len(cells) != len(expected):
            raise CurveError(f"{path}:{number}: {len(cells)} values, and there are {len(expected)} columns")
        try:
            step = int(cells[0])
            if any(cells[1:-1]):
                points.append(Point(step=step, **dict(zip(_VALUES, map(float, cells[1:-1]), strict=True))))
            if cells[-1]:
                held_out.append((step, float(cells[-1])))
        except ValueError as error:
            raise CurveError(f"{path}:{number}: {error}") from None
    try:
        return Curve(points=tuple(points), held_out=tuple(held_out), context=context)
    except CurveError as error:
        raise CurveError(f"{path}: {error}") from None


def mean_of_last(curve: Curve, count: int, of: str = "loss") -> float:
    """Return the mean loss of the last ``count`` points, or their mean ``all_token_loss``; NaN if there are fewer."""
    losses = [getattr(point, of) for point in curve.points[-count:]]
    return math.fsum(losses) / count if len(losses) == count else math.nan
