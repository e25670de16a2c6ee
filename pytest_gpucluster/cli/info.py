"""``gpucluster info``: what this node is, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from pytest_gpucluster.cli.command import DONE, explain

_INFO = """\
Tell what this node is: CPUs, NUMA nodes, memory, GPUs and what connects them, NVLink, InfiniBand, driver stack, mounts,
network, and the Slurm job or the pod that this is in. It takes some seconds at most, changes nothing, needs no root,
and also works where there is no GPU: what is not there is said.
"""

_EXAMPLES = """\
  gpucluster info
  gpucluster info gpu
  gpucluster info all --json > node.json
"""

_EXIT_CODES = """\
exit codes:
  0  told, also where something is not available
  2  wrong usage
  4  the output cannot be written
"""

_VIEWS = {
    "summary": "a few lines on each part (default)",
    "gpu": "driver stack, each GPU, and the topology",
    "ib": "InfiniBand and RoCE ports, and network interfaces",
    "cpu": "system, CPUs, NUMA nodes, memory and limits",
    "all": "everything",
}

_LEAST_COLUMNS = 72
"""A table of GPUs cannot be narrower without cutting its numbers; a terminal that is breaks its lines."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``info``."""
    views = "views:\n" + "".join(f"  {name:<8} {what}\n" for name, what in _VIEWS.items())
    explain(parser, f"{_INFO}\n{views}", _EXAMPLES, _EXIT_CODES)
    parser.add_argument("view", metavar="VIEW", nargs="?", choices=_VIEWS, default="summary", help="one of these views")
    parser.add_argument("--json", action="store_true", help="as one JSON object, whose keys are in docs/info.md")


def run(options: argparse.Namespace) -> int:
    """Tell what this node is."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.node.info import Sources, gather_info
    from pytest_gpucluster.node.info_text import render_info

    told = gather_info(options.view, Sources())
    text = json.dumps(told, indent=2, allow_nan=False) + "\n" if options.json else render_info(told, width=_width())
    sys.stdout.write(text)
    return DONE


def _width() -> int:
    """Return the columns of the terminal; elsewhere COLUMNS, or 80."""
    if sys.stdout.isatty():
        return max(_LEAST_COLUMNS, shutil.get_terminal_size().columns)
    told = os.environ.get("COLUMNS", "")
    return max(_LEAST_COLUMNS, int(told)) if told.isascii() and told.isdecimal() and len(told) < 6 else 80
