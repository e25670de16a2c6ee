"""``gpucluster thresholds``: limits checked, explained, proposed from accepted runs; other values judged by them."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster import __version__
from pytest_gpucluster.analysis.calibration import (
    NoFloor,
    Proposal,
    Series,
    Source,
    conditions_of,
    name_of,
    overlay,
    propose,
    series,
    source_problems,
)
from pytest_gpucluster.analysis.certificate import journal_digest
from pytest_gpucluster.cli.command import (
    DONE,
    JOURNAL_HELP,
    NEGATIVE,
    NO_INPUT,
    NO_OUTPUT,
    USAGE,
    Command,
    CommandError,
    Group,
    add_option,
    add_thresholds,
    complain,
    exit_codes,
    file_errors,
    key_value,
    load_limits,
    number,
    require_new_file,
    require_other_file,
    write_text,
)
from pytest_gpucluster.cli.thresholds_explain import explain_sku, judge_values
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.journal.journal import locate
from pytest_gpucluster.judge.limits import peak_of
from pytest_gpucluster.metrics import datasheets, measurement
from pytest_gpucluster.text import plural, printable

if TYPE_CHECKING:
    pass


def declare_metrics(plugin: str) -> str:
    """Register the metrics that a site's plugin or conftest.py declares; return the problem, or an empty text.

    Args:
        plugin: a Python file, or the name of a module.
    """
    try:
        if plugin.endswith(".py"):
            spec = importlib.util.spec_from_file_location("gpucluster_site", plugin)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(plugin)
        for metric in module.pytest_gpucluster_metrics():
            measurement.register(metric)
    except Exception as error:  # the site's own code may raise anything
        return f"--plugin {plugin}: {type(error).__name__}: {error}"
    return ""


def _check(options: argparse.Namespace) -> int:
    """Find all problems in files of limits, each with file, line and column.

    The files override the shipped one and each other in their order, as --gpucluster-thresholds does with one; without
    a file the shipped one is checked. A floor of yours that GPUs published as healthy miss, or nearly, is noted; in the
    shipped file it is a problem.
    """
    from pytest_gpucluster.judge import evidence, loader
    from pytest_gpucluster.judge.limits import EVERY_SKU

    for plugin in options.plugin:
        problem = declare_metrics(plugin)
        if problem:
            raise CommandError(NO_INPUT, problem)
    files: Sequence[Path] = options.files
    for path in files:
        with file_errors(NO_INPUT, f"{path}: cannot be read"):
            path.read_bytes()
    shipped = loader.shipped_path()
    others = [path for path in files if os.path.realpath(path) != os.path.realpath(shipped)]
    try:
        found = loader.load(shipped, *others)
    except ThresholdsError as error:
        problems = str(error).splitlines()
        print("\n".join(map(printable, problems)))
        return _count_problems(len(problems))
    near = evidence.too_high(found)
    for line in near:
        print(printable(line.replace(": ", ": note: ", 1) if others else line))
    if near and not others:
        return _count_problems(len(near))
    own = [limit for limit in found.limits if limit.layer > 0] if others else list(found.limits)
    skus = {limit.sku for limit in own} - {EVERY_SKU}
    counted = "1 entry" if len(own) == 1 else f"{len(own)} entries"
    named = plural(len(skus), "SKU") if skus else ""
    every = EVERY_SKU if any(limit.sku == EVERY_SKU for limit in own) else ""
    print(f"no problem: {counted} for {' and '.join(filter(None, (named, every))) or 'no SKU'}")
    return DONE


def _count_problems(count: int) -> int:
    print(plural(count, "problem"))
    return NEGATIVE


def _calibrate(options: argparse.Namespace) -> int:
    """Propose floors from the journals of one or more ACCEPTED runs of the same SKU and workload, as a file of limits
    for review: the median of all ranks' values less --spreads spreads, rounded down to 3 digits, never above the data
    sheet peak, and no looser than the limit in force. Floors are proposed for judged rates (TFLOPS, GB/s, tokens/s and
    the like); the source of each one states how it was derived.
    """
    from pytest_gpucluster.judge.loader import shipped_path

    spreads, out = options.spreads, options.out
    paths = [locate(path) for path in options.journals]
    require_other_file("--out", out, [*paths, shipped_path()], "a journal or the shipped limits")
    require_new_file("--out", out, force=options.force)
    sources = [_source(path) for path in paths]
    problems = source_problems(sources, sku=options.sku)
    if problems:
        raise CommandError(NO_INPUT, "\n".join(problems))
    sku = str(sources[0].sku)
    measured = series(sources)
    found = [_floor(one, sku, spreads=spreads) for one in measured if one.limits]
    proposals = [one for one in found if isinstance(one, Proposal)]
    kept = [one for one in found if not isinstance(one, Proposal)]
    if not proposals:
        complain("no floor can be proposed:", NEGATIVE)
        _print_kept(kept)
        return NEGATIVE
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    shipped = hashlib.sha256(shipped_path().read_bytes()).hexdigest()
    text = overlay(
        sku,
        proposals,
        kept,
        sources,
        recorded=[one for one in measured if not one.limits],
        at=now,
        version=__version__,
        spreads=spreads,
        shipped=shipped,
    )
    _require_loadable(text)
    write_text(out, text)
    complain(f"{plural(len(proposals), 'floor')} proposed for {sku}, {len(kept)} left as they are: {out}", DONE)
    return DONE


def _source(path: Path) -> Source:
    sha256, journal = journal_digest(path)
    return Source(path=str(path), sha256=sha256, journal=journal)


def _floor(one: Series, sku: str, *, spreads: float) -> Proposal | NoFloor:
    metric = measurement.known(one.metric)
    facts = {**one.topology, **one.labels}
    # As the judge does: across nodes the rate is the fabric's, which no link within a node bounds.
    has_peak = metric.peak not in datasheets.LINK_PEAKS or facts.get("nnodes") == "1"
    try:
        conditions_of(one)
    except ThresholdsError as error:
        return NoFloor(series=one, why=str(error))
    return propose(one, spreads=spreads, peak=peak_of(metric, datasheets.SKUS.get(sku)) if has_peak else None)


def _require_loadable(text: str) -> None:
    """Read the file as a run would, before it is written.

    Raises:
        ThresholdsError: it is malformed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "proposed.yaml")
        path.write_text(text, encoding="utf-8")
        load_limits([path])


def _print_kept(kept: Sequence[NoFloor]) -> None:
    for one in kept:
        print(f"- {name_of(one.series)}: {printable(one.why)}", file=sys.stderr)
    if not kept:
        print("- no rate was judged in these runs", file=sys.stderr)


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", type=Path, nargs="*", help="default: the shipped limits")
    add_option(parser, "--plugin FILE", "a conftest.py or a module that declares metrics of your own", action="append")


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "metrics", metavar="METRIC", nargs="*", help="default: all; matmul. selects all that begin with it"
    )
    add_option(parser, "--sku NAME", "the SKU, such as H100 SXM", required=True)
    add_option(parser, "--world-size N", "ranks of the run", type=number())
    add_option(parser, "--nnodes N", "nodes of the run", type=number())
    add_option(
        parser,
        "--label KEY=VALUE",
        "a label of the measurement, such as transport=NET/IB",
        type=key_value,
        action="append",
    )
    add_thresholds(parser)


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journals", metavar="JOURNAL", type=Path, nargs="+", help=JOURNAL_HELP)
    add_option(parser, "--out FILE", "write the file here; - for standard output", required=True)
    add_option(parser, "--spreads K", "spreads below the median", type=number(0.001, 99.999, of=float), default=3.0)
    add_option(parser, "--sku NAME", "the required SKU (default: that of the first journal)")
    add_option(parser, "--force", "replace an existing file")


def _judge_arguments(parser: argparse.ArgumentParser) -> None:
    what = 'such as matmul.fp32.tflops="51.5 TFLOPS"'
    parser.add_argument("values", metavar="METRIC=VALUE", type=key_value, nargs="+", help=what)
    add_option(parser, "--sku NAME", "the SKU, such as H100 SXM", required=True)
    add_option(parser, "--world-size N", "GPUs that took part", type=number(), default=1)
    add_option(parser, "--nodes M", "nodes of these GPUs", type=number(), default=1)
    add_option(parser, "--label KEY=VALUE", "how it was measured", type=key_value, action="append")
    add_thresholds(parser)


def _explain(options: argparse.Namespace) -> int:
    """Print the limits in force, each with its file, line and source.

    For a METRIC all entries are listed in the order of their precedence: the one that decides, and why the others do
    not. Conditions that are not named, such as a size, are left open.
    """
    known = {key: str(options.__dict__[key]) for key in ("world_size", "nnodes") if options.__dict__[key]}
    known |= dict(options.label)
    return explain_sku(options.sku, options.metrics, options.thresholds, known)


def _judge(options: argparse.Namespace) -> int:
    """Compare values that were measured elsewhere with the limits: a line for each, with its limit, margin, and
    published values of healthy GPUs.

    Labels are those of evidence.tsv: n, dtype, size, transport (NET/IB, EFA, TCPXO, TCPX, TCP, NVLink), within, nics,
    mode, model, best=1 (the best of many shapes, compared with the floor of the best size). Without a size it is 1 GB,
    the smallest that is judged; without a transport it is the one that the limit expects. A label that no limit uses is
    ignored with a note.
    """
    return judge_values(
        options.values,
        sku=options.sku,
        world_size=options.world_size,
        nodes=options.nodes,
        labels=dict(options.label),
        files=options.thresholds,
    )


_EXAMPLES = """\
    gpucluster thresholds check my-limits.yaml
    gpucluster thresholds explain --sku "H100 SXM" --world-size 16 --nnodes 2 nccl.all_reduce.busbw --label size="1 GB"
    gpucluster thresholds calibrate run-1/ run-2/ --out my-limits.yaml
    gpucluster thresholds judge --sku "H100 SXM" matmul.fp32.tflops="51.5 TFLOPS"
    gpucluster thresholds judge --sku H200 --world-size 16 --nodes 2 --label size="8 GiB" --label transport=NET/IB \\
        nccl.all_reduce.busbw="470 GB/s"
    """
_EXIT_CODES = exit_codes(
    {
        DONE: "no problem in the files; explained; floors are written; every value meets its limit",
        NEGATIVE: "check: the files have problems. explain: no limit decides about a metric that was named. calibrate: "
        "no floor can be proposed. judge: a limit is missed",
        NO_INPUT: "a journal, plugin or file of limits is missing, damaged, unusable or of a newer version",
        NO_OUTPUT: "the output cannot be written",
        10: "judge: no limit judges a value, and none is missed",
    },
    common=(USAGE,),
)

COMMAND = Group(
    description="Check files of limits, explain which limit decides, and propose floors from accepted runs.",
    commands={
        name: Command(run=run, help=help, arguments=arguments, examples=_EXAMPLES, codes=_EXIT_CODES)
        for name, run, help, arguments in (
            ("check", _check, "find all problems in files of limits", _check_arguments),
            ("explain", _explain, "explain which limit decides, and why", _explain_arguments),
            ("calibrate", _calibrate, "propose floors from accepted runs", _calibrate_arguments),
            ("judge", _judge, "compare values that were measured elsewhere with the limits", _judge_arguments),
        )
    },
)
