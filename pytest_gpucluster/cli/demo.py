"""``gpucluster demo``: the acceptance suite on a simulated cluster, with planted faults, on this machine."""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from pytest_gpucluster import files
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.cli import run
from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.journal.records import SIMULATED
from pytest_gpucluster.journal.verdict import VARIABLE
from pytest_gpucluster.launch.forks import Forked, ForkServer, holders
from pytest_gpucluster.node.sysfs import Tree
from pytest_gpucluster.reports.registry import existing_files
from pytest_gpucluster.runners.run_result import Conclusion
from pytest_gpucluster.simulation.faults import KINDS, Fault, parse
from pytest_gpucluster.text import plural

REFUSED = 4
"""Exit code of pytest, and of this command, where nothing was run."""
DESCRIPTION = "simulation.yaml"
JUNIT = "report.xml"
SHORT = "not (lora or fsdp or sharded or checkpoint or failure_propagation or vision or contract)"
"""What runs unless all, or other tests, are asked for. Each step of a training is really taken, by each rank on the
CPU: what is left out takes 10 minutes on 2 cores."""
_NARRATION = "pytest_gpucluster.session.narration"
_OTHERS_SECONDS = 60.0
"""How long the other nodes may go on once the first one has ended."""
_SURE_LOAD_SECONDS = 100.0
"""Simulated, with the profile quick. Measured on 1x2xH100: a GPU that throttles after 200 s is found, after 600 not."""
_SHOWN = 3
_RANK_BYTES, _SHORT_RANK_BYTES = 0.36e9, 0.12e9
"""Memory of a rank: in the training with LoRA, where it takes most, and without such. Measured: 5.71 and 1.9 GB of
2x8xH100, torch 2.13."""


def _what(parser: argparse._ActionsContainer) -> None:
    from pytest_gpucluster.simulation.cluster import shipped  # it loads YAML

    known = ", ".join(shipped())
    parser.add_argument("what", metavar="WHAT", help=f"{known}, another shape of these GPUs, or a YAML file")


def _fault() -> cli.Argument:
    words = {"gpu": "HOST/GPU", "port": "HOST/PORT", "host": "HOST", "cluster": "the cluster"}
    names = "; ".join(
        f"at {place}: {', '.join(name for name, kind in KINDS.items() if kind.where == where)}"
        for where, place in words.items()
    )
    text = f"a fault as NAME:PLACE, maybe with =AMOUNT, such as slow-gpu:gpu-01/3=10%% ({names})"
    return cli.option("--fault FAULT", text, action="append")


@cli.command(
    _what,
    _fault(),
    cli.option("--profile PROFILE", "sizes and times", choices=("quick", "full", "soak"), default="quick"),
    cli.option("--seed N", "of all that is drawn (default: the description's)", type=cli.number(0)),
    cli.option("--report-dir DIR", "for the reports", type=Path, default="gpucluster-report"),
    cli.option("--all", "also what trains for minutes: LoRA, FSDP2, images, checkpoints"),
    cli.option("--narrate", "explain each group of criteria before and after it, and where the culprit stands"),
    examples="""\
        gpucluster demo 2x8xH100
        gpucluster demo 2x8xH100 --fault slow-gpu:gpu-01/3=10% --narrate
        gpucluster demo 2x4xH100 --fault dead-rail:gpu-00/mlx5_1 -- -k links
        gpucluster demo 1x2xH100 --all
        """,
    codes=run.run_exit_codes(
        {
            2: "also wrong usage of this command",
            4: "also an unknown shape, fault or place",
            11: "also: no rank has left a verdict",
        }
    ),
    usage="gpucluster demo WHAT [options] -- [pytest options]",
)
def _demo(options: argparse.Namespace) -> int:
    """Run the acceptance suite on a simulated cluster, on this machine: no GPU is needed, and nothing is accepted.

    Each simulated GPU is a rank on the CPU, and each host has an agent of torchrun. GPUs, network and what NVML and the
    system report come from a description; faults are planted there, and the suite is the one that runs on real
    clusters. You see the terminal of the first host; those of the others are files in DIR. Ctrl-C ends it, and the
    reports are written. Without --all, and without tests named after --, what trains for minutes is left out.
    """
    from pytest_gpucluster.runners.plan import random_port, report_arguments, torchrun_options
    from pytest_gpucluster.runners.ssh_job import handling
    from pytest_gpucluster.simulation.cluster import load

    try:
        cluster = load(options.what)
        # A fault at a place that it does not have is an error.
        cluster = cluster.with_faults([*cluster.faults.all, *map(parse, options.fault)])
    except OptionError as error:
        raise cli.CommandError(REFUSED, str(error)) from None
    folder = Path(os.path.abspath(options.report_dir))
    with cli.file_errors(cli.NO_OUTPUT, f"--report-dir {options.report_dir}"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JUNIT).unlink(missing_ok=True)  # of an earlier run
        files.atomic_write(folder / DESCRIPTION, description(options, cluster.faults.all))
    ranks = cluster.nodes * cluster.gpus_per_node
    planted = ", ".join(map(str, cluster.faults.all)) or "no fault"
    shape = f"{plural(ranks, 'rank')} on {plural(cluster.nodes, 'simulated host')}"
    run.print_line(f"{shape}, with {planted}; loading torch")
    has_chosen = any(word[:2] in ("-k", "-m") or Path(word.partition("::")[0]).exists() for word in options.forwarded)
    is_short = not (options.all or has_chosen)
    for fault in cluster.faults.all:
        late, sure = fault.after_seconds, 0.0 if has_chosen else _SURE_LOAD_SECONDS
        if late > sure and options.profile != "soak":
            run.print_line(
                f"{fault} acts after {late:g} s under load, which may not come: more tests, or --profile soak"
            )
    free, needed = Tree().meminfo("MemAvailable"), ranks * (_SHORT_RANK_BYTES if is_short else _RANK_BYTES)
    if free is not None and free < needed:
        run.print_line(
            f"it takes up to {needed / 1e9:.2g} GB of memory, and {free / 1e9:.2g} GB are free: if the system kills a "
            "rank, take fewer GPUs, or a part of the suite (such as -- -k nccl)"
        )
    words = torchrun_options(cluster.nodes, cluster.gpus_per_node, "127.0.0.1", random_port())
    words += [  # what an operator would type for this cluster, and what makes it a simulated one
        *("-m", "pytest", "--gpucluster-device=simulated", f"--gpucluster-simulate={folder / DESCRIPTION}"),
        f"--gpucluster-expect={cluster.nodes}x{cluster.gpus_per_node}x{cluster.sku}",
        f"--gpucluster-profile={options.profile}",
        *report_arguments(str(folder), str(folder / JUNIT)),
        *(["-p", _NARRATION] if options.narrate else []),
        *(["-k", SHORT] if is_short else []),
        *options.forwarded,
    ]
    forwarder = run.SignalForwarder()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="gpucluster-demo-", ignore_cleanup_errors=True) as name,
            handling(list(run.FORWARDED), forwarder.handle),
            closing(ForkServer()) as server,
        ):
            folders = Path(name), folder
            found, directory = _run_nodes(server, forwarder, cluster.hosts, folders, words)
    except (RuntimeError, ConnectionError) as error:
        raise cli.CommandError(
            cli.BROKEN_EXIT, f"the process that starts the ranks: {error}; out of memory?"
        ) from error
    if directory:
        reports = dict(existing_files(Path(directory), junit=folder / JUNIT))
        try:
            for line in culprit_lines(reports, cluster.faults.all) if options.narrate else ():
                cli.print_paragraph(line, ">> ", sys.stderr)
        except (JournalError, OSError, ET.ParseError, KeyError) as error:
            run.print_line(f"where the culprit stands is unknown: {error}")  # the verdict still comes
        run.print_next(directory, found.exit, SIMULATED)
    run.print_line(found.line, is_fitted=True)
    return found.exit


# ---- what is asked for -----------------------------------------------------------------------------------------------


def description(options: argparse.Namespace, faults: Sequence[Fault]) -> str:
    """Return the YAML file that all ranks read: a described cluster, its faults and its seed."""
    like = os.path.abspath(options.what) if Path(options.what).is_file() else options.what
    lines = ["schema_version: 1", f"like: {json.dumps(like)}", f"name: {json.dumps(Path(options.what).stem)}"]
    lines += [f"seed: {options.seed}"] if options.seed is not None else []
    lines += ["faults:", *(f"- {json.dumps(str(fault))}" for fault in faults)] if faults else []
    return "\n".join(lines) + "\n"


# ---- the processes ---------------------------------------------------------------------------------------------------


def _run_nodes(
    server: ForkServer,
    forwarder: run.SignalForwarder,
    hosts: Sequence[str],
    folders: tuple[Path, Path],
    words: list[str],
) -> tuple[Conclusion, str]:
    """Run an agent of torchrun for each host to its end; return the conclusion, and the folder of the run or "".

    Whatever happens, no process of it is left.

    Args:
        server: of forks.
        forwarder: gets the agents.
        hosts: the first one has rank 0, whose terminal is this command's.
        folders: for the ranks' notes, and for the terminals of the other hosts.
        words: arguments of each agent.
    """
    from pytest_gpucluster.runners.torchrun import conclude

    token, agents, found, directory = f"gpucluster-demo-{os.getpid()}", list[Forked](), list[Conclusion](), ""
    if forwarder.signals:  # while torch was loaded
        return conclude(None, [], None, agent_code=0, signals=forwarder.signals), directory
    try:
        for rank, host in enumerate(hosts):
            agents.append(_start(server, rank, host, folders, words, token))
            forwarder.add(agents[-1])
        for host, agent in zip(hosts, agents, strict=True):
            with suppress(subprocess.TimeoutExpired):
                agent.wait(_OTHERS_SECONDS if found else None)
            code = -signal.SIGKILL if (code := agent.poll()) is None else code
            conclusion, note = run.conclude_node(folders[0] / host, agent.pid, code, forwarder.signals)
            directory = directory or (note.directory if note is not None else "")
            found.append(conclusion)
    finally:
        for pid in holders(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    # The first host has the verdict, but a pass needs one of each host.
    return next((one for one in found if one.exit), found[0]), directory


def _start(
    server: ForkServer, rank: int, host: str, folders: tuple[Path, Path], words: Sequence[str], token: str
) -> Forked:
    notes, terminal = folders[0] / host, folders[1] / f"{host}.txt"
    notes.mkdir()
    # torch looks up the name of each connection's other end, waits 10 s for a name server that does not answer, and
    # says so.
    of_torch = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environ = {"OMP_NUM_THREADS": "1", **of_torch, **os.environ, VARIABLE: str(notes)}
    environ["GPUCLUSTER_HOSTNAME"] = host
    environ["TMPDIR"] = str(folders[0])  # what a rank that was killed has left goes with it
    program = [sys.executable, "-m", run.AGENT, f"--node-rank={rank}", *words]
    if rank == 0:
        return server.start(program, cwd=Path.cwd(), env=environ, output=1, errors=2, token=token)
    with terminal.open("wb") as file:
        output = file.fileno()
        return server.start(program, cwd=Path.cwd(), env=environ, output=output, errors=output, token=token)


# ---- where the culprit stands ----------------------------------------------------------------------------------------


def culprit_lines(reports: Mapping[str, str], planted: Sequence[Fault]) -> Iterator[str]:
    """Yield what was planted, and where terminal, JUnit file and page have what did not pass, as these files state it.

    Args:
        reports: as :func:`~pytest_gpucluster.reports.registry.existing_files` has them.
        planted: the faults.
    """
    from pytest_gpucluster.journal.journal import read
    from pytest_gpucluster.reports.failures import failure_text, failures_by_place
    from pytest_gpucluster.reports.summary import outline

    for fault in planted:
        yield f"planted: {fault}: {fault.kind.does}{'; no part may be accused of it' if fault.kind.healthy else ''}"
    journal = read(Path(reports["journal"]), keep_samples=False)
    overview = outline(journal)
    bad = [row for rows in failures_by_place(journal, overview).values() for row in rows[:1]]
    if not bad:
        yield "no test failed, so no part is accused; what was noticed nevertheless is on the page"
    cases = (
        {case.get("name"): case for case in ET.parse(reports["JUnit"]).iter("testcase")} if "JUnit" in reports else {}
    )
    page = Path(reports["report"]).read_text(encoding="utf-8") if "report" in reports else ""
    for row in bad[:_SHOWN]:
        yield f"{row.name}: {failure_text(row, journal)}"
        yield "- terminal: the line of this test above, and again in the summary before the verdict"
        for result in cases.get(row.name, ()):
            if result.tag in ("failure", "error"):
                yield f"- JUnit: {reports['JUnit']}, testcase {row.name}, <{result.tag}>: {result.get('message')}"
        anchor = re.search(rf'<tbody id="(c\d+)"[^>]* data-name="{re.escape(html.escape(row.name))}"', page)
        if anchor is not None:
            yield f"- page: {reports['report']}#{anchor[1]}"
    more = len(overview.bad) - min(len(bad), _SHOWN)
    if more > 0:
        yield f"and {plural(more, 'more test')} that did not pass"
    if "exclude" in reports:
        yield f"hosts to leave out of the next jobs: {reports['exclude']}"


COMMAND = _demo
