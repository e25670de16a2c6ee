import contextlib

import pytest
from complaints import in_order
from each import of_each
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Ratio, Sizes, Whole, repeated
from pytest_gpucluster.errors import UnitError

SIZE = Whole(16, 65536, multiple_of=16)
SHAPE = Sizes(("m", "n", "k"), SIZE)
BYTES = Amount(4, 10**12, multiple_of=4)
LABEL = Amount(4, 10**12, multiple_of=4, as_written=True)
SECONDS = Duration(0.01, 3600)
TOLERANCE = Ratio(0.0001, 3)
MIG = Choice(("off", "on"))


@of_each(
    "case",
    [
        (SIZE, "16384", 16384),
        (BYTES, "8 GiB", 8 * 2**30),
        (BYTES, "32 GB", 32 * 10**9),
        (BYTES, "1.1 GB", 1_100_000_000),
        (BYTES, "8B", 8),
        (LABEL, "1 GB", "1 GB"),
        (SECONDS, "250 ms", 0.25),
        (SECONDS, "1 h", 3600.0),
        (TOLERANCE, "1 %", 0.01),
        (TOLERANCE, "0.5 ratio", 0.5),
        (MIG, "off", "off"),
        (SHAPE, "64x128x2048", (64, 128, 2048)),
    ],
)
def test_a_value_is_read_in_base_units(case):
    kind, text, value = case
    assert kind.read(text) == value


@of_each(
    "case",
    [
        *((SIZE, text, f"{text} 16 16 65536") for text in ("0", "100", "65552")),
        (Whole(1, 9), "10", "10 1 9"),
        *(
            (SIZE, text, f"{text!r} 16 16 65536")
            for text in ("-16", "+16", "16.0", "1e3", "012", "1_024", "0x10", "1024 B", "nan", "", "١٦")
        ),
        (BYTES, "6 B", "'6 B' 6 B 4 B"),
        (BYTES, "0.0005 kB", "'0.0005 kB' 0.5 B 4 B"),
        (BYTES, "0 B", "'0 B' 4 B 1 TB"),
        (BYTES, "-4 B", "'-4 B' 4 B 1 TB"),
        (LABEL, "2 TB", "'2 TB' 4 B 1 TB"),
        (BYTES, "1024", "'1024' '1024 B'"),
        (BYTES, "1 gb", "'gb' 'GB'"),
        (BYTES, "1 GB/s", "GB/s B"),
        (SECONDS, "1 ms", "'1 ms' 0.01 s 1 h"),
        (SECONDS, "-1 s", "'-1 s' 0.01 s 1 h"),
        (SECONDS, "3", "'3' '3 s'"),
        (SECONDS, "nan s", "'nan s' '400 s'"),
        (TOLERANCE, "0 %", "'0 %' 0.01 % 300 %"),
        (TOLERANCE, "301 %", "'301 %' 0.01 % 300 %"),
        (TOLERANCE, "1", "'1' '1 %'"),
        (MIG, "of", "'of' off on 'off'"),
        (MIG, "false", "'false' off on"),
        *(
            (SHAPE, text, f"{text!r} mxnxk 16 16 65536")
            for text in ("64", "64x64", "64x64x64x64", "64*64*64", "64X64X64", "")
        ),
        (SHAPE, "64x8x64", "'64x8x64' mxnxk: 8 16 16 65536"),
        (SHAPE, "64x x64", "'64x x64' mxnxk: ' ' 16 16 65536"),
    ],
)
def test_what_is_not_allowed_is_reported_with_what_is(case):
    kind, text, words = case
    with pytest.raises((ValueError, UnitError)) as caught:
        kind.read(text)
    assert in_order(str(caught.value), words)


@given(st.text(max_size=12), st.sampled_from([SIZE, SHAPE, BYTES, LABEL, SECONDS, TOLERANCE, MIG]))
def test_any_text_is_a_value_or_refused(text, kind):
    with contextlib.suppress(ValueError, UnitError):
        assert kind.read(text) or kind.read(text) == 0


@of_each(
    "case",
    [
        (["1", "2"], [1, 2], None),
        (["1", "2", "1"], [1, 2, 1], (2, "1 comes twice")),
        (["exit", "kill", "exit"], ["exit", "kill", "exit"], (2, "exit comes twice")),
        (["1 GB", "1000 MB"], ["1 GB", "1000 MB"], (1, "1000 MB is the same as 1 GB")),
        (["1 GB", "1 GiB"], ["1 GB", "1 GiB"], None),
    ],
)
def test_a_repeated_value_is_found_however_it_is_written(case):
    texts, values, found = case
    assert repeated(texts, values) == found
