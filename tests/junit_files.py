"""JUnit files for tests: they keep the schema of those that read them."""

import functools
import xml.etree.ElementTree as ET
from pathlib import Path

SCHEMA_FILE = Path(__file__).parent / "data" / "junit-10.xsd"


def require_junit(document):
    """Check that a JUnit file, as its text or its path, is valid. The schema is read once, when it is first needed."""
    _schema().validate(document)


@functools.cache
def _schema():
    import xmlschema

    return xmlschema.XMLSchema(str(SCHEMA_FILE))


class JunitFile:
    """The JUnit file at ``directory / junit_path``, which must be valid."""

    def __init__(self, path):
        self.directory, self.junit_path = path.parent, path

    @functools.cached_property
    def document(self):
        """Its text."""
        text = (self.directory / self.junit_path).read_text(encoding="utf-8")
        require_junit(text)
        return text

    @functools.cached_property
    def cases(self):
        """Every testcase in the order of the file. No name may come twice."""
        cases = list(ET.fromstring(self.document).iter("testcase"))
        names = [case.get("name") for case in cases]
        assert len(names) == len(set(names)), names
        return cases

    @functools.cached_property
    def verdicts(self):
        """Name of each testcase -> "passed" or "error: its message", which is one short line."""
        found = {}
        for case in self.cases:
            ends = [f"{child.tag}: {child.get('message') or ''}" for child in _ends(case)]
            found[case.get("name")] = ends[0] if ends else "passed"
            assert all("\n" not in end and len(end.partition(": ")[2]) <= 200 for end in ends), ends
        return found

    def case(self, name):
        """Return a testcase."""
        return next(case for case in self.cases if case.get("name") == name)

    def body(self, name):
        """Return the text of a testcase's failure, error or skip."""
        return "".join(child.text or "" for child in _ends(self.case(name)))


def _ends(case):
    return [child for child in case if child.tag in ("failure", "error", "skipped")]
