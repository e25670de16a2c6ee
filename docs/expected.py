"""Write docs/limits.md: the limits of each criterion, from thresholds.yaml and the data sheets.

python docs/expected.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase

from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.limits import EVERY_SKU, Limit, Thresholds, peak_of
from pytest_gpucluster.metrics import units
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.measurement import METRICS

PAGE = Path(__file__).with_name("limits.md")
REHEARSAL = "cpu-rehearsal"

_HEAD = """\
# Limits by criterion

Made by `python docs/expected.py` from `thresholds.yaml` and the data sheets; do not edit it. How to read it is in
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


def page(limits: Thresholds) -> str:
    """Return the whole page as Markdown: a section for each criterion."""
    sections = (f"## `{criterion}`\n\n{figures(criterion, limits)}" for criterion in CRITERIA)
    return "\n".join([_HEAD, *sections]).rstrip("\n") + "\n"


def _entries(criterion: str, limits: Thresholds) -> Iterator[tuple[Metric, list[Limit]]]:
    for metric in metrics_of(criterion):
        yield metric, [one for one in limits.limits if one.metric == metric.name and one.sku != REHEARSAL]


def _by_sku(criterion: str, limits: Thresholds) -> Iterator[str]:
    """The limits by SKU: a row for each condition, a column for each SKU."""
    skus = [name for name in limits.skus if name != REHEARSAL]
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


if __name__ == "__main__":
    PAGE.write_text(page(loader.load(loader.shipped_path())), encoding="utf-8")
