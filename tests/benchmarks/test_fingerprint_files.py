"""Processes that cannot talk to each other compare their fingerprints by files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_gpucluster.benchmarks.fingerprint import Fingerprint, FingerprintAgreement, exchange
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult


def of(bits: str) -> Fingerprint:
    return Fingerprint(kind="H100", digests={"sums": bits}, repeats=2, changed={})


def test_all_get_the_same_and_only_the_deviant_is_blamed(tmp_path: Path) -> None:
    bits = ["a", "a", "b", "a"]

    def worker(index: int) -> tuple[list[Fingerprint], dict[int, str]]:
        return exchange(tmp_path / "new", of(bits[index]), index=index, count=4, name=f"GPU {index}", wait_seconds=60)

    with ThreadPoolExecutor(max_workers=4) as pool:
        told = list(pool.map(worker, range(4)))
    assert told == [([of(each) for each in bits], {index: f"GPU {index}" for index in range(4)})] * 4
    agreement = FingerprintAgreement(told[0][0])
    assert [agreement.agreement_ratio(index) for index in range(4)] == [1, 1, 0, 1]
    with pytest.raises(WrongResult, match=r"GPU 2: .*computation gives.* 3 of 4"):
        agreement.require(2, told[0][1])


def test_one_that_does_not_come_is_an_error_that_names_it(tmp_path: Path) -> None:
    times = iter(range(100))
    with pytest.raises(EnvironmentBroken, match=r"GPU 0: no fingerprint.* 1, 2 within 5 s"):
        exchange(
            tmp_path,
            of("a"),
            index=0,
            count=3,
            name="GPU 0",
            wait_seconds=5,
            now=lambda: next(times),
            sleep=lambda seconds: None,
        )
