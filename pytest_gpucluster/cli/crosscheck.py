"""``gpucluster runs crosscheck``: our figures beside those of nccl-tests, on the same GPUs and at the same sizes."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from pytest_gpucluster.text import printable

if TYPE_CHECKING:
    from pytest_gpucluster.analysis.crosscheck import Crosscheck, Point, ProgramRun, RunCollectives
    from pytest_gpucluster.analysis.nccl_tests import Output

UNDECIDED, NOT_RUN = 5, 6
FOUND = REGRESSED
_TIMEOUT_SECONDS = 600.0

_NCCL_TESTS = """\
Run nccl-tests at the sizes, in the dtypes and with the number of GPUs of a run of ours, and compare busbw at each size.
A difference beyond --beyond is a finding, whoever is faster; so are wrong data. With --output nothing is run: the
files are what nccl-tests has printed, or written with -J, elsewhere, or a summary of SuperBench, which runs it. What
stands after -- goes to nccl-tests.
docs/compare.md has the rules.
"""

_EXAMPLES = """\
  gpucluster runs crosscheck gpucluster-report/latest
  gpucluster runs crosscheck gpucluster-report/latest --collective all_reduce --dtype bf16 -- -n 50
  gpucluster runs crosscheck gpucluster-report/latest --launcher 'mpirun -np 16 --hostfile hosts'
  gpucluster runs crosscheck gpucluster-report/latest --output all_reduce=all_reduce.txt --partial --json -
"""

_EXIT_CODES = """\
exit codes:
  0  every size was compared, and none differs by more than --beyond
  1  a finding: a difference, or wrong data
  2  wrong usage
  3  the journal is missing, damaged, no journal, or of a newer version
  4  the output cannot be written
  5  no finding, but something, or all of it, could not be compared
  6  nccl-tests did not run to its end (no program, no GPU, too slow), or what it has told cannot be read
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``runs crosscheck``."""
    explain(parser, _NCCL_TESTS, _EXAMPLES, _EXIT_CODES)
    add_journal(parser)
    parser.add_argument(
        "--binaries",
        metavar="DIR",
        type=Path,
        help="where all_reduce_perf is (default: the PATH, /opt/nccl-tests/build)",
    )
    parser.add_argument(
        "-g",
        dest="gpus",
        metavar="N",
        type=_count,
        help="GPUs of each process (default: all that the run had on a node; 1 with --launcher)",
    )
    parser.add_argument(
        "--launcher", metavar="COMMAND", help="what to put before the program on several nodes: 'mpirun -np 16 ...'"
    )
    parser.add_argument(
        "--output",
        metavar="[COLLECTIVE=]FILE",
        action="append",
        default=[],
        help="run nothing, and take what nccl-tests has printed or written elsewhere, or SuperBench's "
        "results-summary.jsonl; repeatable",
    )
    parser.add_argument("--collective", metavar="NAME", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--dtype", metavar="NAME", action="append", default=[], help="only this one; repeatable")
    parser.add_argument(
        "--beyond", metavar="PERCENT", default="5%", help="how much ours may differ from theirs (default: 5%%)"
    )
    parser.add_argument(
        "--partial", action="store_true", help="what only one side has is told, and does not end with 5"
    )
    parser.add_argument(
        "--other-hosts",
        action="store_true",
        help="compare also where the journal has no host of nccl-tests' names, as with pods",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=_TIMEOUT_SECONDS,
        help="how long a single start of nccl-tests may take (default: 600)",
    )
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep what nccl-tests has printed in this folder")
    parser.add_argument("--json", metavar="FILE", help="write all of it here as JSON; - is the standard output")


def run(options: argparse.Namespace) -> int:
    """Crosscheck a run and return the exit code."""
    # Imported here, so that --version and --help answer at once.
    from pytest_gpucluster.analysis import crosscheck
    from pytest_gpucluster.analysis.crosscheck import collectives_of
    from pytest_gpucluster.analysis.significance import allowance
    from pytest_gpucluster.errors import OptionError

    try:
        beyond = allowance(options.beyond)
        given = _given(options)
    except OptionError as error:
        return complain(str(error), USAGE)
    try:
        path, journal = read_journal(options.journal)
        mine = collectives_of(journal)
    except JournalError as error:
        return complain(str(error), NO_JOURNAL)
    if options.json not in (None, "-") and Path(options.json).resolve() == path.resolve():
        return complain(f"--json {options.json}: that is the journal itself; name another file", USAGE)
    why_not = mine.why_not or ("" if mine.points else "no busbw of a collective was measured in this run")
    if why_not:
        return complain(f"{path}: nothing can be compared: {why_not}", UNDECIDED)
    failed = ""
    expected: list[Point] | None = None
    outputs: tuple[Output, ...] = ()
    if given:
        outputs, failed = _read(given, mine)
    else:
        topology, problem = _topology(options, mine)
        if problem:
            return complain(f"{path}: {problem}", UNDECIDED)
        expected = _points(options, mine, topology)
        if not expected:
            return complain(f"{path}: nothing can be compared: {_nothing(options, mine, topology)}", UNDECIDED)
        outputs, failed = _measure(options, expected, topology)
    found = crosscheck.compare_outputs(
        replace(mine, points=_named(options, mine)),
        outputs,
        expected=expected,
        beyond=beyond,
        partial=options.partial,
        other_hosts=options.other_hosts,
    )
    codes = {crosscheck.FINDING: FOUND, crosscheck.AGREEMENT: DONE}
    code = codes.get(found.answer, UNDECIDED)
    if failed and code != FOUND:
        code = NOT_RUN
    if failed:
        complain(failed, code)
    return _tell(options, found, str(path), outputs, code) if outputs or not failed else code


def _given(options: argparse.Namespace) -> list[tuple[str | None, Path]]:
    """Return the collective, where it is named, and the file of each ``--output``.

    Raises:
        OptionError: options that do not go together, or a name that is none.
    """
    from pytest_gpucluster.analysis.crosscheck import require_allowed_arguments
    from pytest_gpucluster.analysis.nccl_tests import DTYPES, PROGRAMS
    from pytest_gpucluster.errors import OptionError
    from pytest_gpucluster.metrics.units import did_you_mean

    for option, names, known in (
        ("--collective", options.collective, PROGRAMS),
        ("--dtype", options.dtype, DTYPES),
    ):
        for name in names:
            if name not in known:
                raise OptionError(f"{option} {name!r} is none of {', '.join(known)}{did_you_mean(name, known)}")
    require_allowed_arguments(options.passed_on)
    if options.launcher is not None:
        try:
            words = shlex.split(options.launcher)
        except ValueError as error:
            raise OptionError(f"--launcher {options.launcher!r}: {error}") from None
        if not words:
            raise OptionError("--launcher is empty; write what starts the ranks, such as 'mpirun -np 16'")
    if not options.output:
        return []
    for option, value in (
        ("--binaries", options.binaries),
        ("-g", options.gpus),
        ("--launcher", options.launcher),
        ("--keep", options.keep),
        ("what stands after --", options.passed_on or None),
    ):
        if value is not None:
            raise OptionError(f"--output runs nothing: leave {option} out")
    found = []
    for text in options.output:
        name, separator, file = text.partition("=")
        is_named = bool(separator) and name in PROGRAMS
        found.append((name if is_named else None, Path(file if is_named else text)))
    return found


def _read(given: Sequence[tuple[str | None, Path]], mine: RunCollectives) -> tuple[tuple[Output, ...], str]:
    """Return what is in files of nccl-tests or SuperBench, and what is wrong with the first that cannot be read."""
    from pytest_gpucluster.analysis import nccl_tests, superbench
    from pytest_gpucluster.errors import OutputError

    outputs: list[Output] = []
    for collective, path in given:
        try:
            text = path.read_text(encoding="utf-8", errors="backslashreplace")
            is_json = text.lstrip().startswith("{")
            if is_json and superbench.is_summary(text):
                of_nodes = superbench.read(text, str(path), lambda host: _gpus_of(host, mine))
                outputs += [output for output in of_nodes if collective in (None, output.collective)]
                if not any(collective in (None, output.collective) for output in of_nodes):
                    raise OutputError(f"{path}: it has nothing of {collective}")
                continue
            output = (nccl_tests.read_json if is_json else nccl_tests.read_table)(text, str(path))
            if collective not in (None, output.collective) and output.collective is not None:
                raise OutputError(f"{path}: it is of {output.collective}, and --output calls it {collective}")
            if collective is None and output.collective is None:
                raise OutputError(f"{path}: it does not tell which collective it is of; write all_reduce={path}")
        except OSError as error:
            return tuple(outputs), f"{path}: cannot be read: {error.strerror or error}"
        except OutputError as error:
            return tuple(outputs), str(error)
        outputs.append(replace(output, collective=collective or output.collective))
    return tuple(outputs), ""


def _gpus_of(host: str, mine: RunCollectives) -> int:
    """Return the GPUs of a host of ours; of any other one, those of a node of ours, 0 where that is not known."""
    return len(mine.ranks_of.get(host, ())) or mine.per_node or 0


def _topology(options: argparse.Namespace, mine: RunCollectives) -> tuple[tuple[int, int], str]:
    """Return how many ranks on how many nodes nccl-tests is to have, and why there can be none."""
    if options.launcher is not None:
        return mine.largest or (0, 0), ""
    if options.gpus is not None:
        return (options.gpus, 1), ""
    per_node = mine.per_node
    if per_node is None:
        return (0, 0), "nothing was measured inside a node, so that several are needed: --launcher 'mpirun -np 16 ...'"
    return (per_node, 1), ""


def _named(options: argparse.Namespace, mine: RunCollectives) -> tuple[Point, ...]:
    return tuple(
        point
        for point in mine.points
        if point.collective in (options.collective or (point.collective,))
        and point.dtype in (options.dtype or (point.dtype,))
    )


def _points(options: argparse.Namespace, mine: RunCollectives, topology: tuple[int, int]) -> list[Point]:
    return [point for point in _named(options, mine) if (point.ranks, point.nnodes) == topology]


def _nothing(options: argparse.Namespace, mine: RunCollectives, topology: tuple[int, int]) -> str:
    kinds = dict.fromkeys((point.collective, point.dtype, point.ranks, point.nnodes) for point in mine.points)
    has = "; ".join(f"{name} {dtype} by {ranks} ranks on {nodes}" for name, dtype, ranks, nodes in list(kinds)[:6])
    asked = " ".join((*options.collective, *options.dtype)) or "collectives"
    return f"it has no {asked} by {topology[0]} ranks on {topology[1]} nodes, but {has}"


def _measure(
    options: argparse.Namespace, points: Sequence[Point], topology: tuple[int, int]
) -> tuple[tuple[Output, ...], str]:
    """Run nccl-tests for these points, until all is measured or something goes wrong; return also what."""
    from pytest_gpucluster.analysis import crosscheck, nccl_programs
    from pytest_gpucluster.errors import EnvironmentBroken, OutputError

    starts = list(crosscheck.program_runs(points))
    outputs: list[Output] = []
    try:
        mpi = options.launcher is not None
        found = {each.program: nccl_programs.find_program(each.program, options.binaries, mpi=mpi) for each in starts}
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        for number, each in enumerate(starts, start=1):
            print(
                printable(f"gpucluster: {number} of {len(starts)}: {each}, {each.range}"), file=sys.stderr, flush=True
            )
            outputs.append(_one(options, each, found[each.program], topology[0]))
    except (EnvironmentBroken, OutputError) as error:
        return tuple(outputs), str(error)
    except OSError as error:
        return tuple(outputs), f"--keep {options.keep}: {error.strerror or error}"
    except KeyboardInterrupt:
        return tuple(outputs), "interrupted; nccl-tests was ended"
    return tuple(outputs), ""


def _one(options: argparse.Namespace, asked: ProgramRun, program: Path, ranks: int) -> Output:
    """Run one program to its end, and return what it has told.

    Raises:
        EnvironmentBroken: it did not run, or ended badly without wrong data.
        OutputError: what it has told cannot be read, or is of something else.
        OSError: what it has printed cannot be kept.
    """
    from pytest_gpucluster.analysis import nccl_programs
    from pytest_gpucluster.errors import OutputError

    launcher = shlex.split(options.launcher) if options.launcher is not None else []
    gpus = options.gpus or (1 if launcher else ranks)
    command = [*launcher, str(program), *asked.arguments(gpus, options.passed_on)]
    # The file has the whole environment in it. On another node it would stay behind, so there the table has to do.
    with tempfile.TemporaryDirectory(prefix="gpucluster-crosscheck-") as folder:
        file = Path(folder, "output.json")
        with_file = not launcher and nccl_programs.writes_json(program)
        ended = nccl_programs.run_program(
            [*command, "-J", str(file)] if with_file else command, within_seconds=options.timeout
        )
        if options.keep is not None:
            write_text(str(options.keep / f"{asked.program}-{asked.dtype}-{asked.range.first}.txt"), ended.text)
        shown = shlex.join(command)
        if ended.code is None:
            raise ended.problem(shown)
        try:
            output = _told(file, ended.text, shown)
        except OutputError:
            if ended.code:
                raise ended.problem(shown) from None
            raise
    if ended.code and not output.wrong:
        raise ended.problem(shown)
    if output.collective not in (None, asked.collective):
        raise OutputError(f"`{shown}` measures {output.collective}, not {asked.collective}")
    return replace(output, collective=asked.collective)


def _told(file: Path, printed: str, shown: str) -> Output:
    """Return what the file says, or the table, which is less exact: a program may not be able to write a file.

    Raises:
        OutputError: neither can be read.
    """
    from pytest_gpucluster.analysis import nccl_tests
    from pytest_gpucluster.errors import OutputError

    if file.is_file():
        try:
            return nccl_tests.read_json(file.read_text(encoding="utf-8", errors="backslashreplace"), shown)
        except OutputError:
            # It writes no JSON for infinity, for one. The table is of the same run, and as strict.
            return nccl_tests.read_table(printed, shown)
    return nccl_tests.read_table(printed, shown)


def _tell(options: argparse.Namespace, found: Crosscheck, journal: str, outputs: tuple[Output, ...], code: int) -> int:
    from pytest_gpucluster.analysis import crosscheck

    try:
        if options.json is not None:
            write_text(
                options.json, crosscheck.crosscheck_document(found, journal=journal, outputs=outputs, exit_code=code)
            )
        if options.json != "-":
            write_text("-", crosscheck.crosscheck_table(found, shutil.get_terminal_size((80, 24)).columns))
    except BrokenPipeError:
        raise
    except OSError as error:
        return complain(f"{options.json}: {error.strerror or error}", NO_OUTPUT)
    return code


def _count(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
