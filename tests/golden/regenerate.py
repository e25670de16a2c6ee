"""Write anew what the tests here expect: the errors of the broken limit files, the reports of the example runs.

python tests/golden/regenerate.py

Then read the diff line by line: a test that is made equal to what the code says proves nothing until someone has.
"""

import re
import sys
import tempfile
from pathlib import Path

from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.journal import journal
from pytest_gpucluster.judge import loader
from pytest_gpucluster.reports import registry

sys.path.insert(0, str(Path(__file__).parent.parent))

import example_runs

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.yaml"))
REPORTS = FOLDER / "reports"
"""One folder a run, one file a report."""

_ELSEWHERE = re.compile(rb"(workloads\.yaml):[0-9]+:[0-9]+")
"""Where the suite's own file sets a value: a line that is added there is no change of a report."""
_OF_THE_PAGE = re.compile(r"(<(style|script)\b[^>]*>).*?(</\2>)|sha256-[A-Za-z0-9+/=]+", re.DOTALL)
"""Style and script of the page are the same for every run, and are looked at in a browser."""


def errors_of(path):
    """Return what the loader says about a file, without the folder it lies in."""
    try:
        loader.load(path)
    except ThresholdsError as error:
        return str(error).replace(f"{path}:", f"{path.name}:") + "\n"
    return ""


def reports_of(name):
    """Yield file name and content of each report of an example run."""
    with tempfile.TemporaryDirectory() as place:
        run = example_runs.write(Path(place) / "run", name)
        path = run / journal.JOURNAL_FILE
        path.write_bytes(_ELSEWHERE.sub(rb"\1:7:7", path.read_bytes()))
        found = journal.read(path, keep_samples=False)
        for kind, file in registry.FILES.items():
            text = registry.render(kind, found, folder=run)
            # Of each kind of run one page is enough: most of it is figures.
            if kind != "html":
                yield file, text
            elif name in ("cluster", "rehearsal", "broken"):
                yield file, _OF_THE_PAGE.sub(lambda match: f"{match[1] or '(digest)'}{match[3] or ''}", text)


if __name__ == "__main__":
    for path in FILES:
        path.with_suffix(".txt").write_text(errors_of(path), encoding="utf-8")
    for name in example_runs.NAMES:
        for file, text in reports_of(name):
            (REPORTS / name).mkdir(parents=True, exist_ok=True)
            (REPORTS / name / file).write_text(text, encoding="utf-8", newline="")
