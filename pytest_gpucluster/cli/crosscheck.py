"""``gpucluster runs crosscheck``: the collectives of a run compared with nccl-tests on the same GPUs and sizes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster import files
from pytest_gpucluster.analysis import crosscheck, nccl_tests
from pytest_gpucluster.analysis.crosscheck import Point, ProgramRun, RunCollectives, require_allowed_arguments
from pytest_gpucluster.analysis.nccl_tests import DTYPES, PROGRAMS, Output
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
    number,
    percentage,
    read_journal,
    require_other_file,
    whole_number,
    write_json_or_table,
)
from pytest_gpucluster.errors import EnvironmentBroken, OptionError, OutputError
from pytest_gpucluster.metrics.units import did_you_mean

NOT_RUN = 6


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_journal(parser)
    add_option(
        parser, "--binaries DIR", "folder of all_reduce_perf (default: the PATH, /opt/nccl-tests/build)", type=Path
    )
    add_option(
        parser,
        "-g N",
        "GPUs of each process (default: those of the run on a node; 1 with --launcher)",
        dest="gpus",
        type=whole_number(),
    )
    add_option(parser, "--launcher COMMAND", "what starts the program on several nodes: 'mpirun -np 16 ...'")
    add_option(
        parser,
        "--output [COLLECTIVE=]FILE",
        "run nothing, and read what nccl-tests has printed",
        action="append",
    )
    add_option(parser, "--collective NAME", "only this one", action="append")
    add_option(parser, "--dtype NAME", "only this one", action="append")
    add_option(parser, "--beyond PERCENT", "how much the two may differ", type=percentage, default="5%")
    add_option(parser, "--partial", "sizes that only one of them has are reported, but do not end with 5")
    add_option(parser, "--other-hosts", "compare even if host names differ, as with pods")
    add_option(
        parser,
        "--timeout SECONDS",
        "deadline for one start of nccl-tests",
        type=number(0.001, 1000000000.0),
        default=600.0,
    )
    add_option(parser, "--keep DIR", "save the output of nccl-tests in this folder", type=Path)
    add_json(parser)


def _crosscheck(options: argparse.Namespace) -> int:
    """Run nccl-tests with the sizes, dtypes and number of GPUs of a run of this suite, and compare busbw at each size.

    A difference beyond --beyond is a finding, whichever is faster; so are wrong data. With --output nothing is run: the
    files have what nccl-tests has printed. Arguments after -- go to nccl-tests. docs/compare.md has the rules.
    """
    output_files = _output_files(options)
    path, journal = read_journal(options.journal)
    ours = crosscheck.collectives_of(journal)
    require_other_file("--json", options.json, [path], "the journal itself")
    obstacle = ours.why_not or ("" if ours.points else "no busbw of a collective was measured in this run")
    if obstacle:
        return complain(f"{path}: nothing can be compared: {obstacle}", UNDECIDED)
    expected: list[Point] | None = None
    if output_files:
        outputs, failure = _read(output_files)
    else:
        topology, problem = _topology(options, ours)
        if problem:
            return complain(f"{path}: {problem}", UNDECIDED)
        expected = [point for point in _selected(options, ours) if (point.ranks, point.nnodes) == topology]
        if not expected:
            return complain(f"{path}: nothing can be compared: {_missing(options, ours, topology)}", UNDECIDED)
        outputs, failure = _measure(options, expected, topology)
    found = crosscheck.compare_outputs(
        replace(ours, points=_selected(options, ours)),
        outputs,
        expected=expected,
        beyond=options.beyond,
        partial=options.partial,
        other_hosts=options.other_hosts,
    )
    code = {crosscheck.FINDING: NEGATIVE, crosscheck.AGREEMENT: DONE}.get(found.answer, UNDECIDED)
    if failure:
        code = code if code == NEGATIVE else NOT_RUN
        complain(failure, code)
    if outputs or not failure:
        write_json_or_table(
            options.json,
            lambda: crosscheck.crosscheck_document(found, journal=str(path), outputs=outputs, exit_code=code),
            lambda: crosscheck.crosscheck_table(found, columns()),
        )
    return code


def _output_files(options: argparse.Namespace) -> list[tuple[str | None, Path]]:
    """Return the collective, if it is named, and the file of each ``--output``.

    Raises:
        OptionError: contradicting options, or an unknown name.
    """
    for option, names, known in (
        ("--collective", options.collective, PROGRAMS),
        ("--dtype", options.dtype, DTYPES),
    ):
        for name in names:
            if name not in known:
                raise OptionError(f"{option} {name!r} is none of {', '.join(known)}{did_you_mean(name, known)}")
    require_allowed_arguments(options.forwarded)
    if options.launcher is not None:
        try:
            words = shlex.split(options.launcher)
        except ValueError as error:
            raise OptionError(f"--launcher {options.launcher!r}: {error}") from None
        if not words:
            raise OptionError("--launcher is empty; write the command that starts the ranks, such as 'mpirun -np 16'")
    if not options.output:
        return []
    for option, value in (
        ("--binaries", options.binaries),
        ("-g", options.gpus),
        ("--launcher", options.launcher),
        ("--keep", options.keep),
        ("arguments after --", options.forwarded or None),
    ):
        if value is not None:
            raise OptionError(f"--output runs nothing: leave {option} out")
    found = []
    for text in options.output:
        name, separator, file = text.partition("=")
        is_named = bool(separator) and name in PROGRAMS
        found.append((name if is_named else None, Path(file if is_named else text)))
    return found


def _read(output_files: Sequence[tuple[str | None, Path]]) -> tuple[tuple[Output, ...], str]:
    """Return the outputs of nccl-tests in files, and the problem of the first unreadable one."""
    outputs: list[Output] = []
    for collective, path in output_files:
        try:
            output = nccl_tests.read_table(path.read_text(encoding="utf-8", errors="backslashreplace"), str(path))
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


def _topology(options: argparse.Namespace, ours: RunCollectives) -> tuple[tuple[int, int], str]:
    """Return the ranks and nodes for nccl-tests, and why there are none."""
    if options.launcher is not None:
        return ours.largest or (0, 0), ""
    if options.gpus is not None:
        return (options.gpus, 1), ""
    per_node = ours.per_node
    if per_node is None:
        return (0, 0), "nothing was measured on one node, so several are needed: --launcher 'mpirun -np 16 ...'"
    return (per_node, 1), ""


def _selected(options: argparse.Namespace, ours: RunCollectives) -> tuple[Point, ...]:
    return tuple(
        point
        for point in ours.points
        if point.collective in (options.collective or (point.collective,))
        and point.dtype in (options.dtype or (point.dtype,))
    )


def _missing(options: argparse.Namespace, ours: RunCollectives, topology: tuple[int, int]) -> str:
    kinds = dict.fromkeys((point.collective, point.dtype, point.ranks, point.nnodes) for point in ours.points)
    measured = "; ".join(f"{name} {dtype} by {ranks} ranks on {nodes}" for name, dtype, ranks, nodes in list(kinds)[:6])
    selected = " ".join((*options.collective, *options.dtype)) or "collectives"
    return f"the run has no {selected} by {topology[0]} ranks on {topology[1]} nodes, but {measured}"


def _measure(
    options: argparse.Namespace, points: Sequence[Point], topology: tuple[int, int]
) -> tuple[tuple[Output, ...], str]:
    """Run nccl-tests for these points; return the outputs, and the problem that ended it early."""
    starts = list(crosscheck.program_runs(points))
    outputs: list[Output] = []
    try:
        mpi = options.launcher is not None
        found = {each.program: nccl_tests.find_program(each.program, options.binaries, mpi=mpi) for each in starts}
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        for count, each in enumerate(starts, start=1):
            sizes = " ".join(nccl_tests.size_arguments(each.sizes))
            complain(f"{count} of {len(starts)}: {each.collective} {each.dtype}, {sizes}", DONE)
            outputs.append(_run_program(options, each, found[each.program], topology[0]))
    except (EnvironmentBroken, OutputError) as error:
        return tuple(outputs), str(error)
    except OSError as error:
        return tuple(outputs), f"--keep {options.keep}: {error.strerror or error}"
    except KeyboardInterrupt:
        return tuple(outputs), "interrupted; nccl-tests was ended"
    return tuple(outputs), ""


def _run_program(options: argparse.Namespace, program_run: ProgramRun, program: Path, ranks: int) -> Output:
    """Run one program to its end, and return its output.

    Raises:
        EnvironmentBroken: it did not run, or failed without wrong data.
        OutputError: its output cannot be read, or is of another collective.
        OSError: its output cannot be saved.
    """
    launcher = shlex.split(options.launcher) if options.launcher is not None else []
    gpus = options.gpus or (1 if launcher else ranks)
    command = [*launcher, str(program), *program_run.arguments(gpus, options.forwarded)]
    ended = nccl_tests.run_program(command, within_seconds=options.timeout)
    if options.keep is not None:
        name = f"{program_run.program}-{program_run.dtype}-{program_run.sizes[0]}.txt"
        files.atomic_write(options.keep / name, ended.text)
    command_text = shlex.join(command)
    if ended.code is None:
        raise ended.problem(command_text)
    try:
        output = nccl_tests.read_table(ended.text, command_text)
    except OutputError:
        if ended.code:
            raise ended.problem(command_text) from None
        raise
    if ended.code and not output.wrong:
        raise ended.problem(command_text)
    if output.collective not in (None, program_run.collective):
        raise OutputError(f"`{command_text}` measures {output.collective}, not {program_run.collective}")
    return replace(output, collective=program_run.collective)


COMMAND = Command(
    run=_crosscheck,
    help="the collectives of a run compared with nccl-tests",
    arguments=_arguments,
    examples="""\
        gpucluster runs crosscheck gpucluster-report/latest
        gpucluster runs crosscheck gpucluster-report/latest --collective all_reduce --dtype bf16 -- -n 50
        gpucluster runs crosscheck gpucluster-report/latest --launcher 'mpirun -np 16 --hostfile hosts'
        gpucluster runs crosscheck gpucluster-report/latest --output all_reduce=all_reduce.txt --partial --json -
        """,
    codes=exit_codes(
        {
            DONE: "every size was compared, and none differs by more than --beyond",
            NEGATIVE: "a finding: a difference, or wrong data",
            UNDECIDED: "no finding, but not everything could be compared",
            NOT_RUN: "nccl-tests did not run to its end (no program, no GPU, too slow), or its output cannot be read",
        },
        common=(USAGE, NO_INPUT, NO_OUTPUT),
    ),
)
