"""Canonical JSON: RFC 8785's own examples, and what is refused."""

from __future__ import annotations

import math
import struct

import pytest
from each import of_each

from pytest_gpucluster.analysis.certificate import canonical, plain

# RFC 8785, appendix B.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


def test_numbers_are_written_as_in_the_rfc():
    found = {bits: canonical(struct.unpack(">d", bytes.fromhex(bits))[0]).decode() for bits in NUMBERS}
    assert found == NUMBERS


def test_the_example_of_the_rfc_has_its_canonical_form():
    # RFC 8785, sections 3.2.2 to 3.2.4.
    content = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/",
        "literals": [None, True, False],
        # By code points these two would stand the other way round.
        "\ufb33": 0,
        "\U0001f600": 0,
    }
    assert canonical(content).decode() == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/","\U0001f600":0,"\ufb33":0}'
    )


@of_each("value", [math.nan, math.inf, 2**53, -(2**53), "\ud800", {"\ud800": 1}, {1: 2}, b"x", {"a": [math.nan]}])
def test_what_has_no_canonical_form_is_refused_and_plain_makes_text_of_it(value):
    with pytest.raises(ValueError, match=r"surrogate|beyond|JSON|text"):
        canonical(value)
    if not isinstance(value, bytes):
        assert canonical(plain(value))


def test_what_is_nested_without_end_is_refused():
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="nested too deeply"):
        canonical(value)
