"""The criteria connectivity, dns and clock_skew themselves, on two nodes: what they accept, how a fault fails them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# What is wrong with node-b: its network, its clock, its resolver. The file that a test is in says which fault it has.
FAULTS = """
import os, time
from pytest_gpucluster.surroundings import clocks, connectivity, names
from pytest_gpucluster.surroundings.connectivity import Pieces

ON_B = os.environ["GPUCLUSTER_HOSTNAME"] == "node-b"

def refused(*arguments, **more):
    raise ConnectionRefusedError("[Errno 111] Connection refused")

class Quick(names.SystemResolver):  # whatever DNS is like where this test runs
    def reverse(self, address):
        return "here"

class Slow(names.SystemResolver):
    def reverse(self, address):
        time.sleep(1.2)
        return "late"

class Ignorant(names.SystemResolver):
    def forward(self, name):
        raise OSError("[Errno -2] Name or service not known")

class Silent(names.SystemResolver):
    def reverse(self, address):
        time.sleep(30)

TESTS = %r

def pytest_collection_modifyitems(items):
    chosen = {f"test_connectivity_{fault}.py::test_{test}" for fault, tests in TESTS.items() for test in tests}
    items[:] = [item for item in items if item.nodeid in {*chosen, "test_a.py::test_a"}]

def pytest_runtest_setup(item):
    fault = item.path.stem.removeprefix("test_connectivity_")
    connectivity.PIECES = Pieces(call=refused if ON_B and fault == "refused" else connectivity.call)
    clocks.NOW = (lambda: time.time() + 5) if ON_B and fault == "ahead" else time.time
    resolvers = {"slow": Slow, "ignorant": Ignorant, "silent": Silent}
    names.SYSTEM = resolvers.get(fault if ON_B else "none", Quick)()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if ON_B and fault == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "bond7"
"""

TESTS = {
    "none": ("connectivity", "dns", "clock_skew"),
    "refused": ("connectivity",),
    "interface": ("connectivity", "dns"),
    "ahead": ("clock_skew",),
    "slow": ("dns",),
    "ignorant": ("dns",),
    "silent": ("dns",),
}
A, B = 0, 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> torchrun.Run:
    """Two nodes of one rank each, and all faults one after the other."""
    text = (ACCEPTANCE / "test_connectivity.py").read_text(encoding="utf-8")
    files = {f"test_connectivity_{fault}.py": text for fault in TESTS} | {
        "workloads.yaml": (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8"),
        "conftest.py": FAULTS % TESTS,
        # By the order of files it would come first.
        "test_a.py": "import pytest\n@pytest.mark.criterion('a')\ndef test_a(measure):\n"
        "    measure('inventory.ranks', 1, unit='ranks', record_only=True)\n",
    }
    options = ("--gpucluster-workload=connectivity.lookup=1.5 s",)
    return torchrun.torchrun(
        tmp_path_factory.mktemp("connectivity"), files, *options, ranks=1, hosts=("node-a", "node-b"), deadline=30.0
    )


def result(run, fault, test):
    [found] = [each for each in run.journal.results if each.nodeid == f"test_connectivity_{fault}.py::test_{test}"]
    return found


def test_only_what_was_chosen_has_run(run):
    assert len(run.journal.results) == 1 + sum(map(len, TESTS.values()))


def test_connectivity_runs_before_all_else(run):
    names = [each.nodeid for each in run.journal.results]
    first = [name for name in names if name.endswith("::test_connectivity")]
    assert names[: len(first)] == first
    assert names[len(first)] == "test_a.py::test_a"


@pytest.mark.parametrize("test", TESTS["none"])
def test_two_healthy_nodes_pass(run, test):
    assert result(run, "none", test).outcome == "passed", run.output


def test_what_was_measured_is_on_record(run):
    values = {one.metric: one for one in result(run, "none", "connectivity").measurements}
    assert (values["connectivity.nodes"].value, values["connectivity.nodes"].labels) == (2, {"of": "2"})
    assert (values["connectivity.pairs"].value, values["connectivity.pairs"].status) == (100, "passed")
    assert set(values["connectivity.connect"].values) == set(values["connectivity.rendezvous"].values) == {A, B}
    [skew] = result(run, "none", "clock_skew").measurements
    assert set(skew.values) == {A, B}
    assert 0 <= skew.value < 100


def test_a_node_that_reaches_nobody_rejects_and_is_named_with_the_other_end(run):
    found = result(run, "refused", "connectivity")
    assert found.outcome == "failed"
    assert "- node-b (127.0.0.1 on lo, " in found.text
    assert "does not reach node-a (127.0.0.1 on lo, " in found.text
    assert "Connection refused" in found.text
    assert list(found.culprits) == [B]
    values = {one.metric: one for one in found.measurements}
    assert values["connectivity.pairs"].value == 50


def test_a_node_without_the_interface_that_is_asked_for_is_an_error_that_lists_its_own(run):
    found = result(run, "interface", "connectivity")
    assert (found.outcome, list(found.culprits)) == ("error", [B])
    assert "- node-b: GLOO_SOCKET_IFNAME=bond7 names no interface of this host. There are: lo" in found.text


def test_a_node_without_an_address_keeps_nobody_waiting_for_its_name(run):
    found = result(run, "interface", "dns")
    assert (found.outcome, list(found.culprits)) == ("error", [B])
    assert "GLOO_SOCKET_IFNAME=bond7 names no interface" in found.text


def test_a_clock_that_is_ahead_misses_the_limit_on_both_nodes_for_it_could_be_either(run):
    found = result(run, "ahead", "clock_skew")
    assert found.outcome == "failed"
    assert found.message.startswith("clock.skew 500")
    assert " > 100 ms" in found.message
    [skew] = found.measurements
    assert all(4900 < value < 5100 for value in skew.values.values())


def test_slow_reverse_lookups_miss_the_limit_and_name_the_node(run):
    found = result(run, "slow", "dns")
    assert found.outcome == "failed"
    assert found.message.startswith("dns.reverse 1.2")
    assert "on rank 1 (node-b)" in found.message


def test_lookups_that_never_end_are_given_up_and_miss_the_limit(run):
    found = result(run, "silent", "dns")
    assert found.outcome == "failed"
    assert found.message.startswith("dns.reverse 1.5")


def test_names_that_a_node_does_not_know_are_an_error(run):
    found = result(run, "ignorant", "dns")
    assert (found.outcome, list(found.culprits)) == ("error", [B])
    assert "dns.unknown (environment)" in found.text
    assert "as node-a calls itself, has no address" in found.text


def test_the_run_ends_as_it_should(run):
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
