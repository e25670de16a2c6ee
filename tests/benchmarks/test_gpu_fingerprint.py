import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks import fingerprint
from pytest_gpucluster.benchmarks.dtypes import dtypes_of
from pytest_gpucluster.benchmarks.fingerprint import (
    Fingerprint,
    FingerprintAgreement,
    exchange,
    stages_of,
    take_fingerprint,
)
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
N = 64


def flipping(stage, *, at, element=5):
    """A device that flips the lowest bit of one element in one of its computations."""
    calls = itertools.count()

    def compute(a, b):
        result = stage(a, b).contiguous()
        if next(calls) == at:
            result.view(-1).view(torch.uint8)[element] ^= 1
        return result

    return compute


def test_the_same_device_gives_the_same_bits_again_in_every_stage():
    first, second = (take_fingerprint(CPU, n=N, repeats=3) for _ in range(2))
    assert first == second
    assert first.changed == {}
    assert first.repeatable == 1.0
    first.require_repeatable("here")


def test_every_dtype_is_multiplied_and_all_stages_give_bits_of_their_own():
    found = take_fingerprint(CPU, n=N, repeats=1)
    assert {name for name in found.digests if name.startswith("matmul ")} == {f"matmul {d}" for d in dtypes_of(CPU)}
    # TF32 is fp32 on cpu.
    others = [digest for name, digest in found.digests.items() if name != "matmul tf32"]
    assert len(set(others)) == len(others)


def test_other_sizes_give_other_bits():
    prints = [take_fingerprint(CPU, n=n, repeats=1) for n in (N, 2 * N)]
    for stage in stages_of(CPU):
        assert len({found.digests[stage] for found in prints}) == 2, stage


@of_each("stage", list(stages_of(CPU)))
def test_one_bit_of_any_stage_changes_its_fingerprint_and_no_other(stage, monkeypatch):
    right = take_fingerprint(CPU, n=N, repeats=1)
    stages = dict(stages_of(CPU))
    stages[stage] = flipping(stages[stage], at=0)
    monkeypatch.setattr(fingerprint, "stages_of", lambda device: stages)
    wrong = take_fingerprint(CPU, n=N, repeats=1)
    assert [name for name in right.digests if right.digests[name] != wrong.digests[name]] == [stage]


@of_each("stage", ["matmul bf16", "integers"])
def test_a_device_that_computes_something_else_the_second_time_is_told_with_the_stage(stage, monkeypatch):
    stages = dict(stages_of(CPU))
    stages[stage] = flipping(stages[stage], at=2)
    monkeypatch.setattr(fingerprint, "stages_of", lambda device: stages)
    found = take_fingerprint(CPU, n=N, repeats=4)
    assert found.changed == {stage: 1}
    assert found.repeatable == pytest.approx(1 - 1 / len(stages))
    with pytest.raises(WrongResult, match=f"^GPU 3 of node-b: .*: {stage} in 1 of 3 repeats"):
        found.require_repeatable("GPU 3 of node-b")


def test_a_first_time_that_was_wrong_differs_from_all_later_ones(monkeypatch):
    stages = {"sums": flipping(stages_of(CPU)["sums"], at=0)}
    monkeypatch.setattr(fingerprint, "stages_of", lambda device: stages)
    assert take_fingerprint(CPU, n=N, repeats=4).changed == {"sums": 3}


def test_the_operands_stay_as_they_are():
    random = torch.Generator().manual_seed(3)
    a, b = (torch.randn(N, N, generator=random) for _ in range(2))
    before = a.clone(), b.clone()
    for stage in stages_of(CPU).values():
        stage(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_too_little_memory_is_told_before_any_is_taken(monkeypatch):
    def full(device, needed, what, *, instead):
        raise EnvironmentBroken(f"{what} needs {needed}; {instead}")

    monkeypatch.setattr(fingerprint, "require_free", full)
    with pytest.raises(EnvironmentBroken, match=r"n=64 needs 393216; choose smaller .* determinism\.n=1024"):
        take_fingerprint(CPU, n=N, repeats=1)


def test_torch_is_asked_for_the_same_bits_meanwhile_and_not_afterwards(monkeypatch):
    seen = []

    def stage(a, b):
        seen.append(torch.get_deterministic_debug_mode())
        return a

    before = torch.get_deterministic_debug_mode()
    monkeypatch.setattr(fingerprint, "stages_of", lambda device: {"one": stage})
    take_fingerprint(CPU, n=N, repeats=1)
    assert seen == [2]
    assert torch.get_deterministic_debug_mode() == before


def agreement(bits, kinds=()):
    """One GPU for each text: the letter at place i is its digest of stage i."""
    return FingerprintAgreement(
        [
            Fingerprint(
                kind=kinds[rank] if kinds else "H100",
                digests={f"stage {index}": letter * 4 for index, letter in enumerate(text)},
                repeats=1,
                changed={},
            )
            for rank, text in enumerate(bits)
        ]
    )


def blamed(found, count):
    told, names = {}, {rank: f"rank {rank}" for rank in range(count)}
    for rank in range(count):
        try:
            found.require(rank, names)
        except WrongResult as error:
            told[rank] = str(error)
    return told


def test_equal_bits_agree():
    found = agreement(["ab"] * 8)
    assert found.disagreements == ()
    assert [found.agreement_ratio(rank) for rank in range(8)] == [1.0] * 8
    assert blamed(found, 8) == {}


@of_each("count", [3, 4, 16])
def test_the_one_that_deviates_is_named_with_its_stage_and_no_other(count):
    found = agreement(["ab", "ax", *["ab"] * (count - 2)])
    assert blamed(found, count) == {
        1: "rank 1: the same computation gives other bits here: stage 1 gives xxxx, and"
        f" {count - 1} of {count} of this kind give bbbb"
    }
    assert [found.agreement_ratio(rank) for rank in range(3)] == [1.0, 0.5, 1.0]


def test_several_that_deviate_in_several_stages_are_all_named():
    found = agreement(["xb", "ay", "ab", "ab", "xb", "ab", "ab"])
    told = blamed(found, 7)
    assert set(told) == {0, 1, 4}
    assert "stage 0 gives xxxx, and 5 of 7 of this kind give aaaa" in told[0]
    assert "stage 1 gives yyyy, and 6 of 7 of this kind give bbbb" in told[1]


def test_of_two_that_differ_it_is_said_that_one_of_them_is_wrong():
    found = agreement(["ab", "xb"])
    told = blamed(found, 2)
    assert set(told) == {0, 1}
    for text in told.values():
        assert re.search(r"stage 0 gives aaaa.* 0; xxxx on rank 1: .*is wrong", text)
        assert re.search(r"their kind", text)
    assert [found.agreement_ratio(rank) for rank in range(2)] == [0.5, 0.5]


@of_each("bits", [["a", "a", "x", "x"], ["a", "x", "y"]])
def test_without_a_majority_nobody_is_cleared(bits):
    told = blamed(agreement(bits), len(bits))
    assert set(told) == set(range(len(bits)))
    assert all(re.search(r"no majority", text) for text in told.values())


def test_each_kind_is_compared_with_its_like_only():
    found = agreement(["a", "b", "a", "b", "x", "b"], ["H100", "H200"] * 3)
    assert blamed(found, 6).keys() == {4}
    assert found.agreement_ratio(1) == 1.0


def test_one_that_is_alone_of_its_kind_is_no_pass():
    found = agreement(["a", "a", "b"], ["H100", "H100", "H200"])
    with pytest.raises(EnvironmentBroken, match=r"rank 2 .*compare its.* H200, the"):
        found.agreement_ratio(2)
    assert found.agreement_ratio(0) == 1.0


def test_a_stage_that_only_some_have_computed_is_a_dissent():
    found = agreement(["ab", "ab", "a"])
    assert blamed(found, 3).keys() == {2}
    assert "stage 1 gives nothing" in blamed(found, 3)[2]


def of(bits):
    return Fingerprint(kind="H100", digests={"sums": bits}, repeats=2, changed={})


def test_all_get_the_same_and_only_the_deviant_is_blamed(tmp_path):
    bits = ["a", "a", "b", "a"]

    def worker(index):
        return exchange(tmp_path / "new", of(bits[index]), index=index, count=4, name=f"GPU {index}", wait_seconds=60)

    with ThreadPoolExecutor(max_workers=4) as pool:
        told = list(pool.map(worker, range(4)))
    assert told == [([of(each) for each in bits], {index: f"GPU {index}" for index in range(4)})] * 4
    agreement = FingerprintAgreement(told[0][0])
    assert [agreement.agreement_ratio(index) for index in range(4)] == [1, 1, 0, 1]
    with pytest.raises(WrongResult, match=r"GPU 2: .*computation gives.* 3 of 4"):
        agreement.require(2, told[0][1])


def test_one_that_does_not_come_is_an_error_that_names_it(tmp_path):
    with pytest.raises(EnvironmentBroken, match=r"GPU 0: no fingerprint.* 1, 2 within 0 s"):
        exchange(tmp_path, of("a"), index=0, count=3, name="GPU 0", wait_seconds=0)
