"""A YAML file as nodes with their places: every complaint has file, line and column.

A file is read node by node from its syntax tree, never through YAML's own ideas of types: there ``1e9`` is
text, ``012`` is ten, ``NO`` is False and the last of two equal keys wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from pytest_gpucluster.metrics import units

Node = yaml.Node


class Document:
    """One file and what is wrong with it. Complaints are collected instead of stopping at the first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.complaints: list[tuple[int, int, str]] = []
        """line, column, text"""

    def report(self) -> list[str]:
        """Return the complaints as ``file:line:column: ...``, in the order of the file."""
        places = sorted(set(self.complaints))
        return [f"{self.name}:{line}:{column}: {text}" for line, column, text in places]

    def root(self, path: Path, *, needs: str, block_scalar_hint: str) -> Node | None:
        """Return the syntax tree of a file, or None after a complaint.

        Args:
            path: the file.
            needs: what an empty one lacks.
            block_scalar_hint: what to write where a ``>`` was no comparison but the begin of a text.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            self.complaints.append((1, 1, f"the file cannot be read: {error.strerror or error}"))
            return None
        except UnicodeDecodeError as error:
            at = f"byte {error.start} is {error.object[error.start]:#x}"
            self.complaints.append((1, 1, f"the file is not UTF-8: {at}"))
            return None
        try:
            root = _compose(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            what = ", ".join(part for part in (error.context, error.problem) if part)
            hint = f"; {block_scalar_hint}" if "chomping or indentation" in what else ""
            self.complaints.append((*place, f"no valid YAML: {what}{hint}"))
            return None
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
            character = f"U+{ord(text[error.position]):04X}"
            self.complaints.append((line, column, f"no valid YAML: the character {character} is not allowed"))
            return None
        if root is None:
            self.complaints.append((1, 1, f"the file is empty; it needs {needs}"))
        return root

    def items(self, node: Node) -> list[Node]:
        """Return the nodes of a list; anything else counts as a list of one."""
        if not isinstance(node, yaml.SequenceNode):
            return [node]
        if not node.value:
            self.fail(node, "the list is empty")
        return list(node.value)

    def mapping(self, node: Node, what: str, allowed: Sequence[str] | None) -> dict[str, tuple[Node, Node]] | None:
        """Return key -> (key's node, value's node), or None if this is no mapping with anything in it.

        Keys that come twice, or that are not among the allowed ones (None: any is), are complained about and left out.
        """
        if not isinstance(node, yaml.MappingNode):
            empty = isinstance(node, yaml.ScalarNode) and node.value == ""
            self.fail(node, f"{what} is {'empty' if empty else 'no mapping'}; it must be keys with values")
            return None
        if not node.value:
            self.fail(node, f"{what} is empty; it must be keys with values")
            return None
        found: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            name = self.text(key, "a key")
            if name is None:
                continue
            if name in found:
                first = found[name][0].start_mark.line + 1
                self.fail(key, f"duplicate key {name!r}; the first one is at line {first}")
            elif allowed is not None and name not in allowed:
                hint = units.did_you_mean(name, allowed)
                self.fail(key, f"unknown key {name!r}; allowed are {', '.join(allowed)}{hint}")
            else:
                found[name] = key, value
        return found

    def require_version(self, root: Node, top: Mapping[str, tuple[Node, Node]], version: int) -> None:
        """Complain about a file of another ``schema_version``, or of none.

        A missing key is not reported after other complaints: it may be the one that was misspelt.
        """
        if "schema_version" in top:
            node = top["schema_version"][1]
            found = self.text(node, "schema_version")
            if found is not None and found != str(version):
                self.fail(node, f"schema_version is {found!r}; this version reads {version}")
        elif not self.complaints:
            self.fail(root, f"schema_version is missing; this version reads schema_version: {version}")

    def text(self, node: Node, what: str) -> str | None:
        """Return a single value as it is written, or None if it is empty or no single value."""
        if not isinstance(node, yaml.ScalarNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            self.fail(node, f"{what} must be a single value, not a {kind}")
            return None
        text: str = node.value.strip()
        if not text or node.tag == "tag:yaml.org,2002:null":
            self.fail(node, f"{what} is empty")
            return None
        return text

    def fail(self, node: Node, text: str) -> None:
        """Complain about a node."""
        self.complaints.append((node.start_mark.line + 1, node.start_mark.column + 1, text))


def _compose(text: str) -> Node | None:
    """Return the syntax tree. PyYAML's parser in C is ten times faster; that in Python says better what is wrong."""
    try:
        root: Node | None = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    return root
