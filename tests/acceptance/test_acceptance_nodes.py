"""The criteria of nodes and of what is between them themselves: what they accept, how each fault fails them.

Two nodes of one rank each run all of it in one session, and the faults are node-b's where nothing else is said.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from each import of_each
from planted_runs import artifacts_of, measured, result_of, run_planted
from sysfs_ports import add_port, add_roce

sys.path.insert(0, str(Path(__file__).parents[1] / "node"))

from fake_host import limits, plant

A, B = 0, 1
HOSTS = ("node-a", "node-b")
ENVIRONMENT = ("right", "own", "note", "hurts", "differs", "not_set", "otherwise", "same_effect")
PORTS = ("right", "down", "no_ports", "no_way", "rehearsed", "none_anywhere", "one_node")
FILES = ("right", "old", "unshared", "flipped", "missing", "torn", "other", "stale", "full", "space")
HOST_FILES = {
    "right": {},
    "nofile": {"/proc/self/limits": limits(nofile=63)},
    "tasks": {"/sys/fs/cgroup/pids.max": "7\n"},
    "cpus": {"/sys/fs/cgroup/cpu.max": "1000 100000\n"},
    "shm": {"/sys/fs/cgroup/memory.max": "500000\n"},
    "governor": {"/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n"},
    "unlimited": {"/proc/self/limits": None},
    "no_shm": {},
    "shm_on_disk": {"/proc/self/mountinfo": "30 1 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
}
PLAN = {
    **{f"nccl_environment__{fault}": {"test_nccl_environment": fault} for fault in ENVIRONMENT},
    **{f"infiniband__{fault}": {"test_fabric_ports": fault} for fault in PORTS},
    **{f"host__{fault}": {"test_host_limits": fault} for fault in HOST_FILES},
    "connectivity__right": {"test_connectivity": "", "test_dns": "", "test_clock_skew": ""},
    "connectivity__refused": {"test_connectivity": "refused"},
    "connectivity__interface": {"test_connectivity": "interface", "test_dns": "interface"},
    "connectivity__ahead": {"test_clock_skew": "ahead"},
    **{f"connectivity__{fault}": {"test_dns": fault} for fault in ("slow", "ignorant", "silent")},
    **{f"shared_filesystem__{fault}": {"test_shared_filesystem": fault} for fault in FILES},
    "nccl__sockets": {"test_all_reduce[world-fp32]": "sockets"},
    "nccl__unknown": {"test_all_reduce[world-fp32]": "unknown"},
}
LIMITS = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      fabric.active_ports: {min: 2 ports, source: planted}
      fabric.port_rate: {min: 400 Gb/s, source: planted}
      nccl.all_reduce.busbw:
        - {when: {nnodes: 2 or more}, min: 1 kB/s, source: planted, expect_transport: NET/IB}
        - {when: {nnodes: 1}, min: 1 kB/s, source: planted}
"""
OPTIONS = (
    "--gpucluster-thresholds=limits.yaml",
    "--gpucluster-workload=connectivity.lookup=4 s",
    "--gpucluster-workload=connectivity.clock_samples=64",
    "--gpucluster-workload=host.governor=performance",
    "--gpucluster-workload=nccl.all_reduce.sizes=64kB",
    "--gpucluster-workload=nccl.all_reduce.latency_sizes=8B",
    "--gpucluster-workload=isolation.budget=0s",  # the search for who is to blame has tests of its own
)


def plant_nodes(root):
    """Write for each node what its fabric is, and what its host is with each fault."""
    for host in HOSTS:
        for fabric, cards in (("fabric", 2), ("down", 2), ("mixed", 1)):
            for index in range(cards):
                add_port(root / host / fabric / "sys", f"mlx5_{index}", pci=f"0000:{index + 16}:00.0")
            (root / host / fabric / "sys/module/nvidia_peermem").mkdir(parents=True)
        (root / host / "down/sys/class/infiniband/mlx5_1/ports/1/state").write_text("1: DOWN\n")
        add_roce(root / host / "mixed/sys", "mlx5_1", pci="0000:19:00.0", rate="100 Gb/sec (4X EDR)")
        for fault, files in HOST_FILES.items():
            (root / host / "host" / fault / "dev" / ("" if fault == "no_shm" else "shm")).mkdir(parents=True)
            plant(root / host / "host" / fault, files if host == "node-b" else {})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All faults one after the other."""
    directory = tmp_path_factory.mktemp("nodes")
    plant_nodes(directory / "root")
    return run_planted(
        directory,
        PLAN,
        "on_nodes",
        *OPTIONS,
        ranks=1,
        hosts=HOSTS,
        environment={"NODES": str(directory / "root")},
        limits__yaml=LIMITS,
    )


def test_the_run_goes_on_after_each_fault_and_what_needs_no_communicator_comes_first(run):
    assert len(run.journal.results) == sum(map(len, PLAN.values()))
    files = [each.nodeid.partition(".py")[0].partition("__")[0] for each in run.journal.results]
    assert list(dict.fromkeys(files))[:3] == ["test_host", "test_nccl_environment", "test_infiniband"]
    names = [each.nodeid.partition("::")[2] for each in run.journal.results]
    assert names.index("test_connectivity") < names.index("test_dns") > names.index("test_fabric_ports")
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []


@of_each(
    "case",
    [
        *(("connectivity__right", test) for test in ("connectivity", "dns", "clock_skew")),
        *(
            (f"nccl_environment__{fault}", "nccl_environment")
            for fault in ENVIRONMENT
            if fault not in ("hurts", "differs")
        ),
        *((f"infiniband__{fault}", "fabric_ports") for fault in ("right", "rehearsed", "none_anywhere", "one_node")),
        ("host__right", "host_limits"),
        ("shared_filesystem__right", "shared_filesystem"),
    ],
)
def test_what_is_healthy_or_to_be_noted_only_passes(run, case):
    found = result_of(run, *case)
    assert found.outcome == "passed", found.text


REJECTED = {
    ("connectivity__refused", "connectivity"): ("node-b (127.0.0.1 on lo, ", "node-a (127.0.0.1 on lo, ", "refused"),
    ("infiniband__down", "fabric_ports"): ("node-b: port_state (hardware): mlx5_1/1 InfiniBand DOWN ", "1 of 2 nodes"),
    ("infiniband__no_ports", "fabric_ports"): ("node-b: no_ports (hardware): ",),
    ("shared_filesystem__old", "shared_filesystem"): ("WrongResult", "node-00000.bin, ", "node-a"),
    ("shared_filesystem__flipped", "shared_filesystem"): ("WrongResult", "node-b "),
    ("shared_filesystem__missing", "shared_filesystem"): ("WrongResult", "renamed.bin missing "),
    ("shared_filesystem__torn", "shared_filesystem"): ("WrongResult", "4096 bytes "),
}
"""Copy and test -> what stands in its text."""


@of_each("case", list(REJECTED))
def test_what_is_wrong_on_a_node_rejects_and_names_it(run, case):
    found = result_of(run, *case)
    assert found.outcome == "failed", found.text
    assert [words for words in REJECTED[case] if words not in found.text] == [], found.text
    if not case[0].startswith("infiniband"):
        assert list(found.culprits) == [B]


BROKEN = {
    ("connectivity__interface", "connectivity"): ("- node-b: GLOO_SOCKET_IFNAME=bond7 ", ": lo"),
    ("connectivity__interface", "dns"): ("GLOO_SOCKET_IFNAME=bond7 ",),
    ("connectivity__ignorant", "dns"): ("dns.unknown (environment)", "name of node-a"),
    ("infiniband__no_way", "fabric_ports"): ("node-b: ", "GPU memory"),
    ("nccl_environment__hurts", "nccl_environment"): ("NCCL_CHECK_POINTERS=1 (", "node-b/home/.nccl.conf): ", "unset"),
    ("nccl_environment__differs", "nccl_environment"): ("differs (environment): NCCL_MIN_NCHANNELS ", " 32 on rank 1 "),
    ("host__governor", "host_limits"): ("governor (environment): ", " powersave ", " 0", "-set -g performance"),
    ("host__unlimited", "host_limits"): ("host.nofile ",),
    ("host__no_shm", "host_limits"): ("host.shm ",),
    ("host__shm_on_disk", "host_limits"): ("/dev/shm ",),
    ("shared_filesystem__unshared", "shared_filesystem"): ("node-00001.bin, ", " node-b"),
    ("shared_filesystem__other", "shared_filesystem"): ("nfs4 on node-b", "1 of 2 hosts"),
    ("shared_filesystem__stale", "shared_filesystem"): ("- node-b: nfs4 server:/gone on /gone: stale",),
    ("shared_filesystem__full", "shared_filesystem"): ("rank 1: OSError: [Errno 28]",),
    ("nccl__unknown", "all_reduce[world-fp32]"): ("nccl.all_reduce.busbw", "transport unknown: rank 0: "),
}
"""Copy and test -> what stands in its text."""


@of_each("case", list(BROKEN))
def test_what_is_no_fault_of_hardware_is_an_error_that_says_where_it_is(run, case):
    found = result_of(run, *case)
    assert found.outcome == "error", found.text
    assert [words for words in BROKEN[case] if words not in found.text] == [], found.text
    if case[0].startswith("connectivity"):
        assert list(found.culprits) == [B]


MISSED = {
    ("connectivity__ahead", "clock_skew"): ("clock.skew", r"5\d\d\d ms > 100 ms"),
    ("connectivity__slow", "dns"): ("dns.reverse", r"[123]\.?\d* s > 1 s"),
    ("connectivity__silent", "dns"): ("dns.reverse", r"\d+\.?\d* s > 1 s"),
    ("shared_filesystem__space", "shared_filesystem"): ("shared_filesystem.free", r"0 % < 0\.01 %"),
    ("host__nofile", "host_limits"): ("host.nofile", "63 files < 64 files"),
    ("host__tasks", "host_limits"): ("host.tasks", "7 tasks < 8 tasks"),
    ("host__cpus", "host_limits"): ("host.cpus", r"0\.01 CPUs < 0\.05 CPUs"),
    ("host__shm", "host_limits"): ("host.shm", r"0\.0005 GB < 0\.001 GB"),
}
"""Copy and test -> metric, and how it misses its limit."""


@of_each("case", list(MISSED))
def test_what_misses_its_limit_names_the_node(run, case):
    found, (metric, missed) = result_of(run, *case), MISSED[case]
    assert found.outcome == "failed", found.text
    assert re.match(rf"{re.escape(metric)} {missed} .*\bnode-b$", found.message), found.message
    if metric.startswith("host."):
        told = measured(found)[metric].telemetry[B]
        assert told["found"]
        assert told["for more"]


# ---- what is measured, and what is recorded --------------------------------------------------------------------------


def test_of_healthy_nodes_every_pair_and_both_clocks_are_measured(run):
    values = measured(result_of(run, "connectivity__right", "connectivity"))
    assert (values["connectivity.nodes"].value, values["connectivity.nodes"].labels) == (2, {"of": "2"})
    assert (values["connectivity.pairs"].value, values["connectivity.pairs"].status) == (100, "passed")
    assert set(values["connectivity.connect"].values) == set(values["connectivity.rendezvous"].values) == {A, B}
    [skew] = result_of(run, "connectivity__right", "clock_skew").measurements
    assert set(skew.values) == {A, B}
    assert measured(result_of(run, "connectivity__refused", "connectivity"))["connectivity.pairs"].value == 50


def test_a_clock_that_is_ahead_is_measured_on_both_nodes_for_it_could_be_either(run):
    [skew] = result_of(run, "connectivity__ahead", "clock_skew").measurements
    assert set(skew.values) == {A, B}
    assert min(skew.values.values()) > 4900  # the planted 5 s, give or take what the exchange took


def test_slow_lookups_are_timed_and_those_that_never_end_are_given_up(run):
    slow, silent = (
        measured(result_of(run, f"connectivity__{which}", "dns"))["dns.reverse"] for which in ("slow", "silent")
    )
    assert slow.values[B] >= 1.2
    assert silent.values[B] >= 4
    assert slow.values[A] < slow.values[B]
    assert silent.values[A] < silent.values[B]


def test_of_a_shared_folder_all_is_measured_and_nothing_left_in_it(run):
    found = result_of(run, "shared_filesystem__right", "shared_filesystem")
    values = {metric.removeprefix("shared_filesystem."): one for metric, one in measured(found).items()}
    assert {"verified", "visible", "whole_reads", "small_files", "free"} <= set(values)
    assert all(set(one.values) == {A, B} for one in values.values())
    assert (values["verified"].value, values["whole_reads"].value) == (1, 100)
    assert values["visible"].status == "recorded"
    assert "shared_filesystem.mount" in dict(found.properties)
    assert artifacts_of(run, "shared_filesystem__right", "shared_filesystem") == {}


def test_of_a_healthy_host_every_figure_is_measured(run):
    judged = measured(result_of(run, "host__right", "host_limits"))
    assert set(judged) == {f"host.{name}" for name in ("nofile", "memlock", "shm", "cpus", "tasks", "memory")}
    assert (judged["host.nofile"].value, judged["host.nofile"].status) == (1048576, "passed")
    assert judged["host.memory"].status == "recorded"


def test_two_nodes_that_are_alike_are_accepted_with_their_cards_on_record(run):
    found = result_of(run, "infiniband__right", "fabric_ports")
    judged = measured(found)
    assert {metric: (one.value, one.status) for metric, one in judged.items()} == {
        "fabric.active_ports": (2, "passed"),
        "fabric.port_rate": (400, "passed"),
    }
    told = judged["fabric.active_ports"].telemetry
    card = "mlx5_0: MT_0000000838, firmware 28.39.2048, PCI 0000:16:00.0, NUMA node 0"
    assert {rank: one["cards"][0] for rank, one in told.items()} == {A: card, B: card}
    second = {
        "name": "mlx5_1",
        "board": "MT_0000000838",
        "guid": "a088:c203:00ab:1234",
        "firmware": "28.39.2048",
        "pci_bus_id": "0000:17:00.0",
    }
    assert [one["adapters"][1] for one in told.values()] == [second, second]
    properties = dict(found.properties)
    assert properties["fabric.expected"].startswith("yes: ")
    assert properties["fabric.peer_memory"] == "module nvidia_peermem"


@of_each(
    "case",
    [
        ("rehearsed", {"fabric.active_ports": 2, "fabric.port_rate": 400}),
        ("none_anywhere", {"fabric.active_ports": 0}),
        ("one_node", {"fabric.active_ports": 2, "fabric.port_rate": 400}),
    ],
)
def test_where_no_fabric_is_expected_its_ports_are_recorded_only(run, case):
    found = result_of(run, f"infiniband__{case[0]}", "fabric_ports")
    judged = measured(found)
    assert {metric: one.value for metric, one in judged.items()} == case[1]
    assert {one.status for one in judged.values()} == {"recorded"}
    assert dict(found.properties)["fabric.expected"].startswith("no: ")


@of_each("case", [("down", 1), ("no_ports", 0)])
def test_a_node_with_too_few_ports_misses_the_limit_as_well(run, case):
    fault, ports = case
    judged = measured(result_of(run, f"infiniband__{fault}", "fabric_ports"))
    active = judged["fabric.active_ports"]
    assert (active.status, active.worst_rank, active.values) == ("failed", B, {A: 2, B: ports})
    assert judged["fabric.port_rate"].values == {A: 400, B: 400 if ports else 0}


def test_what_is_set_is_on_record_with_its_origin_and_this_suite_s_own_settings_are_not(run):
    found = result_of(run, "nccl_environment__right", "nccl_environment")
    told = {name: text for name, text in dict(found.properties).items() if name.startswith("environment.")}
    home = run.directory / "root" / "node-a" / "home" / ".nccl.conf"
    assert told == {
        "environment.NCCL_CROSS_NIC": f"0 ({home})",
        "environment.NCCL_IB_HCA": "mlx5 (environment)",
        "environment.OMP_NUM_THREADS": "4 (environment)",
    }
    assert [(one.metric, one.value) for one in found.measurements] == [("nccl.environment.findings", 0)]
    kept = artifacts_of(run, "nccl_environment__right", "nccl_environment")
    assert [one["ranks"] for one in json.loads(kept["environment.json"])] == [[A], [B]]
    own = dict(result_of(run, "nccl_environment__own", "nccl_environment").properties)
    assert not any(name.startswith("environment.NCCL_DEBUG") for name in own)


@of_each("case", [("not_set", "not set"), ("otherwise", "set otherwise: mlx5"), ("same_effect", "set: mlx5_0, ")])
def test_what_differs_from_the_advice_is_on_record_and_fails_nothing(run, case):
    found = result_of(run, f"nccl_environment__{case[0]}", "nccl_environment")
    told = dict(found.properties)
    assert told["advice.fabric"] == "InfiniBand: 1 active port of 400 Gb/s (mlx5_0:1)"
    assert told["advice.NCCL_IB_HCA"].startswith(f"=mlx5_0:1; {case[1]}")
    assert "mlx5_1:1: " in told["advice.NCCL_IB_HCA"]
    assert [(one.metric, one.value) for one in found.measurements] == [("nccl.environment.findings", 0)]


def test_a_silent_fall_back_to_sockets_fails_with_the_reason_in_the_log(run):
    found = result_of(run, "nccl__sockets", "all_reduce[world-fp32]")
    assert found.outcome == "failed", found.text
    assert re.match(r"nccl\.all_reduce\.busbw: NET/Socket .* NET/IB", found.message), found.message
    told = dict(found.properties)
    assert told["nccl.why"] in found.text
    assert re.search("InfiniBand.*NCCL_SOCKET_IFNAME=eth0.*eth0", told["nccl.why"])
    assert (told["nccl.transport"], told["nccl.algorithms"]) == ("NET/Socket", "64000 B: Ring LL")
