"""The faults that a simulated cluster can have: what each one does, where, and how much of it.

    >>> parse("slow-gpu:gpu-01/3=10%")
    Fault(name='slow-gpu', host='gpu-01', place='3', amount=0.1)
    >>> str(parse("dead-rail:gpu-01/mlx5_3"))
    'dead-rail:gpu-01/mlx5_3'

A fault acts on what the device, NVML, files or processes do. It never touches a result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.metrics.units import did_you_mean

Where = Literal["gpu", "port", "host", "cluster"]
EXAMPLES: Mapping[Where, str] = MappingProxyType(
    {"gpu": "NAME:gpu-01/3", "port": "NAME:gpu-01/mlx5_3", "host": "NAME:gpu-01", "cluster": "NAME"}
)
PROCESS_FAULT_AFTER_SECONDS = 20.0
"""Simulated seconds of load until a rank is killed, stopped or hangs: in the middle of a test."""
_WRITTEN = re.compile(
    r"(?P<name>[a-z0-9-]+)(?::(?P<host>[^/=\s]+)(?:/(?P<place>[^/=\s]+))?)?(?:=(?P<amount>[0-9.]+) ?(?P<unit>%|s|W)?)?"
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault.

    Attributes:
        where: what has it.
        does: what it does, for people.
        amount: how much of it, where nothing else is written; None where it has no amount.
        unit: of the amount: "%" (a ratio inside), "s" or "W".
        healthy: no fault: it must be reported, and no part accused.
    """

    where: Where
    does: str
    amount: float | None = None
    unit: str = ""
    healthy: bool = False


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "slow-gpu": Kind(where="gpu", does="all rates of the GPU are lower by this much", amount=0.1, unit="%"),
        "throttle": Kind(where="gpu", does="it is too hot after this long under load", amount=600.0, unit="s"),
        "power-cap": Kind(where="host", does="the power limit of all its GPUs", amount=500.0, unit="W"),
        "ecc": Kind(where="gpu", does="uncorrected memory errors appear under load"),
        "ecc-corrected": Kind(where="gpu", does="corrected memory errors appear under load", healthy=True),
        "row-remap": Kind(where="gpu", does="a row could not be remapped: Xid 64"),
        "row-remapped": Kind(where="gpu", does="a row was remapped in an earlier boot", healthy=True),
        "xid79": Kind(where="gpu", does="it falls off the bus under load"),
        "xid94": Kind(where="gpu", does="a contained memory error under load ends what runs on it"),
        "xid119": Kind(where="gpu", does="its GSP stops to answer under load"),
        "nvlink5-fatal": Kind(where="gpu", does="a fatal NVLink error: Xid 149"),
        "wrong-product": Kind(where="gpu", does="one bit is wrong in one of this many products", amount=1000.0),
        "wrong-reduce": Kind(where="gpu", does="one element that it adds to a sum is wrong"),
        "hbm": Kind(where="gpu", does="what is left of the memory's rate", amount=0.8, unit="%"),
        "pcie": Kind(where="gpu", does="its PCIe link has 8 lanes, and half of the rate"),
        "nvlink-down": Kind(where="gpu", does="one of its NVLinks is inactive"),
        "dead-rail": Kind(where="port", does="what goes through this port is ten times slower"),
        "slow-rail": Kind(where="port", does="what is left of the port's rate", amount=0.5, unit="%"),
        "flapping-port": Kind(where="port", does="slow in this part of the transfers", amount=0.125, unit="%"),
        "nic-down": Kind(where="host", does="one port less: the last one is down"),
        "net-socket": Kind(where="cluster", does="NCCL goes over TCP instead of RDMA"),
        "no-gdr": Kind(where="host", does="no GPUDirect RDMA: data go through the host's memory"),
        "slow-host": Kind(where="host", does="all rates of its GPUs are lower by this much", amount=0.15, unit="%"),
        "stale-process": Kind(where="gpu", does="a process of an earlier job holds 20 GB of its memory"),
        "mig": Kind(where="gpu", does="MIG is on"),
        "vbios": Kind(where="gpu", does="another VBIOS than all others"),
        "clock-skew": Kind(where="host", does="its clock is ahead by this much", amount=2.0, unit="s"),
        "slow-files": Kind(where="cluster", does="access to shared files takes this much more", amount=0.05, unit="s"),
        "straggler": Kind(where="gpu", does="it is slower in training by this much", amount=0.3, unit="%"),
        "wrong-gradient": Kind(where="gpu", does="one of its gradients is wrong by this much", amount=0.1, unit="%"),
        "diverge": Kind(where="cluster", does="the training's loss rises"),
        "kill": Kind(where="gpu", does="its rank is killed in the middle of a test"),
        "hang": Kind(where="gpu", does="its rank hangs in the middle of a test"),
        "stop": Kind(where="gpu", does="its rank is stopped (SIGSTOP) in the middle of a test"),
        "node-down": Kind(where="host", does="all its processes end in the middle of a test"),
        "half-rate": Kind(where="cluster", does="what is left of every rate", amount=0.5, unit="%"),
        "nvls-off": Kind(where="cluster", does="NCCL goes without NVLS"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault at its place.

    Attributes:
        name: one of ``KINDS``.
        host: its host; "" of the whole cluster.
        place: the number of its GPU on the host, or the name of the port; "" of a host.
        amount: in seconds, watts or as a ratio; 0 where the kind has none.
    """

    name: str
    host: str = ""
    place: str = ""
    amount: float = 0.0

    @property
    def kind(self) -> Kind:
        """What it is."""
        return KINDS[self.name]

    @property
    def after_seconds(self) -> float:
        """How long its GPU must have been under load before it acts, in simulated seconds."""
        if self.name == "throttle":
            return self.amount
        return PROCESS_FAULT_AFTER_SECONDS if self.name in ("kill", "hang", "stop", "node-down") else 0.0

    def __str__(self) -> str:
        kind, where = self.kind, "/".join(filter(None, (self.host, self.place)))
        shown = 100 * self.amount if kind.unit == "%" else self.amount
        amount = "" if kind.amount in (None, self.amount) else f"={shown:g}{kind.unit}"
        return f"{self.name}{':' * bool(where)}{where}{amount}"


def parse(text: str) -> Fault:
    """Read a fault as it is written: NAME, NAME:HOST, NAME:HOST/GPU or NAME:HOST/PORT, each also with =AMOUNT.

    Raises: OptionError that says what is allowed.
    """
    found = _WRITTEN.fullmatch(text.strip())
    name = found["name"] if found else re.split("[:=]", text.strip())[0]
    if name not in KINDS:
        raise OptionError(f"no fault is called {name!r}; known are {', '.join(KINDS)}{did_you_mean(name, KINDS)}")
    kind = KINDS[name]
    has = None if found is None else ("port" if found["place"] else "host" if found["host"] else "cluster")
    if found is None or has != ("port" if kind.where == "gpu" else kind.where):
        example = EXAMPLES[kind.where].replace("NAME", name)
        more = ""
        if kind.amount is not None:
            usual = 100 * kind.amount if kind.unit == "%" else kind.amount
            more = f", or with an amount as {example}={usual:g}{kind.unit}"
        raise OptionError(f"{text!r}: the fault {name} is written as {example}{more}")
    amount = kind.amount
    if found["amount"] is not None:
        if kind.amount is None or (found["unit"] or "") != kind.unit:
            takes = f"an amount in {kind.unit or 'plain numbers'}" if kind.amount is not None else "no amount"
            raise OptionError(f"{text!r}: the fault {name} takes {takes}")
        amount = _amount(text, found["amount"], kind.unit)
    return Fault(name=name, host=found["host"] or "", place=found["place"] or "", amount=amount or 0.0)


def _amount(text: str, written: str, unit: str) -> float:
    """Return an amount, as a ratio where it is in percent. All of a rate, and nothing of it, are no part of it."""
    try:
        found = float(written)
    except ValueError:  # such as 1.2.3
        found = 0.0
    if not 0 < found < (100 if unit == "%" else math.inf):
        allowed = "above 0 % and below 100 %" if unit == "%" else f"above 0 {unit}".strip()
        raise OptionError(f"{text!r}: an amount is a number {allowed}, not {written!r}")
    return found / 100 if unit == "%" else found


@dataclass(frozen=True)
class Faults:
    """The faults of a cluster, asked for by name and place."""

    all: tuple[Fault, ...] = ()

    def amount(self, name: str, host: str = "", place: str | int = "") -> float | None:
        """Return how much of this fault is at this place; None where it is not there. A fault without an amount is 1.

        A fault of the cluster is everywhere, and one of a host at all its places.
        """
        for fault in self.all:
            if fault.name == name and fault.host in ("", host) and fault.place in ("", str(place)):
                return fault.amount or 1.0
        return None
