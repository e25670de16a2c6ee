"""``gpucluster thresholds judge``: values that were measured elsewhere, held against the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.commands.command import DONE, complain
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.metrics import units
from pytest_gpucluster.metrics.units import did_you_mean
from pytest_gpucluster.text import one_line, printable

if TYPE_CHECKING:
    from pytest_gpucluster.judge.evidence import Support
    from pytest_gpucluster.judge.judge import Judged

MISSED, WRONG_USAGE, NOT_JUDGED = 1, 4, 10
"""Exit codes; the first of them that any value has. A missed limit wins over a value that nothing judges."""


def judge_values(
    values: Sequence[tuple[str, str]],
    *,
    sku: str,
    world_size: int,
    nodes: int,
    labels: Mapping[str, str],
    files: Sequence[Path] = (),
) -> int:
    """Print a line for each value, with its limit, margin and evidence, and return the exit code.

    Args:
        values: metric and quantity, as "51.5 TFLOPS".
        sku: its name.
        world_size: GPUs that took part.
        nodes: in which they sit.
        labels: as in the table of evidence.
        files: laid over the shipped limits.

    Raises: ThresholdsError: a file of limits is wrong.
    """
    from pytest_gpucluster.judge import evidence, loader
    from pytest_gpucluster.judge.judge import judge_value
    from pytest_gpucluster.metrics import measurement

    limits = loader.load(loader.shipped_path(), *files)
    if sku not in limits.skus and sku not in {row.sku for row in evidence.published()}:
        hint = did_you_mean(sku, limits.skus)
        return complain(f"--sku {sku}: no such SKU; known are {', '.join(limits.skus)}{hint}", WRONG_USAGE)
    if world_size < nodes:
        return complain(f"{world_size} GPUs cannot sit in {nodes} nodes", WRONG_USAGE)
    read: list[tuple[str, float, str]] = []
    for name, text in values:
        try:
            metric = measurement.known(name)
            value = units.parse(text, like=metric.unit or None).to(metric.unit)
            if not value > 0:
                raise MeasurementError(f"{text} is not above zero")
        except MeasurementError as error:
            return complain(f"{name}={text}: {one_line(str(error), 300)}", WRONG_USAGE)
        read.append((name, value, metric.unit))
    codes = set()
    for name, value, unit in read:
        judged = judge_value(
            name,
            value,
            unit=unit,
            sku=sku,
            world_size=world_size,
            nnodes=nodes,
            labels=evidence.as_measured(name, labels),
            limits=limits,
        )
        code, line = _told(judged, unit, None if judged.limit is None else evidence.support_of(judged.limit, limits))
        codes.add(code)
        print(printable(line))
        for label in evidence.unused(name, labels, limits, sku):
            complain(f"note: no limit for {name} on {sku} looks at the label {label}", DONE)
    return next((code for code in (MISSED, NOT_JUDGED) if code in codes), DONE)


def _told(judged: Judged, unit: str, support: Support | None) -> tuple[int, str]:
    from pytest_gpucluster.judge.evidence import told
    from pytest_gpucluster.judge.limits import demand

    value = judged.value or 0.0
    begin = f"{judged.metric} {units.show(value, unit)}"
    limit = judged.limit
    if limit is None:
        return NOT_JUDGED, f"NOT JUDGED  {begin}: {one_line(judged.reason, 300)}"
    margin = "" if judged.margin is None else f", margin {100 * judged.margin:+.1f} %"
    why = f": {one_line(judged.reason, 300)}" if judged.status == "error" else ""
    word = "PASSED" if judged.status == "passed" else "MISSED"
    return (
        DONE if judged.status == "passed" else MISSED,
        f"{word:<10}  {begin}: {demand(limit)}{margin}; {told(value, limit, support)} [{limit.origin}]{why}",
    )
