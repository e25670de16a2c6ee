"""``gpucluster golden``: a reference loss curve from the curves of one or more runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_gpucluster.benchmarks.lora import reference_curve
from pytest_gpucluster.cli.command import complain, explain
from pytest_gpucluster.errors import CurveError, JournalError
from pytest_gpucluster.journal import journal
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.metrics.loss_curve import FIRST_LINE, Curve, is_curve, read_csv

DONE, USAGE, NO_INPUT, NO_OUTPUT = 0, 2, 3, 4

EXIT_CODES = """\
exit codes:
  0  done
  2  wrong usage
  3  a curve or journal is missing or damaged, or the curves are not alike
  4  the output cannot be written
"""

_EXAMPLES = """\
  gpucluster golden run-1/curve.csv gpucluster-report/latest --out golden.json
"""

_GOLDEN = """\
Make a golden loss curve of one or more runs of the same experiment, for --gpucluster-golden. Of a journal or a folder
of a run the curve among its artifacts is taken, if its test passed; of a report directory the latest run's.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``golden``."""
    explain(parser, _GOLDEN, _EXAMPLES, EXIT_CODES)
    parser.add_argument(
        "curves",
        metavar="CURVE.csv|JOURNAL",
        type=Path,
        nargs="+",
        help="the CSV file of a curve, a journal.jsonl, the folder of a run, or a report directory (its latest run)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="write the golden curve here")
    parser.add_argument(
        "--test", metavar="TEXT", default="", help="of a run, the curve of the test with this in its id, as lora_tiny"
    )


def run(options: argparse.Namespace) -> int:
    """Make a golden curve, and return the exit code."""
    return make(options.curves, options.out, options.test)


def make(places: Sequence[Path], out: Path, test: str = "") -> int:
    """Make a golden curve of the curves in these places, write it, and return the exit code.

    Args:
        places: CSV files of curves; or journals, folders of runs or report directories, each with one curve among the
            artifacts of its tests.
        out: the file to write.
        test: of a run, only the curves of tests with this text in their id.
    """
    try:
        curves = [curve_of(place, test) for place in places]
    except (CurveError, JournalError) as error:
        return complain(str(error), NO_INPUT)
    files = [os.path.realpath(path) for path, _ in curves]
    twice = [path for path, _ in curves if files.count(os.path.realpath(path)) > 1]
    if twice:
        return complain(f"{twice[0]} is given {len(twice)} times; a run counts once", USAGE)
    if os.path.realpath(out) in files:
        return complain(f"--out {out}: that is one of the curves; name another file", USAGE)
    try:
        made = reference_curve.write(out, [curve for _, curve in curves])
    except CurveError as error:
        runs = "; ".join(f"run {number} is {path}" for number, (path, _) in enumerate(curves, start=1))
        return complain(f"{error} ({runs})", NO_INPUT)
    except OSError as error:
        return complain(f"--out {out}: {error.strerror or error}", NO_OUTPUT)
    widest = max(made.band)
    runs = "1 run" if made.runs == 1 else f"{made.runs} runs"
    print(
        f"gpucluster: golden curve of {runs}, {len(made.steps)} steps, loss {made.loss[0]:.4g} to {made.loss[-1]:.4g}, "
        f"band at most {widest:.2g}: {out}",
        file=sys.stderr,
    )
    return DONE


def curve_of(place: Path, test: str = "") -> tuple[Path, Curve]:
    """Return the file of a curve, and the curve: of a CSV file, or of the run that a journal or folder is of.

    Args:
        place: the file or folder.
        test: of a run, only the curves of tests with this text in their id.

    Raises:
        CurveError: there is no curve, or more than one, or its test did not pass.
        JournalError: the journal cannot be read.
    """
    try:
        if place.is_file() and (place.suffix == ".csv" or is_curve(place)):
            return place, read_csv(place)
        path = journal.locate(place)
        try:
            record = journal.read(path, keep_samples=False)
        except JournalError as error:
            if path.name == journal.JOURNAL_FILE:
                raise
            raise CurveError(f"{error}; and no loss curve, which begins with {FIRST_LINE!r}") from None
        folder = path.parent / ARTIFACTS
        tests = {artifacts_name(result.nodeid): result for result in record.results if test in result.nodeid}
        found = sorted(
            file
            for file in folder.glob("*/**/*.csv")
            if is_curve(file) and (not test or file.relative_to(folder).parts[0] in tests)
        )
    except OSError as error:
        raise CurveError(f"{place}: {error.strerror or error}") from None
    if len(found) != 1:
        of = f" of tests with {test!r}" if test else ""
        listed = ": " + ", ".join(map(str, found)) if found else ""
        raise CurveError(
            f"{place}: {len(found) or 'no'} loss curves in {folder}{of}{listed}; "
            "name the CSV file of the one that is meant, or its test with --test"
        )
    [file] = found
    result = tests.get(file.relative_to(folder).parts[0])
    if result is not None and result.outcome == "passed":
        return file, read_csv(file)
    raise CurveError(
        f"{file}: its test did not pass, so it is no curve to go by; to use it all the same, name the CSV file itself"
    )
