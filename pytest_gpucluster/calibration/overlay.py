"""Proposed floors as a file of limits that people can review, with what each is made of beside it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from pytest_gpucluster.calibration.evidence import Series, Source
from pytest_gpucluster.calibration.floor import DIGITS, LEAST_SPREAD, Kept, Proposal
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.judge.limits import KNOWN_LABELS, TOPOLOGY, condition
from pytest_gpucluster.metrics.units import show
from pytest_gpucluster.text import one_line, printable

_HEAD = """\
# Floors proposed by `gpucluster thresholds calibrate`, for review. Nothing is in force before this file is passed:
#     pytest acceptance/ --gpucluster-thresholds THIS_FILE
# Each entry takes the place of the one that was in force, and keeps what that demanded besides min. Where no entry here
# applies, the shipped limits stand.
#
"""
_PATH = 200
_FAR_BELOW = 0.05
"""Under this part of the peak a floor is taken for a wrong unit, unless it says that it is meant: ``thresholds``."""
_BELOW_NAMED = 3
_WIDTH = 100
"""Of a source's lines, which stand deep in the file."""


def overlay(
    sku: str,
    proposals: Sequence[Proposal],
    kept: Sequence[Kept],
    sources: Sequence[Source],
    *,
    recorded: Sequence[Series] = (),
    at: str,
    version: str,
    spreads: float,
    shipped: str,
) -> str:
    """Return the text of a YAML file that ``thresholds.load`` reads.

    Args:
        sku: for which the floors are.
        proposals: at least one, no two with the same conditions.
        kept: what has no floor, and why.
        sources: the journals, as they were given.
        recorded: what was recorded only, and stays so.
        at: when this is made, ISO 8601.
        version: of this package.
        spreads: how many below the median.
        shipped: the SHA-256 of the shipped limits: what else was in force is named, since a run takes one file.
    """
    lines = [_HEAD.rstrip("\n")]
    lines.append(f"# Made {_comment(at)} by pytest-gpucluster {version} of accepted runs of {_comment(sku)}:")
    for run, source in enumerate(sources, start=1):
        told = source.journal.run
        nodes = f"{told.nnodes} nodes, {told.world_size} ranks"
        lines.append(f"#   run {run}: {_comment(told.run_id)} of {_comment(told.started_at)}, {nodes}")
        lines.append(f"#     journal {_comment(source.path)}")
        lines.append(f"#     sha256 {source.sha256}")
    lines += [
        "#",
        f"# The rule: median of all values less {spreads:g} spreads, rounded down to {DIGITS} digits, never above the",
        "# data sheet peak, and no looser than the limit in force. A value is the low end of a rank's interval. The",
        "# spread is the largest of: how far ranks and runs are apart, how far samples are apart (both 1.4826 times",
        f"# their median absolute deviation), and {100 * LEAST_SPREAD:g} % of the median.",
        *_others_in_force(sources, shipped),
        "",
        "schema_version: 1",
        "skus:",
        f"  {_scalar(sku)}:",
        "    limits:",
    ]
    by_metric: dict[str, list[Proposal]] = {}
    for proposal in proposals:
        by_metric.setdefault(proposal.series.metric, []).append(proposal)
    for metric, of_metric in by_metric.items():
        lines.append(f"      {metric}:")
        for proposal in of_metric:
            lines += _entry(proposal, sources)
        for other in (*(one.series for one in kept), *recorded):
            if other.metric == metric and any(_holds_for(proposal, other) for proposal in of_metric):
                lines += _as_before(other)
    if kept:
        lines += ["", "# No floor is proposed for:"]
        lines += [f"#   {name_of(one.series)}: {_comment(one.why)}" for one in kept]
    return "\n".join(lines) + "\n"


def conditions_of(series: Series) -> dict[str, str]:
    """Return what a floor depends on: the topology and the labels of the measurement.

    Raises:
        ThresholdsError: a condition cannot say so, such as a label that reads as a range.
    """
    found = {**series.topology, **series.labels}
    for key, text in found.items():
        if not condition(key, text).holds(text) or text != printable(text).strip():
            raise ThresholdsError(f"no condition can say that {key} is {text!r}")
    return found


def _holds_for(proposal: Proposal, other: Series) -> bool:
    """Tell whether a floor would also decide about another series: one with more labels than it was made of."""
    facts = {**other.topology, **other.labels}
    return all(condition(key, text).holds(facts.get(key)) for key, text in conditions_of(proposal.series).items())


def name_of(series: Series) -> str:
    """Return the metric with its labels and its topology, on one line."""
    parts = [f"{key}={value}" for key, value in {**series.topology, **series.labels}.items()]
    return _comment(series.metric + (f" ({', '.join(parts)})" if parts else ""))


def others_in_force(sources: Sequence[Source], shipped: str) -> list[tuple[str, str]]:
    """Return path and digest of each file that judged these runs and is not the one that is shipped now."""
    found = [file for source in sources if source.journal.limits for file in source.journal.limits.files]
    return [file for file in dict.fromkeys(found) if file[1] != shipped]


def _others_in_force(sources: Sequence[Source], shipped: str) -> Iterator[str]:
    files = others_in_force(sources, shipped)
    if files:
        yield "#"
        yield "# These runs were judged by other limits than those that this version ships. A run takes one file beside"
        yield "# the shipped one: put into this one what is to stay in force of"
        yield from (f"#   {_comment(path)} (sha256 {digest})" for path, digest in files)


def _entry(proposal: Proposal, sources: Sequence[Source]) -> Iterator[str]:
    series = proposal.series
    unit, lowest = series.unit, proposal.lowest
    indent = " " * 8
    runs = len({number.run for number in series.numbers})
    figures = (
        f"median {show(proposal.median, unit)}, spread {show(proposal.spread, unit)}, lowest {show(lowest.value, unit)}"
        f" on {lowest.place} in run {lowest.run}"
    )
    yield f"{indent}# {len(series.numbers)} values of {_runs(runs)}: {_comment(figures)}"
    replaced = dict.fromkeys(
        f"{show(limit.min, unit)} ({limit.origin})" for limit in series.limits if limit.min is not None
    )
    if replaced:
        yield f"{indent}# in the place of {_comment(', '.join(replaced))}"
    if proposal.is_peak:
        yield f"{indent}# held down to the data sheet peak"
    if proposal.below:
        named = "; ".join(
            f"{show(number.value, unit)} on {number.place} in run {number.run}"
            for number in proposal.below[:_BELOW_NAMED]
        )
        more = f"; and {len(proposal.below) - _BELOW_NAMED} more" if len(proposal.below) > _BELOW_NAMED else ""
        yield f"{indent}# BELOW IT, though accepted, and to be looked at before this is used: {_comment(named + more)}"
    yield from _listed(_body(proposal, sources))


def _listed(body: Iterator[str]) -> Iterator[str]:
    """Yield the lines of an entry as one of a metric's list."""
    for number, line in enumerate(body):
        yield f"{' ' * 8}{'  ' if number else '- '}{line}"


def _as_before(series: Series) -> Iterator[str]:
    """Yield an entry that demands what was demanded: without it, a floor with fewer conditions would decide."""
    yield f"{' ' * 8}# as it was: without this entry one of those above would decide"
    yield from _listed(_body_as_before(series))


def _body_as_before(series: Series) -> Iterator[str]:
    yield f"when: {_flow(conditions_of(series))}"
    limits = [limit for limit in series.limits if limit.origin]
    if not limits:
        yield f"record_only: {_quoted('as it was in the runs that the floors are made of')}"
        return
    least = max((limit.min for limit in limits if limit.min is not None), default=None)
    if least is not None:
        yield f"min: {least!r} {series.unit}".replace(".0 ", " ")
    yield from _besides_min(series)
    yield from _expected(series, least)
    yield from _source("; ".join(dict.fromkeys(f"as {limit.origin}: {limit.source}" for limit in limits)))


def _besides_min(series: Series) -> Iterator[str]:
    """Yield what else the runs were held against."""
    most = min((limit.max for limit in series.limits if limit.max is not None), default=None)
    if most is not None:
        yield f"max: {most!r} {series.unit}"
    ratio = max((one.min_ratio_to_median for one in series.limits if one.min_ratio_to_median is not None), default=None)
    if ratio is not None:
        yield f"min_ratio_to_median: {100 * ratio:.12g} %"
    transports = next((one.expect_transport for one in series.limits if one.expect_transport is not None), None)
    if transports is not None:
        yield f"expect_transport: [{', '.join(map(_quoted, transports))}]"


def _expected(series: Series, least: float | None) -> Iterator[str]:
    """Yield what was expected and not demanded, where it still lies above the floor."""
    expected = next((one.expected for one in series.limits if one.expected is not None), None)
    if expected is not None and (least is None or expected >= least):
        yield f"expected: {expected!r} {series.unit}".replace(".0 ", " ")


def _source(text: str) -> Iterator[str]:
    yield "source: >-"
    yield from (f"  {line}" for line in textwrap.wrap(printable(text), _WIDTH, break_on_hyphens=False))


def _body(proposal: Proposal, sources: Sequence[Source]) -> Iterator[str]:
    series = proposal.series
    when = conditions_of(series)
    if when:
        yield f"when: {_flow(when)}"
    yield f"min: {proposal.floor!r} {series.unit}".replace(".0 ", " ")
    besides = list(_besides_min(series))
    yield from besides
    yield from _expected(series, proposal.floor)
    runs = sorted({number.run for number in series.numbers})
    named = ", ".join(
        f"{sources[run - 1].journal.run.run_id} of {sources[run - 1].journal.run.started_at[:10]}"
        f" (sha256 {sources[run - 1].sha256[:12]})"
        for run in runs[:4]
    ) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    source = (
        f"calibrated: median {show(proposal.median, series.unit)} less {proposal.spreads:g} spreads of"
        f" {show(proposal.spread, series.unit)}, {len(series.numbers)} values of {_runs(len(runs))}: {named}"
    )
    before = next((limit for limit in series.limits if limit.origin), None)
    if before is not None and besides:
        source += f"; besides min as {before.origin}: {before.source}"
    yield from _source(source)
    if proposal.peak is not None and proposal.floor < _FAR_BELOW * proposal.peak:
        yield f"despite_peak: {_quoted('measured, as the source says')}"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _flow(when: Mapping[str, str]) -> str:
    direct = {key: text for key, text in when.items() if key in TOPOLOGY or key in KNOWN_LABELS}
    labels = {key: text for key, text in when.items() if key not in direct}
    parts = [f"{key}: {_value(text)}" for key, text in direct.items()]
    if labels:
        parts.append("labels: {" + ", ".join(f"{_scalar(key)}: {_value(text)}" for key, text in labels.items()) + "}")
    return "{" + ", ".join(parts) + "}"


def _value(text: str) -> str:
    return text if text.isdecimal() and text.isascii() else _quoted(text)


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*(?: [A-Za-z0-9_]+)*", text) else _quoted(text)


def _quoted(text: str) -> str:
    """Return a YAML scalar in single quotes, in which only they are doubled. Source: YAML 1.2.2, 7.3.2."""
    return "'" + printable(text).replace("'", "''") + "'"


def _comment(text: str) -> str:
    return printable(one_line(text, _PATH))
