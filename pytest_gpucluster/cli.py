"""The command ``gpucluster``: a run after its end, and runs on many nodes; without torch and without pytest."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster import __version__
from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.journal import JUnitOptions, locate, read
from pytest_gpucluster.wording import visible

DONE, USAGE, NO_JOURNAL, NO_OUTPUT = 0, 2, 3, 4

_EXIT_CODES = """\
exit codes:
  0  done (whatever the verdict of the run)
  2  wrong usage
  3  the journal is missing, damaged, no journal, or of a newer version; so is a curve, or curves are not alike; the
     rows, the model or the adapter cannot be used
  4  the output cannot be written
`gpucluster verdict` ends with the run's own exit code, and `gpucluster sweep` with the sweep's: see their --help.
"""

_EXAMPLES = """\
examples:
  gpucluster report gpucluster-report/latest --junitxml report.xml
  gpucluster report gpucluster-report/20260102-030405/journal.jsonl --junitxml - -o junit_family=xunit1
  gpucluster verdict gpucluster-report/latest
  gpucluster golden run-1/curve.csv gpucluster-report/latest --out golden.json
"""

_REPORT = """\
Render the reports of a run again from its journal, at any time and on any machine. A journal of a run that
was killed is rendered as far as it goes, with an error for the test in which the run ended.
"""

_GOLDEN = """\
Make a golden loss curve of one or more runs of the same experiment, for --gpucluster-golden. Of a journal or a folder
of a run the curve among its artifacts is taken, if its test passed; of a report directory the latest run's.
"""

_CHOICES = {
    "junit_family": ("xunit2", "xunit1", "legacy"),
    "junit_logging": ("no", "log", "system-out", "system-err", "out-err", "all"),
    "junit_duration_report": ("total", "call"),
}
_FLAGS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_SETTINGS = (*_CHOICES, "junit_log_passing_tests", "junit_suite_name")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    from pytest_gpucluster import sweep_command  # imports nothing heavy until it runs

    parser = _parser()
    own, for_pytest = sweep_command.split(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own)
    if options.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if options.command == "golden":
        # Imported here, so that the other commands need none of it.
        from pytest_gpucluster import golden_command

        return golden_command.run(options.curves, options.out, options.test)
    if options.command == "data":
        from pytest_gpucluster import data_command

        return data_command.run(options)
    if options.command == "sweep":
        return sweep_command.run(options, for_pytest)
    if options.command == "verdict":
        from pytest_gpucluster import verdict_command

        return verdict_command.run(options)
    return _report(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpucluster",
        description="Work with the runs of pytest-gpucluster, and start them on many nodes.",
        epilog=_EXAMPLES + "\n" + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytest-gpucluster {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="render the reports of a run again from its journal",
        description=_REPORT,
        epilog=_EXAMPLES + "\n" + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument(
        "journal",
        metavar="JOURNAL",
        type=Path,
        help="a journal.jsonl, the folder of a run, or a report directory (its latest run)",
    )
    report.add_argument(
        "--junitxml", metavar="OUT", required=True, help="write the JUnit file here; - is the standard output"
    )
    report.add_argument("--junitprefix", metavar="STR", help="prepend a prefix to classnames, as pytest does")
    report.add_argument(
        "-o",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="one of pytest's settings instead of the run's own: " + ", ".join(_SETTINGS),
    )
    golden = commands.add_parser(
        "golden",
        help="make a golden loss curve of one or more runs",
        description=_GOLDEN,
        epilog=_EXAMPLES + "\n" + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    golden.add_argument(
        "curves",
        metavar="CURVE.csv|JOURNAL",
        type=Path,
        nargs="+",
        help="the CSV file of a curve, a journal.jsonl, the folder of a run, or a report directory (its latest run)",
    )
    golden.add_argument("--out", metavar="FILE", type=Path, required=True, help="write the golden curve here")
    golden.add_argument(
        "--test", metavar="TEXT", default="", help="of a run, the curve of the test with this in its id, as lora_tiny"
    )
    from pytest_gpucluster import data_command, sweep_command, verdict_command  # import nothing heavy until they run

    data_command.add_parser(commands)
    verdict_command.add_parser(commands)
    sweep_command.add_parser(commands)
    return parser


def _report(options: argparse.Namespace) -> int:
    # Imported here, so that --version and --help answer at once.
    from pytest_gpucluster.reports import junit

    try:
        path = locate(options.journal)
        journal = read(path, keep_samples=False)
        junit_options = _overridden(journal.run.junit, options.overrides)
    except JournalError as error:
        return _complain(str(error), NO_JOURNAL)
    except OptionError as error:
        return _complain(str(error), USAGE)
    if options.junitprefix is not None:
        junit_options = replace(junit_options, prefix=options.junitprefix)
    document = junit.render(journal, junit_options)
    try:
        if options.junitxml == "-":
            sys.stdout.buffer.write(document.encode("utf-8", "backslashreplace"))
            sys.stdout.flush()
        else:
            out = Path(options.junitxml)
            if os.path.realpath(out) == os.path.realpath(path):
                return _complain(f"--junitxml {out}: that is the journal itself; name another file", USAGE)
            junit.write(out, document)
    except OSError as error:
        return _complain(f"--junitxml {options.junitxml}: {error.strerror or error}", NO_OUTPUT)
    if journal.cut:
        print(f"gpucluster: {path}: its last line is cut off and left out", file=sys.stderr)
    rehearsal = "REHEARSAL, " if journal.run.rehearsal else ""
    reason = visible(f" ({journal.reason})" if journal.reason else "")
    print(f"gpucluster: {rehearsal}{journal.verdict}{reason}: {options.junitxml}", file=sys.stderr)
    return DONE


def _overridden(options: JUnitOptions, overrides: Sequence[str]) -> JUnitOptions:
    """Apply ``-o`` settings in pytest's names.

    Raises:
        OptionError: no such setting, or a value that is not allowed.
    """
    for override in overrides:
        name, equals, value = override.partition("=")
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, _SETTINGS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise OptionError(f"-o {override}: no setting {name!r}; allowed: {', '.join(_SETTINGS)}{hint}")
        if not equals:
            raise OptionError(f"-o {override}: no value; write {name}=VALUE")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise OptionError(f"-o {override}: {value!r} is not allowed; allowed: {', '.join(_CHOICES[name])}")
        if name == "junit_log_passing_tests":
            if value.lower() not in _FLAGS:
                raise OptionError(f"-o {override}: {value!r} is not allowed; allowed: true, false")
            options = replace(options, log_passing=_FLAGS[value.lower()])
        elif name == "junit_family":
            options = replace(options, family=value)
        elif name == "junit_logging":
            options = replace(options, logging=value)
        elif name == "junit_duration_report":
            options = replace(options, duration_report=value)
        else:
            options = replace(options, suite_name=value)
    return options


def _complain(message: str, code: int) -> int:
    print(f"gpucluster: {message}", file=sys.stderr)
    return code
