"""A comparison as text that fits the terminal, and as JSON."""

from __future__ import annotations

import json
import re

from each import of_each
from written_runs import HBM, MATMUL, case, measured, read

from pytest_gpucluster.analysis.compare import compare_runs
from pytest_gpucluster.analysis.compare_output import comparison_document, comparison_table
from pytest_gpucluster.analysis.run_view import RunView

EVIL = "<script>\x1b[31m\u202eevil\n\x00" + "x" * 10_000


def text(old, new, *, width=80, everything=False, **more):
    return comparison_table(
        compare_runs(RunView.of(old), RunView.of(new), **more),
        old_name="rank {}".format,
        new_name="rank {} (gpu-a)".format,
        width=width,
        everything=everything,
    )


OLD = read(
    case(MATMUL, "passed", measured([730, 731], n="16384")),
    case(HBM, "passed", measured([3.0, 3.0], "hbm.copy.bandwidth")),
)
NEW = read(
    case(MATMUL, "passed", measured([730, 600], n="16384")),
    case(HBM, "passed", measured([3.0, 3.0], "hbm.copy.bandwidth")),
)


def test_a_regression_is_shown_with_its_values_and_its_rank():
    head, *rest = text(OLD, NEW).split("\n\n")
    assert head.startswith("REGRESSION: 1 ")
    assert "1 regressed, 3 same" in " ".join(head.split())
    assert rest[0].splitlines()[1:] == [
        "regressed  -17.9 %  731 TFLOPS  600 TFLOPS",
        "    test_matmul: matmul.bf16.tflops{n=16384}",
        "    rank 1 (gpu-a)",
    ]
    assert re.match("1 more .*--all", rest[1])
    assert "hbm.copy.bandwidth" in text(OLD, NEW, everything=True)


@of_each("width", [20, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal_and_nothing_acts_on_it(width):
    def hostile(*values):
        one = measured(values, **{EVIL: EVIL})
        return read(case(f"t.py::test_{EVIL}", "passed", one), case("t.py::b", "failed", message=EVIL))

    shown = text(hostile(1e300, 5.0), hostile(1e-300, 4.0), width=width, everything=True)
    assert max(map(len, shown.splitlines())) <= width
    assert all(line.isprintable() for line in shown.splitlines())


def test_the_json_has_every_rank_and_no_number_that_json_lacks():
    old = read(case(MATMUL, "passed", measured([0, 730], "hbm.copy.bandwidth", width=None)))
    new = read(case(MATMUL, "passed", measured([5, "NaN"], "hbm.copy.bandwidth", width=None)))
    compared = compare_runs(RunView.of(old), RunView.of(new))
    found = json.loads(comparison_document(compared, old={"journal": EVIL}, new={}, exit_code=5))
    assert (found["schema_version"], found["answer"], found["exit"], found["allowed_ratio"]) == (
        1,
        "UNDECIDED",
        5,
        0.03,
    )
    [change] = found["changes"]
    assert change["better"] == "higher"
    by_rank = {
        value["rank"]: (value["kind"], value["change_ratio"], value["new"]["value"]) for value in change["values"]
    }
    assert by_rank == {0: ("better", "Infinity", 5.0), 1: ("not comparable", None, "NaN")}
