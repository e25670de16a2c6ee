"""``gpucluster report``: the reports of a run, rendered again from its journal."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.commands.command import (
    DONE,
    NO_JOURNAL,
    NO_OUTPUT,
    USAGE,
    JournalError,
    add_journal,
    complain,
    explain,
    read_journal,
)
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal import JUnitOptions
from pytest_gpucluster.wording import visible

_REPORT = """\
Render the reports of a run again from its journal, at any time and on any machine. A journal of a run that
was killed is rendered as far as it goes, with an error for the test in which the run ended.
"""

_EXAMPLES = """\
  gpucluster report gpucluster-report/latest --junitxml report.xml
  gpucluster report gpucluster-report/20260102-030405/journal.jsonl --junitxml - -o junit_family=xunit1
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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    explain(parser, _REPORT, _EXAMPLES)
    add_journal(parser)
    parser.add_argument(
        "--junitxml", metavar="OUT", required=True, help="write the JUnit file here; - is the standard output"
    )
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
    # Imported here, so that --version and --help answer at once.
    from pytest_gpucluster.reports import junit

    try:
        path, journal = read_journal(options.journal)
        junit_options = _overridden(journal.run.junit, options.overrides)
    except JournalError as error:
        return complain(str(error), NO_JOURNAL)
    except OptionError as error:
        return complain(str(error), USAGE)
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
                return complain(f"--junitxml {out}: that is the journal itself; name another file", USAGE)
            junit.write(out, document)
    except OSError as error:
        return complain(f"--junitxml {options.junitxml}: {error.strerror or error}", NO_OUTPUT)
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
