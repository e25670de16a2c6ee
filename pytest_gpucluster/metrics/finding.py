"""Findings: one problem of a GPU or host each, with what was found, what is allowed and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pytest_gpucluster.errors import EnvironmentBroken, GpuClusterError, HardwareFault

Kind = Literal["hardware", "environment", "note"]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """All names of a GPU, so that an operator finds it in any tool. What is unknown is None.

    ``index`` is NVML's, as nvidia-smi shows it; ``pci`` is written as NVML does.
    """

    host: str
    index: int | None = None
    uuid: str | None = None
    serial: str | None = None
    pci: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        if self.index is None and not (self.uuid or self.serial or self.pci):
            return self.host  # the whole host, or a rehearsal on cpu
        index = "GPU" if self.index is None else f"GPU {self.index}"
        names = f"{self.uuid or 'UUID unknown'}, serial {self.serial or 'unknown'}, PCI {self.pci or 'unknown'}"
        return f"{index} ({names}) on {self.host}"


def identity(who: Mapping[str, Any]) -> Identity:
    """Return the names of a rank's GPU, from the facts that the rank has reported (``inventory.identify``)."""
    gpu = who["gpu"] or {}
    return Identity(
        host=str(who["host"]),
        index=gpu.get("index"),
        uuid=gpu.get("uuid"),
        serial=gpu.get("serial"),
        pci=gpu.get("pci_bus_id"),
        rank=who.get("rank"),
    )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A result of a check.

    ``hardware``: the node as delivered is rejected. ``environment``: it cannot be judged, or is disturbed.
    ``note``: worth knowing, decides nothing.
    """

    code: str
    kind: Kind
    gpu: Identity
    found: str
    allowed: str
    remedy: str
    ranks: tuple[int, ...] = ()
    """Of those that have it, where it is of several ranks."""

    @property
    def all_ranks(self) -> Sequence[int]:
        """Return the ranks that have it; none where it is about a whole host."""
        return self.ranks or ([] if self.gpu.rank is None else [self.gpu.rank])

    def __str__(self) -> str:
        return (
            f"{self.gpu}: {self.code} ({self.kind}): {self.found}; allowed: {self.allowed}; what to do: {self.remedy}"
        )


def finding(kind: Kind, code: str, gpu: Identity | str, found: str, *, allowed: str, remedy: str) -> Finding:
    """Return a finding about a GPU, or about a host by its name."""
    who = Identity(host=gpu) if isinstance(gpu, str) else gpu
    return Finding(code=code, kind=kind, gpu=who, found=found, allowed=allowed, remedy=remedy)


hardware = partial(finding, "hardware")
"""Return a finding of the kind "hardware"."""
environment = partial(finding, "environment")
"""Return a finding of the kind "environment"."""


def note(code: str, gpu: Identity | str, found: str, *, allowed: str = "anything", remedy: str = "nothing") -> Finding:
    """Return a finding of the kind "note"."""
    return finding("note", code, gpu, found, allowed=allowed, remedy=remedy)


def decisive(findings: Iterable[Finding]) -> list[Finding]:
    """Return what is more than a note."""
    return [one for one in findings if one.kind != "note"]


_WRITTEN = re.compile(r"^(?:E +)?- .+: \w+ \((?:hardware|environment)\): ", re.MULTILINE)


def has_findings(text: str) -> bool:
    """Return whether the text of a failure has findings, so that its culprits each have a cause of their own."""
    return _WRITTEN.search(text) is not None


def error_of(findings: Collection[Finding], *, when: str = "", notes: Iterable[Finding] = ()) -> GpuClusterError:
    """Return the error of findings: HardwareFault where one is of the kind "hardware", else EnvironmentBroken.

    It is about the ranks of their GPUs, and the hosts of those that are about no rank's GPU. Its first line has of a
    single host also what was found there.
    """
    codes = ", ".join(dict.fromkeys(one.code for one in findings))
    places = ", ".join(dict.fromkeys(str(one.gpu) for one in findings))
    first = next(iter(findings))
    found = f": {first.found}" if places == first.gpu.host else ""
    text = "\n".join([f"{codes}{when}: {places}{found}", *(f"- {one}" for one in (*findings, *notes))])
    kind = HardwareFault if any(one.kind == "hardware" for one in findings) else EnvironmentBroken
    ranks = sorted({rank for one in findings for rank in one.all_ranks})
    return kind(text, ranks=ranks, hosts=dict.fromkeys(one.gpu.host for one in findings if not one.all_ranks))


def require_nothing(findings: Iterable[Finding]) -> None:
    """Check that there are no findings but notes; notes are printed.

    Raises:
        HardwareFault: a finding is of the kind "hardware".
        EnvironmentBroken: none is, and one is of the kind "environment".
    """
    found = list(findings)
    wrong = decisive(found)
    notes = [one for one in found if one.kind == "note"]
    if wrong:
        raise error_of(wrong, notes=notes)
    for note in notes:
        print(note)
