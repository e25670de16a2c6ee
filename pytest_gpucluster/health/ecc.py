"""Is memory protected, and has the protection found anything beyond repair?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding

MOST_REMAPPED_ROWS = 512
"""Source: NVIDIA GPU Memory Error Management, row remapping: up to 512 remappings."""


def check(situation: Situation) -> Iterator[Finding]:
    """Look at ECC, its uncorrected errors, remapped rows and retired pages."""
    read = situation.before.get
    if read("ecc.mode") is False:
        promised = situation.promise is not None and situation.promise.ecc
        yield situation.finding(
            "ecc_off",
            "hardware" if promised else "note",
            "ECC is off",
            allowed="ECC on, as delivered",
            remedy="turn it on with `nvidia-smi -e 1` and reset the GPU",
        )
    errors = situation.worst("ecc.uncorrected.volatile")
    if errors:
        before = read("ecc.uncorrected.volatile") or 0
        when = f", {errors - before} of them under this test's load" if errors > before else ""
        yield situation.finding(
            "ecc_uncorrected",
            "hardware",
            f"{errors} uncorrected memory errors since the driver was loaded{when}",
            allowed="0",
            remedy="take the GPU out of service, reset it, and run the vendor's diagnostics (`dcgmi diag -r 3`)",
        )
    earlier = read("ecc.uncorrected.aggregate")
    if earlier and not errors:
        yield situation.finding(
            "ecc_history",
            "note",
            f"{earlier} uncorrected memory errors over the life of the card, none since the driver was loaded",
            allowed="anything",
            remedy="ask the vendor whether the card was used before",
        )
    yield from _rows(situation)
    if situation.worst("pages.pending"):
        yield situation.finding(
            "page_pending",
            "hardware",
            "a page of memory waits to be retired",
            allowed="no page waiting",
            remedy="reboot the node, and run again: the log of this boot has an Xid of it as a rule",
        )


def _rows(situation: Situation) -> Iterator[Finding]:
    if situation.worst("rows.failed"):
        yield situation.finding(
            "row_remap_failed",
            "hardware",
            "the remap of a faulty row of memory has failed",
            allowed="no failed remap",
            remedy="have the GPU replaced: this is the vendor's criterion for it",
        )
    if situation.worst("rows.pending"):
        yield situation.finding(
            "row_remap_pending",
            "hardware",
            "the remap of a faulty row of memory waits for a reset",
            allowed="no remap waiting",
            remedy="reboot the node, and run again: the log of this boot has an Xid of it as a rule",
        )
    remapped = (situation.worst("rows.remapped.corrected") or 0) + (situation.worst("rows.remapped.uncorrected") or 0)
    if remapped > MOST_REMAPPED_ROWS:
        yield situation.finding(
            "rows_remapped",
            "hardware",
            f"{remapped} rows of memory are remapped",
            allowed=f"at most {MOST_REMAPPED_ROWS}",
            remedy="have the GPU replaced",
        )
