"""The acceptance certificate of a run: its content, the cluster's parts by node and slot, its sealed file, and whether
it is valid: unchanged since it was sealed, and derived from the journal that it names.

The content is a pure function of a journal, so that it can be derived again and compared. The file is sealed by the
SHA-256 over its canonical form, and read strictly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis.certificate_blockers import blockers
from pytest_gpucluster.analysis.output import fields_of
from pytest_gpucluster.errors import CertificateError, JournalError, LaunchError
from pytest_gpucluster.journal.journal import Journal, read
from pytest_gpucluster.journal.records import RankPlace, TestResult
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.metrics.codec import AnyText, to_json
from pytest_gpucluster.text import rank_ranges, some_of

GPU_FIELDS = {
    "uuid": "UUID",
    "serial": "serial number",
    "board_part_number": "board part number",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP firmware",
    "pci_bus_id": "PCI address",
    "name": "name",
}
"""Key of a GPU -> its name in messages."""

ADAPTER_FIELDS = {"guid": "GUID", "board": "board (PSID)", "firmware": "firmware", "pci_bus_id": "PCI address"}
"""Key of a network adapter -> its name in messages."""

COMPONENTS = ("driver", "cuda", "nccl", "torch", "python", "pytest_gpucluster")
"""Software of a node."""

_PORTS = "fabric.active_ports"
"""The measurement whose telemetry lists a node's network adapters."""


def node_parts(journal: Journal) -> list[dict[str, Any]]:
    """Return each node with its GPUs, network adapters and versions, all as text; "" is unknown.

    Of several versions on a node all are listed, though the preflight rejects ranks that differ. ``adapters`` is None
    where no rank of the node has reported any, and an empty list where there are none.
    """
    by_node: dict[tuple[int, str], list[RankPlace]] = {}
    for place in journal.ranks:
        by_node.setdefault((place.node_rank, place.host), []).append(place)
    adapters: dict[int, list[dict[str, str]]] = {}
    for rank, values in (
        each
        for result in journal.results
        for judged in result.measurements
        if judged.metric == _PORTS
        for each in judged.telemetry.items()
    ):
        listed = values.get("adapters")
        if isinstance(listed, list) and all(isinstance(one, Mapping) for one in listed):
            adapters[rank] = [{key: str(one.get(key, "")) for key in ("name", *ADAPTER_FIELDS)} for one in listed]
    return [
        {
            "node_rank": node_rank,
            "host": host,
            "versions": {
                component: " / ".join(sorted({place.versions.get(component, "") for place in places} - {""}))
                for component in COMPONENTS
            },
            "gpus": [
                {
                    "rank": place.rank,
                    "local_rank": place.local_rank,
                    **{key: (place.gpu or {}).get(key, "") for key in ("index", "memory_bytes", *GPU_FIELDS)},
                }
                for place in sorted(places, key=lambda place: place.local_rank)
            ],
            "adapters": next((adapters[place.rank] for place in places if place.rank in adapters), None),
        }
        for (node_rank, host), places in sorted(by_node.items())
    ]


def missing_parts(nodes: list[dict[str, Any]]) -> list[str]:
    """Return the unknown properties of the parts of these nodes, one text each."""
    of_gpus: dict[str, list[int]] = {}
    of_nodes: dict[str, list[str]] = {}
    for node in nodes:
        for key, words in GPU_FIELDS.items():
            of_gpus.setdefault(words, []).extend(gpu["rank"] for gpu in node["gpus"] if not gpu[key])
        missing = [component for component in COMPONENTS if not node["versions"][component]]
        missing += ["network adapters"] if node["adapters"] is None else []
        for adapter in node["adapters"] or ():
            name = adapter["name"] or "a network adapter"
            missing += [f"{words} of {name}" for key, words in ADAPTER_FIELDS.items() if not adapter[key]]
        for what in missing:
            of_nodes.setdefault(what, []).append(node["host"])
    lines = [f"{words} of the GPU of {rank_ranges(ranks)}" for words, ranks in of_gpus.items() if ranks]
    for what, hosts in of_nodes.items():
        try:
            lines.append(f"{what} on {compress_hostlist(hosts)}")
        except LaunchError:  # a name does not fit a host list
            lines.append(f"{what} on {', '.join(hosts)}")
    return lines


FORMAT = "pytest-gpucluster acceptance record"
SCHEMA_VERSION = 1
DIGEST = "SHA-256 over the JSON of 'record' in ASCII: keys sorted, no white space, as Python's json writes it"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a certificate: the keys of each part are those of ``GPU_FIELDS`` and ``ADAPTER_FIELDS``."""

    host: str
    node_rank: int
    versions: Mapping[str, AnyText]
    gpus: tuple[Mapping[str, AnyText], ...]
    adapters: tuple[Mapping[str, AnyText], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Value:
    metric: str
    status: str


@dataclass(frozen=True, kw_only=True)
class _Test:
    nodeid: str
    outcome: str
    measurements: tuple[_Value, ...]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a certificate states, as read strictly from its file: :func:`certificate_content` and ``made``."""

    accepted: bool
    not_accepted_because: tuple[str, ...]
    verdict: Mapping[str, Any]
    run: Mapping[str, Any]
    journal: Mapping[str, Any]
    limits: Mapping[str, Any]
    nodes: tuple[Node, ...]
    missing: tuple[str, ...]
    tests: tuple[_Test, ...]
    made: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate as read from its file. It is unchanged only if :attr:`is_intact`."""

    path: Path
    content: Content
    record: Mapping[str, Any] = field(repr=False)
    """The sealed content as it stands in the file."""
    sealed: str
    """The digest in the file."""
    digest: str
    """The digest of its content now."""

    @property
    def is_intact(self) -> bool:
        """Return whether the content is unchanged since it was sealed."""
        return self.sealed == self.digest

    @property
    def is_accepted(self) -> bool:
        """Return whether its run was accepted, by all of the fields that state it."""
        content = self.content
        return (
            content.accepted
            and not content.not_accepted_because
            and (content.verdict.get("word"), content.verdict.get("exit")) == ("ACCEPTED", 0)
            and content.run.get("kind") == ""
            and content.run.get("selection") is False
        )


def canonical(value: object) -> bytes:
    """Return the canonical form of a value of JSON types.

    >>> canonical({"b": 1e21, "a": [0.1, None, "€"]})
    b'{"a":[0.1,null,"\\\\u20ac"],"b":1e+21}'

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(record: Mapping[str, Any]) -> str:
    """Return the digest that seals a certificate's content, as hexadecimal text.

    Raises:
        ValueError: a number is not finite.
    """
    return hashlib.sha256(canonical(record)).hexdigest()


def seal(content: Mapping[str, Any], *, at: str, by: str, note: str, version: str) -> tuple[str, str]:
    """Return the text of a certificate's file, and its digest.

    Args:
        content: from :func:`certificate_content`.
        at: time of creation, ISO 8601.
        by: name of the person who accepts.
        note: free text.
        version: of this package.
    """
    made = {"at": at, "by": by, "note": note, "version": version}
    record = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **content, "made": made}
    sha256 = digest(record)
    # Indented, for people: the digest is over the canonical form, so white space does not count.
    document = {"sha256": sha256, "digest": DIGEST, "record": record}
    return json.dumps(document, indent=1, allow_nan=False) + "\n", sha256


def read_certificate(path: Path) -> Certificate:
    """Read a certificate, also one that is not intact.

    Raises:
        CertificateError: missing, no certificate, of a newer version, or damaged.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object, parse_constant=_reject)
    except OSError as error:
        raise CertificateError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also no UTF-8
        raise CertificateError(f"{path}: no certificate, or cut off: {error}") from None
    record = document.get("record") if isinstance(document, dict) else None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CertificateError(f"{path}: not a certificate of this project")
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= SCHEMA_VERSION:
        raise CertificateError(
            f"{path}: its schema_version is {version!r}; this version reads up to {SCHEMA_VERSION}: read it with the "
            "version that wrote it, or a newer one"
        )
    unknown = sorted(set(document) - {"sha256", "digest", "record"})
    if unknown:
        raise CertificateError(f"{path}: damaged: {', '.join(map(repr, unknown))} is outside of the sealed content")
    if document.get("digest") != DIGEST or not isinstance(document.get("sha256"), str):
        raise CertificateError(f"{path}: damaged: it must have sha256, and digest: {DIGEST!r}")
    try:
        content = codec.read(Content, record, f"{path}: damaged")
        found = digest(record)
    except JournalError as error:
        raise CertificateError(str(error)) from None
    except ValueError as error:
        raise CertificateError(f"{path}: damaged: {error}") from None
    return Certificate(path=path, content=content, record=record, sealed=document["sha256"], digest=found)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # Which of the two counts would depend on the reader.
        duplicate = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"the key {duplicate!r} occurs twice in one object")
    return found


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def certificate_content(journal: Journal, *, sha256: str) -> dict[str, Any]:
    """Return the content of a certificate, without its author and time of creation.

    Args:
        journal: of the run, read with its samples and so with the telemetry that lists the network adapters.
        sha256: of the journal's file.
    """
    reasons, nodes = blockers(journal), node_parts(journal)
    run = journal.run
    made: dict[str, Any] = to_json(
        {
            "accepted": not reasons,
            "not_accepted_because": list(reasons),
            "verdict": {"word": journal.verdict, "exit": journal.exit, "reason": journal.reason},
            "run": {
                **fields_of(run, "run_id", "started_at", "launcher", "world_size", "nnodes", "plugin_version"),
                **fields_of(run, "kind", "selection"),
                "ended_at": journal.end.at if journal.end is not None else "",
                "host": run.hostname,
                "profile": journal.profile,
                "expected": run.option("expect"),
                "merged_from": [
                    fields_of(one, "run_id", "started_at", "verdict", "journal", "sha256") for one in run.merged_from
                ],
            },
            "journal": {"sha256": sha256},
            "limits": {
                "sku": journal.sku,
                "gpu_name": journal.gpu_name,
                "files": journal.limit_files,
            },
            "nodes": nodes,
            "missing": missing_parts(nodes),
            "tests": [
                {
                    **fields_of(result, "nodeid", "criterion", "outcome", "attempts", "message"),
                    "measurements": [_measurement(judged, journal) for judged in result.measurements],
                }
                for result in journal.results
            ],
        }
    )
    return made


def _measurement(judged: JudgedMetric, journal: Journal) -> dict[str, Any]:
    place = None if judged.worst_rank is None else journal.place(judged.worst_rank)
    return {
        **fields_of(judged, "metric", "labels", "unit", "status", "value", "interval", "worst_rank", "margin"),
        "worst_host": place.host if place is not None else "",
        "worst_gpu_uuid": place.uuid if place is not None else "",
        "limit": judged.limit,
    }


def seal_problems(certificate: Certificate, *, known_digest: str | None = None) -> list[str]:
    """Return why a certificate is not valid by itself.

    Args:
        certificate: to check.
        known_digest: its digest, kept elsewhere.
    """
    found = []
    if not certificate.is_intact:
        found.append(
            f"it was changed after it was sealed: the SHA-256 of its content is {certificate.digest}, and it was "
            f"sealed with {certificate.sealed}"
        )
    if known_digest is not None and known_digest.lower() != certificate.digest:
        found.append(f"the SHA-256 of its content is {certificate.digest}, not {known_digest}")
    if certificate.content.accepted:
        found += [f"it contradicts itself: it states accepted, and {why}" for why in _contradictions(certificate)]
    return found


def _contradictions(certificate: Certificate) -> Iterator[str]:
    content = certificate.content
    if not certificate.is_accepted:
        yield "its verdict, its run or its reasons state otherwise"
    bad = [test.nodeid for test in content.tests if test.outcome not in ("passed", "skipped")]
    if bad:
        yield f"{len(bad)} of its tests did not pass, such as {bad[0]}"
    values = [one for test in content.tests for one in test.measurements]
    missed = [one.metric for one in values if one.status not in ("passed", "recorded")]
    if missed:
        yield f"{len(missed)} of its values did not keep their limit, such as {missed[0]}"
    if not any(one.status == "passed" for one in values):
        yield "none of its values was compared with a limit"
    uuids = [gpu.get("uuid", "").casefold() for node in content.nodes for gpu in node.gpus]
    nnodes, world_size = (content.run.get(key) for key in ("nnodes", "world_size"))
    if (len(content.nodes), len(uuids)) != (nnodes, world_size):
        yield (
            f"it has {len(content.nodes)} nodes with {len(uuids)} GPUs, and its run {nnodes} nodes with {world_size} "
            "ranks"
        )
    if len(set(uuids)) < len(uuids):
        yield "two of its GPUs have the same UUID"


def journal_digest(path: Path, slim: Callable[[TestResult], TestResult] | None = None) -> tuple[str, Journal]:
    """Return the SHA-256 of a journal's file, and the journal: both of the same bytes. ``slim`` as ``journal.read``.

    Raises:
        JournalError: it cannot be read, or changes while it is.
    """
    before = _sha256(path)
    journal = read(path, slim=slim)
    if _sha256(path) != before:
        raise JournalError(f"{path}: it is being written; wait until its run has ended")
    return before, journal


def journal_mismatches(certificate: Certificate, journal: Journal, sha256: str) -> list[str]:
    """Return where a certificate differs from its journal.

    Args:
        certificate: to check.
        journal: of the run that it should be of, with samples.
        sha256: of the journal's file.
    """
    named = certificate.content.journal.get("sha256")
    if named != sha256:
        return [f"it is of another journal, with the SHA-256 {named}; this one has {sha256}"]
    content = {
        key: value for key, value in certificate.record.items() if key not in ("made", "format", "schema_version")
    }
    expected = certificate_content(journal, sha256=sha256)
    if canonical(content) == canonical(expected):
        return []
    places = list(_differing(content, expected))
    return [
        f"it differs from its journal: {some_of(places, 5)} (it was written by pytest-gpucluster "
        f"{certificate.content.made.get('version')}; a later version may have more fields)"
    ]


def _differing(one: Any, other: Any, where: str = "") -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = sorted(set(one) | set(other))
        return [
            place
            for key in keys
            for place in _differing(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [place for index, pair in pairs for place in _differing(*pair, f"{where}[{index}]")]
    return [] if canonical(one) == canonical(other) else [where or "everything"]


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise JournalError(
            f"{path}: cannot be read: {error.strerror or error}; name a journal.jsonl, or the folder of a run"
        ) from None
