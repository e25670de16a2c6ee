"""``gpucluster compare``: what has become better or worse from one run to another."""

from __future__ import annotations

import argparse
import filecmp
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cli.command import (
    DONE,
    NO_JOURNAL,
    NO_OUTPUT,
    REGRESSED,
    USAGE,
    add_journal,
    complain,
    explain,
    read_journal,
    write_text,
)
from pytest_gpucluster.errors import JournalError

if TYPE_CHECKING:
    from pytest_gpucluster.analysis.run_view import Side
    from pytest_gpucluster.journal.journal import Journal

UNDECIDED = 5
_INDENT = 8

_COMPARE = """\
Compare two runs, criterion by criterion and rank by rank. A value is a regression where it is worse than before beyond
the noise of its samples, and by more than --fail. What only one run has, and what the noise hides, is never fine: it
is told, and ends with 5. docs/compare.md has the rules.
"""

_EXAMPLES = """\
  gpucluster compare reports/before-the-driver-update gpucluster-report/latest
  gpucluster compare old/journal.jsonl new/journal.jsonl --fail 5% --all
  gpucluster compare old/journal.jsonl new/journal.jsonl --partial --json - | jq .answer
"""

_EXIT_CODES = """\
exit codes:
  0  no regression, and everything that decides was compared
  1  a regression
  2  wrong usage
  3  a journal is missing, damaged, no journal, or of a newer version
  4  the output cannot be written
  5  no answer: nothing is comparable (another SKU, a rehearsal beside a run on GPUs, ...), or no regression was
     found, but not everything could be compared
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    explain(parser, _COMPARE, _EXAMPLES, _EXIT_CODES)
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


def run(options: argparse.Namespace) -> int:
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
        old[1], new[1], allowed=allowed, recorded_decide=options.recorded, partial=options.partial
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


def _of(place: Path) -> tuple[dict[str, Any], Side, Journal]:
    """Return which run it is, what it brings to the comparison, and its journal without results."""
    from pytest_gpucluster.analysis.run_view import side, without_samples

    path, journal = read_journal(place, keep_samples=True, slim=without_samples)
    return _about(path, journal), side(journal), replace(journal, results=())


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
        shape = run_view.Facts(world_size=run["world_size"], nnodes=run["nnodes"]).shape
        sku = f"{run['sku'] or 'SKU unknown'}, {shape}"
        text = one_line(f"{run['started_at'][:19]}, {rehearsal}{run['verdict']}, {sku}", 300)
        lines += paragraph(text, max(width, 40), first=f"{when}:".ljust(_INDENT), rest=" " * _INDENT)
        lines.append(" " * _INDENT + printable(run["journal"]))  # whole: it is to be copied
    return "\n".join(lines) + "\n\n"
