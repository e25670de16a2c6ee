"""The file that nccl-tests -J writes: what is read of it, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from each import of_each
from nccl_tests import document

from pytest_gpucluster.analysis.nccl_tests import IN_PLACE, OUT_OF_PLACE, read_json
from pytest_gpucluster.errors import OutputError

SIZES = {1_000_000: 40.4, 1_000_000_000: 442.28}


def test_each_result_is_read_with_both_of_its_halves():
    output = read_json(json.dumps(document(SIZES)), "out.json")
    assert "hunter2" not in repr(output), "nothing of the environment is kept"
    assert (output.collective, output.ranks, output.processes) == ("all_reduce", 8, 1)
    assert (output.hosts, output.nccl, output.wrong) == (("gpu-a",), "2.27.3", 0)
    last = output.rows[1].figures
    assert last[IN_PLACE].busbw == 442.28
    assert last[OUT_OF_PLACE].busbw == pytest.approx(437.9, abs=0.1)
    assert last[IN_PLACE].resolution == 0


def test_ranks_are_counted_although_only_the_first_gpu_of_each_process_is_listed():
    several = document(SIZES, hosts=("gpu-a", "gpu-b"), per_process=8)
    assert len(several["config"]["devices"]) == 2
    output = read_json(json.dumps(several), "out.json")
    assert (output.ranks, output.processes, output.hosts) == (16, 2, ("gpu-a", "gpu-b"))
    output = read_json(json.dumps(document(SIZES, hosts=("gpu-a", "gpu-b"), per_process=1)), "out.json")
    assert (output.ranks, output.processes) == (16, 16)


def test_what_is_no_number_is_not_taken_for_one():
    given = document(SIZES)
    given["results"][0]["in_place"]["bus_bw"] = "nan"
    given["results"][1]["in_place"]["nwrong"] = "nan"
    given["results"][1]["out_of_place"]["nwrong"] = None
    first, last = read_json(json.dumps(given), "out.json").rows
    assert math.isnan(first.figures[IN_PLACE].busbw)
    assert last.figures[IN_PLACE].wrong == math.inf
    assert last.figures[OUT_OF_PLACE].wrong is None


def changed(change):
    given = document(SIZES)
    change(given)
    return json.dumps(given)


@of_each(
    "case",
    [
        (json.dumps(document(SIZES))[:-40], "cut off"),
        ("[]", "object"),
        ("{}", "version must"),
        (changed(lambda given: given.pop("out_of_bounds")), "cut off"),
        (changed(lambda given: given["config"].update(devices=[])), "GPUs"),
        (changed(lambda given: given["config"].update(ngpus=0)), "GPUs"),
        (changed(lambda given: given["config"]["devices"][0].update(group=1)), "groups"),
        (changed(lambda given: given["results"][0].pop("size")), r"results\[0\]\.size must"),
        (changed(lambda given: given["results"][0].update(size=True)), r"results\[0\]\.size must"),
        (changed(lambda given: given["results"][0]["in_place"].update(bus_bw="fast")), r"in_place\.bus_bw must"),
        (changed(lambda given: given.update(results={})), "results must"),
        (changed(lambda given: given["results"].append(3)), "object"),
    ],
)
def test_what_is_no_whole_file_is_refused(case):
    text, message = case
    with pytest.raises(OutputError, match=f"out.json: .*{message}"):
        read_json(text, "out.json")
