"""Write the expected errors of the broken limit files in this folder anew.

python tests/golden/regenerate.py

Then read the diff line by line: a test that is made equal to what the code says proves nothing until someone has.
"""

from __future__ import annotations

from pathlib import Path

from pytest_gpucluster import thresholds
from pytest_gpucluster.errors import ThresholdsError

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.yaml"))


def errors_of(path: Path) -> str:
    """Return what the loader says about a file, without the folder it lies in."""
    try:
        thresholds.load(path)
    except ThresholdsError as error:
        return str(error).replace(f"{path}:", f"{path.name}:") + "\n"
    return ""


if __name__ == "__main__":
    for path in FILES:
        path.with_suffix(".txt").write_text(errors_of(path), encoding="utf-8")
