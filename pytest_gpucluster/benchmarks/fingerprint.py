"""The bits that a device computes from fixed numbers: taken, exchanged and compared between equal GPUs.

They are the same on every GPU of a model, and each time. The numbers are drawn on the CPU, and the results are summed
up on the CPU too: a GPU that computes wrongly must not be the one that reports what it has computed.

The comparison is pure. :func:`exchange` is for local workers of a node that cannot communicate and know of each other
by number only: each leaves its fingerprint as a file in a folder and waits for all the others, so that all compare the
same.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from pytest_gpucluster.benchmarks.dtypes import arithmetic, dtypes_of, numerics, require_switches
from pytest_gpucluster.benchmarks.matmul import multiplier
from pytest_gpucluster.benchmarks.memory_budget import memory_returned, require_free
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.verify import Comparison, deterministic
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

HEAD = 64
"""Width of a head of attention, for which every kernel is made."""

_ROWS_A_HEAD = 512

_MATRICES = 24
"""So many fp32 matrices of n x n are in memory at most, generously: operands, what a stage makes of them, results."""

_MIX = 0x9E3779B1 - 2**32
"""An odd number with bits all over. Source: 2**32 over the golden ratio, as in ``pattern``."""

Stage = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``stage(a, b)``: a computation with two n x n matrices of fp32, both of which it leaves as they are."""


def _product(dtype: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kind = arithmetic(dtype)
    left, right = a.to(kind.operands), b.to(kind.operands)
    if kind.is_scaled:
        right = right.t().contiguous().t()  # the same matrix, column-major
    product = torch.empty(a.shape, dtype=kind.result, device=a.device)
    with numerics(kind.float32_precision):
        multiplier(a.device, kind)(left, right, product)
    return product


def _sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([(a * b).sum().view(1), a.sum(dim=0), b.sum(dim=1), a.square().mean(dim=1)])


def _softmax(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.softmax(a, dim=-1)


def _attention(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Causal attention in bf16 with heads of 64, as training has it."""
    heads = max(1, len(a) // _ROWS_A_HEAD)
    query, key, value = (
        each[:, : heads * HEAD].to(torch.bfloat16).view(1, len(a), heads, HEAD).transpose(1, 2) for each in (a, b, a)
    )
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _functions(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What the special function units do, and a division."""
    return torch.exp(a).add_(torch.sin(b)).div_(torch.rsqrt(b.square().add_(1))).add_(torch.tanh(a))


def _integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The bits of both, multiplied and mixed modulo 2**32: right or wrong, with nothing to round."""
    mixed = a.view(torch.int32).mul(_MIX).bitwise_xor_(b.view(torch.int32))
    return mixed.bitwise_xor_(mixed.bitwise_right_shift(15)).mul_(_MIX)


def stages_of(device: torch.device) -> Mapping[str, Stage]:
    """Return what is computed on a device: products in every dtype that it has, and what else training is made of."""
    products = {f"matmul {dtype}": functools.partial(_product, dtype) for dtype in dtypes_of(device)}
    others = {
        "sums": _sums,
        "softmax": _softmax,
        "attention": _attention,
        "functions": _functions,
        "integers": _integers,
    }
    return {**products, **others}


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What one device has computed.

    Attributes:
        kind: what must be alike on two devices for their bits to be the same.
        digests: stage -> its bits, summed up as 16 hexadecimal digits.
        repeats: how often each stage was computed.
        changed: stage -> how many of the repeats gave other bits than the first time; only those that have any.
    """

    kind: str
    digests: Mapping[str, str]
    repeats: int
    changed: Mapping[str, int]

    @property
    def repeated(self) -> float:
        """The part of the stages that gave the same bits every time."""
        return 1 - len(self.changed) / len(self.digests)

    def require_steady(self, where: str) -> None:
        """Raise where the device gave other bits at another time.

        Raises: WrongResult with ``where``, the stages, and how often.
        """
        if self.changed:
            told = ", ".join(f"{stage} in {count}" for stage, count in self.changed.items())
            raise WrongResult(
                f"{where}: the same computation gave other bits than the first time: {told} of {self.repeats - 1}"
                " repeats. Take this device out of service and run the vendor's diagnostics"
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "kind": self.kind,
            "digests": dict(self.digests),
            "repeats": self.repeats,
            "changed": dict(self.changed),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Fingerprint:
        """Read what :meth:`to_json` has made."""
        return cls(**told)


def take_fingerprint(
    device: torch.device, *, n: int, repeats: int, seed: int = 0, stages: Mapping[str, Stage] | None = None
) -> Fingerprint:
    """Compute each stage ``repeats`` times, and say what came out.

    Args:
        device: where to compute.
        n: rows and columns of the matrices, a multiple of 64. On a GPU so large that every multiprocessor has work.
        repeats: at least 1. Each but the first is compared with the first, bit by bit, on the device.
        seed: of the numbers.
        stages: what to compute; by default ``stages_of`` the device.

    Raises:
        EnvironmentBroken: too little memory is free, or the environment keeps cuBLAS or torch from giving the same
            bits again.
        ValueError: an argument is out of its range.

    Source: cuBLAS gives the same bits on GPUs with the same architecture and number of multiprocessors:
    https://docs.nvidia.com/cuda/cublas/#results-reproducibility.
    """
    if n < HEAD or n % HEAD or repeats < 1:
        raise ValueError(f"n must be a multiple of {HEAD}, and repeats at least 1: {n}, {repeats}")
    require_switches(device, arithmetic("fp32"))
    instead = "choose smaller matrices, such as --gpucluster-workload determinism.n=1024"
    require_free(device, _MATRICES * 4 * n * n, f"the fingerprint of n={n}", instead=instead)
    with counted(MEASURING), memory_returned(), deterministic(), torch.no_grad():
        digests, changed = _compute(device, stages_of(device) if stages is None else stages, n, repeats, seed)
    return Fingerprint(kind=kind_of(device), digests=digests, repeats=repeats, changed=changed)


def _compute(
    device: torch.device, stages: Mapping[str, Stage], n: int, repeats: int, seed: int
) -> tuple[dict[str, str], dict[str, int]]:
    # A function of its own, for its frame holds all tensors: see memory_returned.
    drawn = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, n, generator=drawn).to(device) for _ in range(2))
    digests, changed = {}, {}
    for name, stage in stages.items():
        first = stage(a, b).contiguous()
        digests[name] = f"{fingerprint([first.cpu()]):016x}"
        comparison = Comparison(first)
        answers = [comparison.differ(stage(a, b).contiguous(), first) for _ in range(repeats - 1)]
        times = sum(map(bool, answers))
        if times:
            changed[name] = times
    return digests, changed


def kind_of(device: torch.device) -> str:
    """Name what must be alike for two devices to compute the same bits: the model, and the software."""
    software = f"torch {torch.__version__}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return (
            f"{properties.name} with {properties.multi_processor_count} multiprocessors, {software},"
            f" CUDA {torch.version.cuda}"
        )
    return f"cpu ({torch.backends.cpu.get_cpu_capability()}) with {torch.get_num_threads()} threads, {software}"


_NAMED = 8
"""So many are named in a message."""


@dataclass(frozen=True, kw_only=True)
class Dissent:
    """A stage in which the GPUs of one kind do not agree.

    Attributes:
        stage: what they have computed.
        holders: digest -> the ranks that gave it, those of the most first.
    """

    stage: str
    holders: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the kind."""
        return tuple(sorted(rank for ranks in self.holders.values() for rank in ranks))

    @property
    def majority(self) -> str | None:
        """The digest that more than half of them gave, or None: then nobody can tell who is right."""
        digest, ranks = next(iter(self.holders.items()))
        return digest if 2 * len(ranks) > len(self.ranks) else None

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks that are not in the majority; all of them, where there is none."""
        return tuple(rank for rank in self.ranks if rank not in self.holders.get(self.majority or "", ()))


class FingerprintAgreement:
    """What several GPUs' fingerprints say of each other.

    Args:
        prints: of each rank, in the order of ranks.
    """

    def __init__(self, prints: Sequence[Fingerprint]) -> None:
        self._prints = tuple(prints)
        of_kind: dict[str, list[int]] = {}
        for rank, one in enumerate(self._prints):
            of_kind.setdefault(one.kind, []).append(rank)
        self._of_kind = of_kind
        self.dissents = tuple(
            dissent
            for ranks in of_kind.values()
            for stage in self._stages(ranks)
            if (dissent := self._of(stage, ranks))
        )

    def _stages(self, ranks: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(stage for rank in ranks for stage in self._prints[rank].digests))

    def _of(self, stage: str, ranks: Sequence[int]) -> Dissent | None:
        # A stage that a rank has not computed is none that it agrees in.
        told = {rank: self._prints[rank].digests.get(stage, "nothing") for rank in ranks}
        counted = Counter(told.values()).most_common()
        if len(counted) == 1:
            return None
        return Dissent(
            stage=stage,
            holders={digest: tuple(rank for rank in ranks if told[rank] == digest) for digest, _ in counted},
        )

    def agreed(self, rank: int) -> float:
        """Return the part of the stages in which this rank gave the bits of the majority of its kind.

        Raises: EnvironmentBroken if there is no other GPU of its kind: nothing was compared.
        """
        kind = self._prints[rank].kind
        ranks = self._of_kind[kind]
        if len(ranks) < 2:
            others = ", ".join(sorted(other for other in self._of_kind if other != kind))
            raise EnvironmentBroken(
                f"rank {rank} has nobody to compare its bits with: it alone has {kind}, the others have {others}. Bring"
                " GPUs and software to the same model and version, or run this on at least two that are alike"
            )
        stages = self._stages(ranks)
        alone = sum(rank in dissent.suspects for dissent in self.dissents)
        return 1 - alone / len(stages)

    def require(self, rank: int, names: Mapping[int, str]) -> None:
        """Raise where this rank's GPU computes other bits than its equals, or where it is open whose are wrong.

        Args:
            rank: this one.
            names: how each rank is called in the message.

        Raises: WrongResult with the stages and who gave what.
        """
        mine = [dissent for dissent in self.dissents if rank in dissent.suspects]
        if not mine:
            return
        told = "; ".join(_told(dissent, rank, names) for dissent in mine)
        raise WrongResult(f"{names[rank]}: the same computation gives other bits here: {told}")


def _told(dissent: Dissent, rank: int, names: Mapping[int, str]) -> str:
    digest = next(digest for digest, ranks in dissent.holders.items() if rank in ranks)
    if dissent.majority is not None:
        many = len(dissent.holders[dissent.majority])
        return f"{dissent.stage} gives {digest}, and {many} of {len(dissent.ranks)} alike give {dissent.majority}"
    camps = "; ".join(f"{digest} on {_named(ranks, names)}" for digest, ranks in dissent.holders.items())
    if len(dissent.ranks) == 2:
        return (
            f"{dissent.stage} gives {camps}: one of the two is wrong, and which one only a third of their kind can tell"
        )
    return f"{dissent.stage} gives {camps}: no majority, so it is open who is wrong; more of their kind can tell"


def _named(ranks: Sequence[int], names: Mapping[int, str]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(names[rank] for rank in ranks[:_NAMED]) + more


_POLL_SECONDS = 0.1


def exchange(
    folder: Path,
    own: Fingerprint,
    *,
    index: int,
    count: int,
    name: str,
    wait_seconds: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Fingerprint], dict[int, str]]:
    """Leave this process's fingerprint, and return those of all and how each is called, by number.

    All ``count`` processes must call this, with the same folder, of this run alone.

    Args:
        folder: is made, if it is not there.
        own: what this process's device has computed.
        index: the number of this process, from 0 on.
        count: how many there are.
        name: how this process is called in messages.
        wait_seconds: the others may come so much later.
        now: seconds that only grow.
        sleep: waits for so many seconds.

    Raises: EnvironmentBroken if one of the others does not come: nobody can say then that all agree.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".{index}"
    mine.write_text(json.dumps({"name": name, "fingerprint": own.to_json()}), encoding="utf-8")
    paths = [folder / f"fingerprint-{number}.json" for number in range(count)]
    os.replace(mine, paths[index])  # whole or not at all
    until = now() + wait_seconds
    while missing := [number for number, path in enumerate(paths) if not path.exists()]:
        if now() >= until:
            raise EnvironmentBroken(
                f"{name}: no fingerprint to compare with came from worker {', '.join(map(str, missing))} within"
                f" {wait_seconds:g} s: see what became of it; without it nobody can say that all GPUs agree"
            )
        sleep(_POLL_SECONDS)
    told = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    prints = [Fingerprint.from_json(one["fingerprint"]) for one in told]
    return prints, {number: str(one["name"]) for number, one in enumerate(told)}
