"""Settings of a host that slow GPUs down, its figures, and ranks away from their GPU."""

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
from complaints import in_order
from fake_host import HEALTHY, MOUNTS, facts

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.metrics.finding import Identity, require_nothing
from pytest_gpucluster.node import host_checks
from pytest_gpucluster.node.host import GpuPath
from pytest_gpucluster.node.host_checks import (
    BINDING,
    Place,
    examine_affinity,
    examine_host,
    own_place,
    place_of_gpu,
    readings,
)
from pytest_gpucluster.node.pci import PciPath
from pytest_gpucluster.node.sysfs import Tree, format_ranges, parse_ranges

USUAL = {"governor": "performance", "numa_balancing": "any", "iommu": "passthrough", "acs": "off"}
ANY = "any"
SMALL = {"/sys/devices/system/node/online": "0\n"}


def gpu(index=0, **path):
    there = PciPath(pci="0000:3b:00.0", **path)
    return GpuPath(who=Identity(host="gpu-07", index=index), path=there)


def with_gpus(found, *gpus):
    return replace(found, gpus=gpus, machine="x86_64")


def found(host, code, wanted=None):
    return [finding for finding in examine_host(host, wanted or USUAL) if finding.code == code]


def test_a_healthy_host_has_no_findings(tmp_path):
    host = with_gpus(facts(tmp_path), gpu(iommu="identity"))
    assert examine_host(host, USUAL) == []


@pytest.mark.parametrize("wanted", ["performance", ANY])
def test_a_governor_that_saves_power_is_named_with_its_cpus(tmp_path, wanted):
    files = {"/sys/devices/system/cpu/cpu127/cpufreq/scaling_governor": "powersave\n"}
    [finding] = found(facts(tmp_path, files), "governor", {**USUAL, "governor": wanted})
    assert in_order(finding.found, "powersave CPUs 127")
    assert "cpupower frequency-set -g performance" in finding.remedy
    assert finding.kind == ("note" if wanted == ANY else "environment")


@pytest.mark.parametrize(
    ("driver", "kinds"),
    [
        ("intel_pstate", []),
        ("amd-pstate-epp", []),
        ("intel_cpufreq", ["environment"]),
        ("acpi-cpufreq", ["environment"]),
    ],
)
def test_powersave_of_a_driver_that_follows_the_load_is_no_finding(tmp_path, driver, kinds):
    folder = "/sys/devices/system/cpu/cpu127/cpufreq"
    files = {f"{folder}/scaling_governor": "powersave\n", f"{folder}/scaling_driver": f"{driver}\n"}
    assert [finding.kind for finding in found(facts(tmp_path, files), "governor")] == kinds


def test_with_such_a_driver_another_governor_is_still_a_finding(tmp_path):
    files = {
        f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/{name}": f"{value}\n"
        for cpu, governor in ((126, "powersave"), (127, "schedutil"))
        for name, value in (("scaling_governor", governor), ("scaling_driver", "intel_pstate"))
    }
    [finding] = found(facts(tmp_path, files), "governor")
    assert (finding.kind, finding.found.endswith(" is schedutil on the CPUs 127")) == ("environment", True)


def test_a_machine_without_governors_is_a_note(tmp_path):
    files = {name: None for name in HEALTHY if "governor" in name}
    [finding] = found(facts(tmp_path, files), "governor")
    assert (finding.kind, "no CPU frequency governor" in finding.found) == ("note", True)


def test_numa_balancing_is_named_where_there_are_several_nodes(tmp_path):
    on = {"/proc/sys/kernel/numa_balancing": "1\n"}
    for wanted, kind in ((ANY, "note"), ("off", "environment")):
        [finding] = found(facts(tmp_path / wanted, on), "numa_balancing", {**USUAL, "numa_balancing": wanted})
        assert finding.kind == kind
        assert "kernel.numa_balancing=1" in finding.found
    one = facts(tmp_path / "one node", {**on, **SMALL})
    assert found(one, "numa_balancing", {**USUAL, "numa_balancing": "off"}) == [], "it moves nothing"


@pytest.mark.parametrize(
    ("machine", "wanted", "kind"),
    [("x86_64", "passthrough", "environment"), ("x86_64", ANY, "note"), ("aarch64", "passthrough", "note")],
)
def test_an_iommu_that_translates_is_named_with_the_gpu(tmp_path, machine, wanted, kind):
    host = replace(with_gpus(facts(tmp_path), gpu(3, iommu="DMA-FQ")), machine=machine)
    [finding] = found(host, "iommu", {**USUAL, "iommu": wanted})
    assert (finding.kind, finding.gpu.index, "DMA-FQ" in finding.found) == (kind, 3, True)
    assert "iommu=pt" in finding.remedy


@pytest.mark.parametrize(("wanted", "kind"), [("off", "environment"), (ANY, "note")])
def test_switch_ports_that_redirect_are_named_with_the_gpu(tmp_path, wanted, kind):
    redirecting = (("0000:3a:04.0", ("request redirect",)),)
    host = with_gpus(facts(tmp_path), gpu(), gpu(1, redirecting=redirecting))
    [finding] = found(host, "acs", {**USUAL, "acs": wanted})
    assert (finding.kind, finding.gpu.index) == (kind, 1)
    assert "0000:3a:04.0 (request redirect)" in finding.found
    assert "ECAP_ACS+0x6.w=0000" in finding.remedy


def test_ports_that_cannot_be_looked_at_are_a_note(tmp_path):
    host = with_gpus(facts(tmp_path), gpu(hidden=True), gpu(1), replace(gpu(2), path=None))
    [finding] = found(host, "acs")
    assert (finding.kind, in_order(finding.found, "ACS 2 of 3 GPUs")) == ("note", True)
    [finding] = found(host, "iommu")
    assert (finding.kind, in_order(finding.found, "IOMMU 1 of 3 GPUs")) == ("note", True)


@pytest.mark.parametrize(
    ("mounts", "words"),
    [("", "not a mount of its own"), (MOUNTS.replace("tmpfs", "overlay"), "a overlay")],
    ids=["none", "on disk"],
)
def test_a_dev_shm_on_disk_is_named(tmp_path, mounts, words):
    [finding] = found(facts(tmp_path, {"/proc/self/mountinfo": mounts}), "shm_is_no_memory")
    assert (finding.kind, finding.found) == ("environment", f"/dev/shm is {words}")


def test_all_that_is_more_than_a_note_is_raised_at_once(tmp_path):
    files = {"/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n", "/proc/self/mountinfo": ""}
    findings = examine_host(with_gpus(facts(tmp_path, files), gpu(iommu="DMA")), USUAL)
    with pytest.raises(EnvironmentBroken) as caught:
        require_nothing(findings)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("shm_is_no_memory, governor, iommu: gpu-07, ")
    assert all("; allowed: " in line and "; what to do: " in line for line in lines)


def of(root, files=None, **others):
    return {one.metric: one for one in readings(facts(root, files, **others))}


def test_every_figure_of_a_host_is_in_its_metric_s_unit(tmp_path):
    found = of(tmp_path, ranks=8)
    declared = {name for name in measurement.METRICS if name.startswith("host.")}
    assert set(found) == declared
    for one in found.values():
        assert measurement.known(one.metric).unit == one.unit
        assert measurement.known(one.metric).scope == "node"
    values = {name: round(one.value, 3) for name, one in found.items() if name != "host.cpus"}
    assert values == {
        "host.nofile": 1048576,
        "host.memlock": 100,
        "host.shm": 125,
        "host.tasks": 524288,
        "host.memory": round(2113568112 * 1024 / 8e9, 3),
    }


def test_a_figure_that_is_not_known_is_an_error_and_never_a_pass(tmp_path):
    def refuse(path):
        raise FileNotFoundError(path)

    for metric, missing in {
        "host.nofile": ["/proc/self/limits"],
        "host.memlock": ["/proc/meminfo"],
        "host.cpus": [name for name in HEALTHY if "cpu" in name],
    }.items():
        with pytest.raises(EnvironmentBroken, match=f"^gpu-07: {metric} "):
            of(tmp_path / metric, dict.fromkeys(missing))
    with pytest.raises(EnvironmentBroken, match=r"host\.shm .*/dev/shm"):
        of(tmp_path / "shm", space=refuse)


PAGE = (Path(__file__).parents[2] / "docs" / "discovery.md").read_text(encoding="utf-8")


def first_cells(header):
    """The names in the first column of the table whose header begins so."""
    rows = PAGE[PAGE.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}


def test_every_finding_is_documented():
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(host_checks))) if isinstance(node, ast.Call)]
    named = {call: getattr(call.func, "id", "") for call in calls}
    kinds = ("finding", "note", "environment")
    codes = {call.args[name == "finding"].value for call, name in named.items() if name in kinds}
    assert len(codes) >= 6
    assert first_cells("host finding") | {"affinity"} == codes


def test_every_figure_is_documented():
    assert first_cells("metric") == {name for name in measurement.METRICS if name.startswith("host.")}


PCI = "00000000:3B:00.0"
WHO = {
    "rank": 5,
    "host": "node-a",
    "gpu": {"index": 1, "uuid": "GPU-1f2e", "serial": "1320", "pci_bus_id": PCI},
}
GPU = Place(cpus=parse_ranges("0-31,64-95"), nodes=frozenset({0}))


def sysfs(tmp_path, **files):
    devices = tmp_path / "sys/bus/pci/devices"
    folder = devices / "0000:3b:00.0"
    folder.mkdir(parents=True)
    (devices / "0000:5e:00.0").mkdir()
    for name, text in {"numa_node": "0\n", "local_cpulist": "0-31,64-95\n", **files}.items():
        (folder / name).write_text(text, encoding="ascii")
    return Tree(root=tmp_path)


def place(cpus, nodes="0"):
    return Place(cpus=parse_ranges(cpus), nodes=parse_ranges(nodes))


def test_the_kernel_s_lists_are_read_and_written():
    for written, count in {"0": 1, "0-3": 4, "0-3,8\n": 5, "0-31,64-95": 64, "": 0}.items():
        assert len(parse_ranges(written)) == count
        assert format_ranges(parse_ranges(written)) == (written.strip() or "none")
    for wrong in ("all", "0-", "-1", "0x3"):
        with pytest.raises(ValueError, match="invalid literal"):
            parse_ranges(wrong)


def test_the_place_of_a_gpu_is_read_by_the_address_that_nvml_gives(tmp_path):
    devices = sysfs(tmp_path)
    assert place_of_gpu(PCI, devices) == GPU
    for pci in ("00000000:99:00.0", "", None, "nonsense"):
        assert place_of_gpu(pci, devices) is None
        assert place_of_gpu(pci, Tree(root=tmp_path / "nowhere")) is None
    # Near no node; no number; no CPUs.
    for name, text in (("numa_node", "-1\n"), ("numa_node", "?"), ("local_cpulist", "\n")):
        folder = devices.path("/sys/bus/pci/devices/0000:3b:00.0")
        (folder / "numa_node").write_text("0\n")
        (folder / name).write_text(text)
        assert place_of_gpu(PCI, devices) is None


def test_a_kernel_without_the_memory_nodes_is_an_error(tmp_path):
    for text in ("", "Name:\tpython\n", "Mems_allowed_list:\tall\n"):
        status = tmp_path / "proc/self/status"
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_text(text, encoding="ascii")
        with pytest.raises(EnvironmentBroken, match="memory"):
            own_place(Tree(root=tmp_path))
    with pytest.raises(EnvironmentBroken, match="memory"):
        own_place(Tree(root=tmp_path / "none"))


def test_a_rank_on_another_node_s_cpus_is_named_with_what_was_found_and_wanted():
    [finding] = examine_affinity(WHO, place("32-63", "0-1"), GPU)
    assert in_order(
        str(finding),
        f"GPU 1 GPU-1f2e 1320 PCI 00000000:3B:00.0 node-a rank 5 CPUs 32-63 GPU CPUs 0-31,64-95 0 {BINDING}",
    )
    with pytest.raises(EnvironmentBroken, match="CPUs 32-63"):
        require_nothing([finding])


def test_a_rank_without_memory_on_its_gpu_s_node_is_named():
    [finding] = examine_affinity(WHO, place("0-31", "1"), GPU)
    assert (finding.kind, in_order(finding.found, "rank 5 memory of node 1")) == ("environment", True)
    with pytest.raises(EnvironmentBroken, match="node 1"):
        require_nothing([finding])


def test_a_rank_that_is_not_bound_is_a_note():
    [finding] = examine_affinity(WHO, place("0-127", "0-1"), GPU)
    assert (finding.kind, "not all" in finding.found) == ("note", True)
    require_nothing([finding])
    [finding] = examine_affinity(WHO, place("0-127"), None)
    assert (finding.kind, in_order(finding.found, "rank 5 NUMA")) == ("note", True)
    require_nothing([finding])
    assert (
        examine_affinity(WHO, place("0-31,64-95", "0-1"), GPU) == examine_affinity(WHO, place("7", "0-1"), GPU) == []
    ), "all, or one"
