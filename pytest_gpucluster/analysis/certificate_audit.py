"""Whether a certificate is valid: unchanged since it was sealed, and made from the journal that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis.certificate import Document, canonical, certificate_content
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import Journal, read

_SHOWN = 5


def faults(document: Document, *, known_digest: str | None = None) -> list[str]:
    """Return why a record is not what was sealed, in itself.

    Args:
        document: the record.
        known_digest: what its digest is known to be, from elsewhere.
    """
    found = []
    if not document.is_intact:
        found.append(
            f"it was changed after it was sealed: the SHA-256 of what it says is {document.digest}, and it was sealed "
            f"with {document.sealed}"
        )
    if known_digest is not None and known_digest.lower() != document.digest:
        found.append(f"the SHA-256 of what it says is {document.digest}, not {known_digest}")
    if document.record["accepted"] is True:
        found += [f"it contradicts itself: it says accepted, and {why}" for why in _contradictions(document)]
    return found


def _contradictions(document: Document) -> Iterator[str]:
    """Yield what no record of an accepted run says, whoever has sealed it."""
    record = document.record
    if not document.is_accepted:
        yield "its verdict, its run or its reasons say no"
    tests = items(record, "tests")
    bad = [test.get("nodeid") for test in tests if test.get("outcome") not in ("passed", "skipped")]
    if bad:
        yield f"{len(bad)} of its tests did not pass, such as {bad[0]}"
    values = [one for test in tests for one in items(test, "measurements")]
    missed = [one.get("metric") for one in values if one.get("status") not in ("passed", "recorded")]
    if missed:
        yield f"{len(missed)} of its values did not keep their limit, such as {missed[0]}"
    if not any(one.get("status") == "passed" for one in values):
        yield "none of its values was held against a limit"
    nodes = items(record, "nodes")
    gpus = [gpu for node in nodes for gpu in items(node, "gpus")]
    run = record["run"]
    if (len(nodes), len(gpus)) != (run.get("nnodes"), run.get("world_size")):
        yield (
            f"it has {len(nodes)} nodes with {len(gpus)} GPUs, and its run {run.get('nnodes')} nodes with "
            f"{run.get('world_size')} ranks"
        )
    if len({str(gpu.get("uuid")).casefold() for gpu in gpus}) < len(gpus):
        yield "two of its GPUs have one UUID"


def items(told: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list in a record, which anybody may have sealed: what is no object is left out."""
    value = told.get(key)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def journal_digest(path: Path) -> tuple[str, Journal]:
    """Return a journal and the SHA-256 of its file. Both are of the same bytes.

    Raises:
        JournalError: it cannot be read, or changes while it is.
    """
    before = _sha256(path)
    journal = read(path)
    if _sha256(path) != before:
        raise JournalError(f"{path}: it is being written; wait until its run has ended")
    return before, journal


def faults_beside(document: Document, journal: Journal, sha256: str) -> list[str]:
    """Return where a record does not say what its journal says.

    Args:
        document: the record.
        journal: the run that it should be of, with its samples.
        sha256: of the journal's file.
    """
    named = document.record["journal"].get("sha256")
    if named != sha256:
        return [f"it is of another journal: that has the SHA-256 {named}, and this one {sha256}"]
    told = {key: value for key, value in document.record.items() if key not in ("made", "format", "schema_version")}
    expected = certificate_content(journal, sha256=sha256)
    if canonical(told) == canonical(expected):
        return []
    places = list(_differing(told, expected))
    version = document.record["made"].get("version")
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return [
        f"it does not say what its journal says: {', '.join(places[:_SHOWN])}{more} (it was made by pytest-gpucluster "
        f"{version}; a later version may say more)"
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
    except FileNotFoundError:
        raise JournalError(f"{path}: no such journal; name a journal.jsonl, or the folder of a run") from None
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror or error}") from None
