"""What a sweep needs of a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from pytest_gpucluster.sweep.outcome import Outcome

TOGETHER = "together"
"""What the joint run is called where a node's name would stand."""


class Scheduler(Protocol):
    """Starts the runs of a sweep, and ends them. Every wait in it has a deadline."""

    def alone(self, nodes: Sequence[str]) -> Iterator[Outcome]:
        """Run every node for itself, and yield what became of each as it ends.

        Where a scheduler puts a second run on a node, that node comes again: the worse outcome counts.
        """

    def together(self, nodes: Sequence[str]) -> Outcome:
        """Run these nodes as one cluster. The outcome's node is ``TOGETHER``."""

    def stop(self) -> Sequence[str]:
        """End whatever was started and still runs. Return what could not be ended, a line each; never raise."""
