"""The acceptance certificate of a run: its content, the cluster's parts by node and slot, and its sealed file.

The content is a pure function of a journal, so that it can be made again and compared. The file is sealed by the
SHA-256 over its canonical form, and read strictly.

Source: RFC 8785, JSON Canonicalization Scheme: no white space, keys in the order of their UTF-16 code units, numbers
as ECMAScript writes them (ECMA-262, Number::toString), texts in UTF-8 with the shortest escapes. Left out of it is
what the certificates never hold, and refused: NaN, infinities, whole numbers beyond 2^53 - 1, and lone surrogates.
:func:`plain` makes texts of these.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis.certificate_blockers import objections
from pytest_gpucluster.errors import LaunchError, RecordError
from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import RankPlace, TestResult
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.text import rank_ranges

OF_GPU = {
    "uuid": "UUID",
    "serial": "serial number",
    "board_part_number": "board part number",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP firmware",
    "pci_bus_id": "PCI address",
    "name": "name",
}
"""Key of a GPU -> what it is called."""

OF_ADAPTER = {"guid": "GUID", "board": "board (PSID)", "firmware": "firmware", "pci_bus_id": "PCI address"}
"""Key of a network adapter -> what it is called."""

COMPONENTS = ("driver", "cuda", "nccl", "torch", "python", "pytest_gpucluster")
"""What a node has installed, besides what its parts hold themselves."""

_PORTS = "fabric.active_ports"
"""The measurement beside which each node tells its network adapters."""


def node_parts(journal: Journal) -> list[dict[str, Any]]:
    """Return each node with its GPUs, its network adapters and its versions; text throughout, "" for what is not
    known."""
    by_node: dict[tuple[int, str], list[RankPlace]] = {}
    for place in journal.cluster.ranks if journal.cluster is not None else ():
        by_node.setdefault((place.node_rank, place.host), []).append(place)
    told = _adapters(journal)
    return [
        {
            "node_rank": node_rank,
            "host": host,
            "versions": _versions(places),
            "gpus": [_gpu(place) for place in sorted(places, key=lambda place: place.local_rank)],
            "adapters": next((told[place.rank] for place in places if place.rank in told), None),
        }
        for (node_rank, host), places in sorted(by_node.items())
    ]


def missing_parts(found: list[dict[str, Any]]) -> list[str]:
    """Return in words what is not known of the parts of these nodes."""
    absent: dict[str, list[int]] = {}
    for node in found:
        for gpu in node["gpus"]:
            for key, words in OF_GPU.items():
                if not gpu[key]:
                    absent.setdefault(words, []).append(gpu["rank"])
    lines = [f"{words} of the GPU of {rank_ranges(ranks)}" for words, ranks in absent.items()]
    of_nodes: dict[str, list[str]] = {}
    for node in found:
        for component in COMPONENTS:
            if not node["versions"][component]:
                of_nodes.setdefault(component, []).append(node["host"])
        if node["adapters"] is None:
            of_nodes.setdefault("network adapters", []).append(node["host"])
        for adapter in node["adapters"] or ():
            for key, words in OF_ADAPTER.items():
                if not adapter[key]:
                    what = f"{words} of {adapter['name'] or 'a network adapter'}"
                    of_nodes.setdefault(what, []).append(node["host"])
    lines += [f"{what} on {_listed(hosts)}" for what, hosts in of_nodes.items()]
    return lines


def _listed(hosts: list[str]) -> str:
    """Return hosts in Slurm's short form, or one by one where a name has no such form."""
    try:
        return compress_hostlist(hosts)
    except LaunchError:
        return ", ".join(hosts)


def _gpu(place: RankPlace) -> dict[str, Any]:
    known = place.gpu or {}
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "index": known.get("index", ""),
        "memory_bytes": known.get("memory_bytes", ""),
        **{key: known.get(key, "") for key in OF_GPU},
    }


def _versions(places: list[RankPlace]) -> dict[str, str]:
    """Return the versions of a node; the preflight refuses ranks that differ, so several are shown as they are."""
    return {
        component: " / ".join(sorted({place.versions.get(component, "") for place in places} - {""}))
        for component in COMPONENTS
    }


def _adapters(journal: Journal) -> dict[int, list[dict[str, str]]]:
    """Return rank -> the network adapters that it has told for its node; an empty list where there are none."""
    found: dict[int, list[dict[str, str]]] = {}
    for result in journal.results:
        for judged in result.measurements:
            if judged.metric != _PORTS:
                continue
            for rank, told in judged.telemetry.items():
                listed = told.get("adapters")
                if isinstance(listed, list) and all(isinstance(one, Mapping) for one in listed):
                    found[rank] = [{key: str(one.get(key, "")) for key in ("name", *OF_ADAPTER)} for one in listed]
    return found


LARGEST = 2**53 - 1
"""Beyond it not every whole number is a double. Source: RFC 7493, section 2.2."""


def canonical(value: object) -> bytes:
    """Return the canonical form of a value of plain JSON types.

    >>> canonical({"b": 1e21, "a": [0.1, 1.0, -0.0, None, "€"]}).decode()
    '{"a":[0.1,1,0,null,"€"],"b":1e+21}'

    Raises:
        ValueError: it holds what has no canonical form here.
    """
    try:
        return _written(value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a text holds a lone surrogate: {error.object[error.start : error.end]!r}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain(value: object) -> object:
    """Return a value with everything that has no canonical form as text; keys become texts.

    >>> plain({"a": float("nan"), 1: (2**60, "\\ud800")})
    {'a': 'NaN', '1': ['1152921504606846976', '\\\\ud800']}
    """
    if isinstance(value, Mapping):
        return {str(plain(str(key))): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return str(value)
    return value


def _written(value: object) -> str:
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        if abs(value) > LARGEST:
            raise ValueError(f"{value} is beyond 2^53 - 1, up to which every JSON reader is exact")
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is no text")
        # With surrogates passed on, a lone one is refused when the whole is encoded.
        keys = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{_written(key)}:{_written(value[key])}" for key in keys) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    raise ValueError(f"{type(value).__name__} is no JSON type")


def _number(value: float) -> str:
    """Write a number as ECMAScript does. Python's repr has the same digits, the fewest that give it back."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number")
    if value == 0:
        return "0"
    told = Decimal(repr(value)).normalize().as_tuple()
    digits, sign = "".join(map(str, told.digits)), "-" if told.sign else ""
    # The point stands after so many of the digits.
    point = len(digits) + int(told.exponent)
    if len(digits) <= point <= 21:
        text = digits + "0" * (point - len(digits))
    elif 0 < point <= 21:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        text = f"{digits[0]}{'.' + digits[1:] if len(digits) > 1 else ''}e{point - 1:+d}"
    return sign + text


FORMAT = "pytest-gpucluster acceptance record"
SCHEMA_VERSION = 1
DIGEST = "SHA-256 over the canonical JSON (RFC 8785) of the value of 'record'"

_KEYS = {
    "accepted": bool,
    "not_accepted_because": list,
    "verdict": dict,
    "run": dict,
    "journal": dict,
    "limits": dict,
    "nodes": list,
    "missing": list,
    "tests": list,
    "made": dict,
}


@dataclass(frozen=True, kw_only=True)
class Document:
    """A record as it was read. It is what was sealed only if :attr:`is_intact`."""

    path: Path
    record: Mapping[str, Any]
    sealed: str
    """The digest that stands in the file."""
    digest: str
    """The digest of what the record says now."""

    @property
    def is_intact(self) -> bool:
        """Tell whether the record says what it said when it was sealed."""
        return self.sealed == self.digest

    @property
    def is_accepted(self) -> bool:
        """Tell whether it is the record of a run that was accepted, in all of the places that say so."""
        word, code = self.record["verdict"].get("word"), self.record["verdict"].get("exit")
        run = self.record["run"]
        return (
            self.record["accepted"] is True
            and not self.record["not_accepted_because"]
            and (word, code) == ("ACCEPTED", 0)
            and run.get("rehearsal") is False
            and run.get("selection") is False
        )


def digest(record: Mapping[str, Any]) -> str:
    """Return the digest that seals a record, as hexadecimal text.

    Raises:
        ValueError: it holds what has no canonical form.
    """
    return hashlib.sha256(canonical(record)).hexdigest()


def sealed(content: Mapping[str, Any], *, at: str, by: str, note: str, version: str) -> tuple[str, str]:
    """Return the text of a record's file, and its digest.

    Args:
        content: of :func:`content.content`.
        at: when it is made, ISO 8601.
        by: who makes it.
        note: what they have to say.
        version: of this package.
    """
    made = plain({"at": at, "by": by, "note": note, "version": version})
    record = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **content, "made": made}
    found = digest(record)
    # Indented, for people; the digest is over the canonical form, so white space does not count.
    told = {"sha256": found, "digest": DIGEST, "record": record}
    return json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n", found


def read_certificate(path: Path) -> Document:
    """Read a record, also one that is not intact.

    Raises:
        RecordError: missing, no acceptance record, of a newer version, or so damaged that it says nothing for sure.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(
            f"{path}: no such file; name what `gpucluster certificate create JOURNAL --out FILE` has written"
        ) from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: no acceptance record: not UTF-8 at byte {error.start}") from None
    try:
        told = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: no acceptance record, or cut off: {error}") from None
    record = told.get("record") if isinstance(told, dict) else None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RecordError(f"{path}: not an acceptance record of this project")
    _require_known(path, told, record)
    try:
        found = digest(record)
    except ValueError as error:
        raise RecordError(f"{path}: damaged: {error}") from None
    return Document(path=path, record=record, sealed=told["sha256"], digest=found)


def _require_known(path: Path, told: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(f"{path}: not an acceptance record of this project: it has no schema_version")
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{path}: written with schema_version {version}; this version reads up to {SCHEMA_VERSION}: read it with "
            "the version that wrote it, or a newer one"
        )
    strangers = sorted(set(told) - {"sha256", "digest", "record"})
    if strangers:
        raise RecordError(f"{path}: damaged: {', '.join(map(repr, strangers))} stands outside of what is sealed")
    if told.get("digest") != DIGEST or not isinstance(told.get("sha256"), str):
        raise RecordError(f"{path}: damaged: it must say sha256, and digest: {DIGEST!r}")
    for key, kind in _KEYS.items():
        if not isinstance(record.get(key), kind):
            raise RecordError(f"{path}: damaged: {key!r} must be there, as {_JSON[kind]}")


_JSON = {bool: "true or false", list: "a list", dict: "an object"}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # Which of the two counts would depend on who reads it.
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _whole(text: str) -> int | float:
    """Read a whole number as every JSON reader does: beyond 2^53 - 1 it is a double."""
    return int(text) if len(text) < 18 and abs(int(text)) <= LARGEST else float(text)


def certificate_content(journal: Journal, *, sha256: str) -> dict[str, Any]:
    """Return all that a record holds but by whom and when it was made.

    Args:
        journal: of the run, read with its samples: what each node has told of its network adapters is among them.
        sha256: of the journal's file.
    """
    against, found = objections(journal), node_parts(journal)
    limits, end = journal.limits, journal.end
    told = {
        "accepted": not against,
        "not_accepted_because": list(against),
        "verdict": {"word": journal.verdict, "exit": journal.exit, "reason": journal.reason},
        "run": {
            "run_id": journal.run.run_id,
            "started_at": journal.run.started_at,
            "ended_at": end.at if end is not None else "",
            "host": journal.run.hostname,
            "launcher": journal.run.launcher,
            "world_size": journal.run.world_size,
            "nnodes": journal.run.nnodes,
            "profile": journal.workload.profile if journal.workload is not None else "",
            "plugin_version": journal.run.plugin_version,
            "rehearsal": journal.run.rehearsal,
            "selection": journal.run.selection,
            "expected": _option(journal, "expect"),
            "merged_from": [
                {
                    "run_id": one.run_id,
                    "started_at": one.started_at,
                    "verdict": one.verdict,
                    "journal": one.journal,
                    "sha256": one.sha256,
                }
                for one in journal.run.merged_from
            ],
            "merged_despite": list(journal.run.merged_despite),
        },
        "journal": {"sha256": sha256},
        "limits": {
            "sku": limits.sku if limits is not None else None,
            "gpu_name": limits.gpu_name if limits is not None else None,
            "files": [
                {"path": path, "sha256": digest} for path, digest in (limits.files if limits is not None else ())
            ],
        },
        "nodes": found,
        "missing": missing_parts(found),
        "tests": [_test(result, journal) for result in journal.results],
    }
    made = plain(told)
    assert isinstance(made, dict)
    return made


def _option(journal: Journal, name: str) -> str:
    """Return the value of an option that was given; "" if it was not."""
    value, _ = journal.run.options.get(name, ("None", ""))
    return "" if value == "None" else value


def _test(result: TestResult, journal: Journal) -> dict[str, Any]:
    return {
        "nodeid": result.nodeid,
        "criterion": result.criterion,
        "outcome": result.outcome,
        "attempts": result.attempts,
        "message": result.message,
        "measurements": [_measurement(judged, journal) for judged in result.measurements],
    }


def _measurement(judged: JudgedMetric, journal: Journal) -> dict[str, Any]:
    limit = judged.limit
    place = None if judged.worst_rank is None else journal.place(judged.worst_rank)
    return {
        "metric": judged.metric,
        "labels": dict(judged.labels),
        "unit": judged.unit,
        "status": judged.status,
        "value": judged.value,
        "interval": None if judged.interval is None else list(judged.interval),
        "worst_rank": judged.worst_rank,
        "worst_host": place.host if place is not None else "",
        "worst_gpu_uuid": (place.gpu or {}).get("uuid", "") if place is not None else "",
        "margin": judged.margin,
        "limit": None
        if limit is None
        else {
            "min": limit.min,
            "max": limit.max,
            "min_ratio_to_median": limit.min_ratio_to_median,
            **({} if limit.expected is None else {"expected": limit.expected}),
            "expect_transport": None if limit.expect_transport is None else list(limit.expect_transport),
            "source": limit.source,
            "origin": limit.origin,
        },
    }
