"""The lines of the journal that say which limits were in force, and in which environment."""

import hashlib

from pytest_gpucluster.journal.journal import JournalBuilder
from pytest_gpucluster.session.run import environment_line, limits_line

RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"}


def test_the_files_of_the_limits_are_on_record_with_their_digests(tmp_path):
    shipped, overlay = tmp_path / "thresholds.yaml", tmp_path / "gone.yaml"
    shipped.write_text("x: 1\n")
    builder = JournalBuilder()
    builder.add(RUN)
    builder.add(limits_line(sku="H100", gpu_name="NVIDIA H100 80GB HBM3", files=[shipped, overlay]))
    limits = builder.journal().limits
    assert limits.sku == "H100"
    assert limits.gpu_name == "NVIDIA H100 80GB HBM3"
    files = [(file.path, file.sha256) for file in limits.files]
    assert files == [(str(shipped), hashlib.sha256(b"x: 1\n").hexdigest()), (str(overlay), "")]


def test_only_variables_that_change_what_is_measured_are_on_record():
    environ = {
        "NCCL_DEBUG": "INFO",
        "GPUCLUSTER_EXIT_NOTES": "/tmp/x",
        "SLURM_JOB_ID": "7",
        "HF_TOKEN": "secret",
        "SLURM_JOBID_TOKEN": "secret",
    }
    builder = JournalBuilder()
    builder.add(RUN)
    builder.add(environment_line(environ, "gpu-07"))
    found = builder.journal().environment
    assert found.host == "gpu-07"
    assert found.variables == {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}
    assert "Linux" in found.system
    assert found.cpus > 0
