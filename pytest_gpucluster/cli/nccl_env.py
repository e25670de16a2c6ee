"""``gpucluster nccl-env``: which of NCCL's variables this node needs, and which hurt it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import TYPE_CHECKING

from pytest_gpucluster.cli.command import DONE, explain

if TYPE_CHECKING:
    from pytest_gpucluster.node.fabric.nccl_facts import Advised, Facts

DIFFERS, NOT_KNOWN = 1, 3
SCHEMA_VERSION = 1

_NCCL_ENV = """\
Look at this node's network cards, interfaces, GPUs, container and job, and say which of NCCL's variables it needs,
which are set and hurt, and which are best left alone, each with the reason and its source. Nothing is set: that is done
by whoever runs the lines that are printed. Where the network is not known, nothing is advised.

Run it where the job will run: on a compute node, in the job's container.
"""

_EXAMPLES = """\
  gpucluster nccl-env
  eval "$(gpucluster nccl-env --format shell)"
  gpucluster nccl-env --format yaml
  srun --ntasks-per-node=1 gpucluster nccl-env --check
"""

_EXIT_CODES = """\
exit codes:
  0  told; with --check: what is set is as advised
  1  with --check: a variable should be set, or is set and hurts
  2  wrong usage
  3  with --check: nothing of that, and something could not be told
  4  the output cannot be written
"""

_FORMATS = {
    "text": "for people (default)",
    "shell": "lines for eval or source: export and unset",
    "slurm": "lines for a batch script, before srun",
    "yaml": "a list for env of a container in Kubernetes",
    "json": "everything, for programs; the keys are in docs/nccl-env.md",
}
_LEAST_COLUMNS = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``nccl-env``."""
    formats = "formats:\n" + "".join(f"  {name:<6} {what}\n" for name, what in _FORMATS.items())
    explain(parser, f"{_NCCL_ENV}\n{formats}", _EXAMPLES, _EXIT_CODES)
    parser.add_argument("--format", choices=_FORMATS, default="text", help="one of these formats")
    parser.add_argument("--check", action="store_true", help="end with 1 where something differs, with 3 where unknown")


def run(options: argparse.Namespace) -> int:
    """Say what this node needs."""
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.node.fabric.nccl_advice import advise
    from pytest_gpucluster.node.fabric.nccl_probe import Sources, gather_facts

    facts = gather_facts(Sources())
    advised = advise(facts)
    sys.stdout.write(_rendered(options.format, facts, advised))
    if not options.check:
        return DONE
    return DIFFERS if advised.differs else NOT_KNOWN if advised.unknown else DONE


def _rendered(form: str, facts: Facts, advised: Advised) -> str:
    from pytest_gpucluster.node.fabric import nccl_advice_text

    if form == "json":
        return json.dumps(_told(facts, advised), indent=2, allow_nan=False) + "\n"
    if form == "text":
        return nccl_advice_text.render_advice(facts, advised, width=_width())
    return {"shell": nccl_advice_text.shell, "slurm": nccl_advice_text.slurm, "yaml": nccl_advice_text.yaml}[form](
        facts, advised
    )


def _told(facts: Facts, advised: Advised) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "host": facts.host,
        "launcher": facts.launcher or None,
        "scheduler": facts.scheduler,
        "nnodes": facts.nnodes,
        "container": facts.container,
        "provider": facts.provider,
        "machine": facts.machine or None,
        "nccl": facts.nccl,
        "gpus": [{"name": gpu.name, "pci": gpu.pci} for gpu in facts.gpus],
        "nvlink": facts.nvlink,
        "nvls": facts.nvls,
        **advised.to_json(),
    }


def _width() -> int:
    """Return the columns of the terminal; elsewhere 80."""
    return max(_LEAST_COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 80
