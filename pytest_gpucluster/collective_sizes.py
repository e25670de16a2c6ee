"""The sizes that an operator wants all collectives measured with, written as for nccl-tests. Pure.

>>> [str(override) for override in read("8,512M:2G:2")]
['nccl.all_reduce.sizes=8 B, 512 MiB, 1 GiB, 2 GiB', 'nccl.collectives.sizes=8 B, 512 MiB, 1 GiB, 2 GiB']
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gpucluster import units
from pytest_gpucluster.errors import OptionError, UnitError
from pytest_gpucluster.workload_file import Override
from pytest_gpucluster.workloads import KEYS

KEYS_OF_SIZES = tuple(key for key in KEYS if key.startswith("nccl.") and key.endswith(".sizes"))
"""What is overridden: the sizes of every collective that is measured for its bandwidth."""

MOST_SIZES = 64
EXAMPLE = "such as 8,512M:8G:2"

_BARE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)[ \t]*(?P<prefix>[KkMmGg]?)")
_FACTOR = re.compile(r"[1-9][0-9]*")
_BINARY, _DECIMAL = ("TiB", "GiB", "MiB", "KiB", "B"), ("TB", "GB", "MB", "kB", "B")


def read(text: str, *, origin: str = "") -> tuple[Override, ...]:
    """Read a list of sizes and of ranges ``begin:end:factor``, and return what it changes in the workload.

    A bare number is bytes, and K, M and G are binary, as in nccl-tests; a unit such as "1 GB" or "512 MiB" is taken as
    everywhere else. A range begins at ``begin`` and grows by ``factor`` as long as it is not above ``end``.

    Args:
        text: such as ``8,512M:8G:2``.
        origin: how reports call it.

    Raises:
        OptionError: an item that is neither; a size that a collective cannot have, or that comes twice.

    Source: nccl-tests, README.md, options ``-b``, ``-e`` and ``-f``, and parsesize in src/common.cu.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        missing = "there is no size" if not any(items) else f"{text!r} has a comma with no size beside it"
        raise OptionError(f"{missing}; write sizes and ranges begin:end:factor, {EXAMPLE}")
    texts = tuple(size for item in items for size in (_range(item) if ":" in item else [_size(item, item).text]))
    if len(texts) > MOST_SIZES:
        raise OptionError(f"{text!r} is {len(texts)} sizes; at most {MOST_SIZES} are measured in one run")
    complaints = dict.fromkeys(complaint for key in KEYS_OF_SIZES for _, complaint in KEYS[key].read(texts)[1])
    if complaints:
        raise OptionError("; ".join(complaints))
    return tuple(Override(key=key, texts=texts, origin=origin or f"sizes {text}") for key in KEYS_OF_SIZES)


@dataclass(frozen=True, kw_only=True)
class _Size:
    count: int
    """Bytes."""
    text: str
    decimal: bool
    """It was written in kB, MB, GB or TB."""


def _size(text: str, item: str) -> _Size:
    bare = _BARE.fullmatch(text)
    if bare is not None:
        amount = float(bare["number"]) * 1024 ** " KMG".index(bare["prefix"].upper() or " ")
        if not amount.is_integer():
            raise OptionError(f"{item!r}: {text} is {amount:g} B, which is no whole number of bytes")
        return _Size(count=int(amount), text=_written(int(amount), _BINARY), decimal=False)
    try:
        quantity = units.parse(text, like="B")
    except UnitError as error:
        raise OptionError(
            f"{item!r}: {error}. A size is bytes, or in K, M or G as for nccl-tests, or has its unit, such as 1 GB"
        ) from None
    return _Size(
        count=round(quantity.to("B")),
        text=" ".join(text.split()),
        decimal=quantity.unit in _DECIMAL[:-1],
    )


def _range(item: str) -> list[str]:
    parts = [part.strip() for part in item.split(":")]
    if len(parts) != 3:
        raise OptionError(f"{item!r} is no range; write begin:end:factor, {EXAMPLE}")
    first, last = _size(parts[0], item), _size(parts[1], item)
    factor = int(parts[2]) if _FACTOR.fullmatch(parts[2]) else 0
    if factor < 2:
        raise OptionError(f"{item!r}: the factor {parts[2]!r} is no whole number from 2 on")
    if not 0 < first.count <= last.count:
        raise OptionError(f"{item!r}: a range begins above 0 and not above its end, which is {last.text}")
    symbols = _DECIMAL if first.decimal or last.decimal else _BINARY
    texts, size = [], first.count
    while size <= last.count:
        texts.append(_written(size, symbols))
        size *= factor
    return texts


def _written(count: int, symbols: tuple[str, ...]) -> str:
    """Write a number of bytes in the largest of some units that gives a whole number."""
    symbol = next(
        name for name in symbols if name == "B" or (count and count % round(units.convert(1, name, "B")) == 0)
    )
    return f"{count // round(units.convert(1, symbol, 'B'))} {symbol}"
