"""Which faults a module makes: those that its selected tests ask for, some at once."""

from __future__ import annotations

import os

import pytest
from torchrun import Run, with_one_fault

TIMES_VARIABLE = "FAULT_TIMES"
"""Names the file that the times are written to. Then only one run goes on at a time in this pytest, so that none
disturbs another."""


def runs_of(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    *,
    deadline: float,
    at_once: int = 2,
    timeouts: str = "stuck=2",
) -> dict[tuple[str, int], Run]:
    """Run the suite of one fault for each fault and victim that is the parameter ``case`` of a selected test."""
    found = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if "case" in item.callspec.params
    ]
    return with_one_fault(
        tmp_path_factory.mktemp,
        dict.fromkeys(found),
        deadline=deadline,
        at_once=1 if TIMES_VARIABLE in os.environ else at_once,
        timeouts=timeouts,
    )


def params(*cases: tuple[str, int]) -> list[object]:
    """Return the cases as parameters, with their ids."""
    return [pytest.param(case, id=f"{case[0]}-{case[1]}") for case in cases]
