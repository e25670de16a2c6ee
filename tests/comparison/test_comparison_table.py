"""A comparison as text that fits the terminal, and as JSON."""

from __future__ import annotations

import json

import pytest
from written_runs import HBM, MATMUL, case, measured, place, read

from pytest_gpucluster.comparison.compared import compare
from pytest_gpucluster.comparison.document import document
from pytest_gpucluster.comparison.side import side
from pytest_gpucluster.comparison.table import change_text, table

EVIL = "<script>\x1b[31m\u202eevil\n\x00" + "x" * 10_000


def text(old, new, *, width=80, everything=False, **more):
    return table(
        compare(side(old), side(new), **more),
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


def test_a_regression_is_told_with_its_values_and_its_rank():
    assert text(OLD, NEW) == (
        "REGRESSION: 1 result is worse than before beyond noise and by more than 3 % (1\n"
        "  regressed, 3 same)\n"
        "\n"
        "           change      before         now\n"
        "regressed  -17.9 %  731 TFLOPS  600 TFLOPS\n".replace(
            "           change      before", "            change      before"
        )
        + "    test_matmul: matmul.bf16.tflops{n=16384}\n"
        "    rank 1 (gpu-a)\n"
        "\n"
        "1 more metrics are the same, within noise, or decide nothing; --all shows them\n"
    )


def test_all_of_it_is_shown_where_that_is_asked_for():
    shown = text(OLD, NEW, everything=True)
    assert "hbm.copy.bandwidth" in shown
    assert "--all" not in shown


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal_and_nothing_acts_on_it(width):
    def hostile(*values):
        one = measured(values, **{EVIL: EVIL})
        return read(case(f"t.py::test_{EVIL}", "passed", one), case("t.py::b", "failed", message=EVIL))

    shown = text(hostile(1e300, 5.0), hostile(1e-300, 4.0), width=width, everything=True)
    assert max(map(len, shown.splitlines())) <= width
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_change_beyond_ten_times_is_not_counted():
    assert [change_text(each) for each in (-0.0004, 0.5, -66.0, float("-inf"), float("inf"))] == [
        "-0.0 %",
        "+50.0 %",
        "< -1000 %",
        "< -1000 %",
        "> +1000 %",
    ]


def test_many_ranks_are_told_by_the_first_few():
    ranks = [place(rank) for rank in range(64)]
    old = read(case(MATMUL, "passed", measured([700] * 64)), ranks=ranks)
    new = read(case(MATMUL, "passed", measured([600 - rank for rank in range(64)])), ranks=ranks)
    shown = text(old, new)
    assert "rank 63 (gpu-a)\n" in shown
    assert "and 60 more, 64 of 64 in all" in shown


def test_the_json_has_every_rank_and_no_number_that_json_lacks():
    old = read(case(MATMUL, "passed", measured([0, 730], "hbm.copy.bandwidth", width=None)))
    new = read(case(MATMUL, "passed", measured([5, "NaN"], "hbm.copy.bandwidth", width=None)))
    compared = compare(side(old), side(new))
    found = json.loads(document(compared, old={"journal": EVIL}, new={}, exit_code=5))
    assert (found["schema_version"], found["answer"], found["exit"], found["allowed_ratio"]) == (
        1,
        "UNDECIDED",
        5,
        0.03,
    )
    [change] = found["changes"]
    assert change["better"] == "higher"
    told = {value["rank"]: (value["kind"], value["change_ratio"], value["new"]["value"]) for value in change["values"]}
    assert told == {0: ("better", "Infinity", 5.0), 1: ("not comparable", None, "NaN")}
