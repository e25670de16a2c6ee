"""``gpucluster runs``: two runs compared, several merged into one, many as a fleet, one beside nccl-tests."""

from __future__ import annotations

import argparse
import filecmp
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cli import crosscheck
from pytest_gpucluster.cli.command import (
    DONE,
    JOURNAL_HELP,
    NO_JOURNAL,
    NO_OUTPUT,
    REGRESSED,
    USAGE,
    Step,
    add_journal,
    add_steps,
    complain,
    explain,
    read_journal,
    run_step,
    write_text,
)
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.text import one_line, printable

if TYPE_CHECKING:
    from pytest_gpucluster.analysis.fleet import NodeRun
    from pytest_gpucluster.analysis.run_view import RunView
    from pytest_gpucluster.journal.journal import Journal

UNDECIDED = 5
_INDENT = 8

_COMPARE = """\
Compare two runs, criterion by criterion and rank by rank. A value is a regression where it is worse than before beyond
the noise of its samples, and by more than --fail. What only one run has, and what the noise hides, is never fine: it
is told, and ends with 5. docs/compare.md has the rules.
"""

_COMPARE_EXAMPLES = """\
  gpucluster runs compare reports/before-the-driver-update gpucluster-report/latest
  gpucluster runs compare old/journal.jsonl new/journal.jsonl --fail 5% --all
  gpucluster runs compare old/journal.jsonl new/journal.jsonl --partial --json - | jq .answer
"""

_COMPARE_EXIT_CODES = """\
exit codes:
  0  no regression, and everything that decides was compared
  1  a regression
  2  wrong usage
  3  a journal is missing, damaged, no journal, or of a newer version
  4  the output cannot be written
  5  no answer: nothing is comparable (another SKU, a rehearsal beside a run on GPUs, ...), or no regression was
     found, but not everything could be compared
"""


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``runs compare``."""
    explain(parser, _COMPARE, _COMPARE_EXAMPLES, _COMPARE_EXIT_CODES)
    add_journal(parser, "old", help="the run that is the measure: a journal.jsonl, or the folder of a run")
    add_journal(parser, "new", help="the run in question")
    parser.add_argument(
        "--fail",
        metavar="PERCENT",
        default="3%",
        help="by how much a value may be worse, in percent of what it was (default: 3%%)",
    )
    parser.add_argument(
        "--recorded", action="store_true", help="values that no limit judges decide too; else they are only told"
    )
    parser.add_argument(
        "--partial", action="store_true", help="what only one of the runs has is told, and does not end with 5"
    )
    parser.add_argument("--all", action="store_true", help="show every metric, also what is the same or within noise")
    parser.add_argument("--json", metavar="FILE", help="write the comparison here as JSON; - is the standard output")


def run_compare(options: argparse.Namespace) -> int:
    """Compare two runs and return the exit code."""
    # Imported here, so that --version and --help answer at once.
    from pytest_gpucluster.analysis import compare, compare_output
    from pytest_gpucluster.analysis.significance import allowance
    from pytest_gpucluster.errors import OptionError
    from pytest_gpucluster.reports.tables import rank_name

    try:
        allowed = allowance(options.fail)
        old, new = _of(options.old), _of(options.new)
    except OptionError as error:
        return complain(f"--fail {error}", USAGE)
    except JournalError as error:
        return complain(str(error), NO_JOURNAL)
    paths = [Path(about["journal"]).resolve() for about, _, _ in (old, new)]
    if filecmp.cmp(paths[0], paths[1], shallow=False):
        return complain(f"{old[0]['journal']} and {new[0]['journal']} are the same run; name two runs", USAGE)
    if options.json not in (None, "-") and Path(options.json).resolve() in paths:
        return complain(f"--json {options.json}: that is a journal itself; name another file", USAGE)
    found = compare.compare_runs(
        old[1], new[1], allowed=allowed, include_recorded=options.recorded, partial=options.partial
    )
    code = {compare.REGRESSION: REGRESSED, compare.NO_REGRESSION: DONE}.get(found.answer, UNDECIDED)
    about = [old[0], new[0]]
    try:
        if options.json is not None:
            write_text(
                options.json, compare_output.comparison_document(found, old=about[0], new=about[1], exit_code=code)
            )
        if options.json != "-":
            width = shutil.get_terminal_size((80, 24)).columns
            text = compare_output.comparison_table(
                found,
                old_name=lambda rank: rank_name(old[2], rank),
                new_name=lambda rank: rank_name(new[2], rank),
                width=width,
                everything=options.all,
            )
            write_text("-", _head(about, width) + text)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        return complain(f"{options.json}: {error.strerror or error}", NO_OUTPUT)
    return code


def _of(place: Path) -> tuple[dict[str, Any], RunView, Journal]:
    """Return a description of the run, its view, and its journal without results."""
    from pytest_gpucluster.analysis.run_view import RunView, without_samples

    path, journal = read_journal(place, keep_samples=True, slim=without_samples)
    return _about(path, journal), RunView.of(journal), replace(journal, results=())


def _about(path: Path, journal: Journal) -> dict[str, Any]:
    return {
        "journal": str(path),
        "run_id": journal.run.run_id,
        "started_at": journal.run.started_at,
        "verdict": journal.verdict,
        "rehearsal": journal.run.rehearsal,
        "sku": journal.limits.sku if journal.limits is not None else None,
        "world_size": journal.run.world_size,
        "nnodes": journal.run.nnodes,
    }


def _head(about: list[dict[str, Any]], width: int) -> str:
    from pytest_gpucluster.analysis import run_view
    from pytest_gpucluster.text import one_line, paragraph, printable

    lines = []
    for when, run in zip(("before", "now"), about, strict=True):
        rehearsal = "REHEARSAL, " if run["rehearsal"] else ""
        shape = run_view.Conditions(world_size=run["world_size"], nnodes=run["nnodes"]).shape
        sku = f"{run['sku'] or 'SKU unknown'}, {shape}"
        text = one_line(f"{run['started_at'][:19]}, {rehearsal}{run['verdict']}, {sku}", 300)
        lines += paragraph(text, max(width, 40), first=f"{when}:".ljust(_INDENT), rest=" " * _INDENT)
        lines.append(" " * _INDENT + printable(run["journal"]))  # whole: it is to be copied
    return "\n".join(lines) + "\n\n"


_MERGE = """\
Merge the journals of several runs of one cluster into one journal with one verdict: of a run that broke and the rerun
of what was left, or of a failure and its rerun with -k. Name them in the order in which they ran: of each criterion the
newest answer counts, and every attempt stays visible. Runs of one report directory are numbered, and ordered by that
whatever their clocks were; others are refused where their clocks contradict the order. Runs of other hosts or GPUs,
with other limits or another workload are refused.
"""

_MERGE_EXAMPLES = """\
  gpucluster runs merge gpucluster-report/20260102-030405 gpucluster-report/latest --out merged/
  gpucluster runs merge first/journal.jsonl rerun/journal.jsonl --out merged.jsonl && gpucluster verdict merged.jsonl
"""

_MERGE_EXIT_CODES = """\
exit codes:
  0  merged, whatever the verdict: `gpucluster verdict` ends with its exit code
  2  wrong usage; also: the runs are not in order, or not of one cluster and one set of limits
  3  a journal is missing, damaged, no journal, of a newer version, or of a run that is going on
  4  the merged journal cannot be written
"""


def configure_merge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``runs merge``."""
    explain(parser, _MERGE, _MERGE_EXAMPLES, _MERGE_EXIT_CODES)
    parser.add_argument("journals", metavar="JOURNAL", type=Path, nargs="+", help=JOURNAL_HELP)
    parser.add_argument(
        "--out",
        metavar="PLACE",
        type=Path,
        required=True,
        help="the merged journal: a folder, in which it becomes journal.jsonl, or a file whose name ends in .jsonl; "
        "what is there is never replaced",
    )
    parser.add_argument(
        "--allow-different-clusters",
        action="store_true",
        help="merge also runs of different hosts, GPUs or sizes; every report says so, and nothing is ACCEPTED by that",
    )


def run_merge(options: argparse.Namespace) -> int:
    """Merge journals and return the exit code."""
    # Imported here, so that --version and --help answer at once.
    from pytest_gpucluster.analysis.merge import merge_journals
    from pytest_gpucluster.analysis.merge_sources import load_source
    from pytest_gpucluster.errors import OptionError
    from pytest_gpucluster.journal.journal import JOURNAL_FILE, encode, locate

    out: Path = options.out
    if out.suffix != ".jsonl" or out.is_dir():
        out = out / JOURNAL_FILE
    if len(options.journals) < 2:
        return complain("one journal has nothing to be merged with; name two or more", USAGE)
    if out.exists():
        return complain(f"--out {out}: is there already, and a journal is never replaced; name another place", USAGE)
    try:
        sources = [load_source(locate(place)) for place in options.journals]
        merged = merge_journals(sources, other_clusters=options.allow_different_clusters)
    except JournalError as error:
        return complain(str(error), NO_JOURNAL)
    except OptionError as error:
        for line in str(error).splitlines():
            complain(line, USAGE)
        return USAGE
    for source in sources:
        if source.journal.cut:
            print(f"gpucluster: {source.path}: its last line is cut off and left out", file=sys.stderr)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(out, map(encode, merged.lines()))
    except OSError as error:
        return complain(f"--out {out}: {error.strerror or error}", NO_OUTPUT)
    for text in merged.despite:
        complain(f"DIFFERENT CLUSTERS: {text}", DONE)
    rehearsal = "REHEARSAL, " if sources[0].journal.run.rehearsal else ""
    verdict = merged.verdict
    said = f"gpucluster: {rehearsal}{verdict.word}, exit code {verdict.exit}: {verdict.reason}"
    print(printable(one_line(said, 2000)))
    print(f"gpucluster: {len(sources)} runs merged: {out}", file=sys.stderr)
    return DONE


def _write(out: Path, lines: Iterable[bytes]) -> None:
    """Write a new file, whole or not at all.

    Raises:
        OSError: it cannot be written, or there is such a file by now.
    """
    with out.open("xb") as file:
        try:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:  # also an interruption: half a journal would be read as a run that was killed
            out.unlink()
            raise


_FLEET = """\
Show the runs of many nodes, each of which ran the suite alone, as one matrix of nodes and criteria. A GPU that passed
its limits and is far behind the same GPUs of the other nodes is named. The drain list has the nodes that were rejected
or are behind. A node without an answer is never counted as good.
"""

_FLEET_EXAMPLES = """\
  gpucluster runs fleet gpucluster-sweep/20260102-030405
  gpucluster runs fleet node-a/journal.jsonl node-b/journal.jsonl node-c/journal.jsonl --json -
  gpucluster runs fleet gpucluster-sweep/latest --nodes 'gpu-[001-064]' --drain drain.txt
"""

_FLEET_EXIT_CODES = """\
exit codes:
  0  every node is good
  1  a node is to be drained
  2  wrong usage
  3  a journal is missing, damaged, no journal, or of a newer version, or there is none below a folder
  4  the output cannot be written
  5  nothing is to be drained, but a node gave no answer; or the runs are no fleet
"""


def configure_fleet(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``runs fleet``."""
    explain(parser, _FLEET, _FLEET_EXAMPLES, _FLEET_EXIT_CODES)
    parser.add_argument(
        "places",
        metavar="JOURNAL|DIR",
        type=Path,
        nargs="+",
        help="a journal.jsonl, or a folder with journals below it",
    )
    parser.add_argument("--nodes", metavar="HOSTLIST", help="the nodes that should have answered: gpu-[001-064]")
    parser.add_argument(
        "--behind",
        metavar="PERCENT",
        default="3%",
        help="by how much a value must be worse than the fleet's median to be an outlier (default: 3%%)",
    )
    parser.add_argument("--drain", metavar="FILE", help="write the nodes to leave out here; - is the standard output")
    parser.add_argument("--json", metavar="FILE", help="write all of it here as JSON; - is the standard output")
    parser.add_argument("--all", action="store_true", help="show also the nodes and outliers that are left out")


def run_fleet(options: argparse.Namespace) -> int:
    """Show a fleet and return the exit code."""
    # Imported here, so that --version and --help answer at once.
    from pytest_gpucluster.analysis import fleet as node
    from pytest_gpucluster.analysis import fleet_output
    from pytest_gpucluster.analysis.fleet import drain_text, matrix, outliers
    from pytest_gpucluster.analysis.significance import allowance
    from pytest_gpucluster.errors import LaunchError, OptionError
    from pytest_gpucluster.launch.hostlist import expand_hostlist

    try:
        behind = allowance(options.behind)
        expected = expand_hostlist(options.nodes) if options.nodes is not None else []
        answers, unreadable = _answers(options.places)
    except OptionError as error:
        return complain(f"--behind {error}", USAGE)
    except LaunchError as error:
        return complain(f"--nodes: {error}", USAGE)
    except JournalError as error:
        return complain(str(error), NO_JOURNAL)
    wrong = _wrong_output(options, [answer.path for answer in answers])
    if wrong:
        return complain(wrong, USAGE)
    fleet = node.fleet(answers, expected=expected, unreadable=unreadable)
    found = matrix(fleet, outliers(fleet, behind=behind))
    if found.mixed or not fleet.nodes:
        return complain(found.mixed or "none of these runs was on one node alone; see gpucluster sweep", UNDECIDED)
    code = REGRESSED if found.drained else UNDECIDED if found.without_answer else DONE
    width = shutil.get_terminal_size((80, 24)).columns
    for name, out in (("--drain", options.drain), ("--json", options.json)):
        if out is None:
            continue
        try:
            if name == "--json":
                text = fleet_output.fleet_document(found, exit_code=code)
            else:
                text = drain_text(found, file="FILE" if out == "-" else shlex.quote(out))
            write_text(out, text)
        except LaunchError as error:
            return complain(f"{name} {out}: {error}", NO_OUTPUT)
        except BrokenPipeError:
            raise
        except OSError as error:
            return complain(f"{name} {out}: {error.strerror or error}", NO_OUTPUT)
    if "-" not in (options.drain, options.json):
        write_text("-", fleet_output.fleet_table(found, width=width, everything=options.all))
    return code


def _wrong_output(options: argparse.Namespace, journals: Sequence[Path]) -> str:
    """Return why the outputs cannot be written where they were asked for, or an empty text."""
    if options.drain == options.json == "-":
        return "--drain - and --json -: only one of them can have the standard output"
    known = {path.resolve() for path in journals}
    for name, out in (("--drain", options.drain), ("--json", options.json)):
        if out not in (None, "-") and Path(out).resolve() in known:
            return f"{name} {out}: that is a journal itself; name another file"
    return ""


def _answers(places: list[Path]) -> tuple[list[NodeRun], list[tuple[str, str]]]:
    """Return the run of every journal that is named or lies below a folder, and what below a folder cannot be read.

    Raises:
        JournalError: a journal that is named cannot be read, or there is none below a folder.
    """
    from pytest_gpucluster.analysis.fleet import NodeRun, journals_below
    from pytest_gpucluster.analysis.run_view import without_samples

    answers: dict[Path, NodeRun] = {}
    unreadable: dict[Path, tuple[str, str]] = {}
    for place in places:
        below = journals_below(place) if place.is_dir() else [place]
        if not below:
            raise JournalError(f"{place}: no journal.jsonl in this folder or below it")
        for path in below:
            try:
                answers[path.resolve()] = NodeRun(
                    path=path, journal=read_journal(path, keep_samples=True, slim=without_samples)[1]
                )
            except JournalError as error:
                if path == place:
                    raise
                unreadable[path.resolve()] = str(path), str(error)
    return list(answers.values()), list(unreadable.values())


STEPS = {
    "compare": Step(
        help="what is better or worse in one run than in another", configure=configure_compare, run=run_compare
    ),
    "merge": Step(
        help="one journal, with one verdict, of several runs of one cluster", configure=configure_merge, run=run_merge
    ),
    "fleet": Step(
        help="the runs of many nodes as one matrix: outliers, nodes to drain", configure=configure_fleet, run=run_fleet
    ),
    "crosscheck": Step(
        help="the collectives of a run next to those of nccl-tests", configure=crosscheck.configure, run=crosscheck.run
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``runs``."""
    add_steps(parser, "Work with the journals of runs.", STEPS)


run = run_step
