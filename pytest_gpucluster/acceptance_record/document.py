"""The file of an acceptance record: sealed by the SHA-256 over its canonical form, read strictly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.acceptance_record.canonical import LARGEST, canonical, plain
from pytest_gpucluster.errors import RecordError

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


def read(path: Path) -> Document:
    """Read a record, also one that is not intact.

    Raises:
        RecordError: missing, no acceptance record, of a newer version, or so damaged that it says nothing for sure.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(
            f"{path}: no such file; name what `gpucluster accept JOURNAL --out FILE` has written"
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
