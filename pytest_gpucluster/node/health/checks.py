"""Health checks of one GPU: answers, memory, ECC, thermal, power, PCIe, configuration, and the driver's reports.

- answers: the GPU answers, and NVML reports what health is judged by
- memory: all of it is there, and it is free but for this job
- ECC: memory is protected, and nothing beyond repair was found
- thermal, power: clocks hold under load, the GPU is cool enough for that, and may draw the power it was made for
- PCIe: the link to the host runs at full speed and width; idle links slow down, so it is read under load
- configuration: the GPU is set up as declared
- Xids: NVML's recovery action, and the driver's reports in the kernel log of this boot
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_gpucluster.metrics.datasheets import ANY_GPU
from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.node.health.snapshot import UNDER_LOAD, Missing, Situation
from pytest_gpucluster.node.health.xid_table import lookup, recovery_action
from pytest_gpucluster.node.kernel_log import Xid, normalised


def check_answers(situation: Situation) -> Iterator[Finding]:
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


LEAST_FREE_RATIO = 0.95
"""Part of the memory that nobody else may use. Source: this suite's rule; what the driver keeps for itself, which is
1 to 2 %, is not counted as used."""


def check_memory(situation: Situation) -> Iterator[Finding]:
    """Hold the size against the promise, and what others use against the limit; name them."""
    yield from _size(situation)
    free = free_ratio(situation)
    if free is None:
        return
    strangers = _strangers(situation)
    if free < LEAST_FREE_RATIO:
        taken = taken_bytes(situation) or 0
        by = "; ".join(strangers) or "no process that NVML names"
        yield situation.finding(
            "memory_taken",
            "environment",
            f"{taken / 1e9:.2f} GB are used beside this job, {100 * free:.1f} % are free: {by}",
            allowed=f"at least {100 * LEAST_FREE_RATIO:g} % free beside this job's own ranks",
            remedy="end the named process and start again, or reset the GPU where none is named",
        )
    elif strangers and not _may_be_this_one(situation):
        yield situation.finding(
            "stranger",
            "note",
            f"others have a context on this GPU: {'; '.join(strangers)}",
            allowed="only this job, for numbers that mean something",
            remedy="find out what it does, and measure again without it if numbers are low",
        )


def free_ratio(situation: Situation) -> float | None:
    """Return the part of the memory that nobody but this job uses; None where NVML does not tell."""
    total, taken = situation.before.get("memory.total"), taken_bytes(situation)
    return None if not total or taken is None else 1 - taken / total


def taken_bytes(situation: Situation) -> int | None:
    """Return the bytes that others use, or None where NVML does not tell.

    In a container NVML may name processes by numbers of the host. This job's ranks are then not among them, and what
    this process's allocator holds is taken for its own; its context, some 0.5 GB, counts as somebody else's.
    """
    used = situation.before.get("memory.used")
    if used is None:
        return None
    listed = _listed(situation)
    own = [listed[pid] for pid in situation.own_pids if pid in listed]
    known = sum(bytes_ for bytes_ in own if bytes_ is not None)
    return max(0, int(used) - max(known, situation.held_bytes))


def _size(situation: Situation) -> Iterator[Finding]:
    total, promise = situation.before.get("memory.total"), situation.promise
    # A slice has a part of the memory, and the promise is about the whole.
    if promise is None or total is None or situation.is_slice or total >= promise.memory_gb * 1e9:
        return
    yield situation.finding(
        "memory_size",
        "hardware",
        f"{total / 1e9:.2f} GB of device memory",
        allowed=f"at least {promise.memory_gb:g} GB, as the data sheet of the {situation.sku} says",
        remedy="compare the product with the order, and have the vendor look at the card",
    )


def _strangers(situation: Situation) -> list[str]:
    """Name the processes that are not this job's."""
    listed = _listed(situation)
    named = []
    for pid, used in listed.items():
        if pid not in situation.own_pids:
            size = "an unknown amount" if used is None else f"{used / 1e9:.2f} GB ({used} bytes)"
            named.append(f"{situation.who.get(pid) or f'pid {pid}'} with {size}")
    return named


def _may_be_this_one(situation: Situation) -> bool:
    """Tell whether NVML names one process only, by a number that is not of this namespace: then it is this one."""
    listed = _listed(situation)
    return len(listed) == 1 and all(pid in situation.who and not situation.who[pid].known for pid in listed)


def _listed(situation: Situation) -> dict[int, int | None]:
    """Return pid -> bytes of the processes that NVML names."""
    return dict(situation.before.get("processes") or ())


MOST_REMAPPED_ROWS = 512
"""Source: NVIDIA GPU Memory Error Management, row remapping: up to 512 remappings."""


def check_ecc(situation: Situation) -> Iterator[Finding]:
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


BAD_REASONS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal": "hardware thermal slowdown",
    "sw_thermal": "software thermal slowdown",
    "hw_power_brake": "power brake by the power supply",
}
"""Throttle reasons of a GPU that is too hot or short of power. A healthy one at its power limit shows sw_power_cap."""

_EXPECTED = {"sw_power_cap", "gpu_idle"}


def check_thermal(situation: Situation) -> Iterator[Finding]:
    """Look at the throttle reasons under load, and at the temperature beside the card's own slowdown limit."""
    seen = {reason for reasons in situation.loaded("throttle.reasons") for reason in reasons}
    bad = [f"{words} ({name})" for name, words in BAD_REASONS.items() if name in seen]
    if bad:
        hottest = max(situation.loaded("temperature.gpu"), default=None)
        at = "" if hottest is None else f", at up to {hottest} degC"
        yield situation.finding(
            "throttle",
            "hardware",
            f"clocks held down under load by: {', '.join(bad)}{at}",
            allowed="no thermal and no hardware slowdown",
            remedy="look at airflow or coolant, heat sink and power supplies of this node",
        )
    if "sw_power_cap" in seen:
        yield situation.finding(
            "power_cap",
            "note",
            "clocks held down by the power limit (sw_power_cap), as with any healthy GPU under full load",
            allowed="anything",
            remedy="nothing",
        )
    others = sorted(seen - set(BAD_REASONS) - _EXPECTED)
    if others:
        yield situation.finding(
            "clocks_held",
            "note",
            f"clocks held down under load by: {', '.join(others)}",
            allowed="anything, as long as the GPU is fast enough",
            remedy="undo clocks if somebody has set them: `nvidia-smi -rgc`, `nvidia-smi -rac`",
        )
    yield from _temperature(situation)


def _temperature(situation: Situation) -> Iterator[Finding]:
    hottest = max(situation.loaded("temperature.gpu"), default=None)
    limit = situation.before.get("temperature.slowdown")
    margins = situation.loaded("temperature.margin")
    if not limit and not margins and hottest is not None:
        yield situation.finding(
            "temperature_limit",
            "note",
            f"{hottest} degC under load, and NVML does not tell at which temperature this card slows down",
            allowed="anything: a card that slows down says so in its throttle reasons",
            remedy="compare with the data sheet, or update driver and nvidia-ml-py",
        )
    too_hot = ""
    # A limit of 0 is how some drivers say that the card has none.
    if limit and hottest is not None and hottest >= limit:
        too_hot = f"{hottest} degC under load"
        allowed = f"below {limit} degC, where this card slows down"
    elif margins and min(margins) <= 0:
        too_hot = f"{hottest} degC under load, {min(margins)} degC away from this card's slowdown limit"
        allowed = "more than 0 degC away from it"
    if too_hot:
        yield situation.finding(
            "temperature",
            "hardware",
            too_hot,
            allowed=allowed,
            remedy="look at airflow or coolant, heat sink and inlet temperature of this node",
        )


_ROUNDING_WATTS = 0.5


def check_power(situation: Situation) -> Iterator[Finding]:
    """Hold the enforced power limit against the card's default."""
    limit, default = situation.before.get("power.limit"), situation.before.get("power.limit.default")
    if limit is None or default is None or limit >= default - _ROUNDING_WATTS:
        return
    yield situation.finding(
        "power_limit",
        "hardware",
        f"the enforced power limit is {limit:g} W",
        allowed=f"the card's default of {default:g} W or more",
        remedy=f"set it with `nvidia-smi -pl {default:g}`, and find out who lowered it",
    )


def limit_ratio(situation: Situation) -> float | None:
    """Return the enforced limit as a part of the default; None where NVML does not tell."""
    limit, default = situation.before.get("power.limit"), situation.before.get("power.limit.default")
    return limit / default if limit is not None and default else None


def check_pcie(situation: Situation) -> Iterator[Finding]:
    """Hold the best generation and width under load against the promise and what card and slot can do."""
    promise = situation.promise
    if promise is not None and promise.pcie_generation is None:
        return
    yield from _compare(situation, "pcie.generation", "gen", promise.pcie_generation if promise else None)
    yield from _compare(situation, "pcie.width", "x", promise.pcie_width if promise else None)


def _compare(situation: Situation, query: str, unit: str, promised: int | None) -> Iterator[Finding]:
    # The best: a link that reached its speed once can do it, and the first reading may come before it has.
    best = max(situation.loaded(query), default=None)
    able = situation.before.get(f"{query}.max")
    wanted = max((value for value in (promised, able) if value is not None), default=None)
    if best is None or wanted is None or best >= wanted:
        return
    limits = "" if able is None else f"; card and slot can do {unit}{able}"
    by_slot = able is not None and able <= best
    yield situation.finding(
        query.replace(".", "_"),
        "hardware",
        f"PCIe {unit}{best} under load{limits}",
        allowed=f"{unit}{wanted}" + (f", as the {situation.sku} promises" if wanted == promised else ""),
        remedy="look at the slot, riser, retimer and the BIOS setting of this slot"
        if by_slot
        else "reseat the GPU or its board, and look at the link's errors (`nvidia-smi -q`, part PCI, and `lspci -vv`)",
    )


def check_configuration(situation: Situation) -> Iterator[Finding]:
    """Hold MIG against what the workload declares, and note where the driver does not stay loaded."""
    mode = "on" if situation.mig_is_on else "off"
    known = situation.before.get("mig.mode") is not None or situation.is_slice
    # A card that cannot be cut into slices is not; whether that is required to be known is the SKU's matter.
    if mode != situation.mig:
        yield situation.finding(
            "mig",
            "environment",
            f"MIG is {mode}" + ("" if known else ", as far as NVML tells"),
            allowed=f"{situation.mig}, as the workload declares (health.mig)",
            remedy=f"set it with `nvidia-smi -mig {int(situation.mig == 'on')}`, or declare"
            f" --gpucluster-workload health.mig={mode}",
        )
    if situation.before.get("persistence.mode") is False:
        yield situation.finding(
            "persistence",
            "note",
            "persistence mode is off: the driver is unloaded while nobody uses the GPU",
            allowed="anything",
            remedy="start nvidia-persistenced, so that jobs start faster and settings stay",
        )


_AGAIN = "Keep the log (`nvidia-bug-report.sh`), and reboot before you run again: this boot's log keeps the report"


def check_xids(situation: Situation) -> Iterator[Finding]:
    """Report NVML's recovery action, each Xid of this GPU, on one rank of a node each SXid of its NVSwitches, and a log
    that cannot be read. What demands action on GPU, NVLink or node rejects; the rest is a note."""
    wanted = situation.worst("recovery.action")
    if wanted:
        entry = recovery_action(wanted)
        yield situation.finding(
            "recovery_action",
            "hardware",
            f"NVML's recovery action of this GPU is {wanted:#x}: {entry.meaning}",
            allowed="none",
            remedy=entry.advice,
        )
    log = situation.kernel_log
    if log.why_not:
        yield situation.finding(
            "kernel_log",
            "note",
            f"kernel log of {situation.gpu.host} not readable, so Xids are not judged: {log.why_not}",
            allowed="a log that this job may read",
            remedy="look for Xids as root: `dmesg | grep -i xid`",
        )
        return
    if log.lost_records:
        yield situation.finding(
            "kernel_log",
            "note",
            f"kernel log of {situation.gpu.host} begins late: {log.lost_records} older records of {log.source} are"
            " overwritten, so Xids among them are not seen",
            allowed="a log that reaches back to the boot",
            remedy="look for older Xids as root: `journalctl -k -b | grep -i xid`",
        )
    reports = log.xids()
    if situation.node is not None:
        yield from _judged(situation, [one for one in reports if one.is_switch], Identity(host=situation.gpu.host))
    address = normalised(situation.gpu.pci or "")
    if address is None:
        yield situation.finding(
            "pci_unknown",
            "environment",
            f"NVML does not tell this GPU's PCI address ({situation.gpu.pci!r}), so no Xid can be told to be its own",
            allowed="an address",
            remedy="look at `nvidia-smi -q` on this host and run again",
        )
        return
    # The log leaves the function number out, which is always 0.
    own = [one for one in reports if not one.is_switch and one.pci[:-2] == address[:-2]]
    yield from _judged(situation, own, situation.gpu)


def _judged(situation: Situation, reports: Sequence[Xid], gpu: Identity) -> Iterator[Finding]:
    """Yield one finding for each number, by the last one of its reports that rejects, or the last one."""
    for code in sorted({report.code for report in reports}):
        same = [report for report in reports if report.code == code]
        entries = [lookup(report) for report in same]
        at = max(range(len(same)), key=lambda i: (entries[i].rejects, i))
        report, entry = same[at], entries[at]
        kind = "sxid" if report.is_switch else "xid"
        times = f"{len(same)} times" if len(same) > 1 else "once"
        where = f" of {report.pci}" if report.is_switch else ""
        yield situation.finding(
            f"{kind}_{code}",
            "hardware" if entry.rejects else "note",
            f"{report.name}{where} {times} in the kernel log of this boot ({situation.kernel_log.source}):"
            f" {entry.meaning}; action: {entry.action}; the {'last' if at == len(same) - 1 else 'worst'} one:"
            f" {report.text}",
            allowed="no report that demands action on GPU, NVLink or node",
            remedy=f"{entry.advice}. {_AGAIN}" if entry.rejects else entry.advice,
            gpu=gpu,
        )
