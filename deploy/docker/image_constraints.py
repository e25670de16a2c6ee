"""Print pip constraints for an image that brings its own torch.

NVIDIA's image has a torch of its own (a build such as 2.13.0a0+9186a08b2c.nv26.07), with its CUDA and NCCL.
``constraints.txt`` names another one. Here the lines of the packages to keep are replaced by the very versions that are
installed, so pip can neither replace them nor bring a second copy of them: it must take what is there, or fail.

    python image_constraints.py constraints.txt --keep torch numpy > image-constraints.txt

Runs on any Python from 3.10 on, without further packages. Ends with 1 where a package to keep is not installed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def image_constraints(lines: Iterable[str], kept: Mapping[str, str]) -> list[str]:
    """Return the constraints with each package in `kept` at its installed version, and comments left out.

    Args:
        lines: of a constraints file.
        kept: distribution -> its installed version.
    """
    kept = {normalized(name): version for name, version in kept.items()}
    others = [text for line in lines if (text := line.partition("#")[0].strip()) and _name(text) not in kept]
    return sorted([*others, *(f"{name}=={version}" for name, version in kept.items())])


def normalized(name: str) -> str:
    """Return a distribution's name as pip compares it.

    Source: https://packaging.python.org/en/latest/specifications/name-normalization/
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(line: str) -> str:
    match = _NAME.match(line)
    return normalized(match[0]) if match else ""


def main(arguments: list[str]) -> int:
    """Print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("constraints", type=Path, help="the project's constraints.txt")
    parser.add_argument("--keep", nargs="+", required=True, metavar="PACKAGE", help="packages of the image")
    options = parser.parse_args(arguments)
    kept = {}
    for name in options.keep:
        try:
            kept[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            print(
                f"image_constraints: {name} is not installed in {sys.prefix}, so there is none to keep.\n"
                "what to do: build on an image that has it (BASE_IMAGE), or leave it out of --keep",
                file=sys.stderr,
            )
            return 1
    print("\n".join(image_constraints(options.constraints.read_text(encoding="utf-8").splitlines(), kept)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
