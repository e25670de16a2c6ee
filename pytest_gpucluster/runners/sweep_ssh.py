"""A sweep over ssh: one run on every node for itself, then one run over the survivors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners import hosts as joint
from pytest_gpucluster.runners import ssh
from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.runners.ssh import Access, ask_node
from pytest_gpucluster.runners.ssh_job import HANG_UP_SECONDS, OTHERS_SECONDS, Brought, Errand
from pytest_gpucluster.runners.sweep import Plan
from pytest_gpucluster.runners.sweep_result import TOGETHER, Answer, Ended, Outcome, answer_in, outcome_of

_POLL_SECONDS = 0.05


class Ssh:
    """The runs of a sweep on nodes that ssh reaches. They end with this process, and when a connection is lost."""

    grace_seconds = HANG_UP_SECONDS + 30.0
    """From the request to end until a run is given up."""

    def __init__(
        self,
        plan: Plan,
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
        """Take note of what to run; nothing is started.

        Args:
            plan: what to run.
            directory: of the sweep, here: the reports of all nodes come to it.
            hosts: the nodes of the plan.
            access: how they are reached.
            node_directory: the folder of the suite on the nodes.
            node_report_dir: where the nodes keep their reports until they are brought.
            run_id: a name that no other sweep has on these nodes.
            environ: variables for the nodes.
            answer_seconds: the longest that a node may take until it says its first word.
            port: where the survivors meet; 0 for any that is free on the first of them.
        """
        self._plan, self._directory, self._access = plan, directory, access
        self._hosts = {host.name: host for host in hosts}
        self._node_directory, self._node_report_dir = node_directory, node_report_dir
        self._run_id, self._environ, self._port = run_id, dict(environ), port
        self._answer_seconds = answer_seconds
        self._running: dict[str, Errand] = {}

    def alone(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node for itself, at most ``at_once`` at a time."""
        folder = self._directory / "nodes"
        folder.mkdir(exist_ok=True)
        waiting = deque(nodes)
        while waiting or self._running:
            while waiting and len(self._running) < self._plan.at_once:
                name = waiting.popleft()
                plan = self._joint([name], f"{self._run_id}-alone", self._port)
                # torchrun finds a port of its own for ranks that are all on one node.
                words = ["run", "--standalone", *_without_meeting(plan.words(0))]
                self._start(name, plan, words, folder, self._plan.alone_within)
            ended = {name: done for name, errand in self._running.items() if (done := errand.look()) is not None}
            for name, done in ended.items():
                del self._running[name]
                answer, why = _answer(done)
                world_size = self._plan.world_size(1)
                how = _ended(done, done.exit, folder / f"{name}.log", why)
                yield outcome_of(name, answer, how, nnodes=1, world_size=world_size)
            if not ended:
                time.sleep(_POLL_SECONDS)

    def together(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster, whose first rank is on the first of them."""
        folder = self._directory / TOGETHER
        folder.mkdir(exist_ok=True)
        plan = self._joint(nodes, f"{self._run_id}-together", self._port or self._free_port(nodes[0]))
        for node_rank, name in enumerate(nodes):
            self._start(name, plan, plan.words(node_rank), folder, self._plan.together_within)
        brought: dict[str, Brought] = {}
        first_end: float | None = None
        while len(brought) < len(nodes):
            for name, errand in self._running.items():
                if name not in brought and (done := errand.look()) is not None:
                    brought[name] = done
            if first_end is None and any(not errand.running for errand in self._running.values()):
                first_end = time.monotonic()
            if first_end is not None and time.monotonic() - first_end > OTHERS_SECONDS:
                for errand in self._running.values():
                    errand.tell_to_end(f"no end of it {OTHERS_SECONDS:g} s after that of another node")
            time.sleep(_POLL_SECONDS)
        self._running.clear()
        return self._joint_outcome(nodes, brought, folder)

    def stop(self) -> Sequence[str]:
        """End all runs that are still under way, and bring what they have left."""
        running, self._running = self._running, {}
        for errand in running.values():
            errand.tell_to_end("the sweep ended")
        until = time.monotonic() + self.grace_seconds
        # All of them are looked at each time: what is said is taken, and the nodes go on.
        while time.monotonic() < until and None in [errand.look() for errand in running.values()]:
            time.sleep(_POLL_SECONDS)
        return [left for errand in running.values() if errand.look() is None and (left := errand.abandon())]

    def _joint(self, nodes: Sequence[str], run_id: str, port: int) -> joint.Plan:
        hosts = tuple(self._hosts[name] for name in nodes)
        return joint.Plan(
            hosts=hosts,
            each=self._plan.each,
            ranks=None,
            arguments=self._plan.pytest_arguments,
            directory=self._node_directory,
            node_report_dir=self._node_report_dir,
            run_id=run_id,
            environ=self._environ,
            master=hosts[0].address,
            port=port,
        )

    def _start(self, name: str, plan: joint.Plan, words: Sequence[str], folder: Path, within: float) -> None:
        host = self._hosts[name]
        self._running[name] = Errand(
            host,
            self._access,
            words=words,
            directory=plan.directory,
            environ=dict(plan.environ),
            remote_folder=plan.folder(host),
            first_folder=plan.folder(plan.hosts[0]),
            folder=folder / name,
            log=folder / f"{name}.log",
            within_seconds=within,
            answer_seconds=self._answer_seconds,
        )

    def _free_port(self, name: str) -> int:
        """Ask the first of the survivors for a port on which it can listen.

        Raises:
            EnvironmentBroken: it does not answer, or has none.
        """
        request = ssh.request(
            "probe",
            directory=self._node_directory,
            report_dir=self._node_report_dir,
            arguments=[],
            master="",
            port=0,
        )
        reply = ask_node([self._hosts[name]], lambda host: request, self._access, within_seconds=self._answer_seconds)[
            name
        ]
        port = (reply.answer or {}).get("port")
        if not isinstance(port, int) or not port:
            raise EnvironmentBroken(
                f"{name}, where the survivors were to meet, names no free port: {reply.why or 'none'}"
            )
        return port

    def _joint_outcome(self, nodes: Sequence[str], brought: Mapping[str, Brought], folder: Path) -> Outcome:
        """Return the outcome of all: rank 0's journal, and an end that is good only if every node's is."""
        first = brought[nodes[0]]
        answer, why = _answer(first)
        # What was ended from here may still say 0; nobody knows what it would have come to.
        bad = [name for name in nodes if brought[name].exit != 0 or brought[name].stopped]
        worst = bad[0] if bad else nodes[0]
        hint = why or (f"{worst}: {brought[worst].why}" if brought[worst].why else "")
        how = _ended(brought[worst], brought[worst].exit, folder / f"{nodes[0]}.log", hint)
        return outcome_of(TOGETHER, answer, how, nnodes=len(nodes), world_size=self._plan.world_size(len(nodes)))


def _without_meeting(words: Sequence[str]) -> list[str]:
    """Return the words of a run of one node, but for the first and for what says where nodes meet."""
    at = words.index("--")
    kept = [word for word in words[1:at] if not word.startswith(("--nnodes=", "--node-rank=", "--master-"))]
    return [*kept, *words[at:]]


def _answer(done: Brought) -> tuple[Answer | None, str]:
    if done.folder is None:
        return None, done.missing or done.why
    return answer_in(done.folder)


def _ended(done: Brought, code: int | None, log: Path, hint: str) -> Ended:
    stopped = done.stopped or ("no answer over ssh" if code is None else "")
    return Ended(exit=code, seconds=done.seconds, stopped=stopped, log=str(log), hint=hint or done.why)
