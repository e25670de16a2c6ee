"""``gpucluster run --hosts``: one run over the nodes of a hosts file, started over ssh."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster import __version__, files
from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.cli.command import (
    BROKEN_EXIT,
    DONE,
    NO_OUTPUT,
    USAGE,
    Command,
    CommandError,
    add_option,
    complain,
    port_number,
    seconds,
    whole_number,
)
from pytest_gpucluster.cli.run import run_exit_codes
from pytest_gpucluster.errors import EnvironmentBroken, OptionError
from pytest_gpucluster.journal.run_directory import new_run_directory
from pytest_gpucluster.runners import preflight, ssh
from pytest_gpucluster.runners.hosts import Host, read_hosts, require_slots, select_hosts
from pytest_gpucluster.runners.plan import SshPlan, forwarded_environment, parse_per_node, require_unreserved
from pytest_gpucluster.runners.preflight import NodeCheck, check_nodes, preflight_table, readiness_text
from pytest_gpucluster.runners.run_result import Conclusion
from pytest_gpucluster.runners.ssh import Access, Reply, query_nodes, raise_open_files_limit, require_ssh
from pytest_gpucluster.runners.ssh_job import OTHERS_SECONDS, NodeResult, Signals, conclude, handling, run_plan
from pytest_gpucluster.text import one_line, printable

NOT_READY, UNREACHABLE = 11, 12
PYTEST_DEFAULT = ("acceptance/",)
_RENDER_SECONDS = 120


def add_access(parser: argparse.ArgumentParser, name: str = "hosts") -> None:
    """Add the arguments that select nodes, and how they are reached."""
    hosts = parser.add_argument(name, metavar="HOSTS", type=Path, help="the hosts file")
    hosts.required = True
    add_option(parser, "--nodes HOSTLIST", "only these of the file, such as 'gpu-[003,007]'")
    add_option(parser, "--exclude HOSTLIST", "not these; or the path of an exclude.txt")
    add_option(parser, "--directory DIR", "the folder of the suite on the nodes (default: the path of this one)")
    add_option(
        parser,
        "--node-report-dir DIR",
        "for the reports on the nodes, until they are copied",
        default="gpucluster-report",
    )
    if not any("--python" in action.option_strings for action in parser._actions):
        add_option(parser, "--python PATH", "python on the nodes (default: the path of this one)")
    add_option(
        parser,
        "--env NAME[=VALUE]",
        "a variable for the nodes, in addition to GPUCLUSTER_* and PYTEST_ADDOPTS",
        action="append",
    )
    add_option(
        parser,
        "--ssh OPTION",
        "an option for every ssh, such as --ssh=-oStrictHostKeyChecking=accept-new",
        action="append",
    )
    add_option(parser, "--connect-within TIME", "deadline for connecting to a node", type=seconds, default="10 s")
    add_option(parser, "--answer-within TIME", "deadline for a node's first answer", type=seconds, default="60 s")


def add_expect(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add ``--expect``."""
    add_option(parser, "--expect GPUSxSKU", "what each node has, such as 8xH100: one rank per GPU", required=required)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The selected nodes, how they are reached, and the variables that are forwarded to them."""

    hosts: tuple[Host, ...]
    access: Access
    environ: Mapping[str, str]
    directory: str
    """Working directory on the nodes."""
    answer_seconds: float


def select_nodes(options: argparse.Namespace, gpus: int | None) -> Nodes:
    """Return the nodes that the options of :func:`add_access` select.

    Raises:
        OptionError: a wrong hosts file, list of nodes or variable.
        EnvironmentBroken: no ssh, or too many nodes for this process's limit of open files.
    """
    for option in options.ssh:
        if not option.startswith("-"):
            raise OptionError(f"--ssh {option}: not an option of ssh; write it as one word: --ssh=-oProxyJump=bastion")
    hosts = select_hosts(read_hosts(options.hosts), options.nodes, options.exclude)
    raise_open_files_limit(len(hosts))
    require_slots(hosts, gpus)
    environ, kept = forwarded_environment(os.environ, options.env)
    access = Access(
        python=options.python or sys.executable,
        options=tuple(options.ssh),
        connect_seconds=max(1, round(options.connect_within)),
    )
    require_ssh(access)
    if kept:
        show(f"set here, and not forwarded (--env NAME does): {', '.join(kept)}", True)
    return Nodes(
        hosts=hosts,
        access=access,
        environ=environ,
        directory=str(options.directory or Path.cwd()),
        answer_seconds=options.connect_within + options.answer_within,
    )


def unique_run_id(directory: Path) -> str:
    """Return a name that no other operator's run has, beginning like its folder here."""
    return f"{directory.name}-{secrets.token_hex(3)}"


def _arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    add_option(what, "--check", "only check whether the nodes are ready")
    add_option(what, "--info", "only save `gpucluster node info` of every node as NAME.json")
    add_expect(parser)
    add_option(parser, "--nproc-per-node N", "ranks on each node (default: one per GPU)", type=whole_number(1, 1024))
    add_option(parser, "--master-addr ADDRESS", "rendezvous address (default: the first node's)")
    add_option(parser, "--port PORT", "rendezvous port on the first node (default: any)", type=port_number, default=0)
    add_option(parser, "--within TIME", "deadline for the run", type=seconds, default="24 h")
    add_option(
        parser, "--report-dir DIR", "for the folder of each run, here", type=Path, default=Path("gpucluster-ssh")
    )
    add_access(parser, "--hosts")


def _run_hosts(options: argparse.Namespace) -> int:
    """Run the suite on the nodes of a hosts file: OpenSSH starts `gpucluster run` on each of them.

    All nodes are checked first. Output of rank 0's node is printed as it is, that of others with the node's name in
    front, and the reports of every node are copied here. The first node of the file has rank 0 and the rendezvous port.
    When this command ends or a connection is lost, the node ends what runs there. Arguments after -- go to pytest
    (default: acceptance/).

    hosts file, one node a line, such as deploy/bare-metal/hosts.example:
      gpu-001
      gpu-[002-016] user=admin port=2222 slots=8
      gpu-017 address=10.0.0.17   # if its name does not resolve
    """
    signals = Signals()
    try:
        with handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signals.handle):
            return _run(options, signals)
    except EnvironmentBroken as error:
        return complain(str(error), BROKEN_EXIT)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:
            raise  # handled by main
        where = f"{error.filename}: " if error.filename else ""
        return complain(f"reports of the nodes cannot be written: {where}{error.strerror or error}", NO_OUTPUT)


def _run(options: argparse.Namespace, signals: Signals) -> int:
    arguments = tuple(options.forwarded or PYTEST_DEFAULT)
    require_unreserved(arguments)
    per_node = parse_per_node(options.expect) if options.expect is not None else None
    nodes = select_nodes(options, per_node.gpus_per_node if per_node is not None else None)
    if options.info:
        return _info(options, nodes, signals)
    checks = _check(options, nodes, arguments, signals)
    if signals.numbers:
        raise CommandError(USAGE, f"interrupted ({signals.name}) before anything was started")
    code = _readiness(checks)
    if options.check or code:
        print(preflight_table(checks))
    if options.check:
        print(f"gpucluster: {readiness_text(checks)}")
        return code
    if code:
        hint = "; --exclude runs without them" if code == UNREACHABLE else ""
        raise CommandError(code, f"nothing was run: {readiness_text(checks)}{hint}")
    if nodes.environ:
        show(f"forwarded to the nodes: {', '.join(sorted(nodes.environ))}", True)
    return _run_on(checks, options, nodes, per_node, arguments, signals)


# ---- before the run


def _query(nodes: Nodes, request: Mapping[str, bytes], signals: Signals) -> dict[str, Reply]:
    return query_nodes(
        nodes.hosts,
        lambda host: request[host.name],
        nodes.access,
        within_seconds=nodes.answer_seconds,
        stop=lambda: bool(signals.numbers),
    )


def _check(
    options: argparse.Namespace, nodes: Nodes, arguments: Sequence[str], signals: Signals
) -> Sequence[NodeCheck]:
    first = nodes.hosts[0]
    requests = {
        host.name: ssh.request(
            "probe",
            directory=nodes.directory,
            report_dir=options.node_report_dir,
            arguments=list(arguments),
            master=options.master_addr or first.address,
            port=options.port if host is first else None,
        )
        for host in nodes.hosts
    }
    return check_nodes(nodes.hosts, _query(nodes, requests, signals), __version__)


def _readiness(checks: Sequence[NodeCheck]) -> int:
    states = {check.state for check in checks}
    return NOT_READY if preflight.NOT_READY in states else UNREACHABLE if preflight.NO_ANSWER in states else DONE


def _info(options: argparse.Namespace, nodes: Nodes, signals: Signals) -> int:
    directory = new_run_directory(options.report_dir.absolute())
    request = ssh.request("info")
    replies = _query(nodes, {host.name: request for host in nodes.hosts}, signals)
    if signals.numbers:
        raise CommandError(USAGE, f"interrupted ({signals.name}) before all nodes had answered")
    saved, code = 0, DONE
    for name, reply in replies.items():
        if reply.facts:
            files.atomic_write(directory / f"{name}.json", json.dumps(reply.facts, indent=2) + "\n")
            saved += 1
            continue
        code = max(code, NOT_READY if reply.answered else UNREACHABLE)
        problem = reply.problem or f"ended with exit code {reply.exit} and no JSON"
        print(printable(f"{name}: {'' if reply.answered else 'no answer: '}{one_line(problem, 300)}"))
    print(f"gpucluster: info of {saved} of {len(nodes.hosts)} nodes: {directory}")
    return code


# ---- the run


def _run_on(
    checks: Sequence[NodeCheck],
    options: argparse.Namespace,
    nodes: Nodes,
    per_node: Expectation | None,
    arguments: tuple[str, ...],
    signals: Signals,
) -> int:
    directory = new_run_directory(options.report_dir.absolute())
    first = checks[0]
    plan = SshPlan(
        hosts=tuple(check.host for check in checks),
        per_node=per_node,
        ranks=options.nproc_per_node,
        arguments=arguments,
        directory=nodes.directory,
        node_report_dir=options.node_report_dir,
        run_id=unique_run_id(directory),
        environ=nodes.environ,
        master=options.master_addr or first.host.address,
        port=first.port or options.port,
    )
    rendezvous = f"rank 0 on {first.host.name}, rendezvous at {plan.master}:{plan.port}"
    show(f"{len(checks)} nodes, {rendezvous}; reports: {directory}", True)
    results = run_plan(
        *(plan, nodes.access, directory),
        within_seconds=options.within,
        answer_seconds=nodes.answer_seconds,
        others_seconds=OTHERS_SECONDS,
        signals=signals,
        show=show,
    )
    journal, journal_problem = results[first.host.name].journal()
    found = conclude(
        [results[host.name] for host in plan.hosts],
        journal,
        journal_problem=journal_problem or "the node of rank 0 has left none",
        interrupted=signals.name,
    )
    _write_json(directory, plan, results, found)
    if journal is not None:
        _render(directory, journal.journal)
    for name, result in results.items():
        if result.copy_problem:
            show(f"{name}: reports not copied: {result.copy_problem}", True)
    show(f"reports: {directory}", True)
    show(found.line, True)
    return found.exit


def _write_json(
    directory: Path,
    plan: SshPlan,
    results: Mapping[str, NodeResult],
    found: Conclusion,
) -> None:
    """Write ``ssh.json``: the nodes and their results."""
    content = {
        "schema_version": 1,
        "command": sys.argv,
        "exit": found.exit,
        "line": found.line,
        "master": f"{plan.master}:{plan.port}",
        "nodes": [
            {
                "node": host.name,
                "node_rank": node_rank,
                "exit": results[host.name].exit,
                "seconds": results[host.name].seconds,
                "why": results[host.name].problem or results[host.name].stop_reason,
                "not_brought": results[host.name].copy_problem,
                "on_the_node": plan.folder(host),
            }
            for node_rank, host in enumerate(plan.hosts)
        ],
    }
    files.atomic_write(directory / "ssh.json", json.dumps(content, indent=1) + "\n")


def _render(directory: Path, journal: str) -> None:
    """Render all reports of the journal next to the nodes' folders, even if rank 0 could not do so any more."""
    command = [sys.executable, "-m", "pytest_gpucluster", "report", journal, "--all", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RENDER_SECONDS, check=False)
        problem = one_line(done.stderr, 300) if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = one_line(str(error), 300)
    if problem:
        show(f"reports are not rendered: {problem}", True)


def show(line: str, is_error: bool) -> None:
    """Print a line on standard output, or on standard error."""
    print(printable(line), file=sys.stderr if is_error else sys.stdout, flush=True)


COMMAND = Command(
    run=_run_hosts,
    arguments=_arguments,
    examples="""\
        gpucluster run --hosts hosts --check
        gpucluster run --hosts hosts --expect 8xH100 -- acceptance/
        gpucluster run --hosts hosts --expect 8xH100 --exclude gpucluster-sweep/latest/exclude.txt -- -k nccl
        gpucluster run --hosts hosts --info && gpucluster node diff gpucluster-ssh/latest
        """,
    codes=run_exit_codes(
        {
            2: "also wrong usage",
            4: "also: nothing can be written here",
            11: "also: nodes are not ready, a connection was lost, or rank 0's journal could not be copied",
            12: "a node did not answer, and nothing was run",
        },
        "With --check and --info: 0 all nodes are ready or answered, 11 some are not, 12 some did not answer.",
    ),
    usage="gpucluster run --hosts HOSTS [options] [-- PYTEST_ARGUMENTS]",
)
