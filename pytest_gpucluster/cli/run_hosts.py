"""``gpucluster run --hosts``: one run over the nodes of a hosts file, started over ssh."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pytest_gpucluster import files
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.cli.run import run_exit_codes
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal.journal import read
from pytest_gpucluster.journal.run_directory import new_run_directory
from pytest_gpucluster.reports import registry
from pytest_gpucluster.runners import preflight, ssh
from pytest_gpucluster.runners.hosts import Host, read_hosts, select_hosts
from pytest_gpucluster.runners.plan import (
    SshPlan,
    forwarded_environment,
    parse_per_node,
    random_port,
    require_unreserved,
)
from pytest_gpucluster.runners.preflight import check_nodes, preflight_table, readiness_text
from pytest_gpucluster.runners.run_result import read_result
from pytest_gpucluster.runners.ssh import Access, query_nodes, require_ssh
from pytest_gpucluster.runners.ssh_job import RemoteRun, Signals, conclude, handling
from pytest_gpucluster.text import printable

NOT_READY, UNREACHABLE = 11, 12


ACCESS = (
    cli.option("--nodes HOSTLIST", "only these of the file, such as 'gpu-[003,007]'"),
    cli.option("--exclude HOSTLIST", "not these; or the path of an exclude.txt"),
    cli.option("--directory DIR", "the folder of the suite on the nodes (default: the path of this one)"),
    cli.option("--node-report-dir DIR", "for reports on the nodes, until they are copied", default="gpucluster-report"),
    cli.option("--env NAME[=VALUE]", "a variable for the nodes, next to GPUCLUSTER_*, PYTEST_ADDOPTS", action="append"),
    cli.option("--ssh OPTION", "an option for every ssh, such as --ssh=-oProxyJump=bastion", action="append"),
    cli.option("--connect-within TIME", "deadline for connecting to a node", type=cli.seconds, default="10 s"),
    cli.option("--answer-within TIME", "deadline for a node's first answer", type=cli.seconds, default="60 s"),
)
"""Arguments that select nodes of a hosts file, and how they are reached."""
EXPECT = "--expect GPUSxSKU", "what each node has, such as 8xH100: one rank per GPU"


def select_nodes(options: argparse.Namespace) -> tuple[tuple[Host, ...], Access]:
    """Return the nodes that the options of ``ACCESS`` select, and how they are reached.

    Raises:
        OptionError: a wrong hosts file, list of nodes or variable.
        EnvironmentBroken: there is no ssh.
    """
    for word in options.ssh:
        if not word.startswith("-"):
            raise OptionError(f"--ssh {word}: not an option of ssh; write it as one word: --ssh=-oProxyJump=bastion")
    hosts = select_hosts(read_hosts(options.hosts), options.nodes, options.exclude)
    environ, kept = forwarded_environment(os.environ, options.env)
    require_ssh()
    if kept:
        show(f"set here, and not forwarded (--env NAME does): {', '.join(kept)}", True)
    return hosts, Access(
        python=options.python or sys.executable,
        options=tuple(options.ssh),
        connect_seconds=max(1, round(options.connect_within)),
        answer_seconds=options.connect_within + options.answer_within,
        directory=str(options.directory or Path.cwd()),
        report_dir=options.node_report_dir,
        environ=environ,
    )


def unique_run_id() -> str:
    """Return a name that no other operator's run has."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


@cli.command(
    cli.option("--check", "only check whether the nodes are ready"),
    cli.option(*EXPECT),
    cli.option("--nproc-per-node N", "ranks on each node (default: one per GPU)", type=cli.number(1, 1024)),
    cli.option("--master-addr ADDRESS", "rendezvous address (default: the first node's)"),
    cli.option("--port PORT", "rendezvous port on the first node (default: any)", type=cli.port_number, default=0),
    cli.option("--within TIME", "deadline for the run", type=cli.seconds, default="24 h"),
    cli.option("--report-dir DIR", "for the folder of each run, here", type=Path, default=Path("gpucluster-ssh")),
    cli.option("--python PATH", "python on the nodes (default: the path of this one)"),
    cli.option("--hosts HOSTS", "the hosts file", type=Path, required=True),
    *ACCESS,
    examples="""\
        gpucluster run --hosts hosts --check
        gpucluster run --hosts hosts --expect 8xH100 -- acceptance/
        gpucluster run --hosts hosts --expect 8xH100 --exclude gpucluster-sweep/latest/exclude.txt -- -k nccl
        """,
    codes=run_exit_codes(
        {
            0: "with --check: all nodes are ready",
            2: "also wrong usage",
            4: "also: nothing can be written here",
            11: "also: nodes are not ready, a connection was lost, or rank 0's journal could not be copied",
            12: "also: a node did not answer, and nothing was run",
        }
    ),
    usage="gpucluster run --hosts HOSTS [options] [-- PYTEST_ARGUMENTS]",
)
def _run_hosts(options: argparse.Namespace) -> int:
    """Run the suite on the nodes of a hosts file: OpenSSH starts `gpucluster run` on each of them.

    All nodes are checked first. Output of rank 0's node is printed as it is, that of others with the node's name in
    front, and the reports of every node are copied here. The first node of the file has rank 0 and the rendezvous port.
    When this command ends or a connection is lost, the node ends what runs there. Arguments after -- go to pytest
    (default: the acceptance suite).

    hosts file, one node a line, such as deploy/bare-metal/hosts.example:
      gpu-001
      admin@gpu-[002-016] port=2222
      gpu-017 address=10.0.0.17   # if its name does not resolve
    """
    signals = Signals()
    with (
        handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signals.handle),
        cli.file_errors(cli.NO_OUTPUT, "reports of the nodes cannot be written"),
    ):
        return _run(options, signals)


def _run(options: argparse.Namespace, signals: Signals) -> int:
    arguments = tuple(options.forwarded)
    require_unreserved(arguments)
    per_node = parse_per_node(options.expect) if options.expect is not None else None
    hosts, access = select_nodes(options)
    plan = SshPlan(
        hosts=hosts,
        access=access,
        per_node=per_node,
        ranks=options.nproc_per_node,
        arguments=arguments,
        run_id=unique_run_id(),
        master=options.master_addr or hosts[0].address,
        port=options.port or random_port(),
    )
    requests = {
        host.name: ssh.request(
            "probe",
            directory=access.directory,
            report_dir=access.report_dir,
            arguments=list(arguments),
            master=plan.master,
            port=plan.port if host is hosts[0] else None,
        )
        for host in hosts
    }
    replies = query_nodes(hosts, requests, access, stop=lambda: bool(signals.numbers))
    checks = check_nodes(hosts, replies)
    if signals.numbers:
        raise cli.CommandError(cli.USAGE, f"interrupted ({signals.name}) before anything was started")
    states = {check.state for check in checks}
    code = NOT_READY if preflight.NOT_READY in states else UNREACHABLE if preflight.NO_ANSWER in states else cli.DONE
    if options.check or code:
        print(preflight_table(checks))
    if options.check:
        print(f"gpucluster: {readiness_text(checks)}")
        return code
    if code:
        hint = "; --exclude runs without them" if code == UNREACHABLE else ""
        raise cli.CommandError(code, f"nothing was run: {readiness_text(checks)}{hint}")
    if access.environ:
        show(f"forwarded to the nodes: {', '.join(sorted(access.environ))}", True)
    return _run_plan(plan, options, signals)


def _run_plan(plan: SshPlan, options: argparse.Namespace, signals: Signals) -> int:
    directory = new_run_directory(options.report_dir.absolute())
    rendezvous = f"rank 0 on {plan.hosts[0].name}, rendezvous at {plan.master}:{plan.port}"
    show(f"{len(plan.hosts)} nodes, {rendezvous}; reports: {directory}", True)
    results = RemoteRun(plan, directory, within_seconds=options.within, show=show).wait(signals)
    journal, problem = read_result(directory / plan.hosts[0].name)
    problem = problem or results[0].copy_problem or results[0].problem or "the node of rank 0 has left none"
    found = conclude(results, journal, problem=problem, interrupted=signals.name)
    content = {
        "schema_version": 2,
        "command": sys.argv,
        "exit": found.exit,
        "line": found.line,
        "master": f"{plan.master}:{plan.port}",
        "nodes": [asdict(result) for result in results],
    }
    files.atomic_write(directory / "ssh.json", json.dumps(content, indent=1) + "\n")
    if journal is not None:  # also where rank 0 could not render its reports any more
        path = Path(journal.journal)
        for name, why in registry.write(read(path), directory, registry.FILES, run_folder=path.parent).items():
            show(f"{name}: {why}", True)
    for result in results:
        if result.copy_problem:
            show(f"{result.name}: reports not copied: {result.copy_problem}", True)
    show(f"reports: {directory}", True)
    show(found.line, True)
    return found.exit


def show(line: str, is_error: bool) -> None:
    """Print a line on standard output, or on standard error."""
    print(printable(line), file=sys.stderr if is_error else sys.stdout, flush=True)


COMMAND = _run_hosts
