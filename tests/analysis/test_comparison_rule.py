"""When a value counts as worse, and how a comparison is shown."""

import json
import math
import random
import re

import pytest
from each import of_each
from written_runs import HBM, MATMUL, case, measured, read

from pytest_gpucluster.analysis.compare import allowance, assess, compare_runs
from pytest_gpucluster.analysis.compare_output import comparison_blocks, comparison_document
from pytest_gpucluster.analysis.output import as_text
from pytest_gpucluster.analysis.run_view import RunView, estimate
from pytest_gpucluster.errors import OptionError


def about(value, width=0.01):
    return estimate(value, (value * (1 - width / 2), value * (1 + width / 2)))


def bare(value):
    return estimate(value, None)


CHANGES = {
    "surely worse by more than is allowed": (about(100), about(90), True, "regressed", -0.10),
    "surely worse, and allowed": (about(100), about(98), True, "worse", -0.02),
    "within noise": (about(100), about(99.5), True, "within noise", -0.005),
    "the noise before is as large": (about(100, 0.3), about(90), True, "unsure", -0.10),
    "the noise now is as large": (about(100), about(90, 0.3), True, "unsure", -0.10),
    "better": (about(100), about(104), True, "better", 0.04),
    "the same": (about(100), about(100), True, "same", 0.0),
    "less is better: surely worse": (about(20), about(25), False, "regressed", -0.25),
    "less is better: better": (about(20), about(15), False, "better", 0.25),
    "exactly what is allowed": (bare(100), bare(97), True, "worse", -0.03),
    "no samples excuse nothing": (bare(100), bare(96.9), True, "regressed", -0.031),
    "from nothing to something bad": (bare(0), bare(3), False, "regressed", -math.inf),
    "from nothing to something good": (bare(0), bare(3), True, "better", math.inf),
    "nothing any more": (bare(100), bare(0), True, "regressed", -1.0),
}


@of_each("case", list(CHANGES))
def test_a_value_is_compared_with_an_earlier_one(case):
    old, new, higher, kind, change = CHANGES[case]
    found = assess(old, new, higher=higher, allowed=0.03)
    assert (found.kind, pytest.approx(found.change_ratio)) == (kind, change)


@of_each("bad", [math.nan, math.inf, -1.0])
def test_what_is_no_value_is_not_comparable_and_never_fine(bad):
    for old, new in ((bare(bad), bare(1.0)), (bare(1.0), bare(bad))):
        found = assess(old, new, higher=True, allowed=0.03)
        assert found.kind == "not comparable"


def test_of_a_value_without_samples_the_limit_says_what_is_much():
    tiny, more = bare(1e-9), bare(3e-9)
    assert assess(tiny, more, higher=False, allowed=0.03, limit_max=1e-5).kind == "worse"
    assert assess(tiny, more, higher=False, allowed=0.03).kind == "regressed"
    assert assess(tiny, bare(1e-6), higher=False, allowed=0.03, limit_max=1e-5).kind == "regressed"
    # With samples on both sides it is known how sure the values are, and nothing is excused.
    assert assess(about(1e-9), about(3e-9), higher=False, allowed=0.03, limit_max=1e-5).kind == "regressed"
    # Nothing wrong is allowed: there is no yardstick for one wrong word.
    assert assess(bare(0), bare(1), higher=False, allowed=0.03, limit_max=0.0).kind == "regressed"


INTERVALS = {
    "its interval": ((9.0, 11.0), (1.0, 2.0), (9.0, 11.0, True)),
    "few samples": (None, (9.0, 10.0, 11.0), (9.0, 11.0, True)),
    "nothing": (None, (), (10.0, 10.0, False)),
    "foreign interval": ((11.0, 12.0), (), (10.0, 10.0, False)),
    "foreign samples": (None, (100.0, 200.0), (10.0, 10.0, False)),
    "NaN": (None, (math.nan, 10.0), (10.0, 10.0, False)),
    "endless": ((-math.inf, math.inf), (), (10.0, 10.0, False)),
    "NaN interval": ((math.nan, math.nan), (), (10.0, 10.0, False)),
}


def test_the_noise_of_a_value_is_its_own_or_none():
    estimates = {name: estimate(10.0, interval, samples) for name, (interval, samples, _) in INTERVALS.items()}
    assert {name: (found.low, found.high, found.interval is not None) for name, found in estimates.items()} == {
        name: expected for name, (_, _, expected) in INTERVALS.items()
    }
    found = estimate(10.0, None, tuple(random.Random(1).sample([float(number) for number in range(1, 20)], 19)))
    assert found.interval is not None
    assert 1.0 < found.low < 10.0 < found.high < 19.0


def test_a_percentage_is_read_and_nothing_else_is_one():
    assert [allowance(text) for text in ("3%", " 0.5 % ", "3", "0")] == [0.03, 0.005, 0.03, 0.0]
    for text in ("", "three", "-3%", "100%", "nan", "1e1%", "3%%", "\u0663%", "3 GB"):
        with pytest.raises(OptionError):
            allowance(text)


EVIL = "<script>\x1b[31m\u202eevil\n\x00" + "x" * 10_000


def text(old, new, *, width=80, everything=False, **more):
    found = compare_runs(RunView.of(old), RunView.of(new), **more)
    return as_text(comparison_blocks(found, old, new, everything=everything), width)


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
        "    rank 1 (gpu-a, GPU 1 GPU-gpu-a-1)",
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
