"""The documentation as a site with search, by Sphinx: ``make docs-site`` writes it to build/site."""

project = "pytest-gpucluster"
root_doc = "README"
extensions = ["myst_parser", "sphinx_external_toc"]
external_toc_path = "contents.yml"
exclude_patterns = ["images"]
myst_heading_anchors = 4
"""Headings that ``page.md#heading`` may name, by GitHub's rule."""
suppress_warnings = ["myst.xref_missing"]
"""Of pages of the repository that are not of the site. tests/docs checks all links."""
html_theme = "furo"
html_title = project
html_show_copyright = False
