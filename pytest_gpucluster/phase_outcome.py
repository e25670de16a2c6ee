"""How a phase has ended on this rank: passed, failed, skipped, or released because another one did not come."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.outcomes import Failed, Skipped  # pytest.fail.Exception and pytest.skip.Exception, for type checkers
from _pytest.skipping import xfailed_key

from pytest_gpucluster import errors
from pytest_gpucluster.agreement.exchange import RankOutcome
from pytest_gpucluster.agreement.release import Released
from pytest_gpucluster.errors import HardwareFault, InconclusiveMeasurement
from pytest_gpucluster.failure import (
    LONGEST_TEXT,
    clip,
    sections_of,
    skip_reason,
    summary_of,
    traceback_of,
    where_released,
)
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.run import Run

_EXPLAINED_SECONDS = 0.5
"""How long a rank whose connection was cut waits for news of the cause: a few rounds of its watcher."""
ON_TRIAL = pytest.StashKey[bool]()
"""In the stash of a test while its report is made on trial: it is thrown away."""
_MILD = (pytest.skip.Exception, pytest.xfail.Exception)
IN_CALL = pytest.StashKey[bool]()
"""In the stash of a test while its body runs: what is measured at another time would be judged by nobody."""
MEASUREMENTS = pytest.StashKey[list[Measurement]]()
"""What a test has measured so far on this rank, in its stash."""


def own_outcome(run: Run, item: pytest.Item, when: str, number: int, error: BaseException | None) -> RankOutcome:
    """Return how the body of a phase has ended on this rank.

    Args:
        run: what this process holds.
        item: the test.
        when: "setup", "call" or "teardown".
        number: of the phase's exchange, under which the watcher knows the phase.
        error: what the body has raised; None if it came to its end.
    """
    assert run.watch is not None
    rank = run.rank
    measurements = [m.to_json() for m in item.stash.get(MEASUREMENTS, [])] if when == "call" else []
    if error is None:
        # A body that was released may still come back as if nothing had been: an aborted wait returns without an
        # exception. What it measured or computed meanwhile means nothing.
        why = run.watch.released(number)
        if why is None:
            return RankOutcome(rank=rank, outcome="passed", measurements=measurements)
        return RankOutcome(rank=rank, outcome="released", message=first_line(why), text=why, measurements=measurements)
    if isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception)):
        return RankOutcome(rank=rank, outcome="skipped", message=first_line(str(error.msg)), text=str(error.msg))
    released = run.watch.released(number)
    cut = released is None and errors.connection_cut(error)
    if cut:
        released = run.watch.explanation(number, _EXPLAINED_SECONDS)
    if isinstance(error, Released) or released is not None:
        message, text = str(released or error), where_released(error)
        return RankOutcome(
            rank=rank, outcome="released", message=first_line(message), text=text, measurements=measurements
        )
    text = clip(traceback_of(item, when, error), LONGEST_TEXT)
    if run.rehearsal and isinstance(error, InconclusiveMeasurement):
        return RankOutcome(rank=rank, outcome="slow", message=first_line(str(error)), measurements=measurements)
    return RankOutcome(
        rank=rank,
        outcome="cut" if cut else errors.kind_of(error, when),
        message=first_line(summary_of(error)),
        text=text,
        measurements=measurements,
        sections=sections_of(item) if rank != 0 else (),
    )


def attached_failure(item: pytest.Item, when: str) -> BaseException | None:
    """Return what pytest will report of a phase whose body has raised nothing; None where it will report a pass.

    ``unittest.TestCase`` and plugins such as pytest-check keep their failures and attach them to the report when it is
    made, on the rank that has them. So the report is made once on trial, while all ranks can still agree on it. While
    that goes on :data:`ON_TRIAL` is in the item's stash.

    Returns:
        The exception that was attached, of several the first that is no skip, with a note of the others; or a failure,
        skip or expected failure with the text of the report.
    """
    call = pytest.CallInfo.from_call(lambda: None, when)  # type: ignore[arg-type]  # it is a Literal
    item.stash[ON_TRIAL] = True
    try:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    finally:
        del item.stash[ON_TRIAL]
    if call.excinfo is not None:
        rest = getattr(item, "_excinfo", None) or []  # of a TestCase: each report takes one
        found: list[BaseException] = [call.excinfo.value, *(one.value for one in rest)]
        rest.clear()
        worst = next((error for error in found if not isinstance(error, _MILD)), found[0])
        others = [f"also: {type(error).__name__}: {error}" for error in found if error is not worst]
        worst.__notes__ = [*getattr(worst, "__notes__", []), *others]  # type: ignore[attr-defined]
        return worst
    expected = item.stash.get(xfailed_key, None) is not None
    if report.skipped and hasattr(report, "wasxfail"):
        return Failed(report.wasxfail, pytrace=False) if expected else pytest.xfail.Exception(report.wasxfail)
    if report.passed or expected:  # a strict xfail that passes does so on all ranks
        return None
    if report.failed:
        return Failed(report.longreprtext or "its report was changed to failed", pytrace=False)
    return Skipped(skip_reason(report))


def worsened(own: RankOutcome, fault: HardwareFault) -> RankOutcome:
    """Return the outcome of a rank that has counted a fault of the hardware: it has failed, however its body has ended.
    What the body itself has come to stays first."""
    message = "; ".join(part for part in (own.message, first_line(str(fault))) if part)
    text = "\n\n".join(part for part in (own.text, f"{type(fault).__name__}: {fault}") if part)
    return replace(own, outcome="failed", message=first_line(message), text=text)


def expects_failure(item: pytest.Item, error: BaseException | None) -> bool:
    """Tell whether the test has an ``xfail`` marker that allows for this exception."""
    xfailed = item.stash.get(xfailed_key, None)
    if xfailed is None or item.config.option.runxfail:
        return False
    raises: Any = xfailed.raises  # exception types, or since pytest 8.4 a RaisesExc
    return raises is None or (raises.matches(error) if hasattr(raises, "matches") else isinstance(error, raises))
