"""JUnit files for tests: they keep the schema of those that read them."""

import functools
from pathlib import Path

SCHEMA_FILE = Path(__file__).parent / "data" / "junit-10.xsd"


def require_junit(document):
    """Check that a JUnit file, as its text or its path, is valid. The schema is read once, when it is first needed."""
    _schema().validate(document)


@functools.cache
def _schema():
    import xmlschema

    return xmlschema.XMLSchema(str(SCHEMA_FILE))
