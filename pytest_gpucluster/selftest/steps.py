"""The steps of a self-test, each in a process of its own, which may hang or be killed: ``run`` starts and watches it.

    python -m pytest_gpucluster.selftest.steps STEP CONTEXT

A step writes each of its lines to a file at once, so that what was found before a hang is kept.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.agreement.release import SocketReleaser
from pytest_gpucluster.benchmarks.blocks import MOST_CALLS, NO_CONTEXT
from pytest_gpucluster.benchmarks.collective_payload import needed_bytes
from pytest_gpucluster.benchmarks.collectives import CALLS, measure_collective
from pytest_gpucluster.benchmarks.dtypes import arithmetic, dtypes_of
from pytest_gpucluster.benchmarks.hbm import measure_hbm
from pytest_gpucluster.benchmarks.host_link import measure_host_link
from pytest_gpucluster.benchmarks.host_link_copies import DIRECTIONS
from pytest_gpucluster.benchmarks.matmul import Buffers, measure_matmul, square_shape
from pytest_gpucluster.benchmarks.memory_passes import KINDS
from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.config.workload import CPU_PROFILE, USUAL_PROFILE
from pytest_gpucluster.device import environment, process_group
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.clock import LAUNCH_SECONDS
from pytest_gpucluster.device.identity import VisibleGpus
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.errors import EnvironmentBroken, GpuClusterError, HardwareFault, WrongResult
from pytest_gpucluster.judge import evidence, limits, loader
from pytest_gpucluster.launch.launchers import detect
from pytest_gpucluster.launch.suite import find_suite
from pytest_gpucluster.metrics import codec, measurement, stats, units
from pytest_gpucluster.metrics.datasheets import ANY_GPU, CPU_REHEARSAL, promise_of
from pytest_gpucluster.metrics.sampling import Sampling, Series
from pytest_gpucluster.node import inventory, kernel_log
from pytest_gpucluster.node.fabric.nccl_log import NcclLog, choice, unread
from pytest_gpucluster.node.health.gpu_sampler import GpuSampler, Pace
from pytest_gpucluster.node.nvml import PyNvml, read_values
from pytest_gpucluster.selftest import names
from pytest_gpucluster.selftest.report import GPU_ONLY, SEND, Line, line, shapes
from pytest_gpucluster.selftest.run import ASSERT_EXIT
from pytest_gpucluster.text import first_line, plural

c10d: Any = dist  # torch's types leave the stores out
LAUNCHES = 10_000
"""For which the clock lets the device wait: 0.5 s, and longer below the highest clock of the GPUs so far."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a step is to try, as its command line has it.

    Attributes:
        device: "cpu", or "cuda:N".
        rank, world, port: of the step with several ranks; ``shared``: they share one GPU.
        folder: for files; ``log``: this process's output.
        seconds: its time.
    """

    device: str
    rank: int = 0
    world: int = 1
    port: int = 0
    shared: bool = False
    folder: str
    log: str
    seconds: float

    @property
    def place(self) -> torch.device:
        """The device, as torch names it."""
        return torch.device(self.device)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.device != "cpu"

    @property
    def timeout(self) -> timedelta:
        """The time, as torch takes it."""
        return timedelta(seconds=self.seconds)

    def begin(self) -> Accelerator:
        """Make the device the current one, and return its back end."""
        by = accelerator(self.place)
        by.make_current()
        return by

    def gpu(self) -> tuple[str, str]:
        """Return the GPU's name, and its UUID as NVML has it."""
        found = VisibleGpus()[self.place.index or 0]
        return found.name, inventory.full_uuid(found.uuid, found.name)

    def alone(self) -> dist.ProcessGroup:
        """Make a default group of this process alone."""
        return process_group.init_group(self.place, store=c10d.HashStore(), rank=0, world_size=1, timeout=self.timeout)

    def sampling(self, seconds: float) -> Sampling:
        """Return how long to measure: on cpu 0.1 s."""
        window = seconds if self.is_gpu else 0.1
        return Sampling(warmup_seconds=window / 4, window_seconds=window, longest_seconds=window, tolerance_ratio=1.0)


def software(context: Context) -> Iterator[Line]:
    """Versions, and the names that the product uses."""
    who = inventory.identify(detect({}, "node"), "cuda" if context.is_gpu else "cpu")
    versions = {name: found for name, found in who["versions"].items() if found}
    text = ", ".join(f"{name} {found}" for name, found in versions.items()) + (who["nvml"] and f"; {who['nvml']}")
    todo = "compare with `nvidia-smi`; install nvidia-ml-py of the driver's branch"
    yield line("versions", not who["nvml"], text, todo, **versions, gpus=who["visible_gpus"])
    used = list(names.uses())
    required, optional = (
        sorted({names.problem(use) for use in used if use.optional is kind} - {""}) for kind in (False, True)
    )
    text = f"{plural(len({use.name for use in used}), 'name')} of torch and NVML in the product's code: "
    text += "; ".join([*required[:5]] or ["all are here and take its arguments"])
    text += "".join(f"; it does without {one.partition(' is ')[0]}" for one in optional)
    yield line("names", not required, text, f"install the versions of constraints.txt, or {SEND}", missing=required)


def device(context: Context) -> Iterator[Line]:
    """The clocks, and the rates next to published ones."""
    by = context.begin()
    number, clock = torch.zeros(1, device=context.place), by.clock()
    pairs = []
    for _ in range(4):  # the first one loads the kernel; in another one the host may have been busy
        by.synchronize()
        begin = time.perf_counter()
        with clock.region():
            clock.get_ahead(LAUNCHES, seconds=0.0)
            if not by.asynchronous:
                time.sleep(0.05)
        [own] = clock.read()
        pairs.append((own, time.perf_counter() - begin))
    own, wall = min(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    least = LAUNCHES * LAUNCH_SECONDS if by.asynchronous else 0.05
    text = f"{1e3 * own:.2f} ms by the device's clock, {1e3 * wall:.2f} ms by the host's, asked {1e3 * least:.0f}"
    agree = abs(own - wall) <= max(0.01 * wall, 2e-3)
    good = own >= least or None if agree else False
    yield line("clock", good, text, f"repeat it on an idle node; if it stays, {SEND}", device_s=own, wall_s=wall)
    number.add_(1)  # the first one loads the kernel
    by.synchronize()
    begin = time.perf_counter()
    for _ in range(MOST_CALLS):
        number.add_(1)
    launch = (time.perf_counter() - begin) / MOST_CALLS
    by.synchronize()
    text = f"{1e6 * launch:.1f} us of the host for one; short measurements allow {1e6 * LAUNCH_SECONDS:.0f} us"
    yield line("launch", launch <= LAUNCH_SECONDS or None, text, "look for other load, and at the CPU's governor")
    yield from _rates(context)


def _rates(context: Context) -> Iterator[Line]:
    place, name, window = context.place, CPU_REHEARSAL, None
    n, hbm, link, copies = 128, 4 * MIB, MIB, 2
    if context.is_gpu:
        n, hbm, link, copies = 8192, 4096 * MIB, 64 * MIB, 8
        name, uuid = context.gpu()
        window = GpuSampler(PyNvml(), uuid, Pace()).window()

    def measured(family: str, kind: str) -> Series:
        if family == "matmul":
            seconds, shape = context.sampling(2.0), square_shape(n, kind)
            return measure_matmul(place, shape, dtype=kind, sampling=seconds, during=window or NO_CONTEXT).tflops
        if family == "hbm":
            return measure_hbm(place, kind, payload_bytes=hbm, sampling=context.sampling(1.0)).bytes_per_second
        sampling = context.sampling(0.5)  # comparing takes ten times as long
        return measure_host_link(place, kind, payload_bytes=link, copies=copies, sampling=sampling).bytes_per_second

    for family, kinds in {"matmul": dtypes_of(place), "hbm": KINDS, "host_link": DIRECTIONS}.items():
        for kind in kinds:
            yield _guarded(f"{family} {kind}", partial(_rate, name, family, kind, measured))
    found = window.summary() if window is not None else {}
    text = "; ".join(f"{key} {'/'.join(map(str, value))}" for key, value in found.items() if isinstance(value, list))
    yield line("clocks busy", bool(found and not found["not_available"]) or None, text or "none", GPU_ONLY, **found)


def _rate(gpu: str, family: str, kind: str, measured: Callable[[str, str], Series]) -> Line:
    """Compare a rate with published healthy ones and the data sheet."""
    metric = measurement.known(f"{family}.{kind}.{'tflops' if family == 'matmul' else 'bandwidth'}")
    found, known = measured(family, kind), loader.load()
    value = found.median if family == "matmul" else units.convert(found.median, "B/s", metric.unit)
    sku = known.sku_for(gpu) or gpu
    rows = [row for row in evidence.published() if (row.sku, row.metric, row.kind) == (sku, metric.name, "healthy")]
    published = sorted(row.value for row in rows if row.comparable)
    peak = limits.peak_of(metric, known.skus.get(sku))
    text = f"{units.show(value, metric.unit)}, verified; "
    good: bool | None = None
    if published:
        least, most = (units.show(each, metric.unit) for each in (published[0], published[-1]))
        share = 100 * value / stats.median(published)
        text += f"published for {sku}: {least} to {most} ({len(published)}), {share:.0f} % of their median"
        good = value >= 0.9 * published[0] or None
        todo = "below all that is published: see the clocks, other load, power and cooling"
    else:
        text, todo = f"{text}nothing is published for {sku}", f"if this GPU is good, {SEND}: it is evidence"
        todo = GPU_ONLY if sku == CPU_REHEARSAL else todo
    if peak:
        text += f"; data sheet {units.show(peak, metric.unit)}"
    if peak and value > peak:
        good, todo = False, f"faster than the data sheet: the time or the count is wrong; {SEND}"
    values = {"metric": metric.name, "value": value, "unit": metric.unit, "published": published, "peak": peak}
    return line(f"{family} {kind}", good, text, todo, **values)


def nccl(context: Context) -> Iterator[Line]:
    """One rank: the memory that communicators hold, and the environment that torch and NCCL took."""
    by = context.begin()
    data = torch.ones(1024, device=context.place)

    def held() -> int:
        by.synchronize()
        return total - (by.free_bytes() or 0)

    total, text = 0, "gloo has none"
    total = -held()
    first = context.alone()
    dist.all_reduce(data, group=first)
    one = held()
    second: Any = dist.new_group([0], timeout=context.timeout, use_local_synchronization=True)
    dist.all_reduce(data, group=second)
    two = held()
    CALLS["all_to_all"](data, torch.empty_like(data), second)
    if context.is_gpu:
        text = (
            f"{one / 1e6:.0f} MB with one communicator, {two / 1e6:.0f} with two, {held() / 1e6:.0f} after all_to_all"
        )
    yield line("NCCL memory", (context.is_gpu and two > 0) or None, text, GPU_ONLY, held=(one, two, held()))
    if context.is_gpu:
        listed = dict(PyNvml().read(context.gpu()[1], "processes"))
        own = os.getpid() in listed
        text = f"NVML lists {len(listed)} on this GPU, {'this one' if own else 'not this one'} by its pid"
        todo = "NVML shows the host's pids: in a container foreign processes need `docker run --pid=host`"
        yield line("processes", own or None, text, todo, listed=len(listed))
    yield _environment(context)
    del first, second
    dist.destroy_process_group()


def _environment(context: Context) -> Line:
    """Compare what was given with what the logs of torch and NCCL state."""
    printed = Path(context.log).read_text(encoding="utf-8", errors="replace")
    path = NcclLog.of(os.environ, pid=os.getpid()).path
    own = path.read_text(encoding="utf-8", errors="replace") if path is not None and path.exists() else ""
    in_effect = {
        "NCCL_DEBUG": "NCCL INFO" in own,
        "NCCL_DEBUG_FILE": bool(own),
        "NCCL_DEBUG_SUBSYS": "Pattern " in own,  # of GRAPH, which NCCL leaves out by default
        environment.WORKSPACE: not environment.not_reproducible(os.environ),
    }
    given = {name: os.environ.get(name, "") for name in environment.VARIABLES}
    taken: dict[str, str] = {}
    for name, value in given.items():
        # torch's log has an older name of this one.
        word = name.replace("TORCH_FR_BUFFER_SIZE", "TORCH_(?:FR|NCCL_TRACE)_BUFFER_SIZE")
        stated = re.search(rf"\b{word}\b(?: \([^)]*\))?: (\w+)", printed)
        stated = stated or re.search(rf"\b{word} set by environment to (\S+?)\.?(?:\s|$)", own)
        if stated or in_effect.get(name):
            taken[name] = stated[1].replace("true", "1").replace("false", "0") if stated else value
    wrong = [f"{name} is {found}, not {given[name]}" for name, found in taken.items() if found != given[name]]
    silent = [name for name in given if name not in taken]
    recorded = len(process_group.flight_records())
    text = f"{len(taken)} of {len(given)} variables seen in effect; {recorded} entries in the flight recorder"
    text += "".join(f"; {each}" for each in wrong) + (f"; no log states {', '.join(silent)}" if silent else "")
    good = False if wrong else (context.is_gpu and recorded > 0 and len(taken) > len(in_effect)) or None
    return line("environment", good, text, SEND if context.is_gpu else GPU_ONLY, given=given, taken=taken)


def hang(context: Context) -> Iterator[Line]:
    """Several ranks: a planted hang with sub-groups open, its abort, and groups made anew."""
    by, first = context.begin(), context.rank == 0
    store = c10d.TCPStore("127.0.0.1", context.port, context.world, first, timeout=context.timeout)
    how = "gloo" if not context.is_gpu else "NCCL, two ranks on one GPU over sockets" if context.shared else "NCCL"
    releaser, everyone, before = _groups(context, store, "before")
    if first:
        text = f"{context.world} ranks by {how}: 3 made, all_reduce {before / 1e9:.3g} GB/s busbw"
        yield line("groups", True, text, busbw=before)
    data = torch.ones(1024, device=context.place)
    _meet(context, store, "hang")
    came_back, times, waiting = threading.Event(), {"by itself": 0.0}, range(context.world - 1)

    def release() -> None:
        if context.rank in waiting:
            times["by itself"] = came_back.wait(1.0)
            store.set(f"hung/{context.rank}", "1")
        store.wait([f"hung/{rank}" for rank in waiting])  # or another rank's release would free this one
        times["released"] = time.monotonic()
        try:
            releaser.release()
        except EnvironmentBroken:
            traceback.print_exc()
        times["freed"] = time.monotonic()

    # The store has one client, which does one thing at a time: until the thread has ended, only it asks.
    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    ended = "without an error"
    if context.rank in waiting:  # the last one does not enter
        try:
            dist.all_reduce(data, group=everyone)
            by.synchronize()
        except RuntimeError as error:
            ended = f"with {type(error).__name__}"
        came_back.set()
    back = time.monotonic()
    thread.join()
    took, by_itself = max(times["freed"], back) - times["released"], bool(times["by itself"])
    if first:
        text = "an all_reduce that one rank does not enter "
        text += "came back by itself" if by_itself else f"was freed in {took:.2f} s {ended}; the process goes on"
        yield line("abort", took <= process_group.ABORT_SECONDS and not by_itself, text, SEND, seconds=took)
    del everyone
    gc.collect()
    if context.is_gpu:
        process_group.forget_abort(store)
    else:
        dist.destroy_process_group()
    _meet(context, store, "free")
    begin = time.monotonic()
    releaser, everyone, after = _groups(context, store, "after")
    if first:
        text = f"groups again in {time.monotonic() - begin:.2f} s, {after / 1e9:.3g} GB/s: {100 * after / before:.0f} %"
        yield line("after the abort", after >= 0.5 * before or None, text, "repeat it on an idle node", busbw=after)
    del everyone
    dist.destroy_process_group()


def _meet(context: Context, store: Any, name: str) -> None:
    store.set(f"{name}/{context.rank}", "1")
    store.wait([f"{name}/{rank}" for rank in range(context.world)])


def _groups(context: Context, store: Any, epoch: str) -> tuple[process_group.NcclReleaser | SocketReleaser, Any, float]:
    """Make the default group and two sub-groups; return what aborts them, a group of all, and an all_reduce's busbw."""
    c10d.distributed_c10d._world.group_count = 0
    sockets, own = SocketReleaser(), c10d.PrefixStore(epoch, store)
    with sockets.taking():
        whole = process_group.init_group(
            context.place, store=own, rank=context.rank, world_size=context.world, timeout=context.timeout
        )
        alone: Any = dist.new_group([context.rank], timeout=context.timeout, use_local_synchronization=True)
        everyone: Any = dist.new_group(list(range(context.world)), timeout=context.timeout)
        for group in (alone, everyone):
            dist.all_reduce(torch.ones(1, device=context.place), group=group)
    payload = 64 * MIB if context.is_gpu and not context.shared else MIB
    sampling = context.sampling(0.5)
    found = measure_collective(
        "all_reduce", whole, context.place, payload_bytes=payload, dtype="bf16", sampling=sampling
    )
    assert found.busbw is not None  # there are two ranks
    return process_group.NcclReleaser() if context.is_gpu else sockets, everyone, found.busbw.median


def device_assert(context: Context) -> Iterator[Line]:
    """Let a kernel fail by an index that is out of range, with a group open, and end: ``run`` looks at how."""
    context.begin()
    group = context.alone()
    table, index = torch.zeros(8, device=context.place), torch.full((1,), 99, device=context.place)
    dist.all_reduce(table, group=group)
    begin = time.monotonic()
    try:
        float(table[index].sum())
    except (RuntimeError, IndexError) as error:
        text = f"Python got {type(error).__name__} {time.monotonic() - begin:.2f} s after the kernel"
        yield line("device assert", True, f"{text}: {first_line(str(error))}", at=time.monotonic())
        sys.exit(ASSERT_EXIT)
    yield line("device assert", False, "an index out of range raised nothing", SEND)


def node(context: Context) -> Iterator[Line]:
    """NVML's queries, the kernel log, NCCL's logs of the other steps, and what a run is going to take."""
    if context.is_gpu:
        yield _guarded("NVML", lambda: _nvml(context))
    log = kernel_log.read()
    ours = [each for each in log.lines if "NVRM" in each or "Xid" in each]
    Path(context.folder, "dmesg-nvrm.txt").write_text("".join(f"{each}\n" for each in ours), encoding="utf-8")
    text = log.why_not or f"{plural(len(log.lines), 'line')} by {log.source}, {plural(len(log.xids()), 'Xid')}"
    yield line("kernel log", not log.why_not or None, text, "run as root, or set kernel.dmesg_restrict=0")
    yield _guarded("NCCL log", lambda: _logs(context))
    yield _guarded("memory", lambda: _memory(context))


def _nvml(context: Context) -> Line:
    nvml, answers = PyNvml(), {}
    wrong: set[str] = set()
    missing: dict[str, set[str]] = {}
    for gpu in filter(None, nvml.gpus()):
        found = read_values(nvml, gpu.uuid)
        promise = promise_of(loader.load().sku_for(gpu.name))
        required = promise.required_queries if promise else ANY_GPU
        for query, why in found.missing.items():
            missing.setdefault(why.kind, set()).add(query)
            if why.kind in ("failed", "lost") or query in required:
                wrong.add(f"{query}: {why.reason}")
        kept = {query: value for query, value in found.values.items() if query not in ("serial", "processes")}
        answers[str(gpu.index)] = {"name": gpu.name, "values": kept, "missing": found.missing}
    document = codec.to_json({"driver": nvml.driver_version(), "gpus": answers})
    Path(context.folder, "nvml.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = "; ".join([f"{kind}: {', '.join(sorted(some))}" for kind, some in missing.items()] or ["all are answered"])
    text += f"; needed: {', '.join(sorted(wrong))}" if wrong else "; none of them is needed" if missing else ""
    return line("NVML queries", not wrong and bool(answers), f"{plural(len(answers), 'GPU')}; {text}", SEND)


def _logs(context: Context) -> Line:
    paths = sorted(Path(context.folder).glob("NCCL.*.log"))
    lines = [one for path in paths for one in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    if not lines:
        why_not = NcclLog.of(os.environ, pid=0).why_not or "NCCL was not used"
        return line("NCCL log", None, f"none: {why_not}", GPU_ONLY)
    found, (other, meant) = choice(lines), map(shapes, unread(lines))
    text = (
        f"{found.version or 'no version'}, network {found.network or '?'}, {', '.join(found.transports) or 'no hops'}; "
    )
    text += f"{plural(len(lines), 'line')}, not read {plural(len(other), 'kind')}, not understood: "
    text += "; ".join(meant[:5]) or "none"
    good = (bool(found.version) and not meant) or None
    return line("NCCL log", good, text, SEND, transports=found.transports, unread=other, meant=meant)


def _memory(context: Context) -> Line:
    path, profile = find_suite() / workload_loader.FILE_NAME, USUAL_PROFILE if context.is_gpu else CPU_PROFILE
    workload, by = workload_loader.load(path, profile=profile).workload, accelerator(context.place)
    total, need = by.total_bytes() or 0, {}
    for dtype in dtypes_of(context.place):
        shape = square_shape(max(workload.matmul.sizes), dtype)
        buffers = Buffers(shape=shape, kind=arithmetic(dtype), cache=by.cache_bytes())
        need[f"matmul {dtype}"] = buffers.needed_bytes
    for kind, made in KINDS.items():
        need[f"hbm {kind}"] = made.needed_bytes(max(workload.hbm.sizes_bytes) // 8, 1)
    for collective, part in (("all_reduce", workload.all_reduce), ("all_to_all", workload.collectives)):
        largest = max(int(units.parse(size, like="B").to("B")) for size in part.sizes)
        need[collective] = needed_bytes(largest, "bf16", collective=collective)
    most = max(need, key=lambda name: need[name])
    text = f"of {total / 1e9:.3g} GB: " + ", ".join(f"{name} {need[name] / 1e9:.3g} GB" for name in need)
    todo = f"{most} does not fit: choose smaller sizes with --gpucluster-workload"
    return line("memory", need[most] < 0.95 * total or None, text, todo, **need)


STEPS: Mapping[str, Callable[[Context], Iterator[Line]]] = {
    "software": software,
    "device": device,
    "nccl": nccl,
    "hang": hang,
    "assert": device_assert,
    "node": node,
}


def failure(what: str, error: Exception) -> Line:
    """Return the line for an exception: UNPROVEN only for what the product itself explains by the environment."""
    known = isinstance(error, GpuClusterError) and not isinstance(error, (WrongResult, HardwareFault))
    text = str(error) if isinstance(error, GpuClusterError) else f"{type(error).__name__}: {first_line(str(error))}"
    return line(what, None if known else False, text, "see there" if known else f"{SEND}: it has the traceback")


def _guarded(what: str, make: Callable[[], Line]) -> Line:
    try:
        return make()
    except Exception as error:  # one that fails must not hide the others
        traceback.print_exc()
        return failure(what, error)


def main(step: str, argument: str) -> None:
    """Run a step, and write each of its lines to the file of its log with the suffix ``.jsonl``."""
    context = codec.read(Context, json.loads(argument), step)
    faulthandler.dump_traceback_later(max(1.0, context.seconds - 2))

    def write(found: Line) -> None:
        with Path(context.log).with_suffix(".jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(codec.to_json(found)) + "\n")

    try:
        for found in STEPS[step](context):
            write(found)
    except Exception as error:  # whatever the product or torch raises is the result of this step
        traceback.print_exc()
        if context.shared:
            text = f"two ranks on one GPU over sockets: {type(error).__name__}: {first_line(str(error))}"
            write(line(step, None, text, "repeat it with two visible GPUs"))
        else:
            write(failure(step, error))
        os._exit(1)  # in order, it might wait for a group that hangs


if __name__ == "__main__":
    main(*sys.argv[1:])
