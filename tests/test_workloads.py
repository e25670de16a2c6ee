from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster import workloads
from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.workload_file import load
from pytest_gpucluster.workloads import KEYS, SECTIONS, Workload, WorkloadRecord, build

VALUES: dict[str, Any] = {
    "matmul.sizes": (128, 256),
    "hbm.sizes": (2**23,),
    "nccl.all_reduce.sizes": ("64 kB", "1 MB"),
    "nccl.all_reduce.latency_sizes": ("8 B",),
    "health.load": 0.05,
    "health.mig": "off",
    "health.product_size": 64,
    "training.layers": 2,
    "training.width": 64,
    "training.heads": 4,
    "training.vocab": 256,
    "training.sequence": 32,
    "training.batch": 4,
    "training.steps": 4,
}
TIMES = {"warmup": 0.0, "window": 0.2, "longest": 1.0, "tolerance": 0.5}
VALUES |= {
    f"{section}.{key}": value for section in ("matmul", "hbm", "nccl.all_reduce") for key, value in TIMES.items()
}
# The sections above are what is tried here. The others are as they are shipped.
SHIPPED = load(Path(__file__).parent.parent / "acceptance" / "workloads.yaml", profile="cpu").workload
VALUES = {
    path: functools.reduce(getattr, (section.attribute, *place), SHIPPED)
    for section in SECTIONS
    for path, place in section.keys.items()
} | VALUES
RECORD = WorkloadRecord(
    profile="quick",
    file="acceptance/workloads.yaml",
    values={"matmul.sizes": "4096, 8192", "matmul.window": "5 s"},
    origins={
        "matmul.sizes": "acceptance/workloads.yaml:12:7",
        "matmul.window": "command line: --gpucluster-workload matmul.window=5s",
    },
)


def test_the_keys_are_these_and_no_others() -> None:
    assert set(KEYS) == set(VALUES)
    assert [key for section in SECTIONS for key in section.keys] == list(KEYS)


def test_every_attribute_of_a_workload_but_its_name_is_a_section_of_the_file() -> None:
    attributes = [field.name for field in dataclasses.fields(Workload)]
    assert attributes == ["profile", *(section.attribute for section in SECTIONS)]
    paths = [section.path for section in SECTIONS]
    assert paths[:4] == ["matmul", "hbm", "nccl.all_reduce", "nccl.collectives"]
    assert len(set(paths)) == len(paths)


def test_every_key_and_section_says_what_it_means_and_what_is_allowed() -> None:
    for key, spec in KEYS.items():
        assert re.fullmatch(r"[^\n]{15,}[^.]", spec.doc), key
        assert spec.allowed, key
    assert KEYS["matmul.sizes"].allowed == "a list; each item is a multiple of 16 from 16 to 65536"
    assert all(section.doc.endswith(".") and "\n" not in section.doc for section in SECTIONS)


def test_the_values_of_the_keys_become_a_workload() -> None:
    workload = build("cpu", VALUES)
    sampling = Sampling(warmup_seconds=0.0, window_seconds=0.2, longest_seconds=1.0, tolerance_ratio=0.5)
    assert workload == dataclasses.replace(
        SHIPPED,
        matmul=workloads.Matmul(sizes=(128, 256), sampling=sampling),
        hbm=workloads.Hbm(sizes_bytes=(2**23,), sampling=sampling),
        all_reduce=workloads.AllReduce(sizes=("64 kB", "1 MB"), latency_sizes=("8 B",), sampling=sampling),
        health=workloads.Health(load_seconds=0.05, mig="off", product_size=64),
        training=workloads.Training(layers=2, width=64, heads=4, vocab=256, sequence=32, batch=4, steps=4),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.profile = "full"  # type: ignore[misc]  # that is what is tried


@pytest.mark.parametrize("key", VALUES)
def test_no_key_has_a_value_by_itself(key: str) -> None:
    with pytest.raises(KeyError, match=re.escape(key)):
        build("cpu", {name: value for name, value in VALUES.items() if name != key})


def test_a_window_above_its_longest_time_makes_no_workload() -> None:
    with pytest.raises(ValueError, match="window_seconds"):
        build("cpu", VALUES | {"hbm.window": 2.0})


def test_what_was_run_goes_on_record_and_comes_back() -> None:
    assert RECORD.line() == {
        "type": "workload",
        "profile": "quick",
        "file": "acceptance/workloads.yaml",
        "values": RECORD.values,
        "origins": RECORD.origins,
    }
    assert WorkloadRecord.from_line(RECORD.line()) == RECORD


def test_what_the_file_does_not_say_is_overridden() -> None:
    assert RECORD.overridden == ["matmul.window=5 s"]
    assert str(RECORD) == "quick (acceptance/workloads.yaml), overridden: matmul.window=5 s"
    as_in_file = dataclasses.replace(RECORD, values={"matmul.sizes": "4096"})
    assert str(as_in_file) == "quick (acceptance/workloads.yaml)"


@pytest.mark.parametrize(
    ("profile", "overridden", "remarks"),
    [
        ("full", False, []),
        ("cpu", False, []),
        ("quick", False, ["profile quick"]),
        ("soak", True, ["profile soak", "workload overridden: matmul.window=5 s"]),
        ("full", True, ["workload overridden: matmul.window=5 s"]),
    ],
)
def test_a_verdict_must_say_what_is_unusual(profile: str, overridden: bool, remarks: list[str]) -> None:
    values = RECORD.values if overridden else {"matmul.sizes": "4096, 8192"}
    assert dataclasses.replace(RECORD, profile=profile, values=values).remarks == remarks


def test_ranks_compare_the_profile_and_every_value() -> None:
    assert RECORD.compared == {"profile": "quick", "matmul.sizes": "4096, 8192", "matmul.window": "5 s"}


def test_what_a_workload_is_can_be_known_without_yaml_and_torch() -> None:
    code = "import sys, pytest_gpucluster.workloads; print({'yaml', 'torch', 'pytest'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.strip() == "set()"
