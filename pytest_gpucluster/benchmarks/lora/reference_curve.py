"""A reference curve: the loss of an experiment step by step, and the band within which another run must stay.

It shows what a threshold on the last losses cannot: a run that reaches a low loss by another path. With synchronous
training the path is known: seed, data and global batch define it, whatever the number of ranks. Dropout is the
exception: each rank draws its own, and another number of ranks leaves the floor of the band after some 30 steps of the
tiny model, by up to 4 bands. So with dropout the number of ranks belongs to the context.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pytest_gpucluster.errors import CurveError, JournalError
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.metrics.loss_curve import Curve
from pytest_gpucluster.text import some_of

FORMAT = "pytest-gpucluster reference curve"
VERSION = 1

SPREADS = 3.0
"""The band is at least this number of standard deviations of the runs. Source: this suite's rule."""
RELATIVE_FLOOR = 0.02
"""The band is at least this part of the loss. Source: this suite's rule. It lies between the effect of another seed on
the early losses of the tiny model (2.5 to 5.7 %) and that of bf16 instead of fp32 at its end (1.5 %); of the faults
that leave the last losses low, the mildest moves the first ones by 3.6 %."""
WIDEST = 0.1
"""The band is at most this part of the loss. Source: this suite's rule: beyond, a rank that reads another's data (26 %
of the last losses of the tiny model) would be within some three bands, and its first losses (3.6 %) far within one."""
ABSOLUTE_FLOOR = 1e-3
"""The band is at least this, in nats a token, since a part of a loss near 0 is nothing. Source: this suite's rule."""


@dataclass(frozen=True, kw_only=True)
class ReferenceCurve:
    """A reference curve. ``steps``, ``loss`` and ``band`` are equally long; losses in nats a token."""

    context: Mapping[str, str]
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    """Mean over the runs."""
    band: tuple[float, ...]
    """The allowed difference, to both sides."""
    runs: int


def reference_curve_of(curves: Sequence[Curve]) -> ReferenceCurve:
    """Make a reference curve of one or more runs of the same experiment.

    Raises:
        CurveError: runs of different experiments or steps, no steps, a loss that is not finite, or runs so far apart
            that the band would find nothing.
    """
    first = curves[0]
    steps = tuple(point.step for point in first.points)
    if not steps:
        raise CurveError("the curve has no points")
    for number, curve in enumerate(curves, start=1):
        _require_same(f"run {number}", curve.context, "run 1", first.context)
        _require_steps(f"run {number}", [point.step for point in curve.points], steps)
        for point in curve.points:
            if not math.isfinite(point.loss):
                raise CurveError(f"run {number} has a loss of {point.loss} at step {point.step}: not usable")
    losses = [[curve.points[index].loss for curve in curves] for index in range(len(steps))]
    mean, band = [statistics.fmean(of_step) for of_step in losses], [_band(of_step) for of_step in losses]
    for step, loss, width in zip(steps, mean, band, strict=True):
        if width > max(WIDEST * abs(loss), ABSOLUTE_FLOOR):
            raise CurveError(
                f"the band at step {step} would be {width:.3g} nats, {width / abs(loss):.0%} of the loss, and "
                f"{WIDEST:.0%} is the most: the runs do not agree. Take runs of one number of ranks that were accepted"
            )
    return ReferenceCurve(
        context=dict(first.context), steps=steps, loss=tuple(mean), band=tuple(band), runs=len(curves)
    )


def write(path: Path, curves: Sequence[Curve]) -> ReferenceCurve:
    """Write the reference curve of these runs, and return it.

    Raises:
        CurveError: as :func:`reference_curve_of`.
        OSError: it cannot be written.
    """
    reference = reference_curve_of(curves)
    body = {"format": FORMAT, "version": VERSION, **codec.to_json(reference)}
    path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return reference


def read(path: Path) -> ReferenceCurve:
    """Read a reference curve.

    Raises:
        CurveError: it cannot be read, or is not exactly what :func:`write` writes; names the file and what is wrong.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CurveError(f"{path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CurveError(f"{path}: no reference curve: {error}") from None
    if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
        raise CurveError(
            f"{path}: no reference curve: its format is not {FORMAT!r}; make one with gpucluster lora reference-curve"
        )
    version = body.pop("version", None)
    if version != VERSION:
        raise CurveError(f"{path}: its version is {version!r}, and this version of pytest-gpucluster reads {VERSION}")
    try:
        found = codec.read(ReferenceCurve, body, str(path))
    except JournalError as error:
        raise CurveError(str(error)) from None
    steps, band = found.steps, found.band
    problems = {
        f"{len(steps)} steps, {len(found.loss)} losses and {len(band)} bands; every step needs one of each": not (
            len(steps) == len(found.loss) == len(band) > 0
        ),
        "the steps do not rise": any(a >= b for a, b in pairwise(steps)),
        "a loss or band is no finite number": not all(map(math.isfinite, (*found.loss, *band))),
        f"a band of {min(band, default=0)} allows nothing; it must be above 0": min(band, default=0) <= 0,
        "runs must be a number from 1": found.runs < 1,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise CurveError(f"{path}: {problem}")
    return found


def require_same_experiment(reference: ReferenceCurve, context: Mapping[str, str], *, steps: int) -> None:
    """Check before training whether a curve of this context, with this number of steps, can be compared.

    Raises:
        CurveError: it cannot; names each key that differs, with both values, or the number of steps.
    """
    _require_same("this run", context, "the reference curve", reference.context)
    if steps > len(reference.steps):
        raise CurveError(f"the reference curve has {len(reference.steps)} steps, and this run takes {steps}")


def deviation(reference: ReferenceCurve, curve: Curve, *, steps: int) -> tuple[float, str]:
    """Return the largest of ``|loss - reference| / band`` over the first steps, which the curve must have, and where
    that is.

    A loss that is not finite counts as largest.

    Raises:
        CurveError: they are not of the same experiment, so that a difference would mean nothing: names each key of the
            context that differs, with both values; or the steps differ.
    """
    require_same_experiment(reference, curve.context, steps=steps)
    _require_steps("this run", [point.step for point in curve.points], reference.steps[:steps])
    bands = zip(curve.points, reference.loss, reference.band)  # noqa: B905  the reference may be longer
    found = [
        (
            abs(point.loss - mean) / band,
            f"bands at step {point.step}: loss {point.loss:.6g}, reference {mean:.6g} +- {band:.2g}",
        )
        for point, mean, band in bands
    ]
    largest, where = max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
    return largest, f"{largest:.3g} {where}"


def _band(losses: Sequence[float]) -> float:
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return max(SPREADS * spread, RELATIVE_FLOOR * abs(statistics.fmean(losses)), ABSOLUTE_FLOOR)


def differences(one: str, context: Mapping[str, str], other: str, expected: Mapping[str, str]) -> list[str]:
    """Describe each key in which two contexts differ, with both values. ``one`` and ``other`` name their origin."""
    return [
        f"{key} is {context.get(key, 'not given')} in {one} and {expected.get(key, 'not given')} in {other}"
        for key in dict.fromkeys([*expected, *context])
        if context.get(key) != expected.get(key)
    ]


def _require_same(one: str, context: Mapping[str, str], other: str, expected: Mapping[str, str]) -> None:
    if different := differences(one, context, other, expected):
        raise CurveError(f"not the same experiment: {'; '.join(different)}")


def _require_steps(one: str, steps: Sequence[int], expected: Sequence[int]) -> None:
    if list(steps) != list(expected):
        found, due = (some_of([*map(str, numbers)]) for numbers in (steps, expected))
        raise CurveError(f"{one} has the steps {found or 'none'}, expected are {due}")
