"""``gpucluster doctor``: each planted fault is found, with its criteria and what to type; a healthy launch has none."""

import contextlib
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from each import of_each
from fork_server import server_for
from sessions import environment

from pytest_gpucluster.agreement.preflight import Expectation
from pytest_gpucluster.cli import doctor, main
from pytest_gpucluster.cli.doctor_findings import (
    Facts,
    Forecast,
    KubernetesFacts,
    Rendezvous,
    RequiredTest,
    SlurmFacts,
    examine,
)
from pytest_gpucluster.judge.loader import load, shipped_path
from pytest_gpucluster.node.processes import Output

sys.path.insert(0, str(Path(__file__).parent.parent / "node"))

from fake_host import facts as node_facts
from fake_host import limits, space

SCHEDULER = RequiredTest(nodeid="acceptance/test_scheduler.py::test_slurm[before]", criterion="slurm")
PLAN = Forecast(
    nodes=2,
    ranks_per_node=8,
    device="cuda",
    part="",
    torch="2.13.0+cu130",
    nvml="",
    cuda="13.0",
    driver="580.159.04",
    driver_cuda="13.0",
    gpus=8 * ("NVIDIA H100 80GB HBM3",),
    expect=Expectation(nodes=2, gpus_per_node=8, sku="H100"),
    sku="H100 SXM",
    tests=(SCHEDULER, RequiredTest(nodeid="acceptance/test_hbm.py::test_hbm[copy]", criterion="hbm")),
)
PLACE = Rendezvous(option="--master-addr", host="gpu-00", port=29500, answer="free")
SLURM = SlurmFacts(config={"KillWait": "30 sec", "SlurmdTimeout": "300 sec"}, gpus={"gpu-00": 8, "gpu-01": 8})


def kubernetes_node(name="a", **changes):
    """A node as ``kubectl get nodes`` lists it."""
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}} | changes,
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]} | changes,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "128", "nvidia.com/gpu": "8", "rdma/rdma_shared_device_a": "63"},
        }
        | changes,
    }


def kubernetes(**changes):
    nodes = (kubernetes_node(**changes), kubernetes_node("b"))
    return KubernetesFacts(version="v1.32.4", nodes=nodes)


def snapshot(folder, files=None, shm=10**12):
    found = node_facts(folder, files or {}, ranks=8, space=space(shm, shm))
    return replace(found, own_cpus=frozenset(range(128)))


def healthy(folder):
    node = snapshot(folder)
    parts = {"rendezvous": PLACE, "node": node, "slurm": SLURM, "kubernetes": kubernetes()}
    return Facts(host="gpu-00", plan=PLAN, limits=load(shipped_path()), **parts)


def findings(facts):
    """Return code -> kind and criteria. Each finding says what was found, what is allowed and what to type."""
    found = examine(facts)
    assert all(one.found and one.allowed and one.remedy for one, _ in found)
    return {one.code: (one.kind, sorted(criteria)) for one, criteria in found}


def test_a_healthy_launch_has_no_finding(tmp_path):
    assert findings(healthy(tmp_path)) == {}


def of_plan(**changes):
    return lambda facts: replace(facts, plan=replace(facts.plan, **changes))


def of_place(**changes):
    return lambda facts: replace(facts, rendezvous=replace(PLACE, **changes))


def of_slurm(**changes):
    return lambda facts: replace(facts, slurm=replace(SLURM, **changes))


def of_kubernetes(**changes):
    return lambda facts: replace(facts, kubernetes=replace(kubernetes(), **changes))


def of(**changes):
    return lambda facts: replace(facts, **changes)


A100 = ("NVIDIA A100-SXM4-80GB",)
SKIPPED = replace(SCHEDULER, skipped="needs 2 nodes, and there is 1", remedy="launch all")
NOTES = {"driver.older", "node.unseen", "slurm.kill_wait", "slurm.slurmd_timeout"}
OF_SLURM = {"test.skipped", "slurm.silent"}
"""Findings that cost one criterion only."""
FAULTS = {
    "a rehearsal": (of_plan(device="cpu"), "launch.rehearsal"),
    "a simulated cluster": (of_plan(device="simulated"), "launch.rehearsal"),
    "a part": (of_plan(part="SELECTION PASSED at best"), "launch.part"),
    "one node of two": (of_plan(nodes=1), "launch.shape"),
    "four ranks of eight": (of_plan(ranks_per_node=4), "launch.shape"),
    "a model that is not there": (of_plan(problems=("--gpucluster-model: no",)), "input.unusable"),
    "a test that skips": (of_plan(tests=(SKIPPED,)), "test.skipped"),
    "torch for cpu": (of_plan(cuda=None), "torch.cpu"),
    "no driver": (of_plan(nvml="NVML is not available", gpus=()), "driver.silent"),
    "an old driver": (of_plan(driver_cuda="12.8", gpus=()), "driver.old"),
    "a driver of an older minor version": (of_plan(cuda="13.2"), "driver.older"),
    "hidden GPUs": (of_plan(gpus=()), "gpu.none"),
    "seven GPUs": (of_plan(gpus=PLAN.gpus[:7]), "gpu.count"),
    "a GPU without a rank": (of_plan(expect=None, ranks_per_node=7), "gpu.count"),
    "another GPU than ordered": (of_plan(gpus=8 * A100, sku="A100 SXM 80GB"), "gpu.sku"),
    "two kinds of GPU": (of_plan(gpus=PLAN.gpus[1:] + A100, expect=None), "gpu.sku"),
    "an unknown GPU": (of_plan(gpus=8 * ("H100 X",), sku=None), "gpu.unknown"),
    "no address": (of(rendezvous=None), "rendezvous.missing"),
    "an unknown name": (of_place(unknown="Name or service not known"), "rendezvous.unknown"),
    "a port in use": (of_place(answer="in use"), "rendezvous.port"),
    "a firewall": (of_place(answer="silent"), "rendezvous.silent"),
    "an unknown host": (of(unknown_names={"gpu-01": "no"}), "name.unknown"),
    "a login node": (of(elsewhere="look there"), "node.unseen"),
    "no Slurm": (of(slurm=SlurmFacts(why_not="scontrol not found")), "slurm.silent"),
    "a short KillWait": (of_slurm(config={**SLURM.config, "KillWait": "5 sec"}), "slurm.kill_wait"),
    "a SlurmdTimeout of never": (of_slurm(config={**SLURM.config, "SlurmdTimeout": "0 sec"}), "slurm.slurmd_timeout"),
    "too few GPUs in GRES": (of_slurm(gpus={"gpu-00": 8, "gpu-01": 7}), "slurm.gres"),
    "no kubectl": (of(kubernetes=KubernetesFacts(version="")), "kubernetes.kubectl"),
    "an old kubectl": (of_kubernetes(version="v1.26.9"), "kubernetes.kubectl"),
    "no right to make Jobs": (of_kubernetes(denied=["create jobs.batch"]), "kubernetes.rights"),
    "an API server that does not answer": (of_kubernetes(nodes=(), why_not="refused"), "kubernetes.nodes"),
    "too few nodes": (of_kubernetes(nodes=[kubernetes_node()]), "kubernetes.nodes"),
}


@of_each("name", list(FAULTS))
def test_each_fault_is_found_with_the_criteria_that_it_costs(name, tmp_path):
    change, code = FAULTS[name]
    found = findings(change(healthy(tmp_path)))
    kind = "note" if code in NOTES else "environment"
    assert found.get(code) == (kind, ["slurm"] if code in OF_SLURM else []), found
    if name not in ("a rehearsal", "no kubectl"):  # which changes the limits; without nodes
        assert list(found) == [code]


UNUSABLE = {
    "cordoned": ({"unschedulable": True}, "kubernetes.node"),
    "without a device plugin": ({"allocatable": {"cpu": "128"}}, "kubernetes.gpus"),
    "with other GPUs": ({"labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}}, "kubernetes.sku"),
    "tainted": ({"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}, "kubernetes.taint"),
}


@of_each("name", list(UNUSABLE))
def test_a_node_of_kubernetes_that_takes_no_pod_is_named_and_not_counted(name, tmp_path):
    changes, code = UNUSABLE[name]
    facts = replace(healthy(tmp_path), kubernetes=kubernetes(**changes))
    assert findings(facts) == {code: ("note", []), "kubernetes.nodes": ("environment", [])}
    assert [one.gpu.host for one, _ in examine(facts)] == ["a", "gpu-00"]


def test_a_node_without_rdma_is_a_note(tmp_path):
    facts = replace(healthy(tmp_path), kubernetes=kubernetes(allocatable={"nvidia.com/gpu": "8"}))
    assert findings(facts) == {"kubernetes.rdma": ("note", [])}


@pytest.mark.parametrize(
    ("files", "shm", "code"),
    [
        ({"/proc/self/limits": limits(nofile=1024)}, 10**12, "host.nofile"),
        ({"/proc/self/limits": limits(memlock=65536)}, 10**12, "host.memlock"),
        ({}, 64 << 20, "host.shm"),
    ],
)
def test_limits_of_the_host_are_judged_as_the_suite_judges_them(files, shm, code, tmp_path):
    facts = replace(healthy(tmp_path / "other"), node=snapshot(tmp_path, files, shm))
    assert findings(facts) == {code: ("environment", ["host.limits"])}
    unlimited = snapshot(tmp_path / "pod", {**files, "/proc/self/mountinfo": ""}, shm)
    assert "kubernetes.resources" in findings(replace(facts, node=unlimited, in_pod=True))


def test_an_unknown_limit_of_the_host_is_one_finding_among_the_others(tmp_path):
    healthy_one = healthy(tmp_path)
    facts = replace(healthy_one, node=replace(healthy_one.node, limits=None), rendezvous=None)
    assert findings(facts) == {
        "host.unknown": ("environment", ["host.limits"]),
        "rendezvous.missing": ("environment", []),
    }


# ---- what is collected


def forecast(words):
    """Write what the forecast of a run on cpu would."""
    _, _, _, file, nodes, ranks, _, *_ = words
    plan = {"device": "cpu", "part": "", "torch": "2.13.0", "nvml": "", "nodes": int(nodes)}
    Path(file).write_text(json.dumps({**plan, "ranks_per_node": int(ranks) or 2}))
    return Output(code=0)


ANSWERS = {
    "kubectl version": '{"clientVersion": {"gitVersion": "v1.30.1"}}',
    "kubectl auth can-i create services": "no\n",
    "kubectl auth": "yes\n",
    "kubectl get nodes": json.dumps({"kind": "NodeList", "items": [kubernetes_node()]}),
    "scontrol show config": "Configuration data as of now\nKillWait                = 20 sec\n",
    "sinfo": "gpu-00|gpu:h100:8(S:0-1)\ngpu-01|(null)\n",
}


def run(words, seconds, **others):
    if words[0] == sys.executable:
        return forecast(words)
    line = " ".join(word for word in words if not word.startswith("--namespace"))
    return Output(code=0, text=next(text for begin, text in ANSWERS.items() if line.startswith(begin)))


def collect(line, environ=None, **sources):
    with pytest.MonkeyPatch.context() as patch:
        for name, source in {"run_program": run, **sources}.items():
            patch.setattr(doctor, name, source)
        return doctor.collect(main.parse(["doctor", *line.split()]), environ or {})


def test_what_kubectl_answers_is_read():
    found = collect("--kubernetes --namespace=gpu --nnodes 3").kubernetes
    assert found == KubernetesFacts(version="v1.30.1", denied=["create services"], nodes=[kubernetes_node()])

    def silent(words, *_, **__):
        return forecast(words) if words[0] == sys.executable else Output(why_not="x")

    assert collect("--kubernetes", run_program=silent).kubernetes == KubernetesFacts(version="", why_not="x")


def test_what_slurm_answers_is_read(monkeypatch):
    monkeypatch.setattr(doctor.scheduler, "why_unavailable", lambda: None)
    monkeypatch.setattr(doctor.scheduler, "ping", lambda: None)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu-[00-01]", "SLURM_JOB_NUM_NODES": "2"}
    facts = collect("-- acceptance/", job)
    assert (facts.plan.nodes, bool(facts.elsewhere), facts.node) == (2, True, None)
    assert (facts.slurm.config["KillWait"], facts.slurm.gpus) == ("20 sec", {"gpu-00": 8, "gpu-01": 0})
    on_a_node = collect("-- acceptance/", {**job, "SLURMD_NODENAME": "gpu-00"})
    assert (on_a_node.elsewhere, on_a_node.node is not None) == ("", True)


def test_names_and_ports_are_those_that_torchrun_is_given(tmp_path):
    words = "--nnodes=2 --master-addr head --master-port=4000 -- acceptance/"
    place = collect(
        words, why_unknown=lambda host, **_: None, probe_port=lambda host, port: f"{host}:{port}"
    ).rendezvous
    assert place == Rendezvous(option="--master-addr", host="head", port=4000, answer="head:4000")
    place = collect("--rdzv-endpoint=head:5000", {"PET_NNODES": "2"}, why_unknown=lambda *_, **__: "no").rendezvous
    assert place == Rendezvous(option="--rdzv-endpoint", host="head", port=5000, unknown="no")
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu-[00-01]"}
    assert doctor.rendezvous_of([], job, 1) is None
    found = doctor.rendezvous_of([], job, 2)
    assert (found.host, found.port) == ("gpu-00", 0) if found else None
    found = doctor.rendezvous_of([], {**job, "MASTER_ADDR": "head", "MASTER_PORT": "4000"}, 2)
    assert found == Rendezvous(option="MASTER_ADDR", host="head", port=4000)
    (tmp_path / "hosts").write_text("gpu-[00-01] \ngpu-02 address=here\n")
    facts = collect(f"--hosts {tmp_path / 'hosts'}", why_unknown=lambda host, **_: None if host == "here" else "no")
    assert (facts.plan.nodes, facts.unknown_names) == (3, {"gpu-00": "no", "gpu-01": "no"})


def test_torchrun_reads_no_master_addr():
    environ = {"MASTER_ADDR": "head", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu-[00-01]"}
    assert doctor.rendezvous_of(["--nnodes=2"], environ, 2) is None


def test_over_ssh_the_options_are_those_of_run_hosts(tmp_path, capsys):
    (tmp_path / "hosts").write_text("gpu-[00-01]\n")
    started = []

    def note(words, *_, **__):
        started.append(words[4:])
        return forecast(words)

    given = f"--hosts {tmp_path / 'hosts'} --expect 8xH100"
    collect(f"{given} -- acceptance/", run_program=note, why_unknown=lambda *_, **__: None)
    [words] = started
    assert words[:3] == ["2", "0", "elsewhere"]
    assert words[-2:] == ["acceptance/", "--gpucluster-expect=2x8xH100"]
    for wrong in (f"{given} --nodse=7 --kubernets", f"{given} -- --gpucluster-expect=2x8xH100"):
        with contextlib.suppress(SystemExit):
            assert main.main(["doctor", *wrong.split()]) == 2
    text = capsys.readouterr().err
    assert "--nodse=7 --kubernets" in text
    assert "--expect 8xH100" in text


@pytest.fixture
def forecast_by_a_fork(tmp_path, monkeypatch):
    """Let ``main`` start the forecast as a fork of a process that has torch and pytest loaded."""

    def forked(words, seconds, *, environ):
        server = server_for(environment(environ))
        with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
            at = {"output": out.fileno(), "errors": err.fileno(), "token": "doctor"}
            code = server.start(words, cwd=Path.cwd(), env=environment(environ), **at).wait(seconds)
            return Output(text=(tmp_path / "out").read_text(), errors=(tmp_path / "err").read_text(), code=code)

    monkeypatch.setattr(doctor, "run_program", forked)


@pytest.mark.usefixtures("forecast_by_a_fork")
def test_an_unknown_option_of_torchrun_is_wrong_usage(capsys):
    assert main.main(["doctor", "--nodse=7", "--", "acceptance/"]) == 2
    assert "--nodse=7" in capsys.readouterr().err


def test_a_port_is_free_in_use_or_refused():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert doctor.probe_port("127.0.0.1", port) == "in use"
    assert doctor.probe_port("127.0.0.1", port) == "free"


@pytest.mark.usefixtures("forecast_by_a_fork")
def test_a_wrong_option_of_pytest_is_wrong_usage(capsys):
    assert main.main(["doctor", "--", "acceptance/test_hbm.py", "--lf", "--gpucluster-sku=H1000"]) == 2
    assert "H1000" in capsys.readouterr().err


def test_on_this_machine_the_real_suite_is_forecast(capsys):
    assert (
        main.main(["doctor", "--nnodes=2", "--nproc-per-node=2", "--", "acceptance/", "--gpucluster-device=cpu"]) == 1
    )
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "launch.rehearsal" in text
    assert "all: launch.rehearsal, rendezvous.missing" in text
    assert "shared_filesystem: test.skipped" in text
