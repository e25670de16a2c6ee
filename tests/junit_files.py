"""JUnit files for tests: they keep the schema of those that read them."""

from __future__ import annotations

import functools
from pathlib import Path

SCHEMA_FILE = Path(__file__).parent / "data" / "junit-10.xsd"


def require_junit(document: str) -> None:
    """Check that a JUnit file, as its text or its path, is valid. The schema is read once, when it is first needed."""
    _schema().validate(document)


@functools.cache
def _schema():  # type: ignore[no-untyped-def]  # xmlschema takes as long to import as to read it
    import xmlschema

    return xmlschema.XMLSchema(str(SCHEMA_FILE))
