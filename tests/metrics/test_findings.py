"""Findings end a test by their kind, and notes never do."""

import pytest
from complaints import in_order

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.finding import decisive, finding, require_nothing


def found(kind, code="x"):
    return finding(kind, code, "node-a", "5", allowed="6", remedy="add one")


def test_notes_are_printed_and_end_nothing(capsys):
    require_nothing([found("note"), found("note")])
    assert in_order(capsys.readouterr().out, "node-a: x (note): 5; 6; add one node-a: x (note): 5; 6; add one")
    require_nothing([])
    assert [one.kind for one in decisive([found("note"), found("hardware")])] == ["hardware"]


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        (["environment"], EnvironmentBroken),
        (["note", "environment"], EnvironmentBroken),
        (["environment", "hardware"], HardwareFault),
    ],
    ids=str,
)
def test_the_worst_kind_says_how_the_test_ends(kinds, error):
    with pytest.raises(error) as raised:
        require_nothing(found(kind, f"of.{kind}") for kind in kinds)
    first, *lines = str(raised.value).splitlines()
    assert first == ", ".join(f"of.{kind}" for kind in kinds if kind != "note") + ": node-a: 5"
    assert (raised.value.ranks, raised.value.hosts) == ((), ("node-a",))
    assert len(lines) == len(kinds)
