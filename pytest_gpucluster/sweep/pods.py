"""What kubectl tells of nodes, Jobs and pods, as typed values. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, JournalError
from pytest_gpucluster.sweep.answer import Answer
from pytest_gpucluster.sweep.manifest import INDEX_ANNOTATION


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
