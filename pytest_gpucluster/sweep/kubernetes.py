"""A sweep on Kubernetes, through kubectl: an Indexed Job with a pod a node, then one over the survivors."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, LaunchError, OptionError
from pytest_gpucluster.launch.hostlist import expand_hostlist
from pytest_gpucluster.sweep import manifest, pod_template, tool
from pytest_gpucluster.sweep.outcome import BROKE, NO_ANSWER, Ended, Outcome, outcome_of
from pytest_gpucluster.sweep.plan import Plan
from pytest_gpucluster.sweep.pod_template import PodTemplate
from pytest_gpucluster.sweep.pods import Node, Pod, finished, nodes_of, pods_of
from pytest_gpucluster.sweep.scheduler import TOGETHER

_ASK_SECONDS = 60.0
_UNANSWERED = 10
"""So many calls in a row may fail: an API server is restarted now and then."""


class Kubectl:
    """kubectl, in one namespace."""

    def __init__(self, namespace: str | None) -> None:
        """Take note of the namespace; None is kubectl's own.

        Raises:
            OptionError: there is no kubectl.
        """
        tool.require("kubectl")
        self._command = ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]

    def ask(self, *words: str, given: str = "") -> str:
        """Run it and return its output.

        Raises:
            EnvironmentBroken: it failed.
        """
        return tool.ask([*self._command, *words], given=given, within_seconds=_ASK_SECONDS)

    def template(self, path: Path, *, gpus: int) -> PodTemplate:
        """Read the operator's Pod. kubectl makes JSON of it, so that YAML means what it means to Kubernetes.

        Raises:
            OptionError: it cannot be used.
        """
        if not path.is_file():
            raise OptionError(f"--pod-template {path}: no such file")
        try:
            text = self.ask("create", "--dry-run=client", "--output=json", f"--filename={path}")
        except EnvironmentBroken as error:
            raise OptionError(f"--pod-template {path}: {error}") from None
        return pod_template.read(text, str(path), gpus=gpus)

    def nodes(self, wanted: str | None, selector: str | None) -> list[Node]:
        """Return the nodes of a host list, or those with some labels.

        Raises:
            OptionError: the list is malformed, kubectl does not know the nodes, or there are none.
        """
        try:
            which = expand_hostlist(wanted) if wanted is not None else [f"--selector={selector}"]
            found = nodes_of(self.ask("get", "nodes", *which, "--output=json"))
        except (LaunchError, EnvironmentBroken) as error:
            raise OptionError(f"--{'nodes' if wanted is not None else 'selector'}: {error}") from None
        if not found:
            raise OptionError(f"--selector {selector}: no node has these labels")
        return found


class Kubernetes:
    """The runs of a sweep as Jobs."""

    poll_seconds = 5.0
    grace_seconds = 120.0
    """After the Job's own deadline, until the sweep goes on without it."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        *,
        kubectl: Kubectl,
        template: PodTemplate,
        nodes: Sequence[Node],
        report_dir: str,
        keep: bool = False,
    ) -> None:
        """Take note of what to run; nothing is made.

        Args:
            plan: what to run.
            directory: of the sweep, for the pods' logs.
            kubectl: the way to the cluster.
            template: of the pods.
            nodes: those of the plan.
            report_dir: where the runs leave their folders, in the pods.
            keep: whether Jobs that have ended stay.
        """
        self._plan, self._directory, self._kubectl, self._template = plan, directory, kubectl, template
        self._nodes = {node.name: node for node in nodes}
        self._report_dir, self._keep = report_dir, keep
        self.name = f"gpucluster-{uuid.uuid4().hex[:10]}"
        self._made: dict[str, bool] = {}
        """Job, or service -> whether it has ended."""

    def alone(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node for itself. Nodes that take no pods now have given no answer."""
        (self._directory / "nodes").mkdir(exist_ok=True)
        usable = [node for node in nodes if not self._nodes[node].unusable]
        for node in nodes:
            if node not in usable:
                yield _no_answer(node, self._nodes[node].unusable)
        if not usable:
            return
        job = manifest.job_alone(self.name, self._template, self._plan, self._hosts(usable), self._report_dir)
        seen: dict[str, Pod] = {}
        answered: set[str] = set()
        for pod in self._run(job, len(usable), self._plan.alone_within, seen):
            if pod.node in usable:
                answered.add(pod.node)
                yield self._outcome(pod.node, pod, f"nodes/{pod.node}.log")
        for node in usable:
            if node not in answered:
                yield _no_answer(node, self._why_none(node, seen.values()))

    def together(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster. Its pods are all over, or it has given no answer."""
        job = manifest.job_together(self.name, self._template, self._plan, self._hosts(nodes), self._report_dir)
        self._make(manifest.service_together(self.name))
        seen: dict[str, Pod] = {}
        over = {pod.index: pod for pod in self._run(job, len(nodes), self._plan.together_within, seen)}
        first = over.get(0)
        if first is None:
            return _no_answer(TOGETHER, f"the pod of rank 0 has not ended: {_told(seen.values())}")
        codes = [over[index].exit if index in over else None for index in range(len(nodes))]
        # All launchers must say so: one that is not heard of, or that failed, takes a pass away.
        failed = [code for code in codes if code != 0]
        return self._outcome(TOGETHER, first, f"{TOGETHER}.log", nnodes=len(nodes), others=failed[:1])

    def stop(self) -> Sequence[str]:
        """Delete what was made; with ``keep``, only what has not ended."""
        left = [name for name, ended in self._made.items() if not (self._keep and ended)]
        self._made = {}
        if not left:
            return []
        try:
            self._kubectl.ask("delete", *left, "--ignore-not-found", "--wait=false", "--cascade=background")
        except EnvironmentBroken as error:
            return [f"{', '.join(left)}: {error}"]
        return []

    def _run(self, job: Mapping[str, Any], count: int, within: float, seen: dict[str, Pod]) -> Iterator[Pod]:
        """Make a Job, note its pods as they are seen, and yield each as it is over, until the Job is."""
        name = str(job["metadata"]["name"])
        self._make(job)
        until, over = time.monotonic() + within + self.grace_seconds, set()
        container = str(self._template.container["name"])
        while True:
            # The Job first: what is over by then is among the pods that are read after it.
            ended = finished(self._asked("get", "job", name, "--output=json"))
            selector = f"--selector={manifest.JOB_LABEL}={name}"
            for pod in pods_of(self._asked("get", "pods", selector, "--output=json"), container):
                seen[pod.name] = pod
                if pod.over and pod.name not in over:
                    over.add(pod.name)
                    yield pod
            if ended or len(over) >= count:
                self._made[f"job/{name}"] = True
                return
            if time.monotonic() > until:
                return
            time.sleep(self.poll_seconds)

    def _asked(self, *words: str) -> str:
        for _ in range(_UNANSWERED - 1):
            try:
                return self._kubectl.ask(*words)
            except EnvironmentBroken:  # the last try below tells, if it stays so
                time.sleep(self.poll_seconds)
        return self._kubectl.ask(*words)

    def _make(self, what: Mapping[str, Any]) -> None:
        # Noted first: a call that has failed may still have made it.
        self._made[f"{str(what['kind']).lower()}/{what['metadata']['name']}"] = what["kind"] != "Job"
        self._kubectl.ask("create", "--filename=-", given=json.dumps(what))

    def _hosts(self, nodes: Sequence[str]) -> list[str]:
        return [self._nodes[node].host for node in nodes]

    def _outcome(self, name: str, pod: Pod, log: str, *, nnodes: int = 1, others: Sequence[int | None] = ()) -> Outcome:
        path = self._directory / log
        answer, why = pod.answer()
        log_missing = self._logged(pod.name, path)
        stopped = pod.why if pod.exit is None else ""
        if answer is None:
            hint = "; ".join(part for part in (why if why != stopped else "", log_missing) if part)
            code = pod.exit
        else:
            # The pod's script hands on the journal's code, or 11 for a launcher that failed beside a pass.
            hint, differing = "", [pod.exit] if pod.exit != answer.exit else list(others)
            code = differing[0] if differing else 0
        ended = Ended(exit=code, seconds=pod.seconds, stopped=stopped, log=str(path), hint=hint)
        return outcome_of(name, answer, ended, nnodes=nnodes, world_size=self._plan.world_size(nnodes))

    def _logged(self, pod: str, path: Path) -> str:
        """Keep a pod's output. Return what to tell where that is impossible: it is no reason to give up a verdict."""
        try:
            text = self._kubectl.ask("logs", f"pod/{pod}")
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except EnvironmentBroken as error:
            return f"no log: {error}"
        return ""

    def _why_none(self, node: str, seen: Iterable[Pod]) -> str:
        there = [pod for pod in seen if pod.node == node]
        if there:
            why = f": {there[-1].why}" if there[-1].why else ""
            return f"no answer within {self._plan.alone_within:g} s{why}"
        return f"no pod ran there: {_told([pod for pod in seen if not pod.node])}"


def _no_answer(node: str, why: str) -> Outcome:
    return Outcome(node=node, verdict=NO_ANSWER, exit=BROKE, failure=why, seconds=None)


def _told(pods: Iterable[Pod]) -> str:
    told = sorted({pod.why for pod in pods if pod.why})
    return "; ".join(told[:3]) or "nothing is told of why"
