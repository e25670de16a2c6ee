"""``gpucluster fleet``: the runs of many nodes as one matrix, who is behind the others, and who is to be drained."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.cli.command import (
    DONE,
    NO_JOURNAL,
    NO_OUTPUT,
    REGRESSED,
    USAGE,
    complain,
    explain,
    read_journal,
    write_text,
)
from pytest_gpucluster.errors import JournalError

if TYPE_CHECKING:
    from pytest_gpucluster.analysis.fleet import Answer

UNDECIDED = 5

_FLEET = """\
Show the runs of many nodes, each of which ran the suite alone, as one matrix of nodes and criteria. A GPU that passed
its limits and is far behind the same GPUs of the other nodes is named. The drain list has the nodes that were rejected
or are behind. A node without an answer is never counted as good.
"""

_EXAMPLES = """\
  gpucluster fleet gpucluster-sweep/20260102-030405
  gpucluster fleet node-a/journal.jsonl node-b/journal.jsonl node-c/journal.jsonl --json -
  gpucluster fleet gpucluster-sweep/latest --nodes 'gpu-[001-064]' --drain drain.txt
"""

_EXIT_CODES = """\
exit codes:
  0  every node is good
  1  a node is to be drained
  2  wrong usage
  3  a journal is missing, damaged, no journal, or of a newer version, or there is none below a folder
  4  the output cannot be written
  5  nothing is to be drained, but a node gave no answer; or the runs are no fleet
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fleet``."""
    explain(parser, _FLEET, _EXAMPLES, _EXIT_CODES)
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


def run(options: argparse.Namespace) -> int:
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


def _answers(places: list[Path]) -> tuple[list[Answer], list[tuple[str, str]]]:
    """Return the run of every journal that is named or lies below a folder, and what below a folder cannot be read.

    Raises:
        JournalError: a journal that is named cannot be read, or there is none below a folder.
    """
    from pytest_gpucluster.analysis.fleet import Answer, journals_below
    from pytest_gpucluster.analysis.run_view import without_samples

    answers: dict[Path, Answer] = {}
    unreadable: dict[Path, tuple[str, str]] = {}
    for place in places:
        below = journals_below(place) if place.is_dir() else [place]
        if not below:
            raise JournalError(f"{place}: no journal.jsonl in this folder or below it")
        for path in below:
            try:
                answers[path.resolve()] = Answer(
                    path=path, journal=read_journal(path, keep_samples=True, slim=without_samples)[1]
                )
            except JournalError as error:
                if path == place:
                    raise
                unreadable[path.resolve()] = str(path), str(error)
    return list(answers.values()), list(unreadable.values())
