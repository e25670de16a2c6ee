"""A chart of what a test has left, with the figures that it shows as a table."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpucluster.reports.html.table import Table


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart. ``svg`` is empty where the file behind it cannot be shown; then ``caption`` says why."""

    title: str
    svg: Markup
    caption: str = ""
    table: Table | None = None
