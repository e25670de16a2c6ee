"""``record_testsuite_property`` without pytest's own JUnit writer, which this plugin has replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest


class _Collector:
    """Stands where pytest's fixtures look for the JUnit writer."""

    family = "xunit1"
    """``record_property`` asks: in the families that it does not warn of, as here, properties reach the report."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send

    def add_global_property(self, name: str, value: object) -> None:
        """Put a property of the whole suite on record."""
        self._send({"type": "property", "name": str(name), "value": str(value)})

    def node_reporter(self, nodeid: object) -> _Collector:
        """Answer ``record_xml_attribute``."""
        return self

    def add_attribute(self, name: str, value: object) -> None:
        """Leave the attribute out: in a testcase of our own it would break the schema."""
        message = f"record_xml_attribute: {name!r} is left out of the report, whose schema has no place for it"
        warnings.warn(pytest.PytestWarning(message), stacklevel=2)


def register(config: pytest.Config, send: Callable[[Mapping[str, Any]], None]) -> None:
    """Let ``record_testsuite_property`` reach the journal."""
    from _pytest.junitxml import xml_key

    collector = _Collector(send)
    config.stash[xml_key] = collector  # type: ignore[misc]  # the fixtures use these methods only
    config.pluginmanager.register(collector)  # pytest's own unconfigure takes both back
