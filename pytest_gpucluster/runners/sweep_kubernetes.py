"""A sweep on Kubernetes, through kubectl: an Indexed Job with one pod for each node, then one over the survivors."""

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
from pytest_gpucluster.runners import kubernetes_manifest
from pytest_gpucluster.runners.kubernetes_manifest import INDEX_ANNOTATION, PodTemplate
from pytest_gpucluster.runners.plan import SweepPlan
from pytest_gpucluster.runners.run_result import RunResult
from pytest_gpucluster.runners.sweep import require_tool, run_tool
from pytest_gpucluster.runners.sweep_outcome import BROKEN_EXIT, JOINT, NO_ANSWER, LauncherExit, Outcome, judge_run


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster. ``problem`` is why no pod would start there; empty if one would."""

    name: str
    host: str
    """Its label ``kubernetes.io/hostname``, which need not be its name."""
    problem: str


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The state of a Job's pod."""

    name: str
    index: int
    node: str
    """Empty until it is scheduled."""
    ended: bool
    exit: int | None
    """Of its container; None if that did not end, or is unknown."""
    message: str
    """The container's termination message."""
    seconds: float | None
    problem: str
    """How it ended or why it has not started, as Kubernetes reports it."""

    def result(self) -> tuple[RunResult | None, str]:
        """Return its termination message as a result; or None, and why."""
        if not self.message:
            return None, self.problem
        try:
            return RunResult.from_json(self.message), ""
        except JournalError as error:
            return None, str(error)


def parse_nodes(text: str) -> list[Node]:
    """Read ``kubectl get nodes -o json``.

    Raises:
        EnvironmentBroken: it is something else.
    """
    return [_node(item) for item in _items(text, "Node")]


def parse_pods(text: str, container: str) -> list[Pod]:
    """Read ``kubectl get pods -o json``, with the name of the container that runs the suite.

    Raises:
        EnvironmentBroken: it is something else.
    """
    return [_pod(item, container) for item in _items(text, "Pod")]


def job_end(text: str) -> str:
    """Read ``kubectl get job NAME -o json``: why the Job has ended; empty while it goes on.

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
        raise EnvironmentBroken(f"kubectl did not return {kind}s: {text[:80]!r}") from None
    return items


def _node(item: Mapping[str, Any]) -> Node:
    name = str(item["metadata"]["name"])
    conditions = (item.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, Any] = next((each for each in conditions if each.get("type") == "Ready"), {})
    problem = ""
    if ready.get("status") != "True":
        problem = f"the node is not Ready: {ready.get('message') or ready.get('reason') or 'no reason given'}"
    elif (item.get("spec") or {}).get("unschedulable"):
        problem = "the node is cordoned"
    labels = item["metadata"].get("labels") or {}
    return Node(name=name, host=str(labels.get("kubernetes.io/hostname") or name), problem=problem)


def _pod(item: Mapping[str, Any], container: str) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    states = [each for each in status.get("containerStatuses") or () if each.get("name") == container]
    terminated = (states[0].get("state") or {}).get("terminated") if states else None
    ended = status.get("phase") in ("Succeeded", "Failed")
    index = str((metadata.get("annotations") or {}).get(INDEX_ANNOTATION, ""))
    return Pod(
        name=str(metadata["name"]),
        index=int(index) if index.isdecimal() else -1,
        node=str((item.get("spec") or {}).get("nodeName") or ""),
        ended=ended,
        exit=terminated["exitCode"] if ended and terminated and isinstance(terminated.get("exitCode"), int) else None,
        message=str(terminated.get("message") or "") if terminated else "",
        seconds=_seconds(terminated) if terminated else None,
        problem=_status_reason(status, terminated, states),
    )


def _status_reason(
    status: Mapping[str, Any], terminated: Mapping[str, Any] | None, states: Sequence[Mapping[str, Any]]
) -> str:
    """Return the most specific reason in the status: of the pod, of its container, of its scheduling."""
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message') or 'no message'}"
    if terminated and terminated.get("reason") not in (None, "Completed", "Error"):
        return str(terminated["reason"])
    waiting = (states[0].get("state") or {}).get("waiting") if states else None
    if waiting:
        return f"{waiting.get('reason')}: {waiting.get('message') or 'no message'}"
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


_CALL_SECONDS = 60.0
_MOST_FAILED_CALLS = 10
"""In a row: an API server may be restarting."""


class Kubectl:
    """kubectl, in one namespace."""

    def __init__(self, namespace: str | None) -> None:
        """Use a namespace; None is kubectl's own.

        Raises:
            OptionError: kubectl is missing.
        """
        require_tool("kubectl")
        self._command = ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]

    def call(self, *words: str, given: str = "") -> str:
        """Run it and return its output.

        Raises:
            EnvironmentBroken: it failed.
        """
        return run_tool([*self._command, *words], given=given, within_seconds=_CALL_SECONDS)

    def template(self, path: Path, *, gpus: int) -> PodTemplate:
        """Read the operator's Pod. kubectl converts it to JSON, so that YAML means what it means to Kubernetes.

        Raises:
            OptionError: it cannot be used.
        """
        if not path.is_file():
            raise OptionError(f"--pod-template {path}: no such file")
        try:
            text = self.call("create", "--dry-run=client", "--output=json", f"--filename={path}")
        except EnvironmentBroken as error:
            raise OptionError(f"--pod-template {path}: {error}") from None
        return kubernetes_manifest.read_template(text, str(path), gpus=gpus)

    def nodes(self, wanted: str | None, selector: str | None) -> list[Node]:
        """Return the nodes of a host list, or those with some labels.

        Raises:
            OptionError: the list is malformed, kubectl does not know the nodes, or there are none.
        """
        try:
            which = expand_hostlist(wanted) if wanted is not None else [f"--selector={selector}"]
            found = parse_nodes(self.call("get", "nodes", *which, "--output=json"))
        except (LaunchError, EnvironmentBroken) as error:
            raise OptionError(f"--{'nodes' if wanted is not None else 'selector'}: {error}") from None
        if not found:
            raise OptionError(f"--selector {selector}: no node has these labels")
        return found


class Kubernetes:
    """The runs of a sweep as Jobs."""

    poll_seconds = 5.0
    grace_seconds = 120.0
    """From the Job's own deadline until the sweep goes on without it."""

    def __init__(
        self,
        plan: SweepPlan,
        directory: Path,
        *,
        kubectl: Kubectl,
        template: PodTemplate,
        nodes: Sequence[Node],
        report_dir: str,
        keep: bool = False,
    ) -> None:
        """Create nothing yet.

        Args:
            plan: what to run.
            directory: of the sweep, for the pods' output.
            kubectl: for the cluster.
            template: of the pods.
            nodes: those of the plan.
            report_dir: of the runs, in the pods.
            keep: whether to keep Jobs that have ended.
        """
        self._plan, self._directory, self._kubectl, self._template = plan, directory, kubectl, template
        self._nodes = {node.name: node for node in nodes}
        self._report_dir, self._keep = report_dir, keep
        self.name = f"gpucluster-{uuid.uuid4().hex[:10]}"
        self._created: dict[str, bool] = {}
        """Job or service -> whether it has ended."""

    def run_nodes(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node on its own. Nodes that accept no pods now have no answer."""
        (self._directory / "nodes").mkdir(exist_ok=True)
        usable = [node for node in nodes if not self._nodes[node].problem]
        for node in nodes:
            if node not in usable:
                yield _no_answer(node, self._nodes[node].problem)
        if not usable:
            return
        job = kubernetes_manifest.node_job(self.name, self._template, self._plan, self._hosts(usable), self._report_dir)
        pods: dict[str, Pod] = {}
        finished_nodes: set[str] = set()
        for pod in self._run(job, len(usable), self._plan.node_seconds, pods):
            if pod.node in usable:
                finished_nodes.add(pod.node)
                yield self._outcome(pod.node, pod, f"nodes/{pod.node}.log")
        for node in usable:
            if node not in finished_nodes:
                yield _no_answer(node, self._missing_reason(node, pods.values()))

    def run_joint(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster. If not all of its pods end, there is no answer."""
        job = kubernetes_manifest.joint_job(self.name, self._template, self._plan, self._hosts(nodes), self._report_dir)
        self._create(kubernetes_manifest.joint_service(self.name))
        pods: dict[str, Pod] = {}
        ended = {pod.index: pod for pod in self._run(job, len(nodes), self._plan.joint_seconds, pods)}
        first = ended.get(0)
        if first is None:
            return _no_answer(JOINT, f"the pod of rank 0 has not ended: {_reasons(pods.values())}")
        codes = [ended[index].exit if index in ended else None for index in range(len(nodes))]
        # A pass needs exit code 0 from every launcher.
        failed = [code for code in codes if code != 0]
        return self._outcome(JOINT, first, f"{JOINT}.log", nnodes=len(nodes), others=failed[:1])

    def stop(self) -> Sequence[str]:
        """Delete what was created; with ``keep``, only what has not ended."""
        left = [name for name, ended in self._created.items() if not (self._keep and ended)]
        self._created = {}
        if not left:
            return []
        try:
            self._kubectl.call("delete", *left, "--ignore-not-found", "--wait=false", "--cascade=background")
        except EnvironmentBroken as error:
            return [f"{', '.join(left)}: {error}"]
        return []

    def _run(self, job: Mapping[str, Any], count: int, within: float, pods: dict[str, Pod]) -> Iterator[Pod]:
        """Create a Job, record its pods in ``pods``, and yield each as it ends, until the Job does."""
        name = str(job["metadata"]["name"])
        self._create(job)
        until, ended = time.monotonic() + within + self.grace_seconds, set()
        container = str(self._template.container["name"])
        while True:
            # The Job first: pods that have ended by then are in the list that is read after it.
            is_over = bool(job_end(self._call_again("get", "job", name, "--output=json")))
            selector = f"--selector={kubernetes_manifest.JOB_LABEL}={name}"
            for pod in parse_pods(self._call_again("get", "pods", selector, "--output=json"), container):
                pods[pod.name] = pod
                if pod.ended and pod.name not in ended:
                    ended.add(pod.name)
                    yield pod
            if is_over or len(ended) >= count:
                self._created[f"job/{name}"] = True
                return
            if time.monotonic() > until:
                return
            time.sleep(self.poll_seconds)

    def _call_again(self, *words: str) -> str:
        for _ in range(_MOST_FAILED_CALLS - 1):
            try:
                return self._kubectl.call(*words)
            except EnvironmentBroken:  # the last try below raises it
                time.sleep(self.poll_seconds)
        return self._kubectl.call(*words)

    def _create(self, what: Mapping[str, Any]) -> None:
        # Recorded first: a call that failed may still have created it.
        self._created[f"{str(what['kind']).lower()}/{what['metadata']['name']}"] = what["kind"] != "Job"
        self._kubectl.call("create", "--filename=-", given=json.dumps(what))

    def _hosts(self, nodes: Sequence[str]) -> list[str]:
        return [self._nodes[node].host for node in nodes]

    def _outcome(self, name: str, pod: Pod, log: str, *, nnodes: int = 1, others: Sequence[int | None] = ()) -> Outcome:
        path = self._directory / log
        result, problem = pod.result()
        log_problem = self._save_log(pod.name, path)
        stop_reason, hint, code = pod.problem if pod.exit is None else "", "", pod.exit
        if result is None:
            hint = "; ".join(part for part in (problem if problem != stop_reason else "", log_problem) if part)
        else:
            # The pod's script ends with the journal's code, or 11 if the launcher failed after a pass.
            differing = [pod.exit] if pod.exit != result.exit else list(others)
            code = differing[0] if differing else 0
        launcher = LauncherExit(exit=code, seconds=pod.seconds, stop_reason=stop_reason, log=str(path), hint=hint)
        return judge_run(name, result, launcher, nnodes=nnodes, world_size=self._plan.world_size(nnodes))

    def _save_log(self, pod: str, path: Path) -> str:
        """Save a pod's output. Return the problem, if any: a missing log does not change the verdict."""
        try:
            text = self._kubectl.call("logs", f"pod/{pod}")
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except EnvironmentBroken as error:
            return f"no log: {error}"
        return ""

    def _missing_reason(self, node: str, pods: Iterable[Pod]) -> str:
        there = [pod for pod in pods if pod.node == node]
        if there:
            why = f": {there[-1].problem}" if there[-1].problem else ""
            return f"no answer within {self._plan.node_seconds:g} s{why}"
        return f"no pod ran there: {_reasons([pod for pod in pods if not pod.node])}"


def _no_answer(node: str, why: str) -> Outcome:
    return Outcome(node=node, verdict=NO_ANSWER, exit=BROKEN_EXIT, failure=why, seconds=None)


def _reasons(pods: Iterable[Pod]) -> str:
    reasons = sorted({pod.problem for pod in pods if pod.problem})
    return "; ".join(reasons[:3]) or "no reason given"
