from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster import hardware, metrics, thresholds, units
from pytest_gpucluster.errors import MeasurementError, ThresholdsError
from pytest_gpucluster.thresholds import Condition, Limit, Thresholds

BUSBW = "nccl.all_reduce.busbw"


def entry(text: str, *, sku: str = "H100 SXM", metric: str = "matmul.bf16.tflops") -> str:
    """Wrap one entry, given in flow style, into a whole file; it starts at line 5, column 27 for bf16."""
    return f"schema_version: 1\nskus:\n  {sku}:\n    limits:\n      {metric}: {text}\n"


def read(tmp_path: Path, *files: str, shipped: bool = False) -> Thresholds:
    paths = [thresholds.shipped_path()] if shipped else []
    for number, text in enumerate(files):
        paths.append(tmp_path / f"limits{number}.yaml")
        paths[-1].write_text(text, encoding="utf-8")
    return thresholds.load(*paths)


def errors_of(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ThresholdsError) as caught:
        thresholds.load(Path("my.yaml"))
    return str(caught.value).splitlines()


OK = "min: 700 TFLOPS, source: us"
BROKEN = {
    "empty file": ("", []),
    "only a comment": ("# nothing\n", []),
    "no mapping": ("- 1\n", []),
    "nothing in it": ("schema_version: 1\n", []),
    "no version": ("skus: {H200: {nvml_name: mine}}\n", []),
    "newer version": (entry("{" + OK + "}").replace(": 1", ": 2", 1), []),
    "octal version": (entry("{" + OK + "}").replace(": 1", ": 01", 1), []),
    "empty skus": ("schema_version: 1\nskus:\n", []),
    "unknown top key": ("schema_version: 1\nsku: {}\n", []),
    "unknown sku": (entry("{" + OK + "}", sku="H100 SMX"), []),
    "empty sku": ("schema_version: 1\nskus:\n  H200:\n", []),
    "unknown metric": (entry("{" + OK + "}", metric="matmul.bf61.tflops"), []),
    "unknown key": (entry("{mim: 700 TFLOPS, source: us}"), []),
    "duplicate key": (entry("{" + OK + ", min: 800 TFLOPS}"), []),
    "duplicate metric": (
        entry("{" + OK + "}") + "      matmul.bf16.tflops: {min: 1 TFLOPS, source: us}\n",
        [],
    ),
    "merge key": (entry("{<<: {" + OK + "}}"), []),
    "wrong case": (entry("{min: 400 gb/s, source: us}", metric=BUSBW), []),
    "wrong dimension": (entry("{min: 400 GiB, source: us}", metric=BUSBW), []),
    "no unit": (entry("{min: 700, source: us}"), []),
    "not a number": (entry("{min: .nan TFLOPS, source: us}"), []),
    "negative": (entry("{min: -1 TFLOPS, source: us}"), []),
    "zero floor": (entry("{min: 0 TFLOPS, source: us}"), []),
    "empty min": (entry("{min: , source: us}"), []),
    "null source": (entry("{min: 700 TFLOPS, source: ~}"), []),
    "no source": (entry("{min: 700 TFLOPS}"), []),
    "no bound": (entry("{source: us}"), []),
    "bound of the wrong side": (entry("{max: 700 TFLOPS, source: us}"), []),
    "latency with a floor": (entry("{min: 1 us, source: us}", metric="nccl.all_reduce.latency"), []),
    "min above max": (entry("{min: 800 TFLOPS, max: 700 TFLOPS, source: us}"), []),
    "above the peak": (entry("{min: 990 TFLOPS, source: us}"), []),
    "busbw above any link": (entry("{min: 800 GB/s, source: us}", metric=BUSBW), []),
    "a factor of 1000 low": (entry("{min: 2333 MB/s, source: us}", metric="hbm.copy.bandwidth"), []),
    "record_only with min": (entry("{record_only: why, min: 700 TFLOPS}"), []),
    "record_only without reason": (entry("{record_only: ''}"), []),
    "list as value": (entry("{min: [700 TFLOPS], source: us}"), []),
    "empty list": (entry("[]"), []),
    "unknown condition": (entry("{when: {wrld_size: 8}, " + OK + "}"), []),
    "size under labels": (entry("{when: {labels: {size: 1 GB}}, " + OK + "}"), []),
    "size in words": (entry("{when: {size: large}, " + OK + "}"), []),
    "size as rate": (entry("{when: {size: 1 GB/s}, " + OK + "}"), []),
    "half a rank": (entry("{when: {world_size: 1.5 or more}, " + OK + "}"), []),
    "mixed range": (entry("{when: {size: 1 to 2 GB}, " + OK + "}"), []),
    "backward range": (entry("{when: {world_size: 8 to 2}, " + OK + "}"), []),
    "comparison": (
        "schema_version: 1\nskus:\n  H200:\n    limits:\n      matmul.bf16.tflops:\n"
        "        when:\n          size: >= 1 GB\n",
        [],
    ),
    "two entries that both apply": (
        entry("[{when: {world_size: 8}, " + OK + "}, {when: {nnodes: 1}, " + OK + "}]"),
        [],
    ),
    "bad pattern": ("schema_version: 1\nskus:\n  mine:\n    nvml_name: 'NVIDIA (X'\n", []),
    "any pattern": ("schema_version: 1\nskus:\n  mine:\n    nvml_name: .*\n", []),
    "a gpu as rehearsal": ("schema_version: 1\nskus:\n  cpu-rehearsal:\n    nvml_name: NVIDIA H200\n", []),
    "tab": ("schema_version: 1\nskus:\n\tH200: {}\n", []),
    "two documents": (entry("{" + OK + "}") + "---\n" + entry("{" + OK + "}"), []),
    "control character": ("schema_version: 1\nskus: \x07\n", []),
}
