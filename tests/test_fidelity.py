"""perf/fidelity.py: both sides do the same work, and what is not as good as a bare loop is said to be so."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest
import torch

from pytest_gpucluster.benchmarks.matmul_shape import Shape
from pytest_gpucluster.benchmarks.training.decoder import Geometry

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import fidelity
    import fidelity_subjects
    import pairs
finally:
    sys.path.remove(str(PERF))

CPU = torch.device("cpu")
SHORT = fidelity_subjects.sampling_of(0.0, 0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fidelity_subjects.Matmul(CPU, Shape.square(32), dtype="bf16", sampling=SHORT),
        lambda: fidelity_subjects.Matmul(CPU, Shape.square(32), dtype="fp32", sampling=SHORT),
        lambda: fidelity_subjects.Matmul(CPU, Shape(m=32, n=16, k=8, layout="nt"), dtype="bf16", sampling=SHORT),
        lambda: fidelity_subjects.HbmCopy(CPU, payload_bytes=2**16, sampling=SHORT),
        lambda: fidelity_subjects.TrainingStep(
            CPU,
            geometry=Geometry(layers=1, width=16, heads=2, vocab=32, sequence=8),
            batch=2,
            compiled=False,
            sampling=SHORT,
        ),
    ],
    ids=["matmul bf16", "matmul fp32", "rectangle", "hbm", "training"],
)
def test_a_pair_has_the_seconds_of_both_sides(make) -> None:  # type: ignore[no-untyped-def]
    subject = make()
    taken = [subject.take(number) for number in range(2)]
    assert all(set(pair) == {"ours", "bare", "again"} for pair in taken)
    assert all(0 < seconds < math.inf for pair in taken for seconds in pair.values())
    assert subject.each > 0


def test_the_bare_loop_calls_each_operand_set_in_turn() -> None:
    called: list[int] = []
    fidelity_subjects.BareLoop(CPU, called.append, SHORT).seconds()
    assert called[:5] == [0, 1, 0, 1, 2]  # connects, tries, measures
    assert called[5:] == list(range(len(called) - 5))


def test_each_way_is_taken_once_and_the_order_changes() -> None:
    orders = []
    for number in range(6):
        order: list[str] = []
        pairs.in_turn(
            number, lambda order=order: order.append("ours") or 1.0, lambda order=order: order.append("bare") or 1.0
        )
        assert sorted(order) == ["bare", "bare", "ours"]
        orders.append(order.index("ours"))
    assert set(orders) == {0, 1, 2}


def test_a_slower_way_is_missed_and_says_so() -> None:
    same = [{"ours": 1.0, "bare": 1.0 + number / 1000, "again": 1.0} for number in range(-10, 11)]
    slow = [pair | {"ours": 1.2} for pair in same]
    text, good = fidelity.row("matmul", "TFLOPS", 4.0, same, "cuda")
    assert good
    assert text == "| matmul | 4 TFLOPS | 4 TFLOPS | 1.000 (0.995 to 1.005) | 1.000 (0.990 to 1.010) | good |"
    text, good = fidelity.row("matmul", "TFLOPS", 4.0, slow, "cuda")
    assert not good
    assert "| 3.333 TFLOPS |" in text
    assert text.endswith("| MISSED |")


def test_names_that_are_unknown_are_refused() -> None:
    with pytest.raises(Exception, match="'matmul,hbn' is not some of matmul, rectangle, hbm, training"):
        fidelity.some_of(fidelity.SUBJECTS)("matmul,hbn")


@pytest.mark.parametrize(("missing", "code"), [("", 0), ("no Triton here", 1)], ids=["whole", "a way is missing"])
def test_a_row_that_lacks_a_way_to_compare_with_is_not_good(
    missing: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Subject:
        name, unit, each = "HBM copy", "GB/s", 1.0

        def take(self, number: int) -> dict[str, float]:
            return {"ours": 1.0, "bare": 1.0, "again": 1.0}

    Subject.missing = missing  # type: ignore[attr-defined]
    monkeypatch.setattr(fidelity, "makers", lambda arguments: [Subject])
    assert fidelity.run(argparse.Namespace(pairs=20, device="cpu")) == code
    assert ("NOT WHOLE: no Triton here" in capsys.readouterr().out) == bool(missing)
