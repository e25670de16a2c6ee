"""The cleanup CronJob: what it deletes, what it leaves alone, and that its rights are what it needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import urllib.error
from datetime import datetime, timedelta, timezone

import kubernetes_manifests as manifests
import pytest
from fake_api_server import ApiServer, serving
from programs import require_program
from shell import finished

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
    *(f"batch/v1/jobs/{name}?propagationPolicy=Background" for name in ("old", "old-failed", "sweep-a-alone")),
    *(f"v1/services/{name}?propagationPolicy=Background" for name in ("sweep-a-together", "sweep-c-together")),
]


def asked(server, failing=None):
    """A server's answers without a connection; those to delete what is failing are errors."""

    def ask(method, path):
        status, document = server.answer(method, path)
        if method == "DELETE":
            status = (failing or {}).get(path.partition("?")[0].rpartition("/")[2], status)
        if status != 200:
            raise urllib.error.HTTPError(path, status, "no", {}, None)
        return document

    return ask


def test_only_what_is_over_and_old_is_deleted(cleanup):
    server = ApiServer({"batch/v1/jobs": JOBS, "v1/services": SERVICES})
    assert cleanup.clean(asked(server), "gpu", before=BEFORE) == 0
    assert server.deleted == GONE
    assert cleanup.clean(asked(server), "gpu", before=BEFORE) == 0
    assert server.deleted == GONE, "the second time there is nothing to do"


def test_what_is_forbidden_is_told_by_the_exit_code_and_does_not_stop_the_others(cleanup):
    server = ApiServer({"batch/v1/jobs": JOBS, "v1/services": SERVICES})
    server.refuse = {"jobs"}
    assert cleanup.clean(asked(server), "gpu", before=BEFORE) == 1
    assert server.deleted == []
    for status, code in ((403, 1), (404, 0)):  # forbidden, and gone meanwhile
        server = ApiServer({"batch/v1/jobs": JOBS})
        assert cleanup.clean(asked(server, {"old": status}), "gpu", before=BEFORE) == code
        assert any("old-failed" in path for path in server.deleted)


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
            return finished([sys.executable, "-B", "-c", program], env={**environ, "PATH": os.environ["PATH"], **more})

        done = run(NAMESPACE="gpu", KEEP_HOURS="72")
        assert (done.returncode, done.stdout) == (0, "cleanup: deleted batch/v1/jobs/old\n"), done.stderr
        assert set(server.tokens) == {"Bearer t0ken"}
        for hours in ({}, *({"KEEP_HOURS": value} for value in ("0", "nan", "inf"))):
            assert run(NAMESPACE="gpu", **hours).returncode == 2, hours
