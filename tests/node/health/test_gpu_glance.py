"""One look at a GPU: each figure or the reason why there is none."""

from __future__ import annotations

import json
import math
from typing import Any

from each import of_each
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.node.health.node_reader import QUERIES, sample_gpu
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.nvml_queries import QUERIES as KNOWN
from pytest_gpucluster.node.processes import Process

GPU = "GPU-aa"
COMPLETE = {**HEALTHY_H100, "nvlink.bytes": {"sent": 5, "received": 7}}


def who(pid: int) -> Process:
    return Process(pid=pid, user="ada", command="train \x1b[2J") if pid == 7 else Process(pid=pid, known=False)


def look(changes: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return sample_gpu(FakeNvml({GPU: {**COMPLETE, **(changes or {})}}), GPU, find_process=who, **others)


def test_every_value_has_a_query_and_a_json_type() -> None:
    assert set(QUERIES.values()) <= set(KNOWN)
    sample = look({"processes": ((7, 2**30), (9, None))})
    assert sample == json.loads(json.dumps(sample))
    assert {*QUERIES, "uuid", "not_available", "lost"} == set(sample)
    assert (sample["utilization_percent"], sample["memory_used_bytes"], sample["nvlink_bytes"]["received"]) == (
        100,
        520_000_000,
        7,
    )
    assert sample["processes"] == [
        {"pid": 7, "user": "ada", "command": "train \x1b[2J", "memory_bytes": 2**30},
        {"pid": 9, "user": None, "command": None, "memory_bytes": None},
    ]
    assert (sample["not_available"], sample["lost"]) == ({}, "")


@of_each(
    "case",
    [
        (NotAvailable("not supported by this GPU or driver"), "not supported by this GPU or driver"),
        (NotAvailable(""), "not available"),
        (RuntimeError("boom"), "RuntimeError: boom"),
        (math.nan, "ValueError: NVML gave nan"),
        (math.inf, "ValueError: NVML gave inf"),
        (True, "ValueError: NVML gave True"),
        ("61", "ValueError: NVML gave '61'"),
        (None, "ValueError: NVML gave None"),
    ],
)
def test_a_missing_value_has_its_reason_and_the_others_are_there(case: tuple[Any, str]) -> None:
    answer, why = case
    sample = look({"temperature.gpu": answer})
    assert "temperature_celsius" not in sample
    assert sample["not_available"] == {"temperature_celsius": why}
    assert sample["power_watts"] == 690.0
    assert sample["lost"] == ""


def test_a_lost_gpu_is_asked_nothing_more() -> None:
    sample = look({"temperature.gpu": NotAvailable("off the bus", "lost")})
    assert sample["lost"] == "off the bus"
    asked = list(QUERIES)
    after = asked[asked.index("temperature_celsius") :]
    assert sample["not_available"] == dict.fromkeys(after, "off the bus")
