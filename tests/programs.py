"""Programs that only some tests need: where they are, and what to install for those that are missing."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

PACKAGES = {
    "cc": "gcc",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "g++": "g++",
    "mpirun": "openmpi-bin",
    "node": "nodejs",
    "npm": "npm",
    "openssl": "openssl",
    "pdftotext": "poppler-utils",
    "promtool": "prometheus",
    "sacct": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "scancel": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "squeue": "slurm-wlm",
    "srun": "slurm-wlm",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
"""Program -> the Debian package that has it. kubectl is not here: Debian 12's is too old (CONTRIBUTING.md)."""

_ELSEWHERE = os.pathsep.join((str(Path(sys.executable).parent), "/usr/sbin", "/usr/local/sbin", "/sbin"))
_missed = {}
"""Missing program -> the tests that were skipped for it."""


def find_program(name):
    """Return the path of a program, or None. Programs of PyPI lie beside Python, daemons where only root looks."""
    return shutil.which(name) or shutil.which(name, path=_ELSEWHERE)


def needs_modules(*names):
    """Skip the tests of a module where one of these is not installed; without importing them, which takes seconds."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"could not import {', '.join(missing)}")


def require_program(name):
    """Return the path of a program. Where it is missing the test is skipped, and the end of the run says so."""
    path = find_program(name)
    if path is None:
        skip_without(name, f"{name} is not installed")
    return path


def skip_without(name, why):
    """Skip the test for want of a program, which is missing or of no use."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    _missed.setdefault(name, set()).add(test)
    pytest.skip(why)


def missing_programs():
    """Return a line for each program for which tests were skipped: how many, and what brings it."""
    lines = []
    for name, tests in sorted(_missed.items()):
        package = PACKAGES.get(name)
        remedy = "see CONTRIBUTING.md" if package is None else f"apt-get install {package}"
        lines.append(f"{len(tests)} tests need {name}: {remedy}")
    return lines
