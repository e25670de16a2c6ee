"""SuperBench's summaries: what is read of them, what is refused, and what is compared with our figures."""

from __future__ import annotations

import json
import math

import pytest
from each import of_each
from example_journals import collective, places
from written_runs import read as read_run

from pytest_gpucluster.analysis import crosscheck
from pytest_gpucluster.analysis.crosscheck import AGREES, DIFFERS, NOT_COMPARABLE, collectives_of, compare_outputs
from pytest_gpucluster.analysis.nccl_tests import OUT_OF_PLACE
from pytest_gpucluster.analysis.superbench import is_summary, read
from pytest_gpucluster.errors import OutputError

# Lines and figures of microsoft/superbenchmark, tests/analyzer/test_results.jsonl (MIT), most metrics left out.
NODE = {
    "node": "sb-validation-01",
    "bert_models/pytorch-bert-base/steptime_train_float32": 114.59167010616511,
    "mem-bw/H2D_Mem_BW:0": 25.6,
    "nccl-bw/allreduce_4294967296_busbw:0": 234.45,
    "nccl-bw/allreduce_8589934592_busbw:0": 235.36,
    "nccl-bw/allreduce_8589934592_algbw:0": 134.49,
    "nccl-bw/allreduce_8589934592_time:0": 63870.0,
}
SIZE = "8 GiB"


def summary(*nodes):
    return "".join(f"{json.dumps(node)}\n" for node in nodes)


def outputs(*nodes, origin="results-summary.jsonl"):
    return read(summary(*nodes), origin, lambda host: 8)


def with_key(key, value=235.36):
    return {"node": "gpu-a", key: value}


def test_each_node_is_read_with_its_collectives():
    second = {**NODE, "node": "sb-validation-02.example", "nccl-bw/alltoall_8589934592_busbw:0": 224.31}
    found = outputs(NODE, second)
    assert [(output.collective, output.hosts, output.ranks, output.processes) for output in found] == [
        ("all_reduce", ("sb-validation-01",), 8, 1),
        ("all_reduce", ("sb-validation-02",), 8, 1),
        ("all_to_all", ("sb-validation-02",), 8, 1),
    ]
    assert [(row.size_bytes, row.dtype, row.figures[OUT_OF_PLACE].busbw) for row in found[0].rows] == [
        (4294967296, "float", 234.45),
        (8589934592, "float", 235.36),
    ]
    assert is_summary(summary(NODE))
    assert not is_summary('{"version": 3, "config": {}}')


@of_each(
    "case",
    [
        ("nccl-bw:nvlink/allreduce_8589934592_busbw:0", ["all_reduce"]),
        ("nccl-bw:nvlink-allgather/allgather_8589934592_busbw:0", ["all_gather"]),
        ("nccl-bw:default/1/broadcast_8589934592_busbw:0", ["broadcast"]),
        ("nccl-bw/reducescatter_8589934592_busbw", ["reduce_scatter"]),
        ("nccl-bw:gdr-only/allreduce_8589934592_busbw:0", []),
        ("nccl-bw:nvlink/reduce_8589934592_busbw:0", []),
        ("nccl-bw:nvlink/allreduce_0_1:8589934592_busbw:0", []),
        ("nccl-bw:nvlink/allreduce_8589934592_time:0", []),
    ],
)
def test_only_what_all_gpus_of_a_node_did_over_their_links_is_taken(case):
    key, collectives = case
    assert [output.collective for output in outputs(NODE | {"node": "a"}, with_key(key))[1:]] == collectives


def test_the_summary_of_one_node_is_named_by_its_folder():
    one = json.dumps({key: value for key, value in NODE.items() if key != "node"}, indent=2)
    assert is_summary(one)
    assert read(one, "outputs/nodes/gpu-a/results-summary.json", lambda host: 8)[0].hosts == ("gpu-a",)
    with pytest.raises(OutputError, match="node"):
        read(one, "results-summary.json", lambda host: 8)


BAD = {
    "cut off": (summary(NODE, NODE)[:-40], ":2: no JSON"),
    "no object": ("[]", "no object"),
    "nothing of it": (summary({"node": "gpu-a", "mem-bw/H2D_Mem_BW:0": 25.6}), "no busbw of nccl-bw"),
    "failed": (summary(NODE | {"nccl-bw/return_code": 3}), "return_code of sb-validation-01 is 3"),
    "failed, of a rank": (summary(NODE | {"nccl-bw:nvlink/return_code:0": None}), "is None"),
    "no number": (summary(with_key("nccl-bw/allreduce_8_busbw:0", "fast")), "'fast'"),
    "too large": (summary(with_key("nccl-bw/allreduce_8_busbw:0", 10**400)), "larger"),
    "true": (summary(with_key("nccl-bw/allreduce_8_busbw:0", True)), "True"),
}


@of_each("case", list(BAD))
def test_what_is_no_whole_summary_is_refused(case):
    text, message = BAD[case]
    with pytest.raises(OutputError, match=f"^summary.*{message}"):
        read(text, "summary", lambda host: 8)


@of_each(
    "case",
    [(231.0, AGREES), (200.0, DIFFERS), (None, NOT_COMPARABLE), (math.nan, NOT_COMPARABLE), (0.0, NOT_COMPARABLE)],
)
def test_speeds_are_compared_and_a_note_states_that_the_data_were_not_checked(case):
    value, kind = case
    mine = collectives_of(read_run(collective({SIZE: 235.0}, dtype="fp32"), ranks=places()))
    found = compare_outputs(mine, outputs(with_key("nccl-bw:nvlink/allreduce_8589934592_busbw:0", value)))
    assert [row.kind for row in found.rows] == [kind]
    assert (found.answer == crosscheck.AGREEMENT) == (kind == AGREES)
    assert any("SuperBench" in note and "data" in note for note in found.notes)


def test_another_node_than_ours_is_not_compared():
    mine = collectives_of(read_run(collective({SIZE: 235.0}, dtype="fp32"), ranks=places()))
    assert [row.kind for row in compare_outputs(mine, outputs(NODE)).rows] == [NOT_COMPARABLE]
    assert [row.kind for row in compare_outputs(mine, outputs(NODE), other_hosts=True).rows] == [AGREES]
