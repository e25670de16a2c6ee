"""Write docs/floors.md: every shipped floor with the published values, and the verdict on each of them.

python docs/floors.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pytest_gpucluster.judge import evidence, loader
from pytest_gpucluster.judge.evidence import CONTRACT, Row, Support
from pytest_gpucluster.judge.judge import judge_value
from pytest_gpucluster.judge.limits import EVERY_SKU, Limit, Thresholds
from pytest_gpucluster.metrics import measurement

PAGE = Path(__file__).with_name("floors.md")
REHEARSAL = "cpu-rehearsal"
MOST_LOSS = 0.15
"""What a required metric may lose unnoticed; where more may be lost, the page has the reason."""
RATES = ("TFLOPS", "TB/s", "GB/s", "%")
"""Units of the metrics of speed, that the page lists."""
FAMILIES = ("matmul.", "hbm.", "host_link.", "link.bandwidth", "nccl.", "training.mfu", "lora.mfu")

_HEAD = """\
# Floors and their evidence

Made by `python docs/floors.py` from `thresholds.yaml` and `pytest_gpucluster/judge/evidence.tsv`; do not edit it.

- **n, lowest, median, highest**: healthy, comparable values that are published for the SKU and that this floor would
  judge. An asterisk: all of them are the best of many shapes, which is more than the judged shape gives.
- **all lose**: what every GPU may lose and still pass, 1 - floor / median. **one loses**: what one GPU among others may
  lose, by `min_ratio_to_median`; where there is none, as for all.
- **remark**: why a floor lets more than {most:.0f} % pass, or lies where it does; see its source in `thresholds.yaml`.

A SKU that is `like` another has its floors, where it has none of its own: these rows stand once, under the first SKU,
unless something is published for the sister.

Where the limits only record every rate of a criterion, a run on that SKU is INCOMPLETE until a file of the site has a
limit (`gpucluster thresholds calibrate` proposes one); the first table lists them.
"""


def status(row: Row, limits: Thresholds) -> str:
    """Return the status of a published value."""
    judged = judge_value(
        row.metric,
        row.value,
        unit=measurement.known(row.metric).unit,
        sku=row.sku,
        world_size=row.world_size,
        nnodes=row.nodes,
        labels=evidence.as_measured(row.metric, row.labels),
        limits=limits,
    )
    if judged.limit is None:
        return "not judged"
    return "pass" if judged.status == "passed" else "fail"


def page(limits: Thresholds) -> str:
    """Return the page as Markdown."""
    parts = [
        _HEAD.format(most=100 * MOST_LOSS),
        *("\n".join(lines) for lines in (_without_floor(limits), _matrix(limits), _floors(limits))),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def _without_floor(limits: Thresholds) -> Iterator[str]:
    """Yield the rates that have no floor although a criterion asks for one: one row for the SKUs of one reason."""
    skus: dict[tuple[str, str, str], list[str]] = {}
    for limit in limits.limits:
        if (
            limit.record_only is None
            or limit.sku in (EVERY_SKU, REHEARSAL)
            or not measurement.known(limit.metric).is_rate
        ):
            continue
        below = any(part.high_open for part in limit.when if part.key == "size")
        alone = any(part.key == "world_size" and part.high == 1 for part in limit.when)
        if not (below or alone or limit.metric == "matmul.fp8.tflops"):  # recorded next to a judged value; not run
            skus.setdefault((limit.metric, limit.conditions(), limit.record_only), []).append(limit.sku)
    yield "## Rates without a floor\n"
    yield "Of `matmul.fp8.tflops` there is none either on a GPU without fp8 units, where no criterion measures it.\n"
    yield "| metric | where | SKUs | why |"
    yield "| --- | --- | --- | --- |"
    for (metric, where, why), names in skus.items():
        yield f"| `{metric}` | {where} | {', '.join(names)} | {why} |"
    yield ""


def _matrix(limits: Thresholds) -> Iterator[str]:
    found = Counter((row.kind, row.comparable, status(row, limits)) for row in evidence.published())
    yield "## All published values through the judge\n"
    yield "Not judged: a message below 1 GB, tokens/s of another model, a SKU without limits.\n"
    yield "| published as | rows | pass | fail | not judged |"
    yield "| --- | --- | --- | --- | --- |"
    for kind, comparable, name in (
        ("healthy", True, "healthy, comparable"),
        ("faulty", True, "faulty, comparable"),
        ("healthy", False, "healthy, not comparable (another power limit, both ways added, and the like)"),
        ("floor", True, "floor of another tool"),
        ("expected", True, "expected by a vendor or maintainer"),
    ):
        counts = [found[kind, comparable, says] for says in ("pass", "fail", "not judged")]
        yield f"| {name} | {sum(counts)} | {counts[0]} | {counts[1]} | {counts[2]} |"
    yield ""


def _floors(limits: Thresholds) -> Iterator[str]:
    supports = evidence.supports(limits)
    shown: set[str] = set()
    for sku in limits.skus:
        rows = []
        for limit in limits.limits:
            if limit.sku != sku or limit.sku in (EVERY_SKU, REHEARSAL) or not limit.metric.startswith(FAMILIES):
                continue
            support = supports.get((sku, limit.metric, limit.origin))
            if limit.min is None or limit.unit not in RATES or (support is None and limit.origin in shown):
                continue
            shown.add(limit.origin)
            rows.append(_row(limit, support))
        if rows:
            yield f"## {sku}\n"
            yield (
                "| metric | where | floor | n | lowest | median | highest | faulty, highest | all lose | one loses"
                " | remark |"
            )
            yield f"|{' --- |' * 11}"
            yield from rows
            yield ""


def _row(limit: Limit, support: Support | None) -> str:
    healthy = support.healthy if support is not None else ()
    faulty = support.faulty if support is not None else ()
    loss = support.uniform_loss(limit) if support is not None else None
    one = evidence.single_loss(limit)
    star = "*" if support is not None and support.best_only else ""
    cells = [
        f"`{limit.metric}`",
        limit.conditions(),
        f"{limit.min:.6g} {limit.unit}",
        f"{len(healthy)}{star}",
        *(f"{value:.6g}" if healthy else "-" for value in (_ends(healthy))),
        f"{faulty[-1]:.6g}" if faulty else "-",
        "not known" if loss is None else f"{100 * loss:.0f} %",
        "as all" if one is None else f"{100 * one:.0f} %",
        _remark(limit, support, loss),
    ]
    return f"| {' | '.join(cells)} |"


def _ends(healthy: tuple[float, ...]) -> tuple[float, float, float]:
    if not healthy:
        return 0.0, 0.0, 0.0
    return healthy[0], Support(healthy=healthy, faulty=()).typical or 0.0, healthy[-1]


def _remark(limit: Limit, support: Support | None, loss: float | None) -> str:
    source = limit.source.partition("; ratio: ")[0]
    if CONTRACT in source and not source.startswith("published"):
        return "contract"
    if source.startswith("derived"):
        return source
    return "the published values lie apart: " + source if loss is not None and loss > MOST_LOSS else ""


if __name__ == "__main__":
    PAGE.write_text(page(loader.load(loader.shipped_path())), encoding="utf-8")
