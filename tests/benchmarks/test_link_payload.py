"""The payload of a link is one of `verify`'s patterns, whose comparison test_pattern checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpucluster.benchmarks.links import pattern_of
from pytest_gpucluster.benchmarks.verify import PatternWriter

WRITER = PatternWriter(torch.device("cpu"), 1000)


def words(*link: int) -> torch.Tensor:
    made = torch.empty(1000, dtype=torch.int64)
    WRITER.fill(made, pattern_of(*link))
    return made


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda received: received.fill_(-1), id="nothing came"),
        pytest.param(lambda received: received.zero_(), id="zeros"),
        pytest.param(lambda received: received.copy_(received.roll(1)), id="a word too late"),
        pytest.param(lambda received: received.copy_(words(0, 1, 4)), id="what was sent before"),
        pytest.param(lambda received: received.copy_(words(1, 0, 5)), id="the other direction's"),
        pytest.param(lambda received: received.copy_(words(2, 1, 5)), id="another sender's"),
        pytest.param(lambda received: received.copy_(words(0, 2, 5)), id="meant for another rank"),
    ],
)
def test_data_that_were_not_meant_are_wrong_in_nearly_all_words(spoil: Any) -> None:
    received = words(0, 1, 5)
    assert WRITER.compare(received, pattern_of(0, 1, 5)) is None
    spoil(received)
    found = WRITER.compare(received, pattern_of(0, 1, 5))
    assert found is not None
    assert found.count >= 999


def test_every_pair_direction_and_time_has_a_payload_of_its_own() -> None:
    starts = {pattern_of(one, other, when).word(0) for one in range(16) for other in range(16) for when in range(16)}
    assert len(starts) == 16**3
