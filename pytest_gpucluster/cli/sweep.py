"""``gpucluster sweep``: every node alone, all at once, then the survivors together."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.cli.run_hosts import ACCESS, EXPECT, select_nodes, unique_run_id
from pytest_gpucluster.journal.verdict import EXIT_CODES
from pytest_gpucluster.launch.suite import MODULE

if TYPE_CHECKING:
    from pytest_gpucluster.runners.sweep import Scheduler

_EXAMPLES = """\
    salloc --nodes=64 --gpus-per-node=8 --exclusive --no-kill gpucluster sweep slurm --expect 8xH100
    gpucluster sweep slurm --expect 8xH100 --nodes 'gpu-[001-016]' -- acceptance/ --gpucluster-profile quick
    gpucluster sweep ssh hosts --expect 8xH100
    gpucluster sweep kubernetes --expect 8xH100 --selector nvidia.com/gpu.count=8 --pod-template pod.yaml
    """
_EXIT_CODES = {
    0: "every node passed alone, and all of them together",
    1: EXIT_CODES[1].replace("REJECTED: ", "REJECTED: a node, or the nodes together: "),
    2: "wrong usage, nothing was measured; or BROKEN: interrupted, with the table so far",
    10: "INCOMPLETE: nothing failed, but something did not run or was not judged, or there was no joint run",
    11: "BROKEN: a node gave no answer, or its run broke",
    12: EXIT_CODES[12],
}
_USAGE = "gpucluster sweep {} --expect GPUSxSKU [options] [-- PYTEST_ARGUMENTS]"
_COMMON = (
    cli.option(*EXPECT, required=True),
    cli.option("--alone-within TIME", "deadline for a node alone; then no answer", type=cli.seconds, default="2 h"),
    cli.option("--together-within TIME", "deadline for the survivors' joint run", type=cli.seconds, default="4 h"),
    cli.option("--min-nodes N", "fewest survivors for a joint run, else INCOMPLETE", type=cli.number(2), default=2),
    cli.option("--report-dir DIR", "for the folder of each sweep", type=Path, default=Path("gpucluster-sweep")),
    cli.option("--python PATH", "python on the nodes (default: this one; in pods: python)"),
    cli.option("--port PORT", "rendezvous port of the joint run (default: one is chosen)", type=cli.port_number),
)


def _at_once(default: int) -> cli.Argument:
    return cli.option("--at-once N", "the most nodes that run alone at a time", type=cli.number(), default=default)


@cli.command(
    *_COMMON,
    cli.option("--nodes HOSTLIST", "of the allocation, such as 'gpu-[003,007]' (default: all)"),
    _at_once(1024),
    cli.option("--srun OPTION", "an option for every srun, such as --srun=--gpus-per-node=8", action="append"),
    help="in a Slurm allocation",
    usage=_USAGE.format("slurm"),
)
def _slurm(options: argparse.Namespace) -> int:
    """Sweep the nodes of the Slurm allocation that this command runs in: one srun for each node, then one over the
    survivors.

    The report directory and this folder must be on a shared file system. Request the allocation with --no-kill:
    otherwise a node that goes down ends the whole job.
    """
    from pytest_gpucluster.runners.sweep_slurm import Slurm

    return _sweep(options, lambda gpus: Slurm(os.environ, wanted=options.nodes, options=options.srun))


@cli.command(
    *_COMMON,
    cli.argument("hosts", "the hosts file", type=Path),
    *ACCESS,
    _at_once(256),
    help="over ssh, without a scheduler",
    usage=_USAGE.format("ssh HOSTS"),
)
def _ssh(options: argparse.Namespace) -> int:
    """Sweep the nodes of a hosts file over ssh.

    Each node's reports are copied here. Nodes that do not answer are listed in the table, and the others go on. No
    shared file system is needed.
    """
    from pytest_gpucluster.runners.ssh_job import Ssh

    return _sweep(options, lambda gpus: Ssh(*select_nodes(options), unique_run_id()))


@cli.command(
    *_COMMON,
    cli.one_of(
        cli.option("--nodes HOSTLIST", "names of nodes, such as 'gpu-[003,007]' or a,b"),
        cli.option("--selector LABELS", "nodes with these labels, as of kubectl get nodes -l"),
        required=True,
    ),
    cli.option(
        "--pod-template FILE",
        "a Pod as YAML or JSON: image, resources, volumes and everything else that a pod needs on these nodes",
        type=Path,
        required=True,
    ),
    cli.option("--namespace NAME", "of the Jobs (default: kubectl's own)"),
    cli.option("--pod-report-dir DIR", "for reports in the pod, maybe on a volume", default="/tmp/gpucluster-report"),
    help="with kubectl",
    usage=_USAGE.format("kubernetes"),
)
def _kubernetes(options: argparse.Namespace) -> int:
    """Sweep nodes of a cluster with kubectl: an Indexed Job with one pod for each node, then an Indexed Job with a
    headless service over the survivors. The Jobs are deleted at the end.
    """
    from pytest_gpucluster.runners.sweep_kubernetes import Kubernetes

    return _sweep(
        options,
        lambda gpus: Kubernetes(
            options.namespace,
            template=options.pod_template,
            gpus=gpus,
            wanted=options.nodes,
            selector=options.selector,
            report_dir=options.pod_report_dir,
        ),
    )


def _sweep(options: argparse.Namespace, scheduler_of: Callable[[int], Scheduler]) -> int:
    from pytest_gpucluster.runners.ssh_job import handling
    from pytest_gpucluster.runners.sweep import Stopped

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(signum).name)

    try:
        # These signals end a sweep as Ctrl-C does: what was started is ended, and the table so far is written.
        with (
            handling((signal.SIGTERM, signal.SIGHUP), stop),
            cli.file_errors(cli.BROKEN_EXIT, "results of the sweep cannot be written"),
        ):
            return _carry_out(options, scheduler_of)
    except (KeyboardInterrupt, Stopped):  # before anything was started; the sweep handles later ones
        return cli.complain("interrupted", cli.USAGE)


def _carry_out(options: argparse.Namespace, scheduler_of: Callable[[int], Scheduler]) -> int:
    from pytest_gpucluster.analysis.fleet import fleet, fleet_page, journals_below, read_runs
    from pytest_gpucluster.files import atomic_write
    from pytest_gpucluster.journal.run_directory import new_run_directory
    from pytest_gpucluster.runners.plan import SweepPlan, parse_per_node, require_unreserved
    from pytest_gpucluster.runners.sweep import require_nodes, sweep
    from pytest_gpucluster.runners.sweep_outcome import SweepFiles

    per_node = parse_per_node(options.expect)
    suite = ("acceptance/",) if Path("acceptance").exists() else ("--pyargs", MODULE)
    pytest_arguments = tuple(options.forwarded or suite)
    require_unreserved(pytest_arguments)
    scheduler = scheduler_of(per_node.gpus_per_node)
    nodes = scheduler.nodes
    require_nodes(nodes)
    plan = SweepPlan(
        nodes=nodes,
        per_node=per_node,
        pytest_arguments=pytest_arguments,
        node_seconds=options.alone_within,
        joint_seconds=options.together_within,
        at_once=getattr(options, "at_once", len(nodes)),
        min_nodes=options.min_nodes,
        python=options.python or scheduler.python,
        port=options.port or scheduler.port,
    )
    directory = new_run_directory(options.report_dir.absolute())
    show = partial(print, flush=True)
    show(f"{len(nodes)} nodes, each alone; reports: {directory}")
    written = SweepFiles(directory, scheduler=options.step, command=sys.argv, nodes=nodes)
    code = sweep(plan, scheduler, written, show).exit
    if journals_below(directory):
        runs, unreadable = read_runs([directory])
        atomic_write(directory / "fleet.html", fleet_page(fleet(runs, expected=nodes, unreadable=unreadable)))
    return code


COMMAND = cli.Group(
    description="Run the acceptance suite on every node alone, all nodes at once, without any rendezvous between "
    "them; then run it on all nodes that survived together. Arguments after -- go to pytest (default: acceptance/ of "
    "this folder, else the suite in the package).",
    commands={"slurm": _slurm, "ssh": _ssh, "kubernetes": _kubernetes},
    examples=_EXAMPLES,
    codes=_EXIT_CODES,
)
