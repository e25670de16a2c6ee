"""``gpucluster merge``: the journals of several runs become one, with one verdict."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from pytest_gpucluster.cli.command import DONE, JOURNAL_HELP, NO_JOURNAL, NO_OUTPUT, USAGE, complain, explain
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.text import one_line, printable

_MERGE = """\
Merge the journals of several runs of one cluster into one journal with one verdict: of a run that broke and the rerun
of what was left, or of a failure and its rerun with -k. Name them in the order in which they ran: of each criterion the
newest answer counts, and every attempt stays visible. Runs of one report directory are numbered, and ordered by that
whatever their clocks were; others are refused where their clocks contradict the order. Runs of other hosts or GPUs,
with other limits or another workload are refused.
"""

_EXAMPLES = """\
  gpucluster merge gpucluster-report/20260102-030405 gpucluster-report/latest --out merged/
  gpucluster merge first/journal.jsonl rerun/journal.jsonl --out merged.jsonl && gpucluster verdict merged.jsonl
"""

_EXIT_CODES = """\
exit codes:
  0  merged, whatever the verdict: `gpucluster verdict` ends with its exit code
  2  wrong usage; also: the runs are not in order, or not of one cluster and one set of limits
  3  a journal is missing, damaged, no journal, of a newer version, or of a run that is going on
  4  the merged journal cannot be written
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge``."""
    explain(parser, _MERGE, _EXAMPLES, _EXIT_CODES)
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


def run(options: argparse.Namespace) -> int:
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
