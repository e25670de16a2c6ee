"""Charts as inline SVG, readable in print, without colour and without scripts.

Colours are variables of the page (``--ink``, ``--muted``, ``--grid``, ``--good``, ``--bad``, ``--accent``), each with a
default for other pages. Each chart has a text alternative.
"""

from pytest_gpucluster.reports.charts.dots import rank_dots, rank_dots_key
from pytest_gpucluster.reports.charts.heatmap import Cell, heat_map
from pytest_gpucluster.reports.charts.series import Level, Line, limit_bar, line_chart

__all__ = ["Cell", "Level", "Line", "heat_map", "limit_bar", "line_chart", "rank_dots", "rank_dots_key"]
