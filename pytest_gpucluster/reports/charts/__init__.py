"""Charts as inline SVG, readable in print, without colour and without scripts.

Colours are variables of the page (``--ink``, ``--muted``, ``--grid``, ``--good``, ``--bad``, ``--accent``), each with a
default for other pages. Each chart has a text alternative.
"""
