import re
from dataclasses import replace

import pytest
from each import of_each
from ranks import facts_of

from pytest_gpucluster.agreement.preflight import Expectation, problems, sku_matches
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.launch.launchers import Allocation

H100 = "NVIDIA H100 80GB HBM3"
FACTS = facts_of(world_size=16, local_world_size=8)
EXPECTED = Expectation(nodes=2, gpus_per_node=8, sku="H100")


def world(nnodes=2, per_node=8, *, device="cuda"):
    """Ranks without fault on hosts gpu-06, gpu-07, ..."""
    return {
        rank: {
            "rank": rank,
            "host": f"gpu-{6 + rank // per_node:02d}",
            "node_rank": rank // per_node,
            "local_rank": rank % per_node,
            "pid": 1000 + rank,
            "start_time": 5000 + rank,
            "cuda_index": rank % per_node if device == "cuda" else None,
            "gpu": {"index": rank % per_node, "uuid": f"GPU-{rank}", "pci_bus_id": "x", "name": H100}
            if device == "cuda"
            else None,
            "versions": {
                "python": "3.12.1",
                "torch": "2.13.0",
                "cuda": "13.0",
                "nccl": "2.29.3",
                "driver": "580.65.06" if device == "cuda" else None,
                "pytest_gpucluster": "0.1.0",
            },
            "visible_gpus": per_node,
            "node_gpus": per_node if device == "cuda" else None,
            "nvml": "",
            "inputs": given({}),
        }
        for rank in range(nnodes * per_node)
    }


def given(told, *problems):
    return {"values": told, "problems": list(problems)}


def message_of(found):
    return found.text.partition("\n")[0]


def check(who, facts=FACTS, expectation=EXPECTED, *, device="cuda", sku_of=lambda name: None):
    return problems(who, facts, expectation=expectation, device=device, sku_of=sku_of)


def only(found):
    assert [message_of(problem) for problem in found] == [message_of(found[0])]
    assert "\nwhat to do: " in found[0].text
    return found[0]


def test_a_world_as_declared_has_no_problem():
    assert check(world()) == []
    assert check(world(), expectation=None) == []
    assert check(world(device="cpu"), device="cpu") == []


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        pytest.param(
            range(8, 16), "node_rank 1 (ranks 8-15) never reported (8 of 16 ranks did)", id="a node unheard of"
        ),
        pytest.param(
            [9, 11], "ranks 9, 11 on gpu-07 (node_rank 1) never reported (14 of 16 ranks did)", id="siblings did"
        ),
        pytest.param([3, *range(8, 16)], "ranks 3, 8-15 never reported: 2 nodes (7 of 16 ranks did)", id="two nodes"),
    ],
)
def test_missing_ranks_are_named_by_host_or_by_node(gone, message):
    found = only(check({rank: they for rank, they in world().items() if rank not in gone}))
    assert message_of(found) == message
    assert "gpu-06:29500" in found.text
    assert message_of(only(check({}))).startswith("ranks 0-15 never reported")


def test_ranks_dealt_out_over_the_nodes_are_not_guessed_a_node():
    who = world()
    for rank, they in who.items():
        they["node_rank"], they["host"] = rank % 2, f"gpu-{6 + rank % 2:02d}"
        they["local_rank"] = rank // 2
    del who[9]
    assert message_of(only(check(who))) == "rank 9 never reported (15 of 16 ranks did)"


@pytest.mark.parametrize(
    ("launched", "expected", "parts"),
    [
        pytest.param((1, 8), "2x8xH100", ["1 node with 8 ranks", "2 nodes with 8 GPUs each"], id="a node too few"),
        pytest.param((2, 4), "2x8", ["2 nodes with 8 ranks", "--nproc-per-node=8"], id="half of the GPUs"),
        pytest.param((2, 8), "1x8", ["2 nodes with 16 ranks", "--gpucluster-expect=1x8"], id="a node too many"),
        pytest.param((1, 16), "2x8", ["1 node with 16 ranks"], id="as many ranks on fewer nodes"),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_another_shape_than_expected_is_named(launched, expected, parts, device):
    nnodes, per_node = launched
    facts = replace(FACTS, nnodes=nnodes, world_size=nnodes * per_node, local_world_size=per_node)
    who = world(nnodes, per_node, device=device)
    for they in who.values():
        they["node_gpus"] = 8 if device == "cuda" else None
    found = only(check(who, facts, Expectation.parse(expected), device=device))
    assert all(part in found.text for part in parts), found.text


def test_a_node_that_lost_a_gpu_is_named_against_the_expectation():
    who = world()
    del who[15]
    for rank in range(8, 15):
        who[rank]["node_gpus"] = 7
    found = [message_of(problem) for problem in check(who)]
    assert "gpu-07 (node_rank 1) has 7 GPUs, but --gpucluster-expect=2x8xH100 says 8" in found
    assert any(message.startswith("rank 15 on gpu-07 (node_rank 1) never reported") for message in found)


def test_ranks_that_see_only_their_own_gpu_do_not_make_a_node_small():
    who = world()
    for they in who.values():
        they["node_gpus"] = they["visible_gpus"] = 1
        they["cuda_index"] = 0
    assert check(who) == []
    del who[15]
    assert message_of(only(check(who))).startswith("rank 15 on ")


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        pytest.param(
            Allocation(name="slurm", nnodes=3, gpus_per_node=8),
            "2 nodes with 16 ranks in all were launched, but slurm allocated 3 nodes",
            id="a node not launched on",
        ),
        pytest.param(Allocation(name="slurm", nnodes=2, gpus_per_node=8), None, id="all of it"),
        pytest.param(Allocation(name="slurm", nnodes=1, gpus_per_node=4), None, id="more than allocated"),
        pytest.param(Allocation(name="kubernetes"), None, id="it does not say"),
    ],
)
def test_without_an_expectation_the_allocation_is_declared(scheduler, message):
    found = check(world(), replace(FACTS, scheduler=scheduler), None)
    assert [message_of(problem) for problem in found] == ([message] if message else [])


def test_gpus_without_a_rank_are_named_against_the_allocation_and_the_expectation_overrides_it():
    facts = replace(
        FACTS, world_size=4, local_world_size=4, nnodes=1, scheduler=Allocation(name="slurm", nnodes=1, gpus_per_node=8)
    )
    who = world(1, 4)
    for they in who.values():
        they["node_gpus"] = 8
    found = only(check(who, facts, None))
    assert re.match(r"only 4 of the 8 GPUs of gpu-06 \(node_rank 0\) .* slurm .* 8$", message_of(found))
    assert "--gpucluster-expect=1x4" in found.text
    assert check(who, facts, Expectation.parse("1x4xH100")) == []


def test_uneven_ranks_that_sum_up_are_named_on_the_node_that_falls_short():
    who = world()
    who[8] |= {"node_rank": 0, "local_rank": 8, "host": "gpu-06"}
    who[8]["gpu"]["uuid"] = "GPU-x"
    found = only(check(who))
    assert message_of(found).startswith("only 7 of the 8 GPUs of gpu-07 (node_rank 1) have a rank")


def test_two_ranks_on_one_gpu_are_named():
    who = world()
    who[3]["gpu"]["uuid"] = who[2]["gpu"]["uuid"]
    found = check(who)
    assert re.match("ranks 2-3 .* one GPU: GPU-2 of gpu-06$", message_of(found[0]))


def test_two_launchers_on_one_host_are_no_two_nodes_but_in_a_rehearsal():
    who = world()
    for they in who.values():
        they["host"] = "gpu-06"
    assert re.match("2 nodes .* only 1 host: gpu-06$", message_of(only(check(who))))
    who = world()
    who[7]["host"] = "gpu-07"
    assert message_of(only(check(who, expectation=None))) == "node_rank 0 is 2 hosts: gpu-06, gpu-07"
    rehearsal = world(device="cpu")
    for they in rehearsal.values():
        they["host"] = "laptop"
    assert check(rehearsal, device="cpu") == []


def test_a_place_claimed_twice_is_named():
    who = world()
    who[5]["local_rank"] = 4
    assert message_of(only(check(who))) == "ranks 4-5 are one place (node_rank and local_rank) on gpu-06"


@of_each("component", ["python", "torch", "cuda", "nccl", "driver", "pytest_gpucluster"])
def test_versions_that_differ_name_the_few_against_the_many(component):
    who = world()
    who[8]["versions"][component] = who[9]["versions"][component] = "9.9"
    usual = who[0]["versions"][component]
    found = only(check(who))
    assert message_of(found) == (
        f"{component} differs between ranks: '9.9' on ranks 8-9 (gpu-07); the other 14 ranks have {usual!r}"
    )


def test_a_version_that_a_rank_did_not_report_is_no_equal_version():
    who = world(device="cpu")
    del who[1]["versions"]["nccl"]
    assert re.match("nccl .*: '.*' on rank 1", message_of(only(check(who, device="cpu"))))


def test_another_sku_than_expected_is_named():
    who = world()
    for rank in range(16):
        who[rank]["gpu"]["name"] = "NVIDIA H200"
    found = only(check(who))
    assert "ranks 0-15 (gpu-06): the GPU is 'NVIDIA H200', but --gpucluster-expect=2x8xH100 says H100" in found.text


def test_mixed_gpus_are_a_problem_even_where_no_sku_was_declared():
    who = world()
    who[4]["gpu"]["name"] = "NVIDIA H100 NVL"
    found = only(check(who, expectation=None))
    assert re.match(r"GPU .*: 'NVIDIA H100 NVL' on rank 4 \(gpu-06\)", message_of(found))


@pytest.mark.parametrize(
    ("expected", "name", "sku", "match"),
    [
        pytest.param("H100", H100, None, True, id="family"),
        pytest.param("h100", H100, None, True, id="case"),
        pytest.param("H100-80GB", H100, None, True, id="two words"),
        pytest.param("H100-SXM", H100, "H100-SXM-80GB", True, id="name of the limits file"),
        pytest.param("H100-SXM", H100, None, False, id="more than the name says"),
        pytest.param("H100", "NVIDIA H200", None, False, id="another"),
        pytest.param("H200", "NVIDIA GH200 480GB", None, False, id="part of a word"),
        pytest.param("H100", f"{H100} MIG 1g.10gb", None, False, id="a slice is no GPU"),
        pytest.param("H100-MIG-1g.10gb", f"{H100} MIG 1g.10gb", None, True, id="a slice that was asked for"),
        pytest.param("RTX6000", "NVIDIA RTX6000 Ada", None, True, id="an x in the SKU"),
    ],
)
def test_an_expected_sku_matches_by_words(expected, name, sku, match):
    assert sku_matches(expected, name, sku) is match


def test_a_rank_without_a_gpu_is_named():
    who = world()
    who[9]["gpu"] = None
    assert message_of(check(who)[0]) == "rank 9 reported no GPU (gpu-07)"


def test_what_nvml_could_not_tell_is_no_pass():
    who = world()
    for rank in (8, 9):
        who[rank] |= {"nvml": "NVML is not available: Driver Not Loaded", "node_gpus": None}
    found = only(check(who))
    assert re.match(r"ranks 8-9 \(gpu-07\): .*: Driver Not Loaded$", message_of(found))


def test_hostile_host_names_stay_on_one_line():
    who = world()
    for rank in range(8, 16):
        who[rank]["host"] = "gpu\n<evil>\x1b[31m\ud800"
    who[9]["versions"]["torch"] = "1\n2"
    found = only(check(who))
    assert "\n" not in message_of(found)
    assert "gpu\N{REPLACEMENT CHARACTER}<evil>\N{REPLACEMENT CHARACTER}[31m" in message_of(found)
    assert "'1\N{REPLACEMENT CHARACTER}2'" in message_of(found)


def test_an_expectation_is_read():
    for text, expected in (
        ("2x8xH100", Expectation(nodes=2, gpus_per_node=8, sku="H100")),
        ("2x8", Expectation(nodes=2, gpus_per_node=8)),
        (" 1X4 x RTX6000 ", Expectation(nodes=1, gpus_per_node=4, sku="RTX6000")),
    ):
        assert Expectation.parse(text) == Expectation.parse(str(expected)) == expected


@of_each("text", ["", "8", "8xH100", "H100", "2x", "x8", "0x8", "2x0", "-1x8", "2x8x", "2x8x--", "2.5x8"])
def test_a_malformed_expectation_is_an_error_that_shows_the_form(text):
    with pytest.raises(OptionError, match=r"allowed: NODESxGPUS.*one node is 1x8xH100") as caught:
        Expectation.parse(text)
    assert repr(text) in str(caught.value)


def test_what_ranks_were_given_to_train_with_is_the_same():
    who = world()
    for rank, they in who.items():
        they["inputs"] = given(
            {"--gpucluster-model": "/b" if rank == 9 else "/a", "--gpucluster-reference-curve": "/g"}
        )
    found = only(check(who))
    assert re.match(r"--gpucluster-model .*: '/b' on rank 9 \(gpu-07\); .* 15 ranks have '/a'$", message_of(found))
    assert found.exit == 11
    for rank, they in who.items():
        they["inputs"] = given({"--gpucluster-resume": "yes"} if rank != 3 else {})
    assert re.match(r"--gpucluster-resume .*: '.*' on rank 3 \(gpu-", message_of(only(check(who))))


def test_a_path_that_is_missing_on_one_node_names_its_ranks_and_host_and_everywhere_it_is_a_usage_error():
    who = world()
    for rank, they in who.items():
        they["inputs"] = given({}, *(["--gpucluster-data images=/data: no such folder"] if rank >= 8 else []))
    found = only(check(who))
    assert re.match(r"--gpucluster-data images=/data: .* \(ranks 8-15 on gpu-07\)$", message_of(found))
    assert found.exit == 11
    for they in who.values():
        they["inputs"] = given({}, "--gpucluster-reference-curve /g: no such file")
    found = only(check(who))
    assert re.match(r"--gpucluster-reference-curve /g: .* \(ranks 0-15 on gpu-06, gpu-07\)$", message_of(found))
    assert found.exit == 4
