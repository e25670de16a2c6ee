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
from pytest_gpucluster.node.processes import Who

GPU = "GPU-aa"
TELLING = {**HEALTHY_H100, "nvlink.bytes": {"sent": 5, "received": 7}}


def who(pid: int) -> Who:
    return Who(pid=pid, user="ada", command="train \x1b[2J") if pid == 7 else Who(pid=pid, known=False)


def look(changes: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return sample_gpu(FakeNvml({GPU: {**TELLING, **(changes or {})}}), GPU, who=who, **others)


def test_every_figure_has_a_query_and_is_told_in_json_types() -> None:
    assert set(QUERIES.values()) <= set(KNOWN)
    told = look({"processes": ((7, 2**30), (9, None))})
    assert told == json.loads(json.dumps(told))
    assert {*QUERIES, "uuid", "not_available", "lost"} == set(told)
    assert (told["utilization_percent"], told["memory_used_bytes"], told["nvlink_bytes"]["received"]) == (
        100,
        520_000_000,
        7,
    )
    assert told["processes"] == [
        {"pid": 7, "user": "ada", "command": "train \x1b[2J", "memory_bytes": 2**30},
        {"pid": 9, "user": None, "command": None, "memory_bytes": None},
    ]
    assert (told["not_available"], told["lost"]) == ({}, "")


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
def test_what_is_not_told_is_missing_with_its_reason_and_the_others_are_there(case: tuple[Any, str]) -> None:
    answer, why = case
    told = look({"temperature.gpu": answer})
    assert "temperature_celsius" not in told
    assert told["not_available"] == {"temperature_celsius": why}
    assert told["power_watts"] == 690.0
    assert told["lost"] == ""


def test_a_lost_gpu_is_asked_nothing_more() -> None:
    told = look({"temperature.gpu": NotAvailable("off the bus", "lost")})
    assert told["lost"] == "off the bus"
    asked = list(QUERIES)
    after = asked[asked.index("temperature_celsius") :]
    assert told["not_available"] == dict.fromkeys(after, "off the bus")
