"""Scripts on several ranks over gloo, without torchrun and pytest: for what benchmarks tell each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60

PREAMBLE = """
import json, os, sys
import torch
import torch.distributed as dist

rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
group, device = dist.group.WORLD, torch.device("cpu")

def say(value):
    print("SAID " + json.dumps(value), flush=True)
"""

# A process that still refers to a group when its interpreter ends may be aborted by gloo.
EPILOGUE = """
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def run(tmp_path: Path, body: str, *, ranks: int = 2) -> list[list[Any]]:
    """Run a script on so many processes; return what each one said. Past the deadline all are killed.

    The script has rank, world_size, group, device and say(value).
    """
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body) + EPILOGUE, encoding="utf-8")
    outputs = [tmp_path / f"rank-{rank}.txt" for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), str(rank), str(ranks), str(tmp_path / "store")],
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                    )
                )
        end = time.monotonic() + DEADLINE_SECONDS
        codes = [process.wait(timeout=max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    assert codes == [0] * ranks, "\n".join(texts)
    return [
        [json.loads(line.removeprefix("SAID ")) for line in text.splitlines() if line.startswith("SAID ")]
        for text in texts
    ]
