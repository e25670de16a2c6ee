from __future__ import annotations

import itertools

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks import fingerprint
from pytest_gpucluster.benchmarks.dtypes import dtypes_of
from pytest_gpucluster.benchmarks.fingerprint import Stage, stages_of, take_fingerprint
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
N = 64


def flipping(stage: Stage, *, at: int, element: int = 5) -> Stage:
    """A device that flips the lowest bit of one element in one of its computations."""
    calls = itertools.count()

    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = stage(a, b).contiguous()
        if next(calls) == at:
            result.view(-1).view(torch.uint8)[element] ^= 1
        return result

    return compute


def test_the_same_device_gives_the_same_bits_again_in_every_stage() -> None:
    first, second = (take_fingerprint(CPU, n=N, repeats=3) for _ in range(2))
    assert first == second
    assert first.changed == {}
    assert first.repeatable == 1.0
    first.require_repeatable("here")


def test_every_dtype_is_multiplied_and_all_stages_give_bits_of_their_own() -> None:
    found = take_fingerprint(CPU, n=N, repeats=1)
    assert {name for name in found.digests if name.startswith("matmul ")} == {f"matmul {d}" for d in dtypes_of(CPU)}
    # TF32 is fp32 on cpu.
    others = [digest for name, digest in found.digests.items() if name != "matmul tf32"]
    assert len(set(others)) == len(others)


def test_other_numbers_and_sizes_give_other_bits() -> None:
    prints = [take_fingerprint(CPU, n=n, repeats=1, seed=seed) for n, seed in ((N, 0), (N, 1), (2 * N, 0))]
    for stage in stages_of(CPU):
        assert len({found.digests[stage] for found in prints}) == 3, stage


@of_each("stage", list(stages_of(CPU)))
def test_one_bit_of_any_stage_changes_its_fingerprint_and_no_other(stage: str) -> None:
    right = take_fingerprint(CPU, n=N, repeats=1)
    stages = dict(stages_of(CPU))
    stages[stage] = flipping(stages[stage], at=0)
    wrong = take_fingerprint(CPU, n=N, repeats=1, stages=stages)
    assert [name for name in right.digests if right.digests[name] != wrong.digests[name]] == [stage]


@of_each("stage", ["matmul bf16", "integers"])
def test_a_device_that_computes_something_else_the_second_time_is_told_with_the_stage(stage: str) -> None:
    stages = dict(stages_of(CPU))
    stages[stage] = flipping(stages[stage], at=2)
    found = take_fingerprint(CPU, n=N, repeats=4, stages=stages)
    assert found.changed == {stage: 1}
    assert found.repeatable == pytest.approx(1 - 1 / len(stages))
    with pytest.raises(WrongResult, match=f"^GPU 3 of node-b: .*: {stage} in 1 of 3 repeats"):
        found.require_repeatable("GPU 3 of node-b")


def test_a_first_time_that_was_wrong_differs_from_all_later_ones() -> None:
    stages: dict[str, Stage] = {"sums": flipping(stages_of(CPU)["sums"], at=0)}
    assert take_fingerprint(CPU, n=N, repeats=4, stages=stages).changed == {"sums": 3}


def test_the_operands_stay_as_they_are() -> None:
    random = torch.Generator().manual_seed(3)
    a, b = (torch.randn(N, N, generator=random) for _ in range(2))
    before = a.clone(), b.clone()
    for stage in stages_of(CPU).values():
        stage(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize(("n", "repeats"), [(0, 1), (100, 1), (64, 0)])
def test_arguments_out_of_range_are_refused(n: int, repeats: int) -> None:
    with pytest.raises(ValueError, match=r"multiple of 64, and repeats.* 1"):
        take_fingerprint(CPU, n=n, repeats=repeats)


def test_too_little_memory_is_told_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: torch.device, needed: int, what: str, *, instead: str) -> None:
        raise EnvironmentBroken(f"{what} needs {needed}; {instead}")

    monkeypatch.setattr(fingerprint, "require_free", full)
    with pytest.raises(EnvironmentBroken, match=r"n=64 needs 393216; choose smaller .* determinism\.n=1024"):
        take_fingerprint(CPU, n=N, repeats=1)


def test_torch_is_asked_for_the_same_bits_meanwhile_and_not_afterwards() -> None:
    seen: list[int] = []

    def stage(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_deterministic_debug_mode())
        return a

    before = torch.get_deterministic_debug_mode()
    take_fingerprint(CPU, n=N, repeats=1, stages={"one": stage})
    assert seen == [2]
    assert torch.get_deterministic_debug_mode() == before
