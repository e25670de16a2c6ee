"""``gpucluster run --hosts``: one run over the nodes of a hosts file, started over ssh; how nodes are reached."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster import __version__
from pytest_gpucluster.cli.command import NO_OUTPUT, USAGE, complain, explain
from pytest_gpucluster.errors import EnvironmentBroken, OptionError, UnitError
from pytest_gpucluster.journal.verdict import EXIT_CODES
from pytest_gpucluster.metrics import units
from pytest_gpucluster.text import one_line, printable

if TYPE_CHECKING:
    from pytest_gpucluster.agreement.preflight import Expectation
    from pytest_gpucluster.runners.hosts import Host, Plan
    from pytest_gpucluster.runners.preflight import Node
    from pytest_gpucluster.runners.ssh import Access
    from pytest_gpucluster.runners.ssh_job import Brought, Conclusion, Heard, Record


def add_access(parser: argparse.ArgumentParser, name: str = "hosts") -> None:
    """Add what says which nodes there are, and how they are reached."""
    hosts = parser.add_argument(name, metavar="HOSTS", type=Path, help="the hosts file")
    hosts.required = True
    parser.add_argument("--nodes", metavar="HOSTLIST", help="only these of the file, such as 'gpu-[003,007]'")
    parser.add_argument(
        "--exclude", metavar="HOSTLIST", help="not these; or the path of an exclude.txt that a sweep or a run has left"
    )
    parser.add_argument(
        "--directory", metavar="DIR", help="the folder of the suite on the nodes (default: the path of this one)"
    )
    parser.add_argument(
        "--node-report-dir",
        metavar="DIR",
        default="gpucluster-report",
        help="where the nodes keep the reports until they are brought (default: %(default)s)",
    )
    if not any("--python" in action.option_strings for action in parser._actions):
        parser.add_argument("--python", metavar="PATH", help="the python on the nodes (default: the path of this one)")
    parser.add_argument(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="a variable for the nodes; as often as needed. GPUCLUSTER_* and PYTEST_ADDOPTS are handed on anyway",
    )
    parser.add_argument(
        "--ssh",
        metavar="OPTION",
        action="append",
        default=[],
        help="one more option for every ssh, such as --ssh=-oStrictHostKeyChecking=accept-new; as often as needed",
    )
    parser.add_argument(
        "--connect-within",
        metavar="TIME",
        type=seconds,
        default="10 s",
        help="the longest that a node may take to let us in (default: %(default)s)",
    )
    parser.add_argument(
        "--answer-within",
        metavar="TIME",
        type=seconds,
        default="60 s",
        help="the longest that a node may take to answer the first questions (default: %(default)s)",
    )


def hosts_and_access(options: argparse.Namespace) -> tuple[tuple[Host, ...], Access]:
    """Return the nodes that are meant, and how they are reached.

    Raises:
        OptionError: the hosts file or a list of nodes is wrong.
        EnvironmentBroken: they are more than this process may have open files for.
    """
    from pytest_gpucluster.runners.hosts import chosen, read_hosts
    from pytest_gpucluster.runners.ssh import Access, make_room

    for option in options.ssh:
        if not option.startswith("-"):
            raise OptionError(f"--ssh {option}: not an option of ssh; write it as one word: --ssh=-oProxyJump=bastion")
    hosts = chosen(read_hosts(options.hosts), options.nodes, options.exclude)
    make_room(len(hosts))
    return (
        hosts,
        Access(
            python=options.python or sys.executable,
            options=tuple(options.ssh),
            connect_seconds=max(1, round(options.connect_within)),
        ),
    )


def directory_of(options: argparse.Namespace) -> str:
    """Return where to work on the nodes."""
    return str(options.directory or Path.cwd())


def run_id_of(directory: Path) -> str:
    """Return a name for a run that no other operator's has, beginning as its folder here."""
    return f"{directory.name}-{secrets.token_hex(3)}"


def seconds(text: str) -> float:
    """Read a time of an option, such as ``90 s`` or ``2h``, as seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or out of range.
    """
    try:
        found = units.parse(text, like="s").to("s")
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= found <= 30 * 24 * 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 s and 30 days")
    return found


DONE, BROKE, SILENT = 0, 11, 12
NOT_READY = 11

_SSH = """\
Run the suite over the nodes of a hosts file: OpenSSH starts `gpucluster run` on each of them. All nodes are looked at
first; then what rank 0 prints is shown as it is, what others print with the node's name in front, and the reports of
every node are brought here. The first node of the file is the one of rank 0, and all meet there. Nothing goes on
where this command has ended or the connection is gone. What follows -- goes to pytest (default: acceptance/).
"""

_EXAMPLES = """\
  gpucluster run --hosts hosts --check
  gpucluster run --hosts hosts --expect 8xH100 -- acceptance/
  gpucluster run --hosts hosts --expect 8xH100 --exclude gpucluster-sweep/latest/exclude.txt -- acceptance/ -k nccl
  gpucluster run --hosts hosts --info && gpucluster node diff gpucluster-ssh/latest
"""

_HOSTS = """\
hosts file, one node a line, such as deploy/bare-metal/hosts.example:
  gpu-001
  gpu-[002-016] user=admin port=2222 slots=8
  gpu-017 address=10.0.0.17   # where it is reached, if not by its name
"""

SSH_EXIT_CODES = (
    "exit codes, those of the run:\n"
    + "".join(f"  {code:<2} {what}\n" for code, what in EXIT_CODES.items())
    + "  12 a node did not answer: nothing was run; or, with --without-unreachable, all others have passed\n"
    "     2 also for wrong usage, 4 also where nothing can be written here; 11 also where nodes are not ready, the\n"
    "     connection to one was lost, or no record of the run could be brought. With --check and --info: 0 all nodes\n"
    "     are ready or told, 11 some are not, 12 some did not answer\n"
)
_PYTEST_DEFAULT = ("acceptance/",)
_RENDER_SECONDS = 120


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ssh``."""
    explain(parser, f"{_SSH}\n{_HOSTS}", _EXAMPLES, SSH_EXIT_CODES)
    parser.usage = "gpucluster run --hosts HOSTS [options] [-- PYTEST_ARGUMENTS]"
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="only look whether the nodes are ready, and run nothing")
    what.add_argument(
        "--info", action="store_true", help="bring what `gpucluster node info` tells of every node, as NAME.json"
    )
    parser.add_argument(
        "--expect",
        metavar="GPUSxSKU",
        help="what each node has, such as 8xH100: one rank for each GPU",
    )
    parser.add_argument(
        "--nproc-per-node", metavar="N", type=_ranks, help="so many ranks on each node (default: a rank for each GPU)"
    )
    parser.add_argument(
        "--without-unreachable",
        action="store_true",
        help="run on the nodes that answer; the exit code is then never 0, but 12 where they all pass",
    )
    parser.add_argument(
        "--master-addr", metavar="ADDRESS", help="where the others find the first node (default: its address)"
    )
    parser.add_argument(
        "--port", metavar="PORT", type=_port, default=0, help="where all meet, on the first node (default: a free one)"
    )
    parser.add_argument(
        "--within",
        metavar="TIME",
        type=seconds,
        default="24 h",
        help="the longest that a run may take (default: %(default)s)",
    )
    parser.add_argument(
        "--report-dir",
        metavar="DIR",
        type=Path,
        default=Path("gpucluster-ssh"),
        help="where each run leaves its folder, here (default: %(default)s)",
    )
    add_access(parser, "--hosts")


def run(options: argparse.Namespace) -> int:
    """Look at the nodes, run, and return the exit code. What stood after ``--`` goes to pytest."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.runners.ssh_job import listening

    try:
        with listening() as heard:
            return _run(options, heard)
    except OptionError as error:
        for line in str(error).splitlines():
            complain(line, USAGE)
        return USAGE
    except EnvironmentBroken as error:
        return complain(str(error), BROKE)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:
            raise  # who reads has had enough, which the command line knows how to take
        where = f"{error.filename}: " if error.filename else ""
        return complain(f"what the nodes leave cannot be kept: {where}{error.strerror or error}", NO_OUTPUT)


def _run(options: argparse.Namespace, heard: Heard) -> int:
    from pytest_gpucluster.runners.hosts import handed_on, require_agreement, require_free
    from pytest_gpucluster.runners.preflight import counted, preflight_table
    from pytest_gpucluster.runners.ssh import require_ssh

    arguments = tuple(options.passed_on or _PYTEST_DEFAULT)
    require_free(arguments)
    each = _each(options.expect)
    hosts, access = hosts_and_access(options)
    require_agreement(hosts, each)
    environ, left = handed_on(os.environ, options.env)
    require_ssh(access)
    if options.info:
        return _info(options, hosts, access, heard)
    nodes = _examine(options, hosts, access, arguments, heard)
    if heard.numbers:
        return complain(f"interrupted ({heard.name}) before anything was started", USAGE)
    code = _readiness(nodes)
    if options.check or code:
        print(preflight_table(nodes))
    if options.check:
        print(f"gpucluster: {counted(nodes)}")
        return code
    silent = {node.host.name: node.problems[0] for node in nodes if not node.facts}
    if code == NOT_READY or (silent and not options.without_unreachable) or len(silent) == len(nodes):
        remedy = "; --without-unreachable runs on those that answer" if 0 < len(silent) < len(nodes) else ""
        return complain(f"nothing was run: {counted(nodes)}{remedy if code == SILENT else ''}", code)
    for name in silent:
        _say(f"runs without {name}: {silent[name]}", True)
    if environ:
        _say(f"handed on to the nodes: {', '.join(sorted(environ))}", True)
    if left:
        _say(f"set here, and not handed on (--env NAME does): {', '.join(left)}", True)
    return _together(options, [node for node in nodes if node.facts], access, each, arguments, environ, silent, heard)


# ---- before


def _each(text: str | None) -> Expectation | None:
    from pytest_gpucluster.agreement.preflight import Expectation

    if text is None:
        return None
    try:
        each = Expectation.parse(f"1x{text}")
    except OptionError:
        each = None
    if each is None or re.match(r"\d+[xX]", each.sku or ""):
        raise OptionError(
            f"--expect {text}: not what one node has; write its GPUs and their model, such as 8xH100, or 8"
        )
    return each


def _examine(
    options: argparse.Namespace, hosts: Sequence[Host], access: Access, arguments: Sequence[str], heard: Heard
) -> Sequence[Node]:
    from pytest_gpucluster.runners import ssh
    from pytest_gpucluster.runners.preflight import examine_nodes
    from pytest_gpucluster.runners.ssh import ask_node

    first = hosts[0]

    def request(host: Host) -> bytes:
        return ssh.request(
            "probe",
            directory=directory_of(options),
            report_dir=options.node_report_dir,
            arguments=list(arguments),
            master=options.master_addr or first.address,
            port=options.port if host is first else None,
        )

    within = options.connect_within + options.answer_within
    replies = ask_node(hosts, request, access, within_seconds=within, stop=lambda: bool(heard.numbers))
    nodes = examine_nodes(hosts, replies, __version__)
    answered = [node.host for node in nodes if node.facts]
    if not nodes[0].facts and answered and options.without_unreachable and not options.check:
        # All meet on another one then, which has to be looked at as such.
        again = {node.host.name: node for node in _examine(options, answered, access, arguments, heard)}
        return [again.get(node.host.name, node) for node in nodes]
    return nodes


def _readiness(nodes: Sequence[Node]) -> int:
    from pytest_gpucluster.runners.preflight import NO_ANSWER
    from pytest_gpucluster.runners.preflight import NOT_READY as UNFIT

    states = {node.state for node in nodes}
    return NOT_READY if UNFIT in states else SILENT if NO_ANSWER in states else DONE


def _info(options: argparse.Namespace, hosts: Sequence[Host], access: Access, heard: Heard) -> int:
    from pytest_gpucluster.journal.run_directory import new_run_directory
    from pytest_gpucluster.runners import ssh
    from pytest_gpucluster.runners.ssh import ask_node

    directory = new_run_directory(options.report_dir.absolute())
    request = ssh.request("run", words=["node", "info", "all", "--json"])
    within = options.connect_within + options.answer_within
    replies = ask_node(hosts, lambda host: request, access, within_seconds=within, stop=lambda: bool(heard.numbers))
    if heard.numbers:
        return complain(f"interrupted ({heard.name}) before all nodes had told what they are", USAGE)
    told, code = 0, DONE
    for host in hosts:
        reply = replies[host.name]
        try:
            answer = json.loads(reply.text) if not reply.why and reply.exit == 0 else None
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            (directory / f"{host.name}.json").write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
            told += 1
            continue
        code = max(code, NOT_READY if reply.greeted else SILENT)
        why = reply.why or f"ended with exit code {reply.exit}, and no JSON of it"
        print(printable(f"{host.name}: {'' if reply.greeted else 'no answer: '}{one_line(why, 300)}"))
    print(f"gpucluster: {told} of {len(hosts)} nodes told what they are: {directory}")
    return code


# ---- the run


def _together(
    options: argparse.Namespace,
    nodes: Sequence[Node],
    access: Access,
    each: Expectation | None,
    arguments: tuple[str, ...],
    environ: Mapping[str, str],
    silent: Mapping[str, str],
    heard: Heard,
) -> int:
    from pytest_gpucluster.journal.run_directory import new_run_directory
    from pytest_gpucluster.runners.hosts import Plan
    from pytest_gpucluster.runners.ssh_job import OTHERS_SECONDS, carry_out

    directory = new_run_directory(options.report_dir.absolute())
    first = nodes[0]
    plan = Plan(
        hosts=tuple(node.host for node in nodes),
        each=each,
        ranks=options.nproc_per_node,
        arguments=arguments,
        directory=directory_of(options),
        node_report_dir=options.node_report_dir,
        run_id=run_id_of(directory),
        environ=environ,
        master=options.master_addr or first.host.address,
        port=first.port or options.port,
    )
    meet = f"rank 0 on {first.host.name}, all meet at {plan.master}:{plan.port}"
    _say(f"{len(nodes)} nodes, {meet}; reports: {directory}", True)
    brought = carry_out(
        *(plan, access, directory),
        within_seconds=options.within,
        answer_seconds=options.connect_within + options.answer_within,
        others_seconds=OTHERS_SECONDS,
        heard=heard,
        say=_say,
    )
    record, journal, no_record = _record(brought[first.host.name])
    found = _conclude(plan, brought, record, no_record, silent, heard)
    _keep(directory, plan, brought, silent, found)
    if record is not None:
        _render(directory, journal)
    for name, what in brought.items():
        if what.missing:
            _say(f"{name}: not brought: {what.missing}", True)
    _say(f"reports: {directory}", True)
    _say(found.line, True)
    return found.exit


def _record(brought: Brought) -> tuple[Record | None, str, str]:
    """Return what the journal says that rank 0's node has left, and where it is now; or None, and why there is none."""
    from pytest_gpucluster.runners.ssh_job import Record
    from pytest_gpucluster.runners.sweep_result import answer_in

    if brought.folder is None:
        return None, "", brought.missing or brought.why
    answer, why = answer_in(brought.folder)
    if answer is None:
        return None, "", why or "the node of rank 0 has left no journal"
    record = Record(
        word=answer.verdict,
        exit=answer.exit,
        reason=answer.reason,
        rehearsal=answer.rehearsal,
        nnodes=answer.nnodes,
    )
    return record, answer.journal, ""


def _conclude(
    plan: Plan,
    brought: Mapping[str, Brought],
    record: Record | None,
    no_record: str,
    silent: Mapping[str, str],
    heard: Heard,
) -> Conclusion:
    from pytest_gpucluster.runners.ssh_job import NodeEnd, conclude

    ends = []
    for host in plan.hosts:
        what = brought[host.name]
        # What was ended from here may still say 0; nobody knows what it would have come to.
        late = what.stopped if what.exit == 0 else ""
        ends.append(NodeEnd(name=host.name, exit=None if late else what.exit, why=late or what.why or what.stopped))
    return conclude(ends, record, no_record=no_record, silent=silent, interrupted=heard.name)


def _keep(
    directory: Path, plan: Plan, brought: Mapping[str, Brought], silent: Mapping[str, str], found: Conclusion
) -> None:
    """Leave ``ssh.json``: who took part, and what came of each."""
    from pytest_gpucluster import files

    content = {
        "schema_version": 1,
        "command": sys.argv,
        "exit": found.exit,
        "line": found.line,
        "master": f"{plan.master}:{plan.port}",
        "no_answer": dict(silent),
        "nodes": [
            {
                "node": host.name,
                "node_rank": node_rank,
                "exit": brought[host.name].exit,
                "seconds": brought[host.name].seconds,
                "why": brought[host.name].why or brought[host.name].stopped,
                "not_brought": brought[host.name].missing,
                "on_the_node": plan.folder(host),
            }
            for node_rank, host in enumerate(plan.hosts)
        ],
    }
    files.atomic_write(directory / "ssh.json", json.dumps(content, indent=1) + "\n")


def _render(directory: Path, journal: str) -> None:
    """Render all reports of the journal beside the nodes' folders, also where rank 0 could not do so any more."""
    command = [sys.executable, "-m", "pytest_gpucluster", "report", journal, "--all", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RENDER_SECONDS, check=False)
        problem = one_line(done.stderr, 300) if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = one_line(str(error), 300)
    if problem:
        _say(f"reports are not rendered: {problem}", True)


def _say(line: str, aside: bool) -> None:
    print(printable(line), file=sys.stderr if aside else sys.stdout, flush=True)


def _whole(text: str, least: int, most: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else -1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return number


def _ranks(text: str) -> int:
    return _whole(text, 1, 1024)


def _port(text: str) -> int:
    return _whole(text, 1024, 65535)
