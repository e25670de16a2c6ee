"""By how much a value may be worse than before, as it is written: "3%", "3 %", "0.5%" or "3"."""

from __future__ import annotations

import re

from pytest_gpucluster.errors import OptionError


def allowance(text: str) -> float:
    """Return the ratio that a percentage means: 0.03 for 3 %.

    >>> allowance("3 %")
    0.03

    Raises:
        OptionError: no percentage, or one outside of 0 to below 100.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text, re.ASCII)
    if found is None or not float(found[1]) < 100:
        raise OptionError(f"{text!r} is no percentage from 0 to below 100; write 3% or 0.5%")
    return float(found[1]) / 100
