"""One look at a GPU: each figure or the reason why there is none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.dashboard.gpu_glance import FEW, QUERIES, glance
from pytest_gpucluster.nvml import QUERIES as KNOWN
from pytest_gpucluster.nvml import NotAvailable
from pytest_gpucluster.process_table import Who

GPU = "GPU-aa"
TELLING = {**HEALTHY_H100, "nvlink.bytes": {"sent": 5, "received": 7}}


def who(pid: int) -> Who:
    return Who(pid=pid, user="ada", command="train \x1b[2J") if pid == 7 else Who(pid=pid, known=False)


def look(changes: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return glance(FakeNvml({GPU: {**TELLING, **(changes or {})}}), GPU, who=who, **others)


def test_every_figure_has_a_query_and_is_told_in_json_types() -> None:
    assert set(QUERIES.values()) <= set(KNOWN)
    told = look({"processes": ((7, 2**30), (9, None))})
    assert told == json.loads(json.dumps(told))
    assert told == {
        "uuid": GPU,
        "utilization_percent": 100,
        "memory_used_bytes": 520_000_000,
        "memory_total_bytes": 85_520_809_984,
        "temperature_celsius": 61,
        "power_watts": 690.0,
        "power_limit_watts": 700.0,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "throttle": [],
        "nvlink_bytes": {"sent": 5, "received": 7},
        "processes": [
            {"pid": 7, "user": "ada", "command": "train \x1b[2J", "memory_bytes": 2**30},
            {"pid": 9, "user": None, "command": None, "memory_bytes": None},
        ],
        "not_available": {},
        "lost": "",
    }


def test_beside_a_measurement_few_questions_are_asked() -> None:
    told = look(keys=FEW)
    assert [key for key in told if key in QUERIES] == list(FEW)


def test_an_idle_gpu_is_not_held_down() -> None:
    assert look({"throttle.reasons": ("gpu_idle", "sw_power_cap")})["throttle"] == ["sw_power_cap"]


@pytest.mark.parametrize(
    ("answer", "why"),
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
    ids=str,
)
def test_what_is_not_told_is_missing_with_its_reason_and_the_others_are_there(answer: Any, why: str) -> None:
    told = look({"temperature.gpu": answer})
    assert "temperature_celsius" not in told
    assert told["not_available"] == {"temperature_celsius": why}
    assert told["power_watts"] == 690.0
    assert told["lost"] == ""


@pytest.mark.parametrize("query", ["nvlink.bytes", "processes", "throttle.reasons"])
def test_an_answer_of_another_shape_is_named(query: str) -> None:
    told = look({query: 5})
    assert len(told["not_available"]) == 1


def test_a_lost_gpu_is_asked_nothing_more() -> None:
    told = look({"temperature.gpu": NotAvailable("fell off the bus", "lost")})
    assert told["lost"] == "fell off the bus"
    asked = list(QUERIES)
    after = asked[asked.index("temperature_celsius") :]
    assert told["not_available"] == dict.fromkeys(after, "fell off the bus")
