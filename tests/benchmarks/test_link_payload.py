from __future__ import annotations

import pytest
import torch

from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.benchmarks.links import clear, defect, fill, salt

SEED = salt(0, 1, 5)


def words(count: int, seed: int = SEED) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int32)
    fill(made, seed)
    return made


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_CHUNK_WORDS", 100)


def test_a_payload_as_it_was_sent_has_no_defect() -> None:
    assert defect(words(1000), SEED) is None


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("at", [0, 99, 100, 567, 999])
@pytest.mark.parametrize("bit", [0, 7, 31])
def test_one_flipped_bit_is_found_at_its_offset(at: int, bit: int) -> None:
    received = words(1000)
    before = int(received[at]) & 0xFFFFFFFF
    received[at] ^= -(2**31) if bit == 31 else 1 << bit
    assert defect(received, SEED) == (1, 4 * at, before ^ 1 << bit, before)


@pytest.mark.usefixtures("small_chunks")
def test_all_wrong_words_are_counted_and_the_first_is_told() -> None:
    received = words(1000)
    received[150:160] = 0
    received[950] = 0
    found = defect(received, SEED)
    assert found is not None
    assert found[:3] == (11, 600, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(clear, id="nothing came"),
        pytest.param(lambda received: received.zero_(), id="zeros"),
        pytest.param(lambda received: received.copy_(received.roll(1)), id="a word too late"),
        pytest.param(lambda received: received.copy_(words(1000, salt(0, 1, 4))), id="what was sent before"),
        pytest.param(lambda received: received.copy_(words(1000, salt(1, 0, 5))), id="the other direction's"),
        pytest.param(lambda received: received.copy_(words(1000, salt(2, 1, 5))), id="another sender's"),
        pytest.param(lambda received: received.copy_(words(1000, salt(0, 2, 5))), id="meant for another rank"),
    ],
)
def test_data_that_were_not_meant_are_wrong_in_nearly_all_words(spoil) -> None:
    received = words(1000)
    spoil(received)
    found = defect(received, SEED)
    assert found is not None
    assert found[0] >= 999


def test_the_part_that_did_not_arrive_is_wrong() -> None:
    received = torch.empty(1000, dtype=torch.int32)
    clear(received)
    received[:600] = words(600)
    assert (defect(received, SEED) or ())[:2] == (400, 2400)


def test_every_pair_direction_and_time_has_a_payload_of_its_own() -> None:
    salts = {salt(one, other, when) for one in range(16) for other in range(16) for when in range(16)}
    assert len(salts) == 16**3
