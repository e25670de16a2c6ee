"""Drain the nodes that a run has found to be bad, so that Slurm allocates them only after an operator has looked.

    pytest -p drain_slurm_nodes ...                     # with this folder on PYTHONPATH
    pytest_plugins = ["drain_slurm_nodes"]              # or in the conftest.py of the suite

It drains the nodes in ``exclude.txt``: those that the isolation has confirmed, or at which a test failed that names
them. It does so only if the run was REJECTED on GPUs, never after a rehearsal or on a simulated cluster. The user
needs the right to change nodes (Slurm's operator or admin). A failure is an error that is shown and kept in the run's
folder; the verdict stays.

Source: https://slurm.schedmd.com/scontrol.html (update node: State=DRAIN with a Reason).
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from pytest_gpucluster import compress_hostlist

if TYPE_CHECKING:
    from pytest_gpucluster import VerdictRecord

SECONDS = 30
"""A controller that does not answer by then gets no more time: the launcher waits for this process."""


def pytest_gpucluster_verdict(record: VerdictRecord) -> None:
    """Drain the hosts of exclude.txt."""
    if record.verdict != "REJECTED" or record.kind or not record.excluded:
        return
    nodes = compress_hostlist(record.excluded)
    reason = f"pytest-gpucluster job {record.job_id}: found to be bad, see {record.directory}"
    # A list of words: no shell reads what a host or a folder is called.
    command = ["scontrol", "update", f"NodeName={nodes}", "State=DRAIN", f"Reason={reason}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{nodes} not drained: scontrol ended with {done.returncode}: {done.stderr.strip()}")
    print(f"drained: {nodes}")
