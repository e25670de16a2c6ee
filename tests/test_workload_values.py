from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.workload_values import Amount, Choice, Duration, Kind, Ratio, Sizes, Whole, repeated

SIZE = Whole(least=16, most=65536, multiple_of=16)
SHAPE = Sizes(names=("m", "n", "k"), each=SIZE)
BYTES = Amount(least_bytes=4, most_bytes=10**12, multiple_of=4)
LABEL = Amount(least_bytes=4, most_bytes=10**12, multiple_of=4, as_written=True)
SECONDS = Duration(least_seconds=0.01, most_seconds=3600)
TOLERANCE = Ratio(least=0.0001, most=3)
MIG = Choice(words=("off", "on"))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        pytest.param(SIZE, "16384", 16384, id="a whole number"),
        pytest.param(BYTES, "8 GiB", 8 * 2**30, id="bytes of a binary unit"),
        pytest.param(BYTES, "32 GB", 32 * 10**9, id="bytes of a decimal unit"),
        pytest.param(BYTES, "1.1 GB", 1_100_000_000, id="bytes that floating point misses by a little"),
        pytest.param(BYTES, "8B", 8, id="no space"),
        pytest.param(LABEL, "1 GB", "1 GB", id="a label stays as it is written"),
        pytest.param(SECONDS, "250 ms", 0.25, id="milliseconds"),
        pytest.param(SECONDS, "1 h", 3600.0, id="the longest time"),
        pytest.param(TOLERANCE, "1 %", 0.01, id="percent"),
        pytest.param(TOLERANCE, "0.5 ratio", 0.5, id="a ratio"),
        pytest.param(MIG, "off", "off", id="a word"),
        pytest.param(SHAPE, "64x128x2048", (64, 128, 2048), id="a shape"),
    ],
)
def test_a_value_is_read_in_base_units(kind: Kind, text: str, value: Any) -> None:
    assert kind.read(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        pytest.param(SIZE, "0", "0 is not a multiple of 16 from 16 to 65536", id="nothing"),
        pytest.param(SIZE, "100", "100 is not a multiple of 16 from 16 to 65536", id="no multiple"),
        pytest.param(SIZE, "65552", "65552 is not a multiple of 16 from 16 to 65536", id="too large"),
        pytest.param(
            Whole(least=1, most=9), "10", "10 is not a whole number from 1 to 9", id="too large, of any multiple"
        ),
        *(
            pytest.param(SIZE, text, f"{text!r} is not a multiple of 16 from 16 to 65536, in plain digits", id=text)
            for text in ("-16", "+16", "16.0", "1e3", "012", "1_024", "0x10", "1024 B", "nan", "", "١٦")
        ),
        pytest.param(BYTES, "6 B", "'6 B' is 6 B, which is no multiple of 4 B", id="half an element"),
        pytest.param(BYTES, "0.0005 kB", "'0.0005 kB' is 0.5 B, which is no multiple of 4 B", id="half a byte"),
        pytest.param(
            BYTES,
            "0 B",
            "'0 B' is not an amount of data in multiples of 4 B, from 4 B to 1 TB, such as 1 GB or 8 GiB",
            id="no bytes",
        ),
        pytest.param(
            BYTES,
            "-4 B",
            "'-4 B' is not an amount of data in multiples of 4 B, from 4 B to 1 TB, such as 1 GB or 8 GiB",
            id="bytes below zero",
        ),
        pytest.param(
            LABEL,
            "2 TB",
            "'2 TB' is not an amount of data in multiples of 4 B, from 4 B to 1 TB, such as 1 GB or 8 GiB",
            id="too many bytes",
        ),
        pytest.param(BYTES, "1024", "'1024' has no unit: write '1024 B'", id="bytes without unit"),
        pytest.param(
            BYTES,
            "1 gb",
            "unknown unit 'gb'; did you mean 'GB'? Case matters",
            id="wrong case",
        ),
        pytest.param(
            BYTES, "1 GB/s", "GB/s is a unit of data rate; B or another unit of amount of data is needed", id="a rate"
        ),
        pytest.param(SECONDS, "1 ms", "'1 ms' is not a time from 0.01 s to 1 h", id="too short"),
        pytest.param(SECONDS, "-1 s", "'-1 s' is not a time from 0.01 s to 1 h", id="before the start"),
        pytest.param(SECONDS, "3", "'3' has no unit: write '3 s'", id="seconds without unit"),
        pytest.param(
            SECONDS,
            "nan s",
            "'nan s' is no quantity: write a decimal number and a unit, such as '400 s'",
            id="no time at all",
        ),
        pytest.param(TOLERANCE, "0 %", "'0 %' is not a ratio from 0.01 % to 300 %", id="no tolerance"),
        pytest.param(TOLERANCE, "301 %", "'301 %' is not a ratio from 0.01 % to 300 %", id="any tolerance"),
        pytest.param(TOLERANCE, "1", "'1' has no unit: write '1 %'", id="a ratio without unit"),
        pytest.param(MIG, "of", "'of' is not off or on; did you mean 'off'?", id="a misspelt word"),
        pytest.param(MIG, "false", "'false' is not off or on", id="another word"),
        *(
            pytest.param(SHAPE, text, f"{text!r} is not mxnxk, each a multiple of 16 from 16 to 65536", id=text)
            for text in ("64", "64x64", "64x64x64x64", "64*64*64", "64X64X64", "")
        ),
        pytest.param(
            SHAPE,
            "64x8x64",
            "'64x8x64' is not mxnxk: 8 is not a multiple of 16 from 16 to 65536",
            id="a shape with a size that is too small",
        ),
        pytest.param(
            SHAPE,
            "64x x64",
            "'64x x64' is not mxnxk: ' ' is not a multiple of 16 from 16 to 65536, in plain digits",
            id="a shape with a gap",
        ),
    ],
)
def test_what_is_not_allowed_is_told_with_what_is(kind: Kind, text: str, message: str) -> None:
    with pytest.raises((ValueError, UnitError)) as caught:
        kind.read(text)
    assert str(caught.value) == message


@given(st.text(max_size=12), st.sampled_from([SIZE, SHAPE, BYTES, LABEL, SECONDS, TOLERANCE, MIG]))
def test_any_text_is_a_value_or_refused(text: str, kind: Kind) -> None:
    with contextlib.suppress(ValueError, UnitError):
        assert kind.read(text) or kind.read(text) == 0


@pytest.mark.parametrize(
    ("texts", "values", "found"),
    [
        (["1", "2"], [1, 2], None),
        (["1", "2", "1"], [1, 2, 1], (2, "1 comes twice")),
        (["exit", "kill"], ["exit", "kill"], None),
        (["exit", "kill", "exit"], ["exit", "kill", "exit"], (2, "exit comes twice")),
        (["1 GB", "1000 MB"], ["1 GB", "1000 MB"], (1, "1000 MB is the same as 1 GB")),
        (["1 GB", "1 GiB"], ["1 GB", "1 GiB"], None),
    ],
    ids=["different", "a number twice", "words", "a word twice", "a size in two units", "sizes of one number"],
)
def test_a_repeated_value_is_found_however_it_is_written(texts: list[str], values: list[Any], found: Any) -> None:
    assert repeated(texts, values) == found
