"""``gpucluster runs``: compare two runs, merge several into one, show many as a fleet or over time, compare one with
nccl-tests."""

from __future__ import annotations

import argparse
import filecmp
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis import compare, compare_output, crosscheck, run_view
from pytest_gpucluster.analysis.fleet import drain_text, fleet, fleet_blocks, fleet_page, mixed, read_runs
from pytest_gpucluster.analysis.history import history, history_blocks
from pytest_gpucluster.analysis.merge import merge_journals
from pytest_gpucluster.analysis.merge_sources import load_source
from pytest_gpucluster.analysis.nccl_tests import PROGRAMS, Output, read_table
from pytest_gpucluster.analysis.output import as_page, as_text, fields_of
from pytest_gpucluster.analysis.run_view import RunView, without_samples
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.errors import LaunchError, OutputError
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal, encode, locate
from pytest_gpucluster.journal.verdict import marked
from pytest_gpucluster.runners.hosts import expand_nodes
from pytest_gpucluster.runners.run_result import conclusion
from pytest_gpucluster.text import one_line, paragraph, printable

_INDENT = 8
_UNREADABLE = 6
"""Exit code: an output of nccl-tests cannot be read."""
_CODES = {True: cli.DONE, False: cli.NEGATIVE, None: cli.UNDECIDED}
"""Whether a result is good, None for undecided -> exit code."""


@cli.command(
    cli.argument("old", "the baseline: a journal.jsonl, or the folder of a run", type=Path),
    cli.argument("new", "the run to compare with it", type=Path),
    cli.option("--fail PERCENT", "how much worse than the baseline a value may be", type=cli.percentage, default="3%"),
    cli.option("--partial", "values that only one run has are reported, but do not end with 5"),
    cli.option("--all", "show every metric, also unchanged ones"),
    cli.JSON,
    cli.HTML,
    help="changes from one run to another",
    examples="""\
                gpucluster runs compare reports/before-the-driver-update gpucluster-report/latest
                gpucluster runs compare old/journal.jsonl new/journal.jsonl --fail 5% --all
                gpucluster runs compare old/journal.jsonl new/journal.jsonl --partial --json - | jq .answer
                """,
    codes={
        **cli.UNREADABLE,
        cli.DONE: "no regression, and everything that decides was compared",
        cli.NEGATIVE: "a regression",
        cli.UNDECIDED: "undecided: the runs are not comparable (another SKU, a rehearsal and a run on GPUs, "
        "...), or there is no regression, but not everything could be compared",
    },
)
def _compare(options: argparse.Namespace) -> int:
    """Compare two runs, criterion by criterion and rank by rank.

    A value is a regression if it is worse than before beyond the noise of its samples, and by more than --fail. Values
    that only one run has, or that the noise hides, are reported, and the exit code is 5. docs/compare.md has the rules.
    """
    (old_path, old, old_journal), (new_path, new, new_journal) = _view(options.old), _view(options.new)
    if filecmp.cmp(old_path, new_path, shallow=False):
        raise cli.CommandError(cli.USAGE, f"{old_path} and {new_path} are the same run; name two runs")
    cli.require_distinct([("--json", options.json), ("--html", options.html)], [old_path, new_path])
    found = compare.compare_runs(old, new, allowed=options.fail, partial=options.partial)
    is_good = {compare.REGRESSION: False, compare.NO_REGRESSION: True}.get(found.answer)
    code = _CODES[is_good]
    described = [_describe(old_path, old_journal), _describe(new_path, new_journal)]
    blocks = list(compare_output.comparison_blocks(found, old_journal, new_journal, everything=options.all))
    heading = marked(found.answer, new_journal.run.kind)
    cli.write_outputs(
        lambda: "\n".join([*_head(described, cli.columns()), "", as_text(blocks, cli.columns())]),
        (
            "--json",
            options.json,
            lambda: compare_output.comparison_document(found, old=described[0], new=described[1], exit_code=code),
        ),
        ("--html", options.html, lambda: as_page(heading, blocks, is_good=is_good, reasons=[*_head(described, 1000)])),
    )
    return code


def _view(path: Path) -> tuple[Path, RunView, Journal]:
    """Return a run's journal file, its view for the comparison, and its journal without results."""
    path, journal = cli.read_journal(path, keep_samples=True, slim=without_samples)
    return path, RunView.of(journal), replace(journal, results=())


def _describe(path: Path, journal: Journal) -> dict[str, Any]:
    return {
        "journal": str(path),
        **fields_of(journal.run, "run_id", "started_at", "kind", "world_size", "nnodes"),
        **fields_of(journal, "verdict", "sku"),
    }


def _head(described: list[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield the lines that say which runs are compared."""
    for when, run in zip(("before", "now"), described, strict=True):
        shape = run_view.Conditions(world_size=run["world_size"], nnodes=run["nnodes"]).shape
        sku = f"{run['sku'] or 'SKU unknown'}, {shape}"
        text = one_line(f"{run['started_at'][:19]}, {marked(run['verdict'], run['kind'])}, {sku}", 300)
        # The path is not wrapped: for copying.
        yield from paragraph(text, width, first=f"{when}:".ljust(_INDENT), rest=" " * _INDENT)
        yield " " * _INDENT + printable(run["journal"])


@cli.command(
    cli.argument("journals", cli.JOURNAL_HELP, metavar="JOURNAL", type=Path, nargs="+"),
    cli.option(
        "--out PATH",
        "the merged journal: a folder, for its journal.jsonl, or a file whose name ends in .jsonl; never replaced",
        type=Path,
        required=True,
    ),
    help="one journal, with one verdict, of several runs of one cluster",
    examples="""\
                gpucluster runs merge gpucluster-report/20260102-030405 gpucluster-report/latest --out merged/
                gpucluster runs merge first/journal.jsonl rerun/journal.jsonl --out merged.jsonl
                gpucluster verdict merged.jsonl
                """,
    codes={
        cli.DONE: "merged, whatever the verdict: `gpucluster verdict` ends with its exit code",
        cli.USAGE: "wrong usage; also: the runs are not in order, or not of one cluster and one set of limits",
        cli.NO_INPUT: "a journal is missing, damaged, of another program, of a newer version, or of a run in progress",
        cli.NO_OUTPUT: "the merged journal cannot be written",
    },
)
def _merge(options: argparse.Namespace) -> int:
    """Merge the journals of several runs of one cluster into one journal with one verdict: a run that broke and the
    rerun of the rest, or a failure and its rerun with -k.

    Name them in the order in which they ran: the newest result of each criterion counts, and every attempt stays
    visible. Refused are runs whose clocks contradict the order, and runs of other hosts or GPUs, with other limits or
    another workload.
    """
    out: Path = options.out
    if out.suffix != ".jsonl" or out.is_dir():
        out = out / JOURNAL_FILE
    if len(options.journals) < 2:
        raise cli.CommandError(cli.USAGE, "one journal cannot be merged; name two or more")
    if out.exists():
        raise cli.CommandError(
            cli.USAGE, f"--out {out}: the file exists, and a journal is never replaced; name another one"
        )
    sources = [load_source(locate(path)) for path in options.journals]
    merged = merge_journals(sources)
    for source in sources:
        if source.journal.cut:
            cli.complain(f"{source.path}: its last line is truncated and left out", cli.DONE)
    with cli.file_errors(cli.NO_OUTPUT, f"--out {out}"):
        atomic_write(out, "".join(encode(line).decode() for line in merged.lines()))
    verdict, kind = merged.verdict, sources[0].journal.run.kind
    line = conclusion(verdict.word, verdict.exit, verdict.reason, kind=kind).line
    print(f"gpucluster: {printable(line)}")
    return cli.complain(f"{len(sources)} runs merged: {out}", cli.DONE)


@cli.command(
    cli.JOURNALS,
    cli.EXPECTED,
    cli.option("--behind PERCENT", "how far an outlier is behind the median", type=cli.percentage, default="3%"),
    cli.option("--drain FILE", "write the nodes to drain; - for standard output"),
    cli.HTML,
    help="the runs of many nodes as one matrix: outliers, nodes to drain",
    examples="""\
                gpucluster runs fleet gpucluster-sweep/20260102-030405
                gpucluster runs fleet node-a/journal.jsonl node-b/journal.jsonl node-c/journal.jsonl --html fleet.html
                gpucluster runs fleet gpucluster-sweep/latest --nodes 'gpu-[001-064]' --drain drain.txt
                """,
    codes={
        cli.DONE: "every node is good",
        cli.NEGATIVE: "a node should be drained",
        cli.NO_INPUT: "a journal is missing, damaged, of another program, or of a newer version; or a folder has none",
        cli.UNDECIDED: "no node should be drained, but one gave no answer; or the runs are no fleet",
    },
)
def _fleet(options: argparse.Namespace) -> int:
    """Show the runs of many nodes, each of which ran the suite alone, as one matrix of nodes and criteria.

    GPUs that passed their limits but are far behind the same GPUs of the other nodes are listed. The drain list has the
    nodes that were rejected or are behind. A node without an answer never counts as good.
    """
    expected = expand_nodes("--nodes", options.nodes) if options.nodes is not None else []
    runs, unreadable = read_runs(options.paths)
    cli.require_distinct([("--drain", options.drain), ("--html", options.html)], [run.path for run in runs])
    found = fleet(runs, expected=expected, unreadable=unreadable, behind=options.behind)
    why_not = mixed(node.run for node in found.nodes)
    if why_not or not found.nodes:
        why_not = why_not or "none of these runs was on one node alone; see gpucluster sweep"
        return cli.complain(why_not, cli.UNDECIDED)
    drain_file = "FILE" if options.drain in (None, *cli.STDOUT) else shlex.quote(options.drain)
    try:
        cli.write_outputs(
            lambda: as_text(fleet_blocks(found), cli.columns()),
            ("--drain", options.drain, lambda: drain_text(found, file=drain_file)),
            ("--html", options.html, lambda: fleet_page(found)),
        )
    except LaunchError as error:
        raise cli.CommandError(cli.NO_OUTPUT, f"--drain {options.drain}: {error}") from error
    return _CODES[found.is_good]


@cli.command(
    cli.JOURNALS,
    cli.HTML,
    help="the runs of one cluster over time: GPUs that fail again and again",
    examples="""\
                gpucluster runs history gpucluster-report
                gpucluster runs history gpucluster-report --html history.html
                """,
    codes={
        cli.DONE: "no GPU has failed in more than one run",
        cli.NEGATIVE: "a GPU has failed in several runs",
        cli.NO_INPUT: "a journal is missing, damaged, of another program, or of a newer version; or a folder has none",
        cli.UNDECIDED: "no GPU has, as far as known: a journal cannot be read; or no history: runs on GPUs, rehearsals "
        "and simulated clusters together",
    },
)
def _history(options: argparse.Namespace) -> int:
    """Show in which runs each GPU of a cluster has failed, and how far it was behind the median of all.

    A GPU is known by its UUID. The page also has the GPUs that have not failed, and the course of those that have.
    """
    runs, unreadable = read_runs(options.paths)
    cli.require_distinct([("--html", options.html)], [run.path for run in runs])
    found = history(runs, unreadable=unreadable)
    if (why_not := mixed(runs)) or not runs:
        return cli.complain(why_not or f"no journal can be read: {unreadable[0][1]}", cli.UNDECIDED)
    blocks, heading = list(history_blocks(found)), marked("History", runs[0].journal.run.kind)
    cli.write_outputs(
        lambda: as_text(blocks, cli.columns()),
        ("--html", options.html, lambda: as_page(heading, blocks, is_good=found.is_good, reasons=[found.summary])),
    )
    return _CODES[found.is_good]


@cli.command(
    cli.JOURNAL,
    cli.option("--output [COLLECTIVE=]FILE", "what nccl-tests has printed", action="append"),
    cli.option("--beyond PERCENT", "how much the two may differ", type=cli.percentage, default="5%"),
    cli.option("--partial", "sizes that only one of them has are reported, but do not end with 5"),
    cli.option("--other-hosts", "compare even if host names differ, as with pods"),
    help="the collectives of a run compared with nccl-tests",
    examples="""\
                gpucluster runs crosscheck gpucluster-report/latest > nccl-tests.sh
                gpucluster runs crosscheck gpucluster-report/latest --output all_reduce-bf16-8-1GB.txt --partial
                gpucluster runs crosscheck gpucluster-report/latest --output all_reduce=out.txt
                """,
    codes={
        **cli.UNREADABLE,
        cli.DONE: "every size was compared, and none differs by more than --beyond",
        cli.NEGATIVE: "a finding: a difference, or wrong data",
        cli.UNDECIDED: "no finding, but not everything could be compared; also: only the commands were printed",
        _UNREADABLE: "an output of nccl-tests cannot be read",
    },
)
def _crosscheck(options: argparse.Namespace) -> int:
    """Compare busbw of a run of this suite with that of nccl-tests at each size.

    A difference beyond --beyond is a finding, whichever is faster; so are wrong data. Without --output the commands of
    nccl-tests are printed that measure the sizes, dtypes and numbers of GPUs of the run: run them on its nodes, and
    name the files with what they have printed. docs/compare.md has the rules.
    """
    path, journal = cli.read_journal(options.journal)
    ours = crosscheck.collectives_of(journal)
    if ours.why_not:
        return cli.complain(f"{path}: nothing can be compared: {ours.why_not}", cli.UNDECIDED)
    if not options.output:
        print("\n".join(crosscheck.program_commands(ours.points)))
        return cli.complain(
            "nothing is compared yet: run these on the nodes of the run, and give --output", cli.UNDECIDED
        )
    outputs = [_read_output(text) for text in options.output]
    found = crosscheck.compare_outputs(
        ours, outputs, beyond=options.beyond, partial=options.partial, other_hosts=options.other_hosts
    )
    code = {crosscheck.FINDING: cli.NEGATIVE, crosscheck.AGREEMENT: cli.DONE}.get(found.answer, cli.UNDECIDED)
    cli.write_text("-", as_text(crosscheck.crosscheck_blocks(found), cli.columns()))
    return code


def _read_output(text: str) -> Output:
    """Return the output in a file of ``--output``, with its collective."""
    name, _, file = text.partition("=")
    named, path = (name, Path(file)) if name in PROGRAMS and file else (None, Path(text))
    try:
        with cli.file_errors(_UNREADABLE, str(path)):
            output = read_table(path.read_text(encoding="utf-8", errors="backslashreplace"), str(path))
    except OutputError as error:
        raise cli.CommandError(_UNREADABLE, str(error)) from None
    collective = output.collective or named
    if collective is None or named not in (None, collective):
        what = f"results of {collective}, but --output names {named}" if collective else "its collective is unknown"
        raise cli.CommandError(_UNREADABLE, f"{path}: {what}; write COLLECTIVE={path}")
    return replace(output, collective=collective)


COMMAND = cli.Group(
    description="Work with the journals of runs.",
    commands={"compare": _compare, "merge": _merge, "fleet": _fleet, "history": _history, "crosscheck": _crosscheck},
)
