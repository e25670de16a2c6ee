"""The bits that a device computes from fixed numbers: computed, exchanged and compared between equal GPUs.

They are the same on every GPU of a model, and each time. The numbers are drawn on the CPU, and the results are summed
up on the CPU too: a GPU that computes wrongly must not digest its own results.

The comparison is pure. :func:`exchange` is for local workers of a node that cannot communicate and know each other by
number only: each writes its fingerprint to a file in a folder and waits for all the others, so that all compare the
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

import torch
from torch.nn import functional

from pytest_gpucluster.benchmarks.dtypes import arithmetic, dtypes_of, require_switches
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.verify import Comparison
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import deterministic, numerics
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.metrics.time_budget import MEASURING, counted
from pytest_gpucluster.text import some_of

HEAD = 64
"""Width of a head of attention, for which every kernel is made."""

KEPT = 128
"""Rows and columns that a simulated device keeps."""

_ROWS_A_HEAD = 512

_MATRICES = 24
"""Maximum number of fp32 n x n matrices in memory, generously: operands, temporaries of a stage, results."""

_MIX = 0x9E3779B1 - 2**32
"""An odd number with well mixed bits. Source: 2**32 over (1 + sqrt(5)) / 2, as in ``verify``."""

Stage = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``stage(a, b)``: a computation with two n x n matrices of fp32, which it does not change."""


def _product(dtype: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kind = arithmetic(dtype)
    left, right = a.to(kind.operands), b.to(kind.operands)
    if kind.is_scaled:
        right = right.t().contiguous().t()  # the same matrix, column-major
    product = torch.empty(a.shape, dtype=kind.result, device=a.device)
    with numerics(kind.float32_precision):
        accelerator(a.device).product(scaled=kind.is_scaled)(left, right, product)
    return product


def _sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([(a * b).sum().view(1), a.sum(dim=0), b.sum(dim=1), a.square().mean(dim=1)])


def _softmax(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.softmax(a, dim=-1)


def _attention(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Causal attention in bf16 with heads of 64, as in training."""
    heads = max(1, len(a) // _ROWS_A_HEAD)
    query, key, value = (
        each[:, : heads * HEAD].to(torch.bfloat16).view(1, len(a), heads, HEAD).transpose(1, 2) for each in (a, b, a)
    )
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _functions(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The special function units, and a division."""
    return torch.exp(a).add_(torch.sin(b)).div_(torch.rsqrt(b.square().add_(1))).add_(torch.tanh(a))


def _integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The bits of both, multiplied and mixed modulo 2**32: exact, with no rounding."""
    mixed = a.view(torch.int32).mul(_MIX).bitwise_xor_(b.view(torch.int32))
    return mixed.bitwise_xor_(mixed.bitwise_right_shift(15)).mul_(_MIX)


def stages_of(device: torch.device) -> Mapping[str, Stage]:
    """Return the stages of a device: products in every dtype that it has, and the other operations of training."""
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
    """The results of one device.

    Attributes:
        kind: what must be the same on two devices for their bits to be the same.
        digests: stage -> its bits, summed up as 16 hexadecimal digits.
        repeats: how often each stage was computed.
        changed: stage -> how many of the repeats gave other bits than the first time; only those with any.
    """

    kind: str
    digests: Mapping[str, str]
    repeats: int
    changed: Mapping[str, int]

    @property
    def repeatable(self) -> float:
        """The part of the stages that gave the same bits every time."""
        return 1 - len(self.changed) / len(self.digests)

    def require_repeatable(self, where: str) -> None:
        """Raise where a repeat gave other bits.

        Raises: WrongResult with ``where``, the stages, and how often.
        """
        if self.changed:
            counts = ", ".join(f"{stage} in {count}" for stage, count in self.changed.items())
            raise WrongResult(
                f"{where}: the same computation gave other bits than the first time: {counts} of {self.repeats - 1}"
                " repeats. Take this device out of service and run the vendor's diagnostics"
            )


@releases_memory()
def take_fingerprint(device: torch.device, *, n: int, repeats: int) -> Fingerprint:
    """Compute each of :func:`stages_of` the device ``repeats`` times, and return the digests.

    Args:
        device: where to compute.
        n: rows and columns of the matrices, a multiple of 64. On a GPU large enough to load every multiprocessor.
        repeats: at least 1. Each but the first is compared with the first, bit by bit, on the device.

    Raises:
        EnvironmentBroken: too little memory is free, or the environment keeps cuBLAS or torch from reproducible
            results.

    Source: cuBLAS gives the same bits on GPUs with the same architecture and number of multiprocessors:
    https://docs.nvidia.com/cuda/cublas/#results-reproducibility.
    """
    require_switches(device, arithmetic("fp32"))
    instead = "choose smaller matrices, such as --gpucluster-workload determinism.n=1024"
    require_free(device, _MATRICES * 4 * n * n, f"the fingerprint of n={n}", instead=instead)
    n, drawn = accelerator(device).kept(n, KEPT), torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, n, generator=drawn).to(device) for _ in range(2))
    digests, changed = {}, {}
    with counted(MEASURING), deterministic(), torch.no_grad():
        for name, stage in stages_of(device).items():
            first = stage(a, b).contiguous()
            digests[name] = f"{fingerprint([first.cpu()]):016x}"
            comparison = Comparison(first)
            differ = [comparison.differ(stage(a, b).contiguous(), first) for _ in range(repeats - 1)]
            if any(differ):
                changed[name] = sum(map(bool, differ))
    return Fingerprint(kind=accelerator(device).kind, digests=digests, repeats=repeats, changed=changed)


_LISTED = 8
"""Maximum number of ranks named in a message."""


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A stage in which the GPUs of one kind disagree.

    Attributes:
        stage: its name.
        holders: digest -> the ranks that gave it, the most frequent first.
    """

    stage: str
    holders: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the kind."""
        return tuple(sorted(rank for ranks in self.holders.values() for rank in ranks))

    @property
    def majority(self) -> str | None:
        """The digest that more than half of them gave, or None: then the wrong ranks are unknown."""
        digest, ranks = next(iter(self.holders.items()))
        return digest if 2 * len(ranks) > len(self.ranks) else None

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks that are not in the majority; all of them, where there is none."""
        return tuple(rank for rank in self.ranks if rank not in self.holders.get(self.majority or "", ()))


class FingerprintAgreement:
    """The comparison of several GPUs' fingerprints.

    Args:
        fingerprints: of each rank, in the order of ranks.
    """

    def __init__(self, fingerprints: Sequence[Fingerprint]) -> None:
        self._fingerprints = tuple(fingerprints)
        of_kind: dict[str, list[int]] = {}
        for rank, one in enumerate(self._fingerprints):
            of_kind.setdefault(one.kind, []).append(rank)
        self._of_kind = of_kind
        self.disagreements = tuple(
            disagreement
            for ranks in of_kind.values()
            for stage in self._stages(ranks)
            if (disagreement := self._disagreement(stage, ranks))
        )

    def _stages(self, ranks: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(stage for rank in ranks for stage in self._fingerprints[rank].digests))

    def _disagreement(self, stage: str, ranks: Sequence[int]) -> Disagreement | None:
        # A stage that a rank has not computed is a disagreement.
        digests = {rank: self._fingerprints[rank].digests.get(stage, "nothing") for rank in ranks}
        counted = Counter(digests.values()).most_common()
        if len(counted) == 1:
            return None
        return Disagreement(
            stage=stage,
            holders={digest: tuple(rank for rank in ranks if digests[rank] == digest) for digest, _ in counted},
        )

    def agreement_ratio(self, rank: int) -> float:
        """Return the part of the stages in which this rank gave the bits of the majority of its kind.

        Raises: EnvironmentBroken if there is no other GPU of its kind: nothing was compared.
        """
        kind = self._fingerprints[rank].kind
        ranks = self._of_kind[kind]
        if len(ranks) < 2:
            others = ", ".join(sorted(other for other in self._of_kind if other != kind))
            raise EnvironmentBroken(
                f"rank {rank} has no rank to compare its bits with: it alone has {kind}, the others have {others}. Use"
                " the same GPU model and software version on all, or at least two GPUs of each kind"
            )
        stages = self._stages(ranks)
        alone = sum(rank in disagreement.suspects for disagreement in self.disagreements)
        return 1 - alone / len(stages)

    def require(self, rank: int, names: Mapping[int, str]) -> None:
        """Raise where this rank's GPU computes other bits than the majority of its kind, or where there is none.

        Args:
            rank: this one.
            names: the name of each rank in the message.

        Raises: WrongResult with the stages and the ranks of each digest.
        """
        mine = [disagreement for disagreement in self.disagreements if rank in disagreement.suspects]
        if not mine:
            return
        text = "; ".join(_description(disagreement, rank, names) for disagreement in mine)
        raise WrongResult(f"{names[rank]}: the same computation gives other bits here: {text}")


def _description(disagreement: Disagreement, rank: int, names: Mapping[int, str]) -> str:
    digest = next(digest for digest, ranks in disagreement.holders.items() if rank in ranks)
    if disagreement.majority is not None:
        many = len(disagreement.holders[disagreement.majority])
        return (
            f"{disagreement.stage} gives {digest}, and {many} of {len(disagreement.ranks)} of this kind give "
            f"{disagreement.majority}"
        )
    holders = {digest: [names[rank] for rank in ranks] for digest, ranks in disagreement.holders.items()}
    groups = "; ".join(f"{digest} on {some_of(its, _LISTED)}" for digest, its in holders.items())
    if len(disagreement.ranks) == 2:
        return (
            f"{disagreement.stage} gives {groups}: one of the two is wrong; a third GPU of their kind would show which"
        )
    return f"{disagreement.stage} gives {groups}: no majority, so the wrong ones are unknown; run more of their kind"


_POLL_SECONDS = 0.1


def exchange(
    folder: Path, own: Fingerprint, *, index: int, count: int, name: str, wait_seconds: float
) -> tuple[list[Fingerprint], dict[int, str]]:
    """Write this process's fingerprint, and return those of all and each one's name, by number.

    All ``count`` processes must call this, with the same folder, of this run alone.

    Args:
        folder: is created, if it does not exist.
        own: this process's fingerprint.
        index: the number of this process, from 0 on.
        count: number of processes.
        name: of this process in messages.
        wait_seconds: how long to wait for the others.

    Raises: EnvironmentBroken if a fingerprint is missing: then the agreement is unknown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".{index}"
    mine.write_text(json.dumps({"name": name, "fingerprint": codec.to_json(own)}), encoding="utf-8")
    paths = [folder / f"fingerprint-{number}.json" for number in range(count)]
    os.replace(mine, paths[index])  # whole or not at all
    until = time.monotonic() + wait_seconds
    while missing := [number for number, path in enumerate(paths) if not path.exists()]:
        if time.monotonic() >= until:
            raise EnvironmentBroken(
                f"{name}: no fingerprint to compare with came from worker {', '.join(map(str, missing))} within"
                f" {wait_seconds:g} s: look for its error; without it the agreement of the GPUs is unknown"
            )
        time.sleep(_POLL_SECONDS)
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    fingerprints = [codec.read(Fingerprint, one["fingerprint"], str(folder)) for one in contents]
    return fingerprints, {number: str(one["name"]) for number, one in enumerate(contents)}
