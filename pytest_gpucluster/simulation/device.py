"""The simulated GPU of a rank: torch computes small tensors on the CPU, and time goes by as on the described GPU.

What a benchmark measures is made here: seconds on a simulated clock, from the rate of a healthy GPU, its spread, and
the faults at its place. Results are torch's own; a fault may change what the device has computed or moved.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_gpucluster.benchmarks.collective_payload import ROOT
from pytest_gpucluster.benchmarks.collectives import Call, busbw_factor
from pytest_gpucluster.benchmarks.storage import bandwidth, consistency
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.clock import LAUNCH_SECONDS, Clock, WallClock
from pytest_gpucluster.device.interface import Capability
from pytest_gpucluster.device.products import Multiply
from pytest_gpucluster.metrics.datasheets import SKUS
from pytest_gpucluster.metrics.units import show
from pytest_gpucluster.simulation import node
from pytest_gpucluster.simulation.cluster import Cluster
from pytest_gpucluster.simulation.faults import PROCESS_FAULT_AFTER_SECONDS
from pytest_gpucluster.simulation.nvml import CONTEXT_BYTES, FAULT_AFTER_SECONDS, HOT_RATIO, POWER_EXPONENT, Machine
from pytest_gpucluster.simulation.rates import Rates

PRODUCTS, TRAINING, MEMORY, COPIES = 1.0, 0.9, 0.6, 0.35
"""What work takes of a GPU's full power. derived: only products bring a 700 W card to its limit."""
NOISE = 0.001
"""Standard deviation of one operation's time, as a ratio."""
DEAD_FACTOR, LANES_FACTOR, SOCKET_FACTOR, NO_GDR_FACTOR, NO_NVLS_FACTOR = 0.1, 0.5, 0.1, 0.5, 0.78
"""What is left of a rate: of a dead rail, of half the lanes, over TCP instead of RDMA, without GPUDirect RDMA, and of a
sum within a node without NVLS (Source: 367.2 of 467.58 GB/s, 8 H200)."""
GROWTH = 1.2
"""Of all weights in each step of a training that diverges."""
EXPOSED = 0.03
"""Part of a training step in which ranks of several nodes wait for the network. derived: it leaves 0.97 of a rate."""
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}


class Place(NamedTuple):
    """A GPU of the cluster: its host, and its number there."""

    host: str
    gpu: int


@dataclass(eq=False)
class World:
    """What this rank knows of the simulated cluster.

    Attributes:
        cluster: its description.
        machine: this rank's GPU.
        places: name of each group -> where its ranks are; a group itself that outlives its end aborts the process.
        exchanges: likewise, by what its ranks exchange data.
        host_computes: what is computed now is to compare the device with.
    """

    cluster: Cluster
    machine: Machine
    places: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    scale: float = 1.0
    calls: int = 0
    turn: int = 0
    """How often the ranks that now exchange something have done so: the same on all of them."""
    host_computes: bool = False

    def __post_init__(self) -> None:
        self.rates = Rates(self.cluster)
        self.me = Place(self.machine.host, self.machine.index)
        self.random = random.Random(f"{self.cluster.seed}/{self.me}")
        planted = {fault.name for fault in self.cluster.faults.all}
        self._changes = bool(planted & {"throttle", "flapping-port"})
        self._can_end = bool(planted & {*_LOST, "kill", "node-down", "stop", "hang"})
        self._held = dict[str, int]()
        self.turns = Counter[frozenset[Place]]()
        self._slowest: dict[tuple[Place, ...], tuple[float, float]] = {}

    # ---- how fast a place is

    @cache  # noqa: B019  # one world a process
    def spread(self, place: Place) -> float:
        """Return how much faster than the median this GPU is, as a factor."""
        return 1 + self.cluster.spread * max(-2.0, min(2.0, random.Random(f"{self.cluster.seed}/{place}").gauss(0, 1)))

    def factor(self, place: Place, *, of: str = "") -> float:
        """Return what is left of a rate at a place: ``of`` is "hbm", "host_link" or "" for all others."""
        has = self.cluster.faults.amount
        left = self.spread(place) * (1 - (has("slow-gpu", place.host, place.gpu) or 0))
        left *= (1 - (has("slow-host", place.host) or 0)) * (has("half-rate") or 1)
        hot_after = has("throttle", place.host, place.gpu)
        if hot_after is not None and self.machine.busy_seconds > hot_after:  # all ranks of a suite work alike
            left *= HOT_RATIO
        if of == "hbm":
            left *= has("hbm", place.host, place.gpu) or 1
        elif of == "host_link":
            left *= LANES_FACTOR if has("pcie", place.host, place.gpu) else 1
        else:
            watts = has("power-cap", place.host)
            left *= min(1.0, watts / self.cluster.gpu.power_limit_watts) ** POWER_EXPONENT if watts else 1
        return left

    def port_factor(self, place: Place) -> float:
        """Return what is left of the rate of the ports of a place, of which the slowest decides."""
        ports, has = self.cluster.ports_of(place.gpu), self.cluster.faults.amount
        of_each = [
            DEAD_FACTOR if has("dead-rail", place.host, port) else has("slow-rail", place.host, port) or 1.0
            for port in ports
        ]
        left = min(of_each, default=1.0)
        if has("nic-down", place.host) and self.cluster.ports[-1] in ports:
            left *= LANES_FACTOR  # it shares another one
        if has("no-gdr", place.host):
            left *= NO_GDR_FACTOR
        return left * (DEAD_FACTOR if self.flapping(place) else 1.0)

    def flapping(self, place: Place) -> str:
        """Return the port of a place that is without a link now, for 8 exchanges of the same ranks; "" for none."""
        for port in self.cluster.ports_of(place.gpu):
            often = self.cluster.faults.amount("flapping-port", place.host, port) or 0.0
            if often and random.Random(f"{self.cluster.seed}/{port}/{self.turn // 8}").random() < often:
                return port
        return ""

    def slowest(self, places: tuple[Place, ...]) -> tuple[float, float]:
        """Return what is left of the rates of the slowest of these GPUs, and of the slowest of their ports."""
        if self._changes or places not in self._slowest:
            self._slowest[places] = min(map(self.factor, places)), min(map(self.port_factor, places))
        return self._slowest[places]

    # ---- memory

    def hold_group(self, name: str, amount_bytes: int) -> None:
        """Let the communicator of a group take this much memory."""
        self._held[name] = amount_bytes
        self.machine.group_bytes = sum(self._held.values())

    # ---- time

    def work(self, seconds: float, load: float) -> None:
        """Let this GPU work at a part of its full power; faults that end its rank show here."""
        self.machine.work(self.scale * seconds * (1 + self.random.gauss(0, NOISE)), load)
        if self._can_end:
            self._end()

    def _end(self) -> None:
        has, busy = self.cluster.faults.amount, self.machine.busy_seconds
        if busy < FAULT_AFTER_SECONDS:
            return
        for name, text in _LOST.items():
            if has(name, self.me.host, self.me.gpu):
                raise torch.AcceleratorError(text) if hasattr(torch, "AcceleratorError") else RuntimeError(text)
        if busy < PROCESS_FAULT_AFTER_SECONDS:
            return
        if has("kill", self.me.host, self.me.gpu) or has("node-down", self.me.host):
            os.kill(os.getpid(), signal.SIGKILL)
        if has("stop", self.me.host, self.me.gpu):
            os.kill(os.getpid(), signal.SIGSTOP)
        while has("hang", self.me.host, self.me.gpu):
            time.sleep(1)


def plant_in_training(world: World) -> None:
    """Let what this rank trains from now on go wrong as its faults say: on its device, whatever the training.

    A wrong gradient is that of every embedding, which no other gradient depends on. A training diverges by weights that
    grow with each step of an optimizer, on all ranks alike.
    """
    has = world.cluster.faults.amount
    wrong = has("wrong-gradient", world.me.host, world.me.gpu)

    def spoil(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and output.requires_grad and not world.host_computes:
            output.register_hook(lambda gradient: gradient * (1 + (wrong or 0)))

    def grow(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for settings in optimizer.param_groups:
                for weight in settings["params"]:
                    weight.mul_(GROWTH)

    if wrong is not None:
        register_module_forward_hook(spoil)
    if has("diverge") is not None:
        register_optimizer_step_post_hook(grow)


def plant_in_files(world: World) -> None:
    """Let each read and write of a shared file's content take longer, as the fault says: in real time, as files are."""
    seconds = world.cluster.faults.amount("slow-files")
    if seconds is None:
        return

    def late(call: Callable[..., Any], *given: Any) -> Any:
        time.sleep(seconds)
        return call(*given)

    for module, names in ((bandwidth, ("write_bytes", "read_into")), (consistency, ("write_small", "read_small"))):
        for name in names:
            setattr(module, name, partial(late, getattr(module, name)))


_LOST = {
    "xid79": "CUDA error: GPU is lost",
    "xid94": "CUDA error: uncorrectable ECC error encountered",
    "xid119": "CUDA error: unspecified launch failure",
}


class SimulatedClock(WallClock):
    """Simulated time. Of equal operations one is started, and stands for all."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda: world.machine.now)
        self._world = world

    @contextmanager
    def region(self) -> Iterator[None]:
        """Time the work inside; without any it takes as long as a launch."""
        machine = self._world.machine
        before = machine.now
        with super().region():
            yield
            if machine.now == before:
                machine.now += LAUNCH_SECONDS

    def real(self, count: int) -> int:
        """Return one: it stands for all."""
        return 1

    @contextmanager
    def scaled(self, ratio: float) -> Iterator[None]:
        """Let each operation take as long as this many."""
        before = self._world.scale
        self._world.scale = before * ratio
        try:
            yield
        finally:
            self._world.scale = before


class Simulated(Cpu):
    """The back end of a simulated GPU: memory of the host, time of the description.

    Args:
        place: the CPU.
        world: what this rank knows of the cluster.
    """

    numa_maps = Path("/nowhere")  # the real file shows this machine's nodes, and the GPUs are near described ones

    def __init__(self, place: torch.device, world: World) -> None:
        super().__init__(place)
        self._world, self._ratio, self._side_until = world, 1.0, 0.0
        self._on_side = False

    # ---- time and streams

    def now(self) -> float:
        """Return simulated seconds."""
        return self._world.machine.now

    def clock(self) -> Clock:
        """Make one of simulated time."""
        return SimulatedClock(self._world)

    def synchronize(self) -> None:
        """Wait for the side stream in simulated time."""
        late = self._side_until - self._world.machine.now
        if late > 0:
            self._world.machine.work(late, COPIES)

    def side_stream(self) -> Any:
        """Return what stands for a second stream."""
        return self

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Count work in the side stream by itself."""
        before, self._on_side = self._on_side, self._on_side or stream is self
        try:
            yield
        finally:
            self._on_side = before

    def fork(self, side: Any) -> None:
        """Let the side stream begin now."""
        self._side_until = self._world.machine.now

    def join(self, side: Any) -> None:
        """Wait for the side stream in simulated time."""
        if side is self:
            self.synchronize()

    def _work(self, seconds: float, load: float) -> None:
        if self._on_side:
            self._side_until += self._world.scale * seconds
        else:
            self._world.work(seconds, load)

    # ---- timed operations

    def kept(self, count: int, least: int) -> int:
        """Return how many are kept, and time work by all of them from here on."""
        found = min(count, least)
        self._ratio = count / found
        return found

    def product(self, *, scaled: bool, of: tuple[int, int, int] | None = None) -> Multiply:
        """Multiply small matrices in the time of those that are planned."""
        multiply, world = super().product(scaled=scaled), self._world

        def timed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            multiply(a, b, out)
            m, n, k = of or (a.shape[0], b.shape[1], a.shape[1])
            dtype = _DTYPES[a.dtype]
            if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
                dtype = "tf32"
            rate = world.rates.of(f"matmul.{dtype}.tflops", n=round((m * n * k) ** (1 / 3))).value * 1e12
            self._work(2 * m * n * k / (rate * world.factor(world.me)), PRODUCTS)
            # A bit of one product in N is wrong, those that one stands for included.
            one_in = world.cluster.faults.amount("wrong-product", world.me.host, world.me.gpu)
            before, world.calls = world.calls, world.calls + max(1, round(world.scale))
            if one_in and before // one_in != world.calls // one_in:
                out.view(-1).view(torch.uint8)[0] ^= 64

        return timed

    def _memory(self, kind: str, moved_bytes: int) -> None:
        world = self._world
        rate = world.rates.of(f"hbm.{kind}.bandwidth").value * 1e12
        self._work(self._ratio * moved_bytes / (rate * world.factor(world.me, of="hbm")), MEMORY)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, in the time of the planned bytes."""
        super().copy(source, target)
        self._memory("copy", source.nbytes + target.nbytes)

    def read(self, source: torch.Tensor, total: torch.Tensor) -> None:
        """Sum up, in the time of the planned bytes."""
        super().read(source, total)
        self._memory("read", source.nbytes)

    def write(self, target: torch.Tensor, value: int) -> None:
        """Fill, in the time of the planned bytes."""
        super().write(target, value)
        self._memory("write", target.nbytes)

    def copy_over_link(self, direction: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, in the time that the planned bytes take over the host's link."""
        super().copy_over_link(direction, source, target)
        world = self._world
        rate = world.rates.of(f"host_link.{direction}.bandwidth", {"mode": "alone"}).value * 1e9
        self._work(self._ratio * source.nbytes / (rate * world.factor(world.me, of="host_link")), COPIES)

    def trained(self, flops: float, group: ProcessGroup | None) -> None:
        """Take the time of the slowest rank of the group: the others wait for its gradients."""
        world = self._world
        places = (world.me,) if group is None else world.places.get(group.group_name, (world.me,))
        has, peaks = world.cluster.faults.amount, SKUS[world.cluster.sku].peaks
        assert peaks is not None  # a cluster's SKU has limits, and so a data sheet
        utilisation = world.rates.of("training.mfu", {"model": "large"}).value / 100
        left = min(world.factor(place) * (1 - (has("straggler", place.host, place.gpu) or 0)) for place in places)
        seconds = flops / (utilisation * peaks.bf16_tflops * 1e12 * left)
        if len({place.host for place in places}) > 1:
            seconds *= 1 + EXPOSED / world.slowest(places)[1]
        self._work(seconds, TRAINING)

    @contextmanager
    def computed_by_host(self) -> Iterator[None]:
        """Leave out the device's faults."""
        self._world.host_computes = True
        try:
            yield
        finally:
            self._world.host_computes = False

    # ---- groups

    def barrier(self, group: ProcessGroup) -> None:
        """Return at once: all ranks begin at the same simulated time."""

    def rows(self, mine: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """Exchange them without gloo."""
        return self._world.exchanges[group.group_name].rows(mine)

    def joined(self, group: ProcessGroup) -> None:
        """Exchange the places of the group's ranks, and take the memory of its communicator."""
        world = self._world
        world.exchanges[group.group_name] = exchange = Exchange(group, world.me)
        world.places[group.group_name] = tuple(exchange.known)
        world.hold_group(group.group_name, world.cluster.nccl.group_bytes)
        node.write_nccl_log(world.cluster, exchange.known, dist.get_rank(group))

    def left(self, groups: Iterable[ProcessGroup]) -> None:
        """Return the memory of their communicators."""
        for group in groups:
            self._world.hold_group(group.group_name, 0)

    def communicate(
        self,
        call: Callable[[], object],
        name: str,
        payload_bytes: int,
        group: ProcessGroup,
        *,
        sent: torch.Tensor | None = None,
        peer: int | None = None,
    ) -> None:
        """Start it, in the time that it takes on the described links: the slowest part decides."""
        world = self._world
        if sent is not None and world.cluster.faults.amount("wrong-reduce", world.me.host, world.me.gpu):
            sent[len(sent) // 2] += 1
        call()
        if name == "all_to_all":
            world.hold_group(group.group_name, world.cluster.nccl.group_bytes + world.cluster.nccl.all_to_all_bytes)
        places = world.places.get(group.group_name, (world.me,))
        if peer is not None:
            places = (world.me, places[dist.get_group_rank(group, peer)])
        world.turns[frozenset(places)] += 1
        world.turn = world.turns[frozenset(places)]
        if not world.turn % 8 and (lost := world.flapping(world.me)) and len({place.host for place in places}) > 1:
            node.lose_link(lost)
        self._work(self._transfer_seconds(name, payload_bytes, places), COPIES)

    def _transfer_seconds(self, name: str, payload_bytes: int, places: tuple[Place, ...]) -> float:
        world, count = self._world, len(places)
        nodes = len({place.host for place in places})
        if count == 1:
            return LAUNCH_SECONDS + payload_bytes / (world.rates.of("hbm.copy.bandwidth").value * 1e12)
        labels = {"transport": world.cluster.nccl.transport if nodes > 1 else "P2P"}
        if name == "message":
            # A link is judged as one of its node's, or of the whole cluster's.
            whole = world.cluster.nodes if nodes > 1 else 1
            ranks = whole * world.cluster.gpus_per_node
            rate, traffic = world.rates.of("link.bandwidth", labels, world_size=ranks, nodes=whole).value, 1.0
        else:
            labels["size"] = show(max(payload_bytes, 1e9), "B")
            rate = world.rates.of(f"nccl.{name}.busbw", labels, world_size=count, nodes=nodes).value
            traffic = busbw_factor(count, name)  # what goes through a rank's link for each byte of payload
        left, of_port = world.slowest(places)
        has = world.cluster.faults.amount
        if nodes > 1 and world.cluster.nccl.transport != "P2P":
            left *= of_port * (SOCKET_FACTOR if has("net-socket") else 1)
        elif name == "all_reduce" and has("nvls-off"):
            left *= NO_NVLS_FACTOR
        model = world.cluster.nccl
        latency = model.latency_seconds if nodes == 1 else model.net_latency_seconds
        return latency + payload_bytes * traffic / (rate * 1e9 * left)

    # ---- memory

    def free_bytes(self) -> int | None:
        """Return what neither the context nor NCCL's communicators take."""
        return self._world.cluster.gpu.memory_bytes - CONTEXT_BYTES - self._world.machine.group_bytes

    def total_bytes(self) -> int | None:
        """Return the described memory."""
        return self._world.cluster.gpu.memory_bytes

    def cache_bytes(self) -> int:
        """Return the described cache."""
        return self._world.cluster.gpu.cache_bytes

    # ---- identity

    @property
    def capability(self) -> Capability | None:
        """As it is described."""
        major, minor = self._world.cluster.gpu.capability.split(".")
        return int(major), int(minor)

    @property
    def kind(self) -> str:
        """Model and multiprocessors, simulated."""
        gpu = self._world.cluster.gpu
        return f"simulated {gpu.name} with {gpu.multiprocessors} multiprocessors, torch {torch.__version__}"


# ---- what ranks exchange --------------------------------------------------------------------------------------------


class Exchange:
    """The ranks of a group, which are all on this machine: the first one collects what each has, and sends it to each.

    For 16 ranks it takes a tenth of the time of gloo's messages. As with these, a rank that ends ends those that wait.

    Collective: every rank of the group must make it.

    Args:
        group: of gloo.
        mine: what others are to know of this rank.

    Attributes:
        known: what is known of each rank.
    """

    def __init__(self, group: ProcessGroup, mine: Any) -> None:
        self._count, self._rank, self._peers = dist.get_world_size(group), dist.get_rank(group), list[socket.socket]()
        with socket.socket(socket.AF_UNIX) as listening:
            if self._rank == 0:
                listening.bind("")  # the kernel finds a name
                listening.listen(self._count)
            all_known: list[Any] = [None] * self._count
            dist.all_gather_object(all_known, (mine, listening.getsockname()), group=group)
            self.known = [known for known, _ in all_known]
            if self._rank == 0:
                found = [listening.accept()[0] for _ in range(1, self._count)]
                numbers = [int.from_bytes(peer.recv(4), "big") for peer in found]
                self._peers = [peer for _, peer in sorted(zip(numbers, found, strict=True), key=lambda one: one[0])]
            else:
                self._peers = [socket.socket(socket.AF_UNIX)]
                self._peers[0].connect(all_known[0][1])
                self._peers[0].sendall(self._rank.to_bytes(4, "big"))

    def rows(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, of one dimension, length and dtype, as rows."""
        everyone = mine.new_empty(self._count, len(mine))
        whole, each = _bytes_of(everyone.view(-1)), _bytes_of(mine)
        try:
            if self._rank == 0:
                everyone[0] = mine
                for number, peer in enumerate(self._peers, 1):
                    _receive(peer, whole[number * len(each) : (number + 1) * len(each)])
                for peer in self._peers:
                    peer.sendall(whole)
            else:
                self._peers[0].sendall(each)
                _receive(self._peers[0], whole)
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error
        return everyone


def _bytes_of(data: torch.Tensor) -> memoryview:
    array: Any = data.view(torch.uint8).numpy()
    return memoryview(array)


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into:
        count = peer.recv_into(into, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("a rank of the group has ended")
        into = into[count:]


def calls(world: World) -> dict[str, Call]:
    """Return what takes the place of the benchmark's own calls."""

    def rows_of(sent: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return world.exchanges[group.group_name].rows(sent)

    def parts_for_me(sent: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        rows = rows_of(sent, group)
        return rows.view(len(rows), len(rows), -1)[:, dist.get_rank(group)]

    return {
        "all_reduce": lambda sent, received, group: torch.sum(rows_of(received, group), 0, out=received),
        "all_gather": lambda sent, received, group: received.copy_(rows_of(sent, group).view(-1)),
        "reduce_scatter": lambda sent, received, group: torch.sum(parts_for_me(sent, group), 0, out=received),
        "all_to_all": lambda sent, received, group: received.copy_(parts_for_me(sent, group).flatten()),
        "broadcast": lambda sent, received, group: received.copy_(rows_of(received, group)[ROOT]),
        "send_recv": lambda sent, received, group: received.copy_(rows_of(sent, group)[dist.get_rank(group) - 1]),
    }
