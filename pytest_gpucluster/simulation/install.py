"""Turns the simulation on in a process: from then on its device, NVML, kernel log and files are the described ones."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.simulation import cluster as descriptions
from pytest_gpucluster.simulation.cluster import Cluster
from pytest_gpucluster.simulation.node import seams
from pytest_gpucluster.simulation.nvml import Machine


def install(what: str, facts: RankFacts, environ: MutableMapping[str, str]) -> RankFacts:
    """Let this rank be one of a simulated cluster.

    Args:
        what: of ``--gpucluster-simulate``.
        facts: of the rank: node number ``node_rank``, and its GPU ``local_rank``.
        environ: of this process: TMPDIR has the folder that the ranks of a machine share.

    Returns: the facts with the described host's name.

    Raises:
        OptionError: the description is wrong.
        LaunchError: the cluster has no such node or GPU.
    """
    from pytest_gpucluster.benchmarks import collectives
    from pytest_gpucluster.device import backends
    from pytest_gpucluster.simulation.device import Simulated, World, calls, plant_in_files, plant_in_training

    found = descriptions.load(what)
    if facts.nnodes > found.nodes or facts.local_world_size > found.gpus_per_node:
        raise LaunchError(
            f"{facts.nnodes} nodes with {facts.local_world_size} ranks each were launched, and the simulated cluster "
            f"{found.name} has {found.nodes} nodes with {found.gpus_per_node} GPUs each. Start "
            f"torchrun --nnodes={found.nodes} --nproc-per-node={found.gpus_per_node}, or name another shape"
        )
    host = found.hosts[facts.node_rank]
    folder = _shared_folder(found, facts)
    machine = Machine.of(folder, host, facts.local_rank)
    machine.take(os.getpid())
    for (module, name), value in seams(found, host, folder).items():
        setattr(module, name, value)
    world = World(found, machine)
    plant_in_training(world)
    plant_in_files(world)
    backends.BACKENDS["cpu"] = lambda place: Simulated(place, world)
    collectives.CALLS.update(calls(world))
    return replace(facts, hostname=host)


def _shared_folder(found: Cluster, facts: RankFacts) -> Path:
    """Return the folder of this run's ranks on this machine; the last one to leave removes it."""
    of_run = hashlib.sha256(f"{found!r} {facts.run_id} {facts.master_port}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"gpucluster-simulation-{os.getuid()}-{of_run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    users = os.open(folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(users, fcntl.LOCK_SH)
    atexit.register(_leave, folder, users)
    return folder


def _leave(folder: Path, users: int) -> None:
    fcntl.flock(users, fcntl.LOCK_UN)
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another rank is still there
        return
    shutil.rmtree(folder, ignore_errors=True)
