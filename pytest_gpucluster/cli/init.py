"""``gpucluster init``: the files of a site, which it edits and keeps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pytest_gpucluster import __version__
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.launch.suite import PACKAGE

_LIMITS = """\
# Limits of this site; they replace the shipped ones. What holds now, and why:
#   gpucluster thresholds explain --sku "H100 SXM" --world-size 16 --nnodes 2 nccl.all_reduce.busbw
# What is wrong with this file:   gpucluster thresholds check limits.yaml
# A run by it:                    gpucluster run -- --gpucluster-thresholds=limits.yaml
schema_version: 1
every_sku:
  limits:
    gpu.findings: {max: 0 findings, source: "as shipped: an example of an entry"}
# skus:
#   H100 SXM:
#     limits:
#       nccl.all_reduce.busbw:
#         - when: {world_size: 16, nnodes: 2, size: 1 GB or more}
#           min: 380 GB/s
#           source: contract with the vendor, annex 2
"""
FILES = {
    "limits": {},
    "slurm": {"slurm/acceptance.sbatch": "deploy/slurm/acceptance.sbatch", "slurm/job.sh": "deploy/slurm/job.sh"},
    "kubernetes": {"kubernetes": "deploy/kubernetes"},
    "hosts": {"bare-metal/hosts.example": "hosts"},
    "github": {"github/acceptance.yml": ".github/workflows/acceptance.yml"},
    "gitlab": {"gitlab/gitlab-ci.yml": ".gitlab-ci.yml"},
    "jenkins": {"jenkins/Jenkinsfile": "Jenkinsfile"},
}
"""What -> file or folder of deploy/ -> its place at the site."""
_WHEEL = f"pytest_gpucluster-{__version__}-py3-none-any.whl"
_ADAPTED = {
    "-c constraints.txt -e '.[lora,vision]'": f'"pytest-gpucluster[lora,vision] @ file://$PWD/{_WHEEL}"',
    " -- acceptance/ ": " -- ",
}
"""What needs a checkout -> what does without."""


@cli.command(
    cli.argument("what", f"any of {', '.join(FILES)}", nargs="+", choices=list(FILES), metavar="WHAT"),
    examples="""\
        gpucluster init limits slurm
        gpucluster init limits hosts gitlab
        """,
    codes={},
)
def _init(options: argparse.Namespace) -> int:
    """Write files for a site into this folder, to be edited. No file is ever replaced.

    limits are an empty file of limits for --gpucluster-thresholds; slurm a batch script; kubernetes all manifests for
    kustomize; hosts a list of nodes for `gpucluster run --hosts`; github, gitlab and jenkins a job that accepts a node.
    """
    written = [found for what in dict.fromkeys(options.what) for found in _contents(what)]
    if there := [str(place) for place, _, _ in written if place.exists()]:
        raise cli.CommandError(
            cli.NO_OUTPUT, f"nothing was written: {', '.join(there)} exists; move it, or leave it out"
        )
    for place, text, mode in written:
        with cli.file_errors(cli.NO_OUTPUT, str(place)):
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("x", encoding="utf-8") as file:
                file.write(text)
            place.chmod(mode)
        print(place)
    if any(_WHEEL in text for _, text, _ in written):
        print(f"The job installs {_WHEEL} of this folder: copy it here, or change that line.")
    return 0


def _contents(what: str) -> Iterator[tuple[Path, str, int]]:
    """Yield the place, content and mode of each file. A checkout has deploy/ at its top, a wheel inside the package."""
    if what == "limits":
        yield Path("limits.yaml"), _LIMITS, 0o644
    deploy = next(path for folder in (PACKAGE, PACKAGE.parent) if (path := folder / "deploy").is_dir())
    for name, target in FILES[what].items():
        source = deploy / name
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                for old, new in _ADAPTED.items() if what in ("github", "gitlab", "jenkins") else ():
                    text = text.replace(old, new)
                yield Path(target) / path.relative_to(source), text, path.stat().st_mode & 0o777


COMMAND = _init
