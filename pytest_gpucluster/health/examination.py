"""All checks on one GPU, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.health import (
    answers,
    configuration,
    ecc,
    fabric,
    memory,
    node,
    nvlink,
    pcie,
    power,
    thermal,
    xid,
)
from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding, Kind

CHECKS: tuple[Callable[[Situation], Iterator[Finding]], ...] = (
    answers.check,
    memory.check,
    ecc.check,
    thermal.check,
    power.check,
    pcie.check,
    nvlink.check,
    fabric.check,
    xid.check,
    configuration.check,
    node.check,
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A figure for the report. ``record_only``: a finding decides about it, not a limit."""

    metric: str
    value: float
    unit: str
    record_only: bool = True


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found, in the order of the checks."""

    situation: Situation
    findings: tuple[Finding, ...]

    def of_kind(self, kind: Kind) -> tuple[Finding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def readings(self) -> Iterator[Reading]:
        """Return the figures that NVML told."""
        situation = self.situation
        total, free = situation.before.get("memory.total"), memory.free_ratio(situation)
        if total is not None:
            # The limit is about a whole GPU, a slice has a part of its memory.
            part = situation.is_slice
            yield Reading(metric="gpu.memory.total", value=total / 1e9, unit="GB", record_only=part)
        if free is not None:
            yield Reading(metric="gpu.memory.free", value=100 * free, unit="%")
        hottest = max(situation.loaded("temperature.gpu"), default=None)
        if hottest is not None:
            yield Reading(metric="gpu.temperature", value=hottest, unit="degC")
        limit = power.limit_ratio(situation)
        if limit is not None:
            yield Reading(metric="gpu.power_limit", value=100 * limit, unit="%")

    def require_healthy(self) -> None:
        """Raise what was found, each finding with its GPU and what to do.

        A load that has failed under CUDA is raised as it is, for what it says of this process; the findings, which may
        tell why, are printed before.

        Raises:
            RuntimeError: the load's own failure.
            HardwareFault: the hardware is to be rejected.
            EnvironmentBroken: only the environment is at fault: the GPU could not be judged, or is disturbed.
        """
        hardware, environment = self.of_kind("hardware"), self.of_kind("environment")
        if self.situation.load_failure is not None:
            print(_text(hardware + environment + self.of_kind("note")))
            raise self.situation.load_failure
        if hardware:
            raise HardwareFault(_text(hardware + environment + self.of_kind("note")))
        if environment:
            raise EnvironmentBroken(_text(environment + self.of_kind("note")))


def examine(situation: Situation) -> Examination:
    """Apply every check."""
    return Examination(situation=situation, findings=tuple(finding for check in CHECKS for finding in check(situation)))


def _text(findings: tuple[Finding, ...]) -> str:
    """Return the decisive findings' codes in one line, then each finding in a line of its own."""
    decisive = [finding for finding in findings if finding.kind != "note"]
    codes = ", ".join(dict.fromkeys(finding.code for finding in decisive))
    places = ", ".join(dict.fromkeys(str(finding.gpu) for finding in decisive))
    return "\n".join([f"{codes}: {places}", *(f"- {finding}" for finding in findings)])
