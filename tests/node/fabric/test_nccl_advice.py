"""Each piece of advice, and what is printed of it, in the hands of a real bash."""

import os
import subprocess
from pathlib import Path

import pytest
from each import of_each
from made_nodes import MAKERS, azure, efa, eight_gpus, ethernet, google, infiniband, laptop, pod, roce
from sysfs_ports import write

from pytest_gpucluster.node.fabric.nccl_advice import advise, render_advice, shell_lines
from pytest_gpucluster.node.fabric.nccl_facts import collect_facts
from pytest_gpucluster.node.fabric.nccl_rules import RULES, judge_environment

GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
IFNAME, HCA = "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"


def of(node):
    return advise(collect_facts(node.sources()))


def values(advised):
    return {one.name: one.value for one in advised.set}


def wanted(advised, name):
    [found] = [one for one in advised.set if one.name == name]
    return found


def steps(advised):
    return "\n".join(f"{step.what}: {step.why}" for step in advised.steps)


def names(*words, text):
    """Whether a text has all of these."""
    return all(word in text for word in words)


# ---- the network cards -----------------------------------------------------------------------------------------------


def test_a_rail_optimised_node_of_infiniband_needs_nothing(tmp_path):
    found = of(infiniband(tmp_path))
    assert (found.set, found.remove, found.steps, found.unknown, found.differs) == ((), (), (), (), False)


def with_storage(root):
    node = infiniband(root)
    node.card("mlx5_8", board="MT_0000000359", rate="100 Gb/sec (4X EDR)")
    return node


def test_the_cards_are_named_exactly_where_others_are_active(tmp_path):
    hca = wanted(of(with_storage(tmp_path)), HCA)
    assert hca.value == "=" + ",".join(f"mlx5_{number}:1" for number in range(8))
    assert names("mlx5_8:1", "100 Gb/s", text=hca.why)
    assert (hca.source, hca.is_met) == (GUIDE, False)


def test_a_choice_of_the_same_cards_is_as_good_however_it_is_written(tmp_path):
    node = with_storage(tmp_path)
    for value, is_met in {
        "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7": True,
        "^mlx5_8": True,
        "^=mlx5_8:1": True,
        "mlx5": False,
        "=mlx5_0": False,
        "mlx4_0": False,
    }.items():
        node.environ[HCA] = value
        found = of(node)
        assert (wanted(found, HCA).is_met, found.differs) == (is_met, not is_met), value
        assert [note.code for note in found.notes("gpu-001")] == ([] if is_met else ["advice.nccl_ib_hca"]), value


@pytest.mark.parametrize("name", ["mlx5,0", "ml:x", "=mlx5", "ml x", "mlx\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_card_that_no_list_can_name_is_not_named(tmp_path, name):
    node = infiniband(tmp_path, ports=7)
    node.card(name, close_to=7)
    node.card("mlx5_8")
    found = of(node)
    assert HCA not in values(found)
    assert HCA in found.unknown[0]


# ---- the interface of the bootstrap, and of TCP ----------------------------------------------------------------------


def without_networks(root, *, routes=True):
    node = infiniband(root)
    node.found.clear()
    if not routes:
        (node.proc / "net/route").unlink()
    return node


def test_over_rdma_the_bootstrap_goes_over_a_card_and_neither_a_bridge_nor_a_rail(tmp_path):
    assert values(of(roce(tmp_path / "roce")))[IFNAME] == "=eth0"
    node = without_networks(tmp_path / "bridge")
    node.network("cni0", real=False, bridge=True)
    node.network("eth0", driver="igb")
    found = wanted(of(node), IFNAME)
    assert found.value == "=eth0"
    assert names("cni0", "eth0", text=found.why)


def test_for_the_bootstrap_the_first_interface_that_is_meant_counts(tmp_path):
    node = without_networks(tmp_path)
    node.network("cni0", real=False, bridge=True)
    node.network("eth0", driver="igb")
    node.network("eth1", driver="igb")
    for value, is_met in {"eth0": True, "^cni": True, "cni,eth": False, "x": False}.items():
        node.environ[IFNAME] = value
        assert wanted(of(node), IFNAME).is_met is is_met, value


def test_the_way_to_the_bmc_reaches_no_other_node(tmp_path):
    node = without_networks(tmp_path / "rdma")
    node.network("enxbe3af2b6059f", driver="cdc_ether", speed=None, address="169.254.3.1")
    node.network("eth0", driver="igb")
    found = wanted(of(node), IFNAME)
    assert found.value == "=eth0"
    assert "(169.254.3.1)" in found.why
    plain = ethernet(tmp_path / "tcp")
    plain.network("usb0", driver="rndis_host", speed=None, address="169.254.0.17")
    assert values(of(plain))[IFNAME] == "=ens1"


def two_networks(root, slow=10_000):
    node = ethernet(root, speed=100_000)
    node.network("ens9", driver="ice", speed=slow)
    return node


def test_tcp_goes_over_the_fast_network_only(tmp_path):
    node = two_networks(tmp_path / "slow")
    found = wanted(of(node), IFNAME)
    assert found.value == "=ens1"
    assert names("ens9 (10 Gb/s)", "ens1 (100 Gb/s)", text=found.why)
    for value, is_met in {"ens": False, "^ens9,lo": True}.items():
        node.environ[IFNAME] = value
        assert wanted(of(node), IFNAME).is_met is is_met, "over TCP every interface that is meant counts"
    equal = of(two_networks(tmp_path / "equal", slow=100_000))
    assert (IFNAME in values(equal), equal.unknown) == (False, ())
    unknown = of(two_networks(tmp_path / "unknown", slow=None))
    assert IFNAME not in values(unknown)
    assert any("ens9" in text for text in unknown.unknown)


def test_tcp_of_100_gb_takes_several_connections_and_slower_or_unknown_does_not(tmp_path):
    fast = of(ethernet(tmp_path / "fast"))
    assert values(fast) == {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    cloud = eight_gpus(tmp_path / "cloud")
    cloud.network("ens5", driver="ena", speed=100_000)
    for node in (cloud, *(ethernet(tmp_path / str(speed), speed=speed) for speed in (25_000, None))):
        assert values(of(node)) == {}


# ---- clouds ----------------------------------------------------------------------------------------------------------


@of_each(
    "case",
    [
        (efa, "", "aws-ofi-nccl libfabric"),
        (azure, HCA, "NCCL_TOPO_FILE /opt/microsoft"),
        (google, "", "GPUDirect-TCPXO nccl-env-profile.sh"),
    ],
)
def test_a_cloud_s_own_plugin_or_file_is_something_to_do(case, tmp_path):
    make, name, words = case
    node = make(tmp_path / make.__name__)
    found = of(node)
    assert set(values(found)) == set(name.split())
    assert names(*words.split(), text=steps(found))
    node.dmi(sys_vendor="Box", product_name="Box", chassis_asset_tag="0000")
    assert not names(*words.split(), text=steps(of(node)))


def test_google_s_script_for_roce_is_named_and_azure_s_file_is_not_asked_for_twice(tmp_path):
    node = roce(tmp_path / "google")
    node.dmi(product_name="Google Compute Engine")
    assert "/usr/local/gib/scripts/set_nccl_env.sh" in steps(of(node))
    node = azure(tmp_path / "azure")
    node.environ["NCCL_TOPO_FILE"] = "/opt/microsoft/ndv5-topo.xml"
    assert "NCCL_TOPO_FILE" not in steps(of(node))


def test_what_google_s_plugin_demands_is_no_leftover_where_it_is_in_use(tmp_path):
    node = google(tmp_path)
    node.environ |= {"NCCL_ALGO": "Ring,Tree", "NCCL_NVLS_ENABLE": "0"}
    assert {one.name for one in of(node).remove} == {"NCCL_ALGO", "NCCL_NVLS_ENABLE"}
    node.environ |= {"NCCL_FASTRAK_CTRL_DEV": "eth0", "NCCL_CHECK_POINTERS": "1"}
    found = of(node)
    assert {one.name for one in found.remove} == {"NCCL_CHECK_POINTERS"}
    facts = collect_facts(node.sources())
    judged = {one.name: judge_environment(one, facts) for one in facts.settings}
    assert {name: one.kind for name, one in judged.items() if one} == {
        "NCCL_ALGO": "note",
        "NCCL_NVLS_ENABLE": "note",
        "NCCL_CHECK_POINTERS": "environment",
    }
    node.dmi(product_name="Box")
    assert {"NCCL_ALGO", "NCCL_NVLS_ENABLE"} < {one.name for one in of(node).remove}, "elsewhere it is one"


# ---- what is to be done ----------------------------------------------------------------------------------------------


def test_ports_out_of_reach_are_something_to_do(tmp_path):
    node = infiniband(tmp_path)
    node.environ["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
    assert steps(of(node)) == ""
    for file in (tmp_path / "dev/infiniband").iterdir():
        file.unlink()
    assert names("(kubernetes)", "/dev/infiniband/uverbs*", text=steps(of(node)))


def test_where_the_fabric_is_not_known_nothing_is_advised_about_it(tmp_path):
    found = of(pod(tmp_path))
    assert (found.set, found.steps, found.differs) == ((), (), False)
    assert "RDMA" in found.unknown[0]


def test_a_laptop_needs_nothing(tmp_path):
    found = of(laptop(tmp_path))
    assert (found.set, found.remove, found.steps) == ((), (), ())
    [unknown] = found.unknown
    assert "NVML" in unknown


# ---- what is set ------------------------------------------------------------------------


def test_what_is_set_and_hurts_is_to_be_removed_by_the_rules_of_the_criterion(tmp_path):
    node = infiniband(tmp_path)
    file = str(tmp_path / "etc/nccl.conf")
    node.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_IB_TIMEOUT": "22", "NCCL_CROSS_NIC": "0"}
    write(Path(file), "NCCL_ALGO=Ring\nNCCL_IB_DISABLE=2")
    found = of(node)
    assert {one.name: (one.value, one.origin, one.also) for one in found.remove} == {
        "NCCL_ALGO": ("Ring", file, ()),
        "NCCL_IB_DISABLE": ("1", "environment", (f"2 ({file})",)),
    }
    assert [(one.name, one.why) for one in found.look] == [("NCCL_IB_TIMEOUT", RULES["NCCL_IB_TIMEOUT"].does)]
    assert found.differs


def test_what_only_hurts_over_several_nodes_is_no_harm_in_a_job_of_one(tmp_path):
    node = infiniband(tmp_path)
    node.environ |= {"NCCL_IB_DISABLE": "1", IFNAME: "lo"}
    assert {one.name for one in of(node).remove} == {"NCCL_IB_DISABLE", IFNAME}, "several, where nothing says how many"
    node.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    assert of(node).remove == ()


@of_each("name", list(MAKERS))
def test_all_advice_has_a_reason_and_a_source(tmp_path, name):
    node = MAKERS[name](tmp_path / name)
    node.environ |= {"NCCL_CHECK_POINTERS": "1", "NCCL_DEBUG": "INFO"}
    found = of(node)
    assert all(one.why and one.source for one in (*found.set, *found.remove, *found.look, *found.steps))
    variables = [one.name for one in (*found.set, *found.remove)]
    assert len(variables) == len(set(variables)), "one opinion about each variable"


def test_the_properties_have_the_fabric_and_every_difference(tmp_path):
    node = with_storage(tmp_path)
    node.environ[HCA] = "mlx5"
    found = of(node)
    properties = found.properties()
    assert properties["advice.fabric"].startswith("InfiniBand: 8 ")
    assert names("=mlx5_0:1,", "mlx5 (environment)", text=properties["advice.NCCL_IB_HCA"])
    [note] = found.notes("gpu-001")
    assert (note.kind, note.code, note.gpu.host) == ("note", "advice.nccl_ib_hca", "gpu-001")
    assert of(pod(tmp_path / "pod")).properties()["advice.fabric"].startswith("unknown: ")


HOSTILE = ("$(touch${IFS}x)", "`touch${IFS}x`", "a';touch${IFS}x;'", 'a"b\\n', "a&touch<x", "--x", "*", "~", "#a", "!!")
"""Names that Linux takes for an interface or an RDMA device: no blank, no slash."""


def shown(node):
    facts = collect_facts(node.sources())
    return shell_lines(facts, advise(facts))


def after(script, folder, environ=None, how='eval "$1"'):
    """Return the environment that a bash has after it was given these lines."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-euc", f"{how}; env -0", "bash", script],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **(environ or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""
    assert list(folder.iterdir()) == [], "something in the lines was run"
    return dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)


@pytest.mark.parametrize("how", ['eval "$1"', 'source /dev/stdin <<<"$1"'])
def test_a_shell_has_what_is_advised_and_no_longer_what_hurts(tmp_path, how):
    node = azure(tmp_path / "node")
    node.environ |= {"NCCL_ALGO": "Ring", "NCCL_IB_TIMEOUT": "22"}
    found = after(shown(node), tmp_path / "empty", node.environ, how)
    assert found["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_ib{number}:1" for number in range(8))
    assert "NCCL_ALGO" not in found
    assert found["NCCL_IB_TIMEOUT"] == "22", "what may be right stays"
    node.environ["NCCL_IB_HCA"] = "mlx4"
    lines_out = shown(node)
    assert "unset NCCL_IB_HCA" not in lines_out, "it is replaced"
    assert after(lines_out, tmp_path / "empty", node.environ, how)["NCCL_IB_HCA"].startswith("=mlx5_ib0:1,")


def hostile(root, name):
    node = infiniband(root)
    node.found.clear()
    (node.proc / "net/route").unlink()
    node.network("br-0", real=False, bridge=True)
    node.network(name)
    node.card(name, board="MT_0000000359", rate="100 Gb/sec (4X EDR)")
    node.card(f"{name}9", close_to=0)
    node.dmi(product_name="Box\n$(touch x)")
    node.environ["NCCL_CHECK_POINTERS"] = "1\ntouch x\n"
    return node


@of_each("name", HOSTILE)
def test_names_that_mean_harm_are_one_word_of_a_shell(name, tmp_path):
    node = hostile(tmp_path / f"node-{HOSTILE.index(name)}", name)
    found = after(shown(node), tmp_path / "empty", {"NCCL_CHECK_POINTERS": "1"})
    assert found["NCCL_SOCKET_IFNAME"] == f"={name}"
    assert f"{name}9:1" in found["NCCL_IB_HCA"].removeprefix("=").split(",")
    assert "NCCL_CHECK_POINTERS" not in found


def test_everything_else_is_a_comment_of_one_printable_line(tmp_path):
    node = hostile(tmp_path, "eth0")
    node.environ["NCCL_DEBUG"] = "TRACE\x1b[2J\nexport X=1"
    node.gpus_unknown = "NVML has not answered within 30 s"
    lines = shown(node).splitlines()
    for line in lines:
        assert line.isprintable()
        assert line.startswith(("# ", "export NCCL_", "unset NCCL_")), line
    assert any(node.gpus_unknown in line for line in lines if line.startswith("# "))


def test_what_a_file_sets_cannot_be_unset_and_is_named(tmp_path):
    node = infiniband(tmp_path)
    file = tmp_path / "etc/nccl.conf"
    write(file, "NCCL_ALGO=Ring\nNCCL_P2P_DISABLE=1")
    node.environ["NCCL_P2P_DISABLE"] = "2"
    lines_out = shown(node)
    assert "unset NCCL_ALGO" not in lines_out
    assert any(line.startswith("# ") and str(file) in line for line in lines_out.splitlines())
    assert "unset NCCL_P2P_DISABLE\n" in lines_out
    assert f" 1 ({file})" in lines_out


@pytest.mark.parametrize("name", MAKERS)
def test_the_text_is_never_wider_and_has_everything(tmp_path, name):
    node = MAKERS[name](tmp_path)
    node.environ |= {"NCCL_CHECK_POINTERS": "1\x1b[2J", "NCCL_IB_TIMEOUT": "22"}
    facts = collect_facts(node.sources())
    advised = advise(facts)
    lines_out = render_advice(facts, advised, width=60)
    assert all(line.isprintable() and len(line) <= 60 for line in lines_out.splitlines())
    joined = "".join(lines_out.split())
    names = [one.name for one in (*advised.set, *advised.remove, *advised.look)]
    for words in (*names, *(step.what for step in advised.steps), *advised.unknown):
        assert "".join(words.split()) in joined
