"""Health checks of one GPU, its interconnect and its node, over a snapshot. Pure.

What changes during the criterion is found by the counters that are read before and after every one (``counters``).

- answers: the GPU answers, and NVML reports the required values
- memory: it has the promised size, and only this job uses it
- ECC: it is on, with no uncorrected errors and no failed or pending repair
- thermal, power: no thermal throttling under load, and the power limit is the default
- PCIe: full speed and width, read under load, for idle links slow down
- NVLink: all links are up and without errors; the GPU is registered with the Fabric Manager, and the fabric is healthy
- configuration: MIG as declared
- Xids: NVML's recovery action, and the driver's reports in the kernel log of this boot
- node: NVML lists all of its GPUs
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pytest_gpucluster.judge.misses import SLOWDOWNS
from pytest_gpucluster.metrics.datasheets import ANY_GPU
from pytest_gpucluster.metrics.finding import Finding, Identity, Kind, finding
from pytest_gpucluster.node.health.snapshot import UNDER_LOAD, HealthSnapshot
from pytest_gpucluster.node.health.xid_table import lookup, recovery_action
from pytest_gpucluster.node.kernel_log import Xid
from pytest_gpucluster.node.nvml import Missing
from pytest_gpucluster.node.sysfs import pci_address

LEAST_FREE_RATIO = 0.95
"""Part of the memory that no other process may use. Source: this suite's rule; what the driver reserves, 1 to 2 %,
is not counted as used."""
MOST_REMAPPED_ROWS = 512
"""Source: NVIDIA GPU Memory Error Management, row remapping: up to 512 remappings."""

DIAGNOSE = "take the GPU out of service, reset it, and run the vendor's diagnostics (`dcgmi diag -r 3`)"
_RESET = "reboot the node, and run again: the log of this boot has an Xid of it as a rule"
_COOLING = "look at airflow or coolant, heat sink, inlet temperature and power supplies of this node"
_LOG = "look at `systemctl status nvidia-fabricmanager` and /var/log/fabricmanager.log"
_SWITCHED_OFF = "nothing, if a hypervisor has switched this GPU's links off; else "

FINDINGS: Mapping[str, tuple[Kind, str, str]] = {
    "gpu_lost": (
        "hardware",
        "a GPU that answers",
        "take the node out of service, power it off and on, and have the GPU replaced if that does not help",
    ),
    "query_missing": ("environment", "a value, without which the health of a {sku} cannot be judged", "{remedy}"),
    "not_available": ("note", "anything", "look at `nvidia-smi -q`"),
    "sku_unknown": (
        "note",
        "anything",
        "check memory, PCIe link and NVLinks by hand: here only the card's own maximum is compared",
    ),
    "memory_size": (
        "hardware",
        "at least {promised:g} GB, by the data sheet of the {sku}",
        "compare the product with the order, and have the vendor look at the card",
    ),
    "memory_taken": (
        "environment",
        f"at least {100 * LEAST_FREE_RATIO:g} % free, not counting this job's own ranks",
        "end the named process and start again, or reset the GPU where none is named",
    ),
    "stranger": (
        "note",
        "only this job, for numbers that mean something",
        "find out what it does, and measure again without it if numbers are low",
    ),
    "ecc_off": ("hardware", "ECC on, as delivered", "turn it on with `nvidia-smi -e 1` and reset the GPU"),
    "ecc_uncorrected": ("hardware", "0", DIAGNOSE),
    "ecc_history": ("note", "anything", "ask the vendor whether the card was used before"),
    "row_remap_failed": ("hardware", "none", "have the GPU replaced: this is the vendor's criterion for it"),
    "row_remap_pending": ("hardware", "none", _RESET),
    "rows_remapped": ("hardware", f"at most {MOST_REMAPPED_ROWS}", "have the GPU replaced"),
    "page_pending": ("hardware", "none", _RESET),
    "throttle": ("hardware", "no thermal and no hardware slowdown", _COOLING),
    "clocks_held": (
        "note",
        "anything, as long as the GPU is fast enough",
        "reset clocks that were locked: `nvidia-smi -rgc`, `nvidia-smi -rac`",
    ),
    "temperature": ("hardware", "{allowed}", _COOLING),
    "power_limit": (
        "hardware",
        "the card's default of {default:g} W or more",
        "set it with `nvidia-smi -pl {default:g}`, and find out what lowered it",
    ),
    "pcie_generation": ("hardware", "{allowed}", "{remedy}"),
    "pcie_width": ("hardware", "{allowed}", "{remedy}"),
    "nvlink_down": (
        "hardware",
        "{allowed}",
        "{excuse}look at `nvidia-smi nvlink -s` and the Fabric Manager's log, then reset the GPUs of this node",
    ),
    "nvlink_errors": (
        "hardware",
        "0, or no growth",
        "run `nvidia-smi nvlink -e` again after a reset; if they come back, have GPU, baseboard or cable replaced",
    ),
    "nvlink_history": (
        "note",
        "no growth under load",
        "look at them again after the NCCL criteria (`nvidia-smi nvlink -e`)",
    ),
    "fabric_state": ("environment", "completed", "{excuse}update the driver, and start the Fabric Manager: " + _LOG),
    "fabric_status": ("hardware", "success", f"{_LOG}, then reset all GPUs and switches of this node"),
    "fabric_health": ("hardware", "no health problem", f"{_LOG}, and have the link or the switch repaired"),
    "recovery_action": ("hardware", "none", "{remedy}"),
    "kernel_log": (
        "note",
        "a log that this job may read, back to the boot",
        "look for Xids as root: `journalctl -k -b | grep -i xid`",
    ),
    "pci_unknown": ("environment", "an address", "look at `nvidia-smi -q` on this host and run again"),
    "xid_N": ("hardware", "no report that demands action on GPU, NVLink or node", "{remedy}"),
    "sxid_N": ("hardware", "no report that demands action on GPU, NVLink or node", "{remedy}"),
    "mig": (
        "environment",
        "{declared}, as the workload declares (health.mig)",
        "set it with `nvidia-smi -mig {flag}`, or declare --gpucluster-workload health.mig={mode}",
    ),
    "persistence": ("note", "anything", "start nvidia-persistenced, so that jobs start faster and settings stay"),
    "pci_bus": (
        "note",
        "a bus that this job may read",
        "compare `lspci | grep -i nvidia` on this host with `nvidia-smi -L`",
    ),
    "gpu_not_listed": ("hardware", "NVML shows every GPU of the node", "{remedy}"),
    "gpu_silent": (
        "hardware",
        "every GPU answers",
        "find them with `nvidia-smi` and `dmesg | grep -i xid`, and take the node out of service",
    ),
}
"""Code -> its kind where the check states no other, what is allowed, and what to do."""


def _finding(
    snapshot: HealthSnapshot,
    code: str,
    found: str,
    *,
    kind: Kind | None = None,
    about: Identity | None = None,
    **facts: object,
) -> Finding:
    """Return a finding about the GPU, or ``about`` another one or the host. ``facts`` complete the table's texts."""
    usual, allowed, remedy = FINDINGS[re.sub(r"\d+$", "N", code)]
    texts = {"allowed": allowed.format(**facts), "remedy": remedy.format(**facts)}
    return finding(kind or usual, code, about or snapshot.gpu, found, **texts)


_MISSING_REMEDIES = {
    "no permission": "run as a user, or in a container, with permission to read it",
    "not supported": "update the driver and nvidia-ml-py, or name the right SKU with --gpucluster-sku",
}


def check_answers(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Report a lost GPU, each required query without a value, and in one note the others that failed."""
    reason = next((values.lost for values in snapshot.all_values if values.lost), "")
    if reason or snapshot.load_error:
        lost = "; ".join(filter(None, (reason, snapshot.load_error)))
        yield _finding(snapshot, "gpu_lost", f"the GPU no longer answers: {lost}")
        return
    absent = dict(snapshot.before.missing)
    for query in UNDER_LOAD:  # these count only if they were read under load
        reasons = [values.missing[query] for values in snapshot.all_values if query in values.missing]
        absent[query] = (reasons or [Missing(reason="it was not read under load", kind="failed")])[0]
        if snapshot.loaded(query):
            del absent[query]
    required = snapshot.promise.required_queries if snapshot.promise else ANY_GPU
    for query in required:
        if query in absent:
            yield _finding(
                snapshot,
                "query_missing",
                f"NVML does not report {query}: {absent[query].reason}",
                sku=snapshot.sku or "GPU",
                remedy=_MISSING_REMEDIES.get(absent[query].kind, "look at `nvidia-smi -q` on this host and run again"),
            )
    others = {query: why for query, why in absent.items() if query not in required and why.kind != "not supported"}
    if others:
        failed = "; ".join(f"{query} ({why.reason})" for query, why in others.items())
        yield _finding(snapshot, "not_available", f"not available: {failed}")
    if snapshot.promise is None:
        sku = snapshot.sku or "unknown"
        yield _finding(snapshot, "sku_unknown", f"no data sheet values for this SKU ({sku})")


def check_memory(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare the size with the data sheet, and the memory used by other processes with the limit; name them."""
    total, promise = snapshot.before.get("memory.total"), snapshot.promise
    # A slice has a part of the memory, and the promise is about the whole.
    if promise is not None and total is not None and not snapshot.is_slice and total < promise.memory_gb * 1e9:
        found = f"{total / 1e9:.2f} GB of device memory"
        yield _finding(snapshot, "memory_size", found, promised=promise.memory_gb, sku=snapshot.sku)
    free = snapshot.free_ratio
    if free is None:
        return
    listed = snapshot.processes
    strangers = [
        f"{snapshot.who[pid]} with " + ("an unknown amount" if used is None else f"{used / 1e9:.2f} GB ({used} bytes)")
        for pid, used in listed.items()
        if pid not in snapshot.own_pids
    ]
    if free < LEAST_FREE_RATIO:
        by = "; ".join(strangers) or "no process that NVML lists"
        used = f"{(1 - free) * total / 1e9:.2f} GB are used by other processes, {100 * free:.1f} % are free"
        yield _finding(snapshot, "memory_taken", f"{used}: {by}")
    # A single process whose pid is not of this namespace is this one.
    elif strangers and (len(listed) > 1 or any(snapshot.who[pid].known for pid in listed)):
        yield _finding(snapshot, "stranger", f"others have a context on this GPU: {'; '.join(strangers)}")


MEMORY_FAULTS: Mapping[str, tuple[str, str]] = {
    "ecc.uncorrected.volatile": ("ecc_uncorrected", "uncorrected memory errors"),
    "ecc.uncorrected.aggregate": ("ecc_uncorrected", "uncorrected memory errors over the life of the card"),
    "rows.remapped.uncorrected": ("row_remapped", "rows of memory remapped after uncorrectable errors"),
    "rows.failed": ("row_remap_failed", "failed remap of a faulty row of memory"),
    "rows.pending": ("row_remap_pending", "remap of a faulty row of memory, which waits for a reset"),
    "pages.pending": ("page_pending", "page of memory that waits to be retired"),
}
"""Counter whose growth during a test is a fault -> code, what it counts."""


def check_ecc(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check ECC, uncorrected errors, remapped rows and retired pages."""
    read = snapshot.before.get
    if read("ecc.mode") is False:
        promised = snapshot.promise is not None and snapshot.promise.ecc
        yield _finding(snapshot, "ecc_off", "ECC is off", kind="hardware" if promised else "note")
    if errors := read("ecc.uncorrected.volatile"):
        yield _finding(snapshot, "ecc_uncorrected", f"{errors} uncorrected memory errors since the driver was loaded")
    elif earlier := read("ecc.uncorrected.aggregate"):
        found = f"{earlier} uncorrected memory errors over the life of the card, none since the driver was loaded"
        yield _finding(snapshot, "ecc_history", found)
    for query in ("rows.failed", "rows.pending", "pages.pending"):
        if read(query):
            code, what = MEMORY_FAULTS[query]
            yield _finding(snapshot, code, what)
    remapped = sum(read(f"rows.remapped.{how}") or 0 for how in ("corrected", "uncorrected"))
    if remapped > MOST_REMAPPED_ROWS:
        yield _finding(snapshot, "rows_remapped", f"{remapped} rows of memory are remapped")


_EXPECTED = {"sw_power_cap", "gpu_idle"}
"""Throttle reasons of a healthy GPU, at its power limit and between two kernels."""


def check_thermal(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check the throttle reasons under load, and the temperature against the card's own slowdown limit."""
    seen = {reason for reasons in snapshot.loaded("throttle.reasons") for reason in reasons}
    hottest = max(snapshot.loaded("temperature.gpu"), default=None)
    bad = [f"{words} ({name})" for name, words in SLOWDOWNS.items() if name in seen]
    if bad:
        at = "" if hottest is None else f", at up to {hottest} degC"
        yield _finding(snapshot, "throttle", f"clocks held down under load by: {', '.join(bad)}{at}")
    if others := sorted(seen - set(SLOWDOWNS) - _EXPECTED):
        yield _finding(snapshot, "clocks_held", f"clocks held down under load by: {', '.join(others)}")
    limit = snapshot.before.get("temperature.slowdown")
    margin = min(snapshot.loaded("temperature.margin"), default=None)
    # Some drivers report 0 for a card without a limit; one that slows down has a throttle reason as well.
    if limit and hottest is not None and hottest >= limit:
        allowed = f"below {limit} degC, where this card slows down"
        yield _finding(snapshot, "temperature", f"{hottest} degC under load", allowed=allowed)
    elif margin is not None and margin <= 0:
        found = f"{hottest} degC under load, {margin} degC away from this card's slowdown limit"
        yield _finding(snapshot, "temperature", found, allowed="more than 0 degC away from it")


_ROUNDING_WATTS = 0.5


def check_power(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare the enforced power limit with the card's default."""
    limit, default = snapshot.before.get("power.limit"), snapshot.before.get("power.limit.default")
    if limit is not None and default is not None and limit < default - _ROUNDING_WATTS:
        yield _finding(snapshot, "power_limit", f"the enforced power limit is {limit:g} W", default=default)


def check_pcie(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare the best generation and width under load with the data sheet and with what card and slot support."""
    promise = snapshot.promise
    if promise is not None and promise.pcie_generation is None:
        return
    for query, unit, promised in (
        ("pcie.generation", "gen", promise.pcie_generation if promise else None),
        ("pcie.width", "x", promise.pcie_width if promise else None),
    ):
        # The best value counts: the first reading may come before the link has reached its speed.
        best = max(snapshot.loaded(query), default=None)
        able = snapshot.before.get(f"{query}.max")
        wanted = max((value for value in (promised, able) if value is not None), default=None)
        if best is not None and wanted is not None and best < wanted:
            limits = "" if able is None else f"; card and slot support {unit}{able}"
            reseat = "reseat the GPU or its board, and look at the link's errors (`nvidia-smi -q`, `lspci -vv`)"
            slot = "look at the slot, riser, retimer and the BIOS setting of this slot"
            yield _finding(
                snapshot,
                query.replace(".", "_"),
                f"PCIe {unit}{best} under load{limits}",
                allowed=f"{unit}{wanted}" + (f", as the {snapshot.sku} promises" if wanted == promised else ""),
                remedy=slot if able is not None and able <= best else reseat,
            )


ZERO_TOLERANCE = ("replay", "recovery", "ecc_data", "link_recovery_failed")
"""NVLink counters that must be 0 since the driver was loaded. Source: facebookresearch/gcm, health check "nvlink",
tolerates no replay and no recovery by default; NVIDIA/DCGM, DcgmHealthWatch, takes both for failures. The last two:
this suite's rule."""

MUST_NOT_GROW = (
    *("malformed_packets", "buffer_overruns", "received_errors", "received_remote_errors", "received_general_errors"),
    *("local_link_integrity", "link_recovery", "effective_errors"),
)
"""Counters of NVLink 5 that must not grow during the test. Source: NVIDIA/DCGM, its health check of NVLink 5
error counters fails at one more within a minute."""


def check_nvlink(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check the links' states and error counters. With MIG on there are no links."""
    if snapshot.mig_is_on:
        return
    links: Mapping[int, bool] = snapshot.before.get("nvlink.up") or {}
    down = [link for link, is_up in links.items() if not is_up]
    up = len(links) - len(down)
    promised = snapshot.promise.nvlinks if snapshot.promise is not None else None
    # Without a promise, bridges are optional.
    if snapshot.before.get("nvlink.up") is not None and (down if promised is None else up < promised):
        alone = _switched_off(snapshot)
        yield _finding(
            snapshot,
            "nvlink_down",
            f"{up} NVLinks are up"
            + (f"; down: {', '.join(map(str, down))}" if down else "")
            + (", and this is the only GPU of its node" if alone else ""),
            kind="note" if alone or promised is None else "hardware",
            allowed="any number: bridges are optional on this kind of GPU"
            if promised is None
            else f"{promised}, as the data sheet of the {snapshot.sku} states",
            excuse=_SWITCHED_OFF if alone else "",
        )
    errors: Mapping[str, Mapping[int, int]] = snapshot.before.get("nvlink.errors") or {}
    old = []
    for counter, counts in errors.items():
        if counter in ZERO_TOLERANCE and any(counts.values()):
            found = f"NVLink counter {counter} since the driver was loaded: {_by_link(counts)}"
            yield _finding(snapshot, "nvlink_errors", found)
        elif any(counts.values()):
            old.append(f"{counter}: {_by_link(counts)}")
    if old:
        yield _finding(snapshot, "nvlink_history", f"NVLink counters that are not 0: {'; '.join(old)}")


def _by_link(counts: Mapping[int, int]) -> str:
    return ", ".join(f"link {link}: {count}" for link, count in sorted(counts.items()) if count > 0)


def _switched_off(snapshot: HealthSnapshot) -> bool:
    """Whether this is the only GPU of its node and all its links are down.

    That is by design where a hypervisor gives a single GPU of a board to a virtual machine: there is no peer. A
    container or cgroup shows a single GPU too, but then the PCI bus, or other ranks of the node, show the others. Where
    the bus cannot be read, this is unknown, and the result is False.
    """
    states: Mapping[int, bool] = snapshot.before.get("nvlink.up") or {}
    node = snapshot.node
    alone = node is not None and node.nvml_gpus == node.ranks == 1 and not (node.unlisted or node.bus_unreadable)
    return alone and not any(states.values())


def check_nvlink_fabric(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check state, status and health of the registration with the Fabric Manager."""
    fabric, promise = snapshot.before.get("fabric"), snapshot.promise
    registration = "the GPU's registration with the Fabric Manager"
    if snapshot.mig_is_on:
        return
    if fabric is None or fabric["state"] == "not supported":
        links, missing = snapshot.before.get("nvlink.switch"), snapshot.before.missing.get("fabric")
        is_lost = missing is not None and missing.kind == "lost"  # check_answers reports it
        if promise is not None and promise.nvswitch and promise.fabric_state and links and not is_lost:
            why = missing.reason if missing else "NVML reports that it is not supported"
            found = f"{links} NVLinks lead to an NVSwitch, and the state of the fabric is not reported: {why}"
            yield _finding(snapshot, "fabric_state", found, excuse="")
    elif fabric["state"] != "completed":
        alone = _switched_off(snapshot)
        yield _finding(
            snapshot,
            "fabric_state",
            f"{registration} is: {fabric['state']}",
            kind="note" if alone else "environment",
            excuse=_SWITCHED_OFF if alone else "",
        )
    elif fabric["status"] != "success":
        yield _finding(snapshot, "fabric_status", f"{registration} ended with: {fabric['status']}")
    elif fabric["health"]:
        yield _finding(snapshot, "fabric_health", f"NVML reports of the fabric: {', '.join(fabric['health'])}")


_AGAIN = "Keep the log (`nvidia-bug-report.sh`), and reboot before you run again: this boot's log keeps the report"


def check_xids(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Report NVML's recovery action, each Xid of this GPU, on one rank of a node each SXid of its NVSwitches, and a log
    that cannot be read. A report that demands action on GPU, NVLink or node rejects; the rest are notes."""
    if wanted := snapshot.before.get("recovery.action"):
        entry = recovery_action(wanted)
        found = f"NVML's recovery action of this GPU is {wanted:#x}: {entry.meaning}"
        yield _finding(snapshot, "recovery_action", found, remedy=entry.advice)
    log, host = snapshot.kernel_log, snapshot.gpu.host
    if log.why_not:
        found = f"kernel log of {host} not readable, so Xids are not checked: {log.why_not}"
        yield _finding(snapshot, "kernel_log", found)
        return
    if log.lost_records:
        late = f"{log.lost_records} older records of {log.source} are overwritten, so Xids among them are not seen"
        yield _finding(snapshot, "kernel_log", f"kernel log of {host} begins late: {late}")
    reports = log.xids()
    if snapshot.node is not None:
        yield from _xid_findings(snapshot, [one for one in reports if one.is_switch], Identity(host=host))
    address = pci_address(snapshot.gpu.pci or "")
    if address is None:
        found = f"NVML does not report this GPU's PCI address ({snapshot.gpu.pci!r}), so no Xid can be assigned to it"
        yield _finding(snapshot, "pci_unknown", found)
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
        times = f"{len(same)} times" if len(same) > 1 else "once"
        where = f" of {report.pci}" if report.is_switch else ""
        yield _finding(
            snapshot,
            f"{'sxid' if report.is_switch else 'xid'}_{code}",
            f"{report.name}{where} {times} in the kernel log of this boot ({snapshot.kernel_log.source}):"
            f" {entry.meaning}; action: {entry.action}; the {'last' if at == len(same) - 1 else 'worst'} one:"
            f" {report.text}",
            kind="hardware" if entry.rejects else "note",
            about=gpu,
            remedy=f"{entry.advice}. {_AGAIN}" if entry.rejects else entry.advice,
        )


def check_configuration(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Compare MIG with what the workload declares, and note where persistence mode is off."""
    mode = "on" if snapshot.mig_is_on else "off"
    known = snapshot.before.get("mig.mode") is not None or snapshot.is_slice
    # A card without MIG counts as off; where the mode is required, check_answers reports that it is missing.
    if mode != snapshot.mig:
        found = f"MIG is {mode}" + ("" if known else ", as far as NVML reports")
        yield _finding(snapshot, "mig", found, declared=snapshot.mig, flag=int(snapshot.mig == "on"), mode=mode)
    if snapshot.before.get("persistence.mode") is False:
        found = "persistence mode is off: the driver is unloaded while no process uses the GPU"
        yield _finding(snapshot, "persistence", found)


_STATES: Mapping[str, tuple[Kind, str]] = {
    "dead": ("hardware", "power the node off and on; if it stays so, have the GPU or its board replaced"),
    "answers": ("hardware", "look at `nvidia-smi` and the kernel log on this host, and reboot the node"),
    "no driver": (
        "environment",
        "bind the driver (`dmesg | grep -i nvrm`), or take the GPU out of the node's inventory",
    ),
    "hidden": ("note", "nothing, if this job was given fewer GPUs than the node has"),
    "elsewhere": ("note", "nothing, if this GPU is meant for virtual machines"),
}
"""State of a GPU that only the PCI bus shows -> kind, what to do."""


def check_node(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Report GPUs on the PCI bus that NVML does not show, and GPUs that do not answer."""
    node, host = snapshot.node, Identity(host=snapshot.gpu.host)
    if node is None:
        return
    if node.bus_unreadable:
        found = f"the PCI bus cannot be read, so GPUs missing from NVML are not noticed: {node.bus_unreadable}"
        yield _finding(snapshot, "pci_bus", found, about=host)
    for gpu in node.unlisted:
        kind, remedy = _STATES[gpu.state]
        address = pci_address(gpu.address)
        xids = sorted({xid.code for xid in snapshot.kernel_log.xids() if address and xid.pci[:-2] == address[:-2]})
        log = f"; Xids in the kernel log: {', '.join(map(str, xids))}" if xids else ""
        found = f"the PCI bus shows a GPU that NVML does not: {gpu.detail}{log}"
        about = node.gpus.get(address or "") or Identity(host=host.host, pci=gpu.address)
        yield _finding(snapshot, "gpu_not_listed", found, kind=kind, about=about, remedy=remedy)
    silent = node.nvml_gpus - node.answering
    if silent > sum(gpu.state in ("dead", "answers") for gpu in node.unlisted):
        found = f"NVML counts {node.nvml_gpus} GPUs, and {silent} of them do not answer"
        yield _finding(snapshot, "gpu_silent", found, about=host)


CHECKS = (
    check_answers,
    check_memory,
    check_ecc,
    check_thermal,
    check_power,
    check_pcie,
    check_nvlink,
    check_nvlink_fabric,
    check_xids,
    check_configuration,
    check_node,
)
"""In the order of their findings."""


def examine_gpu(snapshot: HealthSnapshot) -> tuple[Finding, ...]:
    """Apply every check; return the findings in their order."""
    return tuple(finding for check in CHECKS for finding in check(snapshot))
