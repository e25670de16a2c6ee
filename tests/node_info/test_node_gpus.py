"""The GPUs of a node, asked by a child that may never come back."""

from __future__ import annotations

import json

import fake_node
import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node_info import gpus
from pytest_gpucluster.node_info.program import Answer
from pytest_gpucluster.nvml import NotAvailable
from pytest_gpucluster.process_table import Who


def read(fake=None, answer=None):
    answer = fake_node.told_by(fake) if answer is None else answer
    return gpus.read(answer, lambda pid: Who(pid=pid, user="alice", command="train"))


def test_every_figure_of_every_gpu_is_told():
    told = read(fake_node.nvml())
    assert (told["why_not"], told["driver"], told["count"]) == ("", "580.65.06", 8)
    assert [gpu["index"] for gpu in told["gpus"]] == list(range(8))
    gpu = told["gpus"][3]
    assert (gpu["name"], gpu["pci"]) == ("NVIDIA H100 80GB HBM3", "00000000:23:00.0")
    assert {key for key in gpus.QUERIES if gpu[key] is None} == set()
    assert gpu["not_available"] == {}
    assert len(told["ways"]) == 8 * 7 // 2
    json.dumps(told, allow_nan=False)


def test_what_a_card_does_not_tell_is_null_with_the_reason():
    why = NotAvailable("no permission for this user or container (nvmlX)", "no permission")
    told = read(fake_node.nvml({"serial": why, "processes": ((7, 1024), (8, None))}, count=1))
    [gpu] = told["gpus"]
    assert gpu["serial"] is None
    assert gpu["not_available"] == {"serial": "no permission for this user or container (nvmlX)"}
    named = {"user": "alice", "command": "train"}
    assert gpu["processes"] == [{"pid": 7, "memory_bytes": 1024, **named}, {"pid": 8, "memory_bytes": None, **named}]


def test_a_gpu_that_does_not_answer_is_counted_and_not_listed():
    fake = fake_node.nvml()
    fake.silent = {list(fake.gpus)[5]}
    told = read(fake)
    assert told["count"] == 8
    assert [gpu["index"] for gpu in told["gpus"]] == [0, 1, 2, 3, 4, 6, 7]


def test_without_a_driver_it_is_said_why_there_is_nothing():
    def no_driver():
        raise EnvironmentBroken("NVML is not available: NVML Shared Library Not Found")

    lines = []
    gpus.tell(no_driver, lines.append)
    told = read(answer=Answer(text="\n".join(map(json.dumps, lines))))
    assert told["why_not"] == "NVML is not available: NVML Shared Library Not Found"
    assert told["gpus"] == []


def test_a_driver_that_hangs_is_named_with_what_it_was_asked_and_all_before_it_is_kept(tmp_path):
    lines = fake_node.told_by(fake_node.nvml(count=2)).text.splitlines()
    at = next(at for at, line in enumerate(lines) if "power.draw of GPU 1" in line)
    (tmp_path / "told").write_text("\n".join([*lines[: at + 1], '{"of']))
    answer = gpus.ask_child(["sh", "-c", f"cat {tmp_path}/told; sleep 600"], 2.0)
    told = read(answer=answer)
    assert told["why_not"].endswith("has not answered within 2 s; it was asking for power.draw of GPU 1")
    first, second = told["gpus"]
    assert first["not_available"] == {}
    assert second["serial"] == "1650123456789"
    assert second["power_watts"] is None
    assert second["not_available"]["power_watts"] == "not asked: NVML does not answer"


@pytest.mark.parametrize(
    ("answer", "why_not"),
    [
        (Answer(why_not="python has not answered within 30 s"), "python has not answered within 30 s"),
        (Answer(text='{"driver": "1", "count": 1}\n'), "the child that asks NVML has ended early; it was asking for "),
    ],
    ids=["silent", "crashed"],
)
def test_a_child_that_told_nothing_to_its_end_is_no_node_without_gpus(answer, why_not):
    assert read(answer=answer)["why_not"].startswith(why_not)


def test_the_child_is_a_process_of_its_own_and_says_what_this_machine_has():
    told = read(answer=gpus.ask_child())
    assert told["gpus"] or told["why_not"] or told["count"] == 0
