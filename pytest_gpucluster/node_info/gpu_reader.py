"""The process that asks NVML for ``node_info.gpus``: a JSON object a line."""

from __future__ import annotations

import json
import sys
from typing import Any

from pytest_gpucluster.node_info.gpus import tell
from pytest_gpucluster.nvml import PyNvml


def write(line: dict[str, Any]) -> None:
    """Write one thing; at once, since the next question may never be answered."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    tell(PyNvml, write)
