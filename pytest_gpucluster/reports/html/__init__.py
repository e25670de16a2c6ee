"""``report.html``: a run as one page that needs nothing beside it."""
