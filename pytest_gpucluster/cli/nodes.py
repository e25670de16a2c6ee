"""``gpucluster nodes``: what many nodes report of themselves, and where they differ."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from pytest_gpucluster.cli.command import DONE, NO_JOURNAL, NO_OUTPUT, REGRESSED, USAGE, complain, explain, write_text
from pytest_gpucluster.errors import LaunchError

UNDECIDED = 5
_LEAST_COLUMNS = 60

_NODES = """\
Compare what many nodes are: CPUs, SMT, NUMA nodes, memory, limits, driver stack, GPUs, MIG, topology, InfiniBand ports,
network and mounts. The folder has a file for each node, NODE.json, made there by `gpucluster info all --json`;
deploy/slurm/discover.sbatch makes them all. Alike does not mean good: that is what the suite is for.
"""

_EXAMPLES = """\
  gpucluster nodes gpucluster-report/discover-4711/nodes
  gpucluster nodes answers/ --nodes 'gpu-[001-064]' --json nodes.json
"""

_EXIT_CODES = """\
exit codes:
  0  all nodes gave an answer, and are alike
  1  they differ
  2  wrong usage
  3  the folder cannot be read, or no node gave an answer
  4  the output cannot be written
  5  those that gave an answer are alike, but some gave none, or only one was asked
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``nodes``."""
    explain(parser, _NODES, _EXAMPLES, _EXIT_CODES)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="with a file NODE.json for each node")
    parser.add_argument("--nodes", metavar="HOSTLIST", help="the nodes that should have answered: gpu-[001-064]")
    parser.add_argument("--json", metavar="FILE", help="write all of it here as JSON; - is the standard output")


def run(options: argparse.Namespace) -> int:
    """Compare nodes and return the exit code."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.launch.hostlist import expand_hostlist
    from pytest_gpucluster.node import diff

    try:
        expected = expand_hostlist(options.nodes) if options.nodes is not None else []
        found = diff.read_answers(options.folder, expected)
    except LaunchError as error:
        return complain(f"--nodes: {error}", USAGE)
    except OSError as error:
        return complain(f"{options.folder}: {error.strerror or error}", NO_JOURNAL)
    compared = diff.compare_nodes(found.told)
    code = DONE if all(fact.alike for fact in compared) else REGRESSED
    if code == DONE and (found.without or (len(found.told) < 2 and len(expected) != 1)):
        code = UNDECIDED
    if not found.told:
        code = NO_JOURNAL
    if options.json is not None:
        try:
            write_text(options.json, diff.diff_document(found, compared, exit_code=code))
        except BrokenPipeError:
            raise  # who reads has had enough, which the command line knows how to take
        except OSError as error:
            return complain(f"--json {options.json}: {error.strerror or error}", NO_OUTPUT)
    if options.json not in ("-", "/dev/stdout"):
        width = max(_LEAST_COLUMNS, shutil.get_terminal_size((80, 24)).columns)
        write_text("-", diff.diff_table(found, compared, width=width))
    if not found.told:
        return complain(f"{options.folder}: no node gave an answer: NODE.json, of `gpucluster info all --json`", code)
    return code
