"""nccl-tests for tests: outputs in its formats, and a program that stands in for it.

The formats are those of src/util.cu of nccl-tests (table, JSON of version 3), and of print_header in src/all_gather.cu
of 2.10 (table). What stands in the outputs was made up here; nothing was measured.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_BYTES = {"float": 4, "bfloat16": 2, "half": 2}


def table(
    sizes: dict[int, float],
    *,
    program: str = "all_reduce_perf",
    dtype: str = "bfloat16",
    hosts: tuple[str, ...] = ("gpu-a",),
    gpus: int = 8,
    per_process: int | None = None,
    wrong: float | str = 0,
    nccl: int = 22703,
    bounds: int | None = None,
) -> str:
    """Return what nccl-tests prints: size in bytes -> busbw in GB/s; in-place is 1 % above out-of-place.

    ``gpus`` is how many each host has, ``per_process`` how many a process has, by default all of a host.
    """
    per_process = gpus if per_process is None else per_process
    lines = [
        f"# nccl-tests version 2.17.6 nccl-headers={nccl} nccl-library={nccl}",
        f"# Collective test starting: {program}",
        f"# nThread 1 nGpus {per_process} minBytes {min(sizes, default=0)} maxBytes {max(sizes, default=0)} "
        "step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
    ]
    for number, host in enumerate(hosts):
        for gpu in range(gpus):
            rank = number * gpus + gpu
            lines.append(
                f"#  Rank {rank:2} Group  0 Pid {4000 + rank // per_process:6} on {host:>10} device {gpu:2} "
                f"[0000:{0x10 + gpu:02x}:00] NVIDIA H100 80GB HBM3"
            )
    halves = f"{'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
    lines += [
        "#",
        "#                                                              out-of-place                       in-place",
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {halves}  {halves}",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    for size, busbw in sizes.items():
        cells = "".join(
            f"  {100.0:7.2f}  {value / 1.75:6.2f}  {value:6.2f}  {_wrong_text(program, half, wrong):>6}"
            for half, value in enumerate((busbw / 1.01, busbw))
        )
        lines.append(f"{size:12}  {size // _BYTES[dtype]:12}  {dtype:>8}  {'sum':>6}  {-1:6}{cells}")
    counted = (0 if isinstance(wrong, str) else int(wrong > 0)) if bounds is None else bounds
    lines += [
        f"# {'Out of bounds values':20} : {counted} {'FAILED' if counted else 'OK'}",
        f"# {'Avg bus bandwidth':20} : {sum(sizes.values()) / max(1, len(sizes)):g} ",
        "#",
        f"# Collective test concluded: {program}",
        "",
    ]
    return "\n".join(lines) + "\n"


def _wrong_text(program: str, half: int, wrong: float | str) -> str:
    if isinstance(wrong, str) or (program == "sendrecv_perf" and half == 1):  # which has no in-place form
        return "N/A"
    return f"{wrong:g}"


def old_table(sizes: dict[int, float], *, error: str = "0e+00") -> str:
    """Return an all-gather's table of 2.10: no redop and root, and ``error`` instead of ``#wrong``."""
    rows = "\n".join(
        f"{size:12}  {size // 4:12}   float  {10.0:7.2f}  {busbw:6.2f}  {busbw:6.2f}  {error}"
        f"  {10.0:7.2f}  {busbw:6.2f}  {busbw:6.2f}  {error}"
        for size, busbw in sizes.items()
    )
    return f"""\
# nThread 1 nGpus 8 minBytes 1024 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid  41 on      gpu-a device  0 [0x10] NVIDIA A100-SXM4-80GB
#   Rank  7 Pid  41 on      gpu-a device  7 [0x17] NVIDIA A100-SXM4-80GB
#
#                                       out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
{rows}
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 100
#
"""


BLANK = """\
# nThread 1 nGpus 8 minBytes 1 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 validation: 0
#
# Using devices
#   Rank  0 Pid 167261 on localhost device  0 [0x00] A100-SXM4-40GB
#   Rank  7 Pid 167261 on localhost device  7 [0x00] A100-SXM4-40GB
#
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0   float             1.63    0.00    0.00    N/A     1.38    0.00    0.00    N/A
  1073741824      33554432   float           4335.5  247.66  216.71    N/A   4274.2  251.22  219.81    N/A
  8589934592     268435456   float            33508  256.36  224.31    N/A    33234  258.47  226.16    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 58.6481

"""
"""An all_to_all that leaves ``redop`` blank, of an Azure ND A100 v4; lines of 6 GPUs and most sizes are left out.
Source: microsoft/superbenchmark, tests/benchmarks/micro_benchmarks/test_cuda_nccl_bw_performance.py (MIT)."""


def document(
    sizes: dict[int, float],
    *,
    program: str = "./build/all_reduce_perf",
    dtype: str = "bfloat16",
    hosts: tuple[str, ...] = ("gpu-a",),
    gpus: int = 8,
    per_process: int | None = None,
    wrong: float | None = 0.0,
) -> dict[str, Any]:
    """Return what stands in the file of ``-J``: of each process only its first GPU is listed."""
    per_process = gpus if per_process is None else per_process

    def half(busbw: float) -> dict[str, Any]:
        return {"time": 100.0, "alg_bw": busbw / 1.75, "bus_bw": busbw, "nwrong": wrong}

    devices = [
        {"rank": number * gpus + gpu, "group": 0, "hostname": host, "device": gpu}
        for number, host in enumerate(hosts)
        for gpu in range(0, gpus, per_process)
    ]
    return {
        "version": 3,
        "args": [program, "-g", str(per_process)],
        "env": ["HOME=/root", "REGISTRY_TOKEN=hunter2"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": per_process, "validation": 1, "devices": devices},
        "results": [
            {
                "size": size,
                "count": size // _BYTES[dtype],
                "type": dtype,
                "redop": "sum",
                "root": "    -1",
                "out_of_place": half(busbw / 1.01),
                "in_place": half(busbw),
            }
            for size, busbw in sizes.items()
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
    }


def install(folder: Path, *programs: str) -> Path:
    """Put programs that stand in for nccl-tests into a folder; ``FAKE_NCCL_TESTS`` configures their behaviour."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in programs:
        path = folder / name
        path.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import nccl_tests\nsys.exit(nccl_tests.main({name!r}))\n"
        )
        path.chmod(0o755)
    return folder


def main(program: str) -> int:
    """Do what a program of nccl-tests does, as far as a test sees it.

    ``FAKE_NCCL_TESTS`` is JSON: ``busbw`` (size -> GB/s, "" for all others), ``wrong``, ``host``, ``gpus``, ``says``
    (instead of a table), ``exit``, ``json`` (whether it knows -J; "broken" for a file that ends in its middle),
    ``hangs``, ``bounds``, ``program`` (what it calls itself).
    """
    settings = json.loads(os.environ.get("FAKE_NCCL_TESTS", "{}"))
    words = sys.argv[1:]
    knows_json = settings.get("json", True)
    if "--help" in words:
        print(f"USAGE: {program} \n\t[-b,--minbytes <min size in bytes>]")
        if knows_json:
            print("\t[-J,--output_file <file> write output to filepath, if accessible.]")
        return 0
    given = dict(zip(words[::2], words[1::2], strict=True))
    with open(os.environ["FAKE_NCCL_TESTS_LOG"], "a") as log:
        log.write(" ".join([program, *words]) + "\n")
    if settings.get("hangs"):
        import time

        print("NCCL WARN no answer of a peer", flush=True)
        time.sleep(600)
    if "prints" in settings:
        print(settings["prints"])
        return int(settings.get("exit", 0))
    size, sizes = int(given["-b"]), {}
    while size <= int(given["-e"]):
        sizes[size] = settings["busbw"].get(str(size), settings["busbw"].get("", 0.0))
        size *= int(given.get("-f", "2"))
    shape = {
        "program": settings.get("program", program),
        "dtype": given["-d"],
        "hosts": tuple(settings.get("host", "gpu-a").split(",")),
        "gpus": int(settings.get("gpus", given["-g"])),
        "per_process": int(given["-g"]),
    }
    wrong = settings.get("wrong", 0)
    unchecked = isinstance(wrong, str)
    if "-J" in given and knows_json:
        text = json.dumps(document(sizes, wrong=None if unchecked else wrong, **shape))
        Path(given["-J"]).write_text(text[: len(text) // 2] if knows_json == "broken" else text)
    print(table(sizes, wrong=wrong, bounds=settings.get("bounds"), **shape), end="")
    return int(settings.get("exit", 1 if wrong and not unchecked else 0))
