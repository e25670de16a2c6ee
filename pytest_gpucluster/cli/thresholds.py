"""``gpucluster thresholds``: limits checked, explained, proposed from accepted runs; other values judged by them."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import runpy
import sys
from collections.abc import Container, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpucluster import __version__
from pytest_gpucluster.analysis import calibration
from pytest_gpucluster.analysis.certificate import journal_digest
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.errors import MeasurementError, OptionError, ThresholdsError
from pytest_gpucluster.journal.journal import locate
from pytest_gpucluster.judge import evidence
from pytest_gpucluster.judge.evidence import Support
from pytest_gpucluster.judge.judge import judge_value
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.judge.limits import Limit, Thresholds, demand, explain, peak_of
from pytest_gpucluster.metrics import datasheets, measurement, units
from pytest_gpucluster.metrics.units import did_you_mean
from pytest_gpucluster.text import one_line, plural, printable

_EXAMPLES = """\
    gpucluster thresholds check my-limits.yaml
    gpucluster thresholds explain --sku "H100 SXM" --world-size 16 --nnodes 2 nccl.all_reduce.busbw --label size="1 GB"
    gpucluster thresholds explain --sku "H100 SXM" hbm.copy.bandwidth --thresholds my-limits.yaml
    gpucluster thresholds calibrate run-1/ run-2/ --out my-limits.yaml
    gpucluster thresholds judge --sku "H100 SXM" matmul.fp32.tflops="51.5 TFLOPS"
    gpucluster thresholds judge --sku H200 --world-size 16 --nodes 2 --label size="8 GiB" --label transport=NET/IB \\
        nccl.all_reduce.busbw="470 GB/s"
    """
_EXIT_CODES = {
    cli.DONE: "no problem in the files; explained; floors are written; every value meets its limit",
    cli.NEGATIVE: "check: the files have problems. explain: no limit decides about a metric that was named. calibrate: "
    "no floor can be proposed. judge: a limit is missed",
    cli.NO_INPUT: "a journal, plugin or file of limits is missing, damaged, unusable or of a newer version",
    10: "judge: no limit judges a value, and none is missed",
}


def _declare_metrics(plugin: str) -> None:
    """Register the metrics that a site declares in a Python file or a module."""
    try:
        is_file = plugin.endswith(".py")
        declared = runpy.run_path(plugin) if is_file else vars(importlib.import_module(plugin))
        for metric in declared["pytest_gpucluster_metrics"]():
            measurement.register(metric)
    except Exception as error:  # the site's own code may raise anything
        raise cli.CommandError(cli.NO_INPUT, f"--plugin {plugin}: {type(error).__name__}: {error}") from error


@cli.command(
    cli.argument("files", metavar="FILE", type=Path, nargs="*", help="default: the shipped limits"),
    cli.option("--plugin FILE", "a conftest.py or a module that declares metrics of your own", action="append"),
    help="find all problems in files of limits",
)
def _check(options: argparse.Namespace) -> int:
    """Find all problems in files of limits, each with file, line and column.

    The files override the shipped one and each other in their order, as --gpucluster-thresholds does with one; without
    a file the shipped one is checked. A floor of yours that GPUs published as healthy miss, or nearly, is noted; in the
    shipped file it is a problem.
    """
    from pytest_gpucluster.judge import loader

    for plugin in options.plugin:
        _declare_metrics(plugin)
    files: Sequence[Path] = options.files
    for path in files:
        with cli.file_errors(cli.NO_INPUT, f"{path}: cannot be read"):
            path.read_bytes()
    shipped = loader.shipped_path()
    others = [path for path in files if os.path.realpath(path) != os.path.realpath(shipped)]
    try:
        found = loader.load(shipped, *others)
    except ThresholdsError as error:
        problems = str(error).splitlines()
        print("\n".join(map(printable, problems)))
        print(plural(len(problems), "problem"))
        return cli.NEGATIVE
    near = evidence.too_high(found)
    for line in near:
        print(printable(line.replace(": ", ": note: ", 1) if others else line))
    if near and not others:
        print(plural(len(near), "problem"))
        return cli.NEGATIVE
    own = [limit for limit in found.limits if limit.layer > 0 or not others]
    print(f"no problem: {plural(len(own), 'limit')}")
    return cli.DONE


@cli.command(
    cli.argument("journals", cli.JOURNAL_HELP, metavar="JOURNAL", type=Path, nargs="+"),
    cli.option("--out FILE", "write the file here; - for standard output", required=True),
    cli.option("--spreads K", "spreads below the median", type=cli.number(0.001, 99.999, of=float), default=3.0),
    cli.option("--force", "replace an existing file"),
    help="propose floors from accepted runs",
)
def _calibrate(options: argparse.Namespace) -> int:
    """Propose floors from the journals of one or more ACCEPTED runs of the same SKU and workload, as a file of limits
    for review: the median of all ranks' values less --spreads spreads, rounded down to 3 digits, never above the data
    sheet peak, and no looser than the limit in force. Floors are proposed for judged rates (TFLOPS, GB/s, tokens/s and
    the like); the source of each one states how it was derived.
    """
    from pytest_gpucluster.judge.loader import shipped_path

    out = options.out
    paths = [locate(path) for path in options.journals]
    cli.require_distinct([("--out", out)], [*paths, shipped_path()], "a journal or the shipped limits")
    cli.require_new_file(out, force=options.force)
    sources = [calibration.Source(str(path), *journal_digest(path)) for path in paths]
    problems = calibration.source_problems(sources)
    if problems:
        raise cli.CommandError(cli.NO_INPUT, "\n".join(problems))
    sku = str(sources[0].journal.sku)
    measured = calibration.series(sources)
    proposals, kept = list[calibration.Proposal](), list[tuple[calibration.Series, str]]()
    for one in measured:
        if one.limits:
            try:
                proposals.append(_floor(one, sku, spreads=options.spreads))
            except ThresholdsError as error:
                kept.append((one, str(error)))
    if not proposals:
        cli.complain("no floor can be proposed:", cli.NEGATIVE)
        lines = [f"{calibration.name_of(one)}: {printable(why)}" for one, why in kept]
        print(*(f"- {line}" for line in lines or ["no rate was judged in these runs"]), sep="\n", file=sys.stderr)
        return cli.NEGATIVE
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    shipped = hashlib.sha256(shipped_path().read_bytes()).hexdigest()
    text = calibration.overlay(
        sku,
        proposals,
        kept,
        sources,
        recorded=[one for one in measured if not one.limits],
        at=now,
        version=__version__,
        shipped=shipped,
    )
    cli.write_text(out, text)
    cli.complain(f"{plural(len(proposals), 'floor')} proposed for {sku}, {len(kept)} left as they are: {out}", cli.DONE)
    return cli.DONE


def _floor(one: calibration.Series, sku: str, *, spreads: float) -> calibration.Proposal:
    metric = measurement.known(one.metric)
    facts = {**one.topology, **one.labels}
    # As the judge does: across nodes the rate is the fabric's, which no link within a node bounds.
    has_peak = metric.peak not in datasheets.LINK_PEAKS or facts.get("nnodes") == "1"
    calibration.conditions_of(one)  # which must be able to express it
    peak = peak_of(metric, datasheets.SKUS.get(sku)) if has_peak else None
    return calibration.propose(one, spreads=spreads, peak=peak)


@cli.command(
    cli.argument("metrics", metavar="METRIC", nargs="*", help="default: all; matmul. selects all that begin with it"),
    cli.option("--sku NAME", "the SKU, such as H100 SXM", required=True),
    cli.option("--world-size N", "ranks of the run", type=cli.number()),
    cli.option("--nnodes N", "nodes of the run", type=cli.number()),
    cli.option("--label KEY=VALUE", "how it is measured, as transport=NET/IB", type=cli.key_value, action="append"),
    cli.THRESHOLDS,
    help="explain which limit decides, and why",
)
def _explain(options: argparse.Namespace) -> int:
    """Print the limits in force, each with its file, line and source.

    For a METRIC all entries are listed in the order of their precedence: the one that decides, and why the others do
    not. Conditions that are not named, such as a size, are left open.
    """
    known = {key: str(options.__dict__[key]) for key in ("world_size", "nnodes") if options.__dict__[key]}
    known |= dict(options.label)
    limits = cli.load_limits(options.thresholds)
    _require_sku(options.sku, limits, limits.skus)
    conditions = ", ".join(f"{key} {value}" for key, value in known.items())
    cli.print_paragraph(f"{options.sku}: {conditions or 'of any topology'}")
    decided = [
        _explain_metric(limits, metric, sku=options.sku, known=known, with_others=bool(options.metrics))
        for metric in _select_metrics(options.metrics, limits.metrics)
    ]
    return cli.NEGATIVE if options.metrics and not all(decided) else cli.DONE


def _explain_metric(limits: Thresholds, metric: str, *, sku: str, known: Mapping[str, str], with_others: bool) -> bool:
    """Print the entries for a metric; return whether one decides, at least for some conditions."""
    entries = explain(limits, metric, sku=sku, known=known)
    deciding = [entry for entry in entries if entry.effect.startswith("decides")]
    if not with_others and not deciding:
        return False
    cli.print_paragraph(metric)
    if not entries:
        cli.print_paragraph("no entry: a measured value without one is an error, never a pass", "  ")
    for entry in entries if with_others else deciding:
        colon = ":" if entry.effect in ("does not apply", "is overruled") else ""
        says = f"{entry.effect}{colon} {entry.why}".rstrip()
        cli.print_paragraph(f"{entry.limit.origin} {says}: {demand(entry.limit, entry.limit.unit)}", "  ")
        if with_others:
            cli.print_paragraph(f"when {entry.limit.conditions()}", "    ")
        origin = f"source: {entry.limit.source}" if entry.limit.source else f"reason: {entry.limit.record_only}"
        cli.print_paragraph(origin, "    ")
        support = evidence.support_of(entry.limit, limits)
        if support is not None and entry.limit.record_only is None:
            cli.print_paragraph(f"published: {_published_text(entry.limit, support)}", "    ")
    if entries and not deciding:
        cli.print_paragraph("none of them applies: such a value is an error, never a pass", "  ")
    return bool(deciding)


def _published_text(limit: Limit, support: Support) -> str:
    unit, parts = limit.unit, []
    if support.healthy and support.typical is not None:
        ends = f"{units.show(support.healthy[0], unit)} to {units.show(support.healthy[-1], unit)}"
        best = ", the best of shapes" if support.best_only else ""
        parts.append(f"{len(support.healthy)} healthy, {ends}, median {units.show(support.typical, unit)}{best}")
    if support.faulty:
        parts.append(f"{len(support.faulty)} faulty, up to {units.show(support.faulty[-1], unit)}")
    loss = support.uniform_loss(limit)
    if loss is not None:
        parts.append(f"a uniform loss of {100 * loss:.0f} % passes")
    return "; ".join(parts)


def _require_sku(sku: str, limits: Thresholds, known: Container[str]) -> None:
    if sku not in known:
        names = ", ".join(limits.skus)
        raise OptionError(f"--sku {sku}: no such SKU; known are {names}{did_you_mean(sku, limits.skus)}")


def _select_metrics(asked: Sequence[str], known_names: Sequence[str]) -> list[str]:
    """Return the selected metrics, in the order of the files."""
    if not asked:
        return list(dict.fromkeys(known_names))
    found: list[str] = []
    for name in asked:
        begin = [each for each in known_names if each == name or (name.endswith(".") and each.startswith(name))]
        try:
            found += begin or [measurement.known(name).name]
        except MeasurementError as error:
            raise cli.CommandError(cli.USAGE, one_line(str(error), 300)) from error
    return list(dict.fromkeys(found))


NOT_JUDGED = 10


@cli.command(
    cli.argument(
        "values", metavar="METRIC=VALUE", type=cli.key_value, nargs="+", help='such as matmul.fp32.tflops="51.5 TFLOPS"'
    ),
    cli.option("--sku NAME", "the SKU, such as H100 SXM", required=True),
    cli.option("--world-size N", "GPUs that took part", type=cli.number(), default=1),
    cli.option("--nodes M", "nodes of these GPUs", type=cli.number(), default=1),
    cli.option("--label KEY=VALUE", "how it was measured", type=cli.key_value, action="append"),
    cli.THRESHOLDS,
    help="compare values that were measured elsewhere with the limits",
)
def _judge(options: argparse.Namespace) -> int:
    """Compare values that were measured elsewhere with the limits: a line for each, with its limit, margin, and
    published values of healthy GPUs.

    Labels are those of evidence.tsv: n, dtype, size, transport (NET/IB, EFA, TCPXO, TCPX, TCP, NVLink), within, nics,
    mode, model, best=1 (the best of many shapes, compared with the floor of the best size). Without a size it is 1 GB,
    the smallest that is judged; without a transport it is the one that the limit expects. A label that no limit uses is
    ignored with a note.
    """
    sku, labels, limits = options.sku, dict(options.label), cli.load_limits(options.thresholds)
    _require_sku(sku, limits, {*limits.skus, *(row.sku for row in evidence.published())})
    if options.world_size < options.nodes:
        raise cli.CommandError(cli.USAGE, f"{options.world_size} GPUs on {options.nodes} nodes: fewer GPUs than nodes")
    values = [(name, *_read_value(name, text)) for name, text in options.values]
    codes = set()
    for name, value, unit in values:
        judged = judge_value(
            name,
            value,
            unit=unit,
            sku=sku,
            world_size=options.world_size,
            nnodes=options.nodes,
            labels=evidence.as_measured(name, labels),
            limits=limits,
        )
        code, line = _judged_line(judged, unit)
        codes.add(code)
        print(printable(line))
        for label in evidence.unused(name, labels, limits, sku):
            cli.complain(f"note: no limit for {name} on {sku} uses the label {label}", cli.DONE)
    # A missed limit wins over a value that nothing judges.
    return next((code for code in (cli.NEGATIVE, NOT_JUDGED) if code in codes), cli.DONE)


def _read_value(name: str, text: str) -> tuple[float, str]:
    try:
        unit = measurement.known(name).unit
        value = units.parse(text, like=unit or None).to(unit)
        if not value > 0:
            raise MeasurementError(f"{text} is not above zero")
    except MeasurementError as error:
        raise cli.CommandError(cli.USAGE, f"{name}={text}: {one_line(str(error), 300)}") from error
    return value, unit


def _judged_line(judged: JudgedMetric, unit: str) -> tuple[int, str]:
    begin = f"{judged.metric} {units.show(judged.value or 0.0, unit)}"
    limit = judged.limit
    if limit is None:
        return NOT_JUDGED, f"NOT JUDGED  {begin}: {one_line(judged.reason, 300)}"
    margin = "" if judged.margin is None else f", margin {100 * judged.margin:+.1f} %"
    why = f": {one_line(judged.reason, 300)}" if judged.status == "error" else ""
    published = judged.evidence or "nothing comparable is published"
    word = "PASSED" if judged.status == "passed" else "MISSED"
    return (
        cli.DONE if judged.status == "passed" else cli.NEGATIVE,
        f"{word:<10}  {begin}: {demand(limit, unit)}{margin}; {published} [{limit.origin}]{why}",
    )


COMMAND = cli.Group(
    description="Check files of limits, explain which limit decides, and propose floors from accepted runs.",
    commands={"check": _check, "explain": _explain, "calibrate": _calibrate, "judge": _judge},
    examples=_EXAMPLES,
    codes=_EXIT_CODES,
)
