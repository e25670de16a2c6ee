"""What was found and what is to be done about it, taken from the text of a failure."""

from __future__ import annotations

from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.reports.html.criterion import advice_in

GPU = Identity(host="gpu-02", index=3, uuid="GPU-1", serial="165", pci="00000000:5D:00.0")


def finding(**changes: str) -> Finding:
    fields = {
        "code": "ecc.uncorrected",
        "found": "2 errors: since reboot",
        "allowed": "0",
        "remedy": "drain; reset",
    }
    return Finding(kind="hardware", gpu=GPU, **{**fields, **changes})


def test_a_finding_of_the_health_criterion_is_taken_apart_as_it_writes_it() -> None:
    (found,) = advice_in([f"1 finding\n  {finding()}\nE   assert not findings"])
    assert found.where == str(GPU)
    assert (found.code, found.kind, found.allowed) == ("ecc.uncorrected", "hardware", "0")
    assert found.found == "2 errors: since reboot"
    assert found.remedy == "drain; reset"


def test_the_same_advice_stands_once_and_lines_of_source_code_are_none() -> None:
    text = f"{finding()}\nE       what to do: reboot\n>       raise Error('what to do: nothing')\nwhat to do: reboot"
    assert [each.remedy for each in advice_in([text, text])] == ["drain; reset", "reboot"]
    assert advice_in(["585 TFLOPS < 700 TFLOPS", "", "what to do:", "someone: x (hardware): half a finding"]) == ()


def test_a_hostile_text_takes_no_long_time_and_stays_bounded() -> None:
    text = "\n".join(
        ["a: " * 5000 + "x (hardware): " + "; allowed: " * 2000, *(f"what to do: {i}" for i in range(900))]
    )
    found = advice_in([text])
    assert len(found) == 64
    assert max(len(each.remedy) for each in found) <= 600
