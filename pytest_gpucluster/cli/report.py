"""``gpucluster report``: the reports of a run, re-rendered from its journal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.verdict import marked
from pytest_gpucluster.reports.registry import FILES, existing_files, render
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line

_KINDS = {
    "junitxml": "the JUnit file, for CI systems",
    "html": "one page that needs no network",
    "json": "results.json; its schema is docs/results.schema.json",
    "prometheus": "metrics for node_exporter's textfile collector; name the file *.prom",
    "markdown": "for a pull request or the summary of a GitHub step, below 65,000 bytes",
}


@cli.command(
    cli.JOURNAL,
    *(cli.option(f"--{kind} OUT", what) for kind, what in _KINDS.items()),
    cli.option("--text OUT", "text (default OUT: standard output)", nargs="?", const="-"),
    cli.option("--all DIR", f"all of them in a folder: {', '.join(FILES.values())}"),
    lambda parser: parser.add_argument("-v", "--verbose", action="count", default=0, help="text: every measurement"),
    lambda parser: parser.add_argument("-q", "--quiet", action="count", default=0, help="text: only problems"),
    examples="""\
        gpucluster report gpucluster-report/latest
        gpucluster report gpucluster-report/latest --junitxml report.xml
        gpucluster report gpucluster-report/latest --html run.html --json - | jq .verdict
        gpucluster report gpucluster-report/latest --markdown - >> "$GITHUB_STEP_SUMMARY"
        gpucluster report gpucluster-report/latest --prometheus /var/lib/node_exporter/gpucluster.prom
        gpucluster report gpucluster-report/20260102-030405/journal.jsonl --junitxml -
        """,
    codes={
        **cli.UNREADABLE,
        cli.DONE: "done, whatever the verdict of the run",
        cli.NO_OUTPUT: "an output cannot be rendered or written",
    },
)
def _report(options: argparse.Namespace) -> int:
    """Re-render the reports of a run from its journal, at any time and on any machine.

    The journal of a run that was killed is rendered as far as it goes, with an error for the test in which the run
    ended. Several formats can be written at once; the default is text on standard output. OUT is a file, or - for
    standard output.
    """
    requested = [(kind, out) for kind in FILES if (out := getattr(options, kind)) is not None]
    if options.all is not None:
        requested += [(kind, os.path.join(options.all, name) if options.all else "") for kind, name in FILES.items()]
    requested = requested or [("text", "-")]
    path, journal = cli.read_journal(options.journal)
    cli.require_distinct([(f"--{kind}", out) for kind, out in requested], [path], "the journal itself")
    code, written = cli.DONE, []
    for kind, out in requested:
        try:
            document = _render(kind, out, journal, path.parent, options)
        except Exception as error:  # the other reports are rendered all the same
            code = cli.complain(f"--{kind} {out}: cannot be rendered: {type(error).__name__}: {error}", cli.NO_OUTPUT)
            continue
        try:
            cli.write_text(out, document, f"--{kind}")
        except cli.CommandError as error:
            code = cli.complain(str(error), error.code)
            continue
        if not (kind == "text" and out in cli.STDOUT):  # which includes the headline
            written.append("the standard output" if out in cli.STDOUT else out)
    if written:
        reason = one_line(journal.reason, MESSAGE_CHARACTERS)
        headline = f"{marked(journal.verdict, journal.run.kind)}{f' ({reason})' if reason else ''}"
        cli.complain(f"{headline}: {', '.join(written)}", cli.DONE)
    return code


def _render(kind: str, out: str, journal: Journal, folder: Path, options: argparse.Namespace) -> str:
    if kind == "text":
        from pytest_gpucluster.reports import terminal

        is_terminal = out in cli.STDOUT and sys.stdout.isatty()
        return terminal.render(
            journal,
            width=cli.columns(),
            verbosity=options.verbose - options.quiet,
            colour=is_terminal and "NO_COLOR" not in os.environ,
            # A text in a file must not name paths of this machine.
            reports=existing_files(folder) if out in cli.STDOUT else (),
        )
    page_folder = None if out in cli.STDOUT else Path(os.path.realpath(out)).parent
    return render(kind, journal, folder=folder, page_folder=page_folder)


COMMAND = _report
