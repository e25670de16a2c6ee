"""``gpucluster thresholds``: limits checked, explained, and proposed from accepted runs; other values judged by them.

``check`` is in this module: all problems in files of limits, with file, line and column.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_gpucluster.cli.command import (
    DONE,
    JOURNAL_HELP,
    NEGATIVE,
    NO_INPUT,
    NO_OUTPUT,
    USAGE,
    CommandError,
    Step,
    add_option,
    add_steps,
    add_thresholds,
    exit_codes,
    explain,
    key_value,
    number,
    run_step,
    whole_number,
)
from pytest_gpucluster.cli.thresholds_calibrate import calibrate
from pytest_gpucluster.cli.thresholds_explain import WRONG_USAGE, explain_journal, explain_sku, judge_values
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.text import printable

if TYPE_CHECKING:
    from pytest_gpucluster.judge.limits import Limit, Thresholds


def declare_metrics(plugin: str) -> str:
    """Register the metrics that a site's plugin or conftest.py declares; return the problem, or an empty text.

    Args:
        plugin: a Python file, or the name of a module.
    """
    from pytest_gpucluster.metrics import measurement

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
    from pytest_gpucluster.judge import evidence, loader
    from pytest_gpucluster.judge.limits import EVERY_SKU, looser

    for plugin in options.plugin:
        problem = declare_metrics(plugin)
        if problem:
            raise CommandError(NO_INPUT, problem)
    files: Sequence[Path] = options.files
    for path in files:
        try:
            path.read_bytes()
        except OSError as error:
            raise CommandError(NO_INPUT, f"{path}: cannot be read: {error.strerror or error}") from error
    shipped = loader.shipped_path()
    others = [path for path in files if os.path.realpath(path) != os.path.realpath(shipped)]
    try:
        layers = [loader.load(shipped, *others[:count]) for count in range(len(others) + 1)]
    except ThresholdsError:
        return _print_problems(shipped, others)
    for before, after in itertools.pairwise(layers):
        for new, old in _replaced(after, before):
            less = looser(new, old)
            if less:
                print(printable(f"{new.origin}: note: {new.metric} demands less than {old.origin}: {less}"))
    found = layers[-1]
    near = evidence.too_high(found)
    for line in near:
        print(printable(line.replace(": ", ": note: ", 1) if others else line))
    if near and not others:
        return _count_problems(len(near))
    own = [limit for limit in found.limits if limit.layer > 0] if others else list(found.limits)
    skus = {limit.sku for limit in own} - {EVERY_SKU}
    counted = "1 entry" if len(own) == 1 else f"{len(own)} entries"
    named = f"{len(skus)} {'SKU' if len(skus) == 1 else 'SKUs'}" if skus else ""
    every = EVERY_SKU if any(limit.sku == EVERY_SKU for limit in own) else ""
    print(f"no problem: {counted} for {' and '.join(filter(None, (named, every))) or 'no SKU'}")
    return DONE


def _print_problems(shipped: Path, others: Sequence[Path]) -> int:
    """Print the problems of all files: each is read, also after one with problems."""
    from pytest_gpucluster.judge import loader

    problems: list[str] = []
    try:
        loader.load(shipped, *others)
    except ThresholdsError as error:
        problems = str(error).splitlines()
    for line in problems:
        print(printable(line))
    return _count_problems(len(problems))


def _count_problems(count: int) -> int:
    print(f"{count} {'problem' if count == 1 else 'problems'}")
    return NEGATIVE


def _replaced(after: Thresholds, before: Thresholds) -> Iterator[tuple[Limit, Limit]]:
    """Yield each entry of the last file with those that it replaces: with the same conditions, or more."""

    def conditions(limit: Limit) -> frozenset[tuple[str, str]]:
        return frozenset((part.key, part.text) for part in limit.when)

    by_name: dict[tuple[str, str], list[Limit]] = {}
    for old in before.limits:
        by_name.setdefault((old.sku, old.metric), []).append(old)
    known = {old.origin for old in before.limits}
    for limit in after.limits:
        if limit.origin not in known:
            for old in by_name.get((limit.sku, limit.metric), []):
                if conditions(limit) <= conditions(old):
                    yield limit, old


EXIT_CODES = exit_codes(
    {
        DONE: "no problem in the files; explained; floors are written; every value meets its limit",
        NEGATIVE: "check: the files have problems. explain: no limit decides about a metric that was named, or about a "
        "value of the journal. calibrate: no floor can be proposed. judge: a limit is missed",
        NO_INPUT: "a journal, plugin or file of limits is missing, damaged, unusable or of a newer version",
        NO_OUTPUT: "the output cannot be written. judge: wrong usage",
        10: "judge: no limit judges a value, and none is missed",
    },
    common=(USAGE,),
)

_EXAMPLES = """\
  gpucluster thresholds check my-limits.yaml
  gpucluster thresholds explain --sku "H100 SXM" --world-size 16 --nnodes 2 nccl.all_reduce.busbw --label size="1 GB"
  gpucluster thresholds explain --journal gpucluster-report/latest matmul.bf16.tflops
  gpucluster thresholds calibrate run-1/ run-2/ --out my-limits.yaml
  gpucluster thresholds judge --sku "H100 SXM" matmul.fp32.tflops="51.5 TFLOPS"
  gpucluster thresholds judge --sku H200 --world-size 16 --nodes 2 --label size="8 GiB" --label transport=NET/IB \\
      nccl.all_reduce.busbw="470 GB/s"
"""

_THRESHOLDS = "Check files of limits, explain which limit decides, and propose floors from accepted runs."

_CHECK = """\
Find all problems in files of limits, each with file, line and column. The files override the shipped one and each
other in their order, as --gpucluster-thresholds does with one; without a file the shipped one is checked. Notes, which
are no problems: an entry that demands less than the one it replaces; a floor of yours that GPUs published as healthy
miss, or nearly. In the shipped file such a floor is a problem.
"""

_EXPLAIN = """\
Print the limits in force, each with its file, line and source. For a METRIC all entries are listed in the order of
their precedence: the one that decides, and why the others do not. Conditions that are not named, such as a size, are
left open. With --journal SKU, topology and labels are those of the run, and METRIC defaults to all that it measured.
"""

_CALIBRATE = """\
Propose floors from the journals of one or more ACCEPTED runs of the same SKU and workload, as a file of limits for
review: the median of all ranks' values less --spreads spreads, rounded down to 3 digits, never above the data sheet
peak, and no looser than the limit in force. Floors are proposed for judged rates (TFLOPS, GB/s, tokens/s and the like);
the source of each one states how it was derived.
"""

_JUDGE = """\
Compare values that were measured elsewhere with the limits: a line for each, with its limit, margin, and published
values of healthy GPUs. Labels are those of evidence.tsv: n, dtype, size, transport (NET/IB, EFA, TCPXO, TCPX, TCP,
NVLink), within, nics, mode, model, best=1 (the best of many shapes, compared with the floor of the best size). Without
a size it is 1 GB, the smallest that is judged; without a transport it is the one that the limit expects. A label that
no limit uses is ignored with a note.
"""


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``thresholds check``."""
    explain(parser, _CHECK, _EXAMPLES, EXIT_CODES)
    parser.add_argument("files", metavar="FILE", type=Path, nargs="*", help="default: the shipped limits")
    add_option(parser, "--plugin FILE", "a conftest.py or a module that declares metrics of your own", action="append")


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``thresholds explain``."""
    explain(parser, _EXPLAIN, _EXAMPLES, EXIT_CODES)
    parser.add_argument(
        "metrics", metavar="METRIC", nargs="*", help="default: all; matmul. selects all that begin with it"
    )
    add_option(parser, "--sku NAME", "a SKU, or words of its name: H100 selects every H100")
    add_option(parser, "--world-size N", "ranks of the run", type=whole_number())
    add_option(parser, "--nnodes N", "nodes of the run", type=whole_number())
    add_option(parser, "--transport NAME", "the same as --label transport=NAME, such as NET/IB")
    add_option(parser, "--label KEY=VALUE", "a label of the measurement", type=key_value, action="append")
    add_option(parser, "--journal JOURNAL", JOURNAL_HELP, type=Path)
    add_thresholds(parser)


def configure_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``thresholds calibrate``."""
    explain(parser, _CALIBRATE, _EXAMPLES, EXIT_CODES)
    parser.add_argument("journals", metavar="JOURNAL", type=Path, nargs="+", help=JOURNAL_HELP)
    add_option(parser, "--out FILE", "write the file here; - for standard output", required=True)
    add_option(parser, "--spreads K", "spreads below the median", type=number(0.001, 99.999), default=3.0)
    add_option(parser, "--sku NAME", "the required SKU (default: that of the first journal)")
    add_option(parser, "--recorded", "also for rates that no limit judges yet")
    add_option(parser, "--force", "replace an existing file")


def configure_judge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``thresholds judge``."""
    explain(parser, _JUDGE, _EXAMPLES, EXIT_CODES)
    parser.add_argument("values", metavar="METRIC=VALUE", nargs="+", help='such as matmul.fp32.tflops="51.5 TFLOPS"')
    add_option(parser, "--sku NAME", "the SKU, such as H100 SXM", required=True)
    add_option(parser, "--world-size N", "GPUs that took part", type=whole_number(), default=1)
    add_option(parser, "--nodes M", "nodes of these GPUs", type=whole_number(), default=1)
    add_option(parser, "--label KEY=VALUE", "how it was measured", action="append")
    add_thresholds(parser)

    def refuse(message: str) -> NoReturn:
        parser.print_usage(sys.stderr)
        parser.exit(WRONG_USAGE, f"{parser.prog}: error: {message}\n")

    parser.error = refuse  # type: ignore[method-assign]


def _explain(options: argparse.Namespace) -> int:
    known = {key: str(options.__dict__[key]) for key in ("world_size", "nnodes") if options.__dict__[key]}
    known |= dict(options.label) | ({"transport": options.transport} if options.transport else {})
    if options.journal is not None:
        if options.sku or known:
            options.refuse("--journal has SKU, topology and labels: leave the options for these out")
        return explain_journal(options.journal, options.metrics, options.thresholds)
    if not options.sku:
        options.refuse("explain needs --sku NAME or --journal JOURNAL")
    return explain_sku(options.sku, options.metrics, options.thresholds, known)


def _judge(options: argparse.Namespace) -> int:
    labels: dict[str, str] = {}
    for text in options.label:
        key, _, value = (part.strip() for part in text.partition("="))
        if not key or key in labels:
            options.refuse(f"--label {text}: it must be KEY=VALUE, each key once")
        labels[key] = value
    try:
        values = [key_value(text) for text in options.values]
    except argparse.ArgumentTypeError as error:
        options.refuse(str(error).replace("KEY=VALUE", "METRIC=VALUE"))
    return judge_values(
        values,
        sku=options.sku,
        world_size=options.world_size,
        nodes=options.nodes,
        labels=labels,
        files=options.thresholds,
    )


STEPS = {
    "check": Step(help="find all problems in files of limits", configure=configure_check, run=_check),
    "explain": Step(help="explain which limit decides, and why", configure=configure_explain, run=_explain),
    "calibrate": Step(help="propose floors from accepted runs", configure=configure_calibrate, run=calibrate),
    "judge": Step(
        help="compare values that were measured elsewhere with the limits", configure=configure_judge, run=_judge
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``thresholds``."""
    explain(parser, _THRESHOLDS, _EXAMPLES, EXIT_CODES)
    add_steps(parser, _THRESHOLDS, STEPS)


run = run_step
