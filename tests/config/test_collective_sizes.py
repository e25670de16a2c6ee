from __future__ import annotations

import pytest

from pytest_gpucluster.config.workload import KEYS
from pytest_gpucluster.config.workload_loader import KEYS_OF_SIZES, MOST_SIZES, read_sizes
from pytest_gpucluster.errors import OptionError


def texts(text: str) -> tuple[str, ...]:
    [first, *others] = read_sizes(text)
    assert all(other.texts == first.texts for other in others)
    return first.texts


def test_every_sweep_of_a_collective_takes_the_sizes_and_says_who_gave_them() -> None:
    assert set(KEYS_OF_SIZES) == {key for key in KEYS if key.startswith("nccl.") and key.endswith(".sizes")}
    assert {"nccl.all_reduce.sizes", "nccl.collectives.sizes"} <= set(KEYS_OF_SIZES)
    found = read_sizes("1G", origin="command line: --gpucluster-sizes 1G")
    assert [override.key for override in found] == list(KEYS_OF_SIZES)
    assert {override.origin for override in found} == {"command line: --gpucluster-sizes 1G"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("8", ("8 B",), id="bytes"),
        pytest.param("64k,1M", ("64 KiB", "1 MiB"), id="binary prefixes, in small letters too"),
        pytest.param("1.5G", ("1536 MiB",), id="one and a half"),
        pytest.param("2048M", ("2 GiB",), id="in the largest unit"),
        pytest.param("1000000", ("1 MB",), id="in a decimal unit where that is shorter"),
        pytest.param("1 GB,512 MiB", ("1 GB", "512 MiB"), id="units as everywhere"),
        pytest.param("8,512M:8G:2", ("8 B", "512 MiB", "1 GiB", "2 GiB", "4 GiB", "8 GiB"), id="a range"),
        pytest.param(" 8 : 4K : 8 ", ("8 B", "64 B", "512 B", "4 KiB"), id="spaces"),
        pytest.param("512M:7G:2", ("512 MiB", "1 GiB", "2 GiB", "4 GiB"), id="an end that is not met"),
        pytest.param("1M:1M:2", ("1 MiB",), id="a range of one"),
        pytest.param("1 MB:1 GB:10", ("1 MB", "10 MB", "100 MB", "1 GB"), id="a decimal range"),
        pytest.param("500 MB:2 GB:2", ("500 MB", "1 GB", "2 GB"), id="a decimal range over a unit"),
    ],
)
def test_sizes_are_read_as_nccl_tests_and_this_project_write_them(text: str, expected: tuple[str, ...]) -> None:
    assert texts(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "there is no size; write sizes and ranges begin:end:factor, such as 8,512M:8G:2", id="none"),
        pytest.param("8,,16", "'8,,16' has a comma without a size", id="a comma too many"),
        pytest.param("512M:8G", "'512M:8G' is no range; write begin:end:factor", id="no factor"),
        pytest.param("1:2:3:4", "'1:2:3:4' is no range", id="four parts"),
        pytest.param("512M:8G:1", "'512M:8G:1': the factor '1' is no whole number from 2 on", id="a factor of one"),
        pytest.param("512M:8G:1.5", "the factor '1.5' is no whole number", id="a broken factor"),
        pytest.param("8G:512M:2", "a range begins above 0 and not above its end, which is 512 MiB", id="backwards"),
        pytest.param("0:8:2", "a range begins above 0", id="a range from zero"),
        pytest.param("8X", "'8X': unknown unit 'X'", id="an unknown prefix"),
        pytest.param("8 GB/s", "'8 GB/s': GB/s is a unit of data rate", id="a rate"),
        pytest.param("big:8G:2", "'big:8G:2': 'big' is no quantity", id="no number"),
        pytest.param("-8", "'-8': '-8' has no unit", id="a sign"),
        pytest.param("1.3", "'1.3': 1.3 is 1.3 B, which is no whole number of bytes", id="a part of a byte"),
        pytest.param("6", "'6 B' is 6 B, which is no multiple of 4 B", id="half an element"),
        pytest.param("0", "'0 B' is not an amount of data in multiples of 4 B, from 4 B to 1 TB", id="nothing"),
        pytest.param("2000G", "'2000 GiB' is not an amount of data", id="too much"),
        pytest.param("1G,1024M", "1 GiB comes twice", id="twice"),
        pytest.param("1 GB,1000 MB", "1000 MB is the same as 1 GB", id="twice, written differently"),
        pytest.param("512M,256M:1G:2", "512 MiB comes twice", id="a size of a range"),
        pytest.param(",".join(str(4 * n) for n in range(1, MOST_SIZES + 2)), "at most 64 are measured", id="too many"),
    ],
)
def test_what_is_no_size_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_sizes(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
