"""A sweep on Kubernetes, through kubectl: an Indexed Job with a pod a node, then one over the survivors.

What kubectl reports of nodes, Jobs and pods is read into typed values.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, JournalError, LaunchError, OptionError
from pytest_gpucluster.launch.hostlist import expand_hostlist
from pytest_gpucluster.runners import kubernetes_manifest, sweep
from pytest_gpucluster.runners.kubernetes_manifest import INDEX_ANNOTATION, PodTemplate
from pytest_gpucluster.runners.sweep import Plan
from pytest_gpucluster.runners.sweep_result import BROKE, NO_ANSWER, TOGETHER, Answer, Ended, Outcome, outcome_of


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster. ``unusable`` says why no pod would start there; empty where one would."""

    name: str
    host: str
    """Its label ``kubernetes.io/hostname``, which need not be its name."""
    unusable: str


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod of a Job, as far as it has come."""

    name: str
    index: int
    node: str
    """Empty until it has one."""
    over: bool
    exit: int | None
    """Of its container; None where that did not end, or is not known."""
    said: str
    """The container's termination message."""
    seconds: float | None
    why: str
    """What else is told of how it ended, or of why it has not started."""

    def answer(self) -> tuple[Answer | None, str]:
        """Return what it answers; or None, and why."""
        if not self.said:
            return None, self.why
        try:
            return Answer.from_json(self.said), ""
        except JournalError as error:
            return None, str(error)


def nodes_of(text: str) -> list[Node]:
    """Read ``kubectl get nodes -o json``.

    Raises:
        EnvironmentBroken: it is something else.
    """
    return [_node(item) for item in _items(text, "Node")]


def pods_of(text: str, container: str) -> list[Pod]:
    """Read ``kubectl get pods -o json``, with the name of the container that runs the suite.

    Raises:
        EnvironmentBroken: it is something else.
    """
    return [_pod(item, container) for item in _items(text, "Pod")]


def finished(text: str) -> str:
    """Read ``kubectl get job NAME -o json``: why the Job is over, or an empty text while it is not.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#terminal-job-conditions.

    Raises:
        EnvironmentBroken: it is something else.
    """
    [job] = _items(text, "Job")
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return str(condition.get("reason") or condition["type"])
    return ""


def _items(text: str, kind: str) -> Sequence[Mapping[str, Any]]:
    try:
        read = json.loads(text)
        items: list[Any] = read["items"] if read["kind"].endswith("List") else [read]
        if any(item["kind"] != kind or not item["metadata"]["name"] for item in items):
            raise KeyError(kind)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EnvironmentBroken(f"kubectl has not told what was asked for, which is {kind}s: {text[:80]!r}") from None
    return items


def _node(item: Mapping[str, Any]) -> Node:
    name = str(item["metadata"]["name"])
    conditions = (item.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, Any] = next((each for each in conditions if each.get("type") == "Ready"), {})
    unusable = ""
    if ready.get("status") != "True":
        unusable = f"the node is not Ready: {ready.get('message') or ready.get('reason') or 'nothing is told of it'}"
    elif (item.get("spec") or {}).get("unschedulable"):
        unusable = "the node is cordoned"
    labels = item["metadata"].get("labels") or {}
    return Node(name=name, host=str(labels.get("kubernetes.io/hostname") or name), unusable=unusable)


def _pod(item: Mapping[str, Any], container: str) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    states = [each for each in status.get("containerStatuses") or () if each.get("name") == container]
    terminated = (states[0].get("state") or {}).get("terminated") if states else None
    over = status.get("phase") in ("Succeeded", "Failed")
    index = str((metadata.get("annotations") or {}).get(INDEX_ANNOTATION, ""))
    return Pod(
        name=str(metadata["name"]),
        index=int(index) if index.isdecimal() else -1,
        node=str((item.get("spec") or {}).get("nodeName") or ""),
        over=over,
        exit=terminated["exitCode"] if over and terminated and isinstance(terminated.get("exitCode"), int) else None,
        said=str(terminated.get("message") or "") if terminated else "",
        seconds=_seconds(terminated) if terminated else None,
        why=_why(status, terminated, states),
    )


def _why(status: Mapping[str, Any], terminated: Mapping[str, Any] | None, states: Sequence[Mapping[str, Any]]) -> str:
    """Return the most telling of what Kubernetes says: of the pod, of its container, of its place."""
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message') or 'nothing more is told'}"
    if terminated and terminated.get("reason") not in (None, "Completed", "Error"):
        return str(terminated["reason"])
    waiting = (states[0].get("state") or {}).get("waiting") if states else None
    if waiting:
        return f"{waiting.get('reason')}: {waiting.get('message') or 'nothing more is told'}"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return "" if terminated else "its container has not ended"


def _seconds(terminated: Mapping[str, Any]) -> float | None:
    try:
        begun, ended = (
            datetime.strptime(str(terminated[name]), "%Y-%m-%dT%H:%M:%SZ") for name in ("startedAt", "finishedAt")
        )
    except (KeyError, ValueError):
        return None
    return (ended - begun).total_seconds()


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
        sweep.require_tool("kubectl")
        self._command = ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]

    def ask(self, *words: str, given: str = "") -> str:
        """Run it and return its output.

        Raises:
            EnvironmentBroken: it failed.
        """
        return sweep.run_tool([*self._command, *words], given=given, within_seconds=_ASK_SECONDS)

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
        return kubernetes_manifest.read(text, str(path), gpus=gpus)

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
        job = kubernetes_manifest.job_alone(
            self.name, self._template, self._plan, self._hosts(usable), self._report_dir
        )
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
        job = kubernetes_manifest.job_together(
            self.name, self._template, self._plan, self._hosts(nodes), self._report_dir
        )
        self._make(kubernetes_manifest.service_together(self.name))
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
            selector = f"--selector={kubernetes_manifest.JOB_LABEL}={name}"
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
