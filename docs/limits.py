"""Write docs/limits.md: the limits of each criterion; and docs/floors.md: the floors with what is published.

python docs/limits.py
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase

from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.judge import evidence, loader
from pytest_gpucluster.judge.evidence import CONTRACT, Row, Support
from pytest_gpucluster.judge.judge import judge_value
from pytest_gpucluster.judge.limits import EVERY_SKU, Limit, Thresholds, peak_of
from pytest_gpucluster.metrics import measurement, units
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.datasheets import CPU_REHEARSAL
from pytest_gpucluster.metrics.measurement import METRICS

FOLDER = Path(__file__).parent


def pages(limits: Thresholds) -> dict[Path, str]:
    """Return each page's file with its text."""
    return {FOLDER / "limits.md": limits_page(limits), FOLDER / "floors.md": floors_page(limits)}


_LIMITS_HEAD = """\
# Limits by criterion

Made by `python docs/limits.py` from `thresholds.yaml` and the data sheets; do not edit it. How to read it is in
[playbook.md](playbook.md#how-to-read-a-section), the evidence of each floor in [floors.md](floors.md). With a
file of your own another limit may decide: `gpucluster thresholds explain` shows which.
"""
_SIGNS = (("min", ">="), ("max", "<="))
_WIDTH = 118
_RATIO = re.compile(r";\s*ratio: (.*)", re.DOTALL)


def metrics_of(criterion: str) -> list[Metric]:
    """Return the metrics of a criterion, in the order of their declarations."""
    patterns = [re.escape(one).replace(r"\*", ".*") for one in CRITERIA[criterion].metrics]
    return [one for one in METRICS.values() if any(re.fullmatch(pattern, one.name) for pattern in patterns)]


def figures(criterion: str, limits: Thresholds) -> str:
    """Return the tables of a criterion as Markdown."""
    return "".join(
        f"{part}\n"
        for part in (*_by_sku(criterion, limits), *_everywhere(criterion, limits), *_recorded(criterion, limits))
    )


def limits_page(limits: Thresholds) -> str:
    """Return the whole page as Markdown: a section for each criterion."""
    sections = (f"## `{criterion}`\n\n{figures(criterion, limits)}" for criterion in CRITERIA)
    return "\n".join([_LIMITS_HEAD, *sections]).rstrip("\n") + "\n"


def _entries(criterion: str, limits: Thresholds) -> Iterator[tuple[Metric, list[Limit]]]:
    for metric in metrics_of(criterion):
        yield metric, [one for one in limits.limits if one.metric == metric.name and one.sku != CPU_REHEARSAL]


def _by_sku(criterion: str, limits: Thresholds) -> Iterator[str]:
    """The limits by SKU: a row for each condition, a column for each SKU."""
    skus = [name for name in limits.skus if name != CPU_REHEARSAL]
    letters = _Letters()
    rows, ratios = [], []
    for metric, entries in _entries(criterion, limits):
        own = [one for one in entries if one.sku != EVERY_SKU]
        for where in dict.fromkeys(one.conditions() for one in own):
            there = {one.sku: one for one in own if one.conditions() == where}
            if all(one.record_only is not None for one in there.values()):
                continue
            always = {one.sku: one for one in own if not one.when}
            cells = [
                _cell(there.get(sku) or always.get(sku), peak_of(metric, limits.skus[sku]), letters) for sku in skus
            ]
            rows.append([f"`{metric.name}`, {metric.unit}", where, *cells])
        ratios += [one for one in own if one.min_ratio_to_median is not None]
    if not rows:
        return
    yield from _table(["metric", "where", *skus], rows)
    yield from _ratios(ratios)
    yield from letters.legend()


def _cell(limit: Limit | None, peak: float | None, letters: _Letters) -> str:
    if limit is None:
        return "-"
    if limit.record_only is not None:
        return "recorded"
    bounds = [f"{sign} {getattr(limit, name):.6g}" for name, sign in _SIGNS if getattr(limit, name) is not None]
    if peak is not None:
        bounds[0] += f" of {peak:.6g}"
    if limit.expected is not None:
        bounds[0] += f", expected {limit.expected:.6g}"
    if limit.expect_transport is not None:
        bounds.append(f"over {' or '.join(limit.expect_transport)}")
    return f"{', '.join(bounds)} ({letters.of(_RATIO.sub('', limit.source))})"


def _ratios(limits: Sequence[Limit]) -> Iterator[str]:
    """The share of the others' median that each rank must reach."""
    ratios: dict[tuple[float, str], dict[str, list[str]]] = {}
    for one in limits:
        ratio = one.min_ratio_to_median
        found = _RATIO.search(one.source)
        if ratio is not None:
            source = found.group(1) if found else one.source
            ratios.setdefault((ratio, source), {}).setdefault(one.metric, []).append(one.sku)
    if not ratios:
        return
    usual = max(ratios, key=lambda key: sum(map(len, ratios[key].values())))
    text = f"In addition each rank must reach {100 * usual[0]:g} % of the median of the others ({usual[1]})"
    for (ratio, source), where in ratios.items():
        if (ratio, source) != usual:
            names = "; ".join(f"`{metric}` on {', '.join(dict.fromkeys(skus))}" for metric, skus in where.items())
            text += f"; {100 * ratio:g} % for {names} ({source})"
    yield from _paragraph(f"{text}.")


def _everywhere(criterion: str, limits: Thresholds) -> Iterator[str]:
    """The limits that apply to every SKU."""
    rows = []
    for metric, entries in _entries(criterion, limits):
        for one in entries:
            if one.sku == EVERY_SKU and one.record_only is None:
                demands = [
                    f"{sign} {units.show(getattr(one, name), one.unit)}".rstrip()
                    for name, sign in _SIGNS
                    if getattr(one, name) is not None
                ]
                if one.min_ratio_to_median is not None:
                    demands.append(f"{100 * one.min_ratio_to_median:g} % of the others' median")
                rows.append([f"`{metric.name}`", one.conditions(), ", ".join(demands), " ".join(one.source.split())])
    if rows:
        yield from _table(["metric, on every GPU", "where", "limit", "source"], rows)


def _recorded(criterion: str, limits: Thresholds) -> Iterator[str]:
    """The metrics that are recorded and never judged."""
    names = [
        f"`{metric.name}`"
        for metric, entries in _entries(criterion, limits)
        if all(one.record_only is not None for one in entries)
    ]
    if names:
        yield from _paragraph(f"Recorded, not judged: {', '.join(names)}.")


class _Letters:
    """A letter for each source, in the order in which they come."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def of(self, source: str) -> str:
        number = len(self._of)
        first = ascii_lowercase[number // 26 - 1] if number >= 26 else ""
        return self._of.setdefault(" ".join(source.split()), first + ascii_lowercase[number % 26])

    def legend(self) -> Iterator[str]:
        for source, letter in self._of.items():
            yield from _wrapped(f"- ({letter}) {source}", indent="  ")
        yield ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _paragraph(text: str) -> Iterator[str]:
    yield from _wrapped(text)
    yield ""


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


MOST_LOSS = 0.15
"""What a required metric may lose unnoticed; where more may be lost, the page has the reason."""
RATES = ("TFLOPS", "TB/s", "GB/s", "%")
"""Units of the metrics of speed, that the page lists."""
FAMILIES = ("matmul.", "hbm.", "host_link.", "link.bandwidth", "nccl.", "training.mfu", "lora.mfu")

_FLOORS_HEAD = """\
# Floors and their evidence

Made by `python docs/limits.py` from `thresholds.yaml` and `pytest_gpucluster/judge/evidence.tsv`; do not edit it.

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


def floors_page(limits: Thresholds) -> str:
    """Return the page as Markdown."""
    parts = [
        _FLOORS_HEAD.format(most=100 * MOST_LOSS),
        *("\n".join(lines) for lines in (_without_floor(limits), _matrix(limits), _floors(limits))),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def _without_floor(limits: Thresholds) -> Iterator[str]:
    """Yield the rates that have no floor although a criterion asks for one: one row for the SKUs of one reason."""
    skus: dict[tuple[str, str, str], list[str]] = {}
    for limit in limits.limits:
        if (
            limit.record_only is None
            or limit.sku in (EVERY_SKU, CPU_REHEARSAL)
            or not measurement.known(limit.metric).is_rate
        ):
            continue
        below = any(part.high_open for part in limit.when if part.key == "size")
        alone = any(part.key == "world_size" and part.high == 1 for part in limit.when)
        if not (below or alone or limit.metric == "matmul.fp8.tflops"):  # recorded next to a judged value; not run
            skus.setdefault((limit.metric, limit.conditions(), limit.record_only), []).append(limit.sku)
    yield "## Rates without a floor\n"
    yield "Of `matmul.fp8.tflops` there is none either on a GPU without fp8 units, where no criterion measures it.\n"
    rows = [[f"`{metric}`", where, ", ".join(names), why] for (metric, where, why), names in skus.items()]
    yield from _table(["metric", "where", "SKUs", "why"], rows)


def _matrix(limits: Thresholds) -> Iterator[str]:
    found = Counter((row.kind, row.comparable, status(row, limits)) for row in evidence.published())
    yield "## All published values through the judge\n"
    yield "Not judged: a message below 1 GB, tokens/s of another model, a SKU without limits.\n"
    rows = []
    for kind, comparable, name in (
        ("healthy", True, "healthy, comparable"),
        ("faulty", True, "faulty, comparable"),
        ("healthy", False, "healthy, not comparable (another power limit, both ways added, and the like)"),
        ("floor", True, "floor of another tool"),
        ("expected", True, "expected by a vendor or maintainer"),
    ):
        counts = [found[kind, comparable, says] for says in ("pass", "fail", "not judged")]
        rows.append([name, *map(str, (sum(counts), *counts))])
    yield from _table(["published as", "rows", "pass", "fail", "not judged"], rows)


def _floors(limits: Thresholds) -> Iterator[str]:
    supports = evidence.supports(limits)
    shown: set[str] = set()
    for sku in limits.skus:
        rows = []
        for limit in limits.limits:
            if limit.sku != sku or limit.sku in (EVERY_SKU, CPU_REHEARSAL) or not limit.metric.startswith(FAMILIES):
                continue
            support = supports.get((sku, limit.metric, limit.origin))
            if limit.min is None or limit.unit not in RATES or (support is None and limit.origin in shown):
                continue
            shown.add(limit.origin)
            rows.append(_floor_row(limit, support))
        if rows:
            yield f"## {sku}\n"
            yield from _table(_FLOOR_COLUMNS, rows)


_FLOOR_COLUMNS = (
    *("metric", "where", "floor", "n", "lowest", "median", "highest", "faulty, highest", "all lose", "one loses"),
    "remark",
)


def _floor_row(limit: Limit, support: Support | None) -> list[str]:
    healthy = support.healthy if support is not None else ()
    faulty = support.faulty if support is not None else ()
    loss = support.uniform_loss(limit) if support is not None else None
    one = evidence.single_loss(limit)
    star = "*" if support is not None and support.best_only else ""
    ends = (healthy[0], support.typical, healthy[-1]) if support is not None and healthy else ()
    return [
        f"`{limit.metric}`",
        limit.conditions(),
        f"{limit.min:.6g} {limit.unit}",
        f"{len(healthy)}{star}",
        *([f"{value:.6g}" for value in ends] or ["-"] * 3),
        f"{faulty[-1]:.6g}" if faulty else "-",
        "not known" if loss is None else f"{100 * loss:.0f} %",
        "as all" if one is None else f"{100 * one:.0f} %",
        _remark(limit, support, loss),
    ]


def _remark(limit: Limit, support: Support | None, loss: float | None) -> str:
    source = limit.source.partition("; ratio: ")[0]
    if CONTRACT in source and not source.startswith("published"):
        return "contract"
    if source.startswith("derived"):
        return source
    return "the published values lie apart: " + source if loss is not None and loss > MOST_LOSS else ""


if __name__ == "__main__":
    for path, text in pages(loader.load(loader.shipped_path())).items():
        path.write_text(text, encoding="utf-8")
