"""Whether a certificate is valid: unchanged since it was sealed, and derived from the journal that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis.certificate import Certificate, canonical, certificate_content
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import Journal, read
from pytest_gpucluster.text import some_of


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
    if certificate.record["accepted"] is True:
        found += [f"it contradicts itself: it states accepted, and {why}" for why in _contradictions(certificate)]
    return found


def _contradictions(certificate: Certificate) -> Iterator[str]:
    """Yield what contradicts an accepted run."""
    record = certificate.record
    if not certificate.is_accepted:
        yield "its verdict, its run or its reasons state otherwise"
    tests = items(record, "tests")
    bad = [test.get("nodeid") for test in tests if test.get("outcome") not in ("passed", "skipped")]
    if bad:
        yield f"{len(bad)} of its tests did not pass, such as {bad[0]}"
    values = [one for test in tests for one in items(test, "measurements")]
    missed = [one.get("metric") for one in values if one.get("status") not in ("passed", "recorded")]
    if missed:
        yield f"{len(missed)} of its values did not keep their limit, such as {missed[0]}"
    if not any(one.get("status") == "passed" for one in values):
        yield "none of its values was compared with a limit"
    nodes = items(record, "nodes")
    gpus = [gpu for node in nodes for gpu in items(node, "gpus")]
    run = record["run"]
    if (len(nodes), len(gpus)) != (run.get("nnodes"), run.get("world_size")):
        yield (
            f"it has {len(nodes)} nodes with {len(gpus)} GPUs, and its run {run.get('nnodes')} nodes with "
            f"{run.get('world_size')} ranks"
        )
    if len({str(gpu.get("uuid")).casefold() for gpu in gpus}) < len(gpus):
        yield "two of its GPUs have the same UUID"


def items(record: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list in a certificate. Anyone can seal one: entries of another type are left out."""
    value = record.get(key)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def journal_digest(path: Path) -> tuple[str, Journal]:
    """Return the SHA-256 of a journal's file, and the journal: both of the same bytes.

    Raises:
        JournalError: it cannot be read, or changes while it is.
    """
    before = _sha256(path)
    journal = read(path)
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
    named = certificate.record["journal"].get("sha256")
    if named != sha256:
        return [f"it is of another journal, with the SHA-256 {named}; this one has {sha256}"]
    content = {
        key: value for key, value in certificate.record.items() if key not in ("made", "format", "schema_version")
    }
    expected = certificate_content(journal, sha256=sha256)
    if canonical(content) == canonical(expected):
        return []
    places = list(_differing(content, expected))
    version = certificate.record["made"].get("version")
    return [
        f"it differs from its journal: {some_of(places, 5)} (it was written by pytest-gpucluster "
        f"{version}; a later version may have more fields)"
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
