"""Delete Jobs of this project that are over since KEEP_HOURS, and services of sweeps whose Jobs are gone.

It runs in a pod, speaks with the API server by the pod's own token, and needs nothing but Python. Whatever is not
surely over and old stays: a Job without an end, one whose end cannot be read, one of somebody else.

Environment: NAMESPACE; KEEP_HOURS; KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, which Kubernetes sets.
Exit codes: 0 done, 1 something could not be deleted or listed, 2 the environment is not that of such a pod.

Source: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/,
https://kubernetes.io/docs/concepts/workloads/controllers/job/#terminal-job-conditions.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
OURS = "app.kubernetes.io/name=gpucluster"
SWEEP = "gpucluster-sweep"
"""Label of what `gpucluster sweep kubernetes` makes; its value is the sweep's name."""
_SECONDS = 30
_MOST_HOURS = 100_000
_GONE = 404

Ask = Callable[[str, str], Mapping[str, Any]]
"""Method and path -> the answer. Raises: OSError."""


def ended(job: Mapping[str, Any]) -> datetime | None:
    """Return when a Job has come to its end; None if it has not, or does not say when."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return _time(condition.get("lastTransitionTime"))
    return None


def _time(text: object) -> datetime | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def to_delete(jobs: list[Any], services: list[Any], *, before: datetime) -> list[str]:
    """Return the paths, below the namespace, of what is over since then.

    Args:
        jobs: all Jobs of this project.
        services: those of sweeps.
        before: what has ended or was made later stays.
    """
    old = [job for job in jobs if (end := ended(job)) is not None and end < before]
    found = [f"batch/v1/jobs/{job['metadata']['name']}" for job in old]
    alive = {(job["metadata"].get("labels") or {}).get(SWEEP) for job in jobs if job not in old}
    for service in services:
        made = _time(service["metadata"].get("creationTimestamp"))
        sweep = (service["metadata"].get("labels") or {}).get(SWEEP)
        if sweep and sweep not in alive and made is not None and made < before:
            found.append(f"v1/services/{service['metadata']['name']}")
    return list(dict.fromkeys(found))


def clean(ask: Ask, namespace: str, *, before: datetime) -> int:
    """Delete what is over, say so, and return the exit code."""
    listed: dict[str, list[Any]] = {}
    for kind, path, selector in (
        ("ours", "batch/v1/jobs", OURS),
        ("sweeps", "batch/v1/jobs", SWEEP),
        ("services", "v1/services", SWEEP),
    ):
        try:
            listed[kind] = list(
                ask("GET", f"{_place(path, namespace)}?labelSelector={urllib.parse.quote(selector)}")["items"]
            )
        except (OSError, KeyError, ValueError) as error:
            print(f"cleanup: {path} cannot be listed: {error!r}", file=sys.stderr)
            return 1
    code = 0
    for path in to_delete(listed["ours"] + listed["sweeps"], listed["services"], before=before):
        kind, _, name = path.rpartition("/")
        try:
            # Pods go with their Job.
            ask("DELETE", f"{_place(kind, namespace)}/{name}?propagationPolicy=Background")
            print(f"cleanup: deleted {path}")
        except OSError as error:
            if getattr(error, "code", None) == _GONE:  # another client has deleted it
                continue
            print(f"cleanup: {path} cannot be deleted: {error!r}", file=sys.stderr)
            code = 1
    return code


def _place(path: str, namespace: str) -> str:
    group, _, kind = path.rpartition("/")
    root = "/api/v1" if group == "v1" else f"/apis/{group}"
    return f"{root}/namespaces/{urllib.parse.quote(namespace)}/{kind}"


def main() -> int:
    """Clean up this pod's namespace, and return the exit code."""
    try:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        namespace, hours = os.environ["NAMESPACE"], float(os.environ["KEEP_HOURS"])
        token = (ACCOUNT / "token").read_text().strip()
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        if not 0 < hours < _MOST_HOURS:
            raise ValueError(f"KEEP_HOURS={hours:g} is not more than 0 and less than {_MOST_HOURS}")
    except (KeyError, ValueError, OSError) as error:
        print(f"cleanup: this is no pod of the CronJob: {error!r}", file=sys.stderr)
        return 2
    address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def ask(method: str, path: str) -> Mapping[str, Any]:
        request = urllib.request.Request(address + path, method=method, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=_SECONDS, context=context) as answer:
            read = json.loads(answer.read())
        return read if isinstance(read, dict) else {}

    return clean(ask, namespace, before=datetime.now(timezone.utc) - timedelta(hours=hours))


if __name__ == "__main__":
    sys.exit(main())
