"""The GPUs of a node, asked by a child that may never come back."""

from __future__ import annotations

import json
import re

import fake_node
import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node import info_gpus
from pytest_gpucluster.node.info_software import Answer
from pytest_gpucluster.node.processes import Who


def read(fake=None, answer=None):
    answer = fake_node.told_by(fake) if answer is None else answer
    return info_gpus.read_gpus(answer, lambda pid: Who(pid=pid, user="alice", command="train"))


def test_every_figure_of_every_gpu_is_told():
    told = read(fake_node.nvml())
    assert (told["why_not"], told["driver"], told["count"]) == ("", "580.65.06", 8)
    assert [gpu["index"] for gpu in told["gpus"]] == list(range(8))
    gpu = told["gpus"][3]
    assert (gpu["name"], gpu["pci"]) == ("NVIDIA H100 80GB HBM3", "00000000:23:00.0")
    assert {key for key in info_gpus.QUERIES if gpu[key] is None} == set()
    assert gpu["not_available"] == {}
    assert len(told["ways"]) == 8 * 7 // 2
    json.dumps(told, allow_nan=False)


def test_without_a_driver_it_is_said_why_there_is_nothing():
    def no_driver():
        raise EnvironmentBroken("NVML Shared Library missing")

    lines = []
    info_gpus.tell(no_driver, lines.append)
    told = read(answer=Answer(text="\n".join(map(json.dumps, lines))))
    assert told["why_not"] == "NVML Shared Library missing"
    assert told["gpus"] == []


def test_a_driver_that_hangs_is_named_with_what_it_was_asked_and_all_before_it_is_kept(tmp_path):
    lines = fake_node.told_by(fake_node.nvml(count=2)).text.splitlines()
    at = next(at for at, line in enumerate(lines) if "power.draw of GPU 1" in line)
    (tmp_path / "told").write_text("\n".join([*lines[: at + 1], '{"of']))
    answer = info_gpus.ask_child(["sh", "-c", f"cat {tmp_path}/told; sleep 600"], 2.0)
    told = read(answer=answer)
    assert re.search(" 2 s; .*power.draw of GPU 1$", told["why_not"])
    first, second = told["gpus"]
    assert first["not_available"] == {}
    assert second["serial"] == "1650123456789"
    assert second["power_watts"] is None
    assert second["not_available"]["power_watts"].startswith("not asked")


@pytest.mark.parametrize(
    ("answer", "why_not"),
    [
        (Answer(why_not="no answer in 30 s"), "no answer in 30 s"),
        (Answer(text='{"driver": "1", "count": 1}\n'), "the child "),
    ],
    ids=["silent", "crashed"],
)
def test_a_child_that_told_nothing_to_its_end_is_no_node_without_gpus(answer, why_not):
    assert read(answer=answer)["why_not"].startswith(why_not)


def test_the_child_is_a_process_of_its_own_and_says_what_this_machine_has():
    told = read(answer=info_gpus.ask_child())
    assert told["gpus"] or told["why_not"] or told["count"] == 0
