"""``gpucluster report``: the reports of a run, rendered again from its journal."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.cli.command import (
    DONE,
    NO_JOURNAL,
    NO_OUTPUT,
    STDOUT,
    USAGE,
    add_journal,
    complain,
    explain,
    read_journal,
    write_text,
)
from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import JUnitOptions
from pytest_gpucluster.reports.registry import FILES, existing_files, render
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line, printable

_REPORT = """\
Render the reports of a run again from its journal, at any time and on any machine. A journal of a run that
was killed is rendered as far as it goes, with an error for the test in which the run ended. Several formats
can be asked for at once; without any, the run is told as text. OUT is a file, or - for the standard output.
"""

_EXAMPLES = """\
  gpucluster report gpucluster-report/latest
  gpucluster report gpucluster-report/latest --junitxml report.xml
  gpucluster report gpucluster-report/latest --html run.html --json - | jq .verdict
  gpucluster report gpucluster-report/latest --markdown - >> "$GITHUB_STEP_SUMMARY"
  gpucluster report gpucluster-report/latest --prometheus /var/lib/node_exporter/gpucluster.prom
  gpucluster report gpucluster-report/20260102-030405/journal.jsonl --junitxml - -o junit_family=xunit1
"""

_EXIT_CODES = """\
exit codes:
  0  done (whatever the verdict of the run)
  2  wrong usage
  3  the journal is missing, damaged, no journal, or of a newer version
  4  an output cannot be rendered or written; the others are there
"""

_KINDS = {
    "junitxml": "the JUnit file, for CI systems",
    "html": "one page that opens anywhere, also without a network",
    "json": "results.json, whose schema is docs/results.schema.json",
    "prometheus": "metrics for node_exporter's textfile collector; name the file *.prom",
    "markdown": "for a pull request or the summary of a GitHub step, below 65,000 bytes",
}

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    explain(parser, _REPORT, _EXAMPLES, _EXIT_CODES)
    add_journal(parser)
    for kind, what in _KINDS.items():
        parser.add_argument(f"--{kind}", metavar="OUT", help=what)
    parser.add_argument(
        "--text", metavar="OUT", nargs="?", const="-", help="the run as text; the standard output is the default"
    )
    parser.add_argument("--all", metavar="DIR", help=f"all of them into a folder: {', '.join(FILES.values())}")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="as text: every measurement")
    parser.add_argument("-q", "--quiet", action="count", default=0, help="as text: only what is wrong")
    parser.add_argument("--junitprefix", metavar="STR", help="prepend a prefix to classnames, as pytest does")
    parser.add_argument(
        "-o",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="one of pytest's settings instead of the run's own: " + ", ".join(_SETTINGS),
    )


def run(options: argparse.Namespace) -> int:
    """Render a run's reports and return the exit code."""
    wanted = _wanted(options)
    try:
        path, journal = read_journal(options.journal)
        junit_options = _overridden(journal.run.junit, options.overrides)
        _refuse_conflicts(wanted, path)
    except JournalError as error:
        return complain(str(error), NO_JOURNAL)
    except OptionError as error:
        return complain(str(error), USAGE)
    if options.junitprefix is not None:
        junit_options = replace(junit_options, prefix=options.junitprefix)
    code, written = DONE, []
    for kind, out in wanted:
        named = f"--{kind} {out}"
        try:
            document = _rendered(kind, out, journal, path.parent, junit_options, options)
        except Exception as error:  # whatever one report trips over, the others are made
            code = complain(f"{named}: cannot be rendered: {type(error).__name__}: {error}", NO_OUTPUT)
            continue
        try:
            write_text(out, document)
        except BrokenPipeError:
            raise  # who reads has had enough, which the command line knows how to take
        except OSError as error:
            code = complain(f"{named}: {error.strerror or error}", NO_OUTPUT)
            continue
        if not (kind == "text" and out in STDOUT):  # which says all of that itself
            written.append("the standard output" if out in STDOUT else out)
    if written:
        print(f"gpucluster: {_headline(journal)}: {printable(', '.join(written))}", file=sys.stderr)
    return code


def _wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return each kind of report that is asked for, and where it goes."""
    wanted = [(kind, out) for kind in FILES if (out := getattr(options, kind)) is not None]
    if options.all is not None:
        wanted += [(kind, os.path.join(options.all, name) if options.all else "") for kind, name in FILES.items()]
    return wanted or [("text", "-")]


def _refuse_conflicts(wanted: Sequence[tuple[str, str]], journal: Path) -> None:
    """Refuse outputs that would replace the journal or each other.

    Raises:
        OptionError: names both.
    """
    seen: dict[str, str] = {}
    for kind, out in wanted:
        if not out:
            raise OptionError(f"--{kind}: nothing is named to write it to; an empty variable?")
        place = STDOUT[0] if out in STDOUT else os.path.realpath(out)
        if place == os.path.realpath(journal):
            raise OptionError(f"--{kind} {out}: that is the journal itself; name another file")
        if place in seen:
            raise OptionError(f"--{kind} {out}: --{seen[place]} goes there already; name another file")
        seen[place] = kind


def _rendered(
    kind: str, out: str, journal: Journal, folder: Path, junit_options: JUnitOptions, options: argparse.Namespace
) -> str:
    if kind == "text":
        from pytest_gpucluster.reports import terminal

        is_terminal = out in STDOUT and sys.stdout.isatty()
        return terminal.render(
            journal,
            width=shutil.get_terminal_size().columns if is_terminal else _columns(),
            verbosity=options.verbose - options.quiet,
            colour=is_terminal and "NO_COLOR" not in os.environ,
            # A text that is kept elsewhere says nothing of where this machine had them.
            reports=existing_files(folder) if out in STDOUT else (),
        )
    page_folder = None if out in STDOUT else Path(os.path.realpath(out)).parent
    return render(kind, journal, folder=folder, page_folder=page_folder, junit_options=junit_options)


def _columns() -> int:
    """Return the width of a text for a file or a pipe."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isascii() and asked.isdigit() else 80


def _headline(journal: Journal) -> str:
    rehearsal = "REHEARSAL, " if journal.run.rehearsal else ""
    reason = one_line(journal.reason, MESSAGE_CHARACTERS)
    return printable(f"{rehearsal}{journal.verdict}{f' ({reason})' if reason else ''}")


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
