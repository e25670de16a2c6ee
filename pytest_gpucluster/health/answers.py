"""Does the GPU answer, and does NVML tell what health is judged by?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import UNDER_LOAD, Missing, Situation
from pytest_gpucluster.metrics.datasheets import ANY_GPU
from pytest_gpucluster.metrics.finding import Finding


def check(situation: Situation) -> Iterator[Finding]:
    """Report a lost GPU, each required query without a value, and in one note all others."""
    lost = _lost(situation)
    if lost:
        yield situation.finding(
            "gpu_lost",
            "hardware",
            f"the GPU does not answer any more: {lost}",
            allowed="a GPU that answers",
            remedy="take the node out of service, power it off and on, and have the GPU replaced if that does not help",
        )
        return
    required = situation.promise.required_queries if situation.promise else ANY_GPU
    absent = _absent(situation)
    for query in required:
        if query in absent:
            yield situation.finding(
                "query_missing",
                "environment",
                f"NVML does not tell {query}: {absent[query].reason}",
                allowed=f"a value, without which the health of a {situation.sku or 'GPU'} cannot be judged",
                remedy=_remedy(absent[query]),
            )
    others = [f"{query} ({missing.reason})" for query, missing in absent.items() if query not in required]
    if others:
        yield situation.finding(
            "not_available",
            "note",
            f"not available: {'; '.join(others)}",
            allowed="anything",
            remedy="nothing, unless this GPU should have them",
        )
    if situation.promise is None:
        yield situation.finding(
            "sku_unknown",
            "note",
            f"nothing is promised of this kind of GPU (SKU {situation.sku or 'unknown'})",
            allowed="anything",
            remedy="judge memory, PCIe link and NVLinks by hand: here only the card's own word counts",
        )


def _lost(situation: Situation) -> str:
    reasons = [m.reason for s in situation.snapshots for m in s.missing.values() if m.kind == "lost"]
    return "; ".join(part for part in (reasons[0] if reasons else "", situation.load_error) if part)


def _absent(situation: Situation) -> dict[str, Missing]:
    """Queries without a value before or after load; those under load count only if they were read under load."""
    missing = {**situation.after.missing, **situation.before.missing}
    absent = {query: why for query, why in missing.items() if query not in UNDER_LOAD}
    for query in UNDER_LOAD:
        if situation.loaded(query):
            continue
        reasons = [s.missing[query] for s in situation.snapshots if query in s.missing]
        absent[query] = reasons[0] if reasons else Missing(reason="it was not read under load", kind="failed")
    return absent


def _remedy(missing: Missing) -> str:
    if missing.kind == "no permission":
        return "run as a user, or in a container, that may read it"
    if missing.kind == "not supported":
        return "update the driver and nvidia-ml-py, or name the right SKU with --gpucluster-sku"
    return "look at `nvidia-smi -q` on this host and run again"
