"""Are the GPUs of all ranks alike?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.finding import identity
from pytest_gpucluster.text import rank_ranges

COMPARED = {
    "vbios": "VBIOS",
    "memory_bytes": "device memory in bytes",
    "power_limit_watts": "enforced power limit in W",
    "ecc": "ECC",
    "mig": "MIG",
}
"""Key of a rank's ``gpu`` in the inventory -> what it is."""

_MAY_BE_UNKNOWN = ("ecc", "mig")
"""Some cards have neither. All of a fleet must still say the same."""

_MOST_NAMED = 16


def require_uniform(inventory: Sequence[Mapping[str, Any]]) -> None:
    """Compare the GPUs of all ranks, and name the odd ones.

    Raises:
        HardwareFault: they differ; says in what, and which ranks have which value.
        EnvironmentBroken: what is compared is not known of every rank.
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
