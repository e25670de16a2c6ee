import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.metrics import units

SYMBOLS = st.sampled_from(sorted(units.UNITS))
VALUES = st.floats(min_value=-1e30, max_value=1e30, allow_nan=False)


# Written out by hand, so that no slip in how the table is made goes unseen. Sources: the SI brochure, 9th
# edition, table 7 (k, M, G, T, P); IEC 80000-13:2008, clause 4 (Ki, Mi, Gi, Ti, Pi; a byte has 8 bits).
PINNED = {
    "amount of data": """B 8, kB 8000, MB 8000000, GB 8000000000, TB 8000000000000, PB 8000000000000000, KiB 8192,
        MiB 8388608, GiB 8589934592, TiB 8796093022208, PiB 9007199254740992""",
    "data rate": """B/s 8, kB/s 8000, MB/s 8000000, GB/s 8000000000, TB/s 8000000000000, PB/s 8000000000000000,
        KiB/s 8192, MiB/s 8388608, GiB/s 8589934592, TiB/s 8796093022208, PiB/s 9007199254740992,
        b/s 1, kb/s 1000, Mb/s 1000000, Gb/s 1000000000, Tb/s 1000000000000, Pb/s 1000000000000000""",
    "compute rate": "FLOPS 1, MFLOPS 1000000, GFLOPS 1000000000, TFLOPS 1000000000000, PFLOPS 1000000000000000",
    "time": "ns 1, us 1000, ms 1000000, s 1000000000, min 60000000000, h 3600000000000",
    "power": "mW 1, W 1000",
    "frequency": "Hz 1, kHz 1000, MHz 1000000, GHz 1000000000",
    "ratio": "% 1, ratio 100",
    "temperature": "degC 1",
    "loss": "nats 1",
    "token rate": "tokens/s 1",
    "image rate": "images/s 1",
    "file rate": "files/s 1",
    "number of ranks": "ranks 1",
    "number of findings": "findings 1",
    "number of nodes": "nodes 1",
    "number of dtypes": "dtypes 1",
    "number of ports": "ports 1",
    "number of words": "words 1",
    "number of files": "files 1",
    "number of CPUs": "CPUs 1",
    "number of tasks": "tasks 1",
}


def test_every_unit_is_what_its_standard_says():
    pinned = {
        symbol: (dimension, int(factor))
        for dimension, units_of_it in PINNED.items()
        for symbol, factor in (each.split() for each in units_of_it.split(","))
    }
    assert {symbol: (unit.dimension, unit.factor) for symbol, unit in units.UNITS.items()} == pinned
    assert all(unit.symbol == symbol for symbol, unit in units.UNITS.items())


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("380 GB/s", 380.0, "GB/s"),
        ("8 GiB", 8.0, "GiB"),
        ("90 %", 90.0, "%"),
        ("2.5TB/s", 2.5, "TB/s"),
        ("700 TFLOPS", 700.0, "TFLOPS"),
        ("12 us", 12.0, "us"),
        ("500 tokens/s", 500.0, "tokens/s"),
        ("12.5 images/s", 12.5, "images/s"),
        ("1e9 B", 1e9, "B"),
        ("5e-3 s", 0.005, "s"),
        ("012 GB/s", 12.0, "GB/s"),
        (".5 s", 0.5, "s"),
        ("-1 GB", -1.0, "GB"),
        ("  3\tGB ", 3.0, "GB"),
    ],
)
def test_a_quantity_is_a_number_and_a_unit(text, value, unit):
    assert units.parse(text) == units.Quantity(value=value, unit=unit)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("380 gb/s", ["GB/s", "Gb/s"]),
        ("8 gib", ["GiB"]),
        ("400 Gbps", ["Gb/s"]),
        ("400 GBps", ["GB/s"]),
        ("400 Gbit/s", ["Gb/s"]),
        ("12 µs", ["us"]),
        ("700 TFLOP/s", ["TFLOPS"]),
        ("700 tflops", ["TFLOPS"]),
        ("500 token/s", ["tokens/s"]),
        ("3 parsec", ["B", "GB/s", "TFLOPS", "ratio"]),
        ("380", ["380 GB/s"]),
        ("1,000 GB/s", ["380 GB/s"]),
        ("nan GB/s", ["380 GB/s"]),
        ("inf s", ["380 GB/s"]),
        ("٣ GB", ["380 GB/s"]),
        ("3 GB\n", ["380 GB/s"]),
        ("", ["380 GB/s"]),
        ("1e999 B", []),
    ],
)
def test_what_is_no_quantity_is_refused_with_what_was_probably_meant(text, named):
    with pytest.raises(UnitError) as caught:
        units.parse(text)
    message = str(caught.value)
    found = text.split()[-1] if message.startswith("unknown unit") else text
    assert repr(found) in message
    assert all(re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/])", message) for name in named), message
    assert ("B is bytes, b is bits" in message) == ("GB/s" in named and "Gb/s" in named)
    assert message.count("did you mean") == (text != "3 parsec" and message.startswith("unknown unit"))


def test_the_expected_unit_is_named_where_a_quantity_lacks_one_or_has_another_dimension():
    with pytest.raises(UnitError, match="'380 TB/s'"):
        units.parse("380", like="TB/s")
    with pytest.raises(UnitError, match=r"GiB.*amount of data.*GB/s.*data rate"):
        units.parse("380 GiB", like="GB/s")


@pytest.mark.parametrize(
    ("value", "source", "target", "expected"),
    [
        (400, "Gb/s", "GB/s", 50.0),
        (1, "GiB", "GB", 1.073741824),
        (2.5, "TB/s", "GB/s", 2500.0),
        (0.5, "GFLOPS", "TFLOPS", 0.0005),
        (1, "MB/s", "GB/s", 0.001),
        (90, "%", "ratio", 0.9),
        (2, "h", "s", 7200.0),
        (5, "s", "us", 5e6),
    ],
)
def test_conversion_is_exact_where_it_can_be(value, source, target, expected):
    assert units.convert(value, source, target) == expected


def test_conversion_keeps_what_is_no_finite_number():
    assert math.isnan(units.convert(math.nan, "GB/s", "TB/s"))
    assert units.convert(-math.inf, "GB/s", "TB/s") == -math.inf


@given(VALUES, SYMBOLS, SYMBOLS)
def test_units_of_different_dimensions_never_convert(value, a, b):
    assume(units.UNITS[a].dimension != units.UNITS[b].dimension)
    with pytest.raises(UnitError):
        units.convert(value, a, b)


@given(VALUES, SYMBOLS)
def test_every_number_in_every_unit_is_read_back(value, symbol):
    assert units.parse(f"{value!r} {symbol}") == units.Quantity(value=value, unit=symbol)


@given(VALUES, SYMBOLS)
def test_what_is_shown_is_read_back_to_four_digits(value, symbol):
    assert units.parse(units.show(value, symbol)).value == pytest.approx(value, rel=6e-4, abs=1e-300)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_unit_error(text):
    try:
        quantity = units.parse(text)
    except UnitError:
        return
    assert math.isfinite(quantity.value)
    assert quantity.unit in units.UNITS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (312.4, "312.4 GB/s"),
        (400.0, "400 GB/s"),
        (41483.2, "41483 GB/s"),
        (0.0005, "0.0005 GB/s"),
        (1.5e-6, "0.0000015 GB/s"),
        (1.5e-7, "1.5e-07 GB/s"),
        (123456789012345.0, "123456789012345 GB/s"),
        (1e15, "1e+15 GB/s"),
        (1e16, "1e+16 GB/s"),
        (0.0, "0 GB/s"),
        (math.nan, "nan GB/s"),
    ],
)
def test_values_are_shown_for_people(value, text):
    assert units.show(value, "GB/s") == text


def test_a_value_just_under_its_limit_is_not_shown_as_equal_to_it():
    assert units.show_apart(399.9996, 400.0, "GB/s") == ("399.9996 GB/s", "400 GB/s")
    assert units.show_apart(312.44, 400.0, "GB/s") == ("312.4 GB/s", "400 GB/s")
    assert units.show_apart(400.0, 400.0, "GB/s") == ("400 GB/s", "400 GB/s")


@given(VALUES)
def test_even_neighbouring_numbers_are_shown_apart(value):
    one, other = units.show_apart(value, math.nextafter(value, math.inf), "GB/s")
    assert one != other


def test_a_name_that_is_not_allowed_is_refused_with_all_that_are_and_the_nearest():
    units.require_one_of("better", "lower", ["higher", "lower"])
    with pytest.raises(ValueError, match=r"better .*higher, lower, .*'lowr'.* 'lower'"):
        units.require_one_of("better", "lowr", ["higher", "lower"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1 GB", ("amount of data", 8e9)), ("8192", ("number", 8192.0)), ("bf16", None), ("3 parsec", None), ("", None)],
)
def test_magnitudes_compare_quantities_and_bare_numbers(text, expected):
    assert units.magnitude(text) == expected


def test_a_suggestion_is_the_nearest_allowed_word_or_nothing():
    assert units.did_you_mean("mim", ["min", "max"]) == "; did you mean 'min'?"
    assert units.did_you_mean("zzz", ["min", "max"]) == ""
