"""``gpucluster runs crosscheck``: the collectives of a run compared with nccl-tests on the same GPUs and sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.analysis import crosscheck
from pytest_gpucluster.analysis.nccl_tests import DTYPES, PROGRAMS, Output, read_table
from pytest_gpucluster.cli.command import (
    DONE,
    NEGATIVE,
    NO_INPUT,
    NO_OUTPUT,
    UNDECIDED,
    USAGE,
    Command,
    add_journal,
    add_json,
    add_option,
    columns,
    complain,
    exit_codes,
    percentage,
    read_journal,
    require_other_file,
    write_json_or_table,
)
from pytest_gpucluster.errors import OptionError, OutputError
from pytest_gpucluster.metrics.units import did_you_mean

UNREADABLE = 6


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_journal(parser)
    add_option(parser, "--output [COLLECTIVE=]FILE", "what nccl-tests has printed", action="append")
    add_option(parser, "--collective NAME", "only this one", action="append")
    add_option(parser, "--dtype NAME", "only this one", action="append")
    add_option(parser, "--beyond PERCENT", "how much the two may differ", type=percentage, default="5%")
    add_option(parser, "--partial", "sizes that only one of them has are reported, but do not end with 5")
    add_option(parser, "--other-hosts", "compare even if host names differ, as with pods")
    add_json(parser)


def _crosscheck(options: argparse.Namespace) -> int:
    """Compare busbw of a run of this suite with that of nccl-tests at each size.

    A difference beyond --beyond is a finding, whichever is faster; so are wrong data. Without --output the commands of
    nccl-tests are printed that measure the sizes, dtypes and numbers of GPUs of the run: run them on its nodes, and
    name the files with what they have printed. docs/compare.md has the rules.
    """
    for option, names, known in (
        ("--collective", options.collective, PROGRAMS),
        ("--dtype", options.dtype, DTYPES),
    ):
        for name in names:
            if name not in known:
                raise OptionError(f"{option} {name!r} is none of {', '.join(known)}{did_you_mean(name, known)}")
    path, journal = read_journal(options.journal)
    ours = crosscheck.collectives_of(journal)
    require_other_file("--json", options.json, [path], "the journal itself")
    points = tuple(
        point
        for point in ours.points
        if point.collective in (options.collective or (point.collective,))
        and point.dtype in (options.dtype or (point.dtype,))
    )
    selected = " ".join((*options.collective, *options.dtype)) or "a collective"
    obstacle = ours.why_not or ("" if points else f"no busbw of {selected} was measured in this run")
    if obstacle:
        return complain(f"{path}: nothing can be compared: {obstacle}", UNDECIDED)
    if not options.output:
        print("\n".join(crosscheck.program_commands(points)))
        return complain("nothing is compared yet: run these on the nodes of the run, and give --output", UNDECIDED)
    outputs, failure = _read(options.output)
    found = crosscheck.compare_outputs(
        replace(ours, points=points),
        outputs,
        beyond=options.beyond,
        partial=options.partial,
        other_hosts=options.other_hosts,
    )
    code = {crosscheck.FINDING: NEGATIVE, crosscheck.AGREEMENT: DONE}.get(found.answer, UNDECIDED)
    if failure:
        code = code if code == NEGATIVE else UNREADABLE
        complain(failure, code)
    if outputs or not failure:
        write_json_or_table(
            options.json,
            lambda: crosscheck.crosscheck_document(found, journal=str(path), outputs=outputs, exit_code=code),
            lambda: crosscheck.crosscheck_table(found, columns()),
        )
    return code


def _read(texts: Sequence[str]) -> tuple[tuple[Output, ...], str]:
    """Return the outputs in the files of ``--output``, and the problem of the first unreadable one."""
    outputs: list[Output] = []
    for text in texts:
        name, separator, file = text.partition("=")
        is_named = bool(separator) and name in PROGRAMS
        collective, path = (name, Path(file)) if is_named else (None, Path(text))
        try:
            output = read_table(path.read_text(encoding="utf-8", errors="backslashreplace"), str(path))
            if collective not in (None, output.collective) and output.collective is not None:
                raise OutputError(f"{path}: results of {output.collective}, but --output names {collective}")
            if collective is None and output.collective is None:
                raise OutputError(f"{path}: its collective is unknown; write all_reduce={path}")
        except OSError as error:
            return tuple(outputs), f"{path}: cannot be read: {error.strerror or error}"
        except OutputError as error:
            return tuple(outputs), str(error)
        outputs.append(replace(output, collective=collective or output.collective))
    return tuple(outputs), ""


COMMAND = Command(
    run=_crosscheck,
    help="the collectives of a run compared with nccl-tests",
    arguments=_arguments,
    examples="""\
        gpucluster runs crosscheck gpucluster-report/latest --collective all_reduce > nccl-tests.sh
        gpucluster runs crosscheck gpucluster-report/latest --output all_reduce-bf16-8-1.txt --partial
        gpucluster runs crosscheck gpucluster-report/latest --output all_reduce=out.txt --json -
        """,
    codes=exit_codes(
        {
            DONE: "every size was compared, and none differs by more than --beyond",
            NEGATIVE: "a finding: a difference, or wrong data",
            UNDECIDED: "no finding, but not everything could be compared; also: only the commands were printed",
            UNREADABLE: "an output of nccl-tests cannot be read",
        },
        common=(USAGE, NO_INPUT, NO_OUTPUT),
    ),
)
