"""A sweep over ssh: one run on every node on its own, then one run over the survivors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.runners.plan import SshPlan, SweepPlan
from pytest_gpucluster.runners.ssh import Access, query_nodes
from pytest_gpucluster.runners.ssh_job import OTHERS_SECONDS, STOP_SECONDS, NodeResult, RemoteJob, Signals, await_jobs
from pytest_gpucluster.runners.sweep import Job, run_each, stop_all
from pytest_gpucluster.runners.sweep_outcome import JOINT, LauncherExit, Outcome, judge_run


class Ssh:
    """The runs of a sweep on nodes that ssh reaches. They end with this process, and when a connection is lost."""

    grace_seconds = STOP_SECONDS + 30.0
    """From the request to stop until a run is given up."""

    def __init__(
        self,
        plan: SweepPlan,
        directory: Path,
        *,
        hosts: Sequence[Host],
        access: Access,
        node_directory: str,
        node_report_dir: str,
        run_id: str,
        environ: Mapping[str, str],
        answer_seconds: float,
        port: int = 0,
    ) -> None:
        """Start nothing yet.

        Args:
            plan: what to run.
            directory: of the sweep, here: the reports of all nodes are copied to it.
            hosts: the nodes of the plan.
            access: how they are reached.
            node_directory: the folder of the suite on the nodes.
            node_report_dir: where the nodes store their reports until they are copied.
            run_id: unique on these nodes.
            environ: variables for the nodes.
            answer_seconds: deadline for a node's first line.
            port: rendezvous port of the joint run; 0 for a free one on the first survivor.
        """
        self._plan, self._directory, self._access = plan, directory, access
        self._hosts = {host.name: host for host in hosts}
        self._node_directory, self._node_report_dir = node_directory, node_report_dir
        self._run_id, self._environ, self._port = run_id, dict(environ), port
        self._answer_seconds = answer_seconds
        self._running: dict[str, Job[NodeResult]] = {}

    def run_nodes(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node on its own, at most ``at_once`` at a time."""
        folder = self._directory / "nodes"
        folder.mkdir(exist_ok=True)

        def start(name: str) -> None:
            plan = self._ssh_plan([name], f"{self._run_id}-alone", self._port, standalone=True)
            self._start(plan, plan.hosts[0], folder, self._plan.node_seconds)

        for name, result in run_each(nodes, start, self._running, self._plan.at_once):
            journal, hint = result.journal()
            launcher = _launcher_exit(result, folder / f"{name}.log", hint)
            yield judge_run(name, journal, launcher, nnodes=1, world_size=self._plan.world_size(1))

    def run_joint(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster, with rank 0 on the first."""
        folder = self._directory / JOINT
        folder.mkdir(exist_ok=True)
        plan = self._ssh_plan(nodes, f"{self._run_id}-together", self._port or self._free_port(nodes[0]))
        jobs = [self._start(plan, host, folder, self._plan.joint_seconds) for host in plan.hosts]
        results = await_jobs(jobs, OTHERS_SECONDS, Signals())
        self._running.clear()
        journal, hint = results[nodes[0]].journal()
        # A node that was stopped from here may still end with 0, but its result is unknown.
        bad = [name for name in nodes if results[name].exit != 0 or results[name].stop_reason]
        worst = results[bad[0] if bad else nodes[0]]
        hint = hint or (f"{worst.name}: {worst.problem}" if worst.problem else "")
        launcher = _launcher_exit(worst, folder / f"{nodes[0]}.log", hint)
        return judge_run(JOINT, journal, launcher, nnodes=len(nodes), world_size=self._plan.world_size(len(nodes)))

    def stop(self) -> Sequence[str]:
        """Stop all runs and copy their reports."""
        running, self._running = self._running, {}
        return stop_all(running, self.grace_seconds)

    def _ssh_plan(self, nodes: Sequence[str], run_id: str, port: int, *, standalone: bool = False) -> SshPlan:
        hosts = tuple(self._hosts[name] for name in nodes)
        return SshPlan(
            hosts=hosts,
            per_node=self._plan.per_node,
            ranks=None,
            arguments=self._plan.pytest_arguments,
            directory=self._node_directory,
            node_report_dir=self._node_report_dir,
            run_id=run_id,
            environ=self._environ,
            master=hosts[0].address,
            port=port,
            standalone=standalone,
        )

    def _start(self, plan: SshPlan, host: Host, folder: Path, within_seconds: float) -> RemoteJob:
        job = RemoteJob(
            *(plan, host, self._access, folder), within_seconds=within_seconds, answer_seconds=self._answer_seconds
        )
        self._running[host.name] = job
        return job

    def _free_port(self, name: str) -> int:
        """Ask the first survivor for a free port.

        Raises:
            EnvironmentBroken: no answer, or no port.
        """
        request = ssh.request(
            "probe",
            directory=self._node_directory,
            report_dir=self._node_report_dir,
            arguments=[],
            master="",
            port=0,
        )
        hosts = [self._hosts[name]]
        reply = query_nodes(hosts, lambda host: request, self._access, within_seconds=self._answer_seconds)[name]
        port = reply.facts.get("port")
        if not isinstance(port, int) or not port:
            raise EnvironmentBroken(
                f"{name}, the first node of the joint run, has no free port: {reply.problem or 'none'}"
            )
        return port


def _launcher_exit(result: NodeResult, log: Path, hint: str) -> LauncherExit:
    stop_reason = result.stop_reason or ("no answer over ssh" if result.exit is None else "")
    return LauncherExit(
        exit=result.exit, seconds=result.seconds, stop_reason=stop_reason, log=str(log), hint=hint or result.problem
    )
