"""``gpucluster sweep``: many nodes, each alone and all at once, then the survivors together."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pytest_gpucluster.cli.command import complain, explain
from pytest_gpucluster.cli.run_hosts import add_access, directory_of, hosts_and_access, run_id_of
from pytest_gpucluster.errors import EnvironmentBroken, OptionError, UnitError
from pytest_gpucluster.journal.verdict import EXIT_CODES
from pytest_gpucluster.metrics import units

if TYPE_CHECKING:
    from pytest_gpucluster.runners.sweep import Plan
    from pytest_gpucluster.runners.sweep_result import Scheduler

    _Begun = tuple[tuple[str, ...], str, int, Callable[[Plan, Path], Scheduler]]
    """Nodes, python and port where the options name none, and what makes the scheduler."""

USAGE, BROKE = 2, 11

_SWEEP = """\
Run the acceptance suite on every node alone, all nodes at once, without any rendezvous between them; then run it once
more on all nodes together that did not fail. What follows -- goes to pytest (default: acceptance/).
"""

_SLURM = """\
Sweep the nodes of the allocation that this command runs in: one srun a node, then one srun over the survivors. The
report directory and this folder must be on a file system that all nodes share. Ask for the allocation with --no-kill:
else a node that goes down ends the whole job.
"""

_SSH = """\
Sweep the nodes of a hosts file over ssh, as `gpucluster run --hosts` does with one run: each node's reports are brought
here. Nodes that do not answer are told in the table, and the others go on. Nothing needs to be shared.
"""

_KUBERNETES = """\
Sweep nodes of a cluster with kubectl: an Indexed Job with one pod a node, then an Indexed Job with a headless service
over the survivors. The Jobs are deleted at the end.
"""

EXIT_CODES_OF_SWEEP = f"""\
exit codes:
  0   every node passed alone, and all of them together
  1   {EXIT_CODES[1].replace("REJECTED: ", "REJECTED: a node, or the nodes together: ")}
  2   wrong usage, nothing was measured; or BROKEN: interrupted, and the table so far is kept
  10  INCOMPLETE: nothing failed, but something did not run or was not judged, or the survivors did not run together
  11  BROKEN: a node gave no answer, or its run broke
"""

_EXAMPLES = """\
  salloc --nodes=64 --gpus-per-node=8 --exclusive --no-kill gpucluster sweep slurm --expect 8xH100
  gpucluster sweep slurm --expect 8xH100 --nodes 'gpu-[001-016]' -- acceptance/ --gpucluster-profile quick
  gpucluster sweep ssh hosts --expect 8xH100
  gpucluster sweep kubernetes --expect 8xH100 --selector nvidia.com/gpu.count=8 --pod-template pod.yaml
"""
_PYTEST_DEFAULT = ("acceptance/",)
_PORT_IN_PODS = 29500
"""torchrun's own. A pod has an address of its own, so that no other run can have taken it."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``sweep slurm``, ``sweep kubernetes`` and ``sweep ssh``."""
    explain(parser, _SWEEP, _EXAMPLES, EXIT_CODES_OF_SWEEP)
    schedulers = parser.add_subparsers(dest="scheduler", metavar="SCHEDULER", required=True)
    slurm = schedulers.add_parser("slurm", help="in an allocation of Slurm", usage=_usage("slurm"))
    explain(slurm, _SLURM, _EXAMPLES, EXIT_CODES_OF_SWEEP)
    _add_common(slurm)
    slurm.add_argument("--nodes", metavar="HOSTLIST", help="of the allocation, such as 'gpu-[003,007]' (default: all)")
    slurm.add_argument(
        "--at-once", metavar="N", type=_count, default=1024, help="so many nodes alone at a time (default: 1024)"
    )
    slurm.add_argument(
        "--srun",
        metavar="OPTION",
        action="append",
        default=[],
        help="one more option for every srun, such as --srun=--gpus-per-node=8; as often as needed",
    )
    ssh = schedulers.add_parser("ssh", help="over ssh, without a scheduler", usage=_usage("ssh HOSTS"))
    explain(ssh, _SSH, _EXAMPLES, EXIT_CODES_OF_SWEEP)
    _add_common(ssh)
    add_access(ssh)
    ssh.add_argument(
        "--at-once", metavar="N", type=_count, default=256, help="so many nodes alone at a time (default: 256)"
    )
    kubernetes = schedulers.add_parser("kubernetes", help="with kubectl", usage=_usage("kubernetes"))
    explain(kubernetes, _KUBERNETES, _EXAMPLES, EXIT_CODES_OF_SWEEP)
    _add_common(kubernetes)
    which = kubernetes.add_mutually_exclusive_group(required=True)
    which.add_argument("--nodes", metavar="HOSTLIST", help="names of nodes, such as 'gpu-[003,007]' or a,b")
    which.add_argument("--selector", metavar="LABELS", help="nodes with these labels, as of kubectl get nodes -l")
    kubernetes.add_argument(
        "--pod-template",
        metavar="FILE",
        type=Path,
        required=True,
        help="a Pod, as YAML or JSON: image, resources, volumes and all that a pod needs on these nodes",
    )
    kubernetes.add_argument("--namespace", metavar="NAME", help="of the Jobs (default: kubectl's own)")
    kubernetes.add_argument(
        "--pod-report-dir",
        metavar="DIR",
        default="/tmp/gpucluster-report",
        help="where each run leaves its folder, in the pod; on a volume, the journals stay (default: %(default)s)",
    )
    kubernetes.add_argument("--keep", action="store_true", help="do not delete the Jobs at the end")


def run(options: argparse.Namespace) -> int:
    """Carry out a sweep and return its exit code. What stood after ``--`` goes to pytest."""
    from pytest_gpucluster.runners import sweep

    try:
        with _signals_end_it():
            return _sweep(options, options.passed_on or list(_PYTEST_DEFAULT))
    except OptionError as error:
        return complain(str(error), USAGE)
    except EnvironmentBroken as error:
        return complain(str(error), BROKE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return complain(f"what the sweep has found cannot be kept: {where}{error.strerror or error}", BROKE)
    except (KeyboardInterrupt, sweep.Stopped):  # before anything was started: what comes later, the sweep itself tells
        return complain("interrupted", USAGE)


def _sweep(options: argparse.Namespace, pytest_arguments: list[str]) -> int:
    from pytest_gpucluster.journal.run_directory import new_run_directory
    from pytest_gpucluster.runners import sweep, sweep_result

    each = sweep.each_node(options.expect)
    sweep.require_free(pytest_arguments)
    begin = {"slurm": _in_slurm, "kubernetes": _on_kubernetes, "ssh": _over_ssh}[options.scheduler]
    nodes, python, port, scheduler_of = begin(options, each.gpus_per_node)
    sweep.require_nodes(nodes)
    todo = sweep.Plan(
        nodes=nodes,
        each=each,
        pytest_arguments=tuple(pytest_arguments),
        alone_within=options.alone_within,
        together_within=options.together_within,
        at_once=getattr(options, "at_once", len(nodes)),
        min_nodes=options.min_nodes,
        python=options.python or python,
        port=options.port or port,
    )
    directory = new_run_directory(options.report_dir.absolute())
    scheduler = scheduler_of(todo, directory)
    _say(f"{len(nodes)} nodes, each alone; reports: {directory}")
    record = sweep_result.Evidence(directory, scheduler=options.scheduler, command=sys.argv, nodes=nodes)
    return sweep.sweep(todo, scheduler, record, _say).exit


def _in_slurm(options: argparse.Namespace, gpus: int) -> _Begun:
    from pytest_gpucluster.runners import sweep_slurm

    nodes = sweep_slurm.allocated(os.environ, options.nodes)
    sweep_slurm.require_programs()
    return (
        *(nodes, sys.executable, sweep_slurm.port_of(os.environ)),
        lambda todo, directory: sweep_slurm.Slurm(todo, directory, environ=os.environ, options=options.srun),
    )


def _over_ssh(options: argparse.Namespace, gpus: int) -> _Begun:
    from pytest_gpucluster.runners import sweep_ssh
    from pytest_gpucluster.runners.hosts import handed_on
    from pytest_gpucluster.runners.ssh import require_ssh

    hosts, access = hosts_and_access(options)
    for host in hosts:
        if host.slots not in (None, gpus):
            raise OptionError(f"{host.name} has slots={host.slots} in the hosts file, but --expect says {gpus}")
    environ, left = handed_on(os.environ, options.env)
    if left:
        _say(f"set here, and not handed on (--env NAME does): {', '.join(left)}")
    require_ssh(access)
    return (
        *(tuple(host.name for host in hosts), access.python, _PORT_IN_PODS),
        lambda todo, directory: sweep_ssh.Ssh(
            *(todo, directory),
            hosts=hosts,
            access=access,
            node_directory=directory_of(options),
            node_report_dir=options.node_report_dir,
            run_id=run_id_of(directory),
            environ=environ,
            answer_seconds=options.connect_within + options.answer_within,
            port=options.port or 0,
        ),
    )


def _on_kubernetes(options: argparse.Namespace, gpus: int) -> _Begun:
    from pytest_gpucluster.runners import sweep_kubernetes

    kubectl = sweep_kubernetes.Kubectl(options.namespace)
    template = kubectl.template(options.pod_template, gpus=gpus)
    nodes = kubectl.nodes(options.nodes, options.selector)
    return (
        *(tuple(node.name for node in nodes), "python", _PORT_IN_PODS),
        lambda todo, directory: sweep_kubernetes.Kubernetes(
            *(todo, directory),
            kubectl=kubectl,
            template=template,
            nodes=nodes,
            report_dir=options.pod_report_dir,
            keep=options.keep,
        ),
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expect", metavar="GPUSxSKU", required=True, help="what each node has, such as 8xH100: one rank for each GPU"
    )
    parser.add_argument(
        "--alone-within",
        metavar="TIME",
        type=_seconds,
        default="2 h",
        help="the longest that a node may take alone; then it has given no answer (default: %(default)s)",
    )
    parser.add_argument(
        "--together-within",
        metavar="TIME",
        type=_seconds,
        default="4 h",
        help="the longest that the survivors may take together (default: %(default)s)",
    )
    parser.add_argument(
        "--min-nodes",
        metavar="N",
        type=_nodes,
        default=2,
        help="with fewer survivors they do not run together, and the sweep is INCOMPLETE (default: %(default)s)",
    )
    parser.add_argument(
        "--report-dir",
        metavar="DIR",
        type=Path,
        default=Path("gpucluster-sweep"),
        help="where each sweep leaves its folder (default: %(default)s)",
    )
    parser.add_argument(
        "--python", metavar="PATH", help="the python to run on the nodes (default: this one; pods: python)"
    )
    parser.add_argument(
        "--port",
        metavar="PORT",
        type=_port,
        help="where the survivors meet, on the first of them (default: one is chosen)",
    )


def _usage(scheduler: str) -> str:
    return f"gpucluster sweep {scheduler} --expect GPUSxSKU [options] [-- PYTEST_ARGUMENTS]"


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a sweep as Ctrl-C does: what was started is ended, and the table so far is kept."""
    from pytest_gpucluster.runners.sweep import Stopped

    def end(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _seconds(text: str) -> float:
    try:
        # As --gpucluster-soak: 2h is as good as 2 h.
        seconds = units.parse(text, like="s").to("s")
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= seconds <= 30 * 24 * 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 s and 30 days")
    return seconds


def _count(text: str, least: int = 1, most: int = 10**6) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return number


def _nodes(text: str) -> int:
    return _count(text, 2)


def _port(text: str) -> int:
    return _count(text, 1024, 65535)


def _say(line: str) -> None:
    print(line, flush=True)
