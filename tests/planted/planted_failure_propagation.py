"""The jobs that a node can have: in the place of torchrun a launcher without torch, whose ranks only say how far they
are. That torchrun itself ends them so is shown by tests/benchmarks/training, and by each rehearsal."""

import sys
from pathlib import Path

from parts import plant_parts

from pytest_gpucluster.benchmarks.training import failure_propagation

LAUNCHER = (sys.executable, "-S", str(Path(__file__).with_name("job_launcher.py")))
LEFT_OVER_SECONDS = failure_propagation.LEFT_OVER_SECONDS
JOBS = ("silent", "none", "hidden", "unnamed", "stubborn", "unwatched", "leaves")
CASES = {"1x2": {"test_failure_propagation": JOBS}, "2x1": {"test_failure_propagation": ("none",)}}
# What hangs does so for any time.
WORKLOADS = {how: {"failure_propagation": {"end_seconds": 1.0}} for how in ("stubborn", "unwatched")}


def plant(fault, request):
    module = "this_module_is_not_there" if fault == "silent" else failure_propagation.MODULE
    plant_parts(request, failure_propagation, LAUNCHER=(*LAUNCHER, fault), MODULE=module)
    failure_propagation.LEFT_OVER_SECONDS = 0.5 if fault == "leaves" else LEFT_OVER_SECONDS
