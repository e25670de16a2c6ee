"""The GPUs of a node, asked by a child that may never come back."""

from __future__ import annotations

import json
import re

import fake_node
import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node import info_gpus
from pytest_gpucluster.node.processes import Output, Process


def read(fake=None, answer=None):
    answer = fake_node.child_answer(fake) if answer is None else answer
    return info_gpus.read_gpus(answer, lambda pid: Process(pid=pid, user="alice", command="train"))


def test_every_value_of_every_gpu_is_reported():
    gpus = read(fake_node.nvml())
    assert (gpus["why_not"], gpus["driver"], gpus["count"]) == ("", "580.65.06", 8)
    assert [gpu["index"] for gpu in gpus["gpus"]] == list(range(8))
    gpu = gpus["gpus"][3]
    assert (gpu["name"], gpu["pci"]) == ("NVIDIA H100 80GB HBM3", "00000000:23:00.0")
    assert {key for key in info_gpus.QUERIES if gpu[key] is None} == set()
    assert gpu["not_available"] == {}
    json.dumps(gpus, allow_nan=False)


def test_without_a_driver_the_reason_is_reported():
    def no_driver():
        raise EnvironmentBroken("NVML Shared Library missing")

    lines = []
    info_gpus.query_gpus(no_driver, lines.append)
    gpus = read(answer=Output(text="\n".join(map(json.dumps, lines))))
    assert gpus["why_not"] == "NVML Shared Library missing"
    assert gpus["gpus"] == []


def test_a_driver_that_hangs_is_named_with_what_it_was_asked_and_the_gpus_before_it_are_kept(tmp_path):
    lines = fake_node.child_answer(fake_node.nvml(count=2)).text.splitlines()
    at = next(at for at, line in enumerate(lines) if "power.draw of GPU 1" in line)
    (tmp_path / "lines").write_text("\n".join([*lines[: at + 1], '{"of']))
    answer = info_gpus.run_child(["sh", "-c", f"cat {tmp_path}/lines; sleep 600"], 2.0)
    gpus = read(answer=answer)
    assert re.search(" 2 s; .*power.draw of GPU 1$", gpus["why_not"])
    [first] = gpus["gpus"]
    assert (gpus["count"], first["index"], first["not_available"]) == (2, 0, {})


@pytest.mark.parametrize(
    ("answer", "why_not"),
    [
        (Output(why_not="no answer in 30 s"), "no answer in 30 s"),
        (Output(text='{"driver": "1", "count": 1}\n'), "the child "),
    ],
    ids=["silent", "crashed"],
)
def test_a_child_that_exits_without_output_is_no_node_without_gpus(answer, why_not):
    assert read(answer=answer)["why_not"].startswith(why_not)


def test_the_child_is_a_process_of_its_own_and_says_what_this_machine_has():
    gpus = read(answer=info_gpus.run_child())
    assert gpus["gpus"] or gpus["why_not"] or gpus["count"] == 0
