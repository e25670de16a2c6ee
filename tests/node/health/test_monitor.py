"""What goes along with every test: the sampler's window and the counters, and what they decide."""

import re
import threading
import time

import fake_sampler
import pytest
from each import of_each
from fake_nvml import HEALTHY_H100, FakeNvml
from torchrun import torchrun
from watched_gpus import SAMPLED, conftest, pci_of, pretend, uuid_of

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.node import nvml
from pytest_gpucluster.node.health import telemetry
from pytest_gpucluster.node.health.counters import Sources
from pytest_gpucluster.node.health.monitor import Place, RankMonitor, TestMonitor, sources_of
from pytest_gpucluster.node.health.telemetry import Link
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import NotAvailable

GPU = uuid_of(0)
XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."
XID_13 = "NVRM: Xid (PCI:0000:1b:00): 13, pid=1, Graphics Exception"
ECC = "ecc.uncorrected.volatile"
WORKERS = ("-n", "2", "--dist", "each", "--max-worker-restart=0")


def who(rank=0, *, gpu=True, host="gpu-07"):
    known = {"index": rank, "uuid": uuid_of(rank), "pci_bus_id": pci_of(rank), "serial": "165", "name": "H100"}
    return {"rank": rank, "host": host, "node_rank": 0, "local_rank": rank, "gpu": known if gpu else None}


def sources(values, *, log=None):
    """Of an H100 whose NVML answers with these values, which may change."""
    fake = FakeNvml({GPU: {}})
    fake.planted[GPU] = values
    quiet = KernelLog(lines=("NVRM: loading",), source="dmesg")
    return Sources.of([who()], rank=0, nvml=fake, kernel_log=log or (lambda: quiet))


def company(values, required=(ECC,), **more):
    settings = {"window": Link(None, None).window(), "sources": sources(values), "required": lambda: required}
    return TestMonitor(**{**settings, **more})


# ---- one body


def test_changed_counters_are_added_to_every_measurement():
    values = dict(HEALTHY_H100)
    went = company(values)
    went.end()
    assert went.telemetry == {}, "ending before beginning counts nothing"
    went.begin()
    values["pcie.replays"] = 3
    went.end()
    values[ECC] = 5
    went.end()
    went.require_healthy()
    assert went.telemetry["counters"] == {"pcie.replays": 3}, "changes alone, and none is taken twice"
    measured = [measurement("inventory.ranks", 1, unit="ranks", telemetry={"notes": ["kept"]})]
    assert went.annotate(measured)[0].telemetry == {"notes": ["kept"], "counters": {"pcie.replays": 3}}


def test_a_new_uncorrected_error_is_a_fault_which_outweighs_a_missing_counter():
    values = dict(HEALTHY_H100)
    del values["rows.failed"], values["pcie.replays"]
    went = company(values, required=(ECC, "rows.failed"))
    went.begin()
    values[ECC] = 2
    went.end()
    assert went.telemetry["counters"] == {ECC: 2}
    with pytest.raises(HardwareFault, match=r"ecc_uncorrected .*: GPU 0 \(GPU-00000000"):
        went.require_healthy()
    with pytest.raises(HardwareFault):
        went.require_no_fault()
    assert "not supported" in went.telemetry["counters_not_available"]["pcie.replays"]


@of_each("known_before", [False, True])
def test_a_required_counter_that_is_missing_is_an_error(known_before):
    refused = NotAvailable("no permission", "no permission")
    values = dict(HEALTHY_H100) if known_before else {**HEALTHY_H100, ECC: refused}
    went = company(values)
    went.begin()
    values[ECC] = refused
    went.end()
    with pytest.raises(EnvironmentBroken, match=r"ecc\.uncorrected\.volatile on GPU 0 .*on gpu-07.*no permission"):
        went.require_healthy()
    went.require_no_fault()


def test_a_driver_that_hangs_over_the_counters_delays_no_test():
    let_go = threading.Event()
    values = {**HEALTHY_H100, ECC: lambda: let_go.wait(30) and 0}
    went = company(values, read_seconds=0.01)
    begin = time.monotonic()
    went.begin()
    went.end()
    assert time.monotonic() - begin < 20
    let_go.set()
    with pytest.raises(EnvironmentBroken, match=r"before the test: .* 0\.01 s"):
        went.require_healthy()
    assert set(went.telemetry["counters_not_available"]) == {"all"}


def test_counters_that_break_are_an_error_where_any_is_required_and_a_note_where_none_is():
    def broken():
        raise OSError("broken")

    for required, is_error in (((ECC,), True), ((), False)):
        went = company(HEALTHY_H100, required=required, sources=sources(dict(HEALTHY_H100), log=broken))
        went.begin()
        went.end()
        assert "OSError: broken" in went.telemetry["counters_not_available"]["all"]
        if is_error:
            with pytest.raises(EnvironmentBroken, match="OSError: broken"):
                went.require_healthy()
        else:
            went.require_healthy()


# ---- a rank's part


def joined(sku="H100 SXM", *, gpu=True):
    made = RankMonitor()
    made.join(Place(node=[who(gpu=gpu)], rank=0, sku=lambda: sku))
    return made


@pytest.mark.parametrize(
    ("sku", "required"),
    [
        pytest.param("H100 SXM", {ECC, "rows.pending", "rows.failed", "nvlink.up"}, id="of an H100"),
        pytest.param(None, set(), id="of an unknown GPU"),
    ],
)
def test_required_counters_are_those_of_the_health_criterion(sku, required, monkeypatch):
    monkeypatch.setattr(nvml, "MAKER", lambda: FakeNvml({GPU: HEALTHY_H100}))
    assert required <= set(joined(sku).test_monitor(counters=True).required())
    if not required:
        assert not joined(sku).test_monitor(counters=True).required()
    assert not joined(sku).test_monitor(counters=False).required()


def test_where_nvml_cannot_be_opened_a_criterion_is_an_error(monkeypatch):
    def refuse():
        raise EnvironmentBroken("NVML is not available: no driver library")

    monkeypatch.setattr(nvml, "MAKER", refuse)
    went = joined().test_monitor(counters=True)
    went.begin()
    went.end()
    with pytest.raises(EnvironmentBroken, match="no driver library"):
        went.require_healthy()


def test_on_cpu_nothing_is_required_and_nvml_is_not_touched(monkeypatch):
    def refuse():
        raise AssertionError("NVML on cpu")

    monkeypatch.setattr(nvml, "MAKER", refuse)
    went = joined(gpu=False).test_monitor(counters=True)
    went.begin()
    went.end()
    went.require_healthy()
    assert set(went.telemetry) <= {"counters", "counter_notes"}


def test_a_rank_knows_the_gpus_of_its_node_and_one_rank_answers_for_the_node(monkeypatch):
    monkeypatch.setattr(nvml, "MAKER", lambda: FakeNvml({GPU: HEALTHY_H100}))
    node = [who(0), who(1)]
    assert [sources_of(node, rank).of_node for rank in (0, 1)] == [True, False]
    assert set(sources_of(node, 1).gpus_of_node) == {"0000:1b:00.0", "0000:1c:00.0"}


def test_a_rank_whose_gpu_the_nodes_sampler_does_not_see_starts_its_own_and_no_more(tmp_path, monkeypatch):
    started = []
    real = telemetry.start_sampler
    monkeypatch.setattr(telemetry, "start_sampler", lambda: started.append(real()) or started[-1])
    monkeypatch.setattr(telemetry, "ANSWER_SECONDS", 30.0)
    monkeypatch.setattr(telemetry, "COMMAND", fake_sampler.command(tmp_path, {uuid_of(7): SAMPLED}))
    first, mine = RankMonitor(), joined()
    mine.use_sampler(first.start())
    with mine.window() as window:
        pass
    assert window.summary()["samples"] == 0
    assert set(window.summary()["not_available"])
    monkeypatch.setattr(telemetry, "COMMAND", fake_sampler.command(tmp_path, {GPU: SAMPLED}))
    for _ in range(2):
        with mine.window() as window:
            pass
        assert window.summary()["sm_clock_mhz"] == [1755, 1755, 1755]
    assert len(started) == 2
    mine.close()
    first.close()


# ---- whole sessions


SUITE = """
    import time
    import pytest

    @pytest.mark.criterion("speed")
    def test_speed(measure):
        time.sleep(0.2)
        measure("inventory.ranks", 1, unit="ranks", record_only=True)

    def test_other():
        time.sleep(0.2)
    """


@pytest.fixture
def session(project, monkeypatch):
    def run(suite=SUITE, *options, **settings):
        pretend(monkeypatch.setattr, project.path, **settings)
        project.suite(suite)
        return project.run(*options)

    yield run
    assert "gpucluster-telemetry" not in [thread.name for thread in threading.enumerate()]


def test_the_whole_body_of_every_test_is_watched(session):
    left = session()
    assert set(left.verdicts.values()) == {"passed"}, left.output
    for result in left.journal.results:
        assert result.telemetry[0]["sm_clock_mhz"] == [1755, 1755, 1755]
        assert result.telemetry[0]["seconds"] >= 0.2
    text = left.measured("test_other")["telemetry"]
    assert all(part in text for part in ("rank 0: ", "1755 of 1980 MHz", "698 W", "67 degC", "sw_power_cap 100 %"))
    assert left.measured("test_speed")["telemetry"].startswith(text)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        pytest.param({"counted": [{}, {ECC: 2}]}, "ecc_uncorrected during this test: GPU 0 (GPU-00000000", id="ECC"),
        pytest.param(
            {"kernel_logs": [KernelLog(lines=("NVRM: up",), source="dmesg"),
                             KernelLog(lines=("NVRM: up", XID_79), source="dmesg")]},
            "xid_79 during this test: GPU 0 (GPU-00000000",
            id="Xid",
        ),
    ],
)  # fmt: skip
def test_a_criterion_that_passes_fails_for_what_was_counted(session, settings, found):
    left = session(**settings)
    assert left.verdicts["test_speed"].startswith("failure: ")
    assert found in left.verdicts["test_speed"]
    assert left.verdicts["test_other"] == "passed", "it is no criterion, and nothing is counted"
    assert left.end == ("REJECTED", 1)
    result = left.journal.results[0]
    assert result.culprits == (0,)
    assert result.telemetry[0]["counters"]
    assert result.measurements[0].telemetry[0]["counters"] == result.telemetry[0]["counters"]
    assert "what to do: " in left.body("test_speed")
    assert ": rank 0: sm clock" in left.body("test_speed")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"counted": [{"pcie.replays": 7}, {"pcie.replays": 9}]}, id="PCIe replays"),
        pytest.param({"counted": [{ECC: 4}]}, id="errors of before, which are the health criterion's"),
        pytest.param(
            {"kernel_logs": [KernelLog(lines=("NVRM: up",), source="dmesg"),
                             KernelLog(lines=("NVRM: up", XID_13), source="dmesg")]},
            id="an Xid that a program can cause",
        ),
    ],
)  # fmt: skip
def test_what_no_hardware_is_rejected_for_is_reported_and_passes(session, settings):
    left = session(**settings)
    assert left.verdicts["test_speed"] == "passed"
    if settings.get("counted") != [{ECC: 4}]:
        assert left.journal.results[0].telemetry[0]["counters"]
        assert "counters: " in left.measured("test_speed")["telemetry"]


def test_a_required_counter_that_is_missing_makes_the_criterion_an_error(session):
    refused = NotAvailable("no permission for this user", "no permission")
    left = session(SUITE, "--gpucluster-sku=H100 SXM", counted=[{"rows.failed": refused}])
    assert left.verdicts["test_speed"].startswith("error: rank 0 (")
    assert re.search(r"EnvironmentBroken: .* rows\.failed on GPU 0", left.verdicts["test_speed"])
    assert left.verdicts["test_other"] == "passed"
    assert left.end == ("BROKEN", 11)


def body(text):
    return f"""
    import pytest
    from pytest_gpucluster.errors import EnvironmentBroken

    @pytest.mark.criterion("speed")
    def test_speed(measure):
        measure("inventory.ranks", 1, unit="ranks", record_only=True)
        {text}
    """


@pytest.mark.parametrize(
    ("text", "first"),
    [
        pytest.param("assert 1 == 2, 'its own'", "AssertionError: its own; ecc_", id="a failure"),
        pytest.param("pytest.skip('no room')", "HardwareFault: ecc_uncorrected ", id="a skip, which hides no fault"),
        pytest.param("raise EnvironmentBroken('its own')", "EnvironmentBroken: its own; ecc_", id="an error"),
    ],
)
def test_a_fault_fails_the_test_and_what_the_body_itself_came_to_stays_first(session, text, first):
    left = session(body(text), counted=[{}, {ECC: 2}])
    assert left.verdicts["test_speed"].startswith("failure: ")
    assert first in left.verdicts["test_speed"]
    assert "ecc_uncorrected" in left.body("test_speed")
    assert left.end == ("REJECTED", 1)


def test_a_missed_value_is_explained_by_its_own_window_or_by_the_whole_test(session):
    hot = {**SAMPLED, "throttle.reasons": ["hw_thermal"], "temperature.gpu": 91, "clock.sm": 1200}
    left = session(
        """
    import pytest

    @pytest.mark.criterion("speed")
    @pytest.mark.parametrize("own", [True, False])
    def test_speed(own, telemetry, measure):
        with telemetry() as window:
            pass
        seen = window.summary() if own else {}
        measure("matmul.fp32.tflops", 1, unit="MFLOPS", n=256, telemetry=seen)
    """,
        sampled={GPU: hot},
    )
    for name in ("test_speed[True]", "test_speed[False]"):
        assert "(n=256): HW thermal slowdown 100 % of the time, 91 degC on rank 0 (" in left.verdicts[name]
        assert "< " in left.verdicts[name]
        (message,) = [rank.message for rank in next(r for r in left.journal.results if r.name == name).ranks]
        assert message.endswith(": HW thermal slowdown 100 % of the time, 91 degC")


def test_a_sampler_that_hangs_or_is_not_there_fails_nothing(project, monkeypatch):
    pretend(monkeypatch.setattr, project.path, sampled={GPU: {**SAMPLED, "power.draw": {"hang": 3600}}})
    project.suite(SUITE)
    hung = project.run()
    assert set(hung.verdicts.values()) == {"passed"}
    sampled = hung.journal.results[-1].telemetry[0]
    assert sampled["not_available"]["power_watts"].startswith("NVML ")
    monkeypatch.setattr(telemetry, "COMMAND", ("/no/such/program",))
    gone = project.run()
    assert set(gone.verdicts.values()) == {"passed"}
    sampled = gone.journal.results[-1].telemetry[0]
    [why] = set(sampled["not_available"].values())
    assert why.endswith(": '/no/such/program'")


def test_workers_without_a_launcher_share_their_controllers_sampler(project):
    project.suite(
        """
    import pytest, time
    from pathlib import Path

    @pytest.mark.single_gpu
    @pytest.mark.criterion("speed")
    def test_speed(measure, gpu):
        time.sleep(0.2)
        measure("inventory.ranks", 1, unit="ranks", record_only=True)
        Path(f"gpu-{gpu.index}").touch()
    """
    )
    # The controller believes in GPUs too: it starts the sampler, and it does not on cpu.
    (project.path / "conftest.py").write_text(
        conftest(sampled={uuid_of(0): SAMPLED, uuid_of(1): {**SAMPLED, "clock.sm": 1200}})
        + "import os\nfrom pytest_gpucluster.session.run import Run\n"
        + "if 'PYTEST_XDIST_WORKER' not in os.environ:\n"
        + "    Run.rehearsal = property(lambda run: False)\n"
    )
    left = project.run_apart(*WORKERS)
    assert left.verdicts["test_speed"] == "passed", left.output
    (result,) = left.journal.results
    journal = left.journal
    assert {path.name for path in project.path.glob("gpu-*")} == {"gpu-0", "gpu-1"}
    assert journal.run.world_size == 2
    clocks = {rank: seen["sm_clock_mhz"][1] for rank, seen in result.telemetry.items()}
    assert clocks == {0: 1755, 1: 1200}


def test_of_local_workers_one_looks_at_the_ports_of_the_node(project):
    project.suite(
        """
    import pytest

    @pytest.mark.single_gpu
    @pytest.mark.criterion("speed")
    def test_speed(measure):
        measure("inventory.ranks", 1, unit="ranks", record_only=True)
    """
    )
    a_link_goes_down = """
import dataclasses
from sysfs_ports import add_port, write
from pytest_gpucluster.node.health import monitor; from pytest_gpucluster.node import infiniband

ROOT = Path(tempfile.mkdtemp())
PORT = add_port(ROOT)
READ = []

def ports():
    READ.append(1)
    if len(READ) == 2:
        write(PORT / "counters" / "link_downed", 1)
    return infiniband.read(ROOT, gids=False)

sources_of = monitor.sources_of
monitor.sources_of = lambda node, rank: dataclasses.replace(sources_of(node, rank), adapters=ports)
"""
    (project.path / "conftest.py").write_text(conftest() + a_link_goes_down)
    left = project.run_apart(*WORKERS)
    assert left.verdicts["test_speed"].startswith("failure: "), left.output
    assert "link_down during" in left.verdicts["test_speed"]
    assert left.journal.results[0].culprits == (0,)


# ---- several ranks


RANKS_SUITE = """
    import os, time
    from pathlib import Path
    import pytest

    def samplers():
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return sum(b"fake_sampler" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)

    def test_one_sampler_a_node(cluster):
        time.sleep(0.2)
        assert samplers() == (cluster.local_rank == 0)

    @pytest.mark.criterion("speed")
    def test_speed(cluster, measure):
        time.sleep(0.5)
        measure("matmul.fp32.tflops", 1, unit="MFLOPS" if cluster.rank == 1 else "TFLOPS", n=256)

    @pytest.mark.criterion("counted")
    def test_counted(measure):
        measure("inventory.ranks", 1, unit="ranks", record_only=True)
    """


def test_ranks_of_a_node_share_its_sampler_and_the_one_at_fault_is_named(tmp_path):
    hot = {**SAMPLED, "throttle.reasons": ["hw_thermal"], "temperature.gpu": 91}
    sampled = {uuid_of(0): SAMPLED, uuid_of(1): hot}
    healthy, faulty = conftest(sampled=sampled), conftest(sampled=sampled, counted=[{}, {}, {}, {ECC: 2}])
    files = {
        "test_it.py": RANKS_SUITE,
        "conftest.py": f"import os\nexec({faulty!r} if os.environ['RANK'] == '1' else {healthy!r})\n",
    }
    run = torchrun(tmp_path, files, deadline=20.0)
    assert run.verdicts["test_one_sampler_a_node"] == "passed", run.output
    assert "HW thermal slowdown 100 % of the time, 91 degC on rank 1 (" in run.verdicts["test_speed"]
    assert run.verdicts["test_counted"].startswith("failure: rank 1 (")
    assert re.search(r"ecc_uncorrected .*: GPU 1 \(GPU-00000001", run.verdicts["test_counted"])
    results = {result.name: result for result in run.journal.results}
    clocks = {rank: seen["temperature_celsius"][2] for rank, seen in results["test_speed"].telemetry.items()}
    assert clocks == {0: 67, 1: 91}
    assert (results["test_counted"].culprits, results["test_counted"].telemetry[1]["counters"]) == ((1,), {ECC: 2})
    assert "counters" not in results["test_counted"].telemetry[0]
    assert run.left_over == []
