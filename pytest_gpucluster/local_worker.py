"""A worker of ``pytest -n N --dist each``: a rank that judges nothing, and sends the controller what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest

from pytest_gpucluster.agreement.exchange import RankOutcome
from pytest_gpucluster.left_behind import LeftBehind
from pytest_gpucluster.markers import criterion_of
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.metrics.time_budget import LEDGER
from pytest_gpucluster.phase import Phases
from pytest_gpucluster.run import Run
from pytest_gpucluster.session import Session

SAMPLER = "gpucluster_sampler"
"""The key of ``workerinput`` in which a worker is told of the node's sampler."""
DIRECTORY = "gpucluster_directory"
"""The key of ``workerinput`` in which a worker is told of the run's folder."""
PROPERTY = "gpucluster"
"""The one key of ``report.user_properties`` in which a worker's outcome travels, as plain JSON types."""


class Worker(Session):
    """One rank on the GPU of its own number; every other word is the controller's."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        super().__init__(config, run)
        self._phases = Phases(run, judges=False, keep=self._leave_behind)
        self._has_told = False

    def look_over(self, session: pytest.Session) -> None:
        """Leave it to the controller to say that the tests cannot be run: nothing is left to run here."""
        try:
            super().look_over(session)
        except pytest.UsageError as error:
            session.items[:] = []
            self._config.workeroutput[PROPERTY] = str(error)  # type: ignore[attr-defined]  # by xdist, for its workers

    def collected(self, session: pytest.Session) -> None:
        """Leave the comparison of collections to the controller."""

    def made(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Put this rank's outcome into the report, which travels to the controller."""
        outcome = self._phases.last_outcome
        run = self._run
        assert run.joined is not None
        record = run.records.get(item.nodeid)
        workload = run.workload_record.line() if run.workload_record is not None and not self._has_told else None
        self._has_told = True
        report.user_properties.append(
            (
                PROPERTY,
                {
                    "workload": workload,
                    "who": dict(run.joined.who[0]),
                    "criterion": criterion_of(item),
                    "applicable": record.applicable if record is not None else True,
                    "outcome": outcome.to_json() if outcome is not None else None,
                    "spent": LEDGER.told() if report.when == "teardown" else None,
                },
            )
        )

    def _leave_behind(self, item: pytest.Item, message: str, measured: Sequence[Measurement]) -> None:
        """Keep what an interrupted body has measured where the controller looks for it: no report is sent any more."""
        place = self._run.place
        if place is None or not place.directory or not measured:
            return
        outcome = RankOutcome(
            rank=place.index,
            outcome="error",
            message=message,
            text=message,
            measurements=[each.to_json() for each in measured],
        )
        left = LeftBehind(nodeid=item.nodeid, outcome=outcome, properties=list(item.user_properties))
        with suppress(OSError):  # then nothing is known of this worker, which is no pass, and Ctrl-C goes on
            left.write(self._run.artifacts_directory())

    def show(self, report: pytest.TestReport) -> None:
        """Say nothing: the controller does."""
        self._phases.shown.take_subtest(report)

    def finish(self, session: pytest.Session) -> None:
        """Keep pytest's own exit status: the verdict is the controller's."""
