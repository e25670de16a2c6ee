"""What programs say of their own options: those of Slurm and kubectl, where they are installed."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_SLURM_CONF = "ClusterName=docs\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=docs Nodes=ALL\n"
"""Slurm's programs want a configuration before they tell their options."""
_HELP_SECONDS = 60


@functools.cache
def slurm_options(program: str) -> Mapping[str, bool | None] | None:
    """Each option of a program of Slurm: whether it takes a value, None where it may; None if it is not installed."""
    if shutil.which(program) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder, "slurm.conf")
        configuration.write_text(_SLURM_CONF, encoding="utf-8")
        text = _said([program, "--help"], SLURM_CONF=str(configuration))
    found: dict[str, bool | None] = {}
    for match in re.finditer(r"^ {2,8}(?:(-\w),? +)?(--[\w-]+)(\[?=)?", text, re.MULTILINE):
        takes = {None: False, "=": True, "[=": None}[match[3]]
        for name in filter(None, (match[1], match[2])):
            found[name] = takes
    # Its help has no value beside it: `--container=path`, sbatch(1).
    found |= {"--container": True} if "--container" in found else {}
    return found


@functools.cache
def kubectl_options(*words: str) -> Mapping[str, bool] | None:
    """Each option of a command of kubectl, and whether it takes a value; empty: there is no such command.

    None if kubectl is not installed.
    """
    if shutil.which("kubectl") is None:
        return None
    text = _said(["kubectl", *words, "--help"])
    # kubectl shows the help of what is above a word that it does not know.
    if not re.search(rf"^\s+kubectl {' '.join(words)}(\s|$)", text, re.MULTILINE):
        return {}
    found = {"-h": False, "--help": False}
    text += _said(["kubectl", "options"])
    for match in re.finditer(r"^ {4}(?:(-\w), )?(--[\w-]+)=(.*):$", text, re.MULTILINE):
        for name in filter(None, (match[1], match[2])):
            found[name] = match[3] not in ("true", "false")
    return found


@functools.cache
def kubectl_commands(*above: str) -> frozenset[str]:
    """The words that may follow, such as the verbs of kubectl, or what `kubectl create` makes."""
    text = _said(["kubectl", *above, "--help"])
    part = re.findall(r"^(?:[A-Z][^\n]*Commands[^\n]*:|Available Commands:)\n((?: {2}\S.*\n)+)", text, re.MULTILINE)
    return frozenset(re.findall(r"^  (\S+)", "".join(part), re.MULTILINE))


def _said(words: Sequence[str], **environment: str) -> str:
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=_HELP_SECONDS,
        check=False,
        env={**os.environ, **environment, "LC_ALL": "C"},
    )
    return done.stdout + done.stderr
