"""Every generated file is what the code and the declarations of criteria make."""

import runpy

from pages import ROOT


def test_every_generated_file_is_current():
    files = runpy.run_path(str(ROOT / "docs" / "generate.py"), run_name="generate")["files"]()
    stale = [str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"
