"""The cleanup CronJob: what it deletes, what it leaves alone, and that its rights are what it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import datetime, timedelta, timezone

import kubernetes_manifests as manifests
import pytest
from browser import require_program
from fake_api_server import ApiServer, serving

FOLDER = manifests.KUBERNETES / "components" / "cleanup"


@pytest.fixture(scope="module")
def cleanup():
    spec = importlib.util.spec_from_file_location("cleanup", FOLDER / "cleanup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOW = datetime(2026, 11, 20, 12, tzinfo=timezone.utc)
BEFORE = NOW - timedelta(hours=72)


def hours_ago(hours):
    return (NOW - timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(name, *, ended=None, how="Complete", status="True", sweep=None, ours=True):
    conditions = [{"type": how, "status": status, "lastTransitionTime": ended}] if ended else []
    labels = {
        **({"app.kubernetes.io/name": "gpucluster"} if ours else {}),
        **({"gpucluster-sweep": sweep} if sweep else {}),
    }
    return {"kind": "Job", "metadata": {"name": name, "labels": labels}, "status": {"conditions": conditions}}


def service(name, sweep, hours):
    labels = {"gpucluster-sweep": sweep} if sweep else {}
    return {"kind": "Service", "metadata": {"name": name, "labels": labels, "creationTimestamp": hours_ago(hours)}}


JOBS = [
    job("old", ended=hours_ago(100)),
    job("old-failed", ended=hours_ago(100), how="Failed"),
    job("recent", ended=hours_ago(10)),
    job("going-on"),
    job("suspended", ended=hours_ago(100), how="Suspended"),
    job("not-true", ended=hours_ago(100), status="False"),
    job("unreadable", ended="last week"),
    job("sweep-a-alone", ended=hours_ago(100), sweep="a", ours=False),
    job("sweep-b-alone", sweep="b", ours=False),
    job("somebodys", ended=hours_ago(100), ours=False),
]
SERVICES = [
    service("sweep-a-together", "a", 101),
    service("sweep-b-together", "b", 101),
    service("sweep-c-together", "c", 101),
    service("sweep-d-together", "d", 1),
    service("acceptance", None, 1000),
]
GONE = [
    "batch/v1/jobs/old?propagationPolicy=Background",
    "batch/v1/jobs/old-failed?propagationPolicy=Background",
    "batch/v1/jobs/sweep-a-alone?propagationPolicy=Background",
    "v1/services/sweep-a-together?propagationPolicy=Background",
    "v1/services/sweep-c-together?propagationPolicy=Background",
]


def asked(server):
    def ask(method, path):
        with urllib.request.urlopen(urllib.request.Request(server.address + path, method=method), timeout=30) as answer:
            return json.loads(answer.read())

    return ask


def test_only_what_is_over_and_old_is_deleted(cleanup):
    with serving(ApiServer({"batch/v1/jobs": JOBS, "v1/services": SERVICES})) as server:
        assert cleanup.clean(asked(server), "gpu", before=BEFORE) == 0
        assert server.deleted == GONE
        assert cleanup.clean(asked(server), "gpu", before=BEFORE) == 0
        assert server.deleted == GONE, "the second time there is nothing to do"


def test_what_is_forbidden_is_told_by_the_exit_code(cleanup, capsys):
    with serving(ApiServer({"batch/v1/jobs": JOBS, "v1/services": SERVICES})) as server:
        server.refuse = {"jobs"}
        assert cleanup.clean(asked(server), "gpu", before=BEFORE) == 1
        assert server.deleted == []
    assert "cannot be listed" in capsys.readouterr().err


def test_one_that_cannot_be_deleted_does_not_stop_the_others(cleanup, capsys):
    deleted = []

    def ask(method, path):
        if method == "GET":
            return {"items": JOBS if "/jobs" in path and "name" in path else []}
        name = path.partition("?")[0].rpartition("/")[2]
        if name in ("old", "gone"):
            raise urllib.error.HTTPError(path, 403, "Forbidden", {}, None)
        deleted.append(name)
        return {}

    assert cleanup.clean(ask, "gpu", before=BEFORE) == 1
    assert "old-failed" in deleted
    assert "jobs/old cannot be deleted" in capsys.readouterr().err


def test_one_that_is_gone_meanwhile_is_no_fault(cleanup):
    def ask(method, path):
        if method == "GET":
            return {"items": [JOBS[0]] if "/jobs" in path else []}
        raise urllib.error.HTTPError(path, 404, "Not Found", {}, None)

    assert cleanup.clean(ask, "gpu", before=BEFORE) == 0


def test_it_runs_as_in_a_pod_with_tls_and_its_token(tmp_path):
    openssl = require_program("openssl")
    account, pem = tmp_path / "account", tmp_path / "server.pem"
    account.mkdir()
    (account / "token").write_text("t0ken\n")
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=it", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(tmp_path / "key"), "-out", str(account / "ca.crt")),
        ],
        check=True,
        capture_output=True,
    )
    pem.write_text((tmp_path / "key").read_text() + (account / "ca.crt").read_text())
    # Told by its own clock: these are old whenever this runs.
    with serving(ApiServer({"batch/v1/jobs": [job("old", ended="2020-01-01T00:00:00Z")]}), pem) as server:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": server.address.rpartition(":")[2]}
        program = (
            "import importlib.util, pathlib, sys\n"
            f"spec = importlib.util.spec_from_file_location('cleanup', {str(FOLDER / 'cleanup.py')!r})\n"
            "cleanup = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(cleanup)\n"
            f"cleanup.ACCOUNT = pathlib.Path({str(account)!r})\nsys.exit(cleanup.main())\n"
        )

        def run(**more):
            return subprocess.run(
                [sys.executable, "-B", "-c", program],
                env={**environ, "PATH": os.environ["PATH"], **more},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

        done = run(NAMESPACE="gpu", KEEP_HOURS="72")
        assert (done.returncode, done.stdout) == (0, "cleanup: deleted batch/v1/jobs/old\n"), done.stderr
        assert set(server.tokens) == {"Bearer t0ken"}
        for wrong in (
            {"NAMESPACE": "gpu"},
            {"NAMESPACE": "gpu", "KEEP_HOURS": "0"},
            {"NAMESPACE": "gpu", "KEEP_HOURS": "nan"},
            {"NAMESPACE": "gpu", "KEEP_HOURS": "inf"},
        ):
            assert run(**wrong).returncode == 2, wrong


def test_its_rights_are_what_it_uses(cleanup):
    documents = [each for path in FOLDER.glob("*.yaml") for each in manifests.load(path.read_text())]
    [role] = [each for each in documents if each["kind"] == "Role"]
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = set()

    def ask(method, path):
        group = "" if path.startswith("/api/v1/") else path.split("/")[2]
        resource = path.partition("?")[0].split("/namespaces/gpu/")[1].split("/")[0]
        used.add((group, resource, {"GET": "list", "DELETE": "delete"}[method]))
        return {"items": JOBS if resource == "jobs" else SERVICES} if method == "GET" else {}

    assert cleanup.clean(ask, "gpu", before=BEFORE) == 0
    assert used == allowed
    assert not any(each["kind"].startswith("Cluster") for each in documents)
