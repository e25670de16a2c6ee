"""``report.html``: a run as one self-contained page."""
