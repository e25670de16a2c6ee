"""``gpucluster node``: the state of this node or of many, read from the nodes themselves; nothing is measured."""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_gpucluster.analysis.output import fields_of, json_document
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.text import paragraph, plural, printable

_VIEWS = ("summary", "gpu", "ib", "cpu", "all")
_LEAST_COLUMNS = 72
"""Of a table of GPUs without truncated numbers."""


@cli.command(
    cli.argument(
        "view",
        metavar="VIEW",
        nargs="?",
        choices=_VIEWS,
        default="summary",
        help="summary: a few lines on each part (default); gpu: driver stack, each GPU, topology; ib: InfiniBand and "
        "RoCE ports, network interfaces; cpu: system, CPUs, NUMA nodes, memory and limits; all: everything",
    ),
    cli.option("--json", "as one JSON object; docs/nodes.md lists its keys"),
    help="CPUs, GPUs, topology, ports and driver stack of this node",
    examples="""\
                gpucluster node info
                gpucluster node info gpu
                gpucluster node info all --json > node.json
                """,
    codes={cli.DONE: "printed, even if parts are not available"},
)
def _info(options: argparse.Namespace) -> int:
    """Print what this node has: CPUs, NUMA nodes, memory, GPUs and their topology, NVLink, InfiniBand, driver stack,
    mounts, network, and the Slurm job or the pod that this is in. It takes a few seconds, changes nothing, needs no
    root, and also works without a GPU: parts that are not available are listed with the reason.
    """
    from pytest_gpucluster.node.info import Sources, collect_info
    from pytest_gpucluster.node.info_text import render_info

    info = collect_info(options.view, Sources())
    cli.write_text("-", json_document(info) if options.json else render_info(info, width=cli.columns(_LEAST_COLUMNS)))
    return cli.DONE


@cli.command(
    cli.argument("folder", metavar="FOLDER", type=Path, help="with a file NODE.json for each node"),
    cli.EXPECTED,
    cli.JSON,
    help="differences between many nodes, from the info of each",
    examples="""\
                gpucluster node diff gpucluster-report/discover-4711/nodes
                gpucluster node diff answers/ --nodes 'gpu-[001-064]' --json nodes.json
                """,
    codes={
        cli.DONE: "all nodes answered, and are equal",
        cli.NEGATIVE: "they differ",
        cli.NO_INPUT: "the folder cannot be read, or no node answered",
        cli.UNDECIDED: "those that answered are equal, but some did not, or there is only one",
    },
)
def _diff(options: argparse.Namespace) -> int:
    """Compare many nodes: CPUs, SMT, NUMA nodes, memory, limits, driver stack, GPUs, MIG, topology, InfiniBand ports,
    network and mounts. The folder has a file NODE.json for each node, written there by `gpucluster node info all
    --json`; deploy/slurm/discover.sbatch writes them all. Equal does not mean good: the suite checks that.
    """
    from pytest_gpucluster.node import diff
    from pytest_gpucluster.runners.hosts import expand_nodes

    expected = expand_nodes("--nodes", options.nodes) if options.nodes is not None else []
    with cli.file_errors(cli.NO_INPUT, str(options.folder)):
        found = diff.read_answers(options.folder, expected)
    compared = diff.compare_nodes(found.nodes)
    code = cli.DONE if all(fact.alike for fact in compared) else cli.NEGATIVE
    if code == cli.DONE and (found.missing or (len(found.nodes) < 2 and len(expected) != 1)):
        code = cli.UNDECIDED
    if not found.nodes:
        code = cli.NO_INPUT
    cli.write_outputs(
        lambda: "".join(f"{line.rstrip()}\n" for line in diff.diff_lines(found, compared, width=cli.columns(60))),
        ("--json", options.json, lambda: diff.diff_document(found, compared, exit_code=code)),
    )
    if not found.nodes:
        cli.complain(f"{options.folder}: no node answered: NODE.json, of `gpucluster node info all --json`", code)
    return code


UNKNOWN = 3
SCHEMA_VERSION = 1
_FORMATS = ("text", "shell", "json")


@cli.command(
    cli.option(
        "--format FORMAT",
        "text: for people (default); shell: lines for eval or source; json: everything; docs/network.md has its keys",
        choices=_FORMATS,
        default="text",
    ),
    cli.option("--check", "exit with 1 for a difference, 3 for something unknown"),
    help="which of NCCL's variables this node needs, and which are harmful",
    examples="""\
                gpucluster node nccl-env
                eval "$(gpucluster node nccl-env --format shell)"
                srun --ntasks-per-node=1 gpucluster node nccl-env --check
                """,
    codes={
        cli.DONE: "printed; with --check: the variables are as advised",
        cli.NEGATIVE: "with --check: a variable should be set, or is set and harmful",
        UNKNOWN: "with --check: neither, but something is unknown",
    },
)
def _nccl_env(options: argparse.Namespace) -> int:
    """Inspect this node's network cards, interfaces, GPUs, container and job, and print which of NCCL's variables it
    needs, and which are set and harmful, each with the reason and its source. All others are best left unset. Nothing
    is set: evaluate the printed lines to do so. For an unknown network there is no advice.

    Run it where the job will run: on a compute node, in the job's container.
    """
    from pytest_gpucluster.node.fabric.nccl_advice import advise, render_advice, shell_lines
    from pytest_gpucluster.node.fabric.nccl_facts import Sources, collect_facts

    facts = collect_facts(Sources())
    advice = advise(facts)
    if options.format == "json":
        document = {
            "schema_version": SCHEMA_VERSION,
            "host": facts.host,
            "launcher": facts.launcher or None,
            **fields_of(facts, "scheduler", "nnodes", "container", "provider", "nccl"),
            "gpus": [{"name": gpu.name, "pci": gpu.pci} for gpu in facts.visible.gpus],
            "nvlink": facts.visible.nvlink,
            "nvls": facts.visible.nvls,
            **advice.to_json(),
        }
        cli.write_text("-", json_document(document))
    elif options.format == "text":
        cli.write_text("-", render_advice(facts, advice, width=cli.columns(60)))
    else:
        cli.write_text("-", shell_lines(facts, advice))
    if not options.check:
        return cli.DONE
    return cli.NEGATIVE if advice.differs else UNKNOWN if advice.unknown else cli.DONE


_LINE_BYTES = 1 << 20
"""Longer than any line of a kernel; bounds what is read at once."""
_NOT_TEXT = (b"\x1f\x8b", b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd", b"LPKSHHRH")
"""First bytes of logs that are not text: of gzip, xz, bzip2 and zstd, and of systemd's journal."""


@cli.command(
    cli.argument("file", metavar="FILE", type=Path, nargs="?", help="default: standard input, which is also -"),
    cli.option("--host", "read this host's log of this boot instead"),
    help="errors of GPUs and NVSwitches in a kernel log, with actions",
    examples="""\
                gpucluster node kernel-log --host
                gpucluster node kernel-log /var/log/messages
                ssh gpu-017 sudo dmesg | gpucluster node kernel-log
                journalctl -k -b --no-pager | gpucluster node kernel-log
                """,
    codes={
        cli.DONE: "no report demands action on a GPU, an NVLink or the node",
        cli.NEGATIVE: "one does",
        cli.NO_INPUT: "the log cannot be read, is empty, or is not text; 1 if a report before that demands action",
    },
)
def _kernel_log(options: argparse.Namespace) -> int:
    """Print each report of NVIDIA's driver in a kernel log (Xid: of a GPU; SXid: of an NVSwitch) with its PCI address,
    number, meaning, action and message. FILE is any text with kernel lines, with or without timestamps: of dmesg,
    journalctl -k or /var/log/messages, of this host or another. Without FILE standard input is read.

    Reports that a program can cause, or that only inform, demand no action on GPU, NVLink or node. An Xid that is not
    in the table, a line that is truncated before its number, and an error without a severity do.
    """
    from pytest_gpucluster.node.health.xid_table import lookup
    from pytest_gpucluster.node.kernel_log import parse

    if options.host and options.file is not None:
        options.refuse("FILE and --host: name one of them")
    file = options.file or Path("-")
    name = "the kernel log of this host" if options.host else "the standard input" if file == Path("-") else str(file)
    lines = reports = demanding = 0
    try:
        with cli.file_errors(cli.NO_INPUT, name):
            for line in _host_lines(name) if options.host else _file_lines(file, name):
                lines += 1
                for report in parse([line]):
                    entry = lookup(report)
                    reports += 1
                    demanding += entry.rejects
                    message = f" ({report.text})" if report.text else ""
                    place = f"{report.pci or 'PCI ?'} {report.name}"
                    print(printable(f"{place}: {entry.meaning}; action: {entry.advice}{message}"))
        if not lines:
            raise cli.CommandError(cli.NO_INPUT, f"{name}: it is empty")
    except cli.CommandError as error:
        cli.complain(str(error), error.code)
        return cli.NEGATIVE if demanding else error.code
    found = f"{demanding} of {plural(reports, 'report')} in {plural(lines, 'line')}"
    print(f"{found} {'demands' if demanding == 1 else 'demand'} action on a GPU, an NVLink or the node")
    return cli.NEGATIVE if demanding else cli.DONE


def _host_lines(name: str) -> Iterator[str]:
    from pytest_gpucluster.node import kernel_log

    log = kernel_log.read()
    if log.why_not:
        raise cli.CommandError(cli.NO_INPUT, f"{name}: {log.why_not}")
    if log.lost_records:
        cli.complain(f"{log.source} begins late: {log.lost_records} older records are overwritten", cli.DONE)
    yield from log.lines


def _file_lines(file: Path, name: str) -> Iterator[str]:
    if file == Path("-") and sys.stdin is None:
        raise cli.CommandError(cli.NO_INPUT, "the standard input is closed")
    with sys.stdin.buffer if file == Path("-") else file.open("rb") as stream:
        line = stream.readline(_LINE_BYTES)
        if line.startswith(_NOT_TEXT):
            hint = "the output of zcat, xzcat, bzcat, zstdcat or `journalctl -k --file FILE` is one"
            raise cli.CommandError(cli.NO_INPUT, f"{name}: not a text file: {hint}")
        while line:
            yield line.decode("utf-8", "replace")
            line = stream.readline(_LINE_BYTES)


@cli.command(
    cli.option("--device DEVICE", "cuda, or cpu to rehearse", choices=("cuda", "cpu"), default="cuda"),
    cli.option("--all-gpus", "all visible GPUs at the same time, and not the first one alone"),
    cli.option("--out FILE", "the archive (default: gpucluster-selftest-TIME.tar.gz, here)", type=Path),
    help="try GPUs, driver, torch and NCCL in 3 minutes: run it first on new hardware",
    examples="""\
                gpucluster node selftest
                gpucluster node selftest --all-gpus --out node-17.tar.gz
                gpucluster node selftest --device cpu
                """,
    codes={cli.DONE: "no line is WRONG", cli.NEGATIVE: "a line is WRONG"},
)
def _selftest(options: argparse.Namespace) -> int:
    """Try on this node what pytest-gpucluster assumes of GPUs, driver, torch and NCCL: names, clocks, rates, memory,
    the abort of a planted hang, a failing kernel, NVML's queries. The GPUs should be idle. There is no verdict: each
    line is OK, WRONG or UNPROVEN, with what to do. It takes less than 3 minutes, and writes an archive to send to the
    maintainers, without host names, addresses, serial numbers and variables other than those of torch and NCCL.
    """
    from pytest_gpucluster.selftest.report import render, write_archive
    from pytest_gpucluster.selftest.run import SelfTest

    test = SelfTest(
        options.device,
        every_gpu=options.all_gpus,
        say=lambda line: cli.write_text("-", f"{render(line, cli.columns(60))}\n"),
    )
    out = options.out or Path(
        f"gpucluster-selftest-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}.tar.gz"
    )
    with cli.file_errors(cli.NO_OUTPUT, str(out)):
        tempfile.TemporaryFile(dir=out.parent).close()  # refused now, and not after three minutes
    report, files = test.run()
    with cli.file_errors(cli.NO_OUTPUT, str(out)):
        write_archive(out, files)
    summary = "\n".join(paragraph(report.summary(), cli.columns(60)))
    cli.write_text("-", f"{summary}\narchive: {out}\n")
    return cli.NEGATIVE if report.is_wrong else cli.DONE


COMMAND = cli.Group(
    description="Inspect nodes. Only selftest measures, and needs a GPU.",
    commands={
        "selftest": _selftest,
        "info": _info,
        "diff": _diff,
        "nccl-env": _nccl_env,
        "kernel-log": _kernel_log,
    },
)
