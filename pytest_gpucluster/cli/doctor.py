"""``gpucluster doctor``: what would keep a run from ACCEPTED, before it is started."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.cli import doctor_findings, run_hosts
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.journal.verdict import VARIABLE
from pytest_gpucluster.launch.master_address import why_unknown
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.node import scheduler
from pytest_gpucluster.node.host import read_node
from pytest_gpucluster.node.processes import run_program
from pytest_gpucluster.runners.hosts import Host, read_hosts, select_hosts
from pytest_gpucluster.runners.plan import parse_per_node, require_unreserved
from pytest_gpucluster.runners.sweep_kubernetes import CALL_SECONDS, client_version, parse_items
from pytest_gpucluster.runners.torchrun import command_line, launched_shape, rendezvous_host, rendezvous_port
from pytest_gpucluster.text import clip, paragraph, plural

_FORECAST = "pytest_gpucluster.session.forecast"
_FORECAST_SECONDS = 300.0
"""torch is imported and all tests are collected, perhaps over a slow file system."""
_CONNECT_SECONDS = 3.0
_ALL = "all"
_RIGHTS = (
    *("create jobs.batch", "delete jobs.batch", "create services", "create configmaps", "list pods"),
    *("get pods --subresource=log", "list nodes"),
)
"""What `gpucluster sweep kubernetes`, the overlays and collect.sh do."""


@cli.command(
    cli.one_of(
        cli.option("--hosts FILE", "the run is started over ssh from here, on these nodes", type=Path),
        cli.option("--slurm", "the run is started by sbatch from here; without it in a job or on a node"),
        cli.option("--kubernetes", "the run is started by kubectl from here; without it in a pod"),
    ),
    cli.option("--partition NAME", "of Slurm"),
    cli.option("--namespace NAME", "of Kubernetes"),
    cli.option("--selector LABELS", "of Kubernetes' nodes, such as nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"),
    examples="""\
        gpucluster doctor -- acceptance/ --gpucluster-expect=1x8xH100
        gpucluster doctor --nnodes=2 --nproc-per-node=8 --master-addr=$HEAD --master-port=29500 -- acceptance/
        gpucluster doctor --slurm --partition=gpu --nnodes=2 -- acceptance/ --gpucluster-expect=2x8xH100
        gpucluster doctor --kubernetes --nnodes=2 -- acceptance/ --gpucluster-expect=2x8xH100
        gpucluster doctor --hosts hosts --expect 8xH100 -- acceptance/
        """,
    codes={
        cli.DONE: "nothing was found that keeps the run from ACCEPTED; nothing was measured",
        cli.NEGATIVE: "ACCEPTED cannot be reached",
        cli.USAGE: "wrong usage, also of torchrun or pytest",
        cli.BROKEN_EXIT: "the tests cannot be collected",
    },
    usage="gpucluster doctor [options] [torchrun options] -- [pytest options]",
)
def _doctor(options: argparse.Namespace) -> int:
    """Look for what would keep a run from ACCEPTED, for the way in which it is launched: write doctor in place of run.
    Nothing is measured, and nothing is started but pytest's collection. Arguments before -- are torchrun's, or with
    --hosts those of `gpucluster run --hosts`; those after it are pytest's (default: the acceptance suite).

    Each finding has what was found, what is allowed, what to type, and the criteria that would be skipped or not
    satisfied. On a host that only starts the run (--slurm, --kubernetes, --hosts) GPUs and limits are not looked at.
    """

    facts = collect(options, os.environ)
    found = doctor_findings.examine(facts)
    cli.write_text("-", render(facts, found, width=cli.columns(60)))
    return cli.NEGATIVE if any(one.kind != "note" for one, _ in found) else cli.DONE


def collect(options: argparse.Namespace, environ: Mapping[str, str]) -> doctor_findings.Facts:
    """Collect what :func:`doctor_findings.examine` needs, by the command's options and the environment.

    Raises:
        CommandError: wrong usage, also of torchrun or pytest; or the tests cannot be collected.
        OptionError: a wrong hosts file.
    """
    launch, here = options.for_torchrun, environ.get("GPUCLUSTER_HOSTNAME") or socket.gethostname()
    words, hosts = options.forwarded, tuple[Host, ...]()
    in_job, in_pod = "SLURM_JOB_ID" in environ, "KUBERNETES_SERVICE_HOST" in environ
    if options.hosts is not None:
        hosts, launch, words = _over_ssh(options.hosts, launch, words)
    nodes, ranks = launched_shape(launch, {"PET_NNODES": environ.get("SLURM_JOB_NUM_NODES", ""), **environ})
    nodes, elsewhere = len(hosts) or nodes, ""
    if options.slurm or (in_job and "SLURMD_NODENAME" not in environ):
        elsewhere = f"`srun --nodes={nodes} --ntasks-per-node=1 gpucluster doctor -- ...`"
    elif options.kubernetes:
        elsewhere = "`kubectl exec -it POD --container suite -- gpucluster doctor -- ...`"
    elif hosts:
        elsewhere = f"`gpucluster run --hosts {options.hosts} --check`; on a node `gpucluster doctor -- ...`"
    where = "elsewhere" if elsewhere else "here"
    plan = _forecast([str(nodes), str(ranks), where, *command_line(launch, words, environ)], environ)
    rendezvous = None
    if not elsewhere and (place := rendezvous_of(launch, environ, plan.nodes)) is not None:
        unknown = why_unknown(place.host, may_come=in_pod)
        answer = probe_port(place.host, place.port) if unknown is None and place.port else ""
        rendezvous = replace(place, unknown=unknown, answer=answer)
    return doctor_findings.Facts(
        host=here,
        plan=plan,
        limits=cli.load_limits([Path(plan.thresholds)] if plan.thresholds else []),
        elsewhere=elsewhere,
        rendezvous=rendezvous,
        unknown_names={one.name: why for one in hosts if (why := why_unknown(one.address)) is not None},
        node=None if elsewhere else read_node(host=here, ranks=plan.ranks_per_node),
        in_pod=in_pod,
        slurm=_slurm(options.partition, environ) if options.slurm or in_job else None,
        kubernetes=_kubernetes(options.namespace, options.selector) if options.kubernetes else None,
    )


def rendezvous_of(launch: Sequence[str], environ: Mapping[str, str], nodes: int) -> doctor_findings.Rendezvous | None:
    """Return where ranks meet: by torchrun's options; without any by ``MASTER_ADDR``, else on a job's first node.
    Port 0: it is derived later. None: it was not given, or not needed."""
    place = rendezvous_host(launch, environ)
    if place is not None:
        return doctor_findings.Rendezvous(option=place[0], host=place[1], port=rendezvous_port(launch, environ))
    if launch:  # of torchrun, which reads no MASTER_ADDR
        return None
    if nodes > 1 and (host := environ.get("MASTER_ADDR")):
        port = environ.get("MASTER_PORT", "")
        return doctor_findings.Rendezvous(option="MASTER_ADDR", host=host, port=int(port) if port.isdecimal() else 0)
    if nodes > 1 and "SLURM_JOB_ID" in environ:
        with contextlib.suppress(EnvironmentBroken):  # which _slurm reports
            first = scheduler.nodes_of_job(environ)[0]
            return doctor_findings.Rendezvous(option="the first node of the job", host=first, port=0)
    return None


def _over_ssh(
    file: Path, words: Sequence[str], forwarded: Sequence[str]
) -> tuple[tuple[Host, ...], list[str], list[str]]:
    """Return the hosts, and torchrun's and pytest's arguments, as ``gpucluster run --hosts`` reads its own."""
    parser = argparse.ArgumentParser(prog="gpucluster doctor")
    run_hosts.COMMAND.configure(parser)
    options = parser.parse_args([f"--hosts={file}", *words])
    require_unreserved(forwarded)
    hosts = select_hosts(read_hosts(file), options.nodes, options.exclude)
    launch = [f"--nproc-per-node={options.nproc_per_node}"] if options.nproc_per_node else []
    if options.expect:
        forwarded = [*forwarded, f"--gpucluster-expect={replace(parse_per_node(options.expect), nodes=len(hosts))}"]
    return hosts, launch, list(forwarded)


def _forecast(arguments: Sequence[str], environ: Mapping[str, str]) -> doctor_findings.Forecast:
    with tempfile.TemporaryDirectory(prefix="gpucluster-doctor-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "forecast.json"
        program = [sys.executable, "-m", _FORECAST, str(file), *arguments]
        output = run_program(program, _FORECAST_SECONDS, environ={**environ, VARIABLE: folder})
        if output.code == 0 and file.exists():
            return codec.read(doctor_findings.Forecast, json.loads(file.read_bytes()), "the forecast")
    text = "\n".join(line for line in (output.errors or output.text).splitlines() if line.strip())
    code = cli.USAGE if output.code == 4 else cli.BROKEN_EXIT
    raise cli.CommandError(code, f"pytest cannot collect these tests: {clip(text, 2000) or output.why_not}")


def probe_port(host: str, port: int) -> str:
    """Return "free" or "in use" for a port of this host; of another one "in use", "refused" or "silent"."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
        try:
            candidate.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                return "in use"
        else:
            return "free"
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return "in use"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"


def _slurm(partition: str | None, environ: Mapping[str, str]) -> doctor_findings.SlurmFacts:
    if why := scheduler.why_unavailable():
        return doctor_findings.SlurmFacts(why_not=why)
    try:
        of_job = ["--nodes", ",".join(scheduler.nodes_of_job(environ))] if "SLURM_JOB_ID" in environ else []
        scheduler.ping()
    except EnvironmentBroken as error:
        return doctor_findings.SlurmFacts(why_not=str(error))
    which = of_job or (["--partition", partition] if partition else [])
    shown = run_program(["scontrol", "show", "config"], scheduler.ANSWER_SECONDS)
    listed = run_program(["sinfo", "--noheader", "--Node", *which, "--format", "%N|%G"], scheduler.ANSWER_SECONDS)
    if why := shown.why_not or listed.why_not:
        return doctor_findings.SlurmFacts(why_not=why)
    pairs = (line.partition("=") for line in shown.text.splitlines())
    nodes = (line.partition("|") for line in listed.text.splitlines())
    return doctor_findings.SlurmFacts(
        config={name.strip(): value.strip() for name, _, value in pairs},
        gpus={node.strip(): scheduler.gpus_of_gres(gres) for node, _, gres in nodes if node.strip()},
    )


def _kubernetes(namespace: str | None, selector: str | None) -> doctor_findings.KubernetesFacts:
    own = ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]
    client = run_program([*own, "version", "--client", "--output=json"], CALL_SECONDS)
    if client.why_not:
        return doctor_findings.KubernetesFacts(version="", why_not=client.why_not)
    rights = {
        right: run_program([*own, "auth", "can-i", *right.split()], CALL_SECONDS).text.strip() for right in _RIGHTS
    }
    which = [f"--selector={selector}"] if selector else []
    listed = run_program([*own, "get", "nodes", *which, "--output=json"], CALL_SECONDS)
    return doctor_findings.KubernetesFacts(
        version=client_version(client.text),
        denied=[right for right, answer in rights.items() if answer != "yes"],
        nodes=[] if listed.why_not else parse_items(listed.text, "Node"),
        why_not=listed.why_not,
    )


def render(facts: doctor_findings.Facts, found: Sequence[doctor_findings.Obstacle], *, width: int) -> str:
    """Return the report: each finding, those that decide first, and the criteria that they cost."""
    plan = facts.plan
    shape = f"{plural(plan.nodes, 'node')} x {plural(plan.ranks_per_node, 'rank')} on {plan.device}"
    ordered = f"ordered {plan.expect}" if plan.expect else "without --gpucluster-expect"
    lines = paragraph(f"doctor on {facts.host}: {shape}, {ordered}", width)
    costs: dict[str, dict[str, None]] = {}
    for one, criteria in sorted(found, key=lambda obstacle: obstacle[0].kind == "note"):
        decides = one.kind != "note"
        lines += ["", *paragraph(f"{'' if decides else 'note: '}{one.code} ({one.gpu}): {one.found}", width, rest="  ")]
        lines += paragraph(one.allowed, width, first="  allowed  ", rest=" " * 11)
        lines += paragraph(one.remedy, width, first="  type     ", rest=" " * 11)
        for name in (criteria or [_ALL]) if decides else ():
            costs.setdefault(name, {})[one.code] = None
    required = len(plan.criteria())
    summary = f"nothing was found that keeps the {required} required criteria from being satisfied"
    if costs:
        lost = required if _ALL in costs else len(costs)
        summary = f"ACCEPTED cannot be reached: {lost} of {required} required criteria would be skipped or missed"
    lines += ["", *paragraph(summary, width)]
    for name in sorted(costs, key=lambda name: name != _ALL):
        lines += paragraph(f"{name}: {', '.join(costs[name])}", width, first="  ", rest="    ")
    return "\n".join(lines) + "\n"


COMMAND = _doctor
