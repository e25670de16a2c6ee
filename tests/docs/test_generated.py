"""Every generated file is what the code and the declarations of criteria make."""

import re
import runpy

from pages import ROOT

from pytest_gpucluster.session import options


def test_every_generated_file_is_current():
    files = runpy.run_path(str(ROOT / "docs" / "generate.py"), run_name="generate")["files"]()
    stale = [str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"


def test_every_variable_of_this_project_has_a_row():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pytest_gpucluster").rglob("*.py"))
    named = set(re.findall(r"\bGPUCLUSTER_[A-Z_]*[A-Z]\b", source)) - {option.variable for option in options.OPTIONS}
    assert sorted(named) == sorted(runpy.run_path(str(ROOT / "docs" / "reference.py"))["VARIABLES"])
