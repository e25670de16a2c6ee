"""Health checks of one GPU: answers, memory, ECC, thermal, power, PCIe, configuration, and the driver's reports.

- answers: the GPU answers, and NVML reports the required values
- memory: it has the promised size, and only this job uses it
- ECC: it is on, with no uncorrected errors and no failed or pending repair
- thermal, power: no thermal throttling under load, and the power limit is the default
- PCIe: full speed and width, read under load, for idle links slow down
- configuration: MIG as declared
- Xids: NVML's recovery action, and the driver's reports in the kernel log of this boot
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_gpucluster.metrics.datasheets import ANY_GPU
from pytest_gpucluster.metrics.finding import Finding, Identity, environment, finding, hardware, note
from pytest_gpucluster.node.health.snapshot import UNDER_LOAD, HealthSnapshot
from pytest_gpucluster.node.health.xid_table import lookup, recovery_action
from pytest_gpucluster.node.kernel_log import Xid
from pytest_gpucluster.node.nvml import Missing
from pytest_gpucluster.node.sysfs import pci_address

LOST_REMEDY = "take the node out of service, power it off and on, and have the GPU replaced if that does not help"


def check_answers(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Report a lost GPU, each required query without a value, and in one note the others that failed."""
    lost = _lost(snapshot)
    if lost:
        yield hardware(
            "gpu_lost",
            snapshot.gpu,
            f"the GPU no longer answers: {lost}",
            allowed="a GPU that answers",
            remedy=LOST_REMEDY,
        )
        return
    required = snapshot.promise.required_queries if snapshot.promise else ANY_GPU
    absent = _absent(snapshot)
    for query in required:
        if query in absent:
            yield environment(
                "query_missing",
                snapshot.gpu,
                f"NVML does not report {query}: {absent[query].reason}",
                allowed=f"a value, without which the health of a {snapshot.sku or 'GPU'} cannot be judged",
                remedy=_remedy(absent[query]),
            )
    others = {query: missing for query, missing in absent.items() if query not in required}
    failed = [f"{query} ({missing.reason})" for query, missing in others.items() if missing.kind != "not supported"]
    if failed:
        found = f"not available: {'; '.join(failed)}"
        yield note("not_available", snapshot.gpu, found, remedy="look at `nvidia-smi -q`")
    if snapshot.promise is None:
        yield note(
            "sku_unknown",
            snapshot.gpu,
            f"no data sheet values for this SKU ({snapshot.sku or 'unknown'})",
            remedy="check memory, PCIe link and NVLinks by hand: here only the card's own maximum is compared",
        )


def _lost(snapshot: HealthSnapshot) -> str:
    reason = next((values.lost for values in snapshot.all_values if values.lost), "")
    return "; ".join(part for part in (reason, snapshot.load_error) if part)


def _absent(snapshot: HealthSnapshot) -> dict[str, Missing]:
    """Queries without a value before or after load; those under load count only if they were read under load."""
    missing = {**snapshot.after.missing, **snapshot.before.missing}
    absent = {query: why for query, why in missing.items() if query not in UNDER_LOAD}
    for query in UNDER_LOAD:
        if snapshot.loaded(query):
            continue
        reasons = [s.missing[query] for s in snapshot.all_values if query in s.missing]
        absent[query] = reasons[0] if reasons else Missing(reason="it was not read under load", kind="failed")
    return absent


def _remedy(missing: Missing) -> str:
    if missing.kind == "no permission":
        return "run as a user, or in a container, with permission to read it"
    if missing.kind == "not supported":
        return "update the driver and nvidia-ml-py, or name the right SKU with --gpucluster-sku"
    return "look at `nvidia-smi -q` on this host and run again"


LEAST_FREE_RATIO = 0.95
"""Part of the memory that no other process may use. Source: this suite's rule; what the driver reserves, 1 to 2 %,
is not counted as used."""


def check_memory(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare the size with the data sheet, and the memory used by other processes with the limit; name them."""
    yield from _size(snapshot)
    free = free_ratio(snapshot)
    if free is None:
        return
    strangers = _strangers(snapshot)
    if free < LEAST_FREE_RATIO:
        taken = taken_bytes(snapshot) or 0
        by = "; ".join(strangers) or "no process that NVML lists"
        yield environment(
            "memory_taken",
            snapshot.gpu,
            f"{taken / 1e9:.2f} GB are used by other processes, {100 * free:.1f} % are free: {by}",
            allowed=f"at least {100 * LEAST_FREE_RATIO:g} % free, not counting this job's own ranks",
            remedy="end the named process and start again, or reset the GPU where none is named",
        )
    elif strangers and not _may_be_this_one(snapshot):
        yield note(
            "stranger",
            snapshot.gpu,
            f"others have a context on this GPU: {'; '.join(strangers)}",
            allowed="only this job, for numbers that mean something",
            remedy="find out what it does, and measure again without it if numbers are low",
        )


def free_ratio(snapshot: HealthSnapshot) -> float | None:
    """Return the part of the memory that no other job uses; None where NVML does not report it."""
    total, taken = snapshot.before.get("memory.total"), taken_bytes(snapshot)
    return None if not total or taken is None else 1 - taken / total


def taken_bytes(snapshot: HealthSnapshot) -> int | None:
    """Return the bytes that other processes use; None where NVML does not report it.

    In a container NVML may list processes by the host's pids. This job's ranks are then not among them, and only what
    this process's allocator holds is counted as its own; its context, some 0.5 GB, counts as another process's.
    """
    used = snapshot.before.get("memory.used")
    if used is None:
        return None
    listed = _listed(snapshot)
    own = [listed[pid] for pid in snapshot.own_pids if pid in listed]
    known = sum(bytes_ for bytes_ in own if bytes_ is not None)
    return max(0, int(used) - max(known, snapshot.held_bytes))


def _size(snapshot: HealthSnapshot) -> Iterator[Finding]:
    total, promise = snapshot.before.get("memory.total"), snapshot.promise
    # A slice has a part of the memory, and the promise is about the whole.
    if promise is None or total is None or snapshot.is_slice or total >= promise.memory_gb * 1e9:
        return
    yield hardware(
        "memory_size",
        snapshot.gpu,
        f"{total / 1e9:.2f} GB of device memory",
        allowed=f"at least {promise.memory_gb:g} GB, by the data sheet of the {snapshot.sku}",
        remedy="compare the product with the order, and have the vendor look at the card",
    )


def _strangers(snapshot: HealthSnapshot) -> list[str]:
    """Describe the processes that are not this job's."""
    listed = _listed(snapshot)
    named = []
    for pid, used in listed.items():
        if pid not in snapshot.own_pids:
            size = "an unknown amount" if used is None else f"{used / 1e9:.2f} GB ({used} bytes)"
            named.append(f"{snapshot.who.get(pid) or f'pid {pid}'} with {size}")
    return named


def _may_be_this_one(snapshot: HealthSnapshot) -> bool:
    """Whether NVML lists one process only, by a pid that is not of this namespace: then it is this one."""
    listed = _listed(snapshot)
    return len(listed) == 1 and all(pid in snapshot.who and not snapshot.who[pid].known for pid in listed)


def _listed(snapshot: HealthSnapshot) -> dict[int, int | None]:
    """Return pid -> bytes of the processes that NVML lists."""
    return dict(snapshot.before.get("processes") or ())


MOST_REMAPPED_ROWS = 512
"""Source: NVIDIA GPU Memory Error Management, row remapping: up to 512 remappings."""


_DIAGNOSE = "take the GPU out of service, reset it, and run the vendor's diagnostics (`dcgmi diag -r 3`)"
_RESET = "reboot the node, and run again: the log of this boot has an Xid of it as a rule"
_REPLACE = "have the GPU replaced: this is the vendor's criterion for it"
MEMORY_FAULTS: Mapping[str, tuple[str, str, str]] = {
    "ecc.uncorrected.volatile": ("ecc_uncorrected", "uncorrected memory errors", _DIAGNOSE),
    "ecc.uncorrected.aggregate": ("ecc_uncorrected", "uncorrected memory errors over the life of the card", _DIAGNOSE),
    "rows.remapped.uncorrected": ("row_remapped", "rows of memory remapped after uncorrectable errors", _DIAGNOSE),
    "rows.failed": ("row_remap_failed", "failed remap of a faulty row of memory", _REPLACE),
    "rows.pending": ("row_remap_pending", "remap of a faulty row of memory, which waits for a reset", _RESET),
    "pages.pending": ("page_pending", "page of memory that waits to be retired", _RESET),
}
"""Counter whose growth during a test is a fault -> code, what it counts, remedy."""


def check_ecc(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check ECC, uncorrected errors, remapped rows and retired pages."""
    read, gpu = snapshot.before.get, snapshot.gpu
    if read("ecc.mode") is False:
        promised = snapshot.promise is not None and snapshot.promise.ecc
        yield finding(
            "hardware" if promised else "note",
            "ecc_off",
            gpu,
            "ECC is off",
            allowed="ECC on, as delivered",
            remedy="turn it on with `nvidia-smi -e 1` and reset the GPU",
        )
    errors = snapshot.worst("ecc.uncorrected.volatile")
    if errors:
        before = read("ecc.uncorrected.volatile") or 0
        when = f", {errors - before} of them under this test's load" if errors > before else ""
        found = f"{errors} uncorrected memory errors since the driver was loaded{when}"
        yield hardware("ecc_uncorrected", gpu, found, allowed="0", remedy=_DIAGNOSE)
    earlier = read("ecc.uncorrected.aggregate")
    if earlier and not errors:
        found = f"{earlier} uncorrected memory errors over the life of the card, none since the driver was loaded"
        yield note("ecc_history", gpu, found, remedy="ask the vendor whether the card was used before")
    if snapshot.worst("rows.failed"):
        found = "the remap of a faulty row of memory has failed"
        yield hardware("row_remap_failed", gpu, found, allowed="no failed remap", remedy=_REPLACE)
    if snapshot.worst("rows.pending"):
        found = "the remap of a faulty row of memory waits for a reset"
        yield hardware("row_remap_pending", gpu, found, allowed="no remap waiting", remedy=_RESET)
    remapped = (snapshot.worst("rows.remapped.corrected") or 0) + (snapshot.worst("rows.remapped.uncorrected") or 0)
    if remapped > MOST_REMAPPED_ROWS:
        found, allowed = f"{remapped} rows of memory are remapped", f"at most {MOST_REMAPPED_ROWS}"
        yield hardware("rows_remapped", gpu, found, allowed=allowed, remedy="have the GPU replaced")
    if snapshot.worst("pages.pending"):
        found = "a page of memory waits to be retired"
        yield hardware("page_pending", gpu, found, allowed="no page waiting", remedy=_RESET)


BAD_REASONS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal": "hardware thermal slowdown",
    "sw_thermal": "software thermal slowdown",
    "hw_power_brake": "power brake by the power supply",
}
"""Throttle reasons of a GPU that is too hot or short of power. A healthy one at its power limit shows sw_power_cap."""

_EXPECTED = {"sw_power_cap", "gpu_idle"}


def check_thermal(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check the throttle reasons under load, and the temperature against the card's own slowdown limit."""
    seen = {reason for reasons in snapshot.loaded("throttle.reasons") for reason in reasons}
    bad = [f"{words} ({name})" for name, words in BAD_REASONS.items() if name in seen]
    if bad:
        hottest = max(snapshot.loaded("temperature.gpu"), default=None)
        at = "" if hottest is None else f", at up to {hottest} degC"
        yield hardware(
            "throttle",
            snapshot.gpu,
            f"clocks held down under load by: {', '.join(bad)}{at}",
            allowed="no thermal and no hardware slowdown",
            remedy="look at airflow or coolant, heat sink and power supplies of this node",
        )
    others = sorted(seen - set(BAD_REASONS) - _EXPECTED)
    if others:
        yield note(
            "clocks_held",
            snapshot.gpu,
            f"clocks held down under load by: {', '.join(others)}",
            allowed="anything, as long as the GPU is fast enough",
            remedy="reset clocks that were locked: `nvidia-smi -rgc`, `nvidia-smi -rac`",
        )
    yield from _temperature(snapshot)


def _temperature(snapshot: HealthSnapshot) -> Iterator[Finding]:
    hottest = max(snapshot.loaded("temperature.gpu"), default=None)
    limit = snapshot.before.get("temperature.slowdown")
    margins = snapshot.loaded("temperature.margin")
    too_hot = ""
    # Some drivers report 0 for a card without a limit; one that slows down has a throttle reason as well.
    if limit and hottest is not None and hottest >= limit:
        too_hot = f"{hottest} degC under load"
        allowed = f"below {limit} degC, where this card slows down"
    elif margins and min(margins) <= 0:
        too_hot = f"{hottest} degC under load, {min(margins)} degC away from this card's slowdown limit"
        allowed = "more than 0 degC away from it"
    if too_hot:
        yield hardware(
            "temperature",
            snapshot.gpu,
            too_hot,
            allowed=allowed,
            remedy="look at airflow or coolant, heat sink and inlet temperature of this node",
        )


_ROUNDING_WATTS = 0.5


def check_power(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare the enforced power limit with the card's default."""
    limit, default = snapshot.before.get("power.limit"), snapshot.before.get("power.limit.default")
    if limit is None or default is None or limit >= default - _ROUNDING_WATTS:
        return
    yield hardware(
        "power_limit",
        snapshot.gpu,
        f"the enforced power limit is {limit:g} W",
        allowed=f"the card's default of {default:g} W or more",
        remedy=f"set it with `nvidia-smi -pl {default:g}`, and find out what lowered it",
    )


def limit_ratio(snapshot: HealthSnapshot) -> float | None:
    """Return the enforced limit as a part of the default; None where NVML does not report them."""
    limit, default = snapshot.before.get("power.limit"), snapshot.before.get("power.limit.default")
    return limit / default if limit is not None and default else None


def check_pcie(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare the best generation and width under load with the data sheet and with what card and slot support."""
    promise = snapshot.promise
    if promise is not None and promise.pcie_generation is None:
        return
    yield from _compare(snapshot, "pcie.generation", "gen", promise.pcie_generation if promise else None)
    yield from _compare(snapshot, "pcie.width", "x", promise.pcie_width if promise else None)


def _compare(snapshot: HealthSnapshot, query: str, unit: str, promised: int | None) -> Iterator[Finding]:
    # The best value counts: the first reading may come before the link has reached its speed.
    best = max(snapshot.loaded(query), default=None)
    able = snapshot.before.get(f"{query}.max")
    wanted = max((value for value in (promised, able) if value is not None), default=None)
    if best is None or wanted is None or best >= wanted:
        return
    limits = "" if able is None else f"; card and slot support {unit}{able}"
    by_slot = able is not None and able <= best
    yield hardware(
        query.replace(".", "_"),
        snapshot.gpu,
        f"PCIe {unit}{best} under load{limits}",
        allowed=f"{unit}{wanted}" + (f", as the {snapshot.sku} promises" if wanted == promised else ""),
        remedy="look at the slot, riser, retimer and the BIOS setting of this slot"
        if by_slot
        else "reseat the GPU or its board, and look at the link's errors (`nvidia-smi -q`, part PCI, and `lspci -vv`)",
    )


def check_configuration(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare MIG with what the workload declares, and note where persistence mode is off."""
    mode = "on" if snapshot.mig_is_on else "off"
    known = snapshot.before.get("mig.mode") is not None or snapshot.is_slice
    # A card without MIG counts as off; where the mode is required, check_answers reports that it is missing.
    if mode != snapshot.mig:
        yield environment(
            "mig",
            snapshot.gpu,
            f"MIG is {mode}" + ("" if known else ", as far as NVML reports"),
            allowed=f"{snapshot.mig}, as the workload declares (health.mig)",
            remedy=f"set it with `nvidia-smi -mig {int(snapshot.mig == 'on')}`, or declare"
            f" --gpucluster-workload health.mig={mode}",
        )
    if snapshot.before.get("persistence.mode") is False:
        yield note(
            "persistence",
            snapshot.gpu,
            "persistence mode is off: the driver is unloaded while no process uses the GPU",
            remedy="start nvidia-persistenced, so that jobs start faster and settings stay",
        )


_AGAIN = "Keep the log (`nvidia-bug-report.sh`), and reboot before you run again: this boot's log keeps the report"


def check_xids(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Report NVML's recovery action, each Xid of this GPU, on one rank of a node each SXid of its NVSwitches, and a log
    that cannot be read. A report that demands action on GPU, NVLink or node rejects; the rest are notes."""
    wanted = snapshot.worst("recovery.action")
    if wanted:
        entry = recovery_action(wanted)
        yield hardware(
            "recovery_action",
            snapshot.gpu,
            f"NVML's recovery action of this GPU is {wanted:#x}: {entry.meaning}",
            allowed="none",
            remedy=entry.advice,
        )
    log = snapshot.kernel_log
    if log.why_not:
        yield note(
            "kernel_log",
            snapshot.gpu,
            f"kernel log of {snapshot.gpu.host} not readable, so Xids are not checked: {log.why_not}",
            allowed="a log that this job may read",
            remedy="look for Xids as root: `dmesg | grep -i xid`",
        )
        return
    if log.lost_records:
        yield note(
            "kernel_log",
            snapshot.gpu,
            f"kernel log of {snapshot.gpu.host} begins late: {log.lost_records} older records of {log.source} are"
            " overwritten, so Xids among them are not seen",
            allowed="a log that reaches back to the boot",
            remedy="look for older Xids as root: `journalctl -k -b | grep -i xid`",
        )
    reports = log.xids()
    if snapshot.node is not None:
        yield from _xid_findings(snapshot, [one for one in reports if one.is_switch], Identity(host=snapshot.gpu.host))
    address = pci_address(snapshot.gpu.pci or "")
    if address is None:
        yield environment(
            "pci_unknown",
            snapshot.gpu,
            f"NVML does not report this GPU's PCI address ({snapshot.gpu.pci!r}), so no Xid can be assigned to it",
            allowed="an address",
            remedy="look at `nvidia-smi -q` on this host and run again",
        )
        return
    # The log leaves the function number out, which is always 0.
    own = [one for one in reports if not one.is_switch and one.pci[:-2] == address[:-2]]
    yield from _xid_findings(snapshot, own, snapshot.gpu)


def _xid_findings(snapshot: HealthSnapshot, reports: Sequence[Xid], gpu: Identity) -> Iterator[Finding]:
    """Yield one finding for each code, from its last report that rejects, or else its last report."""
    for code in sorted({report.code for report in reports}):
        same = [report for report in reports if report.code == code]
        entries = [lookup(report) for report in same]
        at = max(range(len(same)), key=lambda i: (entries[i].rejects, i))
        report, entry = same[at], entries[at]
        kind = "sxid" if report.is_switch else "xid"
        times = f"{len(same)} times" if len(same) > 1 else "once"
        where = f" of {report.pci}" if report.is_switch else ""
        yield finding(
            "hardware" if entry.rejects else "note",
            f"{kind}_{code}",
            gpu,
            f"{report.name}{where} {times} in the kernel log of this boot ({snapshot.kernel_log.source}):"
            f" {entry.meaning}; action: {entry.action}; the {'last' if at == len(same) - 1 else 'worst'} one:"
            f" {report.text}",
            allowed="no report that demands action on GPU, NVLink or node",
            remedy=f"{entry.advice}. {_AGAIN}" if entry.rejects else entry.advice,
        )
