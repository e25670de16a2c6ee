"""The criterion nccl.environment itself: what it accepts, and how a leftover setting fails it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torchrun
from sessions import Left, Project
from sysfs_ports import add_port, add_roce

TESTS = Path(__file__).parent
ACCEPTANCE = TESTS.parent / "acceptance"
CONFTEST = """
import os
from pathlib import Path
import pytest
from pytest_gpucluster.fabric_ports import FabricSources

SET = dict(pair.split("=", 1) for pair in os.environ.get("SET", "").split())
SET |= dict(pair.split("=", 1) for pair in os.environ.get(f"SET_ON_{os.environ.get('RANK', '0')}", "").split())

@pytest.fixture(scope="session")
def fabric_sources():
    root = Path(os.environ["SYSFS"])
    return FabricSources(
        sysfs=root, proc=root / "proc", environ=SET, home=lambda: root, system_file=root / "etc.conf"
    )
"""


def files() -> dict[str, str]:
    # Under another name: in this process a test module of that name is loaded already.
    names = {"test_the_criterion_environment.py": "test_nccl_environment.py", "workloads.yaml": "workloads.yaml"}
    return {name: (ACCEPTANCE / of).read_text(encoding="utf-8") for name, of in names.items()} | {
        "conftest.py": CONFTEST
    }


def rehearse(project: Project, monkeypatch: pytest.MonkeyPatch, variables: str = "", user: str = "") -> Left:
    sysfs = project.path / "sys"
    add_port(sysfs)
    (sysfs / ".nccl.conf").write_text(user)
    monkeypatch.setenv("SYSFS", str(sysfs))
    monkeypatch.setenv("SET", variables)
    for name, text in files().items():
        (project.path / name).write_text(text, encoding="utf-8")
    return project.run()


def properties(left: Left) -> dict[str, str]:
    return dict(left.journal.results[0].properties)


def test_nothing_set_is_accepted_and_what_is_set_is_on_record_with_its_origin(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = rehearse(project, monkeypatch, "NCCL_IB_HCA=mlx5 OMP_NUM_THREADS=4", user="NCCL_CROSS_NIC=0\n")
    assert left.verdicts == {"test_nccl_environment": "passed"}, left.output
    told = {name: text for name, text in properties(left).items() if name.startswith("environment.")}
    assert told == {
        "environment.NCCL_CROSS_NIC": f"0 ({project.path}/sys/.nccl.conf)",
        "environment.NCCL_IB_HCA": "mlx5 (environment)",
        "environment.OMP_NUM_THREADS": "4 (environment)",
    }
    assert [(one.metric, one.value) for one in left.journal.results[0].measurements] == [
        ("nccl.environment.findings", 0)
    ]
    [kept] = (project.path / "gpucluster-report" / "latest").glob("**/environment.json")
    assert json.loads(kept.read_text())[0]["ranks"] == [0]
    assert left.last_line[:2] == ("REHEARSED", 0)


def test_this_suite_s_own_settings_are_nobody_s_leftover(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    left = rehearse(project, monkeypatch)
    assert left.verdicts == {"test_nccl_environment": "passed"}, left.output
    assert not any(name.startswith("environment.NCCL_DEBUG") for name in properties(left))


def test_a_setting_that_hurts_is_an_error_with_its_origin_and_no_verdict_on_the_hardware(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = rehearse(project, monkeypatch, user="NCCL_CHECK_POINTERS=1\n")
    assert left.verdicts["test_nccl_environment"].startswith("error: "), left.output
    body = left.body("test_nccl_environment")
    assert f"NCCL_CHECK_POINTERS=1 ({project.path}/sys/.nccl.conf): 1 looks at each pointer" in body
    assert "what to do: unset it" in body
    assert left.last_line[:2] == ("BROKEN", 11)


def test_what_helps_elsewhere_is_a_note(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    left = rehearse(project, monkeypatch, "NCCL_DEBUG=INFO NCCL_P2P_DISABLE=1")
    assert left.verdicts == {"test_nccl_environment": "passed"}, left.output


@pytest.mark.parametrize(
    ("variables", "state"),
    [
        ("", "not set"),
        ("NCCL_IB_HCA=mlx5", "set otherwise: mlx5"),
        ("NCCL_IB_HCA=mlx5_0", "set: mlx5_0, which has the same effect"),
    ],
)
def test_what_differs_from_the_advice_is_on_record_and_fails_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch, variables: str, state: str
) -> None:
    add_roce(project.path / "sys", "mlx5_1", pci="0000:19:00.0", rate="100 Gb/sec (4X EDR)")
    left = rehearse(project, monkeypatch, variables)
    assert left.verdicts == {"test_nccl_environment": "passed"}, left.output
    told = properties(left)
    assert told["advice.fabric"] == "InfiniBand: 1 active port of 400 Gb/s (mlx5_0:1)"
    assert told["advice.NCCL_IB_HCA"].startswith(f"=mlx5_0:1; {state}")
    assert "mlx5_1:1: it is Ethernet, and the fabric is InfiniBand" in told["advice.NCCL_IB_HCA"]
    assert [(one.metric, one.value) for one in left.journal.results[0].measurements] == [
        ("nccl.environment.findings", 0)
    ]


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    add_port(tmp_path / "sys")
    path = os.pathsep.join([str(TESTS)])
    environment = {"SYSFS": str(tmp_path / "sys"), "SET_ON_1": "NCCL_MIN_NCHANNELS=32", "PYTHONPATH": path}
    run = torchrun.torchrun(tmp_path, files(), environment=environment, deadline=30.0)
    assert run.verdicts["test_nccl_environment"].startswith("error: "), run.output
    body = run.body("test_nccl_environment")
    assert "differs (environment): NCCL_MIN_NCHANNELS is not set on rank 0; 32 on rank 1 (node-a)" in body
    assert run.end[:2] == ("BROKEN", 11)
