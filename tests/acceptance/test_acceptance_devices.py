"""The criteria of single devices and of the links of one node themselves: what they accept, how each fault fails them.

Two ranks on one node run all of it in one session, and the faults are rank 1's where nothing else is said.
"""

import re

import pytest
from each import of_each
from planted_runs import artifacts_of, measured, result_of, run_planted

PLAN = {
    "host": {"test_host_limits": ""},
    "matmul__wrong": {
        "test_matmul[bf16]": "bit",
        "test_matmul[fp16]": "nan",
        "test_matmul[tf32]": "slow",
        "test_matmul[fp32]": "",
        "test_matmul[fp8]": "bit",
    },
    "matmul__noisy": {"test_matmul[fp32]": "noisy"},
    "matmul__one_size": {"test_matmul[fp32]": "slow128"},
    "matmul_search__right": {"test_matmul_search[bf16]": "", "test_matmul_search[fp8]": ""},
    "matmul_search__wrong": {
        "test_matmul_search[fp16]": "tn@0",
        "test_matmul_search[tf32]": "tn",
        "test_matmul_search[fp32]": "",
        "test_matmul_search[fp8]": "nt",
    },
    "matmul_search__full": {"test_matmul_search[fp32]": "full"},
    "hbm__wrong": {"test_hbm[copy]": "bit", "test_hbm[read]": "bit", "test_hbm[write]": "slow"},
    "hbm__noisy": {"test_hbm[read]": "noisy", "test_hbm[write]": ""},
    "burn_in__wrong": {
        "test_burn_in": "bit",
        "test_memory_patterns[walking_ones]": "stuck",
        "test_memory_patterns[walking_zeros]": "",
        "test_memory_patterns[moving_inversions]": "",
        "test_memory_patterns[random]": "stuck",
        "test_gpu_repeats_its_bits": "unsteady",
        "test_gpus_agree": "deviates",
    },
    "burn_in__fades": {"test_burn_in": "fades"},
    "host_link__right": {
        **{f"test_host_link[{way}]": "" for way in ("h2d", "d2h", "both")},
        **{f"test_host_links_together[{direction}]": "" for direction in ("h2d", "d2h")},
    },
    "host_link__wrong": {
        "test_host_link[h2d]": "bit",
        "test_host_link[d2h]": "slow",
        "test_host_link[both]": "far",
        "test_host_links_together[h2d]": "bit",
        "test_host_links_together[d2h]": "slow",
    },
    "nccl__wrong": {"test_all_reduce[node-bf16]": "bit", "test_all_reduce[node-fp32]": "nan"},
    "nccl__slow": {"test_all_reduce[node-bf16]": "noisy", "test_all_reduce[node-fp32]": "slow"},
    "collectives": {
        "test_collective[node-all_gather-fp32]": "bit",
        "test_collective[node-reduce_scatter-fp32]": "nan",
        "test_collective[node-all_to_all-fp32]": "slow",
        "test_collective[node-broadcast-bf16]": "nothing",
        "test_collective[node-send_recv-bf16]": "nothing",
    },
}
SAMPLING = ("warmup=0.02s", "window=0.1s", "longest=0.3s", "tolerance=5%")
WORKLOAD = (
    *("matmul.sizes=64,128", *(f"matmul.{setting}" for setting in SAMPLING)),
    *("matmul.search.shapes=64x16x64,32x32x64", "matmul.search.layouts=nn,tn", "matmul.search.look=0.02s"),
    *(f"matmul.search.{setting}" for setting in SAMPLING),
    *("hbm.sizes=1MB,1MiB", *(f"hbm.{setting}" for setting in SAMPLING)),
    *("host_link.size=64KiB", "host_link.copies=4", *(f"host_link.{setting}" for setting in SAMPLING)),
    *("nccl.all_reduce.sizes=64kB", "nccl.all_reduce.latency_sizes=8B"),
    *(f"nccl.all_reduce.{setting}" for setting in SAMPLING),
    *("nccl.collectives.sizes=64kB", "nccl.collectives.latency_sizes=16B"),
    "isolation.budget=0s",  # the search for who is to blame has tests of its own
)
RANK_1 = "rank 1 (node-a)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All faults one after the other, in planted time."""
    options = [f"--gpucluster-workload={setting}" for setting in WORKLOAD]
    return run_planted(tmp_path_factory.mktemp("devices"), PLAN, "on_devices", *options, ranks=2)


WRONG = [
    ("matmul__wrong", "matmul[bf16]", "bf16 n=64: product 4 .* 1 of 4096 .* row 0, column 2:"),
    ("matmul__wrong", "matmul[fp16]", r"fp16 n=64: product 4 .* 1 of 4096 .* row 0, column 5: found nan \(0x\w{4}\)"),
    ("matmul__wrong", "matmul[fp8]", "fp8 n=64: product 4 .* 1 of 4096 .* row 0, column 2:"),
    ("matmul_search__wrong", "matmul_search[tf32]", "tf32 64x16x64 tn: .* 1 of 1024 .* row 3, column 5: found nan"),
    ("matmul_search__wrong", "matmul_search[fp8]", "fp8 64x16x64 nt: .* 1 of 1024 .* row 3, column 5: found nan"),
    ("hbm__wrong", "hbm[copy]", r"copy of 1 MB: 1 of 125000 .* byte 0: found 0x\w{16}, expected 0x\w{16}"),
    ("hbm__wrong", "hbm[read]", "read of 1 MB: .* read 6 "),
    ("burn_in__wrong", "burn_in", r"bf16 n=128: product \d+ .* 1 of 16384 .* row 0, column 2"),
    ("burn_in__wrong", "memory_patterns[walking_ones]", r"walking_ones: .* \d+ times?, at 1 place"),
    ("burn_in__wrong", "memory_patterns[random]", r"random: .* \d+ times?, at 1 place"),
    ("burn_in__wrong", "gpu_repeats_its_bits", "rank 1, node-a: .* softmax in 1 of 2 "),
    ("host_link__wrong", "host_link[h2d]", "h2d, .* h2d copy 4: 1 of 8192 .* byte 40"),
    ("host_link__wrong", "host_links_together[h2d]", "h2d together, .* h2d copy 4: 1 of 8192 .* byte 40"),
    ("nccl__wrong", "all_reduce[node-bf16]", "all_reduce of 8 B bf16 over 2 ranks: 1 of 4 .* offset 1: found "),
    ("nccl__wrong", "all_reduce[node-fp32]", "all_reduce of 8 B fp32 over 2 ranks: 1 of 2 .* offset 1: found nan, "),
    ("collectives", "collective[node-all_gather-fp32]", "all_gather of 16 B fp32 over 2 ranks: 1 of 4 .* offset 0:"),
    ("collectives", "collective[node-broadcast-bf16]", "broadcast of 16 B bf16 over 2 ranks: 8 of 8 .* offset 0:"),
    ("collectives", "collective[node-send_recv-bf16]", "send_recv of 16 B bf16 over 2 ranks: 8 of 8 .* offset 0:"),
]
"""Copy, test, and what its text says of the place."""


@of_each("case", WRONG)
def test_what_is_wrong_rejects_and_names_the_rank_and_the_place(run, case):
    found = result_of(run, *case[:2])
    assert found.outcome == "failed", found.text
    assert found.message.startswith(f"{RANK_1}: WrongResult: "), found.message
    assert re.search(case[2], found.text), found.text
    assert list(found.culprits) == [1]


def test_a_wrong_sum_that_one_rank_receives_blames_no_single_rank(run):
    found = result_of(run, "collectives", "collective[node-reduce_scatter-fp32]")
    assert found.outcome == "failed", found.text
    assert re.search("reduce_scatter of 16 B fp32 over 2 ranks: 1 of 2 .* rank 1 received it", found.text), found.text
    assert list(found.culprits) == [0, 1]


@of_each(
    "case",
    [
        ("matmul__wrong", "matmul[tf32]", r"matmul\.tf32\.tflops 0\.000"),
        ("hbm__wrong", "hbm[write]", r"hbm\.write\.bandwidth 0\.00001.* < 0\.0001 TB/s"),
        ("burn_in__fades", "burn_in", r"burn_in\.retention 0\.\d+ % < 1 %"),
        ("host_link__wrong", "host_link[d2h]", r"host_link\.d2h\.bandwidth 0\.000"),
        ("host_link__wrong", "host_links_together[d2h]", r"host_link\.d2h\.bandwidth 0\.000"),
        ("nccl__slow", "all_reduce[node-fp32]", r"nccl\.all_reduce\.busbw 0\.000.* < 0\.001 GB/s"),
        ("collectives", "collective[node-all_to_all-fp32]", r"nccl\.all_to_all\.busbw 0\.000.* < 0\.001 GB/s"),
    ],
)
def test_what_is_slow_misses_the_shipped_limit_and_is_named(run, case):
    found = result_of(run, *case[:2])
    assert found.outcome == "failed", found.text
    assert re.match(case[2], found.message), found.message
    assert RANK_1 in found.message
    missed = [one for one in found.measurements if one.status == "failed"]
    assert {one.worst_rank for one in missed} == {1}


@of_each(
    "case", [("matmul__noisy", "matmul[fp32]"), ("hbm__noisy", "hbm[read]"), ("nccl__slow", "all_reduce[node-bf16]")]
)
def test_what_is_noisy_is_inconclusive_and_that_is_no_pass(run, case):
    found = result_of(run, *case)
    assert found.outcome == "skipped", found.text  # too slow to rehearse here
    of_case = {"matmul": "matmul.fp32.tflops", "hbm": "hbm.read.bandwidth", "nccl": "nccl.all_reduce.busbw"}
    largest = measured(found)[of_case[case[0].partition("__")[0]]]
    assert "5 % " in largest.inconclusive
    assert largest.status != "passed"


def test_the_run_goes_on_after_each_fault_and_is_rejected_in_the_end(run):
    assert len(run.journal.results) == sum(map(len, PLAN.values()))
    healthy = [(copy, test.removeprefix("test_")) for copy, tests in PLAN.items() for test in tests if not tests[test]]
    assert {case: result_of(run, *case).outcome for case in healthy} == dict.fromkeys(healthy, "passed")
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []


# ---- products and memory ---------------------------------------------------------------------------------------------


def test_of_a_healthy_device_every_size_is_recorded_and_the_best_one_judged_on_each_rank(run):
    *single, best = result_of(run, "matmul__wrong", "matmul[fp32]").measurements
    assert [(dict(one.labels), one.status) for one in (*single, best)] == [
        ({"n": "64"}, "recorded"),
        ({"n": "128"}, "recorded"),
        ({"best_of": "64, 128"}, "passed"),
    ]
    for rank in (0, 1):
        for kept in ("values", "intervals", "samples"):
            assert getattr(best, kept)[rank] == getattr(single[1], kept)[rank]
    assert best.stopped.samples == len(best.samples[best.worst_rank])


def test_a_device_that_is_slow_at_its_largest_size_only_passes_by_another_one(run):
    found = result_of(run, "matmul__one_size", "matmul[fp32]")
    small, large, best = found.measurements
    assert found.outcome == "passed", found.text
    assert large.values[1] < 0.0005, "on rank 1 below the limit, in TFLOPS, and recorded only"
    assert large.status == "recorded"
    assert best.values == {0: large.values[0], 1: small.values[1]}


def test_of_buffers_the_largest_one_is_judged(run):
    judged = result_of(run, "hbm__wrong", "hbm[write]").measurements
    assert [(one.labels["size"], one.status) for one in judged] == [("1 MB", "recorded"), ("1 MiB", "failed")]


@of_each("case", [("bf16", {"nn", "tn"}), ("fp8", {"nt"})])
def test_all_ranks_measure_the_shape_that_the_first_rank_chose(run, case):
    dtype, layouts = case
    found = result_of(run, "matmul_search__right", f"matmul_search[{dtype}]")
    [best] = found.measurements
    assert best.metric == f"matmul.{dtype}.best_tflops"
    assert (best.status, best.unit, best.limit) == ("recorded", "TFLOPS", None)
    # Rank 1 is four times as fast with the other shape, and measures the same one.
    assert {name: best.labels[name] for name in ("m", "n", "k")} == {"m": "32", "n": "32", "k": "64"}
    assert best.labels["layout"] in layouts
    assert best.values[0] == pytest.approx(4 * best.values[1])
    looks = dict(found.properties)["matmul.search"]
    assert looks.startswith("32x32x64 ")
    assert all(f"64x16x64 {layout} " in looks for layout in layouts)


def test_a_wrong_product_of_the_rank_that_chooses_is_named_as_well(run):
    found = result_of(run, "matmul_search__wrong", "matmul_search[fp16]")
    assert found.message.startswith("rank 0 (node-a): WrongResult: ")
    assert " fp16 64x16x64 tn: " in found.text
    assert list(found.culprits) == [0]


def test_a_shape_that_does_not_fit_is_an_error_that_names_it_and_no_smaller_search(run):
    found = result_of(run, "matmul_search__full", "matmul_search[fp32]")
    assert found.outcome == "error"
    assert found.message.startswith(f"{RANK_1}: EnvironmentBroken: ")
    assert "matmul fp32 64x16x64 nn needs " in found.text


# ---- burn-in ---------------------------------------------------------------------------------------------------------


def test_a_wrong_product_says_when_it_was_and_what_came_before_it_is_kept(run):
    found = result_of(run, "burn_in__wrong", "burn_in")
    assert re.search(r"; after \S+ s of 0\.5 s, and \d+ products", found.text)
    kept = artifacts_of(run, "burn_in__wrong", "burn_in")
    assert set(kept) == {"burn-in-rank-0.csv", "burn-in-rank-1.csv"}
    assert all(text.startswith("seconds,products,busy_seconds,tflops\n") for text in kept.values())
    lines = [len(kept[f"burn-in-rank-{rank}.csv"].splitlines()) for rank in (0, 1)]
    assert lines[0] > lines[1] > 1
    completed = measured(found)["burn_in.completed"]
    assert completed.values[0] == 100
    assert 0 < completed.values[1] < 100


def test_a_rate_that_falls_is_measured_to_the_end(run):
    judged = measured(result_of(run, "burn_in__fades", "burn_in"))
    assert judged["burn_in.retention"].values[0] == pytest.approx(100)
    assert judged["matmul.bf16.tflops"].labels["load"] == "burn-in"
    assert judged["burn_in.completed"].values == {0: 100, 1: 100}


@of_each("pattern", ["walking_ones", "random"])
def test_a_stuck_bit_stands_with_its_place_in_the_report_and_in_a_file(run, pattern):
    found = result_of(run, "burn_in__wrong", f"memory_patterns[{pattern}]")
    judged = measured(found)["gpu.memory_patterns.wrong_words"]
    assert (judged.status, judged.worst_rank, judged.values[0]) == ("failed", 1, 0)
    place = r"buffer 0, byte 0x1f40: .* 0x\w{16}, .* 0x\w{16}, xor 0x0000010000000000 \(bit 40\)"
    assert re.search(place, found.text)
    [(name, text)] = artifacts_of(run, "burn_in__wrong", f"memory_patterns[{pattern}]").items()
    assert name == f"memory-{pattern}-rank-1.txt"
    assert "0: 2097152" in text


def test_of_memory_that_holds_the_share_is_judged(run):
    judged = result_of(run, "burn_in__wrong", "memory_patterns[moving_inversions]").measurements
    assert [(one.metric, one.status, len(one.values)) for one in judged] == [
        ("gpu.memory_patterns.wrong_words", "passed", 2),
        ("gpu.memory_patterns.share", "passed", 2),
    ]


def test_of_two_devices_that_differ_both_are_named(run):
    found = result_of(run, "burn_in__wrong", "gpus_agree")
    assert found.outcome == "failed"
    assert re.match(r"rank 0 \(node-a\): WrongResult: rank 0, node-a: .*: softmax", found.message)
    assert list(found.culprits) == [0, 1]


# ---- host links and collectives --------------------------------------------------------------------------------------


def test_on_a_healthy_node_each_rank_has_its_rate_in_each_mode_and_one_of_them_its_host_s_figures(run):
    rates = [one for each in run.journal.results if "host_link__right" in each.nodeid for one in each.measurements]
    ways = {(direction, mode) for direction in ("h2d", "d2h") for mode in ("alone", "both", "together")}
    seen = {(one.metric.split(".")[1], one.labels["mode"], one.labels["size"]) for one in rates}
    assert seen == {(*way, "64 KiB") for way in ways}
    assert all(set(one.values) == {0, 1} and "NUMA node" in one.telemetry[0]["memory"] for one in rates)
    assert all(set(one.values) == {0} for one in result_of(run, "host", "host_limits").measurements)


def test_memory_that_is_not_beside_the_gpu_is_an_error_that_names_both_places(run):
    found = result_of(run, "host_link__wrong", "host_link[both]")
    assert found.outcome == "error"
    assert found.message.startswith(f"{RANK_1}: EnvironmentBroken: node-a: 0 % ")
    assert "NUMA node 7" in found.text


def test_every_ranks_log_of_nccl_lies_in_the_folder_of_a_test_that_failed(run):
    kept = artifacts_of(run, "nccl__wrong", "all_reduce[node-fp32]")
    assert set(kept) == {"nccl-rank-0.log", "nccl-rank-1.log"}
    assert all(text.startswith("NCCL INFO something\n(2 lines ") for text in kept.values())
