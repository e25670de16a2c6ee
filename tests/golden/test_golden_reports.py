"""Every report of the example runs, to the letter.

After a change of a report: ``python tests/golden/regenerate.py``, and then read the diff.
"""

import functools
import re

import pytest
from example_runs import NAMES
from regenerate import REPORTS, reports_of

from pytest_gpucluster.reports.registry import FILES


@functools.cache
def rendered(name):
    found = dict(reports_of(name))
    # Up to 0.25 prometheus_client writes 7.3e+014 for 7.3e+14, which Prometheus reads as the same number.
    found["metrics.prom"] = re.sub(r"(?m)(e[+-])0(\d\d)$", r"\1\2", found["metrics.prom"])
    return found


def test_there_is_a_folder_for_each_run_and_in_it_only_what_is_compared():
    assert sorted(path.name for path in REPORTS.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert sorted(path.name for path in (REPORTS / name).iterdir()) == sorted(rendered(name))
    assert set(rendered("cluster")) == set(FILES.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_reports_of_a_run_are_what_was_looked_at(name):
    for file, text in rendered(name).items():
        # Line by line: a comparison of whole pages takes pytest minutes to tell.
        expected = (REPORTS / name / file).read_bytes().decode("utf-8").split("\n")
        found = text.split("\n")
        different = next(
            (number for number, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            None if len(expected) == len(found) else min(len(expected), len(found)),
        )
        if different is not None:
            was, is_now = ("".join(lines[different : different + 1])[:2000] for lines in (expected, found))
            pytest.fail(f"reports/{name}/{file}:{different + 1}:\nexpected: {was}\nfound:    {is_now}", pytrace=False)
