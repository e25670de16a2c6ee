"""A sweep on Kubernetes, through kubectl: an Indexed Job with one pod for each node, then one over the survivors."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, JournalError, OptionError
from pytest_gpucluster.runners import kubernetes_manifest as manifest
from pytest_gpucluster.runners.hosts import expand_nodes
from pytest_gpucluster.runners.plan import SweepPlan
from pytest_gpucluster.runners.run_result import RunResult
from pytest_gpucluster.runners.sweep import require_tool, run_tool
from pytest_gpucluster.runners.sweep_outcome import BROKEN_EXIT, JOINT, NO_ANSWER, LauncherExit, Outcome, judge_run

CALL_SECONDS = 60.0
_MOST_FAILED_CALLS = 10
"""In a row: an API server may be restarting."""


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
    problem: str
    """How it ended or why it has not started, as Kubernetes reports it."""


def parse_items(text: str, kind: str) -> Sequence[Mapping[str, Any]]:
    """Read the objects that ``kubectl get --output=json`` returned.

    Raises:
        EnvironmentBroken: it is something else.
    """
    try:
        read = json.loads(text)
        items: list[Any] = read["items"] if read["kind"].endswith("List") else [read]
        if any(item["kind"] != kind or not item["metadata"]["name"] for item in items):
            raise KeyError(kind)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EnvironmentBroken(f"kubectl did not return {kind}s: {text[:80]!r}") from None
    return items


def client_version(text: str) -> str:
    """Read the version that ``kubectl version --client --output=json`` prints; "" for anything else."""
    try:
        return str(json.loads(text)["clientVersion"]["gitVersion"])
    except (ValueError, KeyError, TypeError):
        return ""


def is_over(job: Mapping[str, Any]) -> bool:
    """Return whether a Job has ended.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#terminal-job-conditions.
    """
    ends = ("Complete", "Failed")
    return any(each.get("type") in ends and each.get("status") == "True" for each in _conditions(job))


def node_problem(node: Mapping[str, Any]) -> str:
    """Return why no pod would start on a node; empty if one would."""
    ready: Mapping[str, Any] = next((each for each in _conditions(node) if each.get("type") == "Ready"), {})
    if ready.get("status") != "True":
        return f"the node is not Ready: {ready.get('message') or ready.get('reason') or 'no reason given'}"
    return "the node is cordoned" if (node.get("spec") or {}).get("unschedulable") else ""


def parse_pod(item: Mapping[str, Any], container: str) -> Pod:
    """Read the state of a pod. ``container`` is the name of the one that runs the suite."""
    metadata, status = item["metadata"], item.get("status") or {}
    states = [each for each in status.get("containerStatuses") or () if each.get("name") == container]
    state = (states[0].get("state") or {}) if states else {}
    terminated = state.get("terminated") or {}
    ended = status.get("phase") in ("Succeeded", "Failed")
    index = str((metadata.get("annotations") or {}).get(manifest.INDEX_ANNOTATION, ""))
    code = terminated.get("exitCode")
    is_special = terminated.get("reason") not in (None, "Completed", "Error")
    unscheduled = [each for each in _conditions(item) if each.get("type") == "PodScheduled"]
    # The most specific reason: of the pod, of its container, of its scheduling.
    reasons = [status, {"reason": terminated["reason"]} if is_special else {}, state.get("waiting") or {}]
    reasons += [each for each in unscheduled if each.get("status") == "False"]
    reason: Mapping[str, Any] = next((each for each in reasons if each.get("reason")), {})
    problem = ": ".join(str(reason[key]) for key in ("reason", "message") if reason.get(key))
    return Pod(
        name=str(metadata["name"]),
        index=int(index) if index.isdecimal() else -1,
        node=str((item.get("spec") or {}).get("nodeName") or ""),
        ended=ended,
        exit=code if ended and isinstance(code, int) else None,
        message=str(terminated.get("message") or ""),
        problem=problem or ("" if terminated else "its container has not ended"),
    )


def _conditions(item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (item.get("status") or {}).get("conditions") or ()


class Kubernetes:
    """The runs of a sweep as Jobs."""

    poll_seconds = 5.0
    grace_seconds = 120.0
    """From the Job's own deadline until the sweep goes on without it."""
    python, port = "python", 29500
    """torchrun's own port: a pod has an address of its own, so that no other run can use it."""

    def __init__(
        self,
        namespace: str | None,
        *,
        template: Path,
        gpus: int,
        wanted: str | None,
        selector: str | None,
        report_dir: str,
    ) -> None:
        """Create nothing yet.

        Args:
            namespace: of the Jobs; None is kubectl's own.
            template: file of the operator's Pod.
            gpus: of each node.
            wanted: nodes as a host list; None for those with the labels of ``selector``.
            selector: labels, as of ``kubectl get nodes -l``.
            report_dir: of the runs, in the pods.

        Raises:
            OptionError: kubectl is missing, or does not know the nodes; or the template cannot be used.
        """
        require_tool("kubectl")
        self._command = ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]
        self._template = self._read_template(template, gpus)
        self._hosts: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        which = expand_nodes("--nodes", wanted) if wanted is not None else [f"--selector={selector}"]
        try:
            found = parse_items(self._call("get", "nodes", *which, "--output=json"), "Node")
        except EnvironmentBroken as error:
            raise OptionError(f"--{'nodes' if wanted is not None else 'selector'}: {error}") from None
        if not found:
            raise OptionError(f"--selector {selector}: no node has these labels")
        for node in found:
            name = str(node["metadata"]["name"])
            labels = node["metadata"].get("labels") or {}
            self._hosts[name] = str(labels.get("kubernetes.io/hostname") or name)
            self._problems[name] = node_problem(node)
        self.nodes = tuple(self._hosts)
        self._report_dir = report_dir
        self.name = f"gpucluster-{uuid.uuid4().hex[:10]}"
        self._created: list[str] = []

    def run_nodes(self, plan: SweepPlan, directory: Path) -> Iterator[Outcome]:
        """Run every node on its own. Nodes that accept no pods now have no answer."""
        (directory / "nodes").mkdir(exist_ok=True)
        usable = [node for node in plan.nodes if not self._problems[node]]
        for node in plan.nodes:
            if node not in usable:
                yield _no_answer(node, self._problems[node])
        if not usable:
            return
        pods: dict[str, Pod] = {}
        finished_nodes: set[str] = set()
        for pod, seconds in self._run(plan, manifest.ALONE, usable, pods):
            if pod.node in usable:
                finished_nodes.add(pod.node)
                yield self._outcome(plan, pod, seconds, directory / "nodes" / f"{pod.node}.log")
        for node in usable:
            if node in finished_nodes:
                continue
            there = [pod for pod in pods.values() if pod.node == node]
            if there:
                why = f": {there[-1].problem}" if there[-1].problem else ""
                yield _no_answer(node, f"no answer within {plan.node_seconds:g} s{why}")
            else:
                yield _no_answer(node, f"no pod ran there: {_reasons(pod for pod in pods.values() if not pod.node)}")

    def run_joint(self, plan: SweepPlan, nodes: Sequence[str], directory: Path) -> Outcome:
        """Run these nodes as one cluster. If not all of its pods end, there is no answer."""
        self._create(manifest.joint_service(self.name))
        pods: dict[str, Pod] = {}
        ended = {pod.index: (pod, seconds) for pod, seconds in self._run(plan, JOINT, nodes, pods)}
        if 0 not in ended:
            return _no_answer(JOINT, f"the pod of rank 0 has not ended: {_reasons(pods.values())}")
        codes = [ended[index][0].exit if index in ended else None for index in range(len(nodes))]
        # A pass needs exit code 0 from every launcher.
        failed = [code for code in codes if code != 0]
        log = directory / f"{JOINT}.log"
        return self._outcome(plan, *ended[0], log, nnodes=len(nodes), others=failed[:1])

    def stop(self) -> Sequence[str]:
        """Delete what was created."""
        left, self._created = self._created, []
        if not left:
            return []
        try:
            self._call("delete", *left, "--ignore-not-found", "--wait=false", "--cascade=background")
        except EnvironmentBroken as error:
            return [f"{', '.join(left)}: {error}"]
        return []

    def _run(
        self, plan: SweepPlan, step: str, nodes: Sequence[str], pods: dict[str, Pod]
    ) -> Iterator[tuple[Pod, float]]:
        """Create a Job, record its pods in ``pods``, and yield each with its seconds as it ends, until the Job does."""
        hosts = [self._hosts[node] for node in nodes]
        job = manifest.sweep_job(self.name, step, self._template, plan, hosts, self._report_dir)
        name, begun, ended = str(job["metadata"]["name"]), time.monotonic(), set()
        self._create(job)
        within = plan.joint_seconds if step == JOINT else plan.node_seconds
        container = str(self._template["spec"]["containers"][0]["name"])
        while True:
            # The Job first: pods that have ended by then are in the list that is read after it.
            [state] = parse_items(self._call_again("get", "job", name, "--output=json"), "Job")
            listed = self._call_again("get", "pods", f"--selector={manifest.JOB_LABEL}={name}", "--output=json")
            for item in parse_items(listed, "Pod"):
                pod = pods[item["metadata"]["name"]] = parse_pod(item, container)
                if pod.ended and pod.name not in ended:
                    ended.add(pod.name)
                    yield pod, time.monotonic() - begun
            is_late = time.monotonic() - begun > within + self.grace_seconds
            if is_late or is_over(state) or len(ended) >= len(nodes):
                return
            time.sleep(self.poll_seconds)

    def _call(self, *words: str, given: str = "") -> str:
        return run_tool([*self._command, *words], given=given, within_seconds=CALL_SECONDS)

    def _call_again(self, *words: str) -> str:
        for _ in range(_MOST_FAILED_CALLS - 1):
            try:
                return self._call(*words)
            except EnvironmentBroken:  # the last try below raises it
                time.sleep(self.poll_seconds)
        return self._call(*words)

    def _create(self, what: Mapping[str, Any]) -> None:
        # Recorded first: a call that failed may still have created it.
        self._created.append(f"{str(what['kind']).lower()}/{what['metadata']['name']}")
        self._call("create", "--filename=-", given=json.dumps(what))

    def _read_template(self, path: Path, gpus: int) -> Mapping[str, Any]:
        if not path.is_file():
            raise OptionError(f"--pod-template {path}: no such file")
        try:
            # kubectl converts it to JSON, so that YAML means what it means to Kubernetes.
            text = self._call("create", "--dry-run=client", "--output=json", f"--filename={path}")
        except EnvironmentBroken as error:
            raise OptionError(f"--pod-template {path}: {error}") from None
        return manifest.read_template(text, str(path), gpus=gpus)

    def _outcome(
        self, plan: SweepPlan, pod: Pod, seconds: float, log: Path, nnodes: int = 1, others: Sequence[int | None] = ()
    ) -> Outcome:
        """Return the outcome of a run from the pod of its rank 0; ``log``, for its output, has the run's name."""
        result, problem, code = None, pod.problem, pod.exit
        if pod.message:
            try:
                result = RunResult.from_json(pod.message)
                # The pod's script ends with the journal's code, or 11 if the launcher failed after a pass.
                differing = [pod.exit] if pod.exit != result.exit else list(others)
                code = differing[0] if differing else 0
            except JournalError as error:
                problem = str(error)
        log_problem = ""
        try:  # a missing log does not change the verdict
            log.write_text(self._call("logs", f"pod/{pod.name}"), encoding="utf-8", errors="backslashreplace")
        except EnvironmentBroken as error:
            log_problem = f"no log: {error}"
        stop_reason = pod.problem if pod.exit is None else ""
        hint = "; ".join(part for part in (problem if problem != stop_reason else "", log_problem) if part)
        launcher = LauncherExit(exit=code, seconds=seconds, stop_reason=stop_reason, log=str(log), hint=hint)
        return judge_run(log.stem, result, launcher, nnodes=nnodes, world_size=nnodes * plan.per_node.gpus_per_node)


def _no_answer(node: str, why: str) -> Outcome:
    return Outcome(node=node, verdict=NO_ANSWER, exit=BROKEN_EXIT, failure=why, seconds=None)


def _reasons(pods: Iterable[Pod]) -> str:
    reasons = sorted({pod.problem for pod in pods if pod.problem})
    return "; ".join(reasons[:3]) or "no reason given"
