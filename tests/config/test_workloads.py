import dataclasses
import functools
from pathlib import Path

import pytest

from pytest_gpucluster.config.criteria import gpu
from pytest_gpucluster.config.workload import SECTIONS, Workload, WorkloadRecord, build
from pytest_gpucluster.config.workload_loader import load
from pytest_gpucluster.metrics.codec import read

# All as it is shipped, but for some of each kind.
SHIPPED = load(Path(__file__).parents[2] / "acceptance" / "workloads.yaml", profile="cpu").workload
VALUES = {
    path: functools.reduce(getattr, (section.attribute, *place), SHIPPED)
    for section in SECTIONS
    for path, (place, _) in section.keys.items()
} | {"matmul.sizes": (128, 384), "matmul.window": 0.7, "health.mig": "on", "training.layers": 3}

RECORD = WorkloadRecord(
    profile="quick",
    file="acceptance/workloads.yaml",
    values={"matmul.sizes": "4096, 8192", "matmul.window": "5 s"},
    origins={
        "matmul.sizes": "acceptance/workloads.yaml:12:7",
        "matmul.window": "command line: --gpucluster-workload matmul.window=5s",
    },
)


def test_the_values_of_the_keys_become_a_workload():
    workload = build("cpu", VALUES)
    sampling = dataclasses.replace(SHIPPED.matmul.sampling, window_seconds=0.7)
    changes = {
        "matmul": gpu.Matmul(sizes=(128, 384), sampling=sampling),
        "health": dataclasses.replace(SHIPPED.health, mig="on"),
        "training": dataclasses.replace(SHIPPED.training, layers=3),
    }
    assert workload == Workload(**{**vars(SHIPPED), **changes})
    with pytest.raises(ValueError, match="window_seconds"):
        build("cpu", VALUES | {"hbm.window": 99.0})


def test_what_was_run_goes_on_record_and_comes_back():
    assert read(WorkloadRecord, RECORD.line(), "a line") == RECORD
    assert RECORD.overridden == ["matmul.window=5 s"], "what the file does not say"
    assert str(RECORD) == "quick (acceptance/workloads.yaml), overridden: matmul.window=5 s"


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
def test_a_verdict_must_say_what_is_unusual(profile, overridden, remarks):
    values = RECORD.values if overridden else {"matmul.sizes": "4096, 8192"}
    assert dataclasses.replace(RECORD, profile=profile, values=values).remarks == remarks


def test_a_simulated_cluster_trains_small_models_and_keeps_what_is_simulated():
    path = Path(__file__).parents[2] / "acceptance" / "workloads.yaml"
    quick, cpu = (load(path, profile=profile).workload for profile in ("quick", "cpu"))
    found = load(path, profile="quick", small_training=True).workload
    assert (found.matmul, found.all_reduce, found.burn_in) == (quick.matmul, quick.all_reduce, quick.burn_in)
    assert (found.fsdp, found.checkpoint) == (cpu.fsdp, cpu.checkpoint)
    assert found.scaling.layers == quick.scaling.layers
    assert found.scaling.sampling.window_seconds == cpu.scaling.sampling.window_seconds
    assert found.scaling.compiled == "off"
