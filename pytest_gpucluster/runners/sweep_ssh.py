"""A sweep over ssh: one run on every node on its own, then one run over the survivors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.runners.plan import SshPlan, SweepPlan, random_port
from pytest_gpucluster.runners.ssh import Access
from pytest_gpucluster.runners.ssh_job import STOP_SECONDS, RemoteRun
from pytest_gpucluster.runners.sweep import JobScheduler
from pytest_gpucluster.runners.sweep_outcome import JOINT


class Ssh(JobScheduler):
    """The runs of a sweep on nodes that ssh reaches. They end with this process, and when a connection is lost."""

    grace_seconds = STOP_SECONDS + 30.0

    def __init__(self, hosts: Sequence[Host], access: Access, run_id: str) -> None:
        """Start nothing yet. ``run_id`` is unique on these nodes."""
        super().__init__()
        self._hosts = {host.name: host for host in hosts}
        self._access, self._run_id = access, run_id
        self.nodes, self.python, self.port = tuple(self._hosts), access.python, random_port()

    def start(self, plan: SweepPlan, nodes: Sequence[str], folder: Path) -> RemoteRun:
        """Start the run on these nodes; the reports of each go to a folder with its name."""
        hosts = tuple(self._hosts[name] for name in nodes)
        is_joint = folder.name == JOINT
        ssh_plan = SshPlan(
            hosts=hosts,
            access=self._access,
            per_node=plan.per_node,
            arguments=plan.pytest_arguments,
            run_id=f"{self._run_id}-{JOINT if is_joint else 'alone'}",
            master=hosts[0].address,
            port=plan.port,
        )
        directory = folder if is_joint else folder.parent
        directory.mkdir(exist_ok=True)
        return RemoteRun(ssh_plan, directory, within_seconds=plan.seconds(len(nodes)))
