"""Which faults a module makes: those that its selected tests ask for, some at once."""

import os

import pytest
from torchrun import with_one_fault

TIMES_VARIABLE = "FAULT_TIMES"
"""Names the file that the times are written to. Then only one run goes on at a time in this pytest, so that none
disturbs another."""


def runs_of(request, tmp_path_factory, *, deadline, at_once=2, timeouts="stuck=2"):
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


def params(*cases):
    """Return the cases as parameters, with their ids."""
    return [pytest.param(case, id=f"{case[0]}-{case[1]}") for case in cases]
