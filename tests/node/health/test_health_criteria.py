"""The criteria as the operator runs them, on CPU tensors, with NVML, kernel log and PCI bus planted at their seam."""

import os
import textwrap
from pathlib import Path

import pytest
import torchrun
from patient import NAMES

ACCEPTANCE = Path(__file__).parents[3] / "acceptance"

CONFTEST = """
    import dataclasses
    import pytest
    import patient
    from pytest_gpucluster.node.kernel_log import KernelLog
    from pytest_gpucluster.node.nvml import NotAvailable
    from pytest_gpucluster.node.pci import PciGpu

    @pytest.fixture(scope="session")
    def gpu(gpu):
        return dataclasses.replace(gpu, index=0, uuid=patient.UUID, pci_bus_id=patient.PCI, sku={sku!r})

    @pytest.fixture(scope="session")
    def inventory(inventory):
        # The ranks are this rehearsal's own. Each has a healthy H100.
        return [dict(who, host="gpu-07", gpu=dict(patient.who()["gpu"], **{change!r})) for who in inventory]

    @pytest.fixture(scope="session")
    def gpu_sources():
        return patient.sources(patient.nvml({planted}, {without!r}, silent={silent!r}), log={log}, unlisted={unlisted})
"""


def suite_without(*markers):
    """Return the acceptance suite's files for health, without markers that keep a test off this machine."""
    suite = (ACCEPTANCE / "test_health.py").read_text(encoding="utf-8")
    for marker in markers:
        assert f"@pytest.mark.{marker}\n" in suite
        suite = suite.replace(f"@pytest.mark.{marker}\n", "")
    return {"test_health.py": suite, "workloads.yaml": (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8")}


def criterion(
    project, name, *, planted="{}", without=(), log="None", unlisted="()", silent=(), sku="H100 SXM", change=None
):
    """Run one criterion of the acceptance suite as it is, but for the marker that keeps it off a CPU."""
    for path, text in suite_without("needs_gpu", "needs_ranks(2)").items():
        (project.path / path).write_text(text, encoding="utf-8")
    conftest = textwrap.dedent(CONFTEST).format(
        planted=planted,
        without=without,
        log=log,
        unlisted=unlisted,
        silent=silent,
        sku=sku,
        change=change or {},
    )
    (project.path / "conftest.py").write_text(conftest, encoding="utf-8")
    return project.run("-k", name)


def test_a_healthy_gpu_passes_and_its_figures_are_on_record(project):
    left = criterion(project, "test_gpu_health")
    assert left.verdicts == {"test_gpu_health": "passed"}, left.output
    judged = {m.metric: m.value for m in left.journal.results[0].measurements}
    assert judged == {
        "gpu.findings": 0,
        "gpu.memory.total": pytest.approx(85.5208),
        "gpu.memory.free": pytest.approx(99.392, abs=0.001),
        "gpu.temperature": 61,
        "gpu.power_limit": 100,
    }
    assert left.exit == 0


FAULTS = """{
    'ecc.uncorrected.volatile': 2, 'pcie.generation': 1, 'throttle.reasons': ('hw_thermal',), 'rows.pending': True,
    'nvlink.up': {0: True, 1: False}, 'memory.total': 40 * 10**9, 'power.limit': 350.0}"""
XID = "KernelLog(lines=('NVRM: Xid (PCI:0000:3b:00): 79, pid=1, fallen off the bus',), source='dmesg')"
GONE = "(PciGpu(address='0000:5e:00.0', state='dead', detail='its PCI configuration reads as all ones'),)"
REJECTED = [
    (
        {"planted": FAULTS, "log": XID, "unlisted": GONE},
        ("ecc_uncorrected", "2 uncorrected", "xid_79", "gen1 under load", "hw_thermal", "nvlink_down", "down: 1",
         "row_remap_pending", "40.00 GB", "350 W", "PCI 0000:5e:00.0"),
    ),
    ({"silent": ("GPU-5f2c",)}, ("gpu_lost",)),
    # Under the load only.
    ({"planted": "{'clock.sm': NotAvailable('the GPU is lost', 'lost')}"}, ("gpu_lost", "the GPU is lost")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REJECTED, ids=["faults of all kinds", "lost", "lost under load"])
def test_a_gpu_with_faults_is_rejected_by_name(project, arguments, words):
    left = criterion(project, "test_gpu_health", **arguments)
    assert left.verdicts["test_gpu_health"].startswith("failure: "), left.output
    for word in (*NAMES, "what to do: ", *words):
        assert word in left.body("test_gpu_health")
    assert left.last_line[:2] == ("REJECTED", 1)


def test_a_gpu_that_cannot_be_judged_is_an_error_and_no_verdict_on_it(project):
    planted = """{'memory.used': 9 * 10**9, 'processes': ((99, 8 * 10**9),),
        'fabric': {'state': 'not started', 'status': 'success', 'health': ()}}"""
    left = criterion(project, "test_gpu_health", planted=planted, without=("ecc.mode",))
    assert left.verdicts["test_gpu_health"].startswith("error: "), left.output
    words = ("memory_taken", "pid 99 of user alice (python train.py) with 8.00 GB", "query_missing", "ecc.mode",
             "fabric_state", "not started")  # fmt: skip
    for word in (*NAMES, "what to do: ", *words):
        assert word in left.body("test_gpu_health")
    assert left.last_line[:2] == ("BROKEN", 11)


def test_no_nvml_is_an_error(project, monkeypatch):
    # The fixture itself, which opens NVML: on this machine the library is taken away.
    import pynvml

    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    project.suite("""
        import pytest

        @pytest.mark.criterion("gpu.health")
        def test_health(gpu_sources):
            pass
    """)
    left = project.run()
    assert left.verdicts["test_health"].startswith("error: ")
    assert "NVML" in left.body("test_health")
    assert left.exit == 11


def test_a_rehearsal_multiplies_on_the_cpu(project):
    left = criterion(project, "test_gpu_computes")
    assert left.verdicts == {"test_gpu_computes": "passed"}, left.output
    (measured,) = left.journal.results[0].measurements
    assert (measured.metric, measured.value) == ("gpu.usable_dtypes", 4)


def test_a_wrong_product_names_its_gpu_and_rejects(project, monkeypatch):
    import torch

    mm = torch.mm

    def wrong(*arguments, **named):
        product = mm(*arguments, **named)
        product[3, 4] += 1
        return product

    monkeypatch.setattr(torch, "mm", wrong)
    left = criterion(project, "test_gpu_computes")
    assert left.verdicts["test_gpu_computes"].startswith("failure: "), left.output
    for word in (*NAMES, "the bf16 product", "wrong in 1 of", "[3, 4]"):
        assert word in left.body("test_gpu_computes")
    assert left.last_line[:2] == ("REJECTED", 1)


TWO_RANKS = """
    import dataclasses
    import pytest
    import patient

    ODD = {"vbios": "96.00.30.00.01", "serial": "999", "index": 1}

    @pytest.fixture(scope="session")
    def gpu(gpu):
        return dataclasses.replace(gpu, uuid=patient.UUID, sku="H100 SXM")

    @pytest.fixture(scope="session")
    def inventory(inventory):
        healthy = patient.who()["gpu"]
        return [dict(who, gpu={**healthy, **(ODD if who["rank"] == 1 else {})}) for who in inventory]

    @pytest.fixture(scope="session")
    def gpu_sources(cluster):
        planted = {"ecc.uncorrected.volatile": 6, "serial": "999"} if cluster.rank == 1 else {}
        return patient.sources(patient.nvml(planted))
"""


def test_of_two_ranks_the_one_with_the_bad_gpu_is_named(tmp_path):
    files = {**suite_without("needs_gpu"), "conftest.py": TWO_RANKS}
    path = os.pathsep.join(str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[2]))
    run = torchrun.torchrun(tmp_path, files, environment={"PYTHONPATH": path}, timeouts="stuck=30", deadline=60.0)
    assert run.left_over == []
    assert run.verdicts["test_gpu_computes"] == "passed", run.output
    assert run.verdicts["test_gpu_health"].startswith("failure: rank 1"), run.output
    body = run.body("test_gpu_health")
    for word in ("ecc_uncorrected", "6 uncorrected", "serial 999"):
        assert word in body
    assert run.verdicts["test_fleet_is_uniform"].startswith("failure: "), run.output
    body = run.body("test_fleet_is_uniform")
    assert "VBIOS: 96.00.30.00.01 on rank 1 (node-a); 96.00.74.00.01 on rank 0 (node-a)" in body
    assert run.end[:2] == ("REJECTED", 1)
    assert run.end[2] == "rank 0"
