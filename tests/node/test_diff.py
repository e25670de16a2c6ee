"""Which nodes differ in what."""

from each import of_each
from node_info_files import node_info

from pytest_gpucluster.node.diff import UNKNOWN, compare_nodes


def different(*nodes):
    found = compare_nodes({f"n{number}": node for number, node in enumerate(nodes)})
    return {fact.name: [(group.text, group.nodes) for group in fact.groups] for fact in found if not fact.alike}


def gpus(**changed):
    node = node_info()
    node["gpus"]["gpus"][1] |= changed
    return node["gpus"]


def test_nodes_with_the_same_values_are_equal():
    assert different(node_info(), node_info(), node_info()) == {}


@of_each(
    "case",
    [
        ({"system__kernel": "5.4"}, "kernel", "5.4"),
        ({"cpu__cpus": 4, "cpu__cores": 1}, "threads a core (SMT)", "4"),
        ({"gpus__count": 1}, "GPUs", "1"),
        ({"gpus": gpus(mig=True)}, "MIG", "no, yes"),
        ({"gpus": gpus(pcie_width=8)}, "PCIe width", "16, 8"),
        ({"gpus": gpus(vbios="96.00.1")}, "VBIOS", "96.00.5E, 96.00.1"),
        ({"gpus": gpus(nvlink_up={"0": True, "1": False})}, "NVLinks up", "18, 1"),
        ({"gpus__why_not": "no driver"}, "why no GPU", "no driver"),
        ({"infiniband__why_not": "hidden"}, "why no InfiniBand", "hidden"),
        ({"mounts": []}, "network mounts", "none"),
        ({"topology__between_gpus": [["X", "SYS"], ["SYS", "X"]]}, "between GPUs", None),
    ],
)
def test_a_node_that_is_another_one_is_named(case):
    changed, fact, shown = case
    node = node_info()
    for name, value in changed.items():
        part, _, key = name.partition("__")
        if key:
            node[part][key] = value
        else:
            node[part] = value
    found = different(node_info(), node, node_info())[fact]
    assert [nodes for _, nodes in found] == [("n0", "n2"), ("n1",)]
    assert shown is None or found[1][0] == shown


def test_memory_differs_only_beyond_a_percent():
    node = node_info()
    total = node["memory"]["total_bytes"]
    assert different(node, node_info(memory__total_bytes=int(total * 0.995))) == {}
    assert list(different(node, node_info(memory__total_bytes=int(total * 0.98)))) == ["memory"]


@of_each("broken", [{}, {"gpus": None}, {"gpus": {"gpus": 5, "count": "x"}}, {"infiniband": {"devices": [1]}}])
def test_an_unknown_value_is_a_difference_and_no_crash(broken):
    node = {**node_info(), **broken} if broken else {"schema_version": 1}
    found = different(node_info(), node_info(), node)
    assert found
    assert UNKNOWN in {shown for groups in found.values() for shown, _ in groups} or "x" in found["GPUs"][1][0]


def test_true_is_not_one():
    assert list(different(node_info(cpu__numa_balancing=True), node_info(cpu__numa_balancing=1))) == ["NUMA balancing"]
