"""The verdict on one GPU by its findings, its values for the report, and whether the GPUs of all ranks are equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.finding import Finding, identity, require_nothing
from pytest_gpucluster.node.health import checks
from pytest_gpucluster.node.health.snapshot import HealthSnapshot
from pytest_gpucluster.text import rank_ranges


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A value for the report. ``record_only``: findings decide, not a limit."""

    metric: str
    value: float
    unit: str
    record_only: bool = True


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
    limit, default = snapshot.before.get("power.limit"), snapshot.before.get("power.limit.default")
    if limit is not None and default:
        yield Reading(metric="gpu.power_limit", value=100 * limit / default, unit="%")


def require_healthy(snapshot: HealthSnapshot, findings: Iterable[Finding]) -> None:
    """Raise the findings of ``checks.examine_gpu``, each with its GPU and what to do; notes are printed.

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
    hosts = {int(who["rank"]): str(who["host"]) for who in inventory}
    for key, words in COMPARED.items():
        ranks: dict[Any, list[int]] = {}
        for who in inventory:
            ranks.setdefault(who["gpu"].get(key), []).append(int(who["rank"]))
        missing = ranks.pop(None, [])
        if missing and (ranks or key not in _MAY_BE_UNKNOWN):
            unknown.append(f"{words}: not known of {rank_ranges(missing)}")
        if len(ranks) > 1:
            usual, *rare = sorted(ranks, key=lambda value: len(ranks[value]), reverse=True)
            odd.update(*(ranks[value] for value in rare))
            parts = [
                f"{value} on {rank_ranges(ranks[value])} ({', '.join(dict.fromkeys(hosts[r] for r in ranks[value]))})"
                for value in (*reversed(rare), usual)
            ]
            different.append(f"{words}: {'; '.join(parts)}")
    what_to_do = "what to do: bring the named nodes to the same firmware and settings, or have them replaced"
    if different:
        names = [f"- rank {who['rank']}: {identity(who)}" for who in inventory if int(who["rank"]) in odd]
        more = [f"- and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        first = f"GPUs of the fleet differ: {different[0]}"
        raise HardwareFault("\n".join([first, *different[1:], *names[:_MOST_NAMED], *more, what_to_do]))
    if unknown:
        raise EnvironmentBroken(
            f"GPUs cannot be compared: {'; '.join(unknown)}\n"
            "what to do: look at the ranks' NVML (`nvidia-smi -q`), and run again where it answers"
        )
