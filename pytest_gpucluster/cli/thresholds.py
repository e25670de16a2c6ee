"""``gpucluster thresholds``: limits checked, explained, and proposed from accepted runs; foreign values judged by them.

``check`` is in this module: all that is wrong in files of limits, with file, line and column.
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

from pytest_gpucluster.cli.command import DONE, JOURNAL_HELP, NO_JOURNAL, complain, explain
from pytest_gpucluster.cli.thresholds_calibrate import calibrate
from pytest_gpucluster.cli.thresholds_explain import WRONG_USAGE, explain_journal, explain_sku, judge_values
from pytest_gpucluster.errors import JournalError, ThresholdsError
from pytest_gpucluster.text import printable

if TYPE_CHECKING:
    from pytest_gpucluster.judge.limits import Limit, Thresholds

FAULTY = 1


def declare(plugin: str) -> str:
    """Make the metrics known that a site's plugin or conftest.py declares; return what is wrong with it, or nothing.

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
    except Exception as error:  # it is the site's own code: whatever it raises is said, and the check does not go on
        return f"--plugin {plugin}: {type(error).__name__}: {error}"
    return ""


def check(files: Sequence[Path], plugins: Sequence[str] = ()) -> int:
    """Print every problem of these files, or that there is none, and return the exit code."""
    from pytest_gpucluster.judge import evidence, loader
    from pytest_gpucluster.judge.limits import EVERY_SKU, looser

    for plugin in plugins:
        wrong = declare(plugin)
        if wrong:
            return complain(wrong, NO_JOURNAL)
    for path in files:
        try:
            path.read_bytes()
        except OSError as error:
            return complain(f"{path}: cannot be read: {error.strerror or error}", NO_JOURNAL)
    shipped = loader.shipped_path()
    others = [path for path in files if os.path.realpath(path) != os.path.realpath(shipped)]
    try:
        layers = [loader.load(shipped, *others[:count]) for count in range(len(others) + 1)]
    except ThresholdsError:
        return _problems(shipped, others)
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
        print(f"{len(near)} {'problem' if len(near) == 1 else 'problems'}")
        return FAULTY
    own = [limit for limit in found.limits if limit.layer > 0] if others else list(found.limits)
    skus = {limit.sku for limit in own} - {EVERY_SKU}
    counted = "1 entry" if len(own) == 1 else f"{len(own)} entries"
    named = f"{len(skus)} {'SKU' if len(skus) == 1 else 'SKUs'}" if skus else ""
    every = EVERY_SKU if any(limit.sku == EVERY_SKU for limit in own) else ""
    print(f"no problem: {counted} for {' and '.join(filter(None, (named, every))) or 'no SKU'}")
    return DONE


def _problems(shipped: Path, others: Sequence[Path]) -> int:
    """Print the problems of all files: each is read, also after one that has some."""
    from pytest_gpucluster.judge import loader

    problems: list[str] = []
    try:
        loader.load(shipped, *others)
    except ThresholdsError as error:
        problems = str(error).splitlines()
    for line in problems:
        print(printable(line))
    print(f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}")
    return FAULTY


def _replaced(after: Thresholds, before: Thresholds) -> Iterator[tuple[Limit, Limit]]:
    """Yield each entry of the last file with those whose place it takes: of the same conditions, and of more."""

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


EXIT_CODES = """\
exit codes:
  0  no problem in the files; explained; floors are written; every value keeps its limit
  1  check: the files have problems. explain: nothing decides about a metric that was named, or about a value of the
     journal. calibrate: no floor can be proposed. judge: a limit is missed
  2  wrong usage
  3  a journal, a plugin or a file of limits is missing, damaged or not to be used, or a journal is of a newer version
  4  the output cannot be written. judge: wrong usage
 10  judge: no limit judges a value, and none is missed
"""

_EXAMPLES = """\
  gpucluster thresholds check my-limits.yaml
  gpucluster thresholds explain --sku "H100 SXM" --world-size 16 --nnodes 2 nccl.all_reduce.busbw --label size="1 GB"
  gpucluster thresholds explain --journal gpucluster-report/latest matmul.bf16.tflops
  gpucluster thresholds calibrate run-1/ run-2/ --out my-limits.yaml
  gpucluster thresholds judge --sku "H100 SXM" matmul.fp32.tflops="51.5 TFLOPS"
  gpucluster thresholds judge --sku H200 --world-size 16 --nodes 2 --label size="8 GiB" --label transport=NET/IB \\
      nccl.all_reduce.busbw="470 GB/s"
"""

_THRESHOLDS = "Check files of limits, tell which limit decides and why, and propose floors from accepted runs."

_CHECK = """\
Look for all that is wrong in files of limits, and name each problem with file, line and column. The files are laid
over the shipped one and over each other, as --gpucluster-thresholds does with one; without a file the shipped one is
checked. An entry that demands less than the one whose place it takes is named; that is no problem. Neither is a floor
of yours that GPUs miss, or nearly, which are published as healthy; in the shipped file it is one.
"""

_EXPLAIN = """\
Tell the limits in force, each with the file and line it is from, and its source. Of a METRIC all entries are told in
the order in which they are asked: the one that decides, and why the others do not. What is not named, such as a size,
is left open. With --journal SKU, topology and labels are those of the run; METRIC is every one that it has measured.
"""

_CALIBRATE = """\
Propose floors from the journals of one or more ACCEPTED runs of the same SKU and workload, as a file of limits for
review: the median of all ranks' values less so many spreads, rounded down to 3 digits, never above the data sheet peak,
and no looser than the limit in force. Floors are proposed for rates (TFLOPS, GB/s, tokens/s and the like) that are
judged; each has in its source what it is made of.
"""

_JUDGE = """\
Hold values that were measured elsewhere against the limits: a line for each, with its limit, margin, and what is
published of healthy GPUs. Labels are those of evidence.tsv: n, dtype, size, transport (NET/IB, EFA, TCPXO, TCPX, TCP,
NVLink), within, nics, mode, model, best=1 (the best of many shapes, held against the floor of the best size).
A size that is not stated counts as 1 GB, the smallest that is judged; a transport is then the one that the limit
expects. A label that no limit looks at is ignored with a note.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``thresholds check``, ``explain``, ``calibrate`` and ``judge``."""
    explain(parser, _THRESHOLDS, _EXAMPLES, EXIT_CODES)
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    looked = steps.add_parser("check", help="name all that is wrong in files of limits")
    explain(looked, _CHECK, _EXAMPLES, EXIT_CODES)
    looked.add_argument("files", metavar="FILE", type=Path, nargs="*", help="default: the shipped limits")
    looked.add_argument(
        "--plugin",
        metavar="FILE",
        action="append",
        default=[],
        help="a conftest.py or a module that declares metrics of your own; repeatable",
    )
    told = steps.add_parser("explain", help="tell which limit decides, and why")
    explain(told, _EXPLAIN, _EXAMPLES, EXIT_CODES)
    told.add_argument("metrics", metavar="METRIC", nargs="*", help="default: all; matmul. means all that begin so")
    told.add_argument("--sku", metavar="NAME", help="a SKU, or words of its name: H100 is every H100")
    told.add_argument("--world-size", metavar="N", type=_count, help="ranks of the run")
    told.add_argument("--nnodes", metavar="N", type=_count, help="nodes of the run")
    told.add_argument("--transport", metavar="NAME", help="the same as --label transport=NAME, such as NET/IB")
    told.add_argument(
        "--label", metavar="KEY=VALUE", type=_label, action="append", default=[], help="of the measurement; repeatable"
    )
    told.add_argument("--journal", metavar="JOURNAL", type=Path, help=JOURNAL_HELP)
    told.add_argument(
        "--thresholds",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="laid over the shipped limits, as --gpucluster-thresholds; repeatable",
    )
    told.set_defaults(refuse=told.error)
    made = steps.add_parser("calibrate", help="propose floors from accepted runs")
    explain(made, _CALIBRATE, _EXAMPLES, EXIT_CODES)
    made.add_argument("journals", metavar="JOURNAL", type=Path, nargs="+", help=JOURNAL_HELP)
    made.add_argument("--out", metavar="FILE", required=True, help="write the file here; - is the standard output")
    made.add_argument(
        "--spreads", metavar="K", type=_spreads, default=3.0, help="spreads below the median (default: 3)"
    )
    made.add_argument("--sku", metavar="NAME", help="what the SKU must be (default: that of the first journal)")
    made.add_argument("--recorded", action="store_true", help="also for rates that are recorded only so far")
    made.add_argument("--force", action="store_true", help="replace a file that is there")
    held = steps.add_parser("judge", help="hold values that were measured elsewhere against the limits")
    explain(held, _JUDGE, _EXAMPLES, EXIT_CODES)
    held.add_argument("values", metavar="METRIC=VALUE", nargs="+", help='such as matmul.fp32.tflops="51.5 TFLOPS"')
    held.add_argument("--sku", metavar="NAME", required=True, help="the SKU, such as H100 SXM")
    held.add_argument("--world-size", metavar="N", type=_count, default=1, help="GPUs that took part (default: 1)")
    held.add_argument("--nodes", metavar="M", type=_count, default=1, help="nodes in which they sit (default: 1)")
    held.add_argument(
        "--label", metavar="KEY=VALUE", action="append", default=[], help="how it was measured; repeatable"
    )
    held.add_argument("--thresholds", metavar="FILE", type=Path, action="append", default=[], help="as of explain")

    def refuse(message: str) -> NoReturn:
        held.print_usage(sys.stderr)
        held.exit(WRONG_USAGE, f"{held.prog}: error: {message}\n")

    held.error = refuse  # type: ignore[method-assign]
    held.set_defaults(refuse=refuse)


def run(options: argparse.Namespace) -> int:
    """Check, explain or calibrate, and return the exit code."""
    try:
        if options.step == "check":
            return check(options.files, options.plugin)
        if options.step == "calibrate":
            return calibrate(
                options.journals,
                options.out,
                spreads=options.spreads,
                sku=options.sku,
                recorded=options.recorded,
                force=options.force,
            )
        if options.step == "judge":
            return _judge(options)
        return _explain(options)
    except (JournalError, ThresholdsError) as error:
        for line in str(error).splitlines():
            complain(line, NO_JOURNAL)
        return NO_JOURNAL


def _explain(options: argparse.Namespace) -> int:
    known = {key: str(options.__dict__[key]) for key in ("world_size", "nnodes") if options.__dict__[key]}
    known |= dict(options.label) | ({"transport": options.transport} if options.transport else {})
    if options.journal is not None:
        if options.sku or known:
            options.refuse("--journal tells SKU, topology and labels itself: leave the options for these out")
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
    values = []
    for text in options.values:
        metric, separator, value = (part.strip() for part in text.partition("="))
        if not (metric and separator and value):
            options.refuse(f"{text!r} is not METRIC=VALUE")
        values.append((metric, value))
    return judge_values(
        values,
        sku=options.sku,
        world_size=options.world_size,
        nodes=options.nodes,
        labels=labels,
        files=options.thresholds,
    )


def _count(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (separator and key.strip() and value.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def _spreads(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and below 100")
    return value
