"""Whether the ranks that came are the ranks that were declared, reported before anything can hang.

Declared is what ``--gpucluster-expect`` says; without it, what the scheduler allocated; without that, only what was
launched. Everything here is pure: it compares what the ranks reported of themselves (``node.inventory.identify``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.text import plural, printable, rank_ranges, some_of

Who = Mapping[str, Any]
COMPARED_VERSIONS = ("python", "torch", "cuda", "nccl", "driver", "pytest_gpucluster")
_FORM = "NODESxGPUS or NODESxGPUSxSKU, GPUS counted per node, such as 2x8 or 2x8xH100; one node is 1x8xH100"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The declared shape of the cluster: one rank for each of its GPUs."""

    nodes: int
    gpus_per_node: int
    sku: str | None = None

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Read ``2x8xH100`` (nodes x GPUs of each node x SKU) or ``2x8``.

        Raises:
            OptionError: anything else.
        """
        parts = [part.strip() for part in re.split("[xX]", text.strip(), maxsplit=2)]
        if len(parts) < 2 or not all(re.fullmatch(r"[1-9]\d{0,5}", part, re.ASCII) for part in parts[:2]):
            raise OptionError(f"{text!r} is no shape of a cluster; allowed: {_FORM}")
        sku = parts[2] if len(parts) == 3 else None
        if sku is not None and not _words(sku):
            raise OptionError(f"{text!r} names no SKU after its second x; allowed: {_FORM}")
        return cls(nodes=int(parts[0]), gpus_per_node=int(parts[1]), sku=sku)

    @property
    def world_size(self) -> int:
        """Ranks, one for each GPU."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return "x".join(str(part) for part in (self.nodes, self.gpus_per_node, self.sku) if part is not None)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why the run cannot start: a text whose first line says it all, and with which exit code it ends."""

    text: str
    exit: int = 11


def problems(
    who: Mapping[int, Who],
    facts: RankFacts,
    *,
    expectation: Expectation | None,
    device: Literal["cuda", "cpu"],
    sku_of: Callable[[str], str | None] = lambda gpu_name: None,
) -> list[Problem]:
    """Compare the ranks that reported with each other and with what was declared.

    Args:
        who: rank -> what it reported of itself; ranks that never did are not in it.
        facts: rank 0's facts. Only what is common to all ranks is read.
        expectation: of ``--gpucluster-expect``. It overrides the scheduler's allocation.
        device: in a rehearsal on cpu nothing is asked of GPUs; the declared GPUs are counted as ranks.
        sku_of: NVML name -> SKU of the limits file, so that an expected SKU may also be named as there.

    Returns:
        Every problem, the most helpful first; empty where the run may start.
    """
    found = [*_missing(who, facts), *_misplaced(who), *_shape(who, facts, expectation)]
    # A shortage of ranks is reported once, not again for each of its nodes.
    complete = not found
    if device == "cuda":
        found += _shared_gpus(who)
        found += _unknown_gpus(who)
        if complete:
            found += _hosts_of_nodes(who, facts, expectation)
        found += _gpus_of_nodes(who, facts, expectation, complete=complete)
        found += _skus(who, expectation, sku_of)
    found += _versions(who)
    found += _inputs(who)
    return found


def sku_matches(expected: str, gpu_name: str, sku: str | None = None) -> bool:
    """Return whether a GPU is of the expected SKU: every word of it is in the GPU's name or in the limits' SKU.

    ``H100`` and ``H100-80GB`` match ``NVIDIA H100 80GB HBM3``; ``H200`` does not match ``NVIDIA GH200``. A
    slice of a GPU (MIG) matches only where MIG was asked for.
    """
    wanted, name = _words(expected), _words(gpu_name)
    if ("MIG" in name) != ("MIG" in wanted):
        return False
    return bool(wanted) and wanted <= name | _words(sku or "")


def _missing(who: Mapping[int, Who], facts: RankFacts) -> Iterator[Problem]:
    missing = [rank for rank in range(facts.world_size) if rank not in who]
    if not missing:
        return
    lines = list(_missing_by_node(missing, who, facts))
    head = lines[0] if len(lines) == 1 else f"{rank_ranges(missing)} never reported: {len(lines)} nodes"
    yield _problem(
        f"{head} ({len(who)} of {facts.world_size} ranks did)",
        f"look at the launcher's output for these ranks; every node must reach {facts.master_addr}:"
        f"{facts.master_port} and start the same command",
        *(lines if len(lines) > 1 else []),
    )


def _missing_by_node(missing: list[int], who: Mapping[int, Who], facts: RankFacts) -> Iterator[str]:
    per_node, rest = divmod(facts.world_size, facts.nnodes)
    numbered = rest == 0 and all(they["node_rank"] == rank // per_node for rank, they in who.items())
    if not numbered:
        # Uneven nodes, or ranks dealt out in another order: it is unknown where a silent rank is.
        yield f"{rank_ranges(missing)} never reported"
        return
    for node, ranks in grouped((rank // per_node, rank) for rank in missing).items():
        siblings = [who[rank] for rank in range(node * per_node, (node + 1) * per_node) if rank in who]
        if siblings:
            yield f"{rank_ranges(ranks)} on {_host(siblings[0])} (node_rank {node}) never reported"
        else:
            yield f"node_rank {node} ({rank_ranges(ranks)}) never reported"


def _misplaced(who: Mapping[int, Who]) -> Iterator[Problem]:
    """Ranks that are not where the launcher's variables say."""
    places = by_value({rank: (they["node_rank"], they["local_rank"]) for rank, they in who.items()})
    for ranks in places.values():
        if len(ranks) > 1:
            yield _problem(
                f"{rank_ranges(ranks)} are one place (node_rank and local_rank) on {_host(who[ranks[0]])}",
                "each rank is a process of its own: see how the launcher sets its variables",
            )
    for node, members in by_value({rank: they["node_rank"] for rank, they in who.items()}).items():
        names = by_value({rank: _host(who[rank]) for rank in members})
        if len(names) > 1:
            yield _problem(
                f"node_rank {node} is {len(names)} hosts: {', '.join(names)}",
                "number the ranks node after node (mpirun --rank-by slot --map-by ppr:GPUS:node), or use torchrun",
                *(f"{host}: {rank_ranges(ranks)}" for host, ranks in names.items()),
            )


def _shape(who: Mapping[int, Who], facts: RankFacts, expectation: Expectation | None) -> Iterator[Problem]:
    launched = f"{plural(facts.nnodes, 'node')} with {plural(facts.world_size, 'rank')} in all"
    if expectation is None:
        declared = facts.scheduler.nnodes
        if declared is not None and facts.nnodes < declared:
            yield _problem(
                f"{launched} were launched, but {facts.scheduler.name} allocated {plural(declared, 'node')}",
                f"start on all of them (`srun --ntasks-per-node=1 torchrun --nnodes={declared} ...`), or"
                " declare the part that is meant:"
                f" --gpucluster-expect={facts.nnodes}x{facts.local_world_size}",
            )
        return
    if (facts.nnodes, facts.world_size) != (expectation.nodes, expectation.world_size):
        yield _problem(
            f"{launched} were launched, but --gpucluster-expect={expectation} is"
            f" {plural(expectation.nodes, 'node')} with {plural(expectation.gpus_per_node, 'GPU')} each, one"
            " rank to a GPU",
            f"torchrun --nnodes={expectation.nodes} --nproc-per-node={expectation.gpus_per_node} ..., or"
            " declare what is meant",
        )


def _shared_gpus(who: Mapping[int, Who]) -> Iterator[Problem]:
    for uuid, ranks in by_value({rank: they["gpu"]["uuid"] for rank, they in who.items() if they["gpu"]}).items():
        if len(ranks) > 1:
            yield _problem(
                f"{rank_ranges(ranks)} are on one GPU: {uuid} of {_host(who[ranks[0]])}",
                "one rank to a GPU: start as many ranks as the node has GPUs, and see CUDA_VISIBLE_DEVICES"
                " and the scheduler's GPU binding",
                *(f"rank {rank}: {_host(who[rank])} cuda:{who[rank]['cuda_index']}" for rank in ranks),
            )


def _unknown_gpus(who: Mapping[int, Who]) -> Iterator[Problem]:
    """What NVML could not answer was not compared, and what was not compared is not accepted."""
    without = [rank for rank, they in sorted(who.items()) if not they["gpu"]]
    if without:
        yield _problem(
            f"{rank_ranges(without)} reported no GPU ({_host(who[without[0]])})",
            "see nvidia-smi on that host; all ranks must run with the same --gpucluster-device",
        )
    reasons = by_value({rank: printable(they["nvml"]) for rank, they in who.items() if they["nvml"]})
    for reason, ranks in reasons.items():
        yield _problem(
            f"{rank_ranges(ranks)} ({_host(who[ranks[0]])}): {reason}",
            "in a container allow NVIDIA_DRIVER_CAPABILITIES=compute,utility; see nvidia-smi on that host",
            "driver versions and the number of GPUs of the node cannot be compared",
        )


def gpus_without_a_rank(who: Mapping[int, Who], facts: RankFacts, expectation: Expectation | None) -> str:
    """Return which nodes show a process more GPUs than they have ranks, and what to do; nothing where all is covered.

    Fewer may be declared: by an expectation, by the scheduler's allocation, or by CUDA_VISIBLE_DEVICES.

    Args:
        who: rank -> what it reported of itself.
        facts: rank 0's facts. Only what is common to all ranks is read.
        expectation: what was declared.
    """
    if expectation is not None or facts.scheduler.gpus_per_node is not None:
        return ""
    nodes = grouped(((_host(they), they["node_rank"]), they) for they in who.values())
    bare = []
    for (name, _), ranks in sorted(nodes.items()):
        visible = max(0 if they["chosen"] else they["visible_gpus"] for they in ranks)
        if visible > len(ranks):
            bare.append((name, len(ranks), visible))
    if not bare:
        return ""
    name, count, visible = bare[0]
    more = f", and {plural(len(bare) - 1, 'more node')}" if len(bare) > 1 else ""
    return (
        f"{name} shows {plural(visible, 'GPU')} and has {plural(count, 'rank')}{more}: start a rank for each GPU, or "
        f"declare what is to be accepted, as by --gpucluster-expect {facts.nnodes}x{count}"
    )


def _hosts_of_nodes(who: Mapping[int, Who], facts: RankFacts, expectation: Expectation | None) -> Iterator[Problem]:
    """Two launchers on one host are no two nodes, except in a rehearsal."""
    declared = expectation.nodes if expectation else facts.scheduler.nnodes
    hosts = sorted({_host(they) for they in who.values()})
    if declared is not None and len(hosts) < declared:
        yield _problem(
            f"{plural(facts.nnodes, 'node')} were launched on only {plural(len(hosts), 'host')}: {', '.join(hosts)}",
            "start one launcher on each host, or declare what is meant with --gpucluster-expect",
        )


def _gpus_of_nodes(
    who: Mapping[int, Who], facts: RankFacts, expectation: Expectation | None, *, complete: bool
) -> Iterator[Problem]:
    if expectation is not None:
        declared, by = expectation.gpus_per_node, f"--gpucluster-expect={expectation} says"
    elif facts.scheduler.gpus_per_node is not None:
        declared, by = facts.scheduler.gpus_per_node, f"{facts.scheduler.name} allocated"
    else:
        return
    for node, ranks in by_value({rank: they["node_rank"] for rank, they in who.items()}).items():
        used = {they["gpu"]["uuid"] for they in map(who.__getitem__, ranks) if they["gpu"]}
        counted = max(who[rank]["node_gpus"] or 0 for rank in ranks)
        if not complete and counted <= 1:
            # Each rank is shown its own GPU alone: the GPUs of silent ranks look the same as missing ones.
            continue
        present = max(len(used), counted)
        place = f"{_host(who[ranks[0]])} (node_rank {node})"
        if present < declared:
            yield _problem(
                f"{place} has {plural(present, 'GPU')}, but {by} {declared}",
                "see `nvidia-smi -L` and the kernel log of that host: a GPU may have fallen off the bus",
                *(_gpu(who[rank]) for rank in ranks),
            )
        elif len(used) < declared and complete:
            yield _problem(
                f"only {len(used)} of the {declared} GPUs of {place} have a rank, but {by} {declared}",
                f"start a rank on each GPU (--nproc-per-node={declared}), or declare the part that is meant:"
                f" --gpucluster-expect={facts.nnodes}x{len(used)}",
                *(_gpu(who[rank]) for rank in ranks),
            )


def _skus(
    who: Mapping[int, Who], expectation: Expectation | None, sku_of: Callable[[str], str | None]
) -> Iterator[Problem]:
    names = by_value({rank: they["gpu"]["name"] for rank, they in who.items() if they["gpu"]})
    wanted = expectation.sku if expectation else None
    if wanted is not None:
        for name, ranks in names.items():
            if not sku_matches(wanted, name, sku_of(name)):
                yield _problem(
                    f"{rank_ranges(ranks)} ({_host(who[ranks[0]])}): the GPU is {printable(name)!r}, but"
                    f" --gpucluster-expect={expectation} says {wanted}",
                    "exclude the node, or declare the SKU that is meant",
                )
    if len(names) > 1:
        yield _deviation("GPU", names, who, "one set of limits cannot judge different GPUs: test each kind alone")


def _versions(who: Mapping[int, Who]) -> Iterator[Problem]:
    for component in COMPARED_VERSIONS:
        values = by_value({rank: str(they["versions"].get(component)) for rank, they in who.items()})
        if len(values) > 1:
            remedy = "give every node the same driver, image and environment, then start again"
            yield _deviation(component, values, who, remedy)


def _inputs(who: Mapping[int, Who]) -> Iterator[Problem]:
    """Compare the inputs of training between the ranks, and report what is not there. A rank's ``inputs`` are
    ``values`` (option -> value) and ``problems``."""
    inputs = {rank: they["inputs"]["values"] for rank, they in sorted(who.items())}
    for option in dict.fromkeys(option for options in inputs.values() for option in options):
        values = by_value({rank: options.get(option, "not given") for rank, options in inputs.items()})
        if len(values) > 1:
            yield _deviation(option, values, who, "start every rank with the same options, environment and ini file")
    wrong = ((printable(text), rank) for rank, they in sorted(who.items()) for text in they["inputs"]["problems"])
    for text, ranks in grouped(wrong).items():
        everywhere = len(ranks) == len(who)
        yield Problem(
            text=f"{text} ({rank_ranges(ranks)} on {_hosts(ranks, who)})\nwhat to do: "
            + (
                "correct the option, or leave it out"
                if everywhere
                else "mount it on each of these nodes, at the same place"
            ),
            exit=4 if everywhere else 11,
        )


def by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Return value -> its ranks, from rank -> value. Ranks come in ascending order."""
    return grouped((value, rank) for rank, value in sorted(values.items()))


def _deviation(what: str, values: Mapping[str, list[int]], who: Mapping[int, Who], remedy: str) -> Problem:
    """Name the few against the many. Among equally many, the lowest rank's value counts as the usual one."""
    usual = max(values, key=lambda value: (len(values[value]), -values[value][0]))
    deviants = {value: ranks for value, ranks in values.items() if value != usual}
    others = "; ".join(
        f"{printable(value)!r} on {rank_ranges(ranks)} ({_hosts(ranks, who)})" for value, ranks in deviants.items()
    )
    return _problem(
        f"{what} differs between ranks: {others}; the other {plural(len(values[usual]), 'rank')}"
        f" {'has' if len(values[usual]) == 1 else 'have'} {printable(usual)!r}",
        remedy,
    )


def _problem(message: str, remedy: str, *details: str) -> Problem:
    return Problem(text="\n".join([message, *details, f"what to do: {remedy}"]))


def _hosts(ranks: list[int], who: Mapping[int, Who]) -> str:
    return some_of(list(dict.fromkeys(_host(who[rank]) for rank in ranks)))


def _gpu(they: Who) -> str:
    gpu = they["gpu"] or dict.fromkeys(("index", "uuid", "name"))
    return f"rank {they['rank']}: GPU {gpu['index']} {gpu['uuid']} {printable(str(gpu['name']))}"


def _host(they: Who) -> str:
    return printable(they["host"])


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Z0-9.]+", text.upper()))
