"""All health checks of one GPU with their result, and whether the GPUs of all ranks are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.finding import Finding, identity, require_nothing
from pytest_gpucluster.node.health import checks, interconnect_checks
from pytest_gpucluster.node.health.snapshot import HealthSnapshot
from pytest_gpucluster.text import rank_ranges

CHECKS: tuple[Callable[[HealthSnapshot], Iterator[Finding]], ...] = (
    checks.check_answers,
    checks.check_memory,
    checks.check_ecc,
    checks.check_thermal,
    checks.check_power,
    checks.check_pcie,
    interconnect_checks.check_nvlink,
    interconnect_checks.check_nvlink_fabric,
    checks.check_xids,
    checks.check_configuration,
    interconnect_checks.check_node,
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A value for the report. ``record_only``: findings decide, not a limit."""

    metric: str
    value: float
    unit: str
    record_only: bool = True


def examine_gpu(snapshot: HealthSnapshot) -> tuple[Finding, ...]:
    """Apply every check; return the findings in their order."""
    return tuple(finding for check in CHECKS for finding in check(snapshot))


def readings(snapshot: HealthSnapshot) -> Iterator[Reading]:
    """Yield the values that NVML reported."""
    total, free = snapshot.before.get("memory.total"), checks.free_ratio(snapshot)
    if total is not None:
        # The limit is for a whole GPU; a slice has a part of its memory.
        yield Reading(metric="gpu.memory.total", value=total / 1e9, unit="GB", record_only=snapshot.is_slice)
    if free is not None:
        yield Reading(metric="gpu.memory.free", value=100 * free, unit="%")
    hottest = max(snapshot.loaded("temperature.gpu"), default=None)
    if hottest is not None:
        yield Reading(metric="gpu.temperature", value=hottest, unit="degC")
    limit = checks.limit_ratio(snapshot)
    if limit is not None:
        yield Reading(metric="gpu.power_limit", value=100 * limit, unit="%")


def require_healthy(snapshot: HealthSnapshot, findings: Iterable[Finding]) -> None:
    """Raise the findings of :func:`examine_gpu`, each with its GPU and what to do; notes are printed.

    The failure of a load under CUDA is raised unchanged; the findings, which may explain it, are printed before.

    Raises:
        RuntimeError: the load's own failure.
        HardwareFault: the hardware is to be rejected.
        EnvironmentBroken: the environment is at fault: the GPU could not be checked, or other processes use it.
    """
    if snapshot.load_failure is not None:
        print("\n".join(map(str, findings)))
        raise snapshot.load_failure
    require_nothing(findings)


COMPARED = {
    "vbios": "VBIOS",
    "memory_bytes": "device memory in bytes",
    "power_limit_watts": "enforced power limit in W",
    "ecc": "ECC",
    "mig": "MIG",
}
"""Key of a rank's ``gpu`` in the inventory -> what it is."""

_MAY_BE_UNKNOWN = ("ecc", "mig")
"""Some cards have neither. Within a fleet the answer must still be the same."""

_MOST_NAMED = 16


def require_uniform(inventory: Sequence[Mapping[str, Any]]) -> None:
    """Compare the GPUs of all ranks, and name those that differ.

    Raises:
        HardwareFault: they differ; the message has each value and its ranks.
        EnvironmentBroken: a value is unknown on a rank.
    """
    unknown, different = [], []
    odd: set[int] = set()
    for key, words in COMPARED.items():
        values = {int(who["rank"]): who["gpu"].get(key) for who in inventory}
        missing = [rank for rank, value in values.items() if value is None]
        if missing and (key not in _MAY_BE_UNKNOWN or len(missing) < len(values)):
            unknown.append(f"{words}: not known of {rank_ranges(missing)}")
        known = Counter(value for value in values.values() if value is not None)
        if len(known) > 1:
            different.append(f"{words}: {_split(values, known, inventory)}")
            usual = known.most_common(1)[0][0]
            odd |= {rank for rank, value in values.items() if value not in (None, usual)}
    what_to_do = "what to do: bring the named nodes to the same firmware and settings, or have them replaced"
    if different:
        names = [f"- rank {who['rank']}: {identity(who)}" for who in inventory if int(who["rank"]) in odd]
        more = [f"- and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        raise HardwareFault(
            "\n".join(
                [f"GPUs of the fleet differ: {different[0]}", *different[1:], *names[:_MOST_NAMED], *more, what_to_do]
            )
        )
    if unknown:
        raise EnvironmentBroken(
            f"GPUs cannot be compared: {'; '.join(unknown)}\n"
            "what to do: look at the ranks' NVML (`nvidia-smi -q`), and run again where it answers"
        )


def _split(values: Mapping[int, Any], known: Counter[Any], inventory: Sequence[Mapping[str, Any]]) -> str:
    hosts = {int(who["rank"]): str(who["host"]) for who in inventory}
    parts = []
    for value, _ in reversed(known.most_common()):
        ranks = [rank for rank, other in values.items() if other == value]
        places = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        parts.append(f"{value} on {rank_ranges(ranks)} ({places})")
    return "; ".join(parts)
